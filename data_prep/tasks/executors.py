"""Executors of the stages' tasks: this machine, several machines with a shared folder, Slurm or Ray.

The executors are datatrove's: they chain a task's steps, keep a log and statistics of each task, and mark it as
completed, so that the same command resumes after a kill. `LocalTasks` differs from datatrove's local executor in its
processes (see tasks/task_workers.py); no two processes ever do the same task, and it prints nothing.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.utils.logging import logger
from loguru._better_exceptions import ExceptionFormatter

from data_prep.tasks.task_workers import Documents, Workers
from data_prep.tasks.work import Work, read_work
from data_prep.write.workspace import Part, is_at_work
from modernbert_train.config.tools.prepare import ExecutorConfig
from modernbert_train.core.installed import path_of_children
from modernbert_train.errors import ConfigError, RunError

logger.disable("datatrove")
# each log of each task looks up Python's folder, 36 times: half the time of a small corpus
ExceptionFormatter._get_lib_dirs = staticmethod(cache(ExceptionFormatter._get_lib_dirs))  # type: ignore[method-assign]
_QUIET = 1  # any local rank but 0 prints only errors to the terminal
_WAIT_SECONDS = 2.0
_PROCESS_BYTES = 1 << 24  # a process imports its modules in 4 s, the time to tokenise this much


@dataclass(frozen=True)
class Stage:
    """Tasks of one kind, which follow the stage before.

    Attributes:
        name: of the stage.
        tasks: number of tasks.
        steps: of datatrove's pipeline, the same for every task.
        documents: counter for all tasks, if documents are counted; see tasks/stage_progress.py.
    """

    name: str
    tasks: int
    steps: Sequence[Any] = ()
    documents: Callable[[], Documents] | None = None


class LocalTasks(LocalPipelineExecutor):
    """The tasks of one stage, on this machine.

    Args:
        stage: the stage.
        work: the folder.
        part: (i, n) takes only the i-th of n ranges of the tasks, from 1.
    """

    def __init__(self, stage: Stage, work: Work, part: Part) -> None:
        tasks = stage.tasks
        first, end = tasks * (part[0] - 1) // part[1], tasks * part[0] // part[1]
        self._name, self._lock_file = stage.name, work.stage(stage.name) / "lock"
        super().__init__(
            list(stage.steps),
            tasks=tasks,
            logging_dir=str(work.stage(stage.name)),
            local_tasks=end - first,
            local_rank_offset=first,
        )

    def run_with(self, workers: Workers, documents: Documents | None) -> None:
        """Run the tasks that are not completed."""
        mine = range(self.local_rank_offset, self.local_rank_offset + self.local_tasks)
        workers.run(self, self.get_incomplete_ranks(mine), self._name, len(mine), documents)

    def run_task(self, rank: int) -> None:
        """Run one task, unless it is completed."""
        self._lock_file.parent.mkdir(parents=True, exist_ok=True)
        with self._lock_file.open("a+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX, 1, rank)  # released when the process dies
            logger.enable("datatrove")
            logger.disable("datatrove.executor")  # repeats this program's messages
            try:
                self._run_for_rank(rank, _QUIET)
            finally:
                logger.disable("datatrove")


def num_workers(work: Work, config: ExecutorConfig) -> int:
    """Return the number of local processes: executor.workers, or one per core, or fewer for a small corpus."""
    return config.workers or min(len(os.sched_getaffinity(0)), 1 + sum(work.sizes) // _PROCESS_BYTES)


def is_alone(work: Work, config: ExecutorConfig) -> bool:
    """Return True if a task may use every core, because no other task runs at the same time."""
    return config.name == "local" and config.workers is None and num_workers(work, config) == 1


def run_local(stages: list[Stage], work: Work, number: int, part: Part, is_done: Callable[[], bool]) -> None:
    """Run all stages on this machine, or this machine's part of them.

    Args:
        stages: in order.
        work: the folder.
        number: of processes, see `num_workers`.
        part: (i, n) of n machines that share the folder; each stage waits for the other machines.
        is_done: returns True if the dataset is complete; called if the work folder has gone.
    """
    with Workers(number) as workers:
        for stage in stages:
            executor = LocalTasks(stage, work, part)
            executor.run_with(workers, None if stage.documents is None else stage.documents())
            printed = ""
            while missing := executor.get_incomplete_ranks():
                if read_work(work.folder) is None:  # the machine that merges removes the work
                    if is_done():
                        return
                    raise RunError(
                        f"{work.folder}: the list of tasks is gone. Give the same command again on every machine."
                    )
                if (failure := work.failure()) is not None:
                    raise RunError(f"another machine failed: {failure}")
                if (text := _waits(stage, missing, work, part)) != printed:
                    printed = text
                    print(text, file=sys.stderr, flush=True)
                time.sleep(_WAIT_SECONDS)


def _waits(stage: Stage, missing: Sequence[int], work: Work, part: Part) -> str:
    """Describe which parts are missing, and which of them no machine does."""
    num_parts = part[1]
    whose = sorted(
        {next(i for i in range(1, num_parts + 1) if rank < stage.tasks * i // num_parts) for rank in missing}
    )
    idle = [i for i in whose if i != part[0] and not is_at_work(work.folder, (i, num_parts))]
    text = f"{stage.name}: waits for part {', '.join(f'{i}/{num_parts}' for i in whose)}"
    if not idle:
        return text
    return (
        f"{text}. No machine does {', '.join(f'--part {i}/{num_parts}' for i in idle)}: start the same command with it"
    )


def submit(stages: list[Stage], work: Work, config: ExecutorConfig) -> None:
    """Hand all stages to Slurm, which runs them later, or to Ray, which runs them now.

    Raises:
        ConfigError: datatrove's executor does not know an option.
    """
    executor: PipelineExecutor | None = None
    os.environ["PYTHONPATH"] = path_of_children()
    for stage in stages:
        options = {
            "pipeline": list(stage.steps),
            "tasks": stage.tasks,
            "workers": config.workers or -1,
            "logging_dir": str(work.stage(stage.name)),
            "depends": executor,
            **config.options,
        }
        if config.name == "slurm":
            options = {"job_name": f"prepare-{stage.name}", **options}
        executor = _executor_class(config)(**options)
    assert executor is not None
    executor.run()


def _executor_class(config: ExecutorConfig) -> Any:
    from datatrove.executor.ray import RayPipelineExecutor
    from datatrove.executor.slurm import SlurmPipelineExecutor

    kind = SlurmPipelineExecutor if config.name == "slurm" else RayPipelineExecutor
    parameters = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    if unknown := [key for key in config.options if key not in parameters]:
        raise ConfigError(
            f"executor.options.{unknown[0]}: datatrove's {kind.__name__} has no such argument. Known here: "
            f"{', '.join(parameters)}."
        )
    return kind
