"""Every verb of the command line, one row each; help, the documentation's table and tests read it.

A row says where the verb is implemented; nothing of it is imported before it is used. `module:function` is a function
that adds the verb's arguments to a parser and returns the function to call with them. A `module` alone is a separate
program with `make_parser()` and `main(arguments)`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NamedTuple

from modernbert_train.cli.parser import Parser
from modernbert_train.core.text import did_you_mean, table

PROGRAM = "modernbert-train"  # also under python -m, so that every verb's usage shows one name
PREPARE, BEFORE, TRAIN, WATCH = "prepare data", "before training", "train", "watch"
EVALUATE, PUBLISH, FINE_TUNE, DEVELOPER = "evaluate", "publish", "fine-tune", "developer"


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        name: the word on the command line.
        group: its task, a heading of the help page.
        summary: one line.
        home: module of its arguments and its call.
        example: a command line after the program's name.
        takes_run: True if its words may be YAML files and keys of a run.
    """

    name: str
    group: str
    summary: str
    home: str
    example: str
    takes_run: bool = False

    @property
    def is_program(self) -> bool:
        """True if it runs as a separate process."""
        return ":" not in self.home


class Old(NamedTuple):
    """A verb of earlier versions.

    Attributes:
        now: the command line that replaces it; for a refused verb, a sentence.
        words: the words that replace it on an otherwise unchanged command line; empty: the verb is refused.
    """

    now: str
    words: tuple[str, ...] = ()


_CLI = "modernbert_train.cli"
VERBS = (
    Verb("prepare", PREPARE, "text, or pairs of texts, to tokenised shards", "data_prep.prepare",
         "prepare yamls/data/quickstart.yaml"),
    Verb("tokenizer", PREPARE, "train, adapt or trim a tokenizer, or count its tokens in texts", "data_prep.tokenizer",
         "tokenizer train data/tokenizer my/texts --entries 32768"),
    Verb("adopt", PREPARE, "make shards of ids that others wrote trainable as they are", "data_prep.adopt",
         "adopt their/train --tokenizer data/tokenizer --out data/theirs"),
    Verb("init", BEFORE, "print a YAML file to start from, or convert another project's; or write an extension package",
         f"{_CLI}.before:init", "init recipe modernbert-base"),
    Verb("check", BEFORE, "every mistake that can be found before training, and what the run would do",
         f"{_CLI}.before:check", "check yamls/quickstart.yaml optim.lr=1e-3", True),
    Verb("inspect", BEFORE, "a run's packed, masked batch as text, packing and mixture; or the documents of a dataset",
         f"{_CLI}.before:inspect", "inspect yamls/quickstart.yaml --rows 1", True),
    Verb("plan", BEFORE, "parameters, FLOPs, memory, steps, disk, hours and cost, without a GPU",
         f"{_CLI}.before:plan", "plan yamls/quickstart.yaml --gpu h100 rtx4090", True),
    Verb("pretrain", TRAIN, "text to a trained, measured and exported model, given a size or hours; or the quickstart",
         "launch.pretrain", "pretrain my/texts --hours 8"),
    Verb("train", TRAIN, "train a run, or resume it from its newest checkpoint", f"{_CLI}.training:train",
         "train yamls/quickstart.yaml name=slower optim.lr=1e-3", True),
    Verb("launch", TRAIN, "train on all GPUs of this machine, on several machines, or as a cluster's job",
         "launch.run", "launch yamls/quickstart.yaml --ranks 2", True),
    Verb("sweep", TRAIN, "many runs from one YAML, and the best of them", "launch.sweep",
         "sweep yamls/sweeps/mask_rate.yaml"),
    Verb("report", WATCH, "list runs, draw one's metrics as a page, or compare several on one",
         f"{_CLI}.training:report", "report runs/quickstart runs/slower"),
    Verb("checkpoints", WATCH, "list, verify and restore the checkpoints of a run",
         f"{_CLI}.checkpoints:checkpoints", "checkpoints runs/quickstart"),
    Verb("eval", EVALUATE, "held-out loss and evals of a run's checkpoint; or models on a suite of tasks, as one table",
         f"{_CLI}.trained:evaluate", "eval runs/quickstart", True),
    Verb("fill", EVALUATE, "print the five most probable tokens for each [MASK]", f"{_CLI}.trained:fill",
         'fill runs/quickstart/hf "def __init__([MASK], name):"'),
    Verb("embed", EVALUATE, "a vector for each text of a file, as an array or a Parquet file", f"{_CLI}.trained:embed",
         "embed runs/quickstart texts.jsonl --out vectors.npy"),
    Verb("average", PUBLISH, "the mean of several checkpoints, for eval, export and weights.init_from",
         f"{_CLI}.trained:average", "average runs/quickstart --last 4 --out runs/averaged"),
    Verb("export", PUBLISH, "write a run's newest checkpoint, a named one, or any other model for Hugging Face",
         f"{_CLI}.trained:export", "export runs/quickstart", True),
    Verb("push", PUBLISH, "upload a run's newest checkpoint to the Hugging Face hub, or every one as a revision",
         f"{_CLI}.trained:push", "push runs/quickstart you/your-model --every-checkpoint"),
    Verb("finetune", FINE_TUNE, "train a model on labelled texts, measure it, and export it with its classes",
         f"{_CLI}.finetuning:finetune", "finetune rte --model runs/quickstart data=glue/RTE", True),
    Verb("retrieval", FINE_TUNE, "train a model for retrieval on pairs of texts, measure one, or mine hard negatives",
         "modernbert_train.cli.retrieval:retrieval",
         "retrieval train yamls/retrieval/modernbert.yaml --model runs/quickstart train=[pairs.jsonl]"),
    Verb("doctor", DEVELOPER, "versions, memory, disk and a test of every kernel, as a block for a bug report",
         f"{_CLI}.before:doctor", "doctor"),
)  # fmt: skip
BY_NAME = {verb.name: verb for verb in VERBS}
REMOVED = {
    "evaluate": Old("eval MODEL... --suite NAME --out FOLDER", ("eval",)),
    "import-config": Old("init from FILE", ("init", "from")),
    "quickstart": Old("pretrain --preset quickstart", ("pretrain", "--preset", "quickstart")),
    "runs": Old("report --list FOLDER...", ("report", "--list")),
    "stats": Old("inspect FOLDER...", ("inspect",)),
    "prepare-pairs": Old("`prepare SPEC.yaml` takes its options as keys; `init data pairs` prints such a file."),
    "gliner": Old("docs/tasks/entities.md shows how GLiNER's own trainer takes an exported folder."),
    "setfit": Old("docs/use.md shows how SetFit's own trainer takes an exported folder."),
    "onnx": Old("docs/use.md shows how torch writes ONNX of an exported folder."),
    "grow": Old("weights.grow_from=MODEL in the larger run does the same when it starts; docs/weights.md shows how."),
    "tune": Old("A run takes the settings that its device is fast with; docs/speed.md lists their keys."),
    "completion": Old("Nothing replaces it; docs/config.md lists every key, and `init` prints a file to start from."),
}

# docs/faults.md has the whole table, with the reaction of schedulers
EXIT_CODES = {
    "0": "finished",
    "64": "wrong arguments",
    "65": "bad data",
    "70": "internal error, or a lost process",
    "74": "disk or checkpoint",
    "75": "stopped by a signal: start the same command again",
    "78": "wrong configuration",
    "124": "a process hung",
    "130, 138, 143": "ended at once by a second signal",
}
_RUN = """\
RUN is one or more YAML files, merged left to right, or the folder of a run. KEY=VALUE overrides a key, such as
optim.lr=1e-3; docs/config.md lists all keys.
"""


def help_page() -> str:
    """Return the text of `--help`: the verbs by task, and the exit codes."""
    sections = [
        f"usage: {PROGRAM} VERB ...\n\nPretrain a ModernBERT-class encoder: raw text to a published Hugging Face model."
    ]
    for group in dict.fromkeys(verb.group for verb in VERBS):
        rows = [(f"{verb.name:<13}", verb.summary) for verb in VERBS if verb.group == group]
        sections.append(f"{group}\n{table(rows, indent=2)}")
    codes = table([(f"{code:<13}", meaning) for code, meaning in EXIT_CODES.items()], indent=2)
    sections.append(f"exit codes\n{codes}")
    sections.append(f"VERB --help shows arguments and an example.\n{_RUN.rstrip()}")
    return "\n\n".join(sections)


def replaced(words: list[str]) -> list[str]:
    """Replace an old verb on a command line, and print the new one; other command lines are unchanged."""
    old = REMOVED.get(words[0]) if words else None
    if old is None or not old.words:
        return words
    print(f"{words[0]}: now `{old.now}`; continuing", file=sys.stderr, flush=True)
    return [*old.words, *words[1:]]


def unknown_verb(word: str) -> str:
    """Return the error for an unknown verb."""
    if word in REMOVED:
        return f"error: {word}: this verb was removed. {REMOVED[word].now}\n"
    hint = did_you_mean(word, BY_NAME, likeness=0.6) or f" Known: {', '.join(BY_NAME)}."
    return f"error: {word}: no such verb.{hint} {PROGRAM} --help lists them by task.\n"


def make_parser(verb: Verb) -> argparse.ArgumentParser:
    """Return the parser of a verb; its option `call` is the function to call, except for a separate program."""
    module, _, function = verb.home.partition(":")
    if verb.is_program:
        parser: argparse.ArgumentParser = importlib.import_module(module).make_parser()
        return parser
    epilog = f"example:\n  {PROGRAM} {verb.example}\n"
    if verb.takes_run:
        epilog += f"\n{_RUN}"
    parser = Parser(prog=f"{PROGRAM} {verb.name}", description=f"{verb.summary}.", epilog=epilog)
    parser.set_defaults(call=getattr(importlib.import_module(module), function)(parser))
    return parser
