"""Fingerprint of a run's data: hashes of the tokenizer, of the training text and of the held-out text.

Saved with each checkpoint and compared on resume. Standard library only, so it works on a login node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from modernbert_train.data.facts import DataFacts
from modernbert_train.vocabulary import CONVENTION, NEEDED

_COUNTS, _HELD_OUT = "token counts", "validation"
# names of the hashes of a teacher: its weights, and the rest of its computation; see weights/teacher.py
TEACHER, TEACHER_CONFIG = "teacher", "teacher's configuration"


@dataclass(frozen=True)
class Difference:
    """A part of the data that has changed; `then` and `now` are its hashes, or "absent"."""

    name: str
    then: str
    now: str

    @property
    def is_trained_on(self) -> bool:
        """True for training text and the tokenizer; other parts only influence figures."""
        return not self.name.startswith((_COUNTS, _HELD_OUT))

    @property
    def is_teacher(self) -> bool:
        return self.name in (TEACHER, TEACHER_CONFIG)

    @property
    def is_held_out(self) -> bool:
        return self.name.startswith(_HELD_OUT)

    def __str__(self) -> str:
        return f"its hash of {self.name} is {self.then[:12]}, now it is {self.now[:12]}"


def data_fingerprint(facts: DataFacts) -> dict[str, str]:
    """Return the hashes by name; held-out text, and then token counts, may be absent.

    Raises:
        DataError: token counts cannot be read.
    """
    roles, fingerprint = facts.vocabulary.roles, {"tokenizer": facts.vocabulary.sha256}
    if any(roles[role] != CONVENTION[role] for role in NEEDED):  # stored next to tokenizer.json, not in it
        fingerprint["roles of special tokens"] = sha256(repr([roles[role] for role in NEEDED]).encode()).hexdigest()
    for name, folder in facts.streams.items():
        of = "" if folder.key == "data.train" else f" of {name}"
        fingerprint |= {f"shards{of}": folder.card.index_sha256, f"lengths{of}": folder.card.lengths_sha256}
        if folder.card.labels_sha256 is not None:
            fingerprint[f"labels{of}"] = folder.card.labels_sha256
        if (counts := folder.token_counts_sha256()) is not None:
            fingerprint[f"{_COUNTS}{of}"] = counts
    if facts.validation is not None:
        card = facts.validation.card
        fingerprint |= {f"{_HELD_OUT} shards": card.index_sha256, f"{_HELD_OUT} lengths": card.lengths_sha256}
    return fingerprint


def differences(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[Difference]:
    """Return the differences between two fingerprints.

    Parts that only influence figures may be added or removed, but not replaced. Checkpoints of earlier versions lack
    the hash of a teacher's configuration.
    """
    changed = [
        Difference(name, recorded.get(name, "absent"), current.get(name, "absent"))
        for name in sorted(current.keys() | recorded.keys())
        if name != TEACHER_CONFIG or name in recorded
    ]
    return [
        each
        for each in changed
        if each.then != each.now and (each.is_trained_on or "absent" not in (each.then, each.now))
    ]


def known_since(recorded: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """Return a resumed run's fingerprint: parts that were once used for figures stay known after their removal."""
    return dict(recorded) | dict(current)
