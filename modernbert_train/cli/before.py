"""Verbs before training: describe, check and price a run. None of them needs a GPU."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from modernbert_train.cli.arguments import is_run, read_sound, with_run
from modernbert_train.cli.parser import Call, positive, token_count
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import write_out
from modernbert_train.core.installed import YAMLS
from modernbert_train.core.text import number_in
from modernbert_train.distributed.launched import check_launch_variables
from modernbert_train.errors import ConfigError
from modernbert_train.plan.recipe import SIZES, RunRequest, run_yaml, tokens_for

if TYPE_CHECKING:
    from modernbert_train.data.facts import DataFacts

# kinds of `init` -> the folder of yamls/
STARTING_POINTS = {
    "recipe": "recipes", "run": "", "data": "data", "model": "model", "sweep": "sweeps", "task": "tasks",
    "retrieval": "retrieval",
}  # fmt: skip


def starting_points(kind: str) -> dict[str, Path]:
    """Return the files of a kind that `init` can print, by name."""
    folder = YAMLS / STARTING_POINTS[kind]
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def init(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `init`, and return its call."""
    words = "kind of file; `from`: convert a file of another project; `extension`: write a package"
    parser.add_argument("kind", choices=[*STARTING_POINTS, "from", "extension"], help=words)
    words = "name; without it the names are listed; for `from`: a YAML of AnswerDotAI/ModernBERT, or a config.json"
    parser.add_argument("name", nargs="?", help=words)
    parser.add_argument("package", nargs="?", help="for `extension`: name of the package to write")
    words = "for `from`: the file to write; default: standard output. For `extension`: its folder; default: its name"
    parser.add_argument("--out", type=Path, help=words)
    parser.add_argument("--size", choices=SIZES, help="for `run`: a run of this size, with the source of each value")
    words = "with --size: such as 300M or 2B; default: 20 a parameter, and as published for base and large"
    parser.add_argument("--tokens", type=token_count, metavar="N", help=words)
    words = "with --size: GPUs that would train; default: 1, and a CPU for tiny and quickstart"
    parser.add_argument("--gpus", type=positive, metavar="N", help=words)
    return _init


def _init(options: argparse.Namespace) -> None:
    if options.kind != "extension" and options.package is not None:
        raise ConfigError(
            f"init {options.kind}: only `init extension` takes a third name. Leave {options.package} out."
        )
    if options.kind not in ("from", "extension") and options.out is not None:
        raise ConfigError(f"init {options.kind}: only `init from` and `init extension` take --out. Leave it out.")
    if options.size is not None:
        _init_size(options)
        return
    if options.tokens or options.gpus:
        raise ConfigError("init: --tokens and --gpus need --size, which is missing. Add it, such as --size 68m.")
    if options.kind in ("from", "extension"):
        (_init_from if options.kind == "from" else _init_extension)(options)
        return
    files = starting_points(options.kind)
    if options.name is None:
        print(*files, sep="\n")
        return
    file = files.get(options.name, YAMLS / STARTING_POINTS[options.kind] / f"{options.name}.yaml")  # or ettin/common
    if file.is_file():
        from modernbert_train.config.tools.merge_yaml import starting_point

        print(starting_point(file), end="")
    else:
        raise ConfigError(f"init {options.kind} {options.name}: there is none. Known: {', '.join(files)}.")


def _init_extension(options: argparse.Namespace) -> None:
    from modernbert_train.config.tools.skeleton import KINDS, write_skeleton

    if options.name is None:
        print(*sorted(KINDS), sep="\n")
    elif options.name not in KINDS:
        raise ConfigError(f"init extension {options.name}: there is none. Known: {', '.join(KINDS)}.")
    elif options.package is None:
        raise ConfigError(f"init extension {options.name}: add the name of your package, such as my_{options.name}.")
    else:
        print(write_skeleton(options.name, options.package, options.out or Path(options.package)))


def _init_from(options: argparse.Namespace) -> None:
    """Convert a file of another project."""
    if options.name is None:
        raise ConfigError("init from: add the file to convert, a YAML of AnswerDotAI/ModernBERT or a config.json.")
    file = Path(options.name)
    if file.suffix == ".json" or file.is_dir():
        from modernbert_train.weights.import_model import import_model

        text, notes = import_model(file)
    else:
        from modernbert_train.config.tools.import_config import import_config

        text, notes = import_config(file)
    if options.out is None:
        print(text, end="")
    elif options.out.exists():
        raise ConfigError(f"--out={options.out}: exists already. Name a file that does not.")
    else:
        write_out(options.out, text)
    print("not carried over, or to be looked at:", *notes, sep="\n  ", file=sys.stderr)


def _init_size(options: argparse.Namespace) -> None:
    """Print the run of a size; `pretrain` writes the same, and the spec of its data."""
    if options.kind != "run" or options.name is not None:
        raise ConfigError(
            f"init {options.kind} {options.name or ''}: --size is for `init run --size {options.size}` only."
        )
    size = SIZES[options.size]
    tokens = options.tokens or tokens_for(size, size.parameters(size.entries), math.inf)
    gpus = options.gpus or (0 if size.name in ("tiny", "quickstart") else 1)
    words = " ".join(f"--{key} {value}" for key in ("tokens", "gpus") if (value := getattr(options, key)))
    head = (f"Written by `init run --size {size.name} {words}`".rstrip() + ".",)
    print(run_yaml(RunRequest(f"mine-{size.name}", size, tokens, size.entries, gpus, "data/mine", head=head)), end="")


def doctor(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `doctor`, and return its call."""
    return _doctor


def _doctor(options: argparse.Namespace) -> None:
    from modernbert_train.plan.doctor import lines

    for line in lines():  # as they come: the last ones take a minute
        print(line, flush=True)


def check(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `check`, and return its call."""
    with_run(parser)
    parser.add_argument("--ranks", type=positive, default=1, help="processes that would train")
    words = "kind of GPU that would train, for its memory; default: this machine's, or launch.gpu"
    parser.add_argument("--gpu", type=_gpu, metavar="NAME", help=words)
    return _check


def _check(options: argparse.Namespace) -> None:
    from modernbert_train.plan.resolve import describe_evals, resolve

    if options.ranks == 1:
        check_launch_variables()  # as `train` does
    config = read_sound(options.run, "train", options.ranks)
    from modernbert_train.config.describe import describe
    from modernbert_train.data.check_shards import describe_streams, few_predictions, unread_rows, without_words
    from modernbert_train.data.shard_sizes import check_shard_sizes
    from modernbert_train.plan.gpus import GPUS
    from modernbert_train.plan.not_checked import not_checked
    from modernbert_train.plan.speed_settings import last_trained, unread_settings

    facts = resolve(config, options.ranks, gpu=GPUS[options.gpu] if options.gpu else None).facts
    assert facts is not None
    check_shard_sizes(config.data, config.evals)
    print(describe(config))
    tuned = unread_settings(config) if last_trained(config) is None else None
    for warning in (few_predictions(config, facts), unread_rows(config, facts), without_words(config), tuned):
        if warning is not None:
            print(f"warning: {warning}")
    if config.data.streams:
        print(describe_streams(config, facts))
    if config.weights.vocabulary != "same":
        print(*_vocabulary_lines(config, facts), sep="\n")
    for line in describe_evals(config.evals):
        print(line)
    if lines := not_checked(config):
        print("\nnot checked:", *lines, sep="\n  ")


def _vocabulary_lines(config: RunConfig, facts: DataFacts) -> list[str]:
    """Describe the effect of another vocabulary; needs torch, and weights on this machine."""
    from importlib.util import find_spec

    from modernbert_train.checkpoints.run_folder import RunFolder

    name = config.weights.init_from
    if RunFolder(config).has_checkpoints() or find_spec("torch") is None or name is None or not Path(name).exists():
        return [f"weights.vocabulary={config.weights.vocabulary}: its effect is printed when a run starts with it"]
    from modernbert_train.weights.source import find_origin
    from modernbert_train.weights.token_effect import describe_effects, effects

    origin = find_origin(config)
    assert origin is not None
    return [origin.describe(), *describe_effects(effects(config.data, facts, origin))]


def inspect(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `inspect`, and return its call."""
    words = "YAML files or a run's folder, overrides; or folders of datasets, or of their splits"
    parser.add_argument("run", nargs="+", metavar="RUN [KEY=VALUE]", help=words)
    parser.add_argument("--batch", type=positive, metavar="N", help="of a run: number of the batch, from 1; default: 1")
    parser.add_argument("--rows", type=positive, metavar="K", help="of a run: rows of the batch to show; default: 2")
    words = "of a run: no colours, as with NO_COLOR or without a terminal"
    parser.add_argument("--no-color", action="store_true", help=words)
    parser.add_argument("--json", action="store_true", help="of datasets: as JSON, one object for each folder by name")
    return _inspect


def _inspect(options: argparse.Namespace) -> None:
    datasets = [word for word in options.run if Path(word).is_dir() and not is_run(Path(word))]
    if datasets:
        if len(datasets) < len(options.run) or options.batch or options.rows:
            raise ConfigError(
                f"inspect {' '.join(options.run)}: {datasets[0]} is a folder of data, which takes no other run or "
                "key, and neither --batch nor --rows. Give two commands."
            )
        from modernbert_train.report.dataset import describe_datasets

        print(describe_datasets([Path(word) for word in datasets], as_json=options.json))
        return
    if options.json:
        raise ConfigError("inspect: --json is for datasets, and none is named. Leave it out, or name data/quickstart.")
    config = read_sound(options.run, "measure")
    from modernbert_train.report.inspection.print_rows import wants_color
    from modernbert_train.report.inspection.show import inspect_run

    print(inspect_run(config, options.batch or 1, options.rows or 2, color=wants_color(options.no_color)))


def plan(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `plan`, and return its call."""
    with_run(parser)
    parser.add_argument("--ranks", type=positive, default=1, help="GPUs that would train; default: 1")
    words = "kinds of GPU, the first for memory, advice and scaling; default: h100, and all for time and cost"
    parser.add_argument("--gpu", nargs="+", type=_gpu, metavar="NAME", help=words)
    words = "dollars an hour for one GPU, instead of the assumed price; may be repeated"
    parser.add_argument("--price", action="append", type=_price, default=[], metavar="NAME=DOLLARS", help=words)
    words = "median length of documents, instead of the data's"
    parser.add_argument("--median", type=positive, metavar="TOKENS", help=words)
    return _plan


def _gpu(text: str) -> str:
    from modernbert_train.plan.gpus import GPUS

    if text not in GPUS and "=" not in text:
        near = [name for name in GPUS if text.lower() in name] or difflib.get_close_matches(text.lower(), GPUS, n=1)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise argparse.ArgumentTypeError(f"{text}: an unknown GPU.{hint} Known: {', '.join(GPUS)}")
    return text


def _price(text: str) -> tuple[str, float]:
    name, _, dollars = text.partition("=")
    price = number_in(dollars)
    if _gpu(name) and not (math.isfinite(price) and price >= 0):
        raise argparse.ArgumentTypeError(f"{text}: write NAME=DOLLARS, for example h100=2.50")
    return name, price


def _plan(options: argparse.Namespace) -> None:
    words = options.gpu or []
    purpose = "assume" if options.median else "plan"
    overrides = [word for word in words if "=" in word]  # they may follow --gpu
    config = read_sound(options.run + overrides, purpose, options.ranks)
    from modernbert_train.plan.answer import answer
    from modernbert_train.plan.gpus import GPUS
    from modernbert_train.plan.make import make_plan
    from modernbert_train.plan.output import as_text
    from modernbert_train.plan.resolve import resolve
    from modernbert_train.plan.sections import sections

    named = [word for word in words if "=" not in word]
    facts = resolve(config, options.ranks, purpose=purpose).facts
    run_plan = make_plan(config, options.ranks, options.median, facts)
    arguments = (
        run_plan,
        (named or ["h100"])[0],
        named or [name for name, gpu in GPUS.items() if not gpu.rocm],
        dict(options.price),
    )
    answer_and_sections = [answer(*arguments), *sections(*arguments)]
    print(as_text(answer_and_sections))
