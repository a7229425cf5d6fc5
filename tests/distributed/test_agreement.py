"""Ranks that do not run the same. Without this, a machine with yesterday's checkout or other shards trains along."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.config.load import flat
from modernbert_train.distributed.agreement import code_hash, disagreement, identity
from tests.support.tiny_run import TinyRun
from tests.support.unwatched_ranks import run_ranks


def test_the_table_has_a_column_for_each_group_and_only_what_differs() -> None:
    ours = {"code": "1f", "torch": "2.13.0", "optim.lr": "0.001"}
    assert disagreement(["n1"] * 3, [ours] * 3) == ""
    other = ours | {"torch": "2.12.0"}
    older = {"code": "0e", "torch": "2.13.0"}
    table = disagreement(["n1", "n1", "n2", "n2", "n3"], [ours, ours, other, ours, older])
    assert table.splitlines() == [
        "            rank 0-1,3 on n1, n2  rank 2 on n2  rank 4 on n3",
        "  code      1f                    1f            0e",
        "  torch     2.13.0                2.12.0        2.13.0",
        "  optim.lr  0.001                 0.001         absent",
    ]


@pytest.mark.runs
def test_what_counts_and_what_may_differ(tiny_run: TinyRun) -> None:
    config = read_run(tiny_run())
    here = identity(flat(config), config.plugins, {"shards": "aa"})
    assert {"code", "torch", "mosaicml", "optim.lr", "hash of shards"} <= here.keys()
    elsewhere = read_run(tiny_run("launch.nodes=2", "data.train=/local/copy", "data.cache_folder=/scratch"))
    assert identity(flat(elsewhere), elsewhere.plugins, {"shards": "aa"}) == here
    assert identity(flat(config), config.plugins, {"shards": "bb"}) != here
    assert identity(flat(read_run(tiny_run("seed=6"))), [], {"shards": "aa"}) != here


def test_the_hash_of_the_code_is_that_of_its_files_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems list folders in any order; machines with equal checkouts must not be reported as different."""
    expected, listed = code_hash(), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(sorted(listed(self, pattern))))
    assert code_hash() == expected


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_ranks_may_have_the_data_at_other_paths(tiny_run: TinyRun, tmp_path: Path) -> None:
    """docs/clusters.md promises it: a machine may have its own copy of the shards."""
    short = ("phases.long=null", "phases.short.tokens=1500", "phases.short.schedule.decay_tokens=0")
    here = tiny_run(*short)
    copy = tmp_path / "a copy"
    shutil.copytree(read_run(here).data.train or "", copy)
    ends = run_ranks("-m", "modernbert_train", "train", each=[here, [*here, f"data.train={copy}"]])
    assert [code for code, _ in ends] == [0, 0], ends


@pytest.mark.weekly
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_ranks_of_two_configurations_are_refused_before_anything_is_written(tiny_run: TinyRun, tmp_path: Path) -> None:
    each = [tiny_run(f"optim.lr={rate}") for rate in (5e-3, 4e-3)]
    file = f"{tmp_path}/{{rank}}.json"
    ends = run_ranks("-m", "modernbert_train", "train", each=each, TORCHELASTIC_ERROR_FILE=file)
    for code, output in ends:
        assert code == 78 and "the ranks differ, and must all run the same" in output, ends
        assert [line.split() for line in output.splitlines() if "optim.lr" in line] == [["optim.lr", "0.005", "0.004"]]
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "1.json").exists()  # so that a launcher tells it last
