"""`inspect` must show exactly the batches of training.

If this breaks, a user sees another masking or mixture than the run trains on.
"""

from __future__ import annotations

import re
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.batches import labels_of_line
from modernbert_train.__main__ import main, read_run
from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.facts import read_facts
from modernbert_train.data.mixture import TokenStreams
from modernbert_train.data.open_shards import open_streams
from modernbert_train.data.path import plan_path
from modernbert_train.data.planner import BatchPlan
from modernbert_train.report.inspection.figures import length_histogram
from modernbert_train.report.inspection.print_rows import visible, wants_color
from modernbert_train.report.inspection.show import inspect_run
from modernbert_train.vocabulary import read_vocabulary
from tests.support.probed import call_probed
from tests.support.tiny_run import TinyRun

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def planned(config: RunConfig) -> tuple[TokenStreams, list[BatchPlan]]:
    streams = open_streams(config.data, config.seed, read_facts(config.data))
    return streams, list(plan_path(config.data, config.seed, Clock.of(config), streams.shards).planner)


def trained_rows(config: RunConfig, number: int) -> list[str]:
    """Return the rows of a batch of the training loader, formatted token by token."""
    from modernbert_train.train.build_trainer import build_data

    tokenizer = Tokenizer.from_file(f"{config.data.tokenizer}/tokenizer.json")
    vocabulary = read_vocabulary(config.data.tokenizer)
    special = {vocabulary.cls_id: "[CLS]", vocabulary.sep_id: "[SEP]", vocabulary.mask_id: "[MASK]"}

    def decode(ids: list[int]) -> str:
        return special.get(ids[0]) or visible(tokenizer.decode(ids, skip_special_tokens=False))

    rows = []
    step = next(islice(build_data(config, read_facts(config.data)).loader(rank=0, num_ranks=1), number - 1, None))
    for batch in step.microbatches:
        labels_T = labels_of_line(batch)
        labels = {at: int(labels_T[at]) for at in (labels_T != IGNORED_LABEL).nonzero().flatten().tolist()}
        text, waiting = "", []
        for at, id in enumerate([*batch.packed.input_ids_T.tolist(), vocabulary.pad_id]):
            mark = at in labels or id in special or id == vocabulary.pad_id
            if mark and waiting:
                text += decode(waiting)
                waiting = []
            if at in labels:
                was = decode([labels[at]])
                text += f"[={was}=]" if id == labels[at] else f"[-{was}-]"
                text += "" if id in (labels[at], vocabulary.mask_id) else f"{{+{decode([id])}+}}"
            elif id in special:
                text += special[id]
            elif id != vocabulary.pad_id:
                waiting.append(id)
            if (at + 1) % step.plan.row_tokens == 0:
                rows.append(text)
                text = ""
    return rows


def shown_rows(text: str) -> list[str]:
    rows = re.split(r"^=== row .*\n", text.split("\n\ndocument lengths")[0], flags=re.MULTILINE)[1:]
    return ["".join(line for line in row.splitlines() if not line.startswith("---")) for row in rows]


@pytest.mark.parametrize("number", [1, 3, 13])
def test_the_marks_are_those_of_the_batch_that_is_trained(tiny_run: TinyRun, number: int) -> None:
    """For both phases; the random words of the data contain no newline, so a sequence is one line."""
    config = read_run(tiny_run("data.num_workers=0"))
    text = inspect_run(config, number, 1000, color=False)
    expected = trained_rows(config, number)
    assert f"batch {number}, phase {'long' if number == 13 else 'short'}" in text
    assert shown_rows(text) == expected
    assert sum("{+" in row for row in expected) and sum("[=" in row for row in expected)


@pytest.mark.parametrize("masking", ["bernoulli", "reference"])
def test_other_maskings_are_shown_as_they_are_trained(tiny_run: TinyRun, masking: str) -> None:
    config = read_run(tiny_run(f"objective.masking={masking}", "data.packing_window=1"))  # rows with more padding
    text = inspect_run(config, 2, 1000, color=False)
    special = "[-[CLS]-]" in text or "[-[SEP]-]" in text
    assert special == (masking == "reference")
    assert ("of them overwritten" in text) == (masking == "reference")
    if masking == "bernoulli":
        assert shown_rows(text) == trained_rows(config, 2)


@pytest.mark.runs
def test_permuted_orders_are_shown_without_query_tokens(tiny_run: TinyRun) -> None:
    """The text is unchanged, with a mark at each predicted token: the same rows as with masks, by their text."""
    permuted, masked = (
        inspect_run(read_run(tiny_run(f"objective={{name: {name}}}")), 2, 1000, color=False)
        for name in ("permutation", "mlm")
    )
    said = re.findall(r"objective permutation: (\d+) of (\d+) tokens", permuted.replace(",", ""))
    predicted, tokens = map(int, said[0])
    assert tokens / 7 < predicted <= tokens / 6 and "100.0% kept" in permuted
    mark = re.compile(r"\[-(.*?)-\](\{\+.*?\+\})?|\[=(.*?)=\]")
    unmarked = [mark.sub(r"\1\3", text).split("=== row")[1:-1] for text in (permuted, masked)]
    assert unmarked[0] == unmarked[1] and len(unmarked[0]) > 2
    assert permuted.count("[=") - 1 == predicted


def test_only_the_requested_rows_are_shown(tiny_run: TinyRun) -> None:
    config = read_run(tiny_run())
    whole, part = (inspect_run(config, 1, rows, color=False) for rows in (1000, 3))
    assert len(shown_rows(whole)) == 4
    assert shown_rows(part) == shown_rows(whole)[:3]


def test_colours_add_no_information(tiny_run: TinyRun) -> None:
    config = read_run(tiny_run())
    plain, colored = (inspect_run(config, 1, 4, color=color) for color in (False, True))
    assert not ANSI.search(plain)
    assert ANSI.sub("", colored) == plain
    painted = {code: re.findall(rf"\x1b\[1;{code}m(.*?)\x1b\[0m", colored) for code in (31, 33, 32)}
    assert all(painted.values()) and all(text.startswith("[-") and text.endswith("-]") for text in painted[31])
    assert all("{+" in text for text in painted[33]) and all(text.startswith("[=") for text in painted[32])


def test_mixture_and_packing_are_those_of_the_plans(tiny_run: TinyRun, tiny_data: Path) -> None:
    """All 12 or so batches of the first phase, counted chunk by chunk through the documents' streams."""
    folders = "{{a: {{path: {0}/train, proportion: 0.25}}, b: {{path: {0}/validation, proportion: 0.75}}}}"
    config = read_run(tiny_run("data.train=null", f"data.streams={folders.format(tiny_data)}"))
    text = inspect_run(config, 1, 1, color=False)
    streams, plans = planned(config)
    plans = [plan for plan in plans if plan.phase == "short"]
    chunks = [chunk for plan in plans for row in plan.rows for chunk in row]
    of_a = [chunk for chunk in chunks if streams.stream_of(chunk.document) == "a"]
    share = sum(chunk.length for chunk in of_a) / sum(chunk.length for chunk in chunks)
    begun = sum(chunk.start == 0 for chunk in of_a) / sum(chunk.start == 0 for chunk in chunks)
    lines = [line.split() for line in text.splitlines()]
    assert ["a", "25.00%", f"{share:.2%}", f"{begun:.2%}"] in lines
    assert ["b", "75.00%", f"{1 - share:.2%}", f"{1 - begun:.2%}"] in lines
    assert abs(share - 0.25) < 0.05
    rows = sum(plan.num_rows for plan in plans)
    filled = sum(chunk.length + 2 for chunk in chunks)
    assert f"packing over {rows} rows from this batch on\n{filled / (64 * rows):.2%} full" in text
    assert re.search(r"^  tokens +a +b$", text, re.MULTILINE)


def test_one_stream_is_all_of_the_mixture(tiny_run: TinyRun) -> None:
    text = inspect_run(read_run(tiny_run()), 1, 1, color=False)
    assert text.splitlines()[-1].split() == ["train", "100.00%", "100.00%", "100.00%"]


def test_the_histogram_by_hand() -> None:
    lengths = {"a": np.array([1, 2, 3, 4, 7, 8], np.uint32), "b": np.array([64, 5, 6], np.uint32)}
    lines = length_histogram(lengths, row_tokens=10, special_tokens=2).splitlines()
    counts = {
        tuple(line.split()[:-3]) if "to" in line else (line.split()[0],): line.split()[-3:] for line in lines[2:5]
    }
    assert counts[("1",)][:2] == ["1", "0"]
    assert counts[("2", "to", "3")][:2] == ["2", "0"]
    assert counts[("4", "to", "7")] == ["2", "2", "#" * 40]
    assert len(lines) == 2 + 7 + 1
    assert lines[-1].startswith("9 documents, 100 tokens; median 5, longest 64; 11.1% are longer than a row of 10")


@pytest.mark.runs
def test_the_last_batches_of_a_run_can_be_seen_and_none_after(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    last = len(planned(read_run(tiny_run()))[1])
    assert main(["inspect", *tiny_run(), "--batch", str(last)]) == 0
    assert f"tiny: batch {last}, phase long" in capsys.readouterr().out
    assert main(["inspect", *tiny_run(), "--batch", str(last + 1)]) == 78
    said = capsys.readouterr().err
    assert said == f"error: --batch {last + 1}: the run ends with batch {last}. Name one from 1 to {last}.\n"


@pytest.mark.slow
def test_it_needs_no_composer(tiny_run: TinyRun) -> None:
    done = call_probed("inspect", *tiny_run())
    assert done.returncode == 0 and "composer" not in done.stdout.splitlines()[-1], done.stderr
    assert not ANSI.search(done.stdout)  # a pipe is not a terminal


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert wants_color(refused=False) and not wants_color(refused=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(refused=False)
    monkeypatch.setenv("NO_COLOR", "")  # an empty value has no effect: no-color.org
    assert wants_color(refused=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert not wants_color(refused=False)


def test_text_cannot_drive_the_terminal() -> None:
    """A document may contain escape sequences, which could repaint the screen or worse."""
    assert visible("a\x1b[31mb\tc\nd\u202e é") == "a\\x1b[31mb\\tc↵d\\u202e é"
