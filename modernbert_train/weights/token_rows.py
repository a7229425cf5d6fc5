"""Rows by token for another vocabulary: which rows of the old table each new row is computed from.

A token of both vocabularies keeps its row. Any other token starts as the mean of the rows of the pieces that the old
tokenizer cuts its text into (Gee et al. 2022, "Fast Vocabulary Transfer", arXiv 2210.05144); if the old tokenizer
cannot spell it, as the mean of the rows of all ordinary tokens. The decoder's biases are averaged the same way, so the
logit of a new token is the mean of its pieces' logits: it is never likelier than the likeliest of them.

Tokens are compared by their text, however a tokenizer writes it. `token_bytes` converts spellings to one form, the
bytes of the text with the space before them: "Ġthe" of byte-level tokenizers, "▁the" of SentencePiece, and "the" of
WordPiece, whose "##the" continues a word. Special tokens are matched by name, then by their role in
tokenizer_config.json.

Shape legend: V rows of the new table, W rows of the old one, P pieces of all new rows, D numbers in a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from modernbert_train.vocabulary import added_tokens, open_tokenizer, partial_roles, special_tokens, token_ids

_BYTE_LEVEL, _WORD_PIECE, _SENTENCE_PIECE, _WORDS = "byte-level", "WordPiece", "SentencePiece", "words"
_SPACE, _INSIDE = "▁", "##"
# a byte-level tokenizer writes a byte as the character of that number where it is visible, and others from 256 on
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _VISIBLE)
}


@dataclass(frozen=True)
class TokenRows:
    """For each row of a new table, the old rows that it is the mean of.

    Attributes:
        pieces_P: rows of the old table, concatenated over the new rows.
        ends_V: end of each new row's pieces in `pieces_P`; a row without pieces is the mean of `ordinary`.
        ordinary: rows of the old table for tokens that occur in text.
        num_tokens: size of the new vocabulary; the other rows are spare.
    """

    pieces_P: NDArray[np.int64]
    ends_V: NDArray[np.int64]
    ordinary: NDArray[np.int64]
    num_tokens: int

    @property
    def counts_V(self) -> NDArray[np.int64]:
        """Number of old rows in each new one: 1 if it is kept, 0 if its token cannot be spelled."""
        return np.diff(self.ends_V, prepend=0)

    def of(self, table: Tensor) -> Tensor:
        """Return the new table, [V, D] or [V], computed from the old one; kept rows are equal to the last bit."""
        old_WD = table.reshape(len(table), -1)
        starts_V = torch.from_numpy(self.ends_V - self.counts_V)
        new_VD = F.embedding_bag(torch.from_numpy(self.pieces_P), old_WD, starts_V, mode="mean")
        mean_D = old_WD[torch.from_numpy(self.ordinary)].double().mean(dim=0).to(old_WD.dtype)
        new_VD[torch.from_numpy(self.counts_V == 0)] = mean_D
        return new_VD.reshape(-1, *table.shape[1:])

    def __str__(self) -> str:
        """Format as 'of 8,192 rows 8,001 are kept, 180 are the mean of 2.4 old ones, 11 the mean of all'."""
        counts_V = self.counts_V
        kept, unknown = int((counts_V == 1).sum()), int((counts_V == 0).sum())
        averaged = len(counts_V) - kept - unknown
        of = f"{counts_V[counts_V > 1].mean():.2g} " if averaged else ""
        return (
            f"of {len(counts_V):,} rows {kept:,} are kept, {averaged:,} are the mean of {of}old ones, {unknown:,} the "
            "mean of all"
        )


def token_rows(old_folder: Path, new_folder: Path, old_rows: int, new_rows: int) -> TokenRows:
    """Compare two tokenizers.

    Args:
        old_folder: tokenizer that the old table was trained with.
        new_folder: the new tokenizer.
        old_rows, new_rows: of the tables, which may be larger than the vocabularies.

    Raises:
        DataError: a tokenizer is missing or damaged.
    """
    old, new = _Spelling(old_folder), _Spelling(new_folder)
    roles = _roles(old_folder, new_folder)
    old_id_of = {text_bytes: i for token, i in sorted(old.ids.items(), key=lambda each: -each[1])
             for text_bytes in [old.token_bytes(token)] if token not in old.special}  # fmt: skip
    cut = _cutter(old, old_id_of)
    pieces: list[list[int]] = [[] for _ in range(new_rows)]
    for token, i in new.ids.items():
        if token in new.special:
            old_id = old.ids.get(token, roles.get(token))
            pieces[i] = [] if old_id is None else [old_id]
        elif new.kind == old.kind and token in old.ids and new.token_bytes(token) == old.token_bytes(token):
            pieces[i] = [old.ids[token]]
        elif (text_bytes := new.token_bytes(token)) in old_id_of:
            pieces[i] = [old_id_of[text_bytes]]
        else:
            pieces[i] = cut(text_bytes, new.marks_spaces)
    taken, spare = {*new.ids.values()}, {*range(old_rows)} - {*old.ids.values()}
    for i in range(new_rows):
        if i not in taken and i in spare:
            pieces[i] = [i]  # a spare row in both tables
    ordinary = [i for token, i in old.ids.items() if token not in old.special]
    return TokenRows(
        np.array([piece for each in pieces for piece in each], dtype=np.int64),
        np.cumsum([len(each) for each in pieces], dtype=np.int64),
        np.array(sorted(ordinary), dtype=np.int64),
        len(taken),
    )


class _Spelling:
    """Spelling of a tokenizer's tokens.

    Attributes:
        ids: of every token.
        special: tokens that no text contains.
        kind: one of the four spellings.
        tokenizer: the tokenizer; it encodes the text of special tokens as ordinary characters.
    """

    def __init__(self, folder: Path) -> None:
        self.ids: Mapping[str, int] = token_ids(folder)
        self.special = special_tokens(folder)
        self._added = added_tokens(folder)
        self.tokenizer = open_tokenizer(folder)
        described: dict[str, Any] = json.loads(self.tokenizer.to_str())
        self.unknown: str | None = described["model"].get("unk_token")
        described_as = json.dumps([described.get("pre_tokenizer"), described.get("decoder")])
        if described["model"]["type"] == "WordPiece":
            self.kind = _WORD_PIECE
        elif '"ByteLevel"' in described_as:
            self.kind = _BYTE_LEVEL
        else:
            self.kind = _SENTENCE_PIECE if any(token.startswith(_SPACE) for token in self.ids) else _WORDS

    @property
    def marks_spaces(self) -> bool:
        """True if the tokenizer marks spaces, so a token without one continues a word."""
        return self.kind in (_BYTE_LEVEL, _SENTENCE_PIECE)

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes of a token's text, with a leading space if it begins a word."""
        if self.kind == _BYTE_LEVEL and token not in self._added:
            codes = [_BYTE_OF.get(character) for character in token]
            return token.encode() if None in codes else bytes(code for code in codes if code is not None)
        if self.kind == _SENTENCE_PIECE and token not in self._added:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
            return token.replace(_SPACE, " ").encode()
        if self.kind == _WORD_PIECE and token.startswith(_INSIDE) and token != _INSIDE:
            return token.removeprefix(_INSIDE).encode()
        begins = self.kind in (_WORD_PIECE, _WORDS) and token[:1].isalnum()
        return (" " * begins + token).encode()


def _cutter(old: _Spelling, id_of: Mapping[bytes, int]) -> Callable[[bytes, bool], list[int]]:
    """Return a function from text to old pieces. Its second argument is True if text that begins without a space
    continues a word."""
    dropped = {old.ids[token] for token in old.special} | {old.ids.get(old.unknown or "", -1)}
    inside = {i: old.ids.get(f"{_INSIDE}{token}", i) for token, i in old.ids.items()} if old.kind == _WORD_PIECE else {}

    def cut(text_bytes: bytes, marks_spaces: bool) -> list[int]:
        try:
            text = text_bytes.decode()
        except UnicodeDecodeError:  # a part of a character
            return [id_of[bytes([byte])] for byte in text_bytes if bytes([byte]) in id_of]
        if old.kind == _SENTENCE_PIECE:  # its encode would put a space before the text
            ids = [piece.id for piece in old.tokenizer.model.tokenize(text.replace(" ", _SPACE))]
        else:
            ids = old.tokenizer.encode(text, add_special_tokens=False).ids
        if inside and ids and marks_spaces and text[:1].isalnum():
            ids[0] = inside[ids[0]]
        return [i for i in ids if i not in dropped]

    return cut


def _roles(old_folder: Path, new_folder: Path) -> dict[str, int]:
    """Return the old id of each special token of the new tokenizer that has the same role under another name."""
    old, ids = partial_roles(old_folder), token_ids(old_folder)
    return {text: ids[old[role]] for role, text in partial_roles(new_folder).items() if role in old}
