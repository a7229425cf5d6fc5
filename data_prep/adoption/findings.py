"""Findings of a pass over documents: counts that add up over parts, and their description.

Documents that were joined are recognised by special tokens in the middle. This cannot be undone, so it is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.text import plural
from modernbert_train.data.shard_file import ends_of
from modernbert_train.errors import DataError


@dataclass
class Findings:
    """Counts of documents and tokens.

    Attributes:
        documents, tokens: as training will read them, without special tokens at the ends.
        empty: documents without other tokens.
        hashed: shards whose hash was computed, because the index had none.
        verified: shards whose hash was correct.
        dtypes: type of the ids, by the folder of the shard.
        first, last: special token at the beginning or end of a document -> documents.
        removed: special token -> times it is removed from the ends.
        joined: documents with a special token in the middle.
    """

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    hashed: int = 0
    verified: int = 0
    dtypes: dict[str, str] = field(default_factory=dict)
    first: Counter[int] = field(default_factory=Counter)
    last: Counter[int] = field(default_factory=Counter)
    removed: Counter[int] = field(default_factory=Counter)
    joined: int = 0

    def add(self, other: Findings) -> None:
        for name in ("documents", "tokens", "empty", "hashed", "verified", "joined"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("first", "last", "removed"):
            getattr(self, name).update(getattr(other, name))
        for folder, dtype in other.dtypes.items():
            self.add_dtype(folder, dtype)

    def add_dtype(self, folder: str, dtype: Any) -> None:
        self.dtypes[folder] = np.result_type(dtype, self.dtypes.get(folder, dtype)).name

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Findings:
        findings = cls(**content)
        for name in ("first", "last", "removed"):
            setattr(findings, name, Counter({int(key): count for key, count in content[name].items()}))
        return findings


class Counting:
    """Counts documents one by one, and their tokens in bulk.

    Args:
        special: ids that are removed from the ends.
        vocab_size: one more than the largest id allowed.

    Attributes:
        findings: of the documents so far; complete after `finish`.
        counts: int64, occurrences of each id; after `finish`.
        lengths: of each document, as training will read it.
    """

    _AT_ONCE = 1 << 18  # tokens; one by one, a vocabulary of 256,000 would cost more than reading

    def __init__(self, special: Collection[int], vocab_size: int) -> None:
        self.findings = Findings()
        self.counts = np.zeros(vocab_size, np.int64)
        self.lengths: list[int] = []
        self._special = special
        self._is_special = np.zeros(vocab_size, np.bool_)
        self._is_special[[id for id in special if id < vocab_size]] = True
        self._waiting: list[NDArray[Any]] = []
        self._ends: list[NDArray[Any]] = []
        self._tokens = 0

    def take(self, ids: NDArray[Any], where: str, number: int) -> NDArray[Any]:
        """Count a document.

        Args:
            ids: as stored, a one-dimensional array of integers.
            where, number: the file, and the document in it, for messages.

        Returns:
            The ids that training will read.

        Raises:
            DataError: an id is not in the vocabulary; names it.
        """
        findings = self.findings
        if len(ids):
            for id in (int(ids.min()), int(ids.max())):
                if not 0 <= id < len(self.counts):
                    raise DataError(
                        f"{where}: document {number} holds token id {id}, the tokenizer has {len(self.counts)} "
                        "entries. The ids belong to another tokenizer; name theirs with --tokenizer."
                    )
            for counter, id in ((findings.first, int(ids[0])), (findings.last, int(ids[-1]))):
                if id in self._special:
                    counter[id] += 1
        start, end = ends_of(ids, self._special)
        inner = ids[start:end]
        self._ends += [each for each in (ids[:start], ids[end:]) if len(each)]
        self.lengths.append(len(inner))
        findings.documents += 1
        findings.tokens += len(inner)
        findings.empty += not len(inner)
        if len(inner):
            self._waiting.append(inner)
            self._tokens += len(inner)
        self._tokens += len(ids) - len(inner)
        if self._tokens >= self._AT_ONCE:
            self.finish()
        return inner

    def finish(self) -> None:
        """Count the tokens that are still waiting."""
        if self._ends:
            removed, times = np.unique(np.concatenate(self._ends), return_counts=True)
            self.findings.removed.update(dict(zip(removed.tolist(), times.tolist(), strict=True)))
        self._ends, self._tokens = [], 0
        if not self._waiting:
            return
        ids = np.concatenate(self._waiting).astype(np.int64)
        self.counts += np.bincount(ids, minlength=len(self.counts))
        positions = np.flatnonzero(self._is_special[ids])
        ends = np.cumsum([len(each) for each in self._waiting])
        self.findings.joined += len(np.unique(np.searchsorted(ends, positions, side="right")))
        self._waiting = []


def describe(findings: Findings, counts: NDArray[np.int64], names: Mapping[int, str]) -> Iterator[str]:
    """Yield the findings, line by line.

    Args:
        findings: of the whole dataset.
        counts: occurrences of each id within documents.
        names: of the special tokens.
    """
    yield f"{plural(findings.documents, 'document')}, {plural(findings.tokens, 'token')}"
    if findings.empty:
        yield f"{plural(findings.empty, 'document')} of them hold only special tokens, and are never drawn"
    for words, counter in (("begin", findings.first), ("end", findings.last)):
        for id, number in counter.most_common():
            share = number / findings.documents
            yield f"{share:.1%} of the documents {words} with {names[id]} ({id}): removed, the loader adds its own"
    if findings.removed:
        yield f"removed in all: {', '.join(f'{number:,} {names[id]}' for id, number in findings.removed.most_common())}"
    else:
        yield "no special tokens at the ends of documents: the loader adds them"
    if findings.joined:
        shown = ", ".join(f"{names[id]} ({id}) {int(counts[id]):,} times" for id in names if counts[id])
        yield (
            f"concatenated: {findings.joined / findings.documents:.1%} of the documents have special tokens in their "
            f"middle ({shown}), as if several documents were joined; these stay, and a text attends to its neighbour"
        )
