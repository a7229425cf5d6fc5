"""`python -m modernbert_train push`: upload a run's newest checkpoint as main, and with an option each as a revision.

A revision is a branch named like its checkpoint. step-00000000 holds the weights before the first step, which no
checkpoint holds; they are computed again as training computed them. checkpoint.json records the hash of a revision's
weights, so an interrupted command uploads only the rest when it is run again.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RevisionNotFoundError

from modernbert_train.checkpoints.checkpoint import Checkpoint, newest_checkpoint, verify
from modernbert_train.checkpoints.manifest import WEIGHTS
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.saved_state import SavedState
from modernbert_train.checkpoints.verified import step_folders
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import errors_to, warn
from modernbert_train.core.read_json import read_json
from modernbert_train.core.tensor_files import write_tensors
from modernbert_train.core.text import first_line
from modernbert_train.core.version import __version__
from modernbert_train.errors import ConfigError, RunError, StorageError
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.export import export_run
from modernbert_train.weights.gather import gather_weights
from modernbert_train.weights.source import find_origin

MARK = "checkpoint.json"
# exception of the hub's library for a lost connection: httpx.HTTPError in version 1, httpx2.HTTPError in version 2
_NO_CONNECTION = tuple(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
MAIN, FIRST = "main", "step-00000000"
_REPO_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")


def push_run(
    config: RunConfig,
    repo_id: str,
    *,
    private: bool = False,
    every_checkpoint: bool = False,
    licence: str | None = None,
    dry_run: bool = False,
) -> None:
    """Export checkpoints of a run and upload them; revisions that already have the same weights are skipped.

    Args:
        config: the run.
        repo_id: owner/model; created if it does not exist.
        private: make a new one private.
        every_checkpoint: also upload each whole checkpoint of the run, and the weights before the first step.
        licence: see `model_card`.
        dry_run: export and list the files but send nothing; works without a login and a network.

    Raises:
        ConfigError: the id is invalid, this machine is not logged in, or the hub refuses this login's request.
        StorageError: the run lacks a checkpoint, the disk is full, or the hub cannot be reached.
    """
    check_repo_id(repo_id)
    newest = newest_checkpoint(config.folder)
    if not dry_run and get_token() is None:
        raise ConfigError(
            f"push {repo_id}: not logged in to the hub. Make a token that may write at "
            "https://huggingface.co/settings/tokens, then call `hf auth login`, or set HF_TOKEN in the environment."
        )
    hub = DryRunHub(repo_id) if dry_run else Hub(repo_id)
    hub.create(private)
    if every_checkpoint:
        _push_first(hub, config, newest, licence)
        for folder in step_folders(newest.folder.parent):
            verified = newest if folder == newest.folder else None
            with errors_to(warn, StorageError, before="left out: "):
                verified = verified or verify(folder)
            if verified is not None:
                _push(hub, config, verified, folder.name, licence)
    _push(hub, config, newest, MAIN, licence, again=True)
    print(hub.end)


def check_repo_id(repo_id: str) -> None:
    """Raise ConfigError if it cannot be the id of a model."""
    if not _REPO_ID.fullmatch(repo_id) or len(repo_id) > 96 or ".." in repo_id or "--" in repo_id:
        raise ConfigError(
            f"push {repo_id!r}: not an id of the hub. Write it as owner/model, of letters, digits, `-`, `_` and `.`, "
            "such as you/encoder-base."
        )


def _push_first(hub: Hub, config: RunConfig, newest: Checkpoint, licence: str | None) -> None:
    """Push the weights before the first step, where they can be computed again."""
    with tempfile.TemporaryDirectory() as folder:
        first = None
        with errors_to(warn, RunError, before=f"no revision {FIRST}: "):
            first = first_checkpoint(newest, Path(folder))
        if first is not None:
            _push(hub, config, first, FIRST, licence)


def first_checkpoint(newest: Checkpoint, folder: Path) -> Checkpoint:
    """Return the weights before the first step of a run, computed as training computes them, as a checkpoint.

    Args:
        newest: any checkpoint of the run.
        folder: its parent.

    Raises:
        ConfigError: the run began with a checkpoint of another run, or with weights that its configuration no longer
            names; or `newest` is an average.
        DataError, StorageError: see `find_origin`.
    """
    config = newest.config
    if newest.is_average:
        raise ConfigError("an average of checkpoints has no first step")
    if config.start is not None:
        raise ConfigError(f"the run began with start.checkpoint={config.start.checkpoint}")
    origin = find_origin(config)
    starts = [entry for entry in RunFolder(config).read_metrics() if entry.get("kind") == "start"]
    then, now = str(starts[-1].get("from")) if starts else None, "scratch" if origin is None else origin.describe()
    if origin is not None and then is not None and then != now:
        raise ConfigError(f"the run began with `{then}`, and its configuration gives `{now}` today")
    model = build_model(config.model, config.objective, config.compute)
    if origin is None:
        initialize(model, config.model, config.seed)
    else:
        origin.fill(model)
    own = folder / FIRST
    own.mkdir()
    write_tensors(own / WEIGHTS, gather_weights(model, keep=True))
    state = SavedState(0, 0, next(iter(config.phases)), newest.state.data, None, [])
    return Checkpoint(own, state, config, phase_end=False)


def _push(
    hub: Hub, config: RunConfig, checkpoint: Checkpoint, revision: str, licence: str | None, *, again: bool = False
) -> None:
    """Upload a checkpoint to a revision; `again` even if it has these weights, since its card may differ."""
    weights = checkpoint.weights_hash
    if not again and hub.weights_of(revision) == weights:
        print(f"{revision}: there already")
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        export_run(config, out, checkpoint=checkpoint, licence=licence, quiet=True)
        mark = {"checkpoint": checkpoint.folder.name, "step": checkpoint.step, "tokens": checkpoint.state.tokens}
        mark |= {"weights_xxh3_128": weights, "created_by": f"modernbert-train {__version__}"}
        (out / MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
        hub.upload(out, revision, f"{checkpoint.step:,} steps, {checkpoint.state.tokens:,} tokens")


class Hub:
    """A model on the hub, with the permissions of this login.

    Args:
        repo_id: owner/model.
    """

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self._api = HfApi(library_name="modernbert-train", library_version=__version__)

    @property
    def end(self) -> str:
        """Last line for the user: the address of the model."""
        return f"{self._api.endpoint}/{self.repo_id}"

    def create(self, private: bool) -> None:
        """Create the model unless it exists."""
        with _hub_errors(self.repo_id):
            self._api.create_repo(self.repo_id, private=private or None, exist_ok=True)

    def weights_of(self, revision: str) -> str | None:
        """Return the hash of a revision's weights; None if it is missing or was not pushed by this program."""
        missing = suppress(EntryNotFoundError, RevisionNotFoundError, ValueError, AttributeError)
        with _hub_errors(self.repo_id), tempfile.TemporaryDirectory() as folder, missing:
            file = self._api.hf_hub_download(self.repo_id, MARK, revision=revision, local_dir=folder)
            return str(read_json(Path(str(file))).get("weights_xxh3_128"))
        return None

    def upload(self, folder: Path, revision: str, message: str) -> None:
        """Upload a folder as a revision; create its branch if necessary."""
        with _hub_errors(self.repo_id):
            if revision != MAIN:
                self._api.create_branch(self.repo_id, branch=revision, exist_ok=True)
            self._api.upload_folder(repo_id=self.repo_id, folder_path=folder, revision=revision, commit_message=message)
        print(f"{revision}: {message}")


class DryRunHub(Hub):
    """A hub that receives nothing: lists every file that would be sent, with its size."""

    @property
    def end(self) -> str:
        return f"{super().end}: nothing was sent. Without --dry-run the same command uploads these files."

    def create(self, private: bool) -> None:
        print(f"would make {self.repo_id}{', private' * private}, unless it is there")

    def weights_of(self, revision: str) -> str | None:
        return None

    def upload(self, folder: Path, revision: str, message: str) -> None:
        print(f"would send to revision {revision} ({message}):")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(f"  {path.relative_to(folder)}  {path.stat().st_size:,} bytes")


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Convert errors of the hub's library to ConfigError and StorageError."""
    again = "The same command uploads the rest."
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"push {repo_id}: {error}") from None
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else 0
        reason = str(error).strip().splitlines()[-1][:300]
        if code in (401, 403, 404):
            raise ConfigError(
                f"push {repo_id}: the hub refuses ({code}: {reason}). Log in to an account with write access to "
                f"{repo_id}, using a token with write permission: `hf auth login`."
            ) from None
        raise StorageError(f"push {repo_id}: the hub failed ({code}: {reason}). {again}") from None
    except (EntryNotFoundError, *_NO_CONNECTION, OSError) as error:  # EntryNotFoundError: no answer, not in the cache
        raise StorageError(f"push {repo_id}: the hub cannot be reached ({first_line(error)[:300]}). {again}") from None
