"""Test the tests: plant the faults of faults.py one at a time, and report the test that notices each.

    python -m benchmarks.planted_faults --out planted.jsonl              # all of them, one after the other
    python -m benchmarks.planted_faults --only dropout-place beta2-step  # some of them

The checkout is unchanged: the files that git knows are copied into a temporary folder, and each fault is planted there,
tested with the files that it names, and removed again. The test that notices it must pass without it, or its failure
would be meaningless. With --out, results are kept, and the same command continues after an interruption; results for
other code or tests are ignored. Exit code 1 if a fault was not noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent
SURVIVED = "SURVIVED"
# the same examples for each fault, and no shrinking, which takes minutes
_HYPOTHESIS = """
from hypothesis import Phase, settings
settings.register_profile("planted", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate))
"""


@dataclass(frozen=True)
class Outcome:
    """The result of planting a fault.

    Attributes:
        fault: its name.
        noticed_by: the first test that failed; None if none did.
        trouble: why the result is meaningless: that test fails without the fault too, or the tests hang or do not run.
        seconds: that it took.
    """

    fault: str
    noticed_by: str | None
    trouble: str | None
    seconds: float

    def text(self) -> str:
        """Return the outcome as a cell of a table."""
        return self.trouble or self.noticed_by or SURVIVED


def copy_tree(root: Path, to: Path) -> str:
    """Copy the files that git knows, changed and new files included; return a hash of them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    )
    sha256 = hashlib.sha256()
    for name in sorted(filter(None, listed.stdout.decode().split("\0"))):
        if (root / name).is_file():  # git still lists deleted files
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
            sha256.update(f"{name}\n".encode() + (root / name).read_bytes())
    return sha256.hexdigest()


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """Context in which a fault is planted in a tree.

    Raises:
        ValueError: the text to replace does not occur exactly once, so the table must be adjusted.
    """
    path = root / fault.file
    sound = path.read_text(encoding="utf-8")
    if (count := sound.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {fault.old!r} {count} times, not once. Adjust faults.py.")
    path.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(sound, encoding="utf-8")


def run_tests(tests: Sequence[str], root: Path, seconds: float) -> tuple[str | None, str | None]:
    """Run test files of a tree up to the first failure.

    Returns:
        The first test that failed, and a reason if there is no result; both None if all passed.
    """
    words = ["-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    if find_spec("hypothesis"):
        words += ["-p", "planted_hypothesis", "--hypothesis-profile=planted"]
    # no bytecode: a file changed twice within a second, without a change of size, would count as unchanged; and a fixed
    # hash seed, so that results are reproducible
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as plugins, tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        Path(plugins, "planted_hypothesis.py").write_text(_HYPOTHESIS, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, *words, *tests],
            cwd=root,
            env=environment | {"PYTHONPATH": os.pathsep.join((str(root), plugins))},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None, f"stopped after {seconds:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read()
    if code == 0:
        return None, None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
    if failed is None or code not in (1, 2):  # 2: a test file cannot even be imported
        return None, f"pytest ended with {code}: {' '.join(text.split()[-12:])}"
    return failed[1], None


def try_faults(
    faults: Sequence[Fault], root: Path, out: Path | None, seconds: float, *, verbose: bool = True
) -> list[Outcome]:
    """Plant each fault separately in a copy of a tree.

    Args:
        faults: to plant.
        root: of a git checkout, which is not changed.
        out: file of outcomes, a JSON object a line; None to keep nothing.
        seconds: time limit for the tests of one fault.
        verbose: print each outcome.
    """
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as scratch:
        copy = Path(scratch, "tree")
        tree = copy_tree(root, copy)
        for package in sorted({fault.file.split("/")[0] for fault in faults}):
            _require_own(package, copy)
        kept, sound = _read(out, tree), dict[str, str | None]()
        outcomes = []
        for fault in faults:
            key = hashlib.sha256(json.dumps(fault).encode()).hexdigest()
            outcome = kept.get(key) or _try(fault, copy, sound, seconds)
            if out is not None and key not in kept:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"tree": tree, "key": key} | asdict(outcome)) + "\n")
            if verbose:
                print(f"{outcome.fault}: {outcome.text()} ({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
    return outcomes


def _try(fault: Fault, copy: Path, sound: dict[str, str | None], seconds: float) -> Outcome:
    began = time.monotonic()
    with planted(fault, copy):
        noticed_by, trouble = run_tests(fault.tests, copy, seconds)
    if noticed_by is not None:
        if noticed_by not in sound:
            failed, why = run_tests([noticed_by], copy, seconds)
            sound[noticed_by] = why or (f"{failed} fails without any fault" if failed else None)
        trouble = sound[noticed_by]
    return Outcome(fault.name, None if trouble else noticed_by, trouble, round(time.monotonic() - began, 1))


def _require_own(package: str, copy: Path) -> None:
    """Raise an error if an installed copy of the project would be tested: every fault would survive."""
    code = f"import {package}; print(list({package}.__path__)[0])"
    environment = os.environ | {"PYTHONPATH": str(copy)}
    printed = subprocess.run([sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True)
    if Path(printed.stdout.strip()).resolve() != (copy / package).resolve():
        raise RuntimeError(
            f"{package} is imported from {printed.stdout or printed.stderr}, not from the copy in {copy}."
        )


def _read(out: Path | None, tree: str) -> dict[str, Outcome]:
    """Return the known, certain outcomes for this tree."""
    if out is None or not out.exists():
        return {}
    outcomes = {}
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        of_tree, key, outcome = entry.pop("tree"), entry.pop("key"), Outcome(**entry)
        if of_tree == tree and outcome.trouble is None:
            outcomes[key] = outcome
    return outcomes


def table(faults: Sequence[Fault], outcomes: Sequence[Outcome]) -> str:
    """Return faults and outcomes as a Markdown table."""
    lines = ["| fault | in | what a user would lose | noticed by | seconds |", "| --- | --- | --- | --- | --- |"]
    for fault, outcome in zip(faults, outcomes, strict=True):
        words = (fault.name, f"`{fault.file}`", fault.loses, outcome.text(), f"{outcome.seconds:.0f}")
        lines.append(f"| {' | '.join(words)} |")
    noticed = sum(outcome.noticed_by is not None for outcome in outcomes)
    return "\n".join([*lines, "", f"{noticed} of {len(outcomes)} noticed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAULT", help="some of the faults")
    parser.add_argument("--out", type=Path, help="file of outcomes, to continue from")
    parser.add_argument("--seconds", type=float, default=300.0, help="for the tests of one fault")
    options = parser.parse_args()
    faults: Sequence[Fault] = FAULTS
    if options.only:
        if unknown := set(options.only) - {fault.name for fault in FAULTS}:
            parser.error(f"--only {' '.join(sorted(unknown))}: the faults are {', '.join(f.name for f in FAULTS)}")
        faults = [fault for fault in FAULTS if fault.name in options.only]
    outcomes = try_faults(faults, ROOT, options.out, options.seconds)
    print(f"\n{table(faults, outcomes)}")
    return 0 if all(outcome.noticed_by is not None for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
