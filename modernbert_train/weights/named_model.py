"""A run that goes on from a model takes from it what its own configuration leaves open: the RoPE bases. Without torch.

A model trained with a base of 160,000 and continued with 10,000, which is the default, sees every distance as another,
and nothing but its loss would tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from modernbert_train.checkpoints.manifest import CONFIG_YAML, MANIFEST, STATE, newest_step, read_manifest
from modernbert_train.checkpoints.saved_state import read_state
from modernbert_train.config.load import load_given, load_run
from modernbert_train.config.schema import ModelConfig, RunConfig
from modernbert_train.errors import RunError
from modernbert_train.weights.formats import read_folder
from modernbert_train.weights.formats.config_json import CONFIG_JSON, model_folder

TAKEN = ("global_rope_theta", "local_rope_theta")


def read_config(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """`load_run`, and the keys of TAKEN that it leaves open from the model that the run continues.

    The bases are those that the model was last trained with. What a run has begun with it keeps: its folder is asked
    first, since the model may be gone by then. A Composer file says nothing without torch; the first lines of a run
    name what differs.

    Raises:
        ConfigError: see `load_run`.
    """
    config, given = load_given(files, overrides)
    name = next(iter(config.weights.named.values()), None)
    left = [key for key in TAKEN if hasattr(config.model, key) and f"model.{key}" not in given]
    if name is None or not left:
        return config
    model = None
    with suppress(OSError, ValueError, RunError):  # whoever reads it all will say what is wrong
        model = _begun_with(config) or model_of(Path(name))
    if not all(hasattr(model, key) for key in left):
        return config
    return replace(config, model=replace(config.model, **{key: getattr(model, key) for key in left}))


def _begun_with(config: RunConfig) -> ModelConfig | None:
    saved = Path(config.folder) / CONFIG_YAML
    return load_run([saved]).model if saved.is_file() else None


def model_of(folder: Path) -> ModelConfig | None:
    """The architecture of a run, a checkpoint or a Hugging Face folder, as it was last trained; None of anything else.

    Raises:
        OSError, ValueError, RunError: it is damaged.
    """
    if (folder / MANIFEST).is_file():
        then = load_run([folder / CONFIG_YAML])
        state = read_state(folder / STATE, then, read_manifest(folder).step)
        return then.in_phase[state.phase].model
    if (folder / CONFIG_YAML).is_file():
        newest = newest_step(folder)
        return None if newest is None else model_of(newest)
    folder = model_folder(folder)
    return read_folder(folder).model if (folder / CONFIG_JSON).is_file() else None
