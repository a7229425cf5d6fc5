"""Many runs from one YAML, and the best of them: sweep SWEEP.yaml [key=value ...]

    modernbert-train sweep yamls/sweeps/mask_rate.yaml                  # run it, or resume it
    modernbert-train sweep yamls/sweeps/mask_rate.yaml --results        # table, importance, page, best YAML

Every such process is a worker; start or stop workers at any time, on any machines that share the folder and the
storage. Trials that are stopped or lost resume from their checkpoints. docs/sweeps.md says more.

Exit codes are the same as for a run: 0 all trials are over, 75 stopped and saved, 78 configuration, 65 data, 74 disk or
database; of failed trials the code of the first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from modernbert_train.cli.parser import Parser
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.sweep import SweepConfig
from modernbert_train.core.installed import require
from modernbert_train.core.text import printable
from modernbert_train.errors import exit_code_of


def main(arguments: list[str] | None = None) -> int:
    """Run a sweep, or show it; returns the process's exit code."""
    options = make_parser().parse_intermixed_args(arguments)
    if options.retry and options.results:
        make_parser().error("--results runs nothing, and --retry repeats trials. Leave one out.")
    return exit_code_of(lambda: _sweep(options))


def _sweep(options: argparse.Namespace) -> None:
    sweep = read_sweep(options.sweep)
    require("sweep", "optuna")
    run_sweep(sweep, work=not options.results, show=not options.worker, retry=options.retry)


def make_parser() -> Parser:
    """Return the parser of the verb's arguments."""
    parser = Parser(prog="modernbert-train sweep", description=__doc__)
    parser.add_argument("sweep", nargs="+", metavar="SWEEP [KEY=VALUE]", help="YAML files of the sweep, overrides")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--results", action="store_true", help="show the results so far; runs nothing")
    action.add_argument("--worker", action="store_true", help="run one worker without the final summary")
    parser.add_argument("--retry", action="store_true", help="repeat trials that have failed")
    return parser


def read_sweep(words: list[str]) -> SweepConfig:
    """Read the spec named on a command line: YAML files and overrides. `make_space` checks it.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value has another type.
    """
    files = [Path(word) for word in words if "=" not in word]
    return load_typed(SweepConfig, files, [word for word in words if "=" in word])


def run_sweep(sweep: SweepConfig, *, work: bool = True, show: bool = True, retry: bool = False) -> None:
    """Work on the sweep until it is over.

    Args:
        sweep: the spec.
        work: run trials; otherwise only show the results so far.
        show: run as many trials at a time as the spec says and show the results; otherwise one, and show nothing.
        retry: repeat trials that have failed.

    Raises:
        RunError: see `Worker` and `raise_failed`.
    """
    from launch.sweeps.space import make_space
    from launch.sweeps.sweep_results import raise_failed, show_results
    from launch.sweeps.worker import Worker

    space = make_space(sweep)
    if work:
        Worker(space, workers=sweep.workers if show else 1).run(retry=retry)
    if show:
        print(printable(show_results(space)), flush=True)
    raise_failed(space)


if __name__ == "__main__":
    sys.exit(main())
