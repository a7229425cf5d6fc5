"""Look up a model by its name and small files, without torch and without a network."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from modernbert_train.checkpoints.manifest import CONFIG_YAML, MANIFEST, STATE, FileHash, newest_step, read_manifest
from modernbert_train.checkpoints.run_folder import TOKENIZER_COPY
from modernbert_train.checkpoints.saved_state import SavedState, read_state
from modernbert_train.config.contrastive import ContrastiveConfig
from modernbert_train.config.load import load_given, load_run
from modernbert_train.config.model import RotaryConfig
from modernbert_train.config.read_yaml import runs_beside
from modernbert_train.config.schema import ModelConfig, ModernBertConfig, RunConfig, WeightsConfig
from modernbert_train.core.files import anything_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import read_json
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError
from modernbert_train.vocabulary import SPARE, TOKENIZER, token_ids, tokenizer_sha256
from modernbert_train.weights.formats import read_folder
from modernbert_train.weights.formats.config_json import ADAPTER_JSON, CONFIG_JSON, Described

if TYPE_CHECKING:
    from modernbert_train.weights.source import Source

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
EXPORT = "hf"  # folder of a run's export, in the run's folder
_OF_WEIGHTS = (".bin", ".json", ".pt", ".safetensors")  # files that determine a model's outputs
MODULES = "modules.json"  # by which a folder is one of sentence-transformers
_OLD_LAYOUT = "0_Transformer"  # the encoder's folder in old models of sentence-transformers
# keys that a run takes from the model it starts from: with another RoPE base every distance would look different
_SCALING = (*(field.name for field in fields(RotaryConfig) if field.name.startswith("rope_")), "local_rope_scaled")
_TAKEN = ("global_rope_theta", "local_rope_theta", "rope_theta", *_SCALING)
DROPOUTS = ("attention_out_dropout", "dropout")  # taken too, unless the weights are grown or shrunk


@dataclass(frozen=True)
class NamedModel:
    """A model by its name.

    Attributes:
        kind: a run (its newest whole checkpoint is used), a checkpoint, a file of Composer, a folder with a
            config.json, or a model of the hub.
        path: its path; for sentence-transformers the encoder's folder; for the hub the id.
    """

    kind: Literal["run", "checkpoint", "file", "folder", "hub"]
    path: Path

    @property
    def folder(self) -> Path | None:
        """The folder with its small files: for a run its newest checkpoint; None if this disk has none."""
        if self.kind == "run":
            return newest_step(self.path)
        if self.kind == "hub":
            return _cached(self.path)
        return None if self.kind == "file" else self.path

    def described(self) -> Described | None:
        """Return the architecture and the longest text, as last trained; None if that needs torch or a network.

        Raises:
            OSError, ValueError, RunError: it is damaged.
        """
        if (folder := self.folder) is None:
            return None
        return described_by(*_saved(folder)) if (folder / MANIFEST).is_file() else read_folder(folder)

    def tokenizer(self) -> Path | None:
        """Return the folder of the tokenizer that it was trained with; None if this disk lacks it."""
        folder = self.folder
        with suppress(OSError, ValueError, KeyError, RunError):  # `open_model` raises the error
            if folder is not None and (folder / MANIFEST).is_file():
                then, state = _saved(folder)
                return tokenizer_of(folder, then.data.tokenizer, state.data["tokenizer"])
            return folder if folder is not None and (folder / TOKENIZER).is_file() else None
        return None


def look_up(name: str | Path, runs_folder: str = RunConfig.runs_folder, *, any_kind: bool = False) -> NamedModel:
    """Find a model by its name, and refuse a name that cannot be one.

    Args:
        name: see `open_model`.
        runs_folder: folder of the runs; a missing folder in it is an error and not the id of a model on the hub.
        any_kind: accept a folder of any architecture, for code that opens it with another library.

    Raises:
        ConfigError: there is no such run.
        DataError: there is no such model, or its config.json is damaged or of another architecture.
        StorageError: a run without a checkpoint.
    """
    path = Path(name)
    if is_checkpoint(path):
        return NamedModel("checkpoint", path)
    if (path / CONFIG_YAML).is_file():
        if any((path / "checkpoints").glob("step-*")):
            return NamedModel("run", path)
        if not (path / EXPORT / CONFIG_JSON).is_file():
            raise StorageError(f"{path}: a run without a checkpoint. Train it first, or name another.")
        path /= EXPORT  # the run was copied without its checkpoints, which are larger
    if path.suffix == ".safetensors":
        raise DataError(f"{path}: weights alone. Name the folder that holds them and their {CONFIG_JSON}.")
    if path.suffix == ".pt" and not path.is_file():
        raise DataError(f"{path}: no such file. Name a checkpoint of Composer, such as ep0-ba4000-rank0.pt.")
    if path.is_file():
        return NamedModel("file", path)
    if path.is_dir():
        path = _encoder_in(path)
        if not any_kind:
            read_folder(path)
        return NamedModel("folder", path)
    if path.parent == Path(runs_folder):
        raise ConfigError(f"{path}: no such run. {runs_beside(path)}")
    if not is_hub_id(name):
        raise DataError(
            f"{name}: no such folder, and not the owner/model of a hub. Name a folder with a {CONFIG_JSON}."
        )
    return NamedModel("hub", path)


def weights_hash(name: str, *, whole: bool = False) -> str | None:
    """Return a hash of a model's weights and settings as they are now; None if they are not on this disk.

    A checkpoint's manifest has the hashes of its weights; of other models the files are read. `whole` adds a
    checkpoint's configuration and tokenizer, which the hashes in results leave out.
    """
    with suppress(OSError, ValueError, TypeError, KeyError, RunError):  # `open_model` raises the error
        looked_up = look_up(name, any_kind=True)
        folder = looked_up.folder
        if folder is not None and (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
            names = [*sorted(manifest.weights), *((CONFIG_YAML, STATE) if whole else ())]
            hashes = {each: manifest.files[each].xxh3_128 for each in names}
        else:
            files = {looked_up.path} if folder is None else _files_of(folder)
            files |= {*looked_up.path.parent.glob("tokenizer*.json")} if folder is None and whole else set()
            hashes = {os.path.relpath(file, folder or file): FileHash.of(file).xxh3_128 for file in sorted(files)}
        return FileHash.of_text(json.dumps(hashes)).xxh3_128 if hashes else None
    return None


def _files_of(folder: Path) -> set[Path]:
    """Return the files that determine the output of a model, with all modules of sentence-transformers.

    Without tokenizer.json, sentence-transformers reads other files.
    """
    home = folder.parent if not (folder / MODULES).exists() and (folder.parent / MODULES).exists() else folder
    modules = read_json(home / MODULES) if (home / MODULES).exists() else []
    folders = {folder, home, *home.glob("[0-9]_*"), *(home / str(each["path"]) for each in modules)}
    ends = {*_OF_WEIGHTS} | (set() if (folder / TOKENIZER).exists() else {".model", ".txt"})
    return {file for each in folders for file in each.glob("*") if file.suffix in ends and file.is_file()}


def is_checkpoint(path: Path) -> bool:
    """Return True if a path names a checkpoint, which may be missing or damaged."""
    is_step = path.name.startswith("step-") and path.parent.name == "checkpoints"
    return (path / MANIFEST).is_file() or (is_step and not path.is_file())


def is_hub_id(name: str | Path) -> bool:
    """Return True if a name has the form owner/model."""
    return bool(_HUB_ID.fullmatch(str(name)))


def fetched(name: NamedModel) -> Path:
    """Return the folder of a model of the hub; a model in the cache is opened without a network.

    Raises:
        DataError: the hub does not give it.
    """
    from huggingface_hub import snapshot_download

    from modernbert_train.weights.hf_folder import EXPORTED_FILES, INDEX

    names = [*sorted(EXPORTED_FILES), ADAPTER_JSON, INDEX, "model-*.safetensors"]
    names += [f"[0-9]_*/{each}" for each in names]  # the modules of sentence-transformers
    remedy = "Name a folder, or fetch the model where there is a network."
    with anything_as(DataError, f"{name.path}: no such folder here, and the hub does not give it", remedy):
        return _encoder_in(Path(snapshot_download(str(name.path), allow_patterns=names)))


def _cached(name: Path) -> Path | None:
    """Return the folder of a model of the hub in this machine's cache, without a request to the hub."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(str(name), CONFIG_JSON)
    return Path(cached).parent if isinstance(cached, str) else None


def _encoder_in(folder: Path) -> Path:
    """Return the folder of the encoder: of sentence-transformers' old layout, the one that its modules.json names."""
    if (folder / CONFIG_JSON).exists():
        return folder
    inner: Any = _OLD_LAYOUT
    require_own_files(folder)
    with suppress(OSError, ValueError, TypeError, LookupError):
        inner = read_json(folder / MODULES)[0]["path"]
    is_inside = isinstance(inner, str) and (folder / inner).resolve().is_relative_to(folder.resolve())
    return folder / inner if is_inside and (folder / inner / CONFIG_JSON).exists() else folder


def _saved(checkpoint: Path) -> tuple[RunConfig, SavedState]:
    then = load_run([checkpoint / CONFIG_YAML])
    return then, read_state(checkpoint / STATE, then, read_manifest(checkpoint).step)


def described_by(config: RunConfig, state: SavedState) -> Described:
    """Describe the model of a checkpoint, as in the phase of the last step before it.

    Tokens alone do not tell the phase: the last batch passes its end.
    """
    now = config.in_phase[state.phase]
    max_tokens = now.objective.max_tokens or config.phases[state.phase].row_tokens
    return Described(now.model, max_tokens, now.objective.order, objective=now.objective)


def tokenizer_of(checkpoint: Path, named: str, sha256: str) -> Path | None:
    """Return the folder of a checkpoint's tokenizer: data.tokenizer, or the copy in its run; None if both are gone.

    Args:
        checkpoint: its folder.
        named: data.tokenizer of its run.
        sha256: of the tokenizer that it was trained with.
    """
    for folder in (Path(named), tokenizer_copy(checkpoint)):
        with suppress(DataError):
            if tokenizer_sha256(folder) == sha256:
                return folder
    return None


def tokenizer_copy(checkpoint: Path) -> Path:
    """Return the folder in which a checkpoint's run keeps a copy of its tokenizer."""
    return checkpoint.absolute().parent.parent / TOKENIZER_COPY


def _described(name: str) -> Described | None:
    """Describe a named model; None where this machine cannot tell."""
    with suppress(OSError, ValueError, RunError):  # `open_model` raises the error
        return look_up(name).described()
    return None


@functools.cache
def architecture_of(name: str) -> ModelConfig | None:
    """Return the architecture of a named model; None where this machine cannot tell."""
    described = _described(name)
    return None if described is None else described.model


def read_config(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Load a run; keys that its files omit come from the model that the run continues.

    These keys are RoPE bases and their scaling, dropout, and for contrastive training the longest text, as the model
    was last trained. A run keeps the values that it began with: its folder is read first, since the model may be gone
    by then. A Composer file cannot be read without torch; the first lines of a run name the differences.

    Raises:
        ConfigError: see `load_run`.
    """
    config, overridden = load_given(files, overrides)
    name = next(iter(config.weights.named.values()), None)
    keys = {field.name for field in fields(config.model)} & {*_TAKEN, *(DROPOUTS if config.weights.init_from else ())}
    keys -= {*_SCALING} if "model.rope_scaling" in overridden else set()  # given, it replaces the model's scaling whole
    not_set = sorted(key for key in keys if f"model.{key}" not in overridden)
    is_short = config.objective.compares and config.objective.max_tokens is None
    if name is None or not (not_set or is_short):
        return config
    trained, saved = None, Path(config.folder) / CONFIG_YAML
    if saved.is_file():
        with suppress(OSError, ValueError, RunError):  # `resolve` raises the error
            then = load_run([saved])
            trained = (then.model, then.objective.max_tokens)
    elif (described := _described(name)) is not None:
        trained = (described.model, described.max_tokens)
    if trained is None:
        return config
    model, longest = trained
    if isinstance(model, type(config.model)):
        config = replace(config, model=replace(config.model, **{key: getattr(model, key) for key in not_set}))
    if is_short and longest is not None:
        longest = max(longest, *(phase.row_tokens for phase in config.phases.values()))
        longest = min(longest, config.model.max_positions or longest)
        config = replace(config, objective=replace(cast(ContrastiveConfig, config.objective), max_tokens=longest))
    return config


def growable(old: ModelConfig, new: ModelConfig, key: str) -> tuple[ModernBertConfig, ModernBertConfig]:
    """Return both as ModernBERTs, the only models that grow; `key` named the smaller.

    Raises:
        ConfigError: one of them is another; names it.
    """
    if type(old) is type(new) is ModernBertConfig:
        return cast(ModernBertConfig, old), cast(ModernBertConfig, new)
    raise ConfigError(
        f"{key}: model.name={new.name} here, {old.name} there, and only a modernbert can grow, into a modernbert. "
        "Train this model from scratch, or start from a model of the same size with weights.init_from."
    )


def check_same_architecture(source: Source, model: ModelConfig, key: str) -> None:
    """Compare the architecture of weights with the run's; `key` names their key.

    Raises:
        ConfigError: they differ; names every key with both values.
    """
    if wrong := other_architecture(model, source.model):
        remedy = "Set its values, or use weights.grow_from for a smaller model, weights.shrink_from for a larger one."
        if [name for name, *_ in wrong] == ["model.vocab_size"]:
            remedy = "Set its number; for another tokenizer, set weights.vocabulary=extend or replace."
        if model.name != source.model.name:
            remedy = f"Set model.name={source.model.name} and its values, or name weights of a {model.name}."
        raise ConfigError(
            f"{key}: of another architecture:\n  "
            + "\n  ".join(f"{name}={ours} here, {theirs} there" for name, ours, theirs in wrong)
            + f"\n{remedy}"
        )


def other_architecture(model: ModelConfig, other: ModelConfig) -> list[tuple[str, object, object]]:
    """Return the keys in which two architectures differ, with both values; for different models only the name."""
    if type(model) is not type(other):
        return [("model.name", model.name, other.name)]
    ours, theirs = model.architecture(), other.architecture()
    return [(f"model.{key}", ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


def token_difference(theirs: Mapping[str, int], ours: Mapping[str, int], among: Collection[str]) -> str | None:
    """Count the tokens with different ids in two vocabularies, with an example; None if all agree."""
    differing = [token for token in among if ours.get(token) != theirs.get(token)]
    if not differing:
        return None
    token = min(differing)
    return f"{len(differing)} tokens differ, as {token!r}: id {theirs.get(token)} there, {ours.get(token)} here"


def check_vocabulary(weights: WeightsConfig, weights_tokenizer: Path, run_tokenizer: str) -> None:
    """Compare the tokenizer of the first weights with the run's, by the rule of weights.vocabulary.

    Args:
        weights: the run's section.
        weights_tokenizer: folder of the tokenizer of weights.init_from.
        run_tokenizer: data.tokenizer.

    Raises:
        ConfigError: with `same` an id differs, or with `extend` a token is missing.
        DataError: a tokenizer is missing or damaged.
    """
    (key, name), mode = next(iter(weights.named.items())), weights.vocabulary
    own, old = token_ids(run_tokenizer), token_ids(weights_tokenizer)
    if mode == "same" and (difference := token_difference(old, own, own.keys() | old.keys())) is not None:
        raise ConfigError(another_tokenizer(f"weights.{key}={name}", run_tokenizer, difference))
    needed = [token for token in old if not token.startswith(SPARE)]  # spare tokens are meant to be replaced
    if mode == "extend" and (difference := token_difference(old, own, needed)) is not None:
        raise ConfigError(
            f"weights.vocabulary=extend: data.tokenizer={run_tokenizer} does not have all tokens of "
            f"weights.{key}={name} at their ids; {difference}. Add tokens to the tokenizer of the weights, or set "
            "weights.vocabulary=replace."
        )


def another_tokenizer(key: str, tokenizer: str, difference: str) -> str:
    """Return the message for weights of another tokenizer; `key` names their key."""
    remedy = "Prepare the data with the tokenizer of the weights, or train from scratch"
    if key.startswith(("weights.init_from", "weights.shrink_from")):
        remedy = "Prepare the data with the tokenizer of the weights, or set weights.vocabulary=extend or replace"
    return (
        f"{key}: trained with another tokenizer than data.tokenizer={tokenizer}; {difference}. Every token "
        f"would mean something else. {remedy}."
    )
