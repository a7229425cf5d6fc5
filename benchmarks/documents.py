"""Synthetic documents for benchmarks of single steps: drawn, and packed as the loader packs.

Lengths are log-normal with a median of 300 tokens, cut at a row; 30 % of the tokens are predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.batches import lay_out, mlm_batch
from modernbert_train.batch import IGNORED_LABEL, Batch
from modernbert_train.data.packing import pack_greedy

ROW_TOKENS = 1024
MEAN_TOKENS = 385  # of a document, cut at a row
MASK_RATE = 0.3
PAD, MASK, FIRST_ORDINARY = 0, 1, 2


@dataclass(frozen=True)
class Document:
    """Token ids after masking, and labels: the original id where masked, else IGNORED_LABEL."""

    input_ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_predicted(self) -> int:
        return int((self.labels != IGNORED_LABEL).sum())


def draw_rows(rng: np.random.Generator, rows: int, vocab_size: int) -> list[list[Document]]:
    """As many documents as rows hold on average, drawn again until they fill these rows as a long run's are filled.

    A handful of documents leaves a large part of the last row empty, or holds one long document where there are ten;
    neither says anything about training.
    """
    count = round(0.97 * rows * ROW_TOKENS / MEAN_TOKENS)
    while True:
        lengths = np.clip(rng.lognormal(np.log(300), 0.8, count), 8, ROW_TOKENS).astype(int).tolist()
        packed = pack_greedy(lengths, ROW_TOKENS)
        if len(packed) == rows and sum(lengths) >= 0.95 * rows * ROW_TOKENS:
            return [[_draw_document(rng, lengths[index], vocab_size) for index in row] for row in packed]


def _draw_document(rng: np.random.Generator, length: int, vocab_size: int) -> Document:
    ids = rng.integers(FIRST_ORDINARY, vocab_size, length)
    predicted = rng.choice(length, max(1, round(MASK_RATE * length)), replace=False)
    labels: NDArray[np.int64] = np.full(length, IGNORED_LABEL, dtype=np.int64)
    labels[predicted] = ids[predicted]
    ids[predicted] = MASK
    return Document(torch.from_numpy(ids), torch.from_numpy(labels))


def pack(rows: list[list[Document]]) -> Batch:
    """Rows as the loader lays them out: tails are sequences of pads, boundaries and positions of fixed lengths."""
    chunks, labels = [], []
    for row in rows:
        tail = ROW_TOKENS - sum(len(document) for document in row)
        chunks += [document.input_ids for document in row] + [torch.full((tail,), PAD)]
        labels += [document.labels for document in row] + [torch.full((tail,), IGNORED_LABEL)]
    lengths = torch.tensor([len(chunk) for chunk in chunks])
    total = len(rows) * ROW_TOKENS
    boundaries = torch.full((1 << len(lengths).bit_length(),), total, dtype=torch.int32)
    boundaries[0], boundaries[1 : len(lengths) + 1] = 0, lengths.cumsum(0)
    labels_T = torch.cat(labels)
    positions = (labels_T != IGNORED_LABEL).nonzero().flatten()
    spare = math.ceil(MASK_RATE * total) + 32 - len(positions)  # as MaskedLM.max_predicted
    return mlm_batch(
        lay_out(torch.cat(chunks), boundaries, ROW_TOKENS),
        pad(positions, (0, spare)),
        pad(labels_T[positions], (0, spare), value=IGNORED_LABEL),
        num_tokens=sum(len(document) for row in rows for document in row),
        num_rows=len(rows),
    )
