"""Survey text before it is prepared: find the files that hold text, and read a bounded sample.

At most SAMPLE_BYTES are kept and about four times as many read, however large the text is: files are chosen evenly from
the sorted list, and blocks from several places of a large JSONL file. `pretrain` writes its data spec from this.
"""

from __future__ import annotations

import math
import random
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from data_prep.make_tokenizer import adapt_tokenizer, encode_documents, train_tokenizer
from data_prep.packed_text import text_in_packed
from data_prep.read.documents import Document, columns_of, read_span, take_text
from data_prep.read.html import MARKUP
from modernbert_train.config.tools.prepare import FIELDS, GLOBS, PrepareConfig, SourceConfig
from modernbert_train.core.files import PACKED, ending
from modernbert_train.core.own_files import special_kind
from modernbert_train.data.read.encodings import AUTO, guess
from modernbert_train.data.read.find_files import TABLES, file_state, files_below, name_end, source_files
from modernbert_train.data.read.jsonl import can_be_cut, sample_lines
from modernbert_train.data.read.parquet import parquet_columns, parquet_groups
from modernbert_train.data.read.rows import TEXT, Columns, LeftOut, Row, Span
from modernbert_train.data.read.sources import read_rows
from modernbert_train.data.read.unpacked import open_unpacked
from modernbert_train.errors import DataError

SAMPLE_BYTES = 4 << 20
_TOKENISED = 1 << 20  # characters of the sample for trying a tokenizer
MIN_BYTES = 30_000  # minimum text: of less, a held-out part would be too small to measure
_DOCUMENT_BYTES = 1 << 18  # maximum kept of one document
_BLOCK_BYTES = 1 << 18  # of a JSONL file, read in one place
_MOST_FILES = 400  # sampled per source
_SHOWN = 4  # kinds of files that a message lists
_PLAIN_END = re.compile(r"[.\w+~-]+")  # has no special characters of a glob
_SNIFFED = 5  # files per ending that are checked for text
_MEASURED = 32  # compressed files per source whose text is measured
_SNIFF_BYTES = 1 << 16
_SCRIPT_CHARACTERS = 1_000_000
_TEXT_FIELDS = (TEXT, "content", "body", "document", "article", "passage", "sentence")
TOO_LONG = 4 * PrepareConfig.max_characters  # bytes of a text file that `prepare` leaves out unread


@dataclass(frozen=True)
class Endings:
    """Number and size of the files with one ending.

    Attributes:
        files: their number.
        bytes: their total size.
    """

    files: int = 0
    bytes: int = 0

    def plus(self, size: int) -> Endings:
        return Endings(self.files + 1, self.bytes + size)


class TokenFacts(NamedTuple):
    """Figures of a tokenizer on text.

    Attributes:
        bytes_per_token: of text.
        unigram_loss: nats a token, under the frequencies of the other text.
        entries: of the tokenizer; a small sample gives fewer than requested.
        text_bytes: of the sample that the tokenizer was trained on.
        bytes_per_second: speed of tokenising on one core.
    """

    bytes_per_token: float
    unigram_loss: float
    entries: int
    text_bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class TextSample:
    """The text that was found.

    Attributes:
        sources: for a data spec, by name.
        taken: files of the sources by the end of their names.
        passed_over: other files: binaries, hidden and special files.
        too_long: text files longer than the limit of a document, by the end of their names.
        text_bytes: of all text, estimated.
        documents: number of all documents, estimated.
        texts: the sample.
        sampled: number of documents read for it.
        damaged: number of damaged ones, by reason.
        duplicates: share of the sampled documents that equal an earlier one.
        lengths: bytes of each sampled document, ascending.
        scripts: share of the letters of the sample by script, the commonest first.
    """

    sources: Mapping[str, SourceConfig]
    taken: Mapping[str, Endings]
    passed_over: Mapping[str, Endings]
    too_long: Mapping[str, Endings]
    text_bytes: float
    documents: float
    texts: Sequence[str]
    sampled: int
    damaged: Mapping[str, int]
    duplicates: float
    lengths: Sequence[int]
    scripts: Mapping[str, float]

    @property
    def damaged_share(self) -> float:
        """Share of the sampled documents that are damaged."""
        return sum(self.damaged.values()) / max(1, self.sampled)

    def length(self, share: float) -> int:
        """Return the length in bytes that this share of the sampled documents does not exceed; 0 without documents."""
        return self.lengths[min(len(self.lengths) - 1, int(share * len(self.lengths)))] if self.lengths else 0


@dataclass(frozen=True)
class _Files:
    """Files of one source."""

    config: SourceConfig
    files: Sequence[tuple[Path, int]]

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.files)

    @property
    def too_long(self) -> list[tuple[Path, int]]:
        """Text files longer than the limit of a document."""
        if self.config.kind != "text":
            return []
        return [(file, size) for file, size in self.files if size > TOO_LONG and file.suffix not in PACKED]


@dataclass(frozen=True)
class _Part:
    """A sample of one source.

    Attributes:
        documents: the readable ones.
        left_out: the damaged ones.
        text_bytes: of all its text, estimated.
    """

    documents: Sequence[Document]
    left_out: Sequence[LeftOut]
    text_bytes: float


def look_at_text(paths: Sequence[str]) -> TextSample:
    """Find the text of files and folders, and sample it.

    Raises:
        DataError: a path is missing or cannot be read; there is no text, too little of it, or most of it is in files
            too long for one document; names what was found.
    """
    passed_over: dict[str, Endings] = {}
    sources: dict[str, _Files] = {}
    for path in paths:
        for name, each in _sources_of(Path(path), passed_over).items():
            sources[_free_name(name, sources)] = each
    every = sum(each.bytes for each in sources.values())
    samples = {name: _sample_of(each, int(SAMPLE_BYTES * each.bytes / every)) for name, each in sources.items()}
    long = [each for source in sources.values() for each in source.too_long]
    _refuse_long(long, sum(part.text_bytes for part in samples.values()))
    left_out = [item for part in samples.values() for item in part.left_out]
    for name, part in samples.items():
        if not part.documents:  # such as the .json files of a program among its text
            for file, size in sources.pop(name).files:
                _count(passed_over, file, size)
    sample = _joined(sources, {name: samples[name] for name in sources}, passed_over, _ended(long))
    if sample.text_bytes < MIN_BYTES:
        seen = f"{size_text(sample.text_bytes)} of text in {shown(sample.taken)}" if sources else "no text"
        others = f"; not read: {shown(passed_over)}" if passed_over else ""
        why = f" ({left_out[0].id}: {left_out[0].detail})" if left_out and not sources else ""
        raise DataError(
            f"{', '.join(paths)}: {seen}{others}{why}. A model needs {size_text(MIN_BYTES)} at least, and learns "
            f"little from less than some megabytes. {_READ}"
        )
    return sample


_READ = (
    "Name files or folders of text: plain files such as .txt or .md, one document each, or .jsonl, .parquet and .csv "
    "with a column of text; or FASTA."
)


def _refuse_long(long: Sequence[tuple[Path, int]], text_bytes: float) -> None:
    """Raise DataError if most of the text would be left out as too long for a document."""
    if sum(size for _, size in long) <= text_bytes:
        return
    file, size = max(long, key=lambda each: each[1])
    raise DataError(
        f"{file}: {size_text(size)} in one file of plain text, which is one document, and the limit of a document is "
        f"{size_text(TOO_LONG)}. Split it into documents, one a file or one a line of .jsonl; without such units: "
        f"mkdir parts && split -C 100k --additional-suffix=.txt {file} parts/, then name parts."
    )


def _count(endings: dict[str, Endings], file: Path, size: int) -> None:
    endings[name_end(file)] = endings.get(name_end(file), Endings()).plus(size)


def _ended(files: Sequence[tuple[Path, int]]) -> dict[str, Endings]:
    endings: dict[str, Endings] = {}
    for file, size in files:
        _count(endings, file, size)
    return endings


def shown(endings: Mapping[str, Endings]) -> str:
    """Describe counts of files for the user, the largest kind first."""
    by_size = sorted(endings.items(), key=lambda item: -item[1].bytes)
    texts = [
        f"{each.files:,} {name}" + f" of {size_text(each.bytes)}" * bool(each.bytes) for name, each in by_size[:_SHOWN]
    ]
    return ", ".join(texts + [f"{len(by_size) - _SHOWN} other kinds"] * (len(by_size) > _SHOWN))


def size_text(size: float) -> str:
    """Format bytes with a unit: 1_300_000 -> '1.3 MB'."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"


def _sources_of(path: Path, passed_over: dict[str, Endings]) -> dict[str, _Files]:
    """Return the sources of one path; add other files to `passed_over`."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder. Correct the path; it is relative to {Path.cwd()}.")
    if (special := special_kind(path, False, path.parent)) is not None:
        raise DataError(f"{path}: {special} are not read. {_READ}")
    if path.is_file():
        kind = _kind(path)
        if kind is None and not _is_text([path]):
            _count(passed_over, path, path.stat().st_size)
            return {}
        return {_word(path.stem): _files_of(_config(kind or "text", str(path), None, path))}
    by_ending: dict[str, list[tuple[Path, int]]] = {}
    for file, what in files_below(path, _refuse):
        if what != name_end(file):  # hidden or special
            passed_over[what] = passed_over.get(what, Endings()).plus(0)
        elif (size := file_state(file)[0]) > 0:  # neither empty nor a dangling link
            by_ending.setdefault(what, []).append((file, size))
    sources: dict[str, _Files] = {}
    plain: list[str] = []
    for end, files in sorted(by_ending.items()):
        kind = _kind(files[0][0])
        if kind is not None:
            config = _config(kind, str(path), f"**/*{end}", max(files, key=lambda each: each[1])[0])
            sources[f"{_word(path.name)}_{_word(end)}"] = _files_of(config)
        elif _PLAIN_END.fullmatch(end) and _is_text([file for file, _ in _even(files, _SNIFFED)]):
            plain.append(end)
        else:
            for file, size in files:
                _count(passed_over, file, size)
    if plain:
        names = f"{{{','.join(each[1:] for each in plain)}}}" if len(plain) > 1 else plain[0][1:]
        sources = {_word(path.name): _files_of(_config("text", str(path), f"**/*.{names}", None)), **sources}
    return sources


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: {error.strerror}. Make the folder readable, or name others.") from None


def _files_of(config: SourceConfig) -> _Files:
    """Return the files that `prepare` reads for a source; without empty ones."""
    sizes = [(file, file_state(file)[0]) for file in source_files("mine", config)]
    return _Files(config, [each for each in sizes if each[1] > 0])


def _kind(file: Path) -> str | None:
    """Return the kind of a file by its name; None: text or unknown."""
    end = ending(file)
    if any(file.match(pattern) for pattern in GLOBS["fasta"]):
        return "fasta"
    return None if end in (".tsv", ".mds") else TABLES.get(end)  # ambiguous: a .tsv may use quotes, an .mds hold ids


def _is_text(files: Sequence[Path]) -> bool:
    """Return True if most of these files hold text, by their first bytes. HTML is markup, for which a spec must ask."""
    if ending(files[0]).lower() in MARKUP:
        return False
    good = 0
    for file in files:
        with suppress(OSError, EOFError, ValueError), open_unpacked(file) as content:
            raw = content.read(_SNIFF_BYTES)
            good += bool(raw.strip()) and any(guess(raw[: len(raw) - cut]) for cut in range(min(4, len(raw))))
    return 2 * good > len(files)


def _config(kind: str, path: str, pattern: str | None, example: Path | None) -> SourceConfig:
    config = SourceConfig(kind=kind, path=path, glob=pattern)  # type: ignore[arg-type]
    if "encoding" in FIELDS[kind]:
        config = replace(config, encoding=AUTO)
    column = None if example is None else _text_column(config, example)
    return config if column in (None, TEXT) else replace(config, text_field=column)


def _text_column(config: SourceConfig, file: Path) -> str | None:
    """Return the probable column of the text; None if none has a usual name, so that the reader lists the columns."""
    names: Collection[str] = ()
    with suppress(OSError, ValueError):  # reading will report it
        if config.kind == "parquet":
            names = parquet_columns(file)
        elif config.kind != TEXT:
            items = read_rows(Span("", str(file)), config, Columns(()), PrepareConfig.max_characters)
            names = next((item.fields.keys() for item in items if isinstance(item, Row)), ())
    return next((name for name in _TEXT_FIELDS if name in names), None)


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "text"


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _even(files: Sequence[tuple[Path, int]], max_files: int) -> list[tuple[Path, int]]:
    """Return at most `max_files` of the files, evenly spread."""
    if len(files) <= max_files:
        return list(files)
    return [files[int((number + 0.5) * len(files) / max_files)] for number in range(max_files)]


def _sample_of(source: _Files, budget: int) -> _Part:
    """Read documents of a source until they have `budget` bytes of text, from files evenly spread.

    The files are read in a random order, the same in every call, so those beyond the budget are a random choice.
    """
    documents: list[Document] = []
    left_out: list[LeftOut] = []
    chosen = _even(source.files, _MOST_FILES)
    random.Random(0).shuffle(chosen)
    bytes_left, read, text = max(_BLOCK_BYTES, budget), 0, 0
    for number, (file, size) in enumerate(chosen):
        if bytes_left <= 0:
            break
        items, seen = _of_file(file, size, source.config, max(1 << 12, bytes_left // (len(chosen) - number)))
        kept = [item for item in items if isinstance(item, Document) and item.text.strip()]
        documents += kept
        left_out += [item for item in items if isinstance(item, LeftOut)]
        sizes = [_bytes(item) for item in kept]
        read, text = read + seen, text + sum(sizes)
        bytes_left -= sum(min(size, _DOCUMENT_BYTES) for size in sizes)
    packed = [(file, size) for file, size in source.files if file.suffix in PACKED]
    ratio = text_in_packed([file for file, _ in _even(packed, _MEASURED)], source.config)
    unpacked: float = sum(size * (ratio if file.suffix in PACKED else 1) for file, size in source.files)
    if source.config.kind == "parquet":
        unpacked *= sum(sum(parquet_groups(file)) for file, _ in chosen) / max(1, sum(size for _, size in chosen))
    return _Part(documents, left_out, unpacked * min(1.0, text / max(1, read)))


def _joined(
    sources: Mapping[str, _Files],
    samples: Mapping[str, _Part],
    passed_over: Mapping[str, Endings],
    too_long: Mapping[str, Endings],
) -> TextSample:
    documents = [each for part in samples.values() for each in part.documents]
    texts = [each.text[:_DOCUMENT_BYTES] for each in documents]
    damaged = Counter(item.reason for part in samples.values() for item in part.left_out)
    number = sum(
        part.text_bytes * len(part.documents) / max(1, sum(map(_bytes, part.documents))) for part in samples.values()
    )
    return TextSample(
        sources={name: each.config for name, each in sources.items()},
        taken=_ended([file for each in sources.values() for file in each.files]),
        passed_over=passed_over,
        too_long=too_long,
        text_bytes=sum(part.text_bytes for part in samples.values()),
        documents=number,
        texts=texts,
        sampled=len(documents) + damaged.total(),
        damaged=dict(damaged.most_common()),
        duplicates=1 - len(set(texts)) / max(1, len(texts)),
        lengths=sorted(map(_bytes, documents)),
        scripts=scripts_of(texts),
    )


def _bytes(document: Document) -> int:
    return len(document.text.encode("utf-8", "replace"))


def _of_file(file: Path, size: int, source: SourceConfig, budget: int) -> tuple[list[Document | LeftOut], int]:
    """Return items of a file until the budget is spent, and the bytes read of it, unpacked."""
    if source.kind == "jsonl" and can_be_cut(file, source.encoding):
        blocks = max(1, min(16, budget // _BLOCK_BYTES)) if size > 2 * _BLOCK_BYTES else 1
        length = min(size, _BLOCK_BYTES)
        begins = [number * (size - length) // max(1, blocks - 1) for number in range(blocks)]
        samples = [sample_lines(file, begin, length, source, columns_of(source)) for begin in begins]
        every = [take_text(item, source) if isinstance(item, Row) else item for items, _ in samples for item in items]
        return every, sum(read for _, read in samples)
    items: list[Document | LeftOut] = []
    seen = 0
    for item in read_span(Span("sample", str(file), size=size), source, PrepareConfig.max_characters):
        items.append(item)
        seen += _bytes(item) if isinstance(item, Document) else 0
        if seen >= budget:
            break
    return items, seen or size


def token_facts(texts: Sequence[str], entries: int, tokenizer_path: str | None = None) -> TokenFacts:
    """Train a tokenizer on the first nine tenths of each text, and measure it on the rest.

    Args:
        texts: a sample.
        entries: size of the vocabulary; a small sample gives fewer.
        tokenizer_path: file or folder of a tokenizer to measure instead of training one.

    Raises:
        DataError: the given tokenizer cannot be read or used.
    """
    step = max(1, -(-sum(map(len, texts)) // _TOKENISED))
    texts = texts[::step]
    cuts = [max(1, len(text) * 9 // 10) for text in texts]
    seen = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    held_out = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    tokenizer = (
        train_tokenizer(iter(seen), entries) if tokenizer_path is None else adapt_tokenizer(tokenizer_path, extend=True)
    )
    began = time.process_time()
    encoded = encode_documents(tokenizer, seen)
    seconds = max(1e-9, time.process_time() - began)  # of all threads
    frequencies = Counter(id for ids in encoded for id in ids)
    counts = Counter(id for ids in encode_documents(tokenizer, held_out) for id in ids)
    total = frequencies.total() + tokenizer.get_vocab_size()  # each id counts once more than it occurs
    loss = sum(n * math.log(total / (frequencies[id] + 1)) for id, n in counts.items()) / max(1, counts.total())
    size = sum(len(text.encode("utf-8", "replace")) for text in held_out)
    read = sum(len(text.encode("utf-8", "replace")) for text in seen)
    return TokenFacts(size / max(1, counts.total()), loss, tokenizer.get_vocab_size(), read, read / seconds)


def scripts_of(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of the letters by script, by Unicode's names: {'Latin': 0.97, 'Cyrillic': 0.03}."""
    counts: Counter[str] = Counter()
    each = max(1000, _SCRIPT_CHARACTERS // max(1, len(texts)))
    for text in texts:
        counts.update(text[:each])
    scripts: Counter[str] = Counter()
    for char, count in counts.items():
        if char.isalpha():
            word = unicodedata.name(char, "OTHER").split()[0].split("-")[0]
            scripts[_SCRIPTS.get(word, word.capitalize())] += count
    return {name: count / scripts.total() for name, count in scripts.most_common()}


_SCRIPTS = {"CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}
