"""`python -m modernbert_train grow`: a smaller model, enlarged, as a Hugging Face folder that a run can start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ModelConfig, ModernBertConfig
from modernbert_train.models.tiling import GROWING, Mode, grow
from modernbert_train.weights.formats.tensors import MASKED_LM, module_of
from modernbert_train.weights.hf_folder import export
from modernbert_train.weights.model_card import model_card
from modernbert_train.weights.source import growable, needs_predictions, open_source


def grow_model(name: str, model: ModelConfig, mode: Mode, out: Path, licence: str | None = None) -> Path:
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
        ConfigError: the smaller architecture cannot grow into the larger, or one of them is no ModernBERT.
        DataError, StorageError: see `open_source` and `export`.
    """
    source = open_source(name)
    old, new = growable(source.model, model, f"--from {name}")
    weights = {each: tensor for each, tensor in source.weights().items() if module_of(each) in MASKED_LM}
    needs_predictions({module_of(each) for each in weights}, f"--from {name}")
    card = _card(name, old, new, mode, source.order, licence)
    with source.tokenizer_folder() as tokenizer:
        export(
            grow(weights, old, new, mode),
            replace(new, global_rope_theta=old.global_rope_theta, local_rope_theta=old.local_rope_theta),
            order=source.order,
            max_tokens=source.max_tokens,
            tokenizer_folder=tokenizer,
            out=out,
            card=card,
        )
    print(out)
    return out


def _card(
    name: str, old: ModernBertConfig, new: ModernBertConfig, mode: Mode, order: Order, licence: str | None
) -> str:
    sizes = "\n".join(f"| {key} | {getattr(old, key):,} | {getattr(new, key):,} |" for key in GROWING)
    sections = {
        "": f"The weights of {name}, enlarged by center tiling (mode {mode}) and not trained since: a start "
        "for pretraining, `weights.init_from`, and not a model to use.",
        "Sizes": f"| | from | to |\n| --- | --- | --- |\n{sizes}",
    }
    return model_card("A grown start", sections, model=new, order=order, licence=licence, base=name)
