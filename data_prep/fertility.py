"""Fertility and parity: the number of tokens that a tokenizer needs for text of each language.

A word is defined by Unicode's rules (UAX 29, see clean/split_words.py): in Chinese, Japanese and Thai each character is
one, so compare those languages by characters or by parity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data_prep.clean.split_words import split_words
from data_prep.make_tokenizer import encode_documents, read_tokenizer
from modernbert_train.core.text import percent, plural, table
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.errors import DataError

_AT_ONCE = 256  # texts tokenised together


@dataclass(frozen=True)
class Spelled:
    """Counts of texts and of their tokens, without [CLS] and [SEP].

    Attributes:
        documents, tokens, words, characters, bytes: counts; characters are code points, bytes are of UTF-8.
        unknown: tokens for text that the tokenizer cannot spell.
    """

    documents: int
    tokens: int
    unknown: int
    words: int
    characters: int
    bytes: int


def spell(tokenizer: Tokenizer, unknown_id: int | None, texts: Iterable[str]) -> Spelled:
    """Count texts and their tokens; each text is read once."""
    texts, total = iter(texts), np.zeros(6, dtype=np.int64)
    with tokenizer_threads(True):
        while some := list(islice(texts, _AT_ONCE)):
            for text, ids in zip(some, encode_documents(tokenizer, some), strict=True):
                unknown = 0 if unknown_id is None else ids.count(unknown_id)
                total += (1, len(ids), unknown, len(split_words(text)), len(text), len(text.encode()))
    return Spelled(*total.tolist())


def fertility(tokenizer_file: str, texts: Mapping[str, Iterable[str]], *, parallel: bool) -> dict[str, Spelled]:
    """Count the tokens of texts.

    Args:
        tokenizer_file: tokenizer.json, or its folder.
        texts: by name; each is read once.
        parallel: the texts are translations of the first, document by document.

    Raises:
        DataError: a tokenizer or a text cannot be read, or parallel texts differ in their number of documents.
    """
    tokenizer, content = read_tokenizer(tokenizer_file)
    unknown = _unknown_id(tokenizer, content["model"])
    spelled = {name: spell(tokenizer, unknown, each) for name, each in texts.items()}
    first, *others = spelled.items()
    for path, each in others:
        if parallel and each.documents != first[1].documents:
            raise DataError(
                f"{path}: {plural(each.documents, 'document')}, and {first[0]} has {first[1].documents:,}: not "
                "parallel. Give translations document by document, or leave out --parallel."
            )
    return spelled


def _unknown_id(tokenizer: Tokenizer, model: Mapping[str, Any]) -> int | None:
    """Return the id of the model's unknown token; a Unigram stores it as a number."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    return tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None


def as_json(spelled: Mapping[str, Spelled], parallel: bool) -> dict[str, dict[str, float | None]]:
    """Return counts and ratios of each text; a division by zero is None, and so is the parity of texts not parallel."""
    first = next(iter(spelled.values()))
    return {
        path: {
            **vars(each),
            "tokens_a_word": _ratio(each.tokens, each.words),
            "tokens_a_character": _ratio(each.tokens, each.characters),
            "bytes_a_token": _ratio(each.bytes, each.tokens),
            "unknown_share": _ratio(each.unknown, each.tokens),
            "parity": _ratio(each.tokens, first.tokens) if parallel else None,
        }
        for path, each in spelled.items()
    }


def fertility_table(spelled: Mapping[str, Spelled], parallel: bool) -> str:
    """Return a row for each text. Parity: tokens over the first text's (Petrov et al. 2023, arXiv:2305.15425)."""
    head = ["text", "documents", "tokens", "tokens a word", "tokens a character", "bytes a token", "unknown"]
    rows = [[*head, *(["parity"] if parallel else [])]]
    for path, each in as_json(spelled, parallel).items():
        cells = [_shown(each[key]) for key in ("tokens_a_word", "tokens_a_character", "bytes_a_token")]
        unknown = each["unknown_share"]
        cells.append("-" if unknown is None else percent(2)(unknown))
        parity = [_shown(each["parity"])] if parallel else []
        rows.append([path, f"{each['documents']:,}", f"{each['tokens']:,}", *cells, *parity])
    return table(rows, numbers=True)


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
