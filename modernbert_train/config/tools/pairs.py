"""Every key of pairs of texts: a spec of `prepare` with a section `pairs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING

from modernbert_train.config.knob import bound_mistakes, knob
from modernbert_train.config.tools.prepare import (
    DatasetConfig,
    RowSourceConfig,
    drop_defaults,
    executor_problems,
    source_problems,
)
from modernbert_train.core.files import TABLE_ENDS, ending


@dataclass(frozen=True, kw_only=True)
class PairSourceConfig(RowSourceConfig):
    """A table of pairs, or a folder of tables."""

    kind: Literal["jsonl", "tsv", "csv", "parquet", "hub"] = MISSING  # tsv: no quotes


@dataclass(frozen=True, kw_only=True)
class PairTextsConfig:
    """Columns of the texts of a row, and how each text is changed."""

    query: str = "query"  # column of the queries, with dots into objects
    positive: str = "positive"  # column of the texts that answer them
    negatives: list[str] = field(default_factory=list)  # columns of texts that do not answer, each a text or a list
    # columns of a teacher's scores: first the positive's, then each negative's, equally many scores as texts
    scores: list[str] = field(default_factory=list)
    score_range: list[float] = field(default_factory=list)  # lowest and highest score; stored as shares of this range
    max_negatives: int | None = None  # at most for each query; None: all
    query_prefix: str = ""  # put before each query, with its space
    document_prefix: str = ""  # put before each other text
    query_prefix_column: str | None = None  # column of a prefix per row, as an instruction; not with query_prefix
    document_prefix_column: str | None = None  # the same for the row's other texts
    max_tokens: int = knob(256, low=3)  # of a text, special tokens included; longer ones are truncated
    query_max_tokens: int | None = knob(None, low=3)  # of a query; None: max_tokens

    @property
    def columns(self) -> list[str]:
        """All columns that a row must have."""
        prefixes = filter(None, [self.query_prefix_column, self.document_prefix_column])
        return list(dict.fromkeys([self.query, self.positive, *self.negatives, *self.scores, *prefixes]))


@dataclass(frozen=True, kw_only=True)
class GivenTokenizerConfig:
    """The tokenizer of the model."""

    path: str = MISSING  # its folder


@dataclass(frozen=True, kw_only=True)
class PairsConfig(DatasetConfig):
    """Preparation of pairs of texts: one dataset of tokenised shards, for objective.name=contrastive."""

    sources: dict[str, PairSourceConfig] = field(default_factory=dict)  # read in this order; at least one
    pairs: PairTextsConfig = field(default_factory=PairTextsConfig)
    tokenizer: GivenTokenizerConfig = field(default_factory=GivenTokenizerConfig)
    # share of the queries, by hash of their text, that is held out; 0: none
    validation_share: float = knob(0.01, low=0, below=1)
    max_characters: int = 1 << 22  # a row with a longer text counts as damaged
    on_error: Literal["skip", "stop"] = "stop"  # damaged rows: drop and count, or stop at the first

    home = "data_prep.pairs"

    @property
    def files(self) -> dict[str, str]:
        return {"tokenizer.path": self.tokenizer.path}

    def problems(self) -> list[str]:
        return list(pairs_problems(self))

    def identity(self) -> dict[str, Any]:
        spec = super().identity()
        del spec["task_bytes"]  # one task writes the shards
        drop_defaults(spec, PairsConfig(), "max_characters", "on_error", "shard_bytes")
        drop_defaults(spec["pairs"], PairTextsConfig(), "query_prefix_column", "document_prefix_column")
        for source in spec["sources"].values():
            drop_defaults(source, PairSourceConfig(), "glob")
        return spec


def pairs_problems(config: PairsConfig) -> Iterator[str]:
    """Yield mistakes that can be found without reading files; as `prepare_problems`."""
    example = "sources.mine={kind: jsonl, path: pairs.jsonl}"
    yield from source_problems([(f"sources.{name}", source) for name, source in config.sources.items()], example)
    for name, source in config.sources.items():
        end = ending(Path(source.path or ""))
        if source.kind != "hub" and end in TABLE_ENDS and end != f".{source.kind}":
            yield f"sources.{name}.path={source.path}: does not end in .{source.kind}. Correct it or the kind."
    texts = config.pairs
    columns = [texts.query, texts.positive, *texts.negatives]
    if len({*columns}) < len(columns):
        yield f"pairs.query, pairs.positive and pairs.negatives name {', '.join(columns)}. Name each column once."
    if texts.scores and len(texts.scores) != 1 + len(texts.negatives):
        number = 1 + len(texts.negatives)
        yield f"pairs.scores={texts.scores}: name {number}, for pairs.positive and for each of pairs.negatives."
    ends = texts.score_range
    if bool(texts.scores) != bool(ends) or (ends and not (len(ends) == 2 and 0 < ends[1] - ends[0] < inf)):
        yield "pairs.scores and pairs.score_range need each other, the lower end of the range first. Give both."
    for side in ("query", "document"):
        if getattr(texts, f"{side}_prefix") and getattr(texts, f"{side}_prefix_column"):
            yield f"pairs.{side}_prefix and pairs.{side}_prefix_column: both are put before a text. Remove one of them."
    if texts.max_negatives is not None and texts.max_negatives < bool(texts.negatives):
        yield f"pairs.max_negatives={texts.max_negatives}: leave out pairs.negatives, or give at least 1."
    yield from executor_problems(config.executor)
    yield from bound_mistakes(config)
