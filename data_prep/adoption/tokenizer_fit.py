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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from modernbert_train.core.text import shorten
from modernbert_train.data.shard_file import without_ends
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import CONVENTION, NEEDED, SPARE, partial_roles, role_tokens, special_tokens, token_ids

DOCUMENTS = 8  # of as many shards before the pass, and of each shard within it
_TOKENS = 512  # of each
_NEEDED = 0.98  # share of tokens that come back
_ENDS = 2  # tokens of a document that may differ because it was cut there
_ENOUGH = 16  # tokens below which nothing is concluded
_MOST = 0.45  # share of one token that no text has; of int64 read as another type half or more are 0
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class Sample:
    """A few documents.

    Attributes:
        texts: their beginnings, decoded.
        agree: share of their tokens that come back in order.
        tokens: how many were looked at.
        most: share of the most frequent one.
    """

    texts: list[str]
    agree: float
    tokens: int
    most: float

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
    return Sample(texts, back / total if seen else 1.0, seen.total(), max(seen.values(), default=0) / total)


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
    if sample.agree < _NEEDED and sample.tokens >= _ENOUGH and not anyway:
        shown = "\n".join(sample.lines())
        raise DataError(
            f"{source}: of {sample.tokens:,} tokens looked at, {sample.agree:.1%} come back in their order when their "
            f"text is encoded again with {folder}; with the right tokenizer nearly all do, and {_NEEDED:.0%} are asked "
            f"for. They decode to:\n{shown}\n"
            "Name the tokenizer that made them with --tokenizer. If this is good text, --anyway adopts it."
        )


def spread(number: int, most: int) -> list[int]:
    """At most so many of the numbers below `number`, evenly."""
    return sorted({*np.linspace(0, number - 1, min(number, most)).astype(int).tolist()})
