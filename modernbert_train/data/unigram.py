"""Unigram baseline of every held-out loss: predict each token by its frequency in the training text."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import DataConfig, PhaseConfig
from modernbert_train.data.arrays import load_array
from modernbert_train.data.dataset_card import TOKEN_COUNTS
from modernbert_train.data.facts import DataFacts
from modernbert_train.data.mixing import token_shares
from modernbert_train.errors import DataError


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of a folder of shards.

    Attributes:
        path: of token_counts.npy.
        tokens: expected sum, by the card of the shards.
        weight: of each count.
    """

    path: Path
    tokens: int
    weight: float

    def read(self, vocab_size: int) -> NDArray[np.float64]:
        """Return the counts; raises DataError if the file is missing, damaged, or another folder's."""
        counts = load_array(self.path, "Prepare the data again.")
        sound = isinstance(counts, np.ndarray) and counts.ndim == 1 and counts.dtype.kind in "iu"
        if not sound or len(counts) > vocab_size or (counts.min(initial=0) < 0) or int(counts.sum()) != self.tokens:
            content = (
                f"{int(counts.sum()):,} tokens over {len(counts):,} ids" if sound else "not a row of whole numbers"
            )
            raise DataError(
                f"{self.path}: holds {content}; the card next to it says {self.tokens:,} tokens, model.vocab_size is "
                f"{vocab_size:,}. Restore it from a copy, or prepare the data again."
            )
        return counts.astype(np.float64)


@dataclass(frozen=True)
class Unigram:
    """Predicts each token by its frequency in the training data.

    Attributes:
        log_probability_V: natural logarithms, every count raised by one.
        most_frequent: the most likely token.
    """

    log_probability_V: NDArray[np.float64]
    most_frequent: int

    @classmethod
    def from_counts(cls, files: Iterable[TokenCounts], vocab_size: int) -> Unigram:
        """Read token_counts.npy of the training shards.

        Args:
            files: of each folder.
            vocab_size: rows of the embedding.

        Raises:
            DataError: a file is missing or damaged, or another folder's.
        """
        counts_V = np.ones(vocab_size)
        for file in files:
            counts = file.read(vocab_size)
            counts_V[: len(counts)] += file.weight * counts
        return cls(np.log(counts_V / counts_V.sum()), int(counts_V.argmax()))

    def loss(self, file: TokenCounts) -> float:
        """Return the loss over all tokens of a folder, in nats per token. Raises DataError as `from_counts`."""
        counts = file.read(len(self.log_probability_V))
        return float(-(counts @ self.log_probability_V[: len(counts)]) / counts.sum())


def unigram_of(data: DataConfig, phases: Collection[PhaseConfig], vocab_size: int, facts: DataFacts) -> Unigram:
    """Return the baseline of the training text; streams are weighted by their shares of the whole run.

    Args:
        data, phases: of the run.
        vocab_size: rows of the embedding.
        facts: of its data.
    """
    tokens = {name: folder.card.tokens for name, folder in facts.streams.items()}
    documents = {name: folder.card.documents for name, folder in facts.streams.items()}
    shares = token_shares(data, phases, tokens, documents)
    total = sum(tokens.values())
    counts = [
        TokenCounts(folder.local / TOKEN_COUNTS, tokens[name], shares[name] * total / tokens[name])
        for name, folder in facts.streams.items()
    ]
    return Unigram.from_counts(counts, vocab_size)


def held_out_unigram_loss(
    data: DataConfig, phases: Collection[PhaseConfig], vocab_size: int, facts: DataFacts
) -> float | None:
    """Return the baseline's loss on the held-out text, without reading it; None without such text or its counts."""
    folder = facts.validation
    if folder is None or not (folder.local / TOKEN_COUNTS).exists():
        return None
    counts = TokenCounts(folder.local / TOKEN_COUNTS, folder.card.tokens, 1.0)
    return unigram_of(data, phases, vocab_size, facts).loss(counts)
