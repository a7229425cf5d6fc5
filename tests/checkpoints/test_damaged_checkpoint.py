"""Damaged or edited checkpoints, with and without matching hashes: each time the checkpoint before is used.

If this breaks, a run continues from a state that it never had, or ends with a traceback instead of resuming.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.checkpoints import manifest
from modernbert_train.checkpoints.checkpoint import newest_valid, verify
from modernbert_train.checkpoints.manifest import MANIFEST, read_manifest
from modernbert_train.checkpoints.saved_state import GuardState, SavedTime, read_state
from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import PhaseConfig
from modernbert_train.data.packing import PackerState
from modernbert_train.data.planner_state import PlannerState
from modernbert_train.data.shuffle import CursorState
from modernbert_train.errors import StorageError
from tests.support.small_checkpoint import BAD_TENSORS, CONFIG, edit_state, sign, state_of, write


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


VALUES = (None, True, -1, 2, 1e308, 10**30, "1", [], {}, nested(50))
MANIFEST_EDITS = [("step", value) for value in VALUES if value is not None]
MANIFEST_EDITS += [(field, value) for field in ("phase_end", "milestone") for value in VALUES if value is not True]
MANIFEST_EDITS += [("files", value) for value in VALUES] + [("more", 1), ("schema", "3")]


@pytest.mark.runs
@pytest.mark.parametrize("signed", [False, True])
def test_every_edited_field_of_a_manifest_means_the_checkpoint_before(tmp_path: Path, signed: bool) -> None:
    """Signed or not: an invalid manifest is rejected even with the right hash, and never causes a traceback."""
    write(tmp_path, 1)
    folder = write(tmp_path, 3)
    original = (folder / MANIFEST).read_text()

    def edited(change: Callable[[dict[str, Any]], Any]) -> str:
        content = json.loads(original)
        change(content)
        (folder / MANIFEST).write_text(json.dumps(content))
        if signed:
            sign(folder, change)
        with pytest.raises(StorageError) as error:
            read_manifest(folder)
        return str(error.value)

    for field, value in MANIFEST_EDITS:
        assert "step-00000003" in edited(lambda content: content.update({field: value})), (field, value)  # noqa: B023
    for name in manifest.FILES:
        said = edited(lambda content: content["files"].pop(name, None))  # noqa: B023
        assert not signed or f"does not list {name}" in said
    for name in ("step", "phase_end", "milestone", "files", "schema"):
        said = edited(lambda content: content.pop(name, None))  # noqa: B023
        assert not signed or f"{name}: missing" in said
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 1
    assert len(passed_over) == 1 and "step-00000003/MANIFEST.json: damaged" in passed_over[0]
    (folder / MANIFEST).write_text(original)
    assert verify(folder).step == 3


@pytest.mark.runs
def test_a_copy_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """It would be resumed from as the newest; under a name without a step it is accepted as itself."""
    shutil.copytree(write(tmp_path, 1), tmp_path / "step-00000009")
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.folder.name == "step-00000001"
    copy = tmp_path / "step-00000009"
    assert passed_over == [f"{copy}: its MANIFEST.json is that of step 1; it was copied or renamed"]
    copy.rename(tmp_path / "best")
    assert verify(tmp_path / "best").step == 1
    shutil.copytree(write(tmp_path, 2), tmp_path / "other" / "step-00000002")
    assert verify(tmp_path / "other" / "step-00000002").step == 2
    sign(tmp_path / "other" / "step-00000002", lambda content: content.update(step=3))
    (tmp_path / "other" / "step-00000002").rename(tmp_path / "step-00000003")
    with pytest.raises(StorageError, match=r"state\.json: .* step: expected 3, as the manifest says, found 2"):
        verify(tmp_path / "step-00000003")


STATE_EDITS: list[tuple[str, Any, str]] = [
    ("step", 1, "step: expected 2, as the manifest says, found 1"),
    ("tokens", 1e308, "tokens: expected a whole number"),
    ("tokens", 10**308, "tokens: expected a whole number"),
    ("tokens", 21, "training.loader.tokens: expected 21, found 20"),
    ("phase", "long", "phase: expected one of short, found long"),
    ("phase", None, "phase: expected text"),
    ("data", {}, "data.tokenizer: expected its hash"),
    ("data", {"tokenizer": 1}, "data.tokenizer: expected text"),
    ("training.timestamp.epoch", -1, "training.timestamp.epoch: expected a whole number"),
    ("training.loader.tokens", 10, "training.loader.tokens: expected 20"),
    ("training.timestamp.batch", 999, "training.timestamp.batch: expected 2, found 999"),
    ("training.timestamp.token", 1, "training.timestamp.token: expected 20, found 1"),
    ("training.loader.streams.train.block", -1, "training.loader.streams.train.block: expected a whole number"),
    ("training.loader.packer.waiting", [[1, [1, 2, 3]]], r"loader.packer.waiting\[0\]\[1\]: expected a list of 4"),
    ("training.stability.losses", [None], r"training.stability.losses\[0\]: expected a number"),
    (
        "training.stability.skipped_updates.0.step",
        "1",
        r"training.stability.skipped_updates\[0\].step: expected a whole number",
    ),
    ("training.seconds", 1e300, r"training.seconds: expected below 1000000000, found 1e\+300"),
    ("training.seconds", -1e9, "training.seconds: expected below"),
    ("training.timestamp.epoch", 3, "training.timestamp.epoch: expected 0, found 3"),
    ("training.timestamp.sample", 0, "training.timestamp.sample: expected 2 to 20 rows, found 0"),
    ("training.stability.unlabelled_steps", 10**9, "training.stability.unlabelled_steps: expected at most 2"),
    ("training.stability.skipped_updates.0.step", 10**6, r"skipped_updates\[0\]: expected at most step 2"),
    ("training.stability.skipped_updates.0.tokens", [5, 1], r"skipped_updates\[0\]: expected at most step 2"),
    ("average", [{}], r"average\[0\].* missing"),
]
FIELDS = ("step", "tokens", "phase", "data", "training", "average", *(
    f"training.{name}"
    for name in (
        *("seconds", "timestamp", "loader", "stability"),
        *(f"timestamp.{key}" for key in SavedTime.__annotations__),
        *(f"loader.{key}" for key in PlannerState.__annotations__),
        *(f"loader.streams.train.{key}" for key in CursorState.__annotations__),
        *(f"loader.packer.{key}" for key in PackerState.__annotations__),
        *(f"stability.{key}" for key in GuardState.__annotations__),
    )
))  # fmt: skip


@pytest.mark.runs
def test_a_state_that_makes_no_sense_means_the_checkpoint_before_and_names_the_field(tmp_path: Path) -> None:
    """Every field missing and of a wrong type, and impossible values, all with matching hashes."""
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    original = (folder / manifest.STATE).read_text()
    edits: list[tuple[str, Any, str]] = [*STATE_EDITS]
    edits += [(field, ..., f"{re.escape(field)}: missing") for field in FIELDS if not field.endswith(".given")]
    edits += [(field, value, re.escape(field)) for field in FIELDS for value in ("x", [["x"]], True, {"x": 1})]
    for field, value, message in edits:
        if value == "x" and field.endswith(".phase"):
            continue  # an ordinary name
        if (field, value) == ("phase", "x"):
            message = "expected .*, found x"
        (folder / manifest.STATE).write_text(original)
        edit_state(folder, field, value)
        with pytest.raises(ValueError, match=message):
            read_state(folder / manifest.STATE, CONFIG, 2)
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 1
    assert re.search(r"step-00000002/state\.json: damaged, though its hash is right; training\.", passed_over[0])
    (folder / manifest.STATE).write_text(original)
    sign(folder)
    assert verify(folder).state == state_of(2)


def test_a_phase_that_the_clock_does_not_have_at_these_tokens_is_refused(tmp_path: Path) -> None:
    """A batch belongs to the phase in which it starts, and passes its end by less than a batch of 128 tokens."""
    shape = {"row_tokens": 64, "batch_rows": 2, "microbatch_tokens": 64}
    phases = {"early": PhaseConfig(tokens=1000, **shape), "late": PhaseConfig(tokens=500, **shape)}
    config, file = replace(CONFIG, phases=phases), tmp_path / "state.json"
    for tokens, phase, fits in (
        (10, "early", True),
        (1127, "early", True),
        (1128, "early", False),
        (1000, "late", False),
        (1001, "late", True),
        (1627, "late", True),
        (1628, "late", False),
    ):
        file.write_text(state_of(1, tokens=tokens, phase=phase).as_json())
        with nullcontext() if fits else pytest.raises(ValueError, match=f"^phase: expected .*, found {phase}"):
            assert read_state(file, config, 1).tokens == tokens


HARDLY_JSON = ['{"step": Infinity}', '{"step": NaN}', "[" * 100_000, '{"files":' * 100_000, "\0" * 99, ""]
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
# an average lacks an optimizer, and steps are counted in whole numbers
BAD_MOMENTS = {name: content for name, content in BAD_TENSORS.items() if name not in ("no tensors", "whole numbers")}
NONE_OF_IT: dict[str, list[bytes]] = {
    MANIFEST: [text.encode() for text in HARDLY_JSON],
    manifest.STATE: [text.encode() for text in (*HARDLY_JSON, "[]", "null", "7", '"x"')],
    manifest.CONFIG_YAML: [text.encode() for text in ("", "[]", "name: x", "\0\1", "[" * 5_000, LAUGHS)],
    manifest.WEIGHTS: [*BAD_TENSORS.values()],
    manifest.OPTIMIZER: [*BAD_MOMENTS.values()],
}


MESSAGES = dict.fromkeys((manifest.STATE, manifest.CONFIG_YAML), "damaged, though its hash is right")
MESSAGES[MANIFEST] = "damaged"


@pytest.mark.runs
@pytest.mark.parametrize("name", NONE_OF_IT)
def test_content_of_another_kind_means_the_checkpoint_before(tmp_path: Path, name: str) -> None:
    """With matching hashes, except for the manifest's own; of tensors only the header is read, and all of it."""
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    for content in NONE_OF_IT[name]:
        (folder / name).write_bytes(content)
        if name != MANIFEST:
            sign(folder)
        found, (passed_over,) = newest_valid(tmp_path)
        assert found is not None and found.step == 1 and f"step-00000002/{name}: " in passed_over, content[:99]
        assert MESSAGES.get(name, "") in passed_over


def test_a_configuration_of_another_model_means_the_checkpoint_before(tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    (folder / manifest.CONFIG_YAML).write_text(to_yaml(CONFIG).replace("hidden_size: 4", "hidden_size: 8"))
    sign(folder)
    found, passed_over = newest_valid(tmp_path)
    assert found is not None and found.step == 1 and "by its config.yaml" in passed_over[0]
