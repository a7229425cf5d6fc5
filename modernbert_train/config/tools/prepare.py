"""Every key of data preparation: its sources, cleaning, splits and output.

A spec with a section `pairs` prepares pairs of texts, see pairs.py; any other one text (PrepareConfig). One source
dataclass serves all kinds, because `sources` is an open dictionary and its entries are checked key by key. The table
FIELDS lists the keys that a kind reads; a key that the chosen kind would ignore is refused.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import field as field_  # for classes with a key `field`
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal

from omegaconf import MISSING

from modernbert_train.config.knob import bound_mistakes, knob
from modernbert_train.config.read_yaml import read_override, read_yaml

SMALLEST_VOCABULARY = 320  # 256 bytes and 5 special tokens, rounded up to a multiple of 64
LANGUAGE_FILTER, REGEX_FILTER = "LanguageFilter", "RegexFilter"
ALTERING_FILTERS = ("C4QualityFilter",)  # change the text of documents
MAX_FIELDS = 10
MAX_STREAMS = 100
REST = "rest"  # the stream of documents that belong to no other
# keys of a source that the first versions lacked
_LATER_KEYS = ("encoding", "fields", "fixed_fields", "delimiter", "words_field", "part_letters", "strip")
_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class RowSourceConfig:
    """A source of rows."""

    kind: str = MISSING
    path: str | None = None  # a file, a folder, or a pattern such as in/*.jsonl.zst; for hub a name or a local folder
    glob: str | None = (
        None  # pattern of files in a folder, such as **/*.{md,txt}; None: the usual ones of the kind, see GLOBS
    )
    delimiter: str | None = None  # csv: the character between cells; None: a comma
    # fasta: cut longer sequences, such as chromosomes, into documents of so many letters; None: max_characters bounds
    # them
    part_letters: int | None = knob(None, low=1, high=1 << 24)
    subset: str | None = None  # hub: configuration of the dataset, if it has several
    split: str | None = None  # hub: split of the dataset; None: `train`
    # text, jsonl, csv, tsv: `auto` reads text that is not UTF-8 as UTF-16 or Windows-1252 if it looks like it, and
    # counts it; utf-8 never guesses; any other of Python's codecs (cp1250, gb18030, shift_jis, ...) is used as named
    encoding: str = "utf-8"
    max_left_out: float | None = knob(None, low=0, high=1)  # for this source; None: the spec's

    @property
    def text_column(self) -> str | None:
        """The column of a document's text; None: the usual one, or `pairs` names the columns."""
        return None

    def text_key(self, name: str) -> str | None:
        """Return the key for the column of texts of the source `name`; None if it has no columns."""
        return "pairs.query, or another key of `pairs`,"


@dataclass(frozen=True, kw_only=True)
class SourceConfig(RowSourceConfig):
    """A source of documents."""

    kind: Literal["python_stdlib", "text", "jsonl", "parquet", "csv", "tsv", "mds", "fasta", "hub"] = MISSING
    # html: take the text between the tags, see extra `html`; nothing: keep the tags. None: a file of kind text that is
    # HTML is left out as damaged
    strip: Literal["html", "nothing"] | None = None
    text_field: str | None = None  # column or key with the text, with dots into objects; None: `text`
    # column or key with a segmenter's words of the text (jieba, MeCab, ...): a list, or a text with white space between
    # words; stored for objective.words=segmenter. Either all sources of a dataset have one, or none
    words_field: str | None = None
    # metadata of a document, by names of your choice: the column or key of each, such as licence: meta.license;
    # documents and tokens are counted by value
    fields: dict[str, str] = field(default_factory=dict)
    fixed_fields: dict[str, str] = field(default_factory=dict)  # metadata with the same value for all its documents

    @property
    def text_column(self) -> str | None:
        return self.text_field

    def text_key(self, name: str) -> str | None:
        return f"sources.{name}.text_field" if "text_field" in FIELDS[self.kind] else None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer: trained on the training documents, or an existing one."""

    path: str | None = None  # tokenizer.json or its folder, used with its ids; None trains one
    extend: bool = False  # add missing special tokens, and spare entries up to a multiple of 64
    vocab_size: int = 8192  # entries of a trained tokenizer, special and spare ones included; a multiple of 64
    spare_entries: int = 0  # entries [unused0], ... that no text contains; with `extend` at least this many
    # share of the training documents, chosen by hash, for training a tokenizer
    training_share: float = knob(1.0, above=0, high=1)


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """A filter of datatrove: documents that do not pass are dropped and counted."""

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
    # RegexFilter only: time for one document; an expression that backtracks for longer drops it as failed
    timeout_seconds: float = knob(10.0, above=0)


@dataclass(frozen=True, kw_only=True)
class NearDuplicatesConfig:
    """MinHash (Broder 1997): two documents are near duplicates if they agree on all hashes of any one bucket."""

    ngram_words: int = knob(5, low=1)  # words in a shingle; a shorter document is never a near duplicate
    buckets: int = knob(14, low=1)  # more buckets find less similar pairs
    # more hashes find only more similar pairs; 14 x 8 finds 92 % of the pairs that are 80 % similar
    hashes_per_bucket: int = knob(8, low=1)


@dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """Training documents in separate folders by one of their fields, to be weighted by data.streams of a run.

    Stream NAME is the folder train-NAME; documents without a stream are in train-rest.
    """

    field: str | None = None  # one of the sources' fields; None: all training documents in one folder, train
    values: dict[str, list[str]] = field_(default_factory=dict)  # stream -> values of the field
    scores: dict[str, float] = field_(default_factory=dict)  # stream -> its lowest score; it ends where the next begins


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """The executor of the tasks; it does not change the output."""

    name: Literal["local", "slurm", "ray"] = "local"
    workers: int | None = knob(None, low=1)  # tasks at a time; None: one per core; slurm, ray: no limit
    options: dict[str, Any] = field(default_factory=dict)  # slurm, ray: arguments of datatrove's executor


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A dataset of tokenised shards: the keys of every kind of spec."""

    out: str = MISSING  # folder of the dataset; it exists only once complete
    sources: Mapping[str, RowSourceConfig] = field(default_factory=dict)
    validation_share: float = 0.0
    max_characters: int = 5_000_000  # longer ones are damaged: tokenising takes about 200 bytes of memory a character
    on_error: Literal["skip", "stop"] = "skip"
    # maximum share of a source's documents that may be damaged and dropped; more is an error, and so is a source
    # without any document left
    max_left_out: float = knob(0.01, low=0, high=1)
    # size of one shard before compression, in bytes
    shard_bytes: int = knob(1 << 24, low=1 << 16, high=1 << 31, why="16777216 for local disks, 67108864 for stores")
    # input read by one task, in bytes; a file that cannot be split may be larger
    task_bytes: int = knob(1 << 27, low=1024)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)

    home: ClassVar[str]
    """Module with `REPORT`, `check`, `make_stages` and `describe` for this kind of dataset."""

    @property
    def evaluation_sets(self) -> Mapping[str, SourceConfig]:
        """Sets whose texts are kept out of the dataset, by name."""
        return {}

    @property
    def files(self) -> dict[str, str]:
        """Files and folders other than sources, by their keys."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """Return a message for each mistake that can be found without reading files."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Return the keys that determine the dataset.

        Keys that earlier versions lacked are left out at their defaults, so that old datasets keep their identity.
        """
        spec = asdict(self)
        for key in ("out", "executor", "max_left_out"):
            del spec[key]
        for each in [*spec["sources"].values(), *spec.get("decontaminate", {}).values()]:
            del each["max_left_out"]
            drop_defaults(each, SourceConfig(), *_LATER_KEYS)
        return spec


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(DatasetConfig):
    """Preparation of text on disk: one dataset of tokenised shards."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)  # read in this order; at least one
    filters: dict[str, FilterConfig] = field(default_factory=dict)  # applied in this order
    duplicates: Literal["keep", "exact", "near"] = "exact"  # drop none, equal texts, or near duplicates too
    near_duplicates: NearDuplicatesConfig = field(default_factory=NearDuplicatesConfig)  # parameters of duplicates=near
    # evaluation sets by name: documents that share overlap_words consecutive words with one are dropped
    decontaminate: dict[str, SourceConfig] = field(default_factory=dict)
    # fewer words find more overlaps, and more by chance; shorter texts are compared whole
    overlap_words: int = knob(13, low=1, high=1000)
    streams: StreamsConfig = field(default_factory=StreamsConfig)  # training documents by language, score, ...
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    # share of the documents, by hash of their text, that is held out; 0: none
    validation_share: float = knob(0.05, low=0, below=1)
    # share of the documents, by hash of their text, in the dataset; 1: all
    document_share: float = knob(1.0, above=0, high=1)
    min_characters: int = 1  # shorter documents are dropped and counted
    on_error: Literal["skip", "stop"] = "skip"  # damaged documents: drop and count, or stop at the first

    home = "data_prep.text_kind"

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
        for each in spec["filters"].values():
            drop_defaults(each, FilterConfig(), "timeout_seconds")
        return spec


# kind -> the keys of SourceConfig that it reads
FIELDS: dict[str, tuple[str, ...]] = {
    "python_stdlib": ("fixed_fields",),
    "text": ("path", "glob", "strip", "encoding", "fixed_fields"),
    "jsonl": ("path", "glob", "strip", "text_field", "words_field", "encoding", "fields", "fixed_fields"),
    "parquet": ("path", "glob", "strip", "text_field", "words_field", "fields", "fixed_fields"),
    "csv": ("path", "glob", "strip", "text_field", "words_field", "delimiter", "encoding", "fields", "fixed_fields"),
    "tsv": ("path", "glob", "strip", "text_field", "words_field", "encoding", "fields", "fixed_fields"),
    "mds": ("path", "glob", "strip", "text_field", "fields", "fixed_fields"),
    "fasta": ("path", "glob", "part_letters", "fixed_fields"),
    "hub": ("path", "strip", "subset", "split", "text_field", "words_field", "fields", "fixed_fields"),
}

_KEYS = tuple(dict.fromkeys(key for keys in FIELDS.values() for key in keys))

# kind -> patterns of files in a folder if `glob` is not given
GLOBS: dict[str, tuple[str, ...]] = {
    "text": ("**/*.txt",),
    "jsonl": ("**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst"),
    "parquet": ("**/*.parquet",),
    "csv": ("**/*.csv", "**/*.csv.gz"),
    "tsv": ("**/*.tsv", "**/*.tsv.gz"),
    "fasta": tuple(f"**/*.{name}{packed}" for name in ("fasta", "fa", "faa", "fna") for packed in ("", ".gz")),
    "mds": ("**/*.mds", *(f"**/*.mds.{end}" for end in ("zstd", "gz", "br", "bz2", "snappy"))),
}


# arguments of datatrove's executors that `prepare` sets
_OURS = ("pipeline", "tasks", "workers", "depends", "logging_dir", "skip_completed")


def drop_defaults(spec: dict[str, Any], usual: object, *keys: str) -> None:
    """Remove the keys of a section that have their default values."""
    for key in keys:
        if key in spec and spec[key] == getattr(usual, key):
            del spec[key]


def is_of_pairs(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> bool:
    """Return True if a spec is of pairs; mistakes in it are reported by `load_typed`."""
    trees = [read_yaml(Path(file), {}, []) for file in files]
    trees += [read_override(override, {}, []) for override in overrides]
    return any("pairs" in tree for tree in trees)


def prepare_problems(config: PrepareConfig) -> list[str]:
    """Find mistakes across keys: sources that lack or ignore a key, numbers out of range.

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
    return "another spelling of utf-8. Set it to utf-8." if name == "utf-8" else None


def _field_problems(config: PrepareConfig) -> Iterator[str]:
    for name, source in config.decontaminate.items():
        if source.max_left_out is not None:
            yield f"decontaminate.{name}.max_left_out: an evaluation set must be whole. Remove it."
        if source.fields or source.fixed_fields:
            yield f"decontaminate.{name}: fields of an evaluation set are not counted. Remove fields and fixed_fields."
    for name, source in config.sources.items():
        for both in sorted(source.fields.keys() & source.fixed_fields.keys()):
            yield f"sources.{name}.fixed_fields.{both}: is also among its fields. Remove one of the two."
        for key, empty in [*source.fields.items(), *source.fixed_fields.items()]:
            if not empty:
                yield f"sources.{name}: field {key} is empty. Name its column, or its value under fixed_fields."
    names = field_names(config)
    if len(names) > MAX_FIELDS:
        yield f"sources: {len(names)} fields, at most {MAX_FIELDS} are counted. Remove some."
    yield from _stream_problems(config.streams, names)


def _word_problems(config: PrepareConfig) -> Iterator[str]:
    for name, source in config.decontaminate.items():
        if source.words_field is not None:
            yield f"decontaminate.{name}.words_field: an evaluation set is only compared. Remove it."
    if not has_words(config):
        return
    for name, source in config.sources.items():
        if source.strip == "html" and source.words_field is not None:
            yield f"sources.{name}.strip=html: the words of {source.words_field} would not spell its text. Remove it."
        if source.words_field is None:
            yield (
                f"sources.{name}.words_field: missing, and other sources have one. Name it too, or prepare this source "
                "as a separate dataset."
            )
    for name, each in config.filters.items():
        if each.filter in ALTERING_FILTERS:
            yield (
                f"filters.{name}.filter={each.filter}: removes lines of a text, whose words would remain. Remove it, "
                "or clean the texts before they are segmented."
            )


def has_words(config: PrepareConfig) -> bool:
    """Return True if a segmenter's words are stored with the tokens."""
    return any(source.words_field is not None for source in config.sources.values())


def _stream_problems(streams: StreamsConfig, names: list[str]) -> Iterator[str]:
    named = [*streams.values, *streams.scores]
    if streams.field is None:
        if named:
            yield f"streams.field: missing, and there are streams {', '.join(named)}. Name one of the fields."
        return
    if streams.field not in names:
        choices = ", ".join(names) or "none; add sources.NAME.fields"
        yield f"streams.field={streams.field}: not among the fields of the sources ({choices}). Correct it."
    if bool(streams.values) == bool(streams.scores):
        yield "streams: needs either values or scores, see docs/data.md. Give one of the two."
    for name in named:
        if not _STREAM.fullmatch(name) or name == REST:
            yield f"streams: {name!r} cannot be a stream's name. Use at most 40 letters, digits, _ and -; not {REST}."
    if len(named) > MAX_STREAMS:
        yield f"streams: {len(named)} of them, at most {MAX_STREAMS}. Merge values."
    owners: dict[str, str] = {}
    for name, values in streams.values.items():
        if not values:
            yield f"streams.values.{name}: empty. Name the values of {streams.field} that belong to it."
        for value in values:
            if owners.setdefault(value, name) != name:
                yield f"streams.values.{name}: {value!r} already belongs to {owners[value]}. Remove one of the two."
    for name, lowest in streams.scores.items():
        if not isfinite(lowest):
            yield f"streams.scores.{name}={lowest}: must be a number; lower scores go to {REST}."
    if len(set(streams.scores.values())) < len(streams.scores):
        yield "streams.scores: two streams begin at the same score. Change one."


def field_names(config: PrepareConfig) -> list[str]:
    """Return the fields of any source, in the order of their names."""
    names: set[str] = set()
    for source in config.sources.values():  # called for each document
        if source.fields or source.fixed_fields:
            names.update(source.fields, source.fixed_fields)
    return sorted(names)


def _filter_problems(config: PrepareConfig) -> Iterator[str]:
    for name, each in config.filters.items():
        if each.filter == LANGUAGE_FILTER and each.model is None:
            yield (
                f"filters.{name}.model: missing. {LANGUAGE_FILTER} needs a fastText model for language "
                "identification. Download lid.176.bin where there is a network, and name the file here."
            )
        if each.filter != LANGUAGE_FILTER and each.model is not None:
            yield f"filters.{name}.model={each.model}: {each.filter} does not read it. Remove it."
        if "exclusion_writer" in each.arguments:
            yield f"filters.{name}.arguments.exclusion_writer: not supported; dropped documents are counted. Remove it."
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
        yield f"tokenizer.spare_entries={spare}: a given tokenizer is not changed. Set tokenizer.extend=true."


def _number_problems(config: PrepareConfig) -> Iterator[str]:
    yield from bound_mistakes(config)
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
