"""Make shards of other programs trainable without changing them: adopt FOLDER_OR_URL --tokenizer DIR

The ids in MDS shards of any layout stay in place: one pass computes lengths and counts, verifies or computes hashes,
and recognises special tokens. A card is written into the folder of the shards, or into --out if that is read-only.
After a kill the same command resumes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data_prep.program import finish
from modernbert_train.cli.parser import Parser, positive


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (see modernbert_train/errors.py)."""
    parsed = make_parser().parse_args(arguments)
    return finish(lambda: adopt(**vars(parsed)))


def make_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(prog="modernbert-train adopt", description="Make shards of other programs trainable, unchanged.")
    parser.add_argument("source", metavar="FOLDER_OR_URL", help="MDS shards of token ids")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="folder of the tokenizer that made the ids")
    parser.add_argument("--out", metavar="FOLDER", help="folder of the card; default: the shards' folder")
    parser.add_argument("--column", help="column of the ids; default: input_ids, or tokens")
    parser.add_argument("--dtype", help="type of ids stored as raw bytes, such as int64")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes; default: one per core")
    parser.add_argument("--overwrite", action="store_true", help="replace an adoption with other arguments")
    parser.add_argument("--anyway", action="store_true", help="accept ids that do not look like this tokenizer's")
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
    """Make a dataset of ids trainable, or find that it already is.

    With more than one worker, a script must call this under `if __name__ == "__main__"`, because the worker processes
    import it.

    Args:
        source: folder or URL of MDS shards.
        tokenizer: folder of the tokenizer that made the ids.
        out: folder of the card; None: the shards' folder.
        column: column of the ids.
        dtype: numpy name of their type, for raw bytes.
        workers: number of processes.
        overwrite: replace a card that was made with other arguments.
        anyway: accept ids that do not look like the tokenizer's.

    Returns:
        A description of the dataset for the user.

    Raises:
        ConfigError: an argument is wrong or missing, or a folder holds something else.
        DataError: shards are missing, damaged, or of another tokenizer.
        StorageError: a disk or a store fails.
    """
    from data_prep.adoption.sidecar import Request, adopt_shards
    from data_prep.adoption.tokenizer_fit import require_usable

    require_usable(tokenizer)
    return adopt_shards(Request(source, tokenizer, out, column, dtype, workers, overwrite, anyway))


if __name__ == "__main__":
    sys.exit(main())
