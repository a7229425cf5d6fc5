"""Every knob of data preparation: what `prepare` reads, how it cleans and splits, where it writes.

A spec with a section `pairs` is one of pairs of texts, see pairs.py; any other one of text (PrepareConfig). One source
dataclass serves all kinds, because `sources` is an open dictionary and its entries are checked key by key; the table
FIELDS lists the keys that a kind reads, and a key that the chosen kind would ignore is refused.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import field as field_  # where a key is called so
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING

from modernbert_train.config.knob import knob, knobs
from modernbert_train.config.read import read_override, read_yaml

SMALLEST_VOCABULARY = 320  # 256 bytes and 5 special tokens, rounded up to a multiple of 64
LANGUAGE_FILTER = "LanguageFilter"
ALTERING_FILTERS = ("C4QualityFilter",)  # return other text than they were given
MOST_FIELDS = 10
MOST_STREAMS = 100
REST = "rest"  # the stream of what belongs to no other
_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class RowSourceConfig:
    """Where rows come from."""

    kind: str = MISSING
    path: str | None = None  # a file, a folder, or a pattern such as in/*.jsonl.zst; for hub a name or a local folder
    glob: str | None = (
        None  # files of a folder, such as **/*.{md,txt}; None takes what is usual for the kind, see GLOBS
    )
    delimiter: str | None = None  # csv: the character between cells; None is a comma
    subset: str | None = None  # hub: configuration of the dataset, where it has several
    split: str | None = None  # hub: split of the dataset; None is `train`
    # text, jsonl, csv, tsv: `auto` takes what is not UTF-8 for UTF-16 or Windows-1252, where it looks so, and counts
    # it; utf-8 guesses nothing; any other of Python's codecs (cp1250, gb18030, shift_jis, ...) is taken at its word
    encoding: str = "utf-8"
    max_left_out: float | None = knob(None, low=0, high=1)  # of this source; None is that of the spec

    def text_key(self, name: str) -> str | None:
        """The key that names the column of texts of the source `name`; None where it has no columns."""
        return "pairs.query, or another key of `pairs`,"


@dataclass(frozen=True, kw_only=True)
class SourceConfig(RowSourceConfig):
    """Where documents come from."""

    kind: Literal["python_stdlib", "text", "jsonl", "parquet", "csv", "tsv", "mds", "hub"] = MISSING
    text_field: str | None = None  # column or key that holds the text, with dots into objects; None is `text`
    # column or key with the words that a segmenter found in the text (jieba, MeCab, ...): a list, or a text with white
    # space between words; stored for objective.words=segmenter. All sources of a dataset have one, or none has
    words_field: str | None = None
    # facts of a document by a name of yours: the column or key that holds each, such as licence: meta.license; how many
    # documents and tokens have which value is counted
    fields: dict[str, str] = field(default_factory=dict)
    fixed_fields: dict[str, str] = field(default_factory=dict)  # such facts that all its documents share

    def text_key(self, name: str) -> str | None:
        return f"sources.{name}.text_field" if "text_field" in FIELDS[self.kind] else None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer: one trained on the training documents, or one that exists."""

    path: str | None = None  # tokenizer.json or its folder, to be used with the ids it has; None trains one
    extend: bool = False  # add the special tokens that it lacks, and spare entries up to a multiple of 64
    vocab_size: int = 8192  # entries of a trained tokenizer, special and spare ones included; a multiple of 64
    spare_entries: int = 0  # entries [unused0], ... that no text gives; with `extend` at least so many
    # share of the training documents, picked by hash, that a tokenizer is trained on
    training_share: float = knob(1.0, above=0, high=1)


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """One of datatrove's filters: documents that it does not pass are left out and counted."""

    filter: Literal[
        "LanguageFilter",
        "GopherQualityFilter",
        "GopherRepetitionFilter",
        "FineWebQualityFilter",
        "C4QualityFilter",
        "C4ParagraphFilter",
        "RegexFilter",
    ] = MISSING  # class of datatrove.pipeline.filters; C4QualityFilter also removes lines, which is counted too
    model: str | None = None  # LanguageFilter only: the fastText model, a local file such as lid.176.bin
    arguments: dict[str, Any] = field(default_factory=dict)  # of the class, see datatrove


@dataclass(frozen=True, kw_only=True)
class NearDuplicatesConfig:
    """MinHash (Broder 1997): two documents are near duplicates if they agree on all hashes of any one bucket."""

    ngram_words: int = knob(5, low=1)  # words in a shingle; a document of fewer words is never a near duplicate
    buckets: int = knob(14, low=1)  # more buckets find less similar pairs
    # more hashes find only more similar pairs; 14 x 8 finds 92 % of those 80 % alike
    hashes_per_bucket: int = knob(8, low=1)


@dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """Training documents in folders of their own by one of their fields, to be weighed by data.streams of a run.

    Stream NAME is the folder train-NAME; what belongs to none is train-rest.
    """

    field: str | None = None  # one of the sources' fields; None: all training documents in one folder, train
    values: dict[str, list[str]] = field_(default_factory=dict)  # stream -> values of the field
    scores: dict[str, float] = field_(default_factory=dict)  # stream -> its lowest score; it ends where the next begins


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Who runs the tasks: nothing here changes what is written."""

    name: Literal["local", "slurm", "ray"] = "local"
    workers: int | None = knob(None, low=1)  # tasks run at a time; None is one per core; slurm, ray: no limit
    options: dict[str, Any] = field(default_factory=dict)  # slurm, ray: arguments of datatrove's executor


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A dataset of tokenised shards: what every kind of spec says."""

    out: str = MISSING  # folder of the dataset; appears only when it is complete
    sources: Mapping[str, RowSourceConfig] = field(default_factory=dict)
    validation_share: float = 0.0
    max_characters: int = 5_000_000  # longer ones are damage: tokenising takes about 200 bytes of memory a character
    on_error: Literal["skip", "stop"] = "skip"
    # the share of a source's documents that may be damaged and left out; more ends the command, and so does a source of
    # which nothing is left
    max_left_out: float = knob(0.01, low=0, high=1)
    # size of one shard before compression, in bytes
    shard_bytes: int = knob(1 << 24, low=1 << 16, high=1 << 31, why="16777216 for local disks, 67108864 for stores")
    # input read by one task, in bytes; a file that cannot be cut may be more
    task_bytes: int = knob(1 << 27, low=1024)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)

    @property
    def home(self) -> str:
        """The module with `REPORT`, `check`, `make_stages` and `describe` of this kind of dataset."""
        raise NotImplementedError

    @property
    def evaluation_sets(self) -> Mapping[str, SourceConfig]:
        """Sets whose texts are kept out of the dataset, by name."""
        return {}

    @property
    def files(self) -> dict[str, str]:
        """Files and folders, but for sources, by the keys that name them."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """One message for each mistake that shows without reading files."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """The keys that determine the dataset.

        Keys that earlier versions lacked are left out where they are the default, so that their datasets keep their
        identity.
        """
        spec = asdict(self)
        for key in ("out", "executor", "max_left_out"):
            del spec[key]
        for each in [*spec["sources"].values(), *spec.get("decontaminate", {}).values()]:
            del each["max_left_out"]
            drop_defaults(each, SourceConfig(), "encoding", "fields", "fixed_fields", "delimiter", "words_field")
        return spec


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(DatasetConfig):
    """Text on disk to one dataset of tokenised shards."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)  # read in this order; at least one
    filters: dict[str, FilterConfig] = field(default_factory=dict)  # applied in this order
    duplicates: Literal["keep", "exact", "near"] = "exact"  # left out: none, equal texts, near duplicates as well
    near_duplicates: NearDuplicatesConfig = field(default_factory=NearDuplicatesConfig)  # how near, for `near`
    # evaluation sets by name: documents that share overlap_words words in a row with one are left out
    decontaminate: dict[str, SourceConfig] = field(default_factory=dict)
    # fewer find more, and leave more out by chance; shorter texts are compared whole
    overlap_words: int = knob(13, low=1, high=1000)
    streams: StreamsConfig = field(default_factory=StreamsConfig)  # training documents by language, score, ...
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    # share of the documents, by hash of their text, that is held out; 0 holds out none
    validation_share: float = knob(0.05, low=0, below=1)
    # share of the documents, by hash of their text, that the dataset is made of; 1 takes all
    document_share: float = knob(1.0, above=0, high=1)
    min_characters: int = 1  # shorter documents are left out and counted
    on_error: Literal["skip", "stop"] = "skip"  # damaged documents: leave out and count, or stop at the first

    @property
    def home(self) -> str:
        return "data_prep.text"

    @property
    def evaluation_sets(self) -> Mapping[str, SourceConfig]:
        return self.decontaminate

    @property
    def files(self) -> dict[str, str]:
        tokenizer = {} if self.tokenizer.path is None else {"tokenizer.path": self.tokenizer.path}
        models = {f"filters.{name}.model": each.model for name, each in self.filters.items() if each.model is not None}
        return tokenizer | models

    def problems(self) -> list[str]:
        return prepare_problems(self)

    def identity(self) -> dict[str, Any]:
        spec = super().identity()
        if self.streams.field is None:
            del spec["streams"]
        if not self.decontaminate:
            del spec["decontaminate"], spec["overlap_words"]
        drop_defaults(spec, self.__class__(), "document_share")
        return spec


# kind -> the keys of SourceConfig that it reads
FIELDS: dict[str, tuple[str, ...]] = {
    "python_stdlib": ("fixed_fields",),
    "text": ("path", "glob", "encoding", "fixed_fields"),
    "jsonl": ("path", "glob", "text_field", "words_field", "encoding", "fields", "fixed_fields"),
    "parquet": ("path", "glob", "text_field", "words_field", "fields", "fixed_fields"),
    "csv": ("path", "glob", "text_field", "words_field", "delimiter", "encoding", "fields", "fixed_fields"),
    "tsv": ("path", "glob", "text_field", "words_field", "encoding", "fields", "fixed_fields"),
    "mds": ("path", "glob", "text_field", "fields", "fixed_fields"),
    "hub": ("path", "subset", "split", "text_field", "words_field", "fields", "fixed_fields"),
}

_KEYS = tuple(dict.fromkeys(key for keys in FIELDS.values() for key in keys))

# kind -> patterns of the files taken from a folder when `glob` is not given
GLOBS: dict[str, tuple[str, ...]] = {
    "text": ("**/*.txt",),
    "jsonl": ("**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst"),
    "parquet": ("**/*.parquet",),
    "csv": ("**/*.csv", "**/*.csv.gz"),
    "tsv": ("**/*.tsv", "**/*.tsv.gz"),
    "mds": ("**/*.mds", *(f"**/*.mds.{end}" for end in ("zstd", "gz", "br", "bz2", "snappy"))),
}


# arguments of datatrove's executors that are not the user's to choose
_OURS = ("pipeline", "tasks", "workers", "depends", "logging_dir", "skip_completed")


def drop_defaults(spec: dict[str, Any], usual: object, *keys: str) -> None:
    """Remove those keys from a section whose values are the default."""
    for key in keys:
        if key in spec and spec[key] == getattr(usual, key):
            del spec[key]


def is_of_pairs(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> bool:
    """True if a spec is one of pairs; mistakes in it are for `load_typed` to report."""
    trees = [read_yaml(Path(file), {}, []) for file in files]
    trees += [read_override(override, {}, []) for override in overrides]
    return any("pairs" in tree for tree in trees)


def prepare_problems(config: PrepareConfig) -> list[str]:
    """Find what no single key shows: sources that lack or ignore a key, numbers out of range.

    Returns:
        One message per problem (what, where, what to do); empty when the spec can be run.
    """
    every = [(f"sources.{name}", source) for name, source in config.sources.items()]
    if every:
        every += [(f"decontaminate.{name}", source) for name, source in config.decontaminate.items()]
    return [
        *source_problems(every, "sources.mine={kind: text, path: folder}"),
        *_field_problems(config),
        *_word_problems(config),
        *_filter_problems(config),
        *_tokenizer_problems(config.tokenizer),
        *_number_problems(config),
        *executor_problems(config.executor),
    ]


def source_problems(sources: Sequence[tuple[str, RowSourceConfig]], example: str) -> Iterator[str]:
    if not sources:
        yield f"sources: empty. Add at least one, for example {example}."
    for where, source in sources:
        reads = FIELDS[source.kind]
        if "path" in reads and not source.path:
            yield f"{where}.path: missing. A source of kind {source.kind} needs one."
        usual = SourceConfig(kind=source.kind)  # type: ignore[arg-type]
        for key in _KEYS:
            if key not in reads and getattr(source, key, None) != getattr(usual, key) and hasattr(source, key):
                yield (
                    f"{where}.{key}={getattr(source, key)}: a source of kind {source.kind} does not read it. Remove it."
                )
        if (better := _encoding_problem(source.encoding)) is not None:
            yield f"{where}.encoding={source.encoding}: {better}"
        if source.delimiter is not None and (len(source.delimiter) != 1 or source.delimiter in '\r\n"'):
            yield f'{where}.delimiter={source.delimiter!r}: must be one character, such as ; or "\\t". Correct it.'


def _encoding_problem(encoding: str) -> str | None:
    if encoding in ("auto", "utf-8"):
        return None
    try:
        name = codecs.lookup(encoding).name
        "text".encode(encoding)
    except (LookupError, ValueError):
        return "Python has no such encoding. Name one, such as cp1250 or gb18030, or auto."
    return "written otherwise than here. Set it to utf-8." if name == "utf-8" else None


def _field_problems(config: PrepareConfig) -> Iterator[str]:
    for name, source in config.decontaminate.items():
        if source.max_left_out is not None:
            yield f"decontaminate.{name}.max_left_out: an evaluation set must be whole. Remove it."
        if source.fields or source.fixed_fields:
            yield f"decontaminate.{name}: no fields are counted of an evaluation set. Remove fields and fixed_fields."
    for name, source in config.sources.items():
        for both in sorted(source.fields.keys() & source.fixed_fields.keys()):
            yield f"sources.{name}.fixed_fields.{both}: is among its fields too. Remove one of the two."
        for key, empty in [*source.fields.items(), *source.fixed_fields.items()]:
            if not empty:
                yield f"sources.{name}: field {key} is empty. Name its column, or its value under fixed_fields."
    names = field_names(config)
    if len(names) > MOST_FIELDS:
        yield f"sources: {len(names)} fields, at most {MOST_FIELDS} are counted. Remove some."
    yield from _stream_problems(config.streams, names)


def _word_problems(config: PrepareConfig) -> Iterator[str]:
    for name, source in config.decontaminate.items():
        if source.words_field is not None:
            yield f"decontaminate.{name}.words_field: an evaluation set is only compared. Remove it."
    if not has_words(config):
        return
    for name, source in config.sources.items():
        if source.words_field is None:
            yield (
                f"sources.{name}.words_field: missing, and other sources have one. Name it too, or prepare this source "
                "as a dataset of its own."
            )
    for name, each in config.filters.items():
        if each.filter in ALTERING_FILTERS:
            yield (
                f"filters.{name}.filter={each.filter}: removes lines of a text, whose words would remain. Remove it, "
                "or clean the texts before they are segmented."
            )


def has_words(config: PrepareConfig) -> bool:
    """Whether the words of a segmenter are stored beside the tokens."""
    return any(source.words_field is not None for source in config.sources.values())


def _stream_problems(streams: StreamsConfig, names: list[str]) -> Iterator[str]:
    asked = [*streams.values, *streams.scores]
    if streams.field is None:
        if asked:
            yield f"streams.field: missing, and streams {', '.join(asked)} are asked for. Name one of the fields."
        return
    if streams.field not in names:
        known = ", ".join(names) or "none; add sources.NAME.fields"
        yield f"streams.field={streams.field}: not among the fields of the sources ({known}). Correct it."
    if bool(streams.values) == bool(streams.scores):
        yield "streams: needs either values or scores, see docs/data.md. Give one of the two."
    for name in asked:
        if not _STREAM.fullmatch(name) or name == REST:
            yield f"streams: {name!r} cannot be a stream's name. Use at most 40 letters, digits, _ and -; not {REST}."
    if len(asked) > MOST_STREAMS:
        yield f"streams: {len(asked)} of them, at most {MOST_STREAMS}. Put values together."
    homes: dict[str, str] = {}
    for name, values in streams.values.items():
        if not values:
            yield f"streams.values.{name}: empty. Name the values of {streams.field} that belong to it."
        for value in values:
            if homes.setdefault(value, name) != name:
                yield f"streams.values.{name}: {value!r} belongs to {homes[value]} already. Remove one of the two."
    for name, lowest in streams.scores.items():
        if not isfinite(lowest):
            yield f"streams.scores.{name}={lowest}: must be a number; lower scores go to {REST}."
    if len(set(streams.scores.values())) < len(streams.scores):
        yield "streams.scores: two streams begin at the same score. Change one."


def field_names(config: PrepareConfig) -> list[str]:
    """The fields that any source has, in the order of their names."""
    names: set[str] = set()
    for source in config.sources.values():  # asked for each document
        if source.fields or source.fixed_fields:
            names.update(source.fields, source.fixed_fields)
    return sorted(names)


def _filter_problems(config: PrepareConfig) -> Iterator[str]:
    for name, each in config.filters.items():
        if each.filter == LANGUAGE_FILTER and each.model is None:
            yield (
                f"filters.{name}.model: missing. {LANGUAGE_FILTER} needs a fastText model for language "
                "identification. Fetch lid.176.bin once where there is a network, and name the file here."
            )
        if each.filter != LANGUAGE_FILTER and each.model is not None:
            yield f"filters.{name}.model={each.model}: {each.filter} does not read it. Remove it."
        if "exclusion_writer" in each.arguments:
            yield f"filters.{name}.arguments.exclusion_writer: not supported; what is left out is counted. Remove it."
    near = config.near_duplicates
    if near != NearDuplicatesConfig() and config.duplicates != "near":
        yield f"near_duplicates: not read with duplicates={config.duplicates}. Set duplicates=near, or remove it."


def _tokenizer_problems(settings: TokenizerConfig) -> Iterator[str]:
    size, spare = settings.vocab_size, settings.spare_entries
    if size % 64 or size < SMALLEST_VOCABULARY:
        nearest = max(SMALLEST_VOCABULARY, round(size / 64) * 64)
        yield (
            f"tokenizer.vocab_size={size}: must be a multiple of 64 and at least {SMALLEST_VOCABULARY}. "
            f"The nearest is {nearest}."
        )
    elif not 0 <= spare <= size - 261:
        yield f"tokenizer.spare_entries={spare}: must be from 0 to {size - 261}, so that bytes and specials fit."
    if settings.extend and settings.path is None:
        yield "tokenizer.extend=true: there is no tokenizer.path to extend. Name one, or remove extend."
    if spare and settings.path is not None and not settings.extend:
        yield f"tokenizer.spare_entries={spare}: a given tokenizer stays as it is. Set tokenizer.extend=true."


def _number_problems(config: PrepareConfig) -> Iterator[str]:
    for key, value, facts in knobs(config):
        yield from facts.mistakes(key, value)
    if not 1 <= config.min_characters <= config.max_characters:
        yield (
            f"min_characters={config.min_characters}: must be at least 1 and at most max_characters="
            f"{config.max_characters}. Change one of the two."
        )


def executor_problems(executor: ExecutorConfig) -> Iterator[str]:
    if executor.name == "local" and executor.options:
        yield f"executor.options={executor.options}: the local executor has none. Remove them."
    if executor.name == "slurm":
        for key in ("time", "partition"):
            if key not in executor.options:
                yield f"executor.options.{key}: missing. Slurm needs it, for example executor.options.time=04:00:00."
    for key in _OURS:
        if key in executor.options:
            yield f"executor.options.{key}: chosen by `prepare` itself. Remove it."
