"""Files that mean harm, opened by every verb that could: nothing runs, nothing leaves its folder, memory stays bounded.

If this breaks, a checkpoint or a dataset from a stranger costs more than its own run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.drill.lab import DOCUMENTED
from tests.security.hostile import HOSTILE, VERBS
from tests.security.opening import SECRET, lines_of

MEMORY = 2_000_000_000  # imports take 0.4 GB of it
# the harm is nothing to a verb that does not read it
MAY_SUCCEED = (0, *DOCUMENTED)


def harm_of(found: dict[str, Any]) -> list[str]:
    """Return the forbidden effects of a file."""
    harm = []
    if found["beside"]:
        harm.append(f"ran, or left its folder: {found['beside']}")
    if not found["victim"]:
        harm.append("wrote through a link")
    if found["memory"] > MEMORY:
        harm.append(f"took {found['memory'] / 1e9:.1f} GB")
    if "Traceback (most recent" in found["said"] or "this is a bug" in found["said"]:
        harm.append(f"a traceback: {found['said'][-500:]}")
    elif found["code"] not in MAY_SUCCEED:
        harm.append(f"code {found['code']}: {found['said'][-500:]}")
    if found["script"]:
        harm.append("a script in a page")
    if SECRET in found["said"] or found["leaked"]:
        harm.append(f"told a secret: {found['leaked']}")
    if found["escapes"] or found["length"] > 100_000:
        harm.append(f"printed {found['escapes']} commands to the terminal, {found['length']} characters")
    return harm


@pytest.mark.runs
@pytest.mark.parametrize(
    "which",
    [
        pytest.param("few", marks=pytest.mark.timeout(600)),
        pytest.param("first", marks=(pytest.mark.timeout(600), pytest.mark.slow)),
        pytest.param("all", marks=(pytest.mark.timeout(3000), pytest.mark.weekly, pytest.mark.slow)),
    ],
)
def test_hostile_files_do_no_harm(tmp_path: Path, which: str) -> None:
    """One of each sort by one verb, each by one verb, and each by every verb that opens it."""
    found = lines_of("tests.security.opening", tmp_path, which)
    sorts = {(name.split(":")[0], kind) for name, (kind, _) in HOSTILE.items()}
    verbs = sum(len(VERBS[kind]) for kind, _ in HOSTILE.values())
    assert len(found) == {"few": len(sorts), "first": len(HOSTILE), "all": verbs}[which]
    harmful = {f"{each['name']}, by {each['verb']}": harm for each in found if (harm := harm_of(each))}
    assert not harmful, "\n".join(f"{name}: {'; '.join(harm)}" for name, harm in harmful.items())
