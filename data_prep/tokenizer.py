"""Make a tokenizer that several specs may name, or count the tokens of texts.

tokenizer train OUT FILE_OR_FOLDER... --entries 50368 --spare 83 --superbpe 0.8
tokenizer train OUT FILE_OR_FOLDER... --entries 8192 --uncased
tokenizer letters OUT --alphabet dna --kmer 6
tokenizer adapt OUT TOKENIZER --extend
tokenizer trim OUT TOKENIZER FILE_OR_FOLDER... --entries 16384
tokenizer fertility TOKENIZER FILE_OR_FOLDER... --parallel
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.clean.clean_documents import Kept, Tally, examine
from data_prep.clean.damage import damaged_sources
from data_prep.clean.filters import make_screen
from data_prep.fertility import Spelled, as_json, fertility, fertility_table
from data_prep.letters import ALPHABETS, letter_tokenizer
from data_prep.make_tokenizer import (
    adapt_tokenizer,
    num_entries,
    require_size,
    roles_of_adapted,
    save_tokenizer,
    train_tokenizer,
)
from data_prep.program import finish
from data_prep.read.documents import Document, read_source
from data_prep.superbpe import train_superbpe
from data_prep.trim_tokenizer import trim_tokenizer
from data_prep.write.workspace import workspace
from modernbert_train.cli.parser import Parser
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig, TokenizerConfig, prepare_problems
from modernbert_train.core.installed import require
from modernbert_train.data.read.encodings import UTF_8
from modernbert_train.errors import ConfigError, DataError, in_words_of
from modernbert_train.vocabulary import CONVENTION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see modernbert_train/errors.py)."""
    parsed = make_parser().parse_args(arguments)
    return finish(lambda: _run(parsed))


def _run(parsed: argparse.Namespace) -> str:
    with in_words_of(_AS_TYPED):
        return _fertility(parsed) if parsed.command == "fertility" else _make_folder(parsed)


_AS_TYPED = (  # keys of a spec in errors of `prepare` -> words of this command line
    (r"set tokenizer\.path=null to train one", "train one with `tokenizer train`"),
    (r"[Ss]et tokenizer\.extend=true", "Add --extend"),
    (r"tokenizer\.vocab_size\b", "--entries"),
    (r"tokenizer\.spare_entries\b", "--spare"),
    (r"(data\.tokenizer|tokenizer\.path)\b", "TOKENIZER"),
    (r"sources\.\S*?\.text_field\b", "--text-field"),
    (r"sources\.\S*?\.(kind|encoding|strip)\b", r"--\1"),
    (r"(set )?sources\.\S*?\.glob\b to a pattern", "name a pattern"),
    (r"sources\.\S*?\.path\b", "TEXT"),
    (r"more than max_left_out=", "more than "),
    (r"Raise max_characters, if that is one document", "Divide it, one document a file or a line of .jsonl"),
)


def make_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog="modernbert-train tokenizer",
        description="Train a tokenizer, make one of letters, adapt an existing one, trim its vocabulary, or count its "
        "tokens in texts.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="a byte-level BPE trained on text, as the paper's")
    train.add_argument("out", help="folder to be made")
    with_texts(train)
    train.add_argument("--entries", type=int, default=50_368, help="in all, a multiple of 64 (50368)")
    train.add_argument("--spare", type=int, default=83, help="of these [unused0], ... that no text contains (83)")
    share = "share of the entries, such as 0.8, from which merges may cross white space (1: none do)"
    merges = train.add_mutually_exclusive_group()
    merges.add_argument("--superbpe", type=float, default=1.0, metavar="SHARE", help=share)
    uncased = "lower case, and the same tokens for a word after a space, a bracket or an underscore; for retrieval"
    merges.add_argument("--uncased", action="store_true", help=uncased)
    letters = commands.add_parser("letters", help="a token for each letter of proteins or DNA, or for each k letters")
    letters.add_argument("out", help="folder to be made")
    letters.add_argument("--alphabet", required=True, help=f"{', '.join(ALPHABETS)}, or the letters themselves")
    letters.add_argument("--kmer", type=int, default=1, metavar="K", help="letters of a token, without overlap (1)")
    adapt = commands.add_parser("adapt", help="an existing tokenizer.json, adapted to masked-language modelling")
    adapt.add_argument("out", help="folder to be made")
    adapt.add_argument("tokenizer", help="tokenizer.json, or its folder")
    adapt.add_argument("--extend", action="store_true", help="add missing special tokens, fill to a multiple of 64")
    adapt.add_argument("--spare", type=int, default=0, help="with --extend: minimum number of [unused0], ...")
    trim = commands.add_parser("trim", help="the tokens of an existing tokenizer that a text uses most")
    trim.add_argument("out", help="folder to be made")
    trim.add_argument("tokenizer", help="folder of a tokenizer that `train` or `adapt` made, or of a run's data")
    with_texts(trim)
    trim.add_argument("--entries", type=int, required=True, help="in all; multiples of 64 are faster")
    count = commands.add_parser("fertility", help="tokens a word, a character and a byte of texts, each a row")
    count.add_argument("tokenizer", help="tokenizer.json, or its folder")
    with_texts(count)
    count.add_argument("--beside", nargs="+", default=[], metavar="TOKENIZER", help="others, on the same texts")
    count.add_argument("--parallel", action="store_true", help="the texts translate the first: show parity too")
    count.add_argument("--json", action="store_true", help="print JSON, one object for each text by name")
    return parser


def with_texts(command: argparse.ArgumentParser) -> None:
    """Add the arguments for texts, and for their place in a file."""
    command.add_argument("text", nargs="+", help="files, folders or patterns")
    kinds = ("text", "jsonl", "parquet", "csv", "tsv", "fasta")
    command.add_argument("--kind", default="text", choices=kinds, help="of the files")
    command.add_argument("--text-field", help="key or column with the text")
    command.add_argument("--encoding", default=UTF_8, help="of text that is not UTF-8: auto guesses it")
    command.add_argument("--strip", choices=("html", "nothing"), help="of pages: html takes the text between the tags")


def _sources(parsed: argparse.Namespace) -> dict[str, SourceConfig]:
    """Return a source for each text of a command line."""
    own = {key: getattr(parsed, key) for key in ("kind", "text_field", "encoding", "strip")}
    if parsed.strip == "html":
        require("html", "inscriptis", key="--strip=html")
    return {f"text{i}": SourceConfig(**own, path=path) for i, path in enumerate(parsed.text)}


def _make_folder(parsed: argparse.Namespace) -> str:
    out = Path(parsed.out)
    if out.exists():
        raise ConfigError(f"{out}: exists already. Give another folder, or remove it.")
    settings: dict[str, Any] = {}
    sources = {"none": SourceConfig(kind="python_stdlib")}
    if parsed.command in ("train", "trim"):
        sources = _sources(parsed)
    if parsed.command == "train":
        settings = {"spare_entries": parsed.spare, "vocab_size": parsed.entries}
    elif parsed.command == "adapt":
        settings = {"spare_entries": parsed.spare, "path": parsed.tokenizer, "extend": parsed.extend}
    elif parsed.command == "trim":
        settings = {"path": parsed.tokenizer}
    config = PrepareConfig(out=parsed.out, sources=sources, tokenizer=TokenizerConfig(**settings))
    if problems := prepare_problems(config):
        raise ConfigError("\n".join(problems))
    note, roles = "", dict(CONVENTION)
    if parsed.command in ("adapt", "trim"):
        roles = roles_of_adapted(parsed.tokenizer)
    with workspace(out) as folder:  # a place that cannot be written is found before hours of training
        if parsed.command == "train":
            if parsed.uncased:
                tokenizer = train_tokenizer(texts_of(config), parsed.entries, parsed.spare, uncased=True)
            else:
                tokenizer = train_superbpe(lambda: texts_of(config), parsed.entries, parsed.spare, parsed.superbpe)
            require_size(tokenizer, parsed.entries)
        elif parsed.command == "trim":
            adapted = adapt_tokenizer(parsed.tokenizer)
            tokenizer, stays = trim_tokenizer(adapted, texts_of(config), parsed.entries, roles)
            note = f", which are {stays:.1%} of the tokens of the text as it was"
        elif parsed.command == "letters":
            tokenizer, roles = letter_tokenizer(parsed.alphabet, parsed.kmer)
        else:
            tokenizer = adapt_tokenizer(parsed.tokenizer, parsed.extend, parsed.spare)
        save_tokenizer(tokenizer, folder, roles)
    return f"{out}: {num_entries(tokenizer)} entries{note}"


def _fertility(parsed: argparse.Namespace) -> str:
    if twice := [each for each in parsed.text if parsed.text.count(each) > 1]:
        raise ConfigError(f"{twice[0]}: this text is named twice. Remove one.")
    configs: dict[str, PrepareConfig] = {}
    for name, source in _sources(parsed).items():
        configs[str(source.path)] = config = PrepareConfig(out="", sources={name: source})
        if problems := prepare_problems(config):
            raise ConfigError("\n".join(problems))
    spelled: dict[str, Spelled] = {}
    for tokenizer in (parsed.tokenizer, *parsed.beside):
        texts = {path: texts_of(config) for path, config in configs.items()}
        each = fertility(tokenizer, texts, parallel=parsed.parallel)
        spelled |= {f"{path} by {tokenizer}" if parsed.beside else path: counts for path, counts in each.items()}
    if parsed.json:
        return json.dumps(as_json(spelled, parsed.parallel), indent=2)
    return fertility_table(spelled, parsed.parallel)


def texts_of(config: PrepareConfig) -> Iterator[str]:
    """Yield the texts; raises DataError after the last one if too many documents were lost."""
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
    for name, lost, advice in damaged_sources(config, tally):
        raise DataError(f"{config.sources[name].path}: {lost} {advice}")
    print(f"{tally.total().dropped.total()} damaged or empty documents left out", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
