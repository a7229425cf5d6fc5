"""Resolve a run: make every decision of a start once, before it costs anything.

`resolve` applies every rule to the configuration, the data, the run's folder and the installed packages, without torch,
and raises all mistakes together; so no two verbs can disagree. LOOKS lists the checks of each verb. It writes nothing,
takes no lock and reads no large file: loading a checkpoint or weights verifies them. Once the GPUs of all ranks are
known, `close_for_gpus` decides the rest. `train` sends the result to all ranks as JSON and keeps it as resolved.json.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modernbert_train.checkpoints.manifest import CONFIG_YAML, STATE, newest_step, read_manifest, step_folders
from modernbert_train.checkpoints.resume_rules import refuse_average, refuse_changes
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.saved_state import SavedState, read_state
from modernbert_train.config.auto import open_settings, value_of, with_settings
from modernbert_train.config.check import check, search_refused
from modernbert_train.config.knob import may
from modernbert_train.config.load import WrongKeys, flat, load_run
from modernbert_train.config.packages import missing_packages
from modernbert_train.config.plugins import code_at
from modernbert_train.config.schema import EvaluatorConfig, PhaseConfig, RunConfig, WeightsConfig
from modernbert_train.core.claim import changes, refuse
from modernbert_train.core.files import free_bytes
from modernbert_train.core.version import __version__
from modernbert_train.data.check_shards import check_data
from modernbert_train.data.facts import DataFacts, missing_stream
from modernbert_train.distributed.bf16 import cpu_gain_line
from modernbert_train.distributed.launched import check_launch_variables, from_launcher
from modernbert_train.distributed.visible_gpus import count_gpus, shown_gpus
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError
from modernbert_train.plan.census import ENCODER_COUNTS
from modernbert_train.plan.gpus import GPUS, HasMemory, RunGpus
from modernbert_train.plan.memory import checkpoint_bytes
from modernbert_train.plan.memory_fit import too_large
from modernbert_train.plan.speed_settings import close_settings

if TYPE_CHECKING:
    from modernbert_train.weights.names import NamedModel

FORMAT = 2
HANDED_OVER = "MODERNBERT_TRAIN_RESOLVED"  # set by `hand_over`: digest of the resolved run, and the GPU that it fits
Look = Callable[[], object]
Purpose = Literal["train", "join", "sweep", "submit", "plan", "assume", "measure", "use"]
# purpose -> the checks that it needs
LOOKS: dict[Purpose, tuple[str, ...]] = {
    "train": ("data", "store", "packages", "memory", "folder"),
    "join": ("data", "store", "packages", "memory"),  # a machine of several, which may not see the run's folder
    "sweep": ("data", "store", "packages", "folder"),  # trials of a sweep, some of which may need too much memory
    "submit": ("memory",),  # a job file: the job starts elsewhere
    "plan": ("data if here",),
    "assume": (),  # a plan for assumed document lengths
    "measure": ("data",),
    "use": (),  # trained weights: export and push
}


@dataclass(frozen=True)
class Resolved:
    """A run with the decisions of one start.

    Attributes:
        written: the run as the user wrote it.
        config: the same with every open key filled, once the GPUs are known.
        ranks: number of training processes.
        facts: facts of its data, if they were looked at.
        lines: lines for the banner on the automatic settings.
        gpu: the GPUs that it fits; None if no memory was looked at.
    """

    written: RunConfig
    config: RunConfig
    ranks: int
    facts: DataFacts | None = None
    lines: tuple[str, ...] = ()
    gpu: RunGpus | None = None

    @property
    def decided(self) -> dict[str, Any]:
        """Return the values of the keys that were left open, by dotted key."""
        return {key: value_of(self.config, key) for key in open_settings(self.written)}

    def to_json(self) -> str:
        """Serialise everything except the facts, which each process reads itself."""
        tree = {
            "format": FORMAT,
            "program": __version__,
            "ranks": self.ranks,
            "home": str(Path.cwd()),
            "decided": self.decided,
            "lines": self.lines,
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "written": flat(self.written),
        }
        return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"

    @property
    def digest(self) -> str:
        """A hash by which another process recognises the same run on as many ranks."""
        return hashlib.sha256(replace(self, gpu=None).to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str, requested: RunConfig) -> Resolved:
        """Read the resolved run of another process, for the same configuration.

        Raises:
            ConfigError: it is of another version of this program, or for another run.
        """
        tree = json.loads(text)
        if tree.get("format") != FORMAT or tree["program"] != __version__:
            raise ConfigError(
                f"this run was resolved by version {tree.get('program')} of this program, and this process is "
                f"{__version__}. Install the same version everywhere."
            )
        differ = changes(*map(_shared, (tree["written"], json.loads(json.dumps(flat(requested))))))
        refuse("this run was resolved with other keys", differ, "Start all processes with the same YAML and overrides.")
        config = with_settings(requested, tree["decided"])
        gpu = None if tree["gpu"] is None else RunGpus.from_json(tree["gpu"])
        return cls(requested, config, tree["ranks"], lines=tuple(tree["lines"]), gpu=gpu)


def _shared(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that must be equal on all machines."""
    return {key: value for key, value in keys.items() if not may("local", RunConfig, key)}


def resolve(
    config: RunConfig,
    num_ranks: int = 1,
    *,
    purpose: Purpose = "train",
    fresh: bool = False,
    gpu: HasMemory | None = None,
) -> Resolved:
    """Find every mistake that would make a run, or another verb that uses it, fail.

    Args:
        config: the run.
        num_ranks: processes that would train.
        purpose: row of LOOKS. The rules of the configuration are applied for each; but a run that was trained with
            fused kernels is measured and exported on any machine.
        fresh: True if the contents of the run's folder would be set aside.
        gpu: the kind that would train; None: the largest visible on this machine, else launch.gpu.

    Returns:
        The run, the facts of its data and the GPU that it fits, if they were looked at, with the settings of speed
        still open.

    Raises:
        RunError: a line, or a few, for each mistake. A wrong configuration sets the exit code before wrong data, and
            wrong data before the disk.
    """
    facts: list[DataFacts] = []
    looks, fits = LOOKS[purpose], None
    mistakes = [*_mistakes(_run_looks(config, num_ranks, purpose, facts))]
    if "memory" in looks and not mistakes:
        gpu = gpu or (named_gpu(config) if purpose == "submit" else _gpu_of(config))
        fits = None if gpu is None else RunGpus.of_kind(gpu)
        mistakes = [*_mistakes(iter([lambda: _check_memory(config, num_ranks, fits, fresh)]))]
    if "folder" in looks:
        mistakes += _mistakes(_model_looks(config, fresh))
        if not any(isinstance(mistake, ConfigError) for mistake in mistakes):
            mistakes += _mistakes(_folder_looks(config, fresh))
    if len(mistakes) == 1:
        raise mistakes[0]
    for kind in (ConfigError, DataError, StorageError, RunError):
        if any(isinstance(mistake, kind) for mistake in mistakes):
            raise kind("\n".join(map(str, mistakes)))
    return Resolved(config, config, num_ranks, facts[0] if facts else None, gpu=fits)


def resolve_alone(config: RunConfig, *, fresh: bool = False) -> Resolved | None:
    """Resolve a run before torch is imported, unless this is one of several ranks: then rank 0 resolves it after they
    have joined, with their actual number, so that all ranks fail together on a mistake.

    Args:
        config, fresh: see `resolve`.

    Raises:
        RunError: see `resolve`.
    """
    check_launch_variables()
    return resolve(config, fresh=fresh) if from_launcher("WORLD_SIZE", 1) == 1 else None


def close_for_gpus(run: Resolved, gpus: RunGpus | None, *, fresh: bool = False) -> Resolved:
    """Fill the open keys of a run for the GPUs that train it.

    Its memory is compared with theirs, unless `resolve` has compared it with the same GPUs.

    Args:
        run: by `resolve`.
        gpus: of all ranks; None on CPUs.
        fresh: see `resolve`.

    Raises:
        ConfigError: a phase needs more memory than a GPU has, with the microbatch to set; or compute.search cannot be
            used here.
    """
    config, lines = close_settings(run.written, gpus=gpus, ranks=run.ranks, fresh=fresh)
    if config.compute.search and (gpus is None or not config.compute.compile):
        raise ConfigError(search_refused(compiled=bool(config.compute.compile)))
    if gpus is not None and not (run.gpu is not None and gpus.hold_as(run.gpu, run.ranks)):
        _refuse(too_large(config, gpus, run.ranks))
    if gpus is None and (gain := cpu_gain_line(config.compute.precision)) is not None:
        lines.append(gain)
    return replace(run, config=config, lines=tuple(lines))


def hand_over(run: Resolved | None) -> None:
    """Let the ranks that this process starts trust its resolved run; None: they resolve it themselves."""
    gpu = None if run is None or run.gpu is None else asdict(run.gpu)
    os.environ[HANDED_OVER] = "" if run is None else f"{run.digest} {json.dumps(gpu)}"


def handed_over(config: RunConfig, num_ranks: int) -> Resolved | None:
    """Return the run if the launcher of this process has resolved it, with the same keys for as many ranks."""
    digest, _, gpu = os.environ.get(HANDED_OVER, "").partition(" ")
    run = Resolved(config, config, num_ranks)
    if digest != run.digest:
        return None
    return run if gpu == "null" else replace(run, gpu=RunGpus.from_json(json.loads(gpu)))


@contextmanager
def with_later_mistakes(num_ranks: int | Callable[[RunConfig], int] = 1, purpose: Purpose = "train") -> Iterator[None]:
    """Read a run inside this context: wrong keys or values are reported together with broken rules and missing data.

    Messages about a section with a wrong key are left out, since they may follow from it.

    Args:
        num_ranks: processes that would train; a function if the configuration decides.
        purpose: see `resolve`.

    Raises:
        ConfigError: both kinds of mistakes.
    """
    try:
        yield
    except WrongKeys as wrong:
        if wrong.rest is None:
            raise
        try:
            ranks = num_ranks if isinstance(num_ranks, int) else num_ranks(wrong.rest)
            # fresh: do not compare half a configuration with the run in its folder
            resolve(wrong.rest, ranks, purpose=purpose, fresh=True)
        except RunError as later:
            sections = "|".join(map(re.escape, wrong.sections))
            others = [each for each in messages_of(later) if not re.search(rf"(?<![\w.])({sections})\b", each)]
            raise ConfigError("\n".join([str(wrong), *others])) from None
        except Exception:  # a rule that cannot be applied to half a configuration must not hide the wrong keys
            raise wrong from None
        raise


def messages_of(error: RunError) -> list[str]:
    """Return the mistakes that `resolve` raised together; some have lines of details."""
    return re.split(r"\n(?! )", str(error))


def _mistakes(looks: Iterator[Look]) -> Iterator[RunError]:
    for look in looks:
        try:
            look()
        except RunError as mistake:
            yield mistake


def _run_looks(config: RunConfig, num_ranks: int, purpose: Purpose, facts: list[DataFacts]) -> Iterator[Look]:
    looks = LOOKS[purpose]
    trained = purpose in ("measure", "use")
    # for a trained run neither the optimizer's kernel nor the folder's current name matters
    ruled = replace(config, name="trained", optim=replace(config.optim, fused=False)) if trained else config
    yield lambda: check(ruled, num_ranks)
    if "data" in looks or ("data if here" in looks and missing_stream(config.data) is None):
        yield lambda: facts.append(check_data(config))
    if "store" in looks:
        yield lambda: _check_replica(config.checkpoint.copy_to)
    if "packages" in looks and importlib.util.find_spec("torch") is not None:  # else it trains in another environment
        on_gpu = config.compute.device == "auto" and count_gpus() > 0
        named = (config.callbacks, config.loggers)
        yield lambda: _refuse(missing_packages(config.compute, config.optim, *named, on_gpu=on_gpu))


def named_gpu(config: RunConfig) -> HasMemory | None:
    """Return the kind of GPU that launch.gpu names, if `plan` knows that name."""
    return GPUS.get((config.launch.gpu or "").lower())


def _gpu_of(config: RunConfig) -> HasMemory | None:
    """Find the GPU without torch; the largest of several, since it is not yet known which of them train."""
    if config.compute.device == "cpu":
        return None
    shown = [RunGpus(name, memory_bytes) for name, memory_bytes in shown_gpus()]
    return max(shown, key=lambda gpu: gpu.memory_bytes, default=named_gpu(config))


def _check_memory(config: RunConfig, num_ranks: int, gpu: RunGpus | None, fresh: bool) -> None:
    """Reject a run that by `plan`'s prediction exceeds the whole memory of a GPU of this kind.

    Raises:
        ConfigError: a line for each phase, with the microbatch to set.
    """
    if gpu is not None:
        closed = close_settings(config, gpus=gpu, ranks=num_ranks, fresh=fresh).config
        _refuse(too_large(closed, gpu, num_ranks))


def _check_replica(url: str | None) -> None:
    if url is not None:
        from modernbert_train.checkpoints.store import problem_of

        _refuse(filter(None, [problem_of(url)]))


def _model_looks(config: RunConfig, fresh: bool) -> Iterator[Look]:
    """Yield checks of the models that a run names and of its folder; they work even if other checks fail."""
    run = RunFolder(config)
    if fresh or not run.has_checkpoints():
        for key, name in first_weights(config):
            yield partial(_look_up_key, key, name, config.runs_folder)
    if (teacher := config.objective.named_teacher) is not None:
        yield partial(_look_up_key, "objective.teacher", teacher, config.runs_folder)
    yield run.check_writable


def _folder_looks(config: RunConfig, fresh: bool) -> Iterator[Look]:
    yield lambda: describe_evals(config.evals)  # rank 0 reads them for all
    run = RunFolder(config)
    if fresh or not run.has_checkpoints():
        yield lambda: _check_vocabulary(config.weights, config.data.tokenizer, config.runs_folder)
    yield lambda: _check_disk(config, run, fresh)
    if not fresh:
        yield run.compare
        yield lambda: _check_trained(run.path, run.checkpoints, config.phases)


def describe_evals(evals: Mapping[str, EvaluatorConfig]) -> list[str]:
    """Return a line for each evaluation that names a reader of texts.

    Raises:
        DataError: they cannot be used.
    """
    reading = {f"evals.{name}": each for name, each in evals.items() if each.texts is not None}
    return [f"{key}: {code_at(str(each.texts))(key, each)}" for key, each in reading.items()]


def _look_up(name: str, runs_folder: str) -> NamedModel:
    from modernbert_train.weights.names import look_up

    return look_up(name, runs_folder)


def _look_up_key(key: str, name: str, runs_folder: str) -> None:
    try:
        _look_up(name, runs_folder)
    except RunError as mistake:
        text = str(mistake)
        mistake.args = (f"{key}={text}" if text.startswith(name) else f"{key}={name}: {text}",)
        raise


def first_weights(config: RunConfig) -> list[tuple[str, str]]:
    """List the keys and names of the models that a run without a checkpoint starts from."""
    start = None if config.start is None else config.start.checkpoint
    named = {f"weights.{key}": name for key, name in config.weights.named.items()}
    return [(key, name) for key, name in {**named, "start.checkpoint": start}.items() if name is not None]


def _check_vocabulary(weights: WeightsConfig, tokenizer: str, runs_folder: str) -> None:
    """Compare the weights' tokenizer with the run's, if both can be read without a network."""
    name = weights.init_from or weights.shrink_from
    if name is None:
        return
    folder = None
    with suppress(RunError):
        folder = _look_up(name, runs_folder).tokenizer()
    if folder is not None:
        from modernbert_train.weights.names import check_vocabulary

        check_vocabulary(weights, folder, tokenizer)


def _check_disk(config: RunConfig, run: RunFolder, fresh: bool) -> None:
    """Compare the free space with the checkpoints to come: a new one is written before an old one is removed.

    Raises:
        StorageError: they do not fit.
    """
    if type(config.model) not in ENCODER_COUNTS:  # a plugin's encoder, whose weights are not counted
        return
    trained = None if fresh else _newest_state(run.path, run.checkpoints)
    saves = _min_saves(config, 0 if trained is None else trained[2].tokens)
    if saves == 0:
        return
    keep, present = config.checkpoint.keep, 0 if fresh else len(step_folders(run.checkpoints))
    added = min(saves, max(1, keep + 1 - present))
    each, free = checkpoint_bytes(config.model, config.objective, config.optim), free_bytes(run.path)
    if free < added * each:
        lower = f" lower checkpoint.keep={keep}," if keep > 1 and added > 2 else ""
        raise StorageError(
            f"{run.path}: a checkpoint of this model takes {each:,} bytes, this run adds {added} before it removes "
            f"one, and {free:,} are free on its disk. Free some space,{lower} or set runs_folder to another disk."
        )


def _min_saves(config: RunConfig, tokens: int) -> int:
    """Return the minimum number of checkpoints that a run saves after so many tokens.

    Its hours are unknown: with checkpoint.interval_seconds it is expected to save more than once.
    """
    settings, tokens_left = config.checkpoint, config.total_tokens - tokens
    if tokens_left <= 0:
        return 0
    steps = -(-tokens_left // max(phase.batch_rows * phase.row_tokens for phase in config.phases.values()))
    by_steps = steps // settings.interval_steps if settings.interval_steps is not None else 0
    by_tokens = min(steps, tokens_left // settings.interval_tokens) if settings.interval_tokens is not None else 0
    ends = sum(end > tokens for end in accumulate(phase.tokens for phase in config.phases.values()))
    return max(ends, by_steps, by_tokens, 1 if settings.interval_seconds is None else 2)


def _check_trained(run: Path, checkpoints: Path, phases: Mapping[str, PhaseConfig]) -> None:
    """Compare the phases with the phases that trained the newest checkpoint.

    A damaged checkpoint is skipped: training uses the newest whole one and reports it.
    """
    if (trained := _newest_state(run, checkpoints)) is None:
        return
    newest, then, state = trained
    if state.training is None:
        refuse_average(run)
    refuse_changes(newest, then.phases, phases, state.phase, state.tokens)


def _newest_state(run: Path, checkpoints: Path) -> tuple[Path, RunConfig, SavedState] | None:
    """Return the newest checkpoint's folder, configuration and state; None if it is missing or damaged."""
    if (newest := newest_step(run)) is None:
        return None
    with suppress(OSError, ValueError, RunError):
        manifest = read_manifest(newest)
        is_whole = all((newest / name).stat().st_size == file.bytes for name, file in manifest.files.items())
        then = load_run([newest / CONFIG_YAML])
        state = read_state(newest / STATE, then, manifest.step)
        return (newest, then, state) if is_whole else None
    return None


def _refuse(messages: Iterator[str]) -> None:
    if problems := list(messages):
        raise ConfigError("\n".join(problems))
