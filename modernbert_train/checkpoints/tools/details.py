"""One checkpoint in full: where it is on the clock and in the data, how it lies on the disk, and what training would
resume with. Without torch; every hash is compared before anything is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from modernbert_train.checkpoints.manifest import MANIFEST, OPTIMIZER, WEIGHTS, Manifest, Slices, read_manifest
from modernbert_train.checkpoints.provenance import Start, read_starts
from modernbert_train.checkpoints.saved_state import TrainingState
from modernbert_train.checkpoints.tools.listing import kept_for, one_line
from modernbert_train.checkpoints.tools.places import Place
from modernbert_train.checkpoints.trained_phases import past_changes
from modernbert_train.checkpoints.verified import Opened, Verified, newest_of, step_folders, tell_choice
from modernbert_train.clock import Clock
from modernbert_train.config.load import differences
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.text import date, duration, plural, rate, table
from modernbert_train.errors import ConfigError, StorageError
from modernbert_train.optim.schedules import lr_at

Found = TypeVar("Found", bound=Opened)
_MOST_FILES, _MOST_CHANGES = 16, 40


def find(place: Place, step: int | None, opened: Callable[[Path], Found]) -> Found:
    """The checkpoint of a step; without one, the newest that is valid, with a word on those passed over.

    Args:
        place: the run.
        step: of the checkpoint.
        opened: opens one, or raises StorageError.

    Raises:
        StorageError: there is none, or it is damaged.
    """
    if step is not None:
        return opened(place.folder(step))
    found, passed_over = newest_of(place.checkpoints, opened)
    if found is None:
        raise StorageError(f"{place.checkpoints}: no checkpoint yet. Train the run first.")
    tell_choice(found, passed_over)
    return found


def describe(found: Verified, place: Place) -> str:
    """A checkpoint that is valid, as lines of a name and what there is.

    Args:
        found: the checkpoint.
        place: the run that it is of.
    """
    now, problem = _config_now(place)
    parts = (_on_disk(found, place, now), _on_the_clock(found), _in_the_data(found), _resumed(found, now, problem))
    lines = [line for part in parts for line in part]
    return f"{found.folder}\n" + table([(name, one_line(text)) for name, text in lines], indent=2)


def _config_now(place: Place) -> tuple[RunConfig | None, str | None]:
    if place.run is None:
        return None, None
    try:
        return place.config(), None
    except ConfigError as error:
        return None, str(error)


def _on_disk(found: Verified, place: Place, now: RunConfig | None) -> Iterator[tuple[str, str]]:
    manifest = found.manifest
    total = sum(file.bytes for file in manifest.files.values())
    yield "state", "every file has its hash, and configuration and state make sense"
    others = {step: each for step, each in _manifests(place).items()} | {manifest.step: manifest}
    kept = kept_for(others, now)[manifest.step]
    yield "kept as", ", ".join(kept) or "nothing: removed when newer ones take its place"
    yield "written", date((found.folder / MANIFEST).stat().st_mtime)
    if place.run is not None and (start := _start_of(read_starts(place.run), found)) is not None:
        yield "by", start.program
    yield "schema", str(manifest.schema)
    yield "size", f"{total:,} bytes in {plural(len(manifest.files), 'file')}"
    for name, file in list(manifest.files.items())[:_MOST_FILES]:
        yield f"  {name}", f"{file.bytes:,} bytes, xxh3-128 {file.xxh3_128[:32]}"
    if len(manifest.files) > _MOST_FILES:
        yield "  ...", f"and {plural(len(manifest.files) - _MOST_FILES, 'more file')}"
    yield "layout", f"{_layout(manifest)}; read by any number of ranks under any strategy"


def _manifests(place: Place) -> dict[int, Manifest]:
    found = {}
    for folder in step_folders(place.checkpoints):
        try:
            manifest = read_manifest(folder)
        except StorageError:
            continue
        found[manifest.step] = manifest
    return found


def _layout(manifest: Manifest) -> str:
    ranks = len(manifest.weights)
    if ranks == 1:
        return f"written by one rank, whole tensors in {WEIGHTS} and {OPTIMIZER}"

    def slices(files: Slices) -> int:
        return sum(len(each) for each in files.values())

    return (
        f"written by {plural(ranks, 'rank')}, each its share: {plural(slices(manifest.weights), 'slice')} of weights, "
        f"{slices(manifest.optimizer):,} of optimizer state, all other tensors whole"
    )


def _start_of(starts: Sequence[Start], found: Verified) -> Start | None:
    """The start that wrote it: the last one from before it, by its place in the run and, where they fit, by time."""
    before = [start for start in starts if start.tokens <= found.state.tokens]
    written = (found.folder / MANIFEST).stat().st_mtime
    timely = [start for start in before if not math.isfinite(start.time) or start.time <= written]
    return next(reversed(timely or before), None)


def _on_the_clock(found: Verified) -> Iterator[tuple[str, str]]:
    config, state = found.config, found.state
    yield "step", f"{state.step:,}"
    share = f", {100 * state.tokens / config.total_tokens:.1f} %" if config.total_tokens else ""
    yield "tokens", f"{state.tokens:,} of {config.total_tokens:,}{share}"
    start = 0
    for number, (name, phase) in enumerate(config.phases.items(), start=1):
        inside = min(max(state.tokens - start, 0), phase.tokens)
        here = "  <- last step" if name == state.phase else ""
        yield f"phase {number}", f"{name}: {inside:,} of {phase.tokens:,} tokens{here}"
        start += phase.tokens
    now = config.in_phase[state.phase]
    yield "model", f"{now.model.name}, {plural(now.model.num_layers, 'layer')} of width {now.model.hidden_size:,}"
    terms = ", ".join(f"{term} x {weight:g}" for term, weight in now.objective.terms.items())
    yield "objective", f"{now.objective.name}, sees {now.objective.order}; loss {terms}"
    yield "optimizer", now.optim.name


def _in_the_data(found: Verified) -> Iterator[tuple[str, str]]:
    state = found.state
    if state.training is None:
        made = ", ".join(f"{part.weight:.4g} of {part.checkpoint}" for part in state.average[:8])
        yield "average", f"{state.averaged_by}, of {plural(len(state.average), 'checkpoint')}: {made}"
        return
    yield "trained for", duration(state.training.seconds)
    yield from loader_position(state.training).items()
    guard = state.training.stability
    skipped = plural(len(guard["skipped_updates"]), "skipped update")
    yield "guard", f"the last {len(guard['losses']):,} losses, {skipped}"
    yield "data", ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(state.data.items()))


def loader_position(training: TrainingState) -> dict[str, str]:
    """Where the data are continued, by what is shown of it."""
    loader = training.loader
    found = {
        f"stream {name}": ", ".join(f"{key} {value:,}" for key, value in sorted(cursor.items()))
        for name, cursor in loader["streams"].items()
    }
    packer = loader["packer"]
    found["packer"] = (
        f"rows of {packer['row_tokens']:,} tokens, {plural(len(packer['ready']), 'row')} ready, "
        f"{plural(len(packer['waiting']), 'chunk')} waiting"
    )
    if len(loader["streams"]) > 1:
        found["mixture"] = f"weights {loader['weights']}, lag {loader['lag']}"
    return found


def _resumed(found: Verified, now: RunConfig | None, problem: str | None) -> Iterator[tuple[str, str]]:
    state = found.state
    if state.training is None:
        yield "resumes with", "nothing: an average holds weights alone. Use weights.init_from, eval or export"
        return
    config = found.config if now is None else now
    changes = [] if now is None else differences(found.config, now)
    if now is not None and state.phase in now.phases:
        refused = past_changes(found.config.phases, now.phases, state.phase, state.tokens)
    else:
        refused = [] if now is None else [f"phase {state.phase}: not in the run any more"]
    if refused:
        yield "resumes with", f"nothing: the plan up to here has changed: {'; '.join(refused)}"
    elif state.tokens >= config.total_tokens:
        yield "resumes with", "nothing left to train: this is the end of the run"
    else:
        clock = Clock.of(config)
        there = clock.at(state.tokens)
        yield (
            "resumes with",
            f"step {state.step + 1:,} in phase {there.name}: rows of {there.phase.row_tokens:,} tokens, up to "
            f"{there.phase.batch_rows:,} a batch; objective {there.objective.name}; learning rate "
            f"{rate(lr_at(clock, state.tokens))}",
        )
    if problem is not None:
        yield "since then", f"the run's config.yaml cannot be read: {problem}"
    for key, then, today in changes[:_MOST_CHANGES]:
        yield "since then", f"{key}: {then} -> {today}"
    if len(changes) > _MOST_CHANGES:
        yield "since then", f"and {len(changes) - _MOST_CHANGES} other changes"
