"""Shards that others wrote, made trainable as they are: python data_prep/adopt.py FOLDER_OR_URL --tokenizer DIR

Ids in MDS shards of any layout stay where they are: one pass computes lengths and counts, verifies hashes or computes
them, recognises special tokens, and a card is written beside the shards, or into --out where they cannot be written to.
Parquet and Arrow files of ids are converted to shards of ours. After a kill the same command resumes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a script: sys.path begins with this folder, the packages lie one above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data_prep.program import finish
from modernbert_train.cli.parser import Parser, positive
from modernbert_train.errors import ConfigError

if TYPE_CHECKING:
    from data_prep.adoption.result import Fingerprint

_WORKER_BYTES = 1 << 27  # a process takes seconds to import what it needs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see modernbert_train/errors.py)."""
    parsed = make_parser().parse_args(arguments)
    return finish(lambda: adopt(**vars(parsed)))


def make_parser() -> Parser:
    """The arguments of the command."""
    parser = Parser(prog="modernbert-train adopt", description="Make shards that others wrote trainable as they are.")
    parser.add_argument("source", metavar="FOLDER_OR_URL", help="MDS shards, or Parquet or Arrow files, of token ids")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="folder of the tokenizer that made the ids")
    parser.add_argument("--out", metavar="FOLDER", help="where the card goes; default: beside the shards")
    parser.add_argument("--column", help="that holds the ids; default: input_ids, or tokens")
    parser.add_argument("--dtype", help="type of ids that are stored as raw bytes, such as int64")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes; default: one for each core")
    parser.add_argument("--overwrite", action="store_true", help="adopt anew what was adopted otherwise")
    parser.add_argument("--anyway", action="store_true", help="also where the ids do not look like this tokenizer's")
    return parser


def adopt(
    source: str,
    tokenizer: str,
    out: str | None = None,
    column: str | None = None,
    dtype: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    anyway: bool = False,
) -> str:
    """Make a dataset of ids trainable, or find that it is.

    With more than one worker, a script that calls this must do so under `if __name__ == "__main__"`, because its
    processes import it.

    Args:
        source: folder or URL of MDS shards; or a folder or a file of Parquet or Arrow.
        tokenizer: folder of the tokenizer that made the ids.
        out: folder of the card; None: the source's own.
        column: that holds the ids.
        dtype: numpy name of their type, where they are raw bytes.
        workers: processes.
        overwrite: replace a card of an earlier call that asked for something else.
        anyway: take ids that do not look like the tokenizer's.

    Returns:
        What was made or found, for a person to read.

    Raises:
        ConfigError: an argument is wrong or missing, or a folder holds something else.
        DataError: shards are missing, damaged, or of another tokenizer.
        StorageError: a disk or a store fails.
    """
    from data_prep.adoption.layout import table_files
    from data_prep.adoption.tokenizer_fit import require_usable

    require_usable(tokenizer)
    files = table_files(source)
    if files:
        from data_prep.adoption.convert import convert

        return convert(source, files, tokenizer, out, column, workers, overwrite, anyway)
    return _adopt_shards(source, tokenizer, out, column, dtype, workers, overwrite, anyway)


def _adopt_shards(
    source: str,
    tokenizer: str,
    out: str | None,
    column: str | None,
    dtype: str | None,
    workers: int | None,
    overwrite: bool,
    anyway: bool,
) -> str:
    from data_prep.adoption.beside import WORK, require_free, write_beside
    from data_prep.adoption.layout import find_layout
    from data_prep.adoption.parts import run_parts
    from data_prep.adoption.result import claimed, describe, is_finished
    from data_prep.adoption.survey import Survey, write_parts
    from data_prep.adoption.tokenizer_fit import DOCUMENTS, EachShard, end_tokens, require_fit, spread, take_sample
    from modernbert_train.data.remote import is_remote
    from modernbert_train.data.shard_index import stored
    from modernbert_train.vocabulary import read_vocabulary

    if out is None and is_remote(source):
        raise ConfigError(f"{source}: the card cannot be written there. Give a folder of this machine with --out.")
    layout = find_layout(source, column, dtype)
    folder = Path(source if out is None else out)
    vocabulary = read_vocabulary(tokenizer)
    asked = _fingerprint(layout.root, layout.column, dtype, vocabulary.sha256, layout.entries)
    work = folder / WORK
    if is_finished(folder, asked, overwrite):
        if work.exists():  # killed after the last file
            with claimed(work, asked):
                shutil.rmtree(work)
        return f"already adopted; --overwrite does it again\n{describe(folder)}"
    require_free(folder, own=out is None or folder.resolve() == Path(layout.root))
    names = end_tokens(tokenizer)
    with claimed(work, asked):
        fit = EachShard(tokenizer, names, anyway)
        survey = Survey(work, layout.root, layout.column, dtype, vocabulary.num_entries, frozenset(names), fit)
        chosen = [layout.entries[i] for i in spread(len(layout.entries), DOCUMENTS)]
        firsts = ((f"{layout.root}/{stored(each)['basename']}", survey.first(each)) for each in chosen)
        sample = take_sample([(place, ids) for place, ids in firsts if ids is not None], tokenizer, names)
        require_fit(sample, source, tokenizer, anyway)
        parts = write_parts(work, layout.entries)
        run_parts(survey, parts, work, workers or _num_workers(layout.num_bytes))
        facts = {"tokenizer": tokenizer, "tokenizer_sha256": vocabulary.sha256}
        write_beside(survey, parts, layout, folder, names, asked, sample, facts)
        shutil.rmtree(work, ignore_errors=True)
    return describe(folder)


def _num_workers(num_bytes: int) -> int:
    return min(len(os.sched_getaffinity(0)), 1 + num_bytes // _WORKER_BYTES)


def _fingerprint(
    root: str, column: str, dtype: str | None, tokenizer_sha256: str, entries: list[dict[str, Any]]
) -> Fingerprint:
    """What the outcome depends on; the shards by what their indexes say."""
    from data_prep.adoption.result import digest_of

    return {
        "shards": root,
        "column": column,
        "dtype": dtype,
        "tokenizer": tokenizer_sha256,
        "index": digest_of(entries),
    }


if __name__ == "__main__":
    sys.exit(main())
