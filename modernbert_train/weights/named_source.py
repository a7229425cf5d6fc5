"""Whether a name can be that of weights to start from, as far as it can be told without reading them; without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from modernbert_train.checkpoints.manifest import CONFIG_YAML, MANIFEST, STATE, newest_step, read_manifest
from modernbert_train.checkpoints.run_folder import TOKENIZER_COPY
from modernbert_train.checkpoints.saved_state import read_state
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import WeightsConfig
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError
from modernbert_train.vocabulary import SPARE, token_ids, tokenizer_sha256
from modernbert_train.weights.formats import read_folder
from modernbert_train.weights.formats.config_json import CONFIG_JSON, model_folder
from modernbert_train.weights.hub import check_name


def check_named(name: str | Path, runs_folder: str | None = None) -> None:
    """Refuse what can be seen to be nothing to start from.

    Args:
        name: see `open_source`.
        runs_folder: where the runs are: what is missing there is not asked of a hub, though its name would fit.

    Raises:
        DataError: there is no such model, or its config.json is damaged or of another architecture.
        StorageError: a run without a checkpoint.
    """
    folder = Path(name)
    if (folder / MANIFEST).is_file():
        return
    if (folder / CONFIG_YAML).is_file():
        if not any((folder / "checkpoints").glob("step-*")):
            raise StorageError(f"{folder}: a run without a checkpoint. Train it first, or name another.")
        return
    if folder.suffix == ".safetensors":
        raise DataError(f"{folder}: weights alone. Name the folder that holds them and their {CONFIG_JSON}.")
    if folder.suffix == ".pt" and not folder.is_file():
        raise DataError(f"{folder}: no such file. Name a checkpoint of Composer, such as ep0-ba4000-rank0.pt.")
    if folder.is_file():
        return
    if (
        runs_folder is not None
        and not folder.exists()
        and folder.parent == Path(runs_folder)
        and folder.parent.is_dir()
    ):
        raise DataError(f"{folder}: no such run. Name one of those in {runs_folder}, or another model.")
    check_name(str(name))
    if folder.is_dir():
        read_folder(model_folder(folder))


def tokenizer_named(name: str | Path) -> Path | None:
    """Folder of the tokenizer of what `check_named` has passed; None where weights would have to be read."""
    folder = Path(name)
    with suppress(OSError, ValueError, KeyError, RunError):  # whoever reads it all will say what is wrong
        if (folder / MANIFEST).is_file():
            then = load_run([folder / CONFIG_YAML])
            trained_with = read_state(folder / STATE, then, read_manifest(folder).step).data["tokenizer"]
            folder = tokenizer_of(folder, then.data.tokenizer, trained_with)
            return folder if tokenizer_sha256(folder) == trained_with else None
        if (folder / CONFIG_YAML).is_file():
            newest = newest_step(folder)
            return None if newest is None else tokenizer_named(newest)
        folder = model_folder(folder)
        return folder if (folder / "tokenizer.json").is_file() else None
    return None


def tokenizer_of(checkpoint: Path, named: str, sha256: str) -> Path:
    """Return the folder of a checkpoint's tokenizer: data.tokenizer, or the copy in its run if that is gone or another.

    Args:
        checkpoint: its folder.
        named: data.tokenizer of its run.
        sha256: of the tokenizer that it was trained with.
    """
    for folder in (Path(named), checkpoint.parent.parent / TOKENIZER_COPY):
        with suppress(DataError):
            if tokenizer_sha256(folder) == sha256:
                return folder
    return Path(named)


def token_difference(there: Mapping[str, int], here: Mapping[str, int], among: Collection[str]) -> str | None:
    """How many tokens have other ids in two vocabularies, with an example; None where none has."""
    differing = [token for token in among if here.get(token) != there.get(token)]
    if not differing:
        return None
    token = min(differing)
    return f"{len(differing)} tokens differ, as {token!r}: id {there.get(token)} there, {here.get(token)} here"


def check_vocabulary(weights: WeightsConfig, there: Path, here: str) -> None:
    """Compare the tokenizer of the first weights with the run's, as weights.vocabulary asks.

    Args:
        weights: the run's section.
        there: folder of the tokenizer of weights.init_from.
        here: data.tokenizer.

    Raises:
        ConfigError: one that should be the same has another id somewhere, or one that should be extended lacks a token.
        DataError: a tokenizer is missing or damaged.
    """
    (key, name), asked = next(iter(weights.named.items())), weights.vocabulary
    own, old = token_ids(here), token_ids(there)
    if asked == "same" and (difference := token_difference(old, own, own.keys() | old.keys())) is not None:
        raise ConfigError(another_tokenizer(f"weights.{key}={name}", here, difference))
    needed = [token for token in old if not token.startswith(SPARE)]  # spare ones are there to be replaced
    if asked == "extend" and (difference := token_difference(old, own, needed)) is not None:
        raise ConfigError(
            f"weights.vocabulary=extend: data.tokenizer={here} does not have all tokens of "
            f"weights.{key}={name} at their ids; {difference}. Add tokens to the tokenizer of the weights, or set "
            "weights.vocabulary=replace."
        )


def another_tokenizer(key: str, tokenizer: str, difference: str) -> str:
    """The message for weights of another tokenizer; `key` is what named them."""
    remedy = "Prepare the data with the tokenizer of the weights, or train from scratch"
    if key.startswith(("weights.init_from", "weights.shrink_from")):
        remedy = "Prepare the data with the tokenizer of the weights, or set weights.vocabulary=extend or replace"
    return (
        f"{key}: trained with another tokenizer than data.tokenizer={tokenizer}; {difference}. Every token "
        f"would mean something else. {remedy}."
    )
