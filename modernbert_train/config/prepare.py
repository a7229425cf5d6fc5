"""Every knob of data preparation: what data_prep/prepare.py reads, how it cleans and splits, where it writes.

One source dataclass serves all kinds, because `sources` is an open dictionary and its entries are checked key by key;
which keys a kind reads is the table FIELDS, and a key that the chosen kind would ignore is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

SMALLEST_VOCABULARY = 320  # 256 bytes and 5 special tokens, rounded up to a multiple of 64


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where documents come from."""

    kind: Literal["python_stdlib", "text", "jsonl", "parquet", "csv", "hub"] = MISSING
    path: str | None = None  # a file, a folder, or a pattern such as in/*.jsonl.zst; for hub a name or a local folder
    glob: str | None = None  # files taken from a folder; None takes those the kind usually has, see GLOBS
    text_field: str | None = None  # column or key that holds the text; None is `text`
    subset: str | None = None  # hub: configuration of the dataset, where it has several
    split: str | None = None  # hub: split of the dataset; None is `train`


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer: one trained on the training documents, or one that exists."""

    path: str | None = None  # tokenizer.json or its folder, to be used as it is; None trains one
    vocab_size: int = 8192  # entries of a trained tokenizer, special tokens included; a multiple of 64
    training_share: float = 1.0  # share of the training documents, picked by hash, that a tokenizer is trained on


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Text on disk to one dataset of tokenised shards."""

    out: str = MISSING  # folder of the dataset; appears only when it is complete
    sources: dict[str, SourceConfig] = field(default_factory=dict)  # read in this order; at least one
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    validation_share: float = 0.05  # share of the documents, by hash of their text, that is held out; 0 holds out none
    min_characters: int = 1  # shorter documents are left out and counted
    max_characters: int = 5_000_000  # longer ones are damage: tokenising takes about 130 bytes of memory a character
    on_error: Literal["skip", "stop"] = "skip"  # damaged documents: leave out and count, or stop at the first
    shard_bytes: int = 1 << 24  # size of one shard before compression, in bytes


# kind -> the keys of SourceConfig that it reads
FIELDS: dict[str, tuple[str, ...]] = {
    "python_stdlib": (),
    "text": ("path", "glob"),
    "jsonl": ("path", "glob", "text_field"),
    "parquet": ("path", "glob", "text_field"),
    "csv": ("path", "glob", "text_field"),
    "hub": ("path", "subset", "split", "text_field"),
}

# kind -> patterns of the files taken from a folder when `glob` is not given
GLOBS: dict[str, tuple[str, ...]] = {
    "text": ("**/*.txt",),
    "jsonl": ("**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst"),
    "parquet": ("**/*.parquet",),
    "csv": ("**/*.csv", "**/*.csv.gz"),
}


def prepare_problems(config: PrepareConfig) -> list[str]:
    """Find what no single key shows: sources that lack or ignore a key, numbers out of range.

    Returns:
        One message per problem (what, where, what to do); empty when the spec can be run.
    """
    problems = []
    if not config.sources:
        problems.append("sources: empty. Add at least one, for example sources.mine={kind: text, path: folder}.")
    for name, source in config.sources.items():
        reads = FIELDS[source.kind]
        if "path" in reads and not source.path:
            problems.append(f"sources.{name}.path: missing. A source of kind {source.kind} needs one.")
        problems.extend(
            f"sources.{name}.{key}={getattr(source, key)}: a source of kind {source.kind} does not read it. Remove it."
            for key in ("path", "glob", "text_field", "subset", "split")
            if key not in reads and getattr(source, key) is not None
        )
    size = config.tokenizer.vocab_size
    if size % 64 or size < SMALLEST_VOCABULARY:
        nearest = max(SMALLEST_VOCABULARY, round(size / 64) * 64)
        problems.append(
            f"tokenizer.vocab_size={size}: must be a multiple of 64 and at least {SMALLEST_VOCABULARY}. "
            f"The nearest is {nearest}."
        )
    if not 0 < config.tokenizer.training_share <= 1:
        problems.append(
            f"tokenizer.training_share={config.tokenizer.training_share}: must be above 0 and at most 1. "
            "1 trains the tokenizer on every training document."
        )
    if not 0 <= config.validation_share < 1:
        problems.append(
            f"validation_share={config.validation_share}: must be at least 0 and below 1. 0.05 holds out 5 %."
        )
    if not 1 <= config.min_characters <= config.max_characters:
        problems.append(
            f"min_characters={config.min_characters}: must be at least 1 and at most max_characters="
            f"{config.max_characters}. Change one of the two."
        )
    if not 1 << 16 <= config.shard_bytes <= 1 << 31:
        problems.append(
            f"shard_bytes={config.shard_bytes}: must be from 65536 (64 KiB) to 2147483648 (2 GiB). "
            "16777216 suits local disks, 67108864 object stores."
        )
    return problems
