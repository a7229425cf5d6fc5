"""Fingerprint of a run's data: hashes of the tokenizer, of the training text and of the held-out text.

They are saved with each checkpoint and compared when a run goes on. Standard library only: a login node can ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from modernbert_train.data.facts import DataFacts
from modernbert_train.vocabulary import CONVENTION, NEEDED

_COUNTS, _HELD_OUT = "token counts", "validation"
# names of the hashes of a teacher: its weights, and what else it computes with; see weights/teacher.py
TEACHER, TEACHER_CONFIG = "teacher", "teacher's configuration"


@dataclass(frozen=True)
class Difference:
    """A part of the data that is another one now; `then` and `now` are its hashes, or "absent"."""

    name: str
    then: str
    now: str

    @property
    def is_trained_on(self) -> bool:
        """Whether it is text that is trained on, or the tokenizer; else only figures depend on it."""
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
    """Hashes by name, of all there is: a run may be without held-out text, and then without counts of tokens.

    Raises:
        DataError: counts of tokens cannot be read.
    """
    roles, found = facts.vocabulary.roles, {"tokenizer": facts.vocabulary.sha256}
    if any(roles[role] != CONVENTION[role] for role in NEEDED):  # they stand beside tokenizer.json, not in it
        found["roles of special tokens"] = sha256(repr([roles[role] for role in NEEDED]).encode()).hexdigest()
    for name, folder in facts.streams.items():
        of = "" if folder.key == "data.train" else f" of {name}"
        found |= {f"shards{of}": folder.card.index_sha256, f"lengths{of}": folder.card.lengths_sha256}
        if folder.card.labels_sha256 is not None:
            found[f"labels{of}"] = folder.card.labels_sha256
        if (counts := folder.token_counts_sha256()) is not None:
            found[f"{_COUNTS}{of}"] = counts
    if facts.validation is not None:
        card = facts.validation.card
        found |= {f"{_HELD_OUT} shards": card.index_sha256, f"{_HELD_OUT} lengths": card.lengths_sha256}
    return found


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[Difference]:
    """Return what differs between two fingerprints.

    What only figures depend on may be added or left out, and not be exchanged. Checkpoints of earlier versions have no
    hash of a teacher's configuration.
    """
    found = [
        Difference(name, there.get(name, "absent"), here.get(name, "absent"))
        for name in sorted(here.keys() | there.keys())
        if name != TEACHER_CONFIG or name in there
    ]
    return [
        each
        for each in found
        if each.then != each.now and (each.is_trained_on or "absent" not in (each.then, each.now))
    ]


def known_since(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """The fingerprint of a run that goes on: what it was once measured by stays known where it is left out now."""
    return dict(there) | dict(here)
