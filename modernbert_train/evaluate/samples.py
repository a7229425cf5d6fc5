"""Samples: a few places of the held-out text, with the model's likeliest tokens there, at each validation.

They are taken from the forward passes of the validation itself, of the first row, which is the same on any number of
ranks: sampling adds no forward pass and does not affect batches, figures or training. Text and masks of a
validation depend on the configuration alone, so the same places can be followed over a phase.

Shape legend: T packed tokens, M predicted positions (padded), V vocabulary, G guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modernbert_train.batch import IGNORED_LABEL, Batch
from modernbert_train.models.masked_lm import LABELS, POSITIONS

WINDOW = 48  # tokens of a text that are shown
PLACES = 8  # positions that are shown; evenly spread for next-token objectives, which predict every token
GUESSES = 3
DIGITS = 4


class Samples:
    """Sampler of a microbatch's predictions.

    Args:
        number: number of texts.
        ids: id of every token, by its text.
        pad_id: id of the padding token.
    """

    def __init__(self, number: int, ids: Mapping[str, int], pad_id: int) -> None:
        self._number = number
        self._word = word_of(ids)
        self._pad_id = pad_id

    @contextmanager
    def watching(self, model: nn.Module, batch: Batch, row_tokens: int) -> Iterator[list[dict[str, Any]]]:
        """Yield a list that holds the texts once the model has been called with a microbatch.

        The list stays empty if no token is predicted at its own position or the one before: for classes, and for
        permutations, which predict at query tokens.

        Args:
            model: any; samples show the predictions of the first call to one of its decoders, for the first
                positions given to it.
            batch: on the host, as the model will get it.
            row_tokens: length of a row; only the first row is sampled.
        """
        samples: list[dict[str, Any]] = []
        predicts = {POSITIONS, LABELS} <= set(batch.targets) and batch.packed.ranks_T is None

        def take(module: nn.Module, given: Any, logits_MV: Tensor) -> None:
            if not samples:
                samples.extend(self._texts(batch, logits_MV, row_tokens))

        decoders = [module for name, module in model.named_modules() if name.split(".")[-1] == "decoder"]
        hooks = [decoder.register_forward_hook(take) for decoder in decoders] if predicts else []
        try:
            yield samples
        finally:
            for hook in hooks:
                hook.remove()

    def _texts(self, batch: Batch, logits_MV: Tensor, row_tokens: int) -> list[dict[str, Any]]:
        positions_M, labels_M = (batch.targets[name].numpy().astype(np.int64) for name in (POSITIONS, LABELS))
        labelled = np.flatnonzero(labels_M[: len(logits_MV)] != IGNORED_LABEL)
        causal = batch.packed.order == "causal"
        at = {int(positions_M[m]) + causal: int(m) for m in labelled if positions_M[m] + causal < row_tokens}
        ids_T = batch.packed.input_ids_T.numpy().astype(np.int64)
        windows = [
            (first, last, positions)
            for first, last in self._windows(batch, ids_T, row_tokens)
            if (positions := _spread([position for position in range(first, last) if position in at], causal))
        ][: self._number]
        chosen = torch.tensor(
            [at[position] for _, _, positions in windows for position in positions], device=logits_MV.device
        )
        if not len(chosen):
            return []
        shares_MV = logits_MV.index_select(0, chosen).float().softmax(dim=-1)
        best = shares_MV.topk(min(GUESSES, shares_MV.shape[1]))
        guesses = iter(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        texts = []
        for first, last, positions in windows:
            words = [self._word(int(token)) for token in ids_T[first:last]]
            predicted = []
            for position in positions:
                ids_G, shares_G = next(guesses)
                predicted.append(
                    {
                        "at": position - first,
                        "is": self._word(int(labels_M[at[position]])),
                        "guesses": [
                            [self._word(token), round(share, DIGITS)]
                            for token, share in zip(ids_G, shares_G, strict=True)
                        ],
                    }
                )
            texts.append({"words": words, "predicted": predicted})
        return texts

    def _windows(self, batch: Batch, ids_T: Any, row_tokens: int) -> list[tuple[int, int]]:
        """Return (start, end) of parts of the texts in the first row: the first part of each, then the next of each."""
        boundaries = batch.packed.cu_seqlens_S.numpy().astype(np.int64)
        texts = [
            (int(first), min(int(last), row_tokens))
            for first, last in pairwise(boundaries)
            if first < last and first < row_tokens and ids_T[first] != self._pad_id
        ]
        windows = [
            (part, start, min(start + WINDOW, last))
            for first, last in texts
            for part, start in enumerate(range(first, last, WINDOW))
        ]
        return [(start, last) for _, start, last in sorted(windows)]


def _spread(positions: list[int], causal: bool) -> list[int]:
    """Return at most PLACES of them: the first ones, or for next-token prediction evenly spread ones."""
    return positions[:: -(-len(positions) // PLACES) or 1] if causal else positions[:PLACES]


def word_of(ids: Mapping[str, int]) -> Callable[[int], str]:
    """Return a function from a token to its text with leading space: byte-level, WordPiece or SentencePiece."""
    texts = {number: text for text, number in ids.items()}
    byte_level = any(text.startswith("Ġ") for text in ids)
    word_piece = not byte_level and any(text.startswith("##") for text in ids)
    byte_of = _bytes()

    def word(token: int) -> str:
        text = texts.get(token, "")
        if text.startswith("[") and text.endswith("]") and len(text) > 2:
            return text
        if byte_level:
            if all(letter in byte_of for letter in text):
                return bytes(byte_of[letter] for letter in text).decode("utf-8", "replace")
            return text
        if word_piece:
            return text.removeprefix("##") if text.startswith("##") else f" {text}"
        return text.replace("▁", " ")

    return word


def _bytes() -> dict[str, int]:
    """Return letter -> byte of byte-level vocabularies, with GPT-2's letters."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
