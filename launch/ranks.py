"""Start this machine's ranks with torch's elastic agent, watch over them, and report how they ended.

The agent meets the other machines, starts the processes and ends them together. This module adds: signals are
forwarded as requests to save, frozen processes are killed and machines exchange how their ranks ended (rank_watch.py),
and the first of all errors is printed last and gives the exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from launch.health import refuse_sick_gpus
from launch.rank_watch import NO_SIGN_OF_LIFE, STOPPED, RankWatch, how_it_ended, rank_processes
from launch.rendezvous import Leaving, rendezvous
from launch.topology import Topology
from modernbert_train.core.torch_internals import exit_barrier
from modernbert_train.distributed import scratch
from modernbert_train.distributed.fail_together import entry_text
from modernbert_train.distributed.launched import BEATS_FOLDER, STORE, note_blamed
from modernbert_train.distributed.stop_signals import STOP_SIGNALS, handled_by, say, say_stopped
from modernbert_train.errors import HangError, RunError, StartAgain, StoppedEarly
from modernbert_train.plan.resolve import hand_over

ONE_REQUEST_SECONDS = 1.0  # signals this close are one request, sent to several processes or by several senders


def start_ranks(
    topology: Topology,
    arguments: list[str],
    *,
    run_id: str,
    timeout_seconds: float,
    rendezvous_seconds: float,
    on_gpus: bool = False,
    advice: str = "",
) -> int:
    """Run `python -m modernbert_train ...` on this machine's ranks until they have ended.

    Args:
        topology: this machine among the others.
        arguments: of the command.
        run_id: the same on all machines of one run.
        timeout_seconds: of the run; see heartbeat.py.
        rendezvous_seconds: how long to wait for the other machines.
        on_gpus: check the GPUs first.
        advice: printed if a machine may be lost.

    Returns:
        The exit code of the rank that failed first, or 0. Its error is printed last.

    Raises:
        SystemExit: stopped by a signal before any rank started.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its errors would bury the ranks' own
    last_message, starts = "", 1
    while True:
        here = run_id if starts == 1 else f"{run_id}-{starts}"
        code, message, asked = _start_once(topology, arguments, here, timeout_seconds, rendezvous_seconds, on_gpus)
        if advice and code in (RunError.exit_code, HangError.exit_code):
            print(advice, file=sys.stderr)
        if message:
            print(f"error: {message}", file=sys.stderr, flush=True)
        if code != StartAgain.exit_code or not message or asked:
            return code
        if message == last_message:  # no effect: the rank that noted it sees another folder than rank 0
            return RunError.exit_code
        arguments = [word for word in arguments if word != "--fresh"]  # the note is in the run's folder
        hand_over(None)  # the run's folder has changed, so rank 0 resolves it again
        last_message, starts = message, starts + 1


def _start_once(
    topology: Topology,
    arguments: list[str],
    run_id: str,
    timeout_seconds: float,
    rendezvous_seconds: float,
    on_gpus: bool,
) -> tuple[int, str, bool]:
    """Start all ranks once; return the exit code, the last message, and True if a signal has requested a stop."""
    with _Signals() as signals:
        folder = tempfile.mkdtemp(dir=scratch.folder())  # removed with it, when the launcher ends
        beats = Path(folder, "beats")
        beats.mkdir()
        os.environ[BEATS_FOLDER] = str(beats)
        # torch's agent would have NCCL aborted when a process ends, which can hang where the others do not abort too
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        watch = RankWatch(beats, timeout_seconds, topology, lambda: signals.first is not None)
        try:
            with rendezvous(topology, run_id, rendezvous_seconds, signals.leaving) as meeting:
                watch.holds_store = meeting.holds_store
                os.environ[STORE] = str(meeting.place["rdzv_endpoint"])
                if meeting.interface is not None:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
                config = LaunchConfig(
                    min_nodes=topology.nodes,
                    max_nodes=topology.nodes,
                    nproc_per_node=topology.ranks_per_node,
                    run_id=run_id,
                    rdzv_backend="c10d",
                    max_restarts=0,  # the exit code tells the scheduler whether a restart can help
                    logs_specs=DefaultLogsSpecs(log_dir=folder),
                    signals_to_handle="SIGQUIT",  # on other signals the agent would not let the ranks finish
                    **meeting.place,  # type: ignore[arg-type]
                )
                watch.connect(meeting.store)
                command = elastic_launch(config, sys.executable)
                code, message = _run(command, arguments, watch, signals, on_gpus)
        except (RendezvousError, TimeoutError) as error:
            code, message = RunError.exit_code, _lost_meeting(topology, error)
        finally:
            signals.over = True
            watch.stop()
    return code, message, signals.first is not None


def _run(
    command: elastic_launch,
    arguments: list[str],
    watch: RankWatch,
    signals: _Signals,
    on_gpus: bool,
) -> tuple[int, str]:
    try:
        if on_gpus:
            refuse_sick_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        with exit_barrier(watch.finish):
            command("-m", "modernbert_train", *arguments)
        watch.finished_at = None  # the agent has returned; later waits have their own limits
        signals.leaving.finished = True
        return 0, ""
    except HangError as error:
        _report(watch, error.exit_code, str(error), blames=True)
        return error.exit_code, str(error)
    except ChildFailedError as error:
        watch.disconnect()
        code, message = outcome(error.failures, watch.frozen, signals, watch.first_error, watch.deaf)
        if message and code != StoppedEarly.exit_code:
            was_killed = any(f.exitcode < 0 and f.exitcode not in STOPPED for f in error.failures.values())
            _report(watch, code, message, blames=was_killed)
        return code, message
    finally:
        signals.over = True
        watch.disconnect()


def _report(watch: RankWatch, code: int, message: str, *, blames: bool) -> None:
    """Tell the other machines, and note the machine to blame for the scheduler."""
    watch.disconnect()
    watch.post_outcome(code, message, blames=blames)
    if watch.first_error is not None and watch.first_error["blames"]:
        note_blamed(watch.first_error["host"])


def outcome(
    failures: Mapping[int, ProcessFailure],
    frozen: set[int],
    signals: _Signals,
    first_error: dict[str, Any] | None = None,
    deaf: Collection[int] = (),
) -> tuple[int, str]:
    """Return the exit code of the launcher, and its last message.

    Args:
        failures: how this machine's ranks ended, by rank, including ranks ended because of others.
        frozen: ranks that were killed because they gave no sign of life.
        signals: received by this process.
        first_error: the first error of all machines.
        deaf: ranks that were killed because they did not react to it.
    """
    host = socket.gethostname()
    codes = [failure.exitcode for failure in failures.values()]
    if signals.second is not None:
        return 128 + signals.second, "a second signal: ended at once, without a checkpoint"
    wrong = {rank: f for rank, f in failures.items() if f.exitcode not in (StoppedEarly.exit_code, *STOPPED)}
    # after one rank failed the agent stops the others, and some of them may have obeyed with 75;
    # a rank that is too slow after a stop from outside is killed by the agent, and has saved with the others
    slow = signals.first is not None and first_error is None
    obeyed = not wrong or (slow and all(f.exitcode == -signal.SIGKILL for f in wrong.values()))
    again = [f for f in failures.values() if f.exitcode == StartAgain.exit_code and f.error_file_data.get("timestamp")]
    if again and obeyed and signals.first is None:
        return StartAgain.exit_code, str(again[0].message)
    if StoppedEarly.exit_code in codes and obeyed:
        return StoppedEarly.exit_code, ""
    if signals.first is not None and all(code in STOPPED for code in codes):
        return StoppedEarly.exit_code, "stopped before training had begun; there was nothing to save"
    for rank in sorted(frozen & failures.keys()):
        if first_error is not None and first_error["rank"] not in frozen:
            break
        return HangError.exit_code, f"rank {rank} on {host} {NO_SIGN_OF_LIFE}"
    killed = [r for r, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM and r not in deaf]
    if first_error is not None and first_error["rank"] not in killed:
        return first_error["code"], entry_text(first_error)
    for rank in killed:  # the agent lists them in the order of their ends, and kills ranks that do not obey
        how = how_it_ended(failures[rank].exitcode).removeprefix("is gone: it ")
        return RunError.exit_code, f"rank {rank} on {host} {how}"
    reported = {rank: failure for rank, failure in failures.items() if failure.error_file_data.get("timestamp")}
    rank, first = min((reported or wrong or failures).items(), key=lambda item: item[1].timestamp)
    code = first.exitcode if first.exitcode > 0 else RunError.exit_code
    if reported:
        return code, str(first.message)
    return code, f"rank {rank} on {host} ended first, with exit code {first.exitcode}; its error is above"


def _lost_meeting(topology: Topology, error: Exception) -> str:
    cause = error.__cause__ or error
    return (
        f"lost {topology.endpoint}, where {topology.nodes} machines meet, or not all of them came ({cause}). Look at "
        "the output of the others; then start the same command again on each."
    )


class _Signals:
    """Signal handlers: SIGINT, SIGTERM, SIGUSR1 and SIGHUP let the ranks save and end, and a second one ends them.

    Attributes:
        first, second: numbers of the received signals.
        over: the ranks have ended, so signals only shorten the wait for other machines.
        leaving: how this machine leaves the others.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.second: int | None = None
        self.over = False
        self.leaving = Leaving()
        self._asked = 0.0
        hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)  # nohup ignores it
        self._handled = handled_by(self._on_signal, (*STOP_SIGNALS, *hang_up))

    def __enter__(self) -> _Signals:
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.over:
            self.leaving.hurried = True
            return
        if self.first is None:
            self.first, self._asked = number, now
        elif now - self._asked < ONE_REQUEST_SECONDS:
            return
        else:
            self.second = number
        pids = rank_processes()
        if not pids:
            say_stopped(number)
            raise SystemExit(StoppedEarly.exit_code)  # caught by no handler, and it closes all open resources
        if self.second is None:  # the ranks get SIGTERM, which they handle from their first line on
            say(f"{signal.Signals(number).name}: the ranks finish their step, then save; once more ends at once.")
        for pid in pids:
            os.kill(pid, signal.SIGTERM if self.second is None else signal.SIGKILL)
