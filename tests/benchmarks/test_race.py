"""The race of recipes: equal compute, sealed, continued after a kill, decided by its rule."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from benchmarks.race.__main__ import Race
from benchmarks.race.protocol import HERE, Job, Protocol, configure, flops
from benchmarks.race.table import finalists_of, pooled_deviation, verdict

ROOT = Path(__file__).resolve().parents[2]
SEALED = Protocol.read(HERE / "protocol.yaml")
TINY = {
    "sealed": "2026-11-28",
    "tokenizer": {"vocab_size": 512},
    "validation_share": 0.1,
    "sizes": {
        "small": {
            "budget": 2e9,
            "model": {"vocab_size": 512, "hidden_size": 16, "num_layers": 1, "num_heads": 1, "intermediate_size": 24},
        }
    },
    "run": {
        "model": {"name": "modernbert"},
        "optim": {"name": "stable_adamw", "lr": 2e-3},
        "objective": {"mask_rate": 0.3},
        "phase": {"row_tokens": 64, "batch_rows": 4, "microbatch_tokens": 256},
        "phases": {"all": {"share": 1.0, "warmup": 0.1, "decay": 0.3}},
        "eval": {"max_tokens": 1000, "times_per_phase": 3},
        "compute": {"device": "cpu", "precision": "fp32"},
    },
    "reference": "recipe",
    "arms": {
        "recipe": {},
        "diverges": {"phases": {"all": {"share": 1.0, "warmup": 0.1, "decay": 0.3, "lr_ratio": 1e30}}},
        "average": {"average": 2},
    },
    "tuning": {"seed": 101, "share": 0.5, "multiples": [1.0]},
    "seeds": [17],
    "finalists": 1,
    "standard_errors": 2.0,
}


@pytest.mark.parametrize("size", SEALED.sizes)
def test_every_arm_of_the_sealed_protocol_spends_its_budget(size: str, tmp_path: Path) -> None:
    """An arm with more compute than the others would win for that."""
    budget = float(SEALED.tree["sizes"][size]["budget"])
    for arm in SEALED.trained():
        job = Job(size, arm, 17)
        counted = configure(SEALED, job, tmp_path / "data", tmp_path / "runs", tmp_path / "run.yaml")
        assert counted == pytest.approx(budget, rel=1e-3), arm
        assert flops(tmp_path / "run.yaml") == counted


def test_another_protocol_and_another_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    hashed = sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert Protocol({"text": {"a.jsonl": hashed}}, "x").check_text(tmp_path) == [tmp_path / "a.jsonl"]
    with pytest.raises(SystemExit, match=r"a\.jsonl: SHA-256 .*, and the protocol's text has 0000\. Get that text\."):
        Protocol({"text": {"a.jsonl": "0000"}}, "x").check_text(tmp_path)
    with pytest.raises(SystemExit, match=r"b\.jsonl: missing"):
        Protocol({"text": {"b.jsonl": "0000"}}, "x").check_text(tmp_path)
    Race(Protocol({}, "1234"), tmp_path / "out", 1.0)
    with pytest.raises(SystemExit, match=r"of another protocol \(1234, now 5678\)\. Race into an empty folder"):
        Race(Protocol({}, "5678"), tmp_path / "out", 1.0)


def test_the_rule_of_decision_by_hand() -> None:
    """Three seeds each with a deviation of 0.01: two standard errors of the difference are 0.0163."""
    assert pooled_deviation([[1.0, 1.01, 1.02], [2.0, 2.01, 2.02]]) == pytest.approx(0.01)
    assert math.isnan(pooled_deviation([[1.0], [math.inf, 1.0]]))
    assert verdict(2.98, 3, 3.0, 3, 0.01, 2.0) == "better"
    assert verdict(2.99, 3, 3.0, 3, 0.01, 2.0) == "within noise"
    assert verdict(3.02, 3, 3.0, 3, 0.01, 2.0) == "worse"
    assert verdict(2.0, 1, 3.0, 3, 0.01, 2.0) == "one seed"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_race_continues_and_a_diverged_arm_is_a_result(tmp_path: Path) -> None:
    """Nothing that was finished is trained again, and the repeated run differs by no bit."""
    words, draw = [chr(97 + a) + chr(97 + b) + "ing" for a in range(26) for b in range(26)], random.Random(17)
    texts = [json.dumps({"text": " ".join(draw.choices(words, k=600))}) for _ in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(texts) + "\n")
    tree = TINY | {"text": {"text.jsonl": sha256((tmp_path / "text.jsonl").read_bytes()).hexdigest()}}
    (tmp_path / "protocol.yaml").write_text(yaml.safe_dump(tree))
    out = tmp_path / "race"
    own = ["--protocol", str(tmp_path / "protocol.yaml"), "--out", str(out), "--text", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.race", *own]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while not (out / "results.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (out / "results.jsonl").read_text()
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert (out / "results.jsonl").read_text().startswith(before)
    race = Race(Protocol.read(tmp_path / "protocol.yaml"), out, 1.0)
    rows = race.results()
    assert len(rows) == len((out / "results.jsonl").read_text().splitlines())
    assert rows["small-recipe-lr-1-seed-17"]["loss"] == rows["small-recipe-lr-1-seed-17-again-1"]["loss"]
    assert rows["small-diverges-lr-1-seed-17"]["loss"] == math.inf
    assert finalists_of(race.protocol, race.results()) == ["recipe", "diverges"]
    assert sorted(os.listdir(out / "models")) == ["small-recipe-lr-1-seed-17"]
    table = (out / "table.md").read_text()
    assert "| average | 1 |" in table and "the same run repeated differs by 0." in table
