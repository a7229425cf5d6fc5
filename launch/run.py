"""Start a run on several processes of this machine: one YAML, checked first, then torchrun.

    python launch/run.py yamls/quickstart.yaml --ranks 2 distributed.strategy=fsdp2

The configuration is loaded and checked before any process starts. Without --ranks there is one process per GPU, or
one on a machine without GPUs. torchrun starts the ranks and ends them together; whoever prefers it can call it with
`-m modernbert_train train` and the same arguments.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from modernbert_train.__main__ import read_run  # noqa: E402
from modernbert_train.config.check import check  # noqa: E402
from modernbert_train.data.check import check_data  # noqa: E402
from modernbert_train.errors import RunError, StoppedEarly  # noqa: E402

SHUTDOWN_SECONDS = "600"  # how long ranks may take to finish a step and save after a signal


def main(arguments: list[str] | None = None) -> int:
    """Check the run and start it; returns the exit code of the first rank that failed, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", metavar="RUN [KEY=VALUE]", help="YAML files or a run's folder, overrides")
    parser.add_argument("--ranks", type=int, help="processes; default: one per GPU, or one")
    parser.add_argument("--fresh", action="store_true", help="start from scratch; the old folder is put aside")
    options = parser.parse_intermixed_args(arguments)
    num_ranks = options.ranks or count_gpus() or 1
    try:
        config = read_run(options.run)
        check(config, num_ranks)
        check_data(config)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return launch(num_ranks, ["train", *options.run, *(["--fresh"] if options.fresh else [])])


def launch(num_ranks: int, arguments: list[str]) -> int:
    """Run `python -m modernbert_train ...` on this machine's ranks with torchrun's agent.

    A signal to this process is passed to the ranks, which save and end. The exit code is that of the first rank that
    failed, so that schedulers can act on it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"modernbert-train-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGUSR1",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "modernbert_train", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} ended first, with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException:
        return StoppedEarly.exit_code
    return 0


def count_gpus() -> int:
    """GPUs that the driver shows, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


if __name__ == "__main__":
    sys.exit(main())
