"""`python -m modernbert_train grow`: a smaller model, enlarged, as a Hugging Face folder that a run can start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.tiling import GROWING, Mode, grow
from modernbert_train.weights.hf_folder import export
from modernbert_train.weights.model_card import model_card
from modernbert_train.weights.source import Source, open_source


def grow_model(name: str, model: ModernBertConfig, mode: Mode, out: Path, licence: str | None = None) -> Path:
    """Write a larger model, with the tokenizer, RoPE bases and length of the smaller one.

    Args:
        name: see `open_source`.
        model: the larger architecture.
        mode: see `models.tiling`.
        out: the folder; an earlier export there is replaced, anything else refused.
        licence: see `model_card`.

    Returns:
        The folder.

    Raises:
        ConfigError: the smaller architecture cannot grow into the larger.
        DataError, StorageError: see `open_source` and `export`.
    """
    source = open_source(name)
    card = _card(name, source, model, mode, licence)
    with source.tokenizer_folder() as tokenizer:
        export(
            grow(source.weights(), source.model, model, mode),
            replace(
                model,
                global_rope_theta=source.model.global_rope_theta,
                local_rope_theta=source.model.local_rope_theta,
            ),
            max_tokens=source.max_tokens,
            tokenizer_folder=tokenizer,
            out=out,
            card=card,
        )
    print(out)
    return out


def _card(name: str, source: Source, model: ModernBertConfig, mode: Mode, licence: str | None) -> str:
    sizes = "\n".join(f"| {key} | {getattr(source.model, key):,} | {getattr(model, key):,} |" for key in GROWING)
    sections = {
        "": f"The weights of {name}, enlarged by center tiling (mode {mode}) and not trained since: a start "
        "for pretraining, `weights.init_from`, and not a model to use.",
        "Sizes": f"| | from | to |\n| --- | --- | --- |\n{sizes}",
    }
    return model_card("A grown start", sections, licence=licence, base=name)
