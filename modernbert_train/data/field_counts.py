"""Count documents and tokens by the value of a field: a licence, a language, a flag of personal data.

Stored in the card of a dataset. Memory is bounded for any field, and counts depend only on the documents and their
order: the first values get separate counters, all later ones share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from modernbert_train.core.read_json import Count
from modernbert_train.core.text import percent

_HELD = 1000  # values in memory
_LISTED = 100  # on the card
_SHOWN = 8  # in a line


@dataclass
class Amount:
    """Documents, and the tokens in them."""

    documents: Count = 0
    tokens: Count = 0

    def add(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self.tokens += tokens


@dataclass
class FieldCounts:
    """Documents by the value of one field.

    Attributes:
        values: the first values seen.
        missing: documents without the field.
        other: documents with any further value.
    """

    values: dict[str, Amount] = field(default_factory=dict)
    missing: Amount = field(default_factory=Amount)
    other: Amount = field(default_factory=Amount)

    def count(self, value: str | None, documents: int, tokens: int) -> None:
        """Count documents with one value; None: without the field."""
        if value is None:
            amount = self.missing
        elif value in self.values:
            amount = self.values[value]
        elif len(self.values) < _HELD:
            amount = self.values[value] = Amount()
        else:
            amount = self.other
        amount.add(documents, tokens)

    def add(self, later: FieldCounts) -> None:
        """Add the counts of later documents."""
        for value, amount in later.values.items():
            self.count(value, amount.documents, amount.tokens)
        self.missing.add(later.missing.documents, later.missing.tokens)
        self.other.add(later.other.documents, later.other.tokens)

    def listed(self) -> FieldCounts:
        """Return the values with the most tokens; the rest is counted as other."""
        return self.most(_LISTED)

    def rows(self) -> list[tuple[str, Amount]]:
        """Return each value with its amount, most tokens first; then other values and documents without the field."""
        rows = self._sorted()
        further = (("(other)", self.other), ("(missing)", self.missing))
        return rows + [(name, amount) for name, amount in further if amount.documents]

    def __str__(self) -> str:
        """Format the shares of the tokens in a line, largest first."""
        rows = self.most(_SHOWN).rows()
        total = sum(amount.tokens for _, amount in rows) or 1
        return ", ".join(f"{value} {percent(1)(amount.tokens / total)}" for value, amount in rows)

    def most(self, number: int) -> FieldCounts:
        """Return this many values with the most tokens; the rest is counted as other."""
        rows = self._sorted()
        counts = FieldCounts(dict(rows[:number]), self.missing, Amount(self.other.documents, self.other.tokens))
        for _, amount in rows[number:]:
            counts.other.add(amount.documents, amount.tokens)
        return counts

    def _sorted(self) -> list[tuple[str, Amount]]:
        return sorted(self.values.items(), key=lambda row: (-row[1].tokens, -row[1].documents, row[0]))
