"""Start this machine's ranks with torch's elastic agent, watch over them, and report how they ended.

The agent meets the other machines, starts the processes and ends them together. This module adds: signals are
forwarded as requests to save, frozen processes are found and killed, machines exchange how their ranks ended
(launcher_sync.py), and the first of all errors is printed last and gives the exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from launch.health import refuse_sick_gpus
from launch.launcher_sync import STOPPED, STUCK_SECONDS, LauncherSync, exit_code, how_it_ended, ranks_in
from launch.rendezvous import LINGER_SECONDS, Leaving, rendezvous, warn_unanswered
from launch.topology import Topology
from modernbert_train.core.read_json import read_json
from modernbert_train.core.torch_internals import exit_barrier
from modernbert_train.distributed import scratch
from modernbert_train.distributed.fail_together import entry_text
from modernbert_train.distributed.heartbeat import silence_limit
from modernbert_train.distributed.launched import BEATS_FOLDER, STORE, note_blamed
from modernbert_train.distributed.stop_signals import STOP_SIGNALS, handled_by, say, say_stopped
from modernbert_train.errors import HangError, RunError, StartAgain, StoppedEarly
from modernbert_train.plan.resolve import HANDED_OVER

ANSWER_SECONDS = 6.0  # once all ranks have ended, a launcher needs less, unless the store does not answer
FROZEN_MARGIN_SECONDS = 5.0  # other ranks, if any are left, find a frozen one first; only then the launcher does
NO_SIGN_OF_LIFE = "gave no sign of life and was killed: it was frozen, or cut off from the others"
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
        if message == last_message:  # the rank that noted it sees another folder than rank 0
            return RunError.exit_code
        arguments = [word for word in arguments if word != "--fresh"]  # the note is in the run's folder
        os.environ.pop(HANDED_OVER, None)  # the run's folder has changed, so rank 0 resolves it again
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
        frozen = FrozenRanks(beats, silence_limit(timeout_seconds), timeout_seconds, topology)
        try:
            with rendezvous(topology, run_id, rendezvous_seconds, signals.leaving) as meeting:
                frozen.holds_store = meeting.holds_store
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
                    signals_to_handle="SIGQUIT",  # of the others, the agent would not let the ranks finish
                    **meeting.place,  # type: ignore[arg-type]
                )
                sync = LauncherSync(meeting.store, beats, topology.ranks_per_node, lambda: signals.first is not None)
                command = elastic_launch(config, sys.executable)
                code, message = _run(command, arguments, sync, frozen, signals, on_gpus)
        except (RendezvousError, TimeoutError) as error:
            code, message = RunError.exit_code, _lost_meeting(topology, error)
        finally:
            signals.over = True
            frozen.stop()
    return code, message, signals.first is not None


def _run(
    command: elastic_launch,
    arguments: list[str],
    sync: LauncherSync,
    frozen: FrozenRanks,
    signals: _Signals,
    on_gpus: bool,
) -> tuple[int, str]:
    try:
        if on_gpus:
            refuse_sick_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        with exit_barrier(frozen.finish):
            command("-m", "modernbert_train", *arguments)
        frozen.finished_at = None  # the agent has returned; later waits have their own limits
        signals.leaving.finished = True
        return 0, ""
    except HangError as error:
        _report(sync, error.exit_code, str(error), blames=True)
        return error.exit_code, str(error)
    except ChildFailedError as error:
        sync.stop()
        code, message = outcome(error.failures, frozen.killed, signals, sync.first_error, sync.killed)
        if message and code != StoppedEarly.exit_code:
            was_killed = any(f.exitcode < 0 and f.exitcode not in STOPPED for f in error.failures.values())
            _report(sync, code, message, blames=was_killed)
        return code, message
    finally:
        signals.over = True
        sync.stop()


def _report(sync: LauncherSync, code: int, message: str, *, blames: bool) -> None:
    """Tell the other machines, and note the machine to blame for the scheduler."""
    sync.stop()
    sync.post_outcome(code, message, blames=blames)
    if sync.first_error is not None and sync.first_error["blames"]:
        note_blamed(sync.first_error["host"])


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


def rank_processes() -> list[int]:
    """Return the ranks among this process's children: the agent starts each in a new session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            _, _, rest = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            parent, session = int(rest.split()[1]), int(rest.split()[3])
            if parent == os.getpid() and session == int(path.parent.name):
                found.append(session)
    return found


class FrozenRanks:
    """Watchdog that kills this machine's ranks that give no sign of life; the agent then ends the others.

    A frozen process obeys no other signal, and its launcher would wait for it for ever if it is alone on its machine.
    If the launcher itself then waits for a machine that does not answer, the watchdog ends it too, after 15 seconds.
    It does the same some seconds after all ranks have ended, with an error or not: torch's agent then waits without a
    limit for a store that is frozen or cut off.

    Args:
        folder: of the ranks' heartbeat files, each named by its rank and containing its process id.
        seconds: without a heartbeat until a rank counts as frozen.
        seconds_to_end: the same for a rank that has left the others, and sends no more heartbeats.
        topology: this machine among the others.

    Attributes:
        killed: ranks that were killed.
        holds_store: True if this machine holds the store; then it answers, and the others need it for a while.
        finished_at: time at which all ranks were first seen finished; None before, and after the agent has returned.
    """

    def __init__(self, folder: Path, seconds: float, seconds_to_end: float, topology: Topology) -> None:
        self.killed: set[int] = set()
        self.holds_store = False
        self.finished_at: float | None = None
        self._topology = topology
        self._folder = folder
        self._seconds, self._seconds_to_end = seconds + FROZEN_MARGIN_SECONDS, seconds_to_end + FROZEN_MARGIN_SECONDS
        self._seen: dict[int, tuple[int, float]] = {}  # time of the last heartbeat, and time when it was seen
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def finish(self) -> None:
        """Record that the agent has seen all ranks of this machine finish."""
        self.finished_at = time.monotonic()

    def _watch(self) -> None:
        ended: float | None = None  # time at which all ranks were first seen ended, with an error reported
        while not self._over.wait(1.0):
            ranks = ranks_in(self._folder)
            errors = [] if not ranks or any(rank.runs for rank in ranks) else self._errors()
            ended = (ended or time.monotonic()) if errors else None
            patience = STUCK_SECONDS + LINGER_SECONDS if self.holds_store else ANSWER_SECONDS
            if ended is not None and time.monotonic() - ended > patience:
                first = min(errors, key=lambda each: each["timestamp"])
                print(f"error: {first['message']}", file=sys.stderr, flush=True)
                os._exit(first["code"])
            if ranks and all(not rank.runs and exit_code(rank.pid) == 0 for rank in ranks):
                self.finished_at = self.finished_at or time.monotonic()  # before the agent has seen it
            finished = self.finished_at
            if finished is not None and time.monotonic() - finished > STUCK_SECONDS and not self.holds_store:
                warn_unanswered(self._topology)
                os._exit(0)
            for rank in ranks:
                touched, now = (self._folder / str(rank.number)).stat().st_mtime_ns, time.monotonic()
                limit = self._seconds_to_end if rank.left else self._seconds
                if self._seen.get(rank.number, (0, 0.0))[0] != touched:
                    self._seen[rank.number] = (touched, now)
                elif now - self._seen[rank.number][1] < limit or not rank.runs or rank.number in self.killed:
                    continue
                elif rank.pid in rank_processes():
                    self.killed.add(rank.number)
                    os.kill(rank.pid, signal.SIGKILL)
            if self.killed and self._over.wait(STUCK_SECONDS):
                return
            if self.killed:
                for pid in rank_processes():
                    os.kill(pid, signal.SIGKILL)
                numbers = ", ".join(map(str, sorted(self.killed)))
                print(f"error: rank {numbers} on {socket.gethostname()} {NO_SIGN_OF_LIFE}", file=sys.stderr, flush=True)
                os._exit(HangError.exit_code)

    def _errors(self) -> list[dict[str, Any]]:
        """Read the errors that this machine's ranks have ended with; see fail_together.py."""
        found = []
        for path in self._folder.parent.rglob("error.json"):
            with suppress(OSError, ValueError):  # being written
                found.append(read_json(path))
        return [each for each in found if isinstance(each, dict) and {"message", "code", "timestamp"} <= each.keys()]
