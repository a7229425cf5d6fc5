"""Effect of another vocabulary on a run's text, measured on a sample of its training shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modernbert_train.config.schema import DataConfig
from modernbert_train.core.text import table
from modernbert_train.data.facts import DataFacts
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.open_shards import open_shards
from modernbert_train.vocabulary import open_tokenizer
from modernbert_train.weights.source import Origin
from modernbert_train.weights.token_rows import TokenRows

MAX_DOCUMENTS, MAX_TOKENS = 64, 2048  # documents of a stream; tokens of a document


@dataclass(frozen=True)
class Effect:
    """Effect of another vocabulary on a sample of text.

    Attributes:
        tokens: of the sample, in the new vocabulary.
        averaged: tokens whose row is a mean of old rows.
        unknown: tokens whose row is the mean of all rows.
        old_tokens: of the same text, in the old vocabulary.
        num_bytes: of the text.
    """

    tokens: int
    averaged: int
    unknown: int
    old_tokens: int
    num_bytes: int

    @property
    def new_share(self) -> float:
        """Share of the tokens that have a new row."""
        return (self.averaged + self.unknown) / max(1, self.tokens)

    @property
    def shorter(self) -> float:
        """Share of the old tokens that are saved; negative if the text gets longer."""
        return 1 - self.tokens / max(1, self.old_tokens)


def effects(data: DataConfig, facts: DataFacts, origin: Origin) -> dict[str, Effect]:
    """Return the effect on a sample of each stream, by name; empty if the vocabulary stays.

    Raises:
        RunError: shards or tokenizers cannot be read.
    """
    if origin.rows is None:
        return {}
    with origin.source.tokenizer_folder() as old:
        return {
            name: effect_on(open_shards(folder, data, facts.vocabulary), origin.rows, old, data.tokenizer)
            for name, folder in facts.streams.items()
        }


def effect_on(shards: TokenShards, rows: TokenRows, old_folder: Path, new_folder: str) -> Effect:
    """Measure documents spread over a folder; of a remote one, over the first shard, so that only that is fetched.

    The new tokenizer decodes the ids to text; a long document is cut to its beginning.
    """
    old, new, counts_V = open_tokenizer(old_folder), open_tokenizer(Path(new_folder)), rows.counts_V
    total = len(shards.lengths) if shards.remote is None else int(shards.shard_documents[0])
    numbers = sorted({*np.linspace(0, total - 1, min(total, MAX_DOCUMENTS)).astype(int).tolist()})
    tokens = averaged = unknown = old_tokens = num_bytes = 0
    for number in numbers:
        ids = shards.read(number)[:MAX_TOKENS]
        text = new.decode(ids.tolist(), skip_special_tokens=False)
        tokens += len(ids)
        averaged += int((counts_V[ids] > 1).sum())
        unknown += int((counts_V[ids] == 0).sum())
        old_tokens += len(old.encode(text, add_special_tokens=False).ids)
        num_bytes += len(text.encode())
    return Effect(tokens, averaged, unknown, old_tokens, num_bytes)


def describe_effects(effects_of: dict[str, Effect]) -> list[str]:
    """Return a table with a line for each stream; empty without streams."""
    if not effects_of:
        return []
    rows = [("text", "sample, tokens", "with a new row", "before", "shorter by", "bytes a token")]
    for name, effect in effects_of.items():
        rows.append(
            (
                name,
                f"{effect.tokens:,}",
                f"{effect.new_share:.1%}",
                f"{effect.old_tokens:,}",
                f"{effect.shorter:.1%}",
                f"{effect.num_bytes / max(1, effect.tokens):.2f}",
            )
        )
    return table(rows, numbers=True).split("\n")
