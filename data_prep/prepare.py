"""Text on disk to tokenised MDS shards: python data_prep/prepare.py spec.yaml [a.b=c ...] [--overwrite]

The sources are read twice. The first reading counts, finds every damaged document and trains the tokenizer, so that
hours of tokenising cannot end in a surprise; the second tokenises and writes. No text is kept in between: memory
holds a batch of documents, a shard, and the hash of each document (some 100 bytes), whatever the size of the corpus.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run as a script: sys.path begins with this folder, the packages lie one above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tokenizers import Tokenizer
from tqdm import tqdm

from data_prep.documents import TRAIN, VALIDATION, Kept, Tally, kept_documents, no_tokens, require_documents
from data_prep.report import describe, fingerprint, is_finished, write_report
from data_prep.tokenizer import (
    adapt_tokenizer,
    encode_documents,
    num_entries,
    require_size,
    require_unspoken,
    save_tokenizer,
    train_tokenizer,
)
from data_prep.workspace import require_space, workspace
from modernbert_train.config.load import load_typed
from modernbert_train.config.prepare import PrepareConfig, prepare_problems
from modernbert_train.errors import ConfigError, DataError, RunError

_BATCH_BYTES = 1 << 20  # text tokenised at once: enough for every core, and about 130 MB of memory
_DISK_BYTES_PER_TEXT_BYTE = 0.5  # from above: the quickstart takes 0.21, 0.53 before compression
_DISK_BYTES = 1 << 24  # and beside the shards: tokenizer, lengths, counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see modernbert_train/errors.py)."""
    parser = argparse.ArgumentParser(prog="prepare.py", description="Text on disk to tokenised MDS shards.")
    parser.add_argument("spec", nargs="+", help="YAML files and a.b=c overrides; later ones win")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset of another spec in `out`")
    parsed = parser.parse_args(arguments)
    files = [word for word in parsed.spec if "=" not in word]
    overrides = [word for word in parsed.spec if "=" in word]
    try:
        print(prepare(load_typed(PrepareConfig, files, overrides), parsed.overwrite))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def prepare(config: PrepareConfig, overwrite: bool = False) -> str:
    """Make the dataset that a spec asks for, or find that it is there already.

    Args:
        config: the spec.
        overwrite: replace a dataset that another spec made; never anything that is not a dataset.

    Returns:
        What was made or found, for a person to read.

    Raises:
        ConfigError: the spec is wrong, or `out` holds something else.
        DataError: the text or the given tokenizer is missing, damaged or too small.
        StorageError: the disk is too small or fails, or another process is writing `out`.
    """
    if problems := prepare_problems(config):
        raise ConfigError("\n".join(problems))
    out = Path(config.out)
    asked = fingerprint(config)
    if is_finished(out, asked, overwrite):
        return f"already complete, made from the same spec and files; --overwrite makes it again\n{describe(out)}"
    with workspace(out) as folder:
        started = time.monotonic()
        tokenizer, survey = _survey(config, asked["inputs"]["bytes"])
        surveyed = time.monotonic()
        require_space(out, int(survey.bytes * _DISK_BYTES_PER_TEXT_BYTE) + _DISK_BYTES)
        tally = _write(config, tokenizer, survey, folder)
        seconds = {"read_and_train": surveyed - started, "tokenise_and_write": time.monotonic() - surveyed}
        write_report(folder, asked, tally, seconds)
    return describe(out)


def _survey(config: PrepareConfig, input_bytes: int) -> tuple[Tokenizer, Tally]:
    """First reading: count every document, and train a tokenizer on the training documents if none is given."""
    tally = Tally()
    settings = config.tokenizer

    def training_texts() -> Iterator[str]:
        with _bar("reading", input_bytes) as bar:
            for kept in kept_documents(config, tally):
                bar.update(kept.bytes)
                if kept.split == TRAIN and kept.draw < settings.training_share:
                    yield kept.text
        require_documents(config, tally)
        if settings.path is None:
            print(f"training a tokenizer of {settings.vocab_size:,} entries", file=sys.stderr)

    if settings.path is None:
        tokenizer = train_tokenizer(training_texts(), settings.vocab_size)
        require_size(tokenizer, settings.vocab_size)
    else:
        tokenizer = adapt_tokenizer(settings.path)
        for _ in training_texts():
            pass
    return tokenizer, tally


def _write(config: PrepareConfig, tokenizer: Tokenizer, survey: Tally, folder: Path) -> Tally:
    """Second reading: the tokenizer's folder and one folder of shards per split."""
    from data_prep.shards import ShardWriter  # imports streaming and torch, which takes seconds

    sha256, entries = save_tokenizer(tokenizer, folder / "tokenizer"), num_entries(tokenizer)
    writers = {
        split: ShardWriter(folder / split, entries, sha256, config.shard_bytes)
        for split in (TRAIN, VALIDATION)
        if survey.kept[split]
    }
    tally = Tally()
    documents = tokens = 0
    with _bar("tokenising", survey.bytes) as bar:
        for batch in _batches(kept_documents(config, tally)):
            for kept, ids in zip(batch, encode_documents(tokenizer, [kept.text for kept in batch]), strict=True):
                if ids:
                    writers[kept.split].write(ids)
                else:
                    no_tokens(config, tally, kept)
                documents, tokens = documents + bool(ids), tokens + len(ids)
            bar.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens", refresh=False)
            bar.update(sum(kept.bytes for kept in batch))
    if (tally.read, tally.bytes) != (survey.read, survey.bytes):
        raise DataError(
            f"{', '.join(config.sources)}: {survey.read} documents of {survey.bytes} bytes at the first reading, "
            f"{tally.read} of {tally.bytes} at the second. Something writes to the sources; let it end and start again."
        )
    require_documents(config, tally)
    for writer in writers.values():
        writer.finish()
        require_unspoken(tokenizer, writer.token_counts)
    return tally


def _batches(documents: Iterator[Kept]) -> Iterator[list[Kept]]:
    batch: list[Kept] = []
    size = 0
    for kept in documents:
        batch.append(kept)
        size += kept.bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _bar(name: str, total: int) -> tqdm[None]:
    """Progress on stderr in bytes of text; on a terminal every second, in a log file every ten."""
    interval = 1.0 if sys.stderr.isatty() else 10.0
    return tqdm(desc=name, total=total or None, unit="B", unit_scale=True, mininterval=interval)


if __name__ == "__main__":
    sys.exit(main())
