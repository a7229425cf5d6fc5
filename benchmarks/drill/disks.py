"""Disks that are full or read-only."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.drill.killed import partial_of
from benchmarks.drill.lab import Lab, Outcome, Trainer, slow_steps


@contextmanager
def disk(lab: Lab, megabytes: int = 64) -> Iterator[Path]:
    """Context with a separate disk in memory; raises OSError if that is impossible here."""
    mount_point = lab.folder / "disk"
    mount_point.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "drill", str(mount_point))
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=False, capture_output=True)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(done.stderr.strip())


def full_disk(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Fill the disk after some bytes; then make room and repeat the command."""
    outcomes: list[Outcome] = []
    for _ in range(number):
        try:
            with disk(lab) as mount_point:
                run = lab.run(under=mount_point)
                run.folder.parent.mkdir(parents=True)
                room = draw.randrange(1 << 18)
                ballast = mount_point / "ballast"
                with ballast.open("wb") as file:
                    status = os.statvfs(mount_point)
                    os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - room))
                ended = run.finish()
                partial_files = sorted(partial_of(run))
                ballast.unlink()
                problem = (
                    ended.wrong(74, 0)
                    or (f"partial files stay: {partial_files}" if partial_files else "")
                    or run.settle()
                )
                if ended.code == 74 or problem:
                    what = f"disk full after {room:,} bytes"
                    outcomes.append(Outcome(what, "lost" if problem else "survived", problem))
        except OSError as error:
            return [Outcome("disk full", "skipped", f"no separate disk here: {error}")]
    return outcomes


def read_only(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Make the disk read-only at the start, or the folder of checkpoints between two saves."""
    outcomes = []
    for _ in range(number):
        try:
            with disk(lab) as mount_point:
                run = lab.run(under=mount_point)
                if during := draw.random() < 0.7:
                    run.checkpoints.mkdir(parents=True)
                    _mount("--bind", str(run.checkpoints), str(run.checkpoints))
                    trainer = run.start(hook=partial(slow_steps, 0.1))
                    steps = 1 + draw.randrange(20)
                    trainer.until(lambda: len(run.records()) >= steps)  # noqa: B023
                    what = f"checkpoints read-only after {steps} steps"
                    if not _becomes_read_only(run.checkpoints, trainer):
                        trainer.wait()
                        continue
                    ended = trainer.wait()
                    _mount("-o", "remount,rw,bind", str(run.checkpoints))
                else:
                    what = "the disk read-only before the start"
                    _mount("-o", "remount,ro", str(mount_point))
                    ended = run.finish()
                    _mount("-o", "remount,rw", str(mount_point))
                problem = ended.wrong(74) or run.settle()
                outcomes.append(Outcome(what, "lost" if problem else "survived", problem))
                if during:
                    subprocess.run(["umount", "-l", str(run.checkpoints)], check=False, capture_output=True)
        except OSError as error:
            return [*outcomes, Outcome("read-only", "skipped", f"cannot be done here: {error}")]
    return outcomes


def _becomes_read_only(folder: Path, trainer: Trainer) -> bool:
    """Retry while a file is open for writing, when the kernel refuses; return False if the run ends first."""
    done = False

    def tried() -> bool:
        nonlocal done
        words = ["mount", "-o", "remount,ro,bind", str(folder)]
        done = subprocess.run(words, capture_output=True).returncode == 0
        return done

    return trainer.until(tried) and done
