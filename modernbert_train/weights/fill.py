"""The likeliest tokens for a [MASK], equal to what transformers predicts with an export of the model.

An encoder reads the whole text. A decoder reads the text before the [MASK] and predicts the next token. An XLNet
trained in permuted orders, as the published ones, predicts from a query token, and no token sees the [MASK] itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modernbert_train.config.read_yaml import runs_beside
from modernbert_train.core.files import anything_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import CONVENTION
from modernbert_train.weights.formats import FORMATS, read_content, xlnet
from modernbert_train.weights.formats.config_json import BEFORE, CONFIG_JSON, PREDICTS_FROM, read_object
from modernbert_train.weights.names import look_up

_DECODERS = ("ForCausalLM", "LMHeadModel")  # suffixes of decoders' class names


def fill(name: str | Path, texts: Sequence[str], top: int = 5) -> str:
    """Return lines to print: each text, and the likeliest tokens for its [MASK] with their probabilities.

    Args:
        name: see `open_model`; or a folder that transformers opens for masked or causal language modelling.
        texts: each with exactly one [MASK], which stands for any tokenizer's mask token.
        top: number of tokens.

    Raises:
        DataError, StorageError: there is no such model, or a text does not have exactly one [MASK].
    """
    import torch

    with _folder_of(name) as (folder, where):
        tokenizer, model, from_before, by_query = _open(folder, where)
    lines = []
    for text in texts:
        encoded = tokenizer(text.replace(CONVENTION["mask"], tokenizer.mask_token), return_tensors="pt")
        positions = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
        if len(positions) != 1:
            raise DataError(
                f"{text!r}: has {len(positions)} [MASK], expected one. Write the text with one [MASK] in it."
            )
        if from_before and positions[0] == 0:
            raise DataError(
                f"{text!r}: no text before its [MASK], and this model predicts from the token before. Add text."
            )
        if by_query:
            size = encoded["input_ids"].shape[1]
            is_place = torch.zeros(1, 1, size).index_fill(2, positions, 1.0)
            encoded |= {"perm_mask": is_place.expand(1, size, size), "target_mapping": is_place}
        with torch.no_grad():
            logits_V = model(**encoded).logits[0, 0 if by_query else int(positions[0]) - from_before]
        if not logits_V.isfinite().all():
            raise DataError(f"{name}: predicts numbers that are not finite. Restore its weights from a copy.")
        probabilities, ids = logits_V.softmax(-1).topk(min(top, len(logits_V)))
        guesses = [
            f"{json.dumps(tokenizer.decode([token]), ensure_ascii=False)} {probability:.0%}"
            for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True)
        ]
        lines += [text, "    " + "   ".join(guesses)]
    return "\n".join(lines)


_LARGEST = {  # config.json's key -> largest value accepted
    "num_hidden_layers": 1000, "n_layer": 1000, "hidden_size": 1 << 16, "d_model": 1 << 16,
    "intermediate_size": 1 << 18, "d_inner": 1 << 18, "vocab_size": 1 << 25,
}  # fmt: skip


@contextmanager
def _folder_of(name: str | Path) -> Iterator[tuple[Path, Path]]:
    """Yield a folder that transformers opens while the block runs, a temporary export of any model known here; and the
    model's own folder."""
    from modernbert_train.weights.export import export_source
    from modernbert_train.weights.source import open_model

    looked_up = look_up(name, any_kind=True)
    folder = looked_up.path if looked_up.kind != "hub" else looked_up.folder
    if folder is None:  # nothing is fetched
        raise DataError(f"{name}: no such folder. {runs_beside(Path(name))} Or fetch that model: hf download {name}.")
    if looked_up.kind in ("folder", "hub"):
        raw = read_content(folder)
        kind = raw.get("model_type")
        is_wide = kind == "electra" and raw.get("embedding_size", 128) != raw.get("hidden_size", 256)  # a generator
        if isinstance(kind, str) and (kind not in FORMATS or is_wide):  # perhaps transformers knows it
            yield folder, folder
            return
    source = open_model(folder)
    if source.missing:
        raise DataError(
            f"{source.folder}: lacks {', '.join(source.missing)}, which predicting tokens needs. Name a model with "
            "its masked-LM head."
        )
    with tempfile.TemporaryDirectory() as parent:
        yield export_source(source, Path(parent) / "hf"), source.folder


def _open(folder: Path, where: Path) -> tuple[Any, Any, bool, bool]:
    """Return tokenizer, model, and whether the token before the [MASK], or else a query token, predicts it.

    No code of the folder runs, and nothing is fetched; messages name `where`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

    disable_progress_bar()
    require_own_files(folder)
    raw = read_object(folder / CONFIG_JSON)
    kind, named = raw.get("model_type"), raw.get("architectures")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise DataError(
            f"{where / CONFIG_JSON}: model_type={str(kind)[:80]}, which transformers does not know. Name the folder "
            "of an exported model, with model_type=modernbert. A neobert needs code from the hub, which this program "
            "does not run."
        )
    for key, limit in _LARGEST.items():
        # transformers would build it before it reads the weights
        if isinstance(raw.get(key), int) and raw[key] > limit:
            raise DataError(f"{where / CONFIG_JSON}: {key}={str(raw[key])[:30]}, above the limit of {limit:,}.")
    generates = isinstance(named, list) and any(str(each).endswith(_DECODERS) for each in named)
    opener = AutoModelForCausalLM if generates else AutoModelForMaskedLM
    both = kind == xlnet.FORMAT.model_type  # transformers has one class for causal and bidirectional XLNet
    plain = raw.get("is_causal") is False or raw.get("use_bidirectional_attention") is True
    sees_all = raw.get("attn_type") != "uni" if both else plain
    by_query = both and sees_all and raw.get(PREDICTS_FROM) != xlnet.OWN_PLACE
    settings = {"trust_remote_code": False, "local_files_only": True}
    verbosity = get_verbosity()
    set_verbosity_error()  # unused heads are expected; missing weights raise an error below
    remedy = "Restore the folder from a copy, or export it again."
    try:
        with anything_as(DataError, f"{where}: transformers cannot open it", remedy):
            tokenizer = AutoTokenizer.from_pretrained(folder, **settings)
            opened: Any = opener.from_pretrained(folder, output_loading_info=True, **settings)
            model, loaded = opened
    finally:
        set_verbosity(verbosity)
    # an ESM's head for contacts is not exported, and predicts no tokens
    if missing := [name for name in loaded["missing_keys"] if kind not in FORMATS or FORMATS[kind].today(name)]:
        raise DataError(
            f"{where}: the weights lack {min(missing)}, which predicting tokens needs. Name a model "
            "with its masked-LM head."
        )
    if tokenizer.mask_token_id is None or len(tokenizer) > model.config.vocab_size:
        raise DataError(
            f"{where}: the tokenizer has {len(tokenizer)} entries and the mask token {tokenizer.mask_token}, the "
            f"model has vocab_size={model.config.vocab_size}. Replace it by the tokenizer that the model was trained "
            "with."
        )
    from_before = (generates and not sees_all) or raw.get(PREDICTS_FROM) == BEFORE
    return tokenizer, model.eval(), from_before, by_query
