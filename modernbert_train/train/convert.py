"""`python -m modernbert_train export FILE.pt`: a checkpoint file of Composer as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from modernbert_train.export.hf import export
from modernbert_train.train.card import model_card
from modernbert_train.train.origin import open_source


def convert_model(name: str, out: Path, licence: str | None = None) -> Path:
    """Write weights of elsewhere, unchanged, as transformers loads them.

    Args:
        name: see `open_source`.
        out: the folder; an earlier export there is replaced, anything else refused.
        licence: see `model_card`.

    Returns:
        The folder.

    Raises:
        DataError, StorageError: see `open_source` and `export`.
    """
    source = open_source(name)
    sections = {
        "": f"A ModernBERT encoder ([arXiv 2412.13663](https://arxiv.org/abs/2412.13663)), converted from "
        f"{Path(name).name}, a checkpoint of its training.",
        "Data, training and evaluation": "Not recorded in that file; ask who trained it. Nor is the longest sequence: "
        f"{source.max_tokens:,} tokens is what a configuration states or transformers assumes.",
    }
    card = model_card(Path(name).stem, sections, licence=licence)
    with source.tokenizer_folder() as tokenizer:
        export(
            source.weights(),
            source.model,
            global_rope_theta=source.global_rope_theta,
            max_tokens=source.max_tokens,
            tokenizer_folder=tokenizer,
            out=out,
            card=card,
        )
    print(out)
    return out
