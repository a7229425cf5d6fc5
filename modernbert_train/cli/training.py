"""Verbs that train a run and watch it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from modernbert_train.cli.arguments import is_run, many_imports, read_run, read_sound, with_run
from modernbert_train.cli.parser import Call
from modernbert_train.core.files import errors_to, warn
from modernbert_train.core.text import plural, printable
from modernbert_train.distributed.launched import from_launcher
from modernbert_train.errors import ConfigError, StorageError


def train(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `train`, and return its call."""
    with_run(parser)
    parser.add_argument("--fresh", action="store_true", help="start from scratch; the old folder is moved aside")
    return _train


def _train(options: argparse.Namespace) -> None:
    from modernbert_train.plan.resolve import resolve_alone

    config = read_sound(options.run, "train", from_launcher("WORLD_SIZE", 1))
    from modernbert_train.report.progress import stage

    stage("checking the configuration, the data and the run's folder")
    resolved = resolve_alone(config, fresh=options.fresh)
    stage("loading torch and Composer")
    with many_imports():
        from modernbert_train.train.session import train

    train(config, fresh=options.fresh, resolved=resolved)


def report(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `report`, and return its call."""
    words = "folders of runs, to list them; a run, or its YAML files and overrides, to draw it; several runs' folders"
    parser.add_argument("run", nargs="*", metavar="RUN [KEY=VALUE]", help=f"{words}, to compare them; default: runs")
    parser.add_argument("--list", action="store_true", help="list runs, also those that are named by their own folders")
    parser.add_argument("--json", action="store_true", help="of a list: as JSON, with exact numbers")
    words = "the page; default: report.html in the run's folder, or comparison.html in the first run's parent folder"
    parser.add_argument("--out", type=Path, metavar="FILE", help=words)
    words = "show the page in a browser while the runs train; RUN may also be a folder of runs"
    parser.add_argument("--serve", action="store_true", help=words)
    words = "with --serve; default: 8421, or a free one if it is taken"
    parser.add_argument("--port", type=_port, metavar="N", help=words)
    words = "with --serve; default: 127.0.0.1, reachable from this machine only. There is no password"
    parser.add_argument("--host", metavar="ADDRESS", help=words)
    return _report


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: a port from 0 to 65535 is expected")
    return int(text)


def _report(options: argparse.Namespace) -> None:
    named = [Path(word) for word in options.run or ["runs"]]
    if options.serve:
        if options.out is not None:
            raise ConfigError(f"report --serve --out {options.out}: a page is either served or written. Leave one out.")
        from modernbert_train.report.serve import LOOPBACK, serve

        serve(named, options.host or LOOPBACK, options.port)
        return
    if options.port is not None or options.host is not None:
        raise ConfigError("report: --port and --host need --serve, which is missing.")
    if options.list or options.json or not options.run or all(each.is_dir() and not is_run(each) for each in named):
        if options.out is not None:
            raise ConfigError(f"report --out {options.out}: a list is printed. Name a run to draw, or leave --out out.")
        _list(named, as_json=options.json, by_name=bool(options.run))
        return
    folders = [each for each in named if each.is_dir()]
    if len(folders) > 1:
        if len(folders) < len(options.run):
            raise ConfigError(f"report {' '.join(options.run)}: several runs are compared by their folders only.")
        from modernbert_train.report.page import write_comparison
        from modernbert_train.report.run_list import list_runs
        from modernbert_train.report.seeds import seed_lines

        page = write_comparison(folders, options.out or folders[0].parent / "comparison.html", newest_valid)
        print("\n".join([*seed_lines(list_runs(folders)[0]), printable(str(page))]))
        return
    from modernbert_train.report.page import write_report

    config = read_run(options.run)
    print(printable(str(write_report(Path(config.folder), options.out, newest_valid))))


def newest_valid(run: Path) -> tuple[str, str]:
    """Return, for the report of a run, the checkpoint that training would resume from, and a note on damaged ones."""
    from modernbert_train.checkpoints.verified import newest_of, print_choice, verify_files

    none = "not one of those there is valid"
    with errors_to(warn, StorageError):
        newest, passed_over = newest_of(run / "checkpoints", verify_files)
        none = "no checkpoint in the run's folder"
        if newest is not None:
            print_choice(newest, passed_over)
            damaged = f"; {plural(len(passed_over), 'newer one')} damaged" if passed_over else ""
            return f"step {newest.step:,}", f"{newest.state.tokens:,} tokens{damaged}"
    return "none", none


def _list(folders: list[Path], *, as_json: bool, by_name: bool) -> None:
    """Print the runs of folders; a folder without runs is an error if a user named it, in a table."""
    from modernbert_train.report import run_list
    from modernbert_train.report.seeds import seed_lines

    runs, wrong = run_list.list_runs(folders)
    for line in wrong:
        print(f"warning: {line}", file=sys.stderr)
    if as_json:
        print(run_list.as_json(runs))
    elif not runs:
        none = f"report {' '.join(map(str, folders))}: no runs there. A run is a folder with a config.yaml, as `train` "
        none += "makes it; name a run, or the folder that holds runs."
        if by_name:
            raise ConfigError(none)
        print(printable(none))
    else:
        print("\n".join([run_list.as_text(runs), *seed_lines(runs)]))
