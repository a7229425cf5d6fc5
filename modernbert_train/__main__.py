"""`python -m modernbert_train VERB`: arguments in, one call out.

Nothing heavy is imported before the configuration has been checked, so a mistake is told within a second.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from modernbert_train import __version__
from modernbert_train.ranks import stop_signals

if __name__ == "__main__":  # before the slower imports
    stop_signals.take_over()

from modernbert_train.config.check import check, check_model
from modernbert_train.config.load import load_model
from modernbert_train.config.schema import RunConfig
from modernbert_train.downstream.verbs import add_verbs
from modernbert_train.errors import ConfigError, RunError, StoppedEarly
from modernbert_train.installed import YAMLS
from modernbert_train.lasting_output import lasting_output
from modernbert_train.ranks import orphans, scratch
from modernbert_train.ranks.launched import speaks_for_all
from modernbert_train.redact import redact

if TYPE_CHECKING:
    from modernbert_train.data.facts import DataFacts
    from modernbert_train.run.checkpoint import Checkpoint

# verbs that are programs of their own, whose modules read their arguments: module, and what it does
PROGRAMS = {
    "quickstart": ("launch.quickstart", "text to a trained small model on this machine, every step printed"),
    "prepare": ("data_prep.prepare", "text on disk to tokenised shards"),
    "tokenizer": ("data_prep.tokenizer", "train a tokenizer, or adapt one"),
    "stats": ("data_prep.stats", "what a dataset holds: documents, tokens, lengths, duplicates"),
    "launch": ("launch.run", "a run on all GPUs of this machine, on several, or as a job of a cluster"),
    "sweep": ("launch.sweep", "many runs from one YAML, and the best of them"),
}

# kinds of `init` -> the folder of yamls/
STARTING_POINTS = {
    "recipe": "recipes", "run": "", "data": "data", "model": "model", "sweep": "sweeps", "task": "tasks",
    "retrieval": "retrieval", "gliner": "gliner", "setfit": "setfit",
}  # fmt: skip

EPILOG = """\
RUN is one or more YAML files, merged left to right, or the folder of a run. Overrides are section.key=value.

  python -m modernbert_train init recipe modernbert-base > run.yaml
  python -m modernbert_train check yamls/quickstart.yaml optim.lr=1e-3
  python -m modernbert_train inspect yamls/quickstart.yaml --rows 1
  python -m modernbert_train plan yamls/quickstart.yaml --gpu h100 rtx4090
  python -m modernbert_train train yamls/quickstart.yaml
  python -m modernbert_train eval runs/quickstart
  python -m modernbert_train export runs/quickstart
  python -m modernbert_train push runs/quickstart you/your-model --every-checkpoint
  python -m modernbert_train runs
  python -m modernbert_train finetune rte --model runs/quickstart data=glue/RTE
  python -m modernbert_train finetune rte cola --model runs/quickstart frozen:runs/quickstart --out runs/judged
  python -m modernbert_train gliner train yamls/gliner/wnut17.yaml --model runs/quickstart
  python -m modernbert_train setfit train yamls/setfit/banking77.yaml --model runs/quickstart
  python -m modernbert_train retrieval train yamls/retrieval/modernbert.yaml --model runs/quickstart train=[pairs.jsonl]
  python -m modernbert_train fill runs/quickstart/hf "def __init__([MASK], name):"
  python -m modernbert_train average runs/quickstart --last 4 --out runs/averaged
  python -m modernbert_train import-config their.yaml --out mine.yaml
  python -m modernbert_train grow --from answerdotai/ModernBERT-base --to yamls/model/large.yaml --out grown

Training goes on from the newest whole checkpoint of the run's folder by itself. Exit codes: 0 finished, 64 wrong
arguments, 65 bad data, 70 internal, 74 disk or checkpoint, 75 stopped, start again, 78 wrong configuration.
"""


def program() -> NoReturn:
    """The command `modernbert-train`: `main` as a process of its own, to which the stop signals belong."""
    stop_signals.take_over()
    _program()


def _program() -> NoReturn:
    if (verb := (sys.argv[1:] or [""])[0]) in PROGRAMS:  # as if it had been started itself, signals and all
        os.execv(sys.executable, [sys.executable, "-m", PROGRAMS[verb][0], *sys.argv[2:]])
    if not orphans.follow_launcher():
        scratch.use_for_temporary_files()
    stop_signals.end(main())


@lasting_output()
def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the process's exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in PROGRAMS:
        return int(importlib.import_module(PROGRAMS[words[0]][0]).main(words[1:]))
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (any(word.startswith("-") for word in rest) or not hasattr(options, "run")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.run += rest  # overrides may also stand after an option
    try:
        options.call(options)
    except StoppedEarly as stopped:
        if speaks_for_all():
            print(stopped, file=sys.stderr)
        return stopped.exit_code
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        print("error: this is a bug. Report it with the lines above and the output of `doctor`.", file=sys.stderr)
        return RunError.exit_code
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(64, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m modernbert_train",
        description="Pretrain a ModernBERT-class encoder: raw text to a published Hugging Face model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, call: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.set_defaults(call=call)
        return verb

    def with_run(verb: argparse.ArgumentParser) -> argparse.ArgumentParser:
        verb.add_argument("run", nargs="+", metavar="RUN [KEY=VALUE]", help="YAML files or a run's folder, overrides")
        return verb

    def with_licence(verb: argparse.ArgumentParser) -> None:
        words = "licence of the model for its card, as the hub names it: apache-2.0, cc-by-4.0, other; default: unknown"
        verb.add_argument("--licence", "--license", metavar="ID", help=words)

    for name, (_, summary) in PROGRAMS.items():
        verbs.add_parser(name, help=summary, add_help=False)  # `main` hands its arguments on
    verb = add("init", _init, "print a commented YAML file to begin with: of a run, of data, of a task")
    verb.add_argument("kind", choices=STARTING_POINTS, help="what for")
    verb.add_argument("name", nargs="?", help="which; without it the names there are")
    verb = with_run(add("train", _train, "train a run, or go on with it"))
    verb.add_argument("--fresh", action="store_true", help="start from scratch; what the folder holds is put aside")
    verb = with_run(add("check", _check, "everything the configuration alone can tell, without torch"))
    verb.add_argument("--ranks", type=_positive, default=1, help="processes that would train")
    verb = with_run(add("inspect", _inspect, "a packed, masked batch as text, document lengths, packing and mixture"))
    verb.add_argument("--batch", type=_positive, default=1, metavar="N", help="number of the batch, from 1")
    verb.add_argument("--rows", type=_positive, default=2, metavar="K", help="rows of it to show, default 2")
    verb.add_argument("--no-color", action="store_true", help="also NO_COLOR, or an output that is no terminal")
    verb = with_run(add("plan", _plan, "parameters, FLOPs, memory, steps, disk, hours and cost, without a GPU"))
    verb.add_argument("--ranks", type=_positive, default=1, help="GPUs that would train; default: 1")
    words = "kinds of GPU, the first for memory, advice and scaling; default: h100, and all for time and cost"
    verb.add_argument("--gpu", nargs="+", type=_gpu, metavar="NAME", help=words)
    words = "dollars an hour for one GPU, in place of the assumed price; may be repeated"
    verb.add_argument("--price", action="append", type=_price, default=[], metavar="NAME=DOLLARS", help=words)
    words = "median length of documents, in place of the data's"
    verb.add_argument("--median", type=_positive, metavar="TOKENS", help=words)
    verb.add_argument("--html", type=Path, metavar="FILE", help="write it as a page too; FILE.svg: the picture alone")
    with_run(add("eval", _eval, "held-out loss, accuracy and evals of a run's newest checkpoint, or one named"))
    verb = with_run(add("export", _export, "write a run's newest checkpoint, one named, or FILE.pt for Hugging Face"))
    verb.add_argument("--out", type=Path, help="folder of the model; default: the run's folder/hf")
    words = "the generator that was trained beside the model, into hf-generator; see objective.name=rtd"
    verb.add_argument("--generator", action="store_true", help=words)
    with_licence(verb)
    verb = add("push", _push, "upload a run's newest checkpoint to the Hugging Face hub, or every one as a revision")
    verb.add_argument("folder", type=Path, metavar="RUN", help="a run's folder")
    verb.add_argument("repo_id", metavar="OWNER/MODEL", help="on the hub; made if it is not there")
    verb.add_argument("--private", action="store_true", help="make it visible to its owner alone")
    words = "also each checkpoint as a revision of its name; step-00000000 has the weights before the first step"
    verb.add_argument("--every-checkpoint", action="store_true", help=words)
    with_licence(verb)
    verb = add("grow", _grow, "enlarge a model by center tiling, for weights.init_from of a run")
    words = "a run's folder, a checkpoint, a Hugging Face folder or hub id, a Composer checkpoint FILE.pt"
    verb.add_argument("--from", dest="source", required=True, metavar="MODEL", help=words)
    words = "YAML files with the larger model: section, a run's or one of yamls/model, and overrides"
    verb.add_argument("--to", nargs="+", required=True, metavar="YAML [KEY=VALUE]", help=words)
    verb.add_argument("--mode", choices=("fitted", "paper"), help="default: weights.grow_mode, which is fitted")
    verb.add_argument("--out", type=Path, required=True, help="folder of the grown model")
    with_licence(verb)
    verb = add("finetune", _finetune, "train a model on labelled texts, measure it, and export it with its classes")
    words = (
        "tasks: of yamls/tasks, such as mnli, or YAML files of your own; keys of the task, such as lr= or data=, and "
        "of the run, such as compute.device="
    )
    verb.add_argument("run", nargs="+", metavar="TASK [KEY=VALUE]", help=words)
    of_what = verb.add_mutually_exclusive_group(required=True)
    words = (
        "a run's folder, a checkpoint, a Hugging Face folder or hub id, a Composer checkpoint FILE.pt; of these also "
        "frozen:MODEL and untrained:MODEL"
    )
    of_what.add_argument("--model", nargs="+", metavar="MODEL", help=words)
    words = "every new checkpoint of a run while it trains; its report has the curve"
    of_what.add_argument("--watch", type=Path, metavar="RUN", help=words)
    words = "one run each, in place of seed=; the paper's are 1618 42 6033 3145"
    verb.add_argument("--seeds", nargs="+", type=_positive, metavar="N", help=words)
    words = "folder of many runs, every task with every model and seed, and of their table"
    verb.add_argument("--out", type=Path, metavar="FOLDER", help=words)
    words = "runs at a time, of many; default: one for each GPU, or one"
    verb.add_argument("--jobs", type=_positive, metavar="N", help=words)
    words = "seconds without a sign of training after which watching ends, default 600"
    verb.add_argument("--patience", type=_positive, default=600, metavar="S", help=words)
    add_verbs(add)
    verb = add("average", _average, "the mean of several checkpoints, for eval, export and weights.init_from")
    words = "checkpoints, or runs, whose newest checkpoint counts; with --last one run"
    verb.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=words)
    verb.add_argument("--last", type=_positive, metavar="K", help="the K newest checkpoints of the run's decay")
    verb.add_argument("--weights", nargs="+", type=float, metavar="W", help="one for each; default: all the same")
    verb.add_argument("--out", type=Path, required=True, help="folder of the average")
    verb = with_run(add("report", _report, "draw a run's metrics as a page, or compare several runs' folders on one"))
    words = "the page; default: report.html in the run's folder, comparison.html beside the first of several"
    verb.add_argument("--out", type=Path, metavar="FILE", help=words)
    verb = add("runs", _runs, "list runs: state, tokens, loss, speed and age of each")
    words = "folders of runs, or runs; default: runs"
    verb.add_argument("folders", nargs="*", type=Path, default=[Path("runs")], metavar="FOLDER", help=words)
    verb.add_argument("--json", action="store_true", help="as JSON, with exact numbers")
    verb = add("fill", _fill, "print the five likeliest tokens for each [MASK]")
    verb.add_argument("model", type=Path, help="folder of an exported model")
    verb.add_argument("text", nargs="+", help="text with one [MASK]")
    verb = add("import-config", _import_config, "a run file of AnswerDotAI/ModernBERT, or a config.json, as ours")
    verb.add_argument("file", type=Path, help="their YAML, or the config.json of a model")
    verb.add_argument("--out", type=Path, help="file to write; default: standard output")
    add("doctor", _doctor, "versions, memory and disk, and kernels that it tries, as a block for a bug report")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: a whole number above 0 is expected")
    return int(text)


def _gpu(text: str) -> str:
    from modernbert_train.plan.gpus import GPUS

    if text not in GPUS and "=" not in text:
        raise argparse.ArgumentTypeError(f"{text}: an unknown GPU. Known: {', '.join(GPUS)}")
    return text


def _price(text: str) -> tuple[str, float]:
    name, _, dollars = text.partition("=")
    try:
        price = float(dollars)
    except ValueError:
        price = math.nan
    if _gpu(name) and not (math.isfinite(price) and price >= 0):
        raise argparse.ArgumentTypeError(f"{text}: write NAME=DOLLARS, for example h100=2.50")
    return name, price


def read_run(arguments: list[str]) -> RunConfig:
    """The configuration named on a command line: YAML files or one run folder, and overrides."""
    from modernbert_train.weights.named_model import read_config

    return read_config(*_files_and_overrides(arguments))


def _files_and_overrides(arguments: list[str]) -> tuple[list[Path], list[str]]:
    names = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    return [Path(name) / "config.yaml" if Path(name).is_dir() else Path(name) for name in names], overrides


def _init(options: argparse.Namespace) -> None:
    folder = YAMLS / STARTING_POINTS[options.kind]
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}
    if options.name is None:
        print(*files, sep="\n")
    elif options.name in files:
        from modernbert_train.config.tools.init import starting_point

        print(starting_point(files[options.name]), end="")
    else:
        raise ConfigError(f"init {options.kind} {options.name}: there is none. Known: {', '.join(files)}.")


def _train(options: argparse.Namespace) -> None:
    config = read_run(options.run)
    from modernbert_train.preflight import preflight
    from modernbert_train.run.progress import stage

    stage("checking the configuration, the data and the run's folder")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        preflight(config, fresh=options.fresh)
    else:  # of several ranks, one that finds a mistake must tell the others, which needs torch
        check(config)
    stage("loading torch and Composer")
    with _many_imports():
        from modernbert_train.train.session import train

    train(config, fresh=options.fresh)


@contextmanager
def _many_imports() -> Iterator[None]:
    """Within it Python does not look for garbage, a fifth of the time that torch and Composer take to be imported.

    Afterwards it leaves out what is there by then, half a million objects that stay to the end.
    """
    first = "torch" not in sys.modules
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


def _check(options: argparse.Namespace) -> None:
    config = read_run(options.run)
    from modernbert_train.config.describe import describe
    from modernbert_train.data.check import describe_streams, few_predictions, without_words
    from modernbert_train.data.facts import read_facts
    from modernbert_train.plan.picture import picture_text
    from modernbert_train.preflight import preflight

    preflight(config, options.ranks)
    facts = read_facts(config)
    print(describe(config))
    if (warning := few_predictions(config, facts)) is not None:
        print(f"warning: {warning}")
    if (warning := without_words(config)) is not None:
        print(f"warning: {warning}")
    if config.data.streams:
        print(describe_streams(config, facts))
    if config.weights.vocabulary != "same":
        print(*_vocabulary_lines(config, facts), sep="\n")
    if config.evals:
        from modernbert_train.data.labelled import describe_labelled

        print(*describe_labelled(config), sep="\n")
    print(f"\n{picture_text(config)}")


def _vocabulary_lines(config: RunConfig, facts: DataFacts) -> list[str]:
    """What another vocabulary will do; it takes torch, and weights that are here already."""
    from importlib.util import find_spec

    from modernbert_train.run.run_folder import RunFolder

    name = config.weights.init_from
    if RunFolder(config).has_checkpoints() or find_spec("torch") is None or name is None or not Path(name).exists():
        return [f"weights.vocabulary={config.weights.vocabulary}: what it does is said when a run starts with it"]
    from modernbert_train.weights.source import find_origin
    from modernbert_train.weights.token_effect import describe_effects, effects

    origin = find_origin(config)
    assert origin is not None
    return [origin.describe(), *describe_effects(effects(config, facts, origin))]


def _inspect(options: argparse.Namespace) -> None:
    config = read_run(options.run)
    check(config)
    from modernbert_train.inspection.show import inspect_run
    from modernbert_train.inspection.terminal import print_text, wants_color

    print_text(inspect_run(config, options.batch, options.rows, color=wants_color(options.no_color)))


def _plan(options: argparse.Namespace) -> None:
    words = options.gpu or []
    config = read_run(options.run + [word for word in words if "=" in word])  # overrides may follow --gpu
    check(config, options.ranks)
    from modernbert_train.plan.answer import answer
    from modernbert_train.plan.gpus import GPUS
    from modernbert_train.plan.make import make_plan
    from modernbert_train.plan.output import as_text, write
    from modernbert_train.plan.sections import sections

    named = [word for word in words if "=" not in word]
    plan = make_plan(config, options.ranks, options.median)
    wanted = (plan, (named or ["h100"])[0], named or list(GPUS), dict(options.price))
    found = [answer(*wanted), *sections(*wanted)]
    if options.html is not None:
        write(options.html, config, found)
    print(as_text(config, found))


def _named_checkpoint(words: list[str]) -> Checkpoint | None:
    """The checkpoint that a command line names in place of a run, verified before its configuration is read."""
    for folder in (Path(word) for word in words if "=" not in word):
        if (folder.name.startswith("step-") and not folder.is_file()) or (folder / "MANIFEST.json").is_file():
            from modernbert_train.run.checkpoint import open_named

            return open_named(folder)
    return None


def _eval(options: argparse.Namespace) -> None:
    named = _named_checkpoint(options.run)
    config = read_run(options.run)
    check(config)
    from modernbert_train.evals.evaluate import evaluate_run

    evaluate_run(config, checkpoint=named)


def _export(options: argparse.Namespace) -> None:
    if Path(options.run[0]).suffix == ".pt":
        if options.out is None or len(options.run) > 1:
            raise ConfigError(f"{' '.join(options.run)}: such a file is exported alone, as FILE.pt --out FOLDER.")
        from modernbert_train.weights.export import convert_model

        convert_model(options.run[0], options.out, options.licence)
        return
    named = _named_checkpoint(options.run)
    config = read_run(options.run)
    check(config)
    from modernbert_train.weights.export import export_run

    export_run(config, options.out, checkpoint=named, licence=options.licence, generator=options.generator)


def _push(options: argparse.Namespace) -> None:
    if not (options.folder / "config.yaml").is_file():
        raise ConfigError(f"push {options.folder}: not the folder of a run. Name one, such as runs/quickstart.")
    config = read_run([str(options.folder)])
    check(config)
    from modernbert_train.weights.push import push_run

    push_run(
        config,
        options.repo_id,
        private=options.private,
        every_checkpoint=options.every_checkpoint,
        licence=options.licence,
    )


def _grow(options: argparse.Namespace) -> None:
    mode = [f"weights.grow_mode={options.mode}"] if options.mode else []
    files, overrides = _files_and_overrides(options.to)
    config = load_model(files, [*overrides, *mode])
    check_model(config.model)
    from modernbert_train.weights.grow import grow_model

    grow_model(options.source, config.model, config.weights.grow_mode, options.out, options.licence)


def _finetune(options: argparse.Namespace) -> None:
    named = options.model or []
    models = [word for word in named if "=" not in word or Path(word).exists()]
    overrides = [*(word for word in options.run if "=" in word), *(word for word in named if word not in models)]
    tasks = [word for word in options.run if "=" not in word]
    if not tasks:
        raise ConfigError(f"finetune {' '.join(options.run)}: of which task? Name one of yamls/tasks, or a YAML file.")
    if options.watch is None and not models:
        raise ConfigError("--model: names none. Name a run, a checkpoint or a Hugging Face folder.")
    if options.watch is None and options.out is None and (len(tasks) > 1 or len(models) > 1 or options.jobs):
        raise ConfigError(
            f"finetune of {', '.join(tasks)} with {', '.join(models)}: several runs at a time need a folder for their "
            "table. Add --out runs/judged; or name one task, which stands first, and one --model, without --jobs."
        )
    if options.watch is not None or options.out is not None:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError("--out and --watch start processes of their own. Start one command, without torchrun.")
        from modernbert_train.finetune.many import finetune_many
        from modernbert_train.finetune.watch import watch

        if options.watch is None:
            finetune_many(tasks, models, options.seeds, options.out, options.jobs, overrides)
        elif options.out is not None:
            raise ConfigError(f"--out={options.out}: what is watched is kept in {options.watch}/watch. Leave it out.")
        else:
            watch(options.watch, tasks, options.seeds, options.jobs, options.patience, overrides)
        return
    from modernbert_train.run.progress import stage

    stage("loading torch and Composer")
    with _many_imports():
        from modernbert_train.finetune.run import finetune

    for seed in options.seeds or [None]:
        finetune(tasks[0], models[0], [*overrides, *([] if seed is None else [f"seed={seed}"])])


def _average(options: argparse.Namespace) -> None:
    from modernbert_train.weights.average import average_checkpoints

    average_checkpoints(options.checkpoints, options.out, last=options.last, weights=options.weights)


def _report(options: argparse.Namespace) -> None:
    folders = [Path(word) for word in options.run if Path(word).is_dir()]
    if len(folders) > 1:
        if len(folders) < len(options.run):
            raise ConfigError(f"report {' '.join(options.run)}: several runs are compared by their folders alone.")
        from modernbert_train.report import write_comparison

        print(write_comparison(folders, options.out or folders[0].parent / "comparison.html"))
        return
    from modernbert_train.report import is_table, write_report, write_table_page

    if len(folders) == len(options.run) and is_table(folders[0]):
        print(write_table_page(folders[0], options.out))
        return
    config = read_run(options.run)
    print(write_report(Path(config.folder), options.out))


def _runs(options: argparse.Namespace) -> None:
    from modernbert_train.run.listing import as_json, as_text, list_runs

    found, wrong = list_runs(options.folders)
    for line in wrong:
        print(f"warning: {line}", file=sys.stderr)
    print(as_json(found) if options.json else as_text(found))


def _fill(options: argparse.Namespace) -> None:
    from modernbert_train.weights.fill import fill

    print(fill(options.model, options.text))


def _import_config(options: argparse.Namespace) -> None:
    if options.file.suffix == ".json":
        from modernbert_train.weights.import_model import import_model

        text, notes = import_model(options.file)
    else:
        from modernbert_train.config.tools.import_config import import_config

        text, notes = import_config(options.file)
    if options.out is None:
        print(text, end="")
    elif options.out.exists():
        raise ConfigError(f"--out={options.out}: exists already. Name a file that does not.")
    else:
        options.out.write_text(text, encoding="utf-8")
    print("not carried over, or to be looked at:", *notes, sep="\n  ", file=sys.stderr)


def _doctor(options: argparse.Namespace) -> None:
    from modernbert_train.doctor import lines

    for line in lines():  # as they come: the last ones take a minute
        print(line, flush=True)


if __name__ == "__main__":
    _program()
