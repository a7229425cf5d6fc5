"""A tokenizer of its own, to be named by several specs.

python data_prep/tokenizer.py train OUT FILE_OR_FOLDER... --entries 50368 --spare 83
python data_prep/tokenizer.py adapt OUT TOKENIZER --extend
python data_prep/tokenizer.py trim OUT TOKENIZER FILE_OR_FOLDER... --entries 16384
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: sys.path begins with this folder, the packages lie one above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data_prep.clean.documents import Kept, Tally, examine
from data_prep.clean.filters import make_screen
from data_prep.clean.losses import losses
from data_prep.make_tokenizer import adapt_tokenizer, num_entries, require_size, save_tokenizer, train_tokenizer
from data_prep.program import finish
from data_prep.read.items import Document
from data_prep.read.sources import read_source
from data_prep.trim_tokenizer import trim_tokenizer
from data_prep.write.workspace import workspace
from modernbert_train.cli.parser import Parser
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig, TokenizerConfig, prepare_problems
from modernbert_train.errors import ConfigError, DataError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see modernbert_train/errors.py)."""
    parsed = make_parser().parse_args(arguments)
    return finish(lambda: _make_folder(parsed))


def make_parser() -> Parser:
    """The arguments of the command."""
    parser = Parser(
        prog="modernbert-train tokenizer",
        description="Train a tokenizer, adapt an existing one, or trim its vocabulary.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="a byte-level BPE trained on text, as the paper's")
    train.add_argument("out", help="folder to be made")
    with_texts(train)
    train.add_argument("--entries", type=int, default=50_368, help="all included, a multiple of 64 (50368)")
    train.add_argument("--spare", type=int, default=83, help="of them [unused0], ... that no text gives (83)")
    adapt = commands.add_parser("adapt", help="an existing tokenizer.json, with what masked-language modelling needs")
    adapt.add_argument("out", help="folder to be made")
    adapt.add_argument("tokenizer", help="tokenizer.json, or its folder")
    adapt.add_argument(
        "--extend", action="store_true", help="add special tokens that it lacks, fill to a multiple of 64"
    )
    adapt.add_argument("--spare", type=int, default=0, help="with --extend: add at least so many [unused0], ...")
    trim = commands.add_parser("trim", help="the tokens of an existing tokenizer that a text uses most")
    trim.add_argument("out", help="folder to be made")
    trim.add_argument("tokenizer", help="folder of a tokenizer that `train` or `adapt` made, or of a run's data")
    with_texts(trim)
    trim.add_argument("--entries", type=int, required=True, help="all included; multiples of 64 are faster")
    return parser


def with_texts(command: argparse.ArgumentParser) -> None:
    command.add_argument("text", nargs="+", help="files, folders or patterns")
    how_to_read(command)


def how_to_read(command: argparse.ArgumentParser) -> None:
    """The arguments that say where in a file the texts are."""
    command.add_argument("--kind", default="text", choices=("text", "jsonl", "parquet", "csv"), help="of the files")
    command.add_argument("--text-field", help="key or column that holds the text")


def _make_folder(parsed: argparse.Namespace) -> str:
    out = Path(parsed.out)
    if out.exists():
        raise ConfigError(f"{out}: exists already. Give another folder, or remove it.")
    settings: dict[str, Any] = {}
    sources = {"none": SourceConfig(kind="python_stdlib")}
    if parsed.command != "adapt":
        kind = {"kind": parsed.kind, "text_field": parsed.text_field}
        sources = {f"text{i}": SourceConfig(**kind, path=path) for i, path in enumerate(parsed.text)}
    if parsed.command == "train":
        settings = {"spare_entries": parsed.spare, "vocab_size": parsed.entries}
    elif parsed.command == "adapt":
        settings = {"spare_entries": parsed.spare, "path": parsed.tokenizer, "extend": parsed.extend}
    else:
        settings = {"path": parsed.tokenizer}
    config = PrepareConfig(out=parsed.out, sources=sources, tokenizer=TokenizerConfig(**settings))
    if problems := prepare_problems(config):
        raise ConfigError("\n".join(problems))
    said = ""
    with workspace(out) as folder:  # a place that cannot be written is found before hours of training
        if parsed.command == "train":
            tokenizer = train_tokenizer(texts_of(config), parsed.entries, parsed.spare)
            require_size(tokenizer, parsed.entries)
        elif parsed.command == "trim":
            tokenizer, stays = trim_tokenizer(adapt_tokenizer(parsed.tokenizer), texts_of(config), parsed.entries)
            said = f", which are {stays:.1%} of the tokens of the text as it was"
        else:
            tokenizer = adapt_tokenizer(parsed.tokenizer, parsed.extend, parsed.spare)
        save_tokenizer(tokenizer, folder)
    return f"{out}: {num_entries(tokenizer)} entries{said}"


def texts_of(config: PrepareConfig) -> Iterator[str]:
    """The texts; raises DataError after the last of them if too much was lost on the way."""
    screen, tally = make_screen({}), Tally()
    for name, source in config.sources.items():
        counts = tally.source(name)
        for item in read_source(name, source, config.max_characters):
            counts.read += 1
            kept = examine(item, config, screen) if isinstance(item, Document) else item
            if isinstance(kept, Kept):
                counts.documents[kept.split] += 1
                yield kept.text
            else:
                tally.leave_out(name, kept, config.on_error)
    for name, lost, _ in losses(config, tally):
        raise DataError(f"{config.sources[name].path}: {lost} Correct --kind and --text-field, or the files.")
    print(f"{tally.total().dropped.total()} damaged or empty documents left out", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
