"""Print packed rows as text: boundaries of documents, and how each predicted token was masked.

The marks are text, so they survive a pipe, a bug report and a reader who does not see colours; colours are added on
top. Between the marks is the original text, never the masked input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL, QUERY_RANK, Batch, Packed
from modernbert_train.data.mixture import TokenStreams
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan
from modernbert_train.objectives.mlm import LABELS, POSITIONS
from modernbert_train.vocabulary import Vocabulary, open_tokenizer

PLAIN, MASKED, RANDOM, KEPT = "plain", "masked", "random", "kept"
_FORMS = {PLAIN: "{0}", MASKED: "[-{0}-]", RANDOM: "[-{0}-]{{+{1}+}}", KEPT: "[={0}=]"}
_COLORS = {MASKED: "1;31", RANDOM: "1;33", KEPT: "1;32", "special": "36", "heading": "2"}


def wants_color(refused: bool) -> bool:
    """True if the output is a terminal and neither an option nor NO_COLOR refuses colours (no-color.org)."""
    return not refused and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and sys.stdout.isatty()


class Painter:
    """Colours text by its kind, if colours are wanted."""

    def __init__(self, color: bool) -> None:
        self._color = color

    def __call__(self, kind: str, text: str) -> str:
        return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m" if self._color and text else text


def legend(paint: Painter) -> str:
    """Return the legend of the marks."""
    masked, random, kept = (paint(kind, _FORMS[kind].format("word", "other")) for kind in (MASKED, RANDOM, KEPT))
    return f"predicted: {masked} read as [MASK]   {random} read as another token   {kept} read as it is"


def marks(batch: Batch, mask_id: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """Return each token's id before masking, and how it was masked.

    Returns:
        original_T: ids before masking. Padding that `masking: reference` has overwritten keeps the overwritten id.
        kind_T: PLAIN for tokens that are not predicted; else MASKED, RANDOM or KEPT.
    """
    if POSITIONS not in batch.targets:  # the objective predicts no tokens
        return read_ids(batch).copy(), np.full(len(read_ids(batch)), PLAIN, dtype="<U6")
    positions_M, labels_M = batch.targets[POSITIONS].numpy(), batch.targets[LABELS].numpy()
    real = labels_M != IGNORED_LABEL
    positions, labels = positions_M[real], labels_M[real]
    original_T = read_ids(batch).copy()
    if (ranks_T := batch.packed.ranks_T) is not None:  # each query token predicts one token of the text
        predicted = _queried_tokens(batch.packed, positions)
        positions = predicted - np.cumsum(ranks_T.numpy() == QUERY_RANK)[predicted]
    read = original_T[positions]
    kind_T = np.full(len(original_T), PLAIN, dtype="<U6")
    kind_T[positions] = np.where(read == labels, KEPT, np.where(read == mask_id, MASKED, RANDOM))
    original_T[positions] = labels
    return original_T, kind_T


def read_ids(batch: Batch) -> NDArray[np.int64]:
    """Return the input ids row by row, without query tokens, which only point to others of their row."""
    ids_T, ranks_T = batch.packed.input_ids_T.numpy(), batch.packed.ranks_T
    return ids_T if ranks_T is None else ids_T[ranks_T.numpy() != QUERY_RANK]


def _queried_tokens(packed: Packed, queries_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token of the same sequence and position that each query token predicts."""
    boundaries = packed.cu_seqlens_S.numpy().astype(np.int64)
    start_M = boundaries[np.searchsorted(boundaries, queries_M, side="right") - 1]
    return start_M + packed.position_ids_T.numpy()[queries_M]


def count_marks(batches: Sequence[Batch], mask_id: int) -> dict[str, int]:
    """Count the predicted tokens of each kind."""
    kinds = np.concatenate([marks(batch, mask_id)[1] for batch in batches])
    return {kind: int((kinds == kind).sum()) for kind in (MASKED, RANDOM, KEPT)}


class RowWriter:
    """Writes rows as text.

    Args:
        tokenizer_folder: the run's tokenizer.
        vocabulary: of the same.
        streams: names of the documents.
        paint: colours.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """

    def __init__(self, tokenizer_folder: str, vocabulary: Vocabulary, streams: TokenStreams, paint: Painter) -> None:
        self._tokenizer = open_tokenizer(tokenizer_folder)
        self._vocabulary = vocabulary
        self._special = {vocabulary.cls_id, vocabulary.sep_id, vocabulary.pad_id, vocabulary.mask_id}
        self._streams = streams
        self._paint = paint

    def rows(self, batches: Sequence[Batch], plan: BatchPlan) -> Iterator[str]:
        """Yield the text of each row of the microbatches, which hold the first rows of the plan."""
        numbered = iter(enumerate(plan.rows, start=1))
        for batch in batches:
            original_T, kind_T = marks(batch, self._vocabulary.mask_id)
            input_T = read_ids(batch)
            for first in range(0, len(input_T), plan.row_tokens):
                number, chunks = next(numbered)
                title = f"row {number:,} of {plan.num_rows:,}"
                span = slice(first, first + plan.row_tokens)
                special = plan.objective.special_tokens
                yield self._row(title, chunks, special, original_T[span], input_T[span], kind_T[span])

    def _row(
        self,
        title: str,
        chunks: Sequence[Chunk],
        special: int,
        original: NDArray[np.int64],
        read: NDArray[np.int64],
        kinds: NDArray[np.str_],
    ) -> str:
        used = sum(chunk.length + special for chunk in chunks)
        count = "1 sequence" if len(chunks) == 1 else f"{len(chunks)} sequences"
        lines = [self._paint("heading", f"=== {title}: {count}, {used:,} of {len(original):,} tokens")]
        at = 0
        for chunk in chunks:
            span = slice(at, at + chunk.length + special)
            at = span.stop
            range_text = f"tokens {chunk.start:,} to {chunk.start + chunk.length:,}"
            about = f"--- {self._streams.describe(chunk.document)}, {range_text}, pass {chunk.epoch + 1}"
            lines += [self._paint("heading", about), self._text(original[span], read[span], kinds[span])]
        if at < len(original):
            changed = int((read[at:] != self._vocabulary.pad_id).sum())
            overwritten = f", {changed:,} of them overwritten" if changed else ""
            lines.append(self._paint("heading", f"--- [PAD] x {len(original) - at:,}{overwritten}"))
        return "\n".join(lines)

    def _text(self, original: NDArray[np.int64], read: NDArray[np.int64], kinds: NDArray[np.str_]) -> str:
        """Format one sequence; unpredicted text is decoded as a whole, so only marks can split a character's bytes."""
        painted = []
        predicted = (kinds != PLAIN) | np.isin(original, list(self._special))
        for single, group in groupby(range(len(original)), key=lambda i: (True, i) if predicted[i] else (False, -1)):
            indices = list(group)
            if not single[0]:
                painted.append(visible(self._decode(original[indices])).replace("↵", "↵\n"))
                continue
            index = indices[0]
            was, now, kind = self._decode(original[[index]]), self._decode(read[[index]]), str(kinds[index])
            text = _FORMS[kind].format(visible(was), visible(now))
            painted.append(self._paint("special" if kind == PLAIN else kind, text))
        return "".join(painted)

    def _decode(self, ids: NDArray[np.int64]) -> str:
        if len(ids) == 1 and int(ids[0]) in self._special:
            return str(self._tokenizer.id_to_token(int(ids[0])))
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def visible(text: str) -> str:
    """Replace line ends by a sign, and other control characters by escapes."""
    return "".join("↵" if c == "\n" else c if c.isprintable() else ascii(c)[1:-1] for c in text)
