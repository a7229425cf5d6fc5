"""The verb for a run's checkpoints: list, verify, restore."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from modernbert_train.checkpoints.tools.selection import (
    Selection,
    find_selection,
    replica_of,
    step_from,
    verify_copies,
)
from modernbert_train.cli.parser import Call, Parser
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.text import first_line
from modernbert_train.errors import ConfigError, StorageError

_RUN = "a run's folder, or the folder of one of its checkpoints"
_STEP = "a step, such as 500, or step-00000500"


def checkpoints(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `checkpoints`, and return its call; without an action it lists."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    if isinstance(parser, Parser):
        parser.implied = "list"
    parsers = {
        name: _add(actions, name, summary)
        for name, summary in (
            ("list", "every checkpoint: step, tokens, time, size, the rule that keeps it, and its state"),
            ("verify", "read every byte of all checkpoints, or of one; exit code 74 if one is damaged"),
            ("restore", "go back to an older checkpoint; newer ones are set aside, and the next start resumes from it"),
        )
    }
    parsers["verify"].add_argument("step", nargs="?", type=_step, metavar="STEP", help=_STEP)
    parsers["restore"].add_argument("step", type=_step, metavar="STEP", help=_STEP)
    for name in ("list", "verify"):
        parsers[name].add_argument("--json", action="store_true", help="as JSON, with exact numbers")
    words = "leave the replica (checkpoint.copy_to) out"
    for name in ("list", "restore"):
        parsers[name].add_argument("--local", action="store_true", help=words)
    parsers["verify"].add_argument("--copies", action="store_true", help="read those in the replica too")
    return _call


def _add(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str) -> Parser:
    action = actions.add_parser(name, help=summary, description=f"{summary}.")
    action.add_argument("folder", type=Path, metavar="RUN", help=_RUN)
    assert isinstance(action, Parser)
    return action


def _step(text: str) -> int:
    try:
        return step_from(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: {_STEP} is expected") from None


def _call(options: argparse.Namespace) -> None:
    _ACTIONS[options.action](options)


def _list(options: argparse.Namespace) -> None:
    from modernbert_train.checkpoints.tools import checkpoint_list

    selection = find_selection(options.folder)
    config = _config(selection, warn=True)
    store, copies, problem = (None, {}, None) if options.local or config is None else replica_of(config)
    if problem is not None:
        _warn(problem)
    listed = checkpoint_list.list_checkpoints(selection, config, store, copies, only=selection.step)
    print(checkpoint_list.as_json(listed) if options.json else checkpoint_list.as_text(listed, selection))


def _verify(options: argparse.Namespace) -> None:
    from modernbert_train.checkpoints.checkpoint import verify
    from modernbert_train.checkpoints.tools import checkpoint_list

    selection = find_selection(options.folder)
    step = _one_step(selection, options.step)
    if step is not None and not options.copies:
        selection.folder(step)
    config = _config(selection, warn=True)
    listed = checkpoint_list.list_checkpoints(selection, config, verify=verify, only=step)
    print(checkpoint_list.as_json(listed) if options.json else checkpoint_list.as_text(listed, selection))
    wrong = [
        f"{selection.checkpoints / each.name}: {each.problem}"
        for each in listed
        if each.state == checkpoint_list.DAMAGED
    ]
    if options.copies:
        store, _, problem = replica_of(selection.config())
        if store is None:
            raise StorageError(problem or f"{selection.name}: checkpoint.copy_to is not set, so there are no copies.")
        wrong += verify_copies(store, step, _warn if options.json else print)
    if wrong:
        raise StorageError(
            f"{len(wrong)} damaged:\n  " + "\n  ".join(wrong) + "\nTraining passes them over; `checkpoints restore` of "
            "a step brings a whole copy of it back from the replica, if there is one."
        )


def _restore(options: argparse.Namespace) -> None:
    from modernbert_train.checkpoints.tools.restore import restore

    selection = find_selection(options.folder)
    config = _config(selection, warn=False)
    store, _, problem = (None, {}, None) if options.local or config is None else replica_of(config)
    if problem is not None:
        raise StorageError(
            f"{problem} It may hold newer checkpoints, which the next start would bring back, so nothing was changed. "
            "Give the same command again when it answers; or leave it out with --local, and start the run with "
            "checkpoint.copy_to=null."
        )
    restore(selection, options.step, store, print)


_ACTIONS = {"list": _list, "verify": _verify, "restore": _restore}


def _one_step(selection: Selection, step: int | None) -> int | None:
    if step is not None and selection.step is not None and step != selection.step:
        raise ConfigError(f"{selection.checkpoints}: steps {selection.step:,} and {step:,}. Name one.")
    return selection.step if step is None else step


def _config(selection: Selection, *, warn: bool) -> RunConfig | None:
    """Return the run's configuration; None if it cannot be read and the action does not need it."""
    if selection.run is None:
        return None
    try:
        return selection.config()
    except ConfigError as error:
        if not warn:
            raise
        _warn(f"the rules that keep checkpoints are known in part: {first_line(error)}")
        return None


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
