"""Trim a vocabulary to the tokens that a text uses most, and all that are needed to spell them.

Special and other added tokens stay, except [unused0] and so on; so do bytes, and the characters that occur in the text.
The rest of the space goes to the most frequent tokens, ties by the old id, each with the tokens that BPE merges it
from. Dropped tokens are spelled by smaller ones. Ids close up in their old order; rows of a model follow with
weights.vocabulary=replace.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from data_prep.make_tokenizer import encode_documents, set_template
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.errors import ConfigError
from modernbert_train.vocabulary import CONVENTION, SPARE

_AT_ONCE = 256  # texts tokenised together
_INSIDE = "##"


def trim_tokenizer(
    tokenizer: Tokenizer, texts: Iterable[str], entries: int, roles: Mapping[str, str] = CONVENTION
) -> tuple[Tokenizer, float]:
    """Trim a tokenizer to a number of entries.

    Args:
        tokenizer: of BPE, Unigram, WordPiece or whole words.
        texts: read once.
        entries: total number, special tokens included.
        roles: its special tokens.

    Returns:
        The smaller tokenizer, and the share of the text's tokens that it keeps.

    Raises:
        ConfigError: the tokenizer is not larger, or the required tokens are more than `entries`.
    """
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    ids: dict[str, int] = tokenizer.get_vocab()
    if entries >= len(ids):
        raise ConfigError(f"--entries={entries}: the tokenizer has {len(ids):,}. Give fewer.")
    by_id = {number: token for token, number in ids.items()}
    counts: Counter[str] = Counter()
    texts = iter(texts)
    with tokenizer_threads(True):
        while some := list(islice(texts, _AT_ONCE)):
            counts.update(by_id[number] for each in encode_documents(tokenizer, some) for number in each)
    kept = {*_needed(content, ids, counts)}
    if len(kept) > entries:
        raise ConfigError(
            f"--entries={entries}: special tokens, bytes and the characters of the text are {len(kept):,}. Give more."
        )
    spare = {token for token in ids if token.startswith(SPARE)}
    merges = _parts(content["model"])
    for token in sorted(ids.keys() - kept - spare, key=lambda token: (-counts[token], ids[token])):
        family = {*_family(token, merges)} - kept
        if len(kept) + len(family) <= entries:
            kept |= family
    stays = sum(counts[token] for token in kept) / max(1, counts.total())
    return _with_tokens(content, sorted(kept, key=ids.__getitem__), roles), stays


def _needed(content: dict[str, Any], ids: dict[str, int], counts: Counter[str]) -> Iterator[str]:
    """Yield the tokens that stay regardless of their counts."""
    added = {token["content"] for token in content["added_tokens"]}
    characters = {character for token in counts for character in token.removeprefix(_INSIDE)}
    if '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")]):
        characters |= {*pre_tokenizers.ByteLevel.alphabet()}
    unknown = {content["model"].get("unk_token"), content["model"].get("unk_id")}
    for token, number in ids.items():
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        needed = is_byte or token.removeprefix(_INSIDE) in characters or token in added or {token, number} & unknown
        if needed and not token.startswith(SPARE):
            yield token


def _parts(model: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return, for each token that BPE merges, its two parts by the first merge."""
    merges: dict[str, tuple[str, str]] = {}
    for first, second, both in merges_of(model):
        merges.setdefault(both, (first, second))
    return merges


def merges_of(model: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield two tokens and the token that they become, for each merge of a BPE."""
    for merge in model.get("merges", ()):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        yield first, second, first + second.removeprefix(model.get("continuing_subword_prefix") or "")


def _family(token: str, merges: dict[str, tuple[str, str]]) -> Iterator[str]:
    yield token
    for part in merges.get(token, ()):
        yield from _family(part, merges)


def _with_tokens(content: dict[str, Any], kept: list[str], roles: Mapping[str, str]) -> Tokenizer:
    new = {token: number for number, token in enumerate(kept)}
    model, old = content["model"], content["model"]["vocab"]
    if model["type"] == "Unigram":
        unknown = None if model.get("unk_id") is None else old[model["unk_id"]][0]
        model["vocab"] = [entry for entry in old if entry[0] in new]
        model["unk_id"] = next((i for i, entry in enumerate(model["vocab"]) if entry[0] == unknown), None)
    else:
        model["vocab"] = {token: new[token] for token in old if token in new}
    if "merges" in model:
        model["merges"] = [[a, b] for a, b, both in merges_of(model) if {a, b, both} <= new.keys()]
    content["added_tokens"] = [
        token | {"id": new[token["content"]]} for token in content["added_tokens"] if token["content"] in new
    ]
    content["post_processor"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    set_template(tokenizer, roles)
    return tokenizer
