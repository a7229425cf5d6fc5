"""Damaged documents of a source, and the probable mistake in the spec if they are many.

A wrong column, a wrong encoding or a truncated file would otherwise silently give a smaller dataset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from data_prep.clean.clean_documents import OUTSIDE_SHARE, SourceTally, Tally
from modernbert_train.config.tools.prepare import FIELDS, DatasetConfig, RowSourceConfig
from modernbert_train.data.read.encodings import AUTO, family, look_at
from modernbert_train.data.read.find_files import source_files
from modernbert_train.data.read.rows import NO_COLUMN, NO_ROWS, REMEDIES, Remedy
from modernbert_train.errors import DataError

_MOST_EMPTY = 0.5  # an empty document is no loss, but a column that is mostly empty is the wrong one
_UNKNOWN = "unknown"
_FILES = 100  # maximum number whose encoding is checked
_ENCODING = ("not_utf8", "nul_byte")


def require_little_lost(config: DatasetConfig, tally: Tally) -> None:
    """Refuse a corpus if a source has lost more than the spec allows.

    Raises:
        DataError: names each such source, its dropped documents, and the probable mistake.
    """
    problems = [
        f"sources.{name}: {lost} {advice} To drop these documents, set sources.{name}.max_left_out to the share "
        "that may be dropped."
        for name, lost, advice in damaged_sources(config, tally)
    ]
    if problems:
        raise DataError("\n".join(problems))


def damaged_sources(config: DatasetConfig, tally: Tally) -> Iterator[tuple[str, str, str]]:
    """Yield the sources that have lost too much, each with its dropped documents and the probable mistake."""
    for name, source in config.sources.items():
        counts = tally.sources.get(name, SourceTally())
        max_share = config.max_left_out if source.max_left_out is None else source.max_left_out
        if (lost := _lost(counts, max_share)) is None:
            continue
        reasons = Counter(counts.dropped).most_common()
        why = "; ".join(
            f"{reason} {count:,}" + (f", the first {counts.first[reason]}" if reason in counts.first else "")
            for reason, count in reasons
        )
        advice = dict.fromkeys(filter(None, (_advice(reason, name, source) for reason, _ in reasons)))
        yield name, f"{lost}{f' ({why})' if why else ''}.", " ".join(advice) or "Correct the path, or the files."


def _lost(counts: SourceTally, max_share: float) -> str | None:
    """Describe excessive damage; None if it is acceptable."""
    if max_share >= 1:
        return None
    if not counts.read:
        return "it holds no document"
    if not counts.documents.total() and counts.damaged.total() + _screened(counts) == counts.read:
        return f"none of its {counts.read:,} documents is left"
    lost = counts.damaged.total() - counts.damaged[NO_ROWS]
    if counts.damaged[NO_ROWS] > _MOST_EMPTY * counts.read:
        lost = counts.damaged.total()
    if lost > max_share * counts.read:
        return f"{lost:,} of {counts.read:,} documents cannot be used, more than max_left_out={max_share:g} of them"
    size, missing = counts.input_bytes["all"], counts.input_bytes["lost"]
    if missing > max_share * size:
        return (
            f"{missing / size:.1%} of its {size:,} bytes are in files that cannot be read to the end, more than "
            f"max_left_out={max_share:g} of them"
        )
    return None


def _screened(counts: SourceTally) -> int:
    """Count documents dropped for their content; not duplicates, nor documents outside document_share."""
    return sum(
        count
        for reason, count in counts.dropped.items()
        if reason not in counts.damaged and reason != OUTSIDE_SHARE and not reason.endswith("duplicate")
    )


def _advice(reason: str, name: str, source: RowSourceConfig) -> str:
    if reason == NO_COLUMN and (key := source.text_key(name)) is not None:
        return f"Set {key} to the one that holds the text."
    if (reason in _ENCODING or reason.startswith("not_")) and "encoding" in FIELDS[source.kind]:
        encodings = encodings_of(source_files(name, source))
        if encodings:
            listed = ", ".join(f"{encoding or _UNKNOWN} in {number:,}" for encoding, number in encodings.most_common())
            best = next(iter(encodings)) if len(encodings) == 1 else AUTO
            use = " to theirs" if None in encodings or best == source.encoding else f"={best}"
            return f"Encodings of its files: {listed}. Set sources.{name}.encoding{use}."
    return REMEDIES.get(reason, Remedy()).corpus.format(source=f"sources.{name}")


def encodings_of(files: list[Path]) -> Counter[str | None]:
    """Count the probable encodings of the first files; None if unknown."""
    encodings: Counter[str | None] = Counter()
    for file in files[:_FILES]:
        with suppress(OSError, EOFError, ValueError):  # counted as unreadable
            encoding = look_at(file)
            encodings[encoding and family(encoding)] += 1
    return encodings
