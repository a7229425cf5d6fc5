"""Check that ids and tokenizer belong together: decode a few documents of every shard and encode them again.

With the tokenizer that wrote the ids, 99.9 % of the tokens are equal and in order. Ids of another tokenizer decode to
fragments of words, which are tokenised differently: 76 to 94 % are equal, also if all ids are shifted by a constant. A
token at either end of a cut document may differ, and normalisation may change a few.
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

DOCUMENTS = 8  # shards sampled before the pass, and documents of each shard within it
_TOKENS = 512  # maximum tokens of each document
# share of equal tokens; Unigram and WordPiece have mostly whole words, so 98 to 99.9 % of wrong ids are equal, and
# likely entries are counted too
_NEEDED = {"Unigram": 0.997, "WordPiece": 0.998}
_NEEDED_BPE = 0.98
_ENDS = 2  # tokens of a document that may differ because it was cut there
_ENOUGH = 16  # fewer tokens are no evidence
_MOST = 0.45  # largest share of one token in real text; int64 read as another type gives half or more zeros
_LIKELIEST = 0.25  # by a Unigram's scores, about ten entries make up this share of its text, ...
_FEW = 0.1  # ... and other text has at least a tenth of that: code has 28 % under a tokenizer of prose
# a WordPiece lists its entries by frequency, but for characters: its first 32 pieces of several characters are 2.7 % of
# code under a tokenizer of prose and 22 % of prose under BERT's, but at most 0.5 % of shifted or permuted ids
_FIRST, _FIRST_SHARE = 32, 0.15
_MANY = 200  # minimum number of tokens for that check
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class Sample:
    """A sample of documents.

    Attributes:
        texts: their beginnings, decoded.
        agree: share of their tokens that are equal and in order when encoded again.
        tokens: number of sampled tokens.
        most: share of the most frequent one.
        likeliest: share of the tokenizer's likeliest entries, relative to their usual share; None: they are unknown.
        never: special tokens among them that text never contains, such as [MASK].
    """

    texts: list[str]
    agree: float
    tokens: int
    most: float
    likeliest: float | None = None
    never: tuple[str, ...] = ()
    needed: float = _NEEDED_BPE  # share of tokens that must come back

    def lines(self) -> Iterator[str]:
        """Yield the beginnings of the texts, for the user."""
        yield from (f"  {shorten(' '.join(text.split()), _SHOWN_CHARACTERS)}" for text in self.texts)

    def to_json(self) -> dict[str, Any]:
        """Return the facts for the report."""
        return {
            "agree": self.agree,
            "sampled_tokens": self.tokens,
            "sample": [line.strip() for line in self.lines()],
        }


def require_usable(folder: str) -> None:
    """Refuse a tokenizer that masked-language modelling cannot use.

    Raises:
        DataError: there is no tokenizer.
        ConfigError: it lacks special tokens.
    """
    roles = role_tokens(folder)
    missing = [CONVENTION[role] for role in NEEDED if role not in roles]
    if missing:
        raise ConfigError(
            f"--tokenizer={folder}: lacks {', '.join(missing)}. Add them in another folder; all "
            f"ids stay as they are: python -m modernbert_train tokenizer adapt data/tokenizer {folder} --extend"
        )


def end_tokens(folder: str) -> dict[int, str]:
    """Return the special tokens that may enclose a text, by id: [CLS], [SEP], [PAD], <bos>, <|endoftext|>."""
    ids, roles = token_ids(folder), partial_roles(folder)
    within = {roles.get("mask"), roles.get("unk")}  # these replace text and do not enclose it
    return {ids[text]: text for text in special_tokens(folder) if text not in within and not text.startswith(SPARE)}


def take_sample(documents: Sequence[tuple[str, NDArray[Any]]], folder: str, special: Mapping[int, str]) -> Sample:
    """Decode documents and encode them again.

    Args:
        documents: file names, for messages, and ids as stored.
        folder: of the tokenizer.
        special: see `end_tokens`.

    Raises:
        DataError: an id is not in the tokenizer.
    """
    tokenizer = _tokenizer(folder)
    entries = max(token_ids(folder).values()) + 1
    texts, back = [], 0
    seen: Counter[int] = Counter()
    for where, stored in documents:
        ids = without_ends(stored, special.keys())[:_TOKENS]
        wrong = [int(id) for id in ids if not 0 <= id < entries]
        if wrong:
            raise DataError(
                f"{where}: holds token id {wrong[0]}, the tokenizer in {folder} has {entries} entries. The shards "
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
    shares = np.where(scores < 0, np.exp(scores), 0.0)  # special tokens have 0, and never occur in text
    shares /= max(shares.sum(), 1e-9)
    order = np.argsort(-shares, kind="stable")
    number = 1 + int(np.searchsorted(np.cumsum(shares[order]), _LIKELIEST))
    return kind, frozenset(order[:number].tolist()), float(shares[order[:number]].sum())


@lru_cache(maxsize=1)
def _tokenizer(folder: str) -> Tokenizer:
    return open_tokenizer(folder, spell_special=False)


def _in_order(ids: list[int], again: list[int]) -> int:
    """Count equal ids in the same order."""
    if ids == again:
        return len(ids)
    return sum(block.size for block in SequenceMatcher(None, ids, again, autojunk=False).get_matching_blocks())


@dataclass(frozen=True)
class EachShard:
    """Check of every shard within the pass; pickled with it.

    Attributes:
        folder: of the tokenizer.
        special: see `end_tokens`.
        anyway: True to accept everything.
    """

    folder: str
    special: Mapping[int, str]
    anyway: bool

    def require(self, where: str, documents: Sequence[NDArray[Any]]) -> None:
        """Refuse a shard, named `place`, if a few of its documents differ when encoded again; see `require_fit`."""
        if not self.anyway:
            sample = take_sample([(where, ids) for ids in documents], self.folder, self.special)
            require_fit(sample, where, self.folder, self.anyway)


def require_fit(sample: Sample, source: str, folder: str, anyway: bool) -> None:
    """Refuse ids of another tokenizer.

    Raises:
        DataError: too few tokens are equal (shows the decoded documents), or half of them are the same token.
    """
    if sample.most > _MOST and sample.tokens >= _ENOUGH and not anyway:
        raise DataError(
            f"{source}: {sample.most:.0%} of {sample.tokens:,} sampled tokens are the same, which happens if ids are "
            "read as another type than they were written as. Correct --dtype. If this is good text, --anyway adopts it."
        )
    if sample.likeliest is not None and sample.likeliest < _FEW and sample.tokens >= _MANY and not anyway:
        shown = "\n".join(sample.lines())
        raise DataError(
            f"{source}: in {sample.tokens:,} sampled tokens, the likeliest entries of {folder} are "
            f"{sample.likeliest:.0%} as frequent as in its own text. They decode to:\n{shown}\n"
            "Name the tokenizer of the ids with --tokenizer. If this is good text, --anyway adopts it."
        )
    if sample.agree < sample.needed and sample.tokens >= _ENOUGH and not anyway:
        shown = "\n".join(sample.lines())
        raise DataError(
            f"{source}: of {sample.tokens:,} sampled tokens, {sample.agree:.1%} are equal and in order when their "
            f"text is encoded again with {folder}; with the right tokenizer nearly all are, and "
            f"{100 * sample.needed:g}% are required. They decode to:\n{shown}\n"
            "Name the tokenizer of the ids with --tokenizer. If this is good text, --anyway adopts it."
        )
    if sample.never and sample.tokens >= _ENOUGH and not anyway:
        raise DataError(
            f"{source}: {', '.join(sample.never)} occurs within documents, which no text contains. Name the tokenizer "
            "of the ids with --tokenizer; masked ids cannot be restored."
        )


def spread(number: int, max_count: int) -> list[int]:
    """Return at most `max_count` of the numbers below `number`, evenly spread."""
    return sorted({*np.linspace(0, number - 1, min(number, max_count)).astype(int).tolist()})
