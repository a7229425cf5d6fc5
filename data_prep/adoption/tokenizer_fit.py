"""Do ids and tokenizer belong together? A few documents of every shard are decoded and encoded again.

Of text that the tokenizer made itself, 99.9 % of the tokens come back in their order; what another one made decodes to
pieces of words, which are cut otherwise: 76 to 94 %, also where all ids are shifted by a constant. A token at either
end of a document that was cut may differ, and normalisation may change a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import shorten
from modernbert_train.data.shard_file import without_ends
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import (
    CONVENTION,
    NEEDED,
    SPARE,
    open_tokenizer,
    partial_roles,
    role_tokens,
    special_tokens,
    token_ids,
)

DOCUMENTS = 8  # of as many shards before the pass, and of each shard within it
_TOKENS = 512  # of each
# share of tokens that come back; entries of Unigram and WordPiece are mostly whole words, so that of wrong ids 98 to
# 99.9 % do, and likely entries are counted too
_NEEDED = {"Unigram": 0.997, "WordPiece": 0.998}
_NEEDED_BPE = 0.98
_ENDS = 2  # tokens of a document that may differ because it was cut there
_ENOUGH = 16  # tokens below which nothing is concluded
_MOST = 0.45  # share of one token that no text has; of int64 read as another type half or more are 0
_LIKELIEST = 0.25  # of a Unigram's text is by its own scores made of its likeliest entries, some ten, ...
_FEW = 0.1  # ... and other text has a tenth of that at least: code has 28 % under a tokenizer of prose
# a WordPiece lists its entries by frequency, but for characters: its first 32 pieces of several characters are 2.7 % of
# code under a tokenizer of prose and 22 % of prose under BERT's, but at most 0.5 % of ids that are shifted or permuted
_FIRST, _FIRST_SHARE = 32, 0.15
_MANY = 200  # tokens above which these are looked for
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class Sample:
    """A few documents.

    Attributes:
        texts: their beginnings, decoded.
        agree: share of their tokens that come back in order.
        tokens: how many were looked at.
        most: share of the most frequent one.
        likeliest: share of the tokenizer's likeliest entries, relative to their usual share; None: they are unknown.
        never: special tokens among them that stand in no text, such as [MASK].
    """

    texts: list[str]
    agree: float
    tokens: int
    most: float
    likeliest: float | None = None
    never: tuple[str, ...] = ()
    needed: float = _NEEDED_BPE  # share of tokens that must come back

    def lines(self) -> Iterator[str]:
        """For a person: beginnings of texts."""
        yield from (f"  {shorten(' '.join(text.split()), _SHOWN_CHARACTERS)}" for text in self.texts)

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "agree": self.agree,
            "sampled_tokens": self.tokens,
            "sample": [line.strip() for line in self.lines()],
        }


def require_usable(folder: str) -> None:
    """Refuse a tokenizer that masked-language modelling cannot use.

    Raises:
        DataError: there is none.
        ConfigError: it lacks special tokens.
    """
    roles = role_tokens(folder)
    missing = [CONVENTION[role] for role in NEEDED if role not in roles]
    if missing:
        raise ConfigError(
            f"--tokenizer={folder}: has no {', '.join(missing)}. Give it what it lacks, in a folder of its own; all "
            f"ids stay as they are: python -m modernbert_train tokenizer adapt data/tokenizer {folder} --extend"
        )


def end_tokens(folder: str) -> dict[int, str]:
    """Special tokens of a tokenizer that may stand around a text, by id: [CLS], [SEP], [PAD], <bos>, <|endoftext|>."""
    ids, roles = token_ids(folder), partial_roles(folder)
    within = {roles.get("mask"), roles.get("unk")}  # these stand for text and not around it
    return {ids[text]: text for text in special_tokens(folder) if text not in within and not text.startswith(SPARE)}


def take_sample(documents: Sequence[tuple[str, NDArray[Any]]], folder: str, special: Mapping[int, str]) -> Sample:
    """Decode documents and encode them again.

    Args:
        documents: places, for messages, and ids as stored.
        folder: of the tokenizer.
        special: see `end_tokens`.

    Raises:
        DataError: an id is no entry of the tokenizer.
    """
    tokenizer = _tokenizer(folder)
    entries = max(token_ids(folder).values()) + 1
    texts, back = [], 0
    seen: Counter[int] = Counter()
    for place, stored in documents:
        ids = without_ends(stored, special.keys())[:_TOKENS]
        wrong = [int(id) for id in ids if not 0 <= id < entries]
        if wrong:
            raise DataError(
                f"{place}: holds token id {wrong[0]}, the tokenizer in {folder} has {entries} entries. The shards "
                "belong to another tokenizer; name theirs with --tokenizer."
            )
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        again = tokenizer.encode(text, add_special_tokens=False).ids
        texts.append(text)
        back += min(len(ids), _in_order(ids.tolist(), again) + _ENDS)
        seen.update(ids.tolist())
    total = max(1, seen.total())
    ids, roles = token_ids(folder), partial_roles(folder)
    never = {roles.get("mask"), roles.get("pad")} - {
        text for role, text in roles.items() if role not in ("mask", "pad")
    }
    kind, likely, promised = _likeliest(folder)
    return Sample(
        texts,
        back / total if seen else 1.0,
        seen.total(),
        max(seen.values(), default=0) / total,
        sum(seen[id] for id in likely) / total / promised if likely else None,
        tuple(sorted(text for text in never if text is not None and seen[ids[text]])),
        _NEEDED.get(kind, _NEEDED_BPE),
    )


@lru_cache(maxsize=1)
def _likeliest(folder: str) -> tuple[str, frozenset[int], float]:
    """Return the kind of a tokenizer's model, its likeliest entries, and their usual share of a text; BPE has none.

    A Unigram knows them by its scores, a WordPiece by their order.
    """
    model = read_json(Path(folder) / "tokenizer.json")["model"]
    kind = str(model.get("type"))
    if kind == "WordPiece":
        pieces = sorted(model["vocab"].items(), key=lambda entry: entry[1])
        several = (id for text, id in pieces if not text.startswith("[") and len(text.removeprefix("##")) > 1)
        return kind, frozenset(islice(several, _FIRST)), _FIRST_SHARE
    if kind != "Unigram":
        return kind, frozenset(), 0.0
    scores = np.array([score for _, score in model["vocab"]])
    shares = np.where(scores < 0, np.exp(scores), 0.0)  # special tokens have 0, and are no text
    shares /= max(shares.sum(), 1e-9)
    order = np.argsort(-shares, kind="stable")
    number = 1 + int(np.searchsorted(np.cumsum(shares[order]), _LIKELIEST))
    return kind, frozenset(order[:number].tolist()), float(shares[order[:number]].sum())


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    return open_tokenizer(folder, spell_special=False)


def _in_order(ids: list[int], again: list[int]) -> int:
    """How many ids are the same, in the same order."""
    if ids == again:
        return len(ids)
    return sum(block.size for block in SequenceMatcher(None, ids, again, autojunk=False).get_matching_blocks())


@dataclass(frozen=True)
class EachShard:
    """Compares every shard within the pass; pickled with it.

    Attributes:
        folder: of the tokenizer.
        special: see `end_tokens`.
        anyway: whatever comes back.
    """

    folder: str
    special: Mapping[int, str]
    anyway: bool

    def require(self, place: str, documents: Sequence[NDArray[Any]]) -> None:
        """Refuse a shard, by its place, if a few of its documents do not come back; see `require_fit`."""
        if not self.anyway:
            sample = take_sample([(place, ids) for ids in documents], self.folder, self.special)
            require_fit(sample, place, self.folder, self.anyway)


def require_fit(sample: Sample, source: str, folder: str, anyway: bool) -> None:
    """Refuse ids that another tokenizer made.

    Raises:
        DataError: too few tokens come back; shows what the documents decode to. Or half of them are one and the same.
    """
    if sample.most > _MOST and sample.tokens >= _ENOUGH and not anyway:
        raise DataError(
            f"{source}: {sample.most:.0%} of {sample.tokens:,} tokens looked at are one and the same, as where ids are "
            "read as another type than they were written as. Correct --dtype. If this is good text, --anyway adopts it."
        )
    if sample.likeliest is not None and sample.likeliest < _FEW and sample.tokens >= _MANY and not anyway:
        shown = "\n".join(sample.lines())
        raise DataError(
            f"{source}: of {sample.tokens:,} tokens looked at, the likeliest entries of {folder} are "
            f"{sample.likeliest:.0%} as frequent as in its own text. They decode to:\n{shown}\n"
            "Name the tokenizer that made them with --tokenizer. If this is good text, --anyway adopts it."
        )
    if sample.agree < sample.needed and sample.tokens >= _ENOUGH and not anyway:
        shown = "\n".join(sample.lines())
        raise DataError(
            f"{source}: of {sample.tokens:,} tokens looked at, {sample.agree:.1%} come back in their order when their "
            f"text is encoded again with {folder}; with the right tokenizer nearly all do, and "
            f"{100 * sample.needed:g}% are asked for. They decode to:\n{shown}\n"
            "Name the tokenizer that made them with --tokenizer. If this is good text, --anyway adopts it."
        )
    if sample.never and sample.tokens >= _ENOUGH and not anyway:
        raise DataError(
            f"{source}: {', '.join(sample.never)} stands within documents, and no text gives that. Name the tokenizer "
            "that made the ids with --tokenizer; of ids that were masked there is no way back."
        )


def spread(number: int, most: int) -> list[int]:
    """At most so many of the numbers below `number`, evenly."""
    return sorted({*np.linspace(0, number - 1, min(number, most)).astype(int).tolist()})
