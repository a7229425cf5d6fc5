"""Shards that others wrote, made trainable as they are: adopt FOLDER_OR_URL --tokenizer DIR

Ids in MDS shards of any layout stay where they are: one pass computes lengths and counts, verifies hashes or computes
them, recognises special tokens, and a card is written beside the shards, or into --out where they cannot be written to.
After a kill the same command resumes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data_prep.program import finish
from modernbert_train.cli.parser import Parser, positive


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see modernbert_train/errors.py)."""
    parsed = make_parser().parse_args(arguments)
    return finish(lambda: adopt(**vars(parsed)))


def make_parser() -> Parser:
    """The arguments of the command."""
    parser = Parser(prog="modernbert-train adopt", description="Make shards that others wrote trainable as they are.")
    parser.add_argument("source", metavar="FOLDER_OR_URL", help="MDS shards of token ids")
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
        source: folder or URL of MDS shards.
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
    from data_prep.adoption.beside import Request, adopt_shards
    from data_prep.adoption.tokenizer_fit import require_usable

    require_usable(tokenizer)
    return adopt_shards(Request(source, tokenizer, out, column, dtype, workers, overwrite, anyway))


if __name__ == "__main__":
    sys.exit(main())
