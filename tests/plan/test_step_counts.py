"""Steps, validations and checkpoints of a plan, compared with a real run, and with batches planned one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modernbert_train.__main__ import main, read_run
from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.data.facts import read_facts
from modernbert_train.plan.document_lengths import Documents, read_documents, rows_of
from modernbert_train.plan.make import make_plan
from modernbert_train.plan.memory import checkpoint_bytes
from modernbert_train.plan.step_counts import StepRange, crossings, crossings_or_ends, step_ranges, validations
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

ABSENT = "data.train=absent/train"


def documents_of(config: RunConfig) -> Documents:
    here = Path(config.data.all_streams["train"].path).is_dir()
    return read_documents(config.data, None, read_facts(config.data) if here else None)


@pytest.mark.runs
@pytest.mark.parametrize("often", ["eval.interval_tokens=1700", "eval.times_per_phase=3"])
def test_a_plan_is_what_the_run_then_does(tiny_run: TinyRun, often: str) -> None:
    """Steps and tokens of each phase, validations, checkpoints and their size are exact if the data exists."""
    words = tiny_run(often, "checkpoint.interval_tokens=1500", "checkpoint.keep=100")
    config = read_run(words)
    plan = make_plan(config, ranks=1)
    assert main(["train", *words]) == 0
    folder = Path(config.folder)
    steps = records(folder)
    assert plan.exact and plan.steps == len(steps) and plan.tokens == steps[-1]["tokens"]
    for phase in plan.phases:
        of_phase = [entry for entry in steps if entry["phase"] == phase.name]
        assert phase.steps == len(of_phase)
        rows = [row for part in phase.ranges for row in [part.rows] * part.steps]
        assert rows == [entry["rows"] for entry in of_phase]
    assert plan.validations == len(records(folder, "validation")) > len(plan.phases)
    checkpoints = sorted((folder / "checkpoints").iterdir())
    boundaries = crossings_or_ends([s for p in plan.phases for s in p.ranges], 1500)
    assert len(checkpoints) == boundaries >= plan.milestones > 0
    stored = sum((checkpoints[-1] / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors"))
    needed = checkpoint_bytes(plan.config.model, plan.config.objective, plan.config.optim)
    assert needed == pytest.approx(stored, rel=0.25)  # in so small a file, names take space
    assert needed < stored


def walked(config: RunConfig, fills: list[float]) -> list[StepRange]:
    """Return every batch as a separate range."""
    found, tokens = [], 0
    while tokens < config.total_tokens:
        position = Clock.of(config).at(tokens)
        rows = batch_rows_at(position.phase, position.tokens)
        step_tokens = round(rows * position.phase.row_tokens * fills[position.index])
        found.append(StepRange(position.index, tokens, 1, rows, step_tokens))
        tokens += step_tokens
    return found


def test_long_runs_are_counted_as_if_walked(tiny_run: TinyRun) -> None:
    """Ranges of equal batches are computed at once, and must equal single batches."""
    more = ["phases.short.tokens=400_000", "phases.short.batch_warmup.tokens=50_000", "phases.long.tokens=77_777"]
    config = read_run(tiny_run(*more, ABSENT))
    fills = [0.97, 0.93]
    ranges, exact = step_ranges(config.data, config.seed, Clock.of(config), documents_of(config), fills)
    one_by_one = walked(config, fills)
    assert not exact and len(ranges) < len(one_by_one) / 2
    assert sum(s.steps for s in ranges) == len(one_by_one)
    assert (ranges[-1].end, ranges[-1].rows) == (one_by_one[-1].end, one_by_one[-1].rows)
    for phase in (0, 1):
        assert sum(s.steps for s in ranges if s.phase == phase) == sum(s.phase == phase for s in one_by_one)
    for interval in (7, 700, 5000, 123_456, None):
        assert crossings(ranges, interval) == crossings(one_by_one, interval)
        assert crossings_or_ends(ranges, interval) == crossings_or_ends(one_by_one, interval)
    for times in (1, 15, 400, 3000):
        many = replace(config, eval=replace(config.eval, times_per_phase=times))
        due = sum(Clock.of(many).validates(many.eval, 583, step.start, step.end) for step in one_by_one)
        assert (
            validations(many.eval, Clock.of(many), ranges, 583)
            == validations(many.eval, Clock.of(many), one_by_one, 583)
            == due
        )
        assert due == sum(min(times, sum(s.phase == phase for s in one_by_one)) for phase in (0, 1))


def test_a_step_that_ends_a_phase_on_the_interval_is_validated_once() -> None:
    ranges = [StepRange(0, 0, 10, 1, 100), StepRange(1, 1000, 5, 1, 100)]
    assert crossings(ranges, 250) == 6  # 250, 500, 750, 1000, 1250, 1500
    assert crossings_or_ends(ranges, 250) == 6
    assert crossings_or_ends(ranges, 300) == 6  # 300, 600, 900, 1200, 1500, and the end at 1000
    assert crossings_or_ends(ranges, None) == 2


@pytest.mark.runs
def test_the_published_recipe_has_its_known_number_of_steps(tmp_path: Path) -> None:
    """1.719 T tokens with full rows: five batch sizes for equally many steps, then 4,608 rows."""
    root = Path(__file__).parents[2]
    config = read_run([str(root / "yamls/recipes/modernbert-base/1-stable.yaml"), f"data.train={tmp_path}/absent"])
    (phase,) = make_plan(config, ranks=8).phases
    warmup = [s for s in phase.ranges if s.rows < 4608]
    each = 50_000_000_000 / 1024 / sum(range(768, 4608, 768))
    for rows in range(768, 4608, 768):
        assert sum(s.steps for s in warmup if s.rows == rows) == pytest.approx(each, abs=1)
    rest = (1_719_000_000_000 - 50_000_000_000) / (4608 * 1024)
    assert phase.steps == pytest.approx(5 * each + rest, abs=3)


def test_documents_are_read_where_they_are(tiny_run: TinyRun, tiny_data: Path) -> None:
    config = read_run(tiny_run())
    documents = documents_of(config)
    lengths = np.load(tiny_data / "train/lengths.npy")
    assert documents.streams["train"].is_whole and documents.streams["train"].documents == len(lengths) == 60
    row = rows_of(config.data, Clock.of(config).phase("short"), documents)
    tokens = sum(lengths) + 2 * sum(-(-int(n) // 62) for n in lengths)
    assert row.passes["train"] == pytest.approx(4000 / tokens)
    assert 0.8 < row.fill <= 1 and row.spans.whole < 64
    assert row.sequence_tokens == pytest.approx(tokens / sum(-(-int(n) // 62) for n in lengths))


def test_data_that_is_not_there_is_assumed_and_reported(tiny_run: TinyRun) -> None:
    config = read_run(tiny_run(ABSENT))
    documents = documents_of(config)
    assert "absent/train is not here" in documents.source
    row = rows_of(config.data, Clock.of(config).phase("short"), documents)
    assert (row.spans.whole, row.fill, row.passes) == (64.0, 1.0, {})
    documents = read_documents(config.data, 30, None)
    assert "a median of 30 tokens" in documents.source
    assert documents.assumed is not None and np.median(documents.assumed) == pytest.approx(30, abs=1)
    assert rows_of(config.data, Clock.of(config).phase("short"), documents).spans.whole < 64


@pytest.mark.runs
def test_a_mixture_weighs_its_streams_as_the_phase_asks(tiny_run: TinyRun, tiny_data: Path) -> None:
    """Half the text short documents, half long ones: spans are in between, for any sizes of the folders."""
    streams = [
        "data.train=null",
        f"data.streams.long.path={tiny_data}/train",
        f"data.streams.short.path={tiny_data}/validation",
    ]

    def spans(long: float, short: float) -> float:
        shares = [f"data.streams.long.proportion={long}", f"data.streams.short.proportion={short}"]
        config = read_run(tiny_run(*streams, *shares))
        plan = make_plan(config, ranks=1)
        assert not plan.exact and plan.phases[0].text.passes.keys() <= {"long", "short"}
        return plan.phases[0].text.spans.whole

    assert spans(0.5, 0.5) == pytest.approx((spans(1.0, 0.0) + spans(0.0, 1.0)) / 2)
    assert spans(1.0, 0.0) != spans(0.0, 1.0)
