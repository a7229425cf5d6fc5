"""`python -m modernbert_train VERB`: arguments in, one call out.

Nothing heavy is imported before the configuration has been checked, so a mistake is told within a second.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from modernbert_train import __version__
from modernbert_train.config.check import check, check_model
from modernbert_train.config.load import load_model, load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.errors import RunError, StoppedEarly

EPILOG = """\
RUN is one or more YAML files, merged left to right, or the folder of a run. Overrides are section.key=value.

  python -m modernbert_train check yamls/quickstart.yaml optim.lr=1e-3
  python -m modernbert_train train yamls/quickstart.yaml
  python -m modernbert_train eval runs/quickstart
  python -m modernbert_train export runs/quickstart
  python -m modernbert_train fill runs/quickstart/hf "def __init__([MASK], name):"
  python -m modernbert_train grow --from answerdotai/ModernBERT-base --to yamls/model/large.yaml --out grown

Training goes on from the newest whole checkpoint of the run's folder by itself. Exit codes: 0 finished, 64 wrong
arguments, 65 bad data, 70 internal, 74 disk or checkpoint, 75 saved and please start again, 78 wrong configuration.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the process's exit code."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (any(word.startswith("-") for word in rest) or not hasattr(options, "run")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.run += rest  # overrides may also stand after an option
    try:
        options.call(options)
    except RunError as error:
        print(error if isinstance(error, StoppedEarly) else f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
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

    verb = with_run(add("train", _train, "train a run, or go on with it"))
    verb.add_argument("--fresh", action="store_true", help="start from scratch; what the folder holds is put aside")
    verb = with_run(add("check", _check, "everything the configuration alone can tell, without torch"))
    verb.add_argument("--ranks", type=_positive, default=1, help="processes that would train")
    with_run(add("eval", _eval, "held-out loss and accuracy of the newest checkpoint, beside the unigram baseline"))
    verb = with_run(add("export", _export, "write the newest checkpoint as a Hugging Face model"))
    verb.add_argument("--out", type=Path, help="folder of the model; default: the run's folder/hf")
    verb = add("grow", _grow, "enlarge a model by center tiling, for model.init_from of a run")
    words = "a run's folder, a checkpoint, a Hugging Face folder or hub id"
    verb.add_argument("--from", dest="source", required=True, metavar="MODEL", help=words)
    words = "YAML files with the larger model: section, a run's or one of yamls/model, and overrides"
    verb.add_argument("--to", nargs="+", required=True, metavar="YAML [KEY=VALUE]", help=words)
    verb.add_argument("--mode", choices=("fitted", "paper"), help="default: model.grow_mode, which is fitted")
    verb.add_argument("--out", type=Path, required=True, help="folder of the grown model")
    with_run(add("report", _report, "draw report.html from the run's metrics"))
    verb = add("fill", _fill, "print the five likeliest tokens for each [MASK]")
    verb.add_argument("model", type=Path, help="folder of an exported model")
    verb.add_argument("text", nargs="+", help="text with one [MASK]")
    add("doctor", _doctor, "versions, kernels, memory and disk, as a block for a bug report")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: a whole number above 0 is expected")
    return int(text)


def read_run(arguments: list[str]) -> RunConfig:
    """The configuration named on a command line: YAML files or one run folder, and overrides."""
    return load_run(*_files_and_overrides(arguments))


def _files_and_overrides(arguments: list[str]) -> tuple[list[Path], list[str]]:
    names = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    return [Path(name) / "config.yaml" if Path(name).is_dir() else Path(name) for name in names], overrides


def _train(options: argparse.Namespace) -> None:
    config = read_run(options.run)
    check(config)
    from modernbert_train.data.check import check_data

    check_data(config)
    from modernbert_train.train.build import train

    train(config, fresh=options.fresh)


def _check(options: argparse.Namespace) -> None:
    config = read_run(options.run)
    check(config, options.ranks)
    from modernbert_train.config.describe import describe
    from modernbert_train.data.check import check_data

    check_data(config)
    print(describe(config))


def _eval(options: argparse.Namespace) -> None:
    config = read_run(options.run)
    check(config)
    from modernbert_train.train.finished import evaluate_run

    evaluate_run(config)


def _export(options: argparse.Namespace) -> None:
    config = read_run(options.run)
    check(config)
    from modernbert_train.train.finished import export_run

    export_run(config, options.out)


def _grow(options: argparse.Namespace) -> None:
    mode = [f"model.grow_mode={options.mode}"] if options.mode else []
    files, overrides = _files_and_overrides(options.to)
    model = load_model(files, [*overrides, *mode])
    check_model(model)
    from modernbert_train.train.grow import grow_model

    grow_model(options.source, model, options.out)


def _report(options: argparse.Namespace) -> None:
    config = read_run(options.run)
    from modernbert_train.report import write_report

    print(write_report(Path(config.folder)))


def _fill(options: argparse.Namespace) -> None:
    from modernbert_train.export.fill import fill

    print(fill(options.model, options.text))


def _doctor(options: argparse.Namespace) -> None:
    from modernbert_train.doctor import report

    print(report())


if __name__ == "__main__":
    sys.exit(main())
