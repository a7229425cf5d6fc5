"""The injuries of a run, a row for each kind: their number in the whole and the short drill, and a function.

An injury is drawn only from the seed, its kind and the number of its round, so a round can be repeated. A round injures
one run several times if possible, since starts are the most expensive part.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.drill.damaged import damage, data_faults, edit_json, flip_bit, nothing_whole, remove, truncate
from benchmarks.drill.disks import full_disk, read_only
from benchmarks.drill.killed import anywhere, elastic, freeze, inside_save, kills, kills_of_many, pause, signals
from benchmarks.drill.lab import Round
from benchmarks.drill.others import clocks, not_finite, two_jobs
from benchmarks.drill.stores import store_faults


@dataclass(frozen=True)
class Injury:
    """A kind of injury.

    Attributes:
        name: for --only.
        what: for the table.
        count, quick: number in the whole drill, and in its short form.
        at_a_time: number in a round.
        round: runs a round and returns the outcome of each injury.
    """

    name: str
    what: str
    count: int
    quick: int
    at_a_time: int
    round: Round


INJURIES = {
    each.name: each
    for each in (
        Injury("kill", "kill -9 of the only rank", 60, 3, 6, kills(anywhere, "rank", 1)),
        Injury("kill-save", "kill -9 of the only rank inside a save", 40, 3, 6, kills(inside_save, "rank", 1)),
        Injury("kill-worker", "kill -9 of a data worker", 20, 1, 4, kills(anywhere, "worker", 1)),
        Injury("kill-launcher-2", "kill -9 of the launcher of two ranks", 25, 1, 5, kills(anywhere, "launcher", 2)),
        Injury("kill-rank-2", "kill -9 of a rank of two", 25, 1, 5, kills(anywhere, "rank", 2)),
        Injury("kill-rank-many", "kill -9 of a rank of three or four, by DDP, FSDP2, HSDP", 24, 1, 3, kills_of_many),
        Injury("kill-worker-2", "kill -9 of a data worker of two ranks", 10, 0, 5, kills(anywhere, "worker", 2)),
        Injury("kill-save-2", "kill -9 of a rank of two inside a save", 20, 1, 5, kills(inside_save, "rank", 2)),
        Injury("truncate", "a file of a checkpoint cut at one of six places", 60, 5, 9, damage(truncate)),
        Injury("flip", "a bit flipped in a checkpoint", 500, 5, 9, damage(flip_bit)),
        Injury("manifest", "a manifest edited, nested, infinite", 60, 5, 9, damage(edit_json, "MANIFEST*")),
        Injury("json", "another JSON file of a checkpoint edited", 30, 0, 9, damage(edit_json, "[!M]*.json")),
        Injury("remove", "a file of a checkpoint removed", 18, 0, 9, damage(remove)),
        Injury("nothing-whole", "all checkpoints damaged", 4, 1, 1, nothing_whole),
        Injury("full-disk", "the disk full at a random byte", 50, 2, 5, full_disk),
        Injury("read-only", "the disk read-only, before and during the run", 10, 1, 2, read_only),
        Injury("signal", "SIGTERM, SIGINT, SIGUSR1 from the start on", 100, 4, 5, signals(1)),
        Injury("signal-2", "the same to the launcher or a rank of two", 50, 1, 5, signals(2)),
        Injury("freeze", "SIGSTOP of a rank or a data worker", 10, 1, 2, freeze),
        Injury("pause", "SIGSTOP, then SIGCONT", 10, 0, 5, pause),
        Injury("two-jobs", "two jobs on one folder", 6, 1, 2, two_jobs(None)),
        Injury("two-hosts", "the same from a host of another name", 4, 0, 2, two_jobs("another-host")),
        Injury("clock", "the clock set back or forward", 15, 1, 3, clocks),
        Injury("nan", "NaN or infinity on one rank of two", 15, 1, 3, not_finite),
        Injury("data", "a file of the data harmed while it trains", 30, 2, 5, data_faults),
        Injury("store", "the store of the copies hangs, fails, is gone; then the run's folder", 24, 2, 8, store_faults),
        Injury("elastic", "4, 2, 1, 4 ranks by DDP, FSDP2, HSDP, killed between", 16, 0, 4, elastic),
    )
}
