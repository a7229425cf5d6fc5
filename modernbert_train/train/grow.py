"""`python -m modernbert_train grow`: a smaller model, enlarged, as a Hugging Face folder that a run can start from."""

from __future__ import annotations

from pathlib import Path

from modernbert_train.config.schema import ModelConfig
from modernbert_train.export.hf import export
from modernbert_train.models.tiling import GROWING, grow
from modernbert_train.train.origin import Source, open_source


def grow_model(name: str, model: ModelConfig, out: Path) -> Path:
    """Write a larger model, with the tokenizer, RoPE base and length of the smaller one.

    Args:
        name: see `open_source`.
        model: the larger architecture; its grow_mode says how.
        out: the folder; an earlier export there is replaced, anything else refused.

    Returns:
        The folder.

    Raises:
        ConfigError: the smaller architecture cannot grow into the larger.
        DataError, StorageError: see `open_source` and `export`.
    """
    source = open_source(name)
    export(
        grow(source.weights(), source.model, model, model.grow_mode),
        model,
        global_rope_theta=source.global_rope_theta,
        max_tokens=source.max_tokens,
        tokenizer_folder=source.tokenizer,
        out=out,
        card=_card(name, source, model),
    )
    print(out)
    return out


def _card(name: str, source: Source, model: ModelConfig) -> str:
    sizes = "\n".join(f"| {key} | {getattr(source.model, key):,} | {getattr(model, key):,} |" for key in GROWING)
    return f"""# A grown start

The weights of {name}, enlarged by center tiling (mode {model.grow_mode}) and not trained since: a start for
pretraining, `model.init_from`, and not a model to use.

| | from | to |
| --- | --- | --- |
{sizes}
"""
