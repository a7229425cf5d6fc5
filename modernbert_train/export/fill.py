"""The likeliest tokens for a [MASK], from an exported model, as any user of transformers would get them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from modernbert_train.errors import DataError


def fill(model_folder: str | Path, texts: Sequence[str], top: int = 5) -> str:
    """Print-ready lines: each text, and the likeliest tokens for its [MASK] with their probabilities.

    Args:
        model_folder: an exported model.
        texts: each with exactly one [MASK].
        top: how many tokens.

    Raises:
        DataError: the folder holds no model, or a text has not exactly one [MASK].
    """
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not (Path(model_folder) / "config.json").is_file():
        raise DataError(f"{model_folder}: holds no exported model. Write one with `python -m modernbert_train export`.")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForMaskedLM.from_pretrained(model_folder).eval()
    lines = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt")
        places = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
        if len(places) != 1:
            raise DataError(f"{text!r}: has {len(places)} [MASK], expected one. Write the text with one [MASK] in it.")
        with torch.no_grad():
            logits_V = model(**encoded).logits[0, places[0]]
        probabilities, ids = logits_V.softmax(-1).topk(top)
        guesses = [
            f"{json.dumps(tokenizer.decode([token]), ensure_ascii=False)} {probability:.0%}"
            for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True)
        ]
        lines += [text, "    " + "   ".join(guesses)]
    return "\n".join(lines)
