"""Training is unchanged: every step of small runs compared with recorded text.

If this breaks, a change altered the results of people's runs. If that was intended, `python -m tests.curves.record`
shows old and new and records the new.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.curves import record
from tests.curves.curves import (
    CURVES,
    FAULTS,
    FAULTY,
    differences,
    platform_text,
    read_recorded,
    train,
    write_recorded,
)
from tests.support.matrix import ENCODERS

ONE = [name for name, curve in CURVES.items() if curve.ranks == 1 and curve.system is None]
TWO = [name for name, curve in CURVES.items() if curve.ranks == 2]
# these take seconds; the others are slow
FEW_OF_ONE = [FAULTY, "stable_adamw-reference-1-rank", "dropout-1-rank", "bert-rtd", "modernbert-sparse"]


def recorded(name: str) -> str:
    return read_recorded()[name]


def assert_unchanged(found: dict[str, str]) -> None:
    here = f"# platform: {platform_text()}\n"
    checked = {name: text for name, text in found.items() if CURVES[name].anywhere or here in recorded(name)}
    assert len(checked) >= len(found) - 1
    if left_out := sorted(found.keys() - checked.keys()):
        warnings.warn(f"recorded on another processor, so not compared here: {', '.join(left_out)}", stacklevel=2)
    changed = {name: differences(recorded(name), text, CURVES[name].norms) for name, text in checked.items()}
    assert {name: lines[:3] for name, lines in changed.items() if lines} == {}


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_one_process_trains_as_recorded(tiny_data: Path, tmp_path: Path) -> None:
    assert_unchanged(train(FEW_OF_ONE, tmp_path, tiny_data))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_every_curve_of_one_process_is_as_recorded_and_a_changed_constant_is_noticed(
    tiny_data: Path, tmp_path: Path
) -> None:
    """Unchanged code leaves every curve; one constant of the schedule, the masking, the optimizer, each on its own,
    breaks it, also where another processor leaves only the tolerance to compare with."""
    found = train(ONE, tmp_path, tiny_data, FAULTS)
    assert_unchanged({name: found[name] for name in ONE})
    for fault in FAULTS:
        assert differences(recorded(FAULTY), found[fault]), fault
        elsewhere = found[fault].replace(platform_text(), "another processor")
        assert differences(recorded(FAULTY), elsewhere), fault


@pytest.mark.slow
@pytest.mark.timeout(290)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_trains_by_every_objective_as_recorded(encoder: str, tiny_data: Path, tmp_path: Path) -> None:
    """The same YAML and seed give the losses of the last release."""
    names = [name for name, curve in CURVES.items() if curve.system is not None and curve.system[0] == encoder]
    assert_unchanged(train(names, tmp_path, tiny_data))


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_two_ranks_train_as_recorded_under_ddp_and_fsdp2(tiny_data: Path, tmp_path: Path) -> None:
    assert_unchanged(train(TWO, tmp_path, tiny_data))


def test_what_counts_as_a_difference() -> None:
    """One bit on the same platform, the tolerance on another; a lost step and other data always."""
    text = recorded(FAULTY)
    last = text.splitlines()[-1].split(" ")
    loss = float(last[3])
    near, far = (text.replace(last[3], repr(loss * (1 + change))) for change in (1e-6, 1e-2))
    assert differences(text, text) == []
    assert len(differences(text, near)) == 1
    platform = next(line for line in text.splitlines() if line.startswith("# platform"))
    assert differences(text, near.replace(platform, "# platform: another")) == []
    assert len(differences(text, far.replace(platform, "# platform: another"))) == 1
    assert differences(text, text.replace(" ".join(last) + "\n", "")) != []
    assert "other data" in differences(text, text.replace("# data: ", "# data: 0"))[0]


def test_the_command_shows_both_and_writes_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An intended change needs both figures for the commit; showing them must not record."""
    old = recorded(FAULTY)
    last = old.split()[-1]
    new = old.replace(last, repr(float(last) + 1))
    file = tmp_path / "recorded.txt"
    write_recorded({FAULTY: old}, file)
    monkeypatch.setattr(record, "read_recorded", lambda: read_recorded(file))
    monkeypatch.setattr(record, "write_recorded", lambda curves: write_recorded(curves, file))
    monkeypatch.setattr(record, "train", lambda names, folder: dict.fromkeys(names, new))
    for words, after in (([FAULTY], old), ([FAULTY, "--write"], new)):
        monkeypatch.setattr("sys.argv", ["record", *words])
        record.main()
        said = capsys.readouterr().out
        assert last in said and repr(float(last) + 1) in said and "1 of 1 curves differ" in said
        assert f"| {FAULTY} | 1 of {len(old.splitlines()) - 3} | " in said
        assert read_recorded(file) == {FAULTY: after}
