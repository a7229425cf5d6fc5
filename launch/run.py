"""Check a run, then start it on this machine, on several, or as a cluster job.

    modernbert-train launch yamls/quickstart.yaml                         this machine: one process per GPU, or one
    modernbert-train launch yamls/quickstart.yaml --ranks 2               two processes
    modernbert-train launch RUN.yaml --nodes 2 --rendezvous node-1:29500  the same command on two machines
    srun --ntasks-per-node=1 modernbert-train launch RUN.yaml             in a Slurm job, on all its machines
    modernbert-train launch RUN.yaml --on slurm --submit                  a job file from the same YAML, submitted

Without these options the `launch:` section of the YAML applies (docs/clusters.md). If neither sets a number, one
machine takes as many of its GPUs as can share every global batch evenly, and prints a note if some stay idle. torch's
elastic agent starts the ranks and ends them together. A process that torchrun or Composer's launcher started is a rank
and trains.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from math import prod
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from modernbert_train.distributed import stop_signals  # noqa: E402

if __name__ == "__main__":  # before the slower imports
    stop_signals.take_over()

from launch.health import refuse_sick_gpus, retry_notes, start_notes  # noqa: E402
from launch.render import TARGETS, nodes_and_ranks, render, submit  # noqa: E402
from launch.topology import (  # noqa: E402
    Topology,
    find_topology,
    is_rank,
    seconds_until_stop,
    uneven_phases,
    usable_gpus,
    with_fewer_machines,
)
from modernbert_train.__main__ import main as modernbert_train  # noqa: E402
from modernbert_train.cli.arguments import read_run  # noqa: E402
from modernbert_train.cli.parser import Parser, positive  # noqa: E402
from modernbert_train.config.schema import RunConfig  # noqa: E402
from modernbert_train.core.files import write_out  # noqa: E402
from modernbert_train.core.installed import path_of_children  # noqa: E402
from modernbert_train.core.lasting_output import lasting_output  # noqa: E402
from modernbert_train.distributed import orphans, scratch  # noqa: E402
from modernbert_train.distributed.launched import note_blamed  # noqa: E402
from modernbert_train.distributed.visible_gpus import count_gpus  # noqa: E402
from modernbert_train.errors import HangError, exit_code_of  # noqa: E402
from modernbert_train.plan.resolve import Purpose, hand_over, resolve, with_later_mistakes  # noqa: E402


@lasting_output()
def main(arguments: list[str] | None = None) -> int:
    """Check the run and start it, or write its job file; return the exit code, see docs/faults.md."""
    options = make_parser().parse_intermixed_args(arguments)
    if (options.out is not None or options.submit) and options.on is None:
        make_parser().error("--out and --submit are about a job file. Say which with --on.")
    train = ["train", *options.run, *(["--fresh"] if options.fresh else [])]
    if is_rank(os.environ):
        return modernbert_train(train)
    return exit_code_of(lambda: _launch(options, train))


def _launch(options: argparse.Namespace, train: list[str]) -> int:
    def num_ranks(config: RunConfig) -> int:
        if options.on is None:
            return _topology(config, options)[0].num_ranks
        return prod(nodes_and_ranks(config, options.nodes, options.ranks))

    with with_later_mistakes(num_ranks, "train" if options.on is None else "submit"):
        config = read_run(options.run)
    if options.on is not None:
        return _render(config, options)
    topology, gpus = _topology(config, options)
    if topology.idle_gpus:
        print(_idle_note(config, topology.ranks_per_node, gpus), file=sys.stderr)
    if topology.num_ranks > 1:  # else `train` does, in this process
        purpose: Purpose = "train" if topology.node_rank in (None, 0) else "join"
        run = resolve(config, topology.num_ranks, purpose=purpose, fresh=options.fresh)
        hand_over(run if purpose == "train" else None)
    stop_after = seconds_until_stop(config.launch, os.environ, time.time())
    if stop_after is not None:
        timer = threading.Timer(stop_after, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.daemon = True
        timer.start()
    return _start(config, topology, train, gpus)


def _topology(config: RunConfig, options: argparse.Namespace) -> tuple[Topology, int]:
    """Return the topology of a start on this machine, and the machine's number of GPUs for the run."""
    gpus = 0 if config.compute.device == "cpu" else count_gpus()
    topology = find_topology(
        config.launch,
        os.environ,
        gpus=gpus,
        usable=usable_gpus(config.phases, gpus),
        nodes=options.nodes,
        ranks=options.ranks,
        node_rank=options.node_rank,
        rendezvous=options.rendezvous,
    )
    return topology, gpus


def _idle_note(config: RunConfig, used: int, gpus: int) -> str:
    names = uneven_phases(config.phases, gpus)
    keys = ", ".join(f"phases.{name}.batch_rows" for name in names)
    warmup = any(config.phases[name].batch_warmup is not None for name in names)
    return (
        f"launch: {used} of this machine's {gpus} GPUs take part: more cannot share every global batch evenly. "
        f"For all, make {keys}{' and the rows of its batch_warmup' if warmup else ''} multiples of {gpus}."
    )


def _start(config: RunConfig, topology: Topology, train: list[str], gpus: int) -> int:
    os.environ.update(config.launch.env)
    for note in start_notes(config.launch, os.environ):
        print(note, file=sys.stderr, flush=True)
    if topology.num_ranks == 1:
        try:
            if gpus:
                refuse_sick_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        except HangError:
            note_blamed(socket.gethostname())
            raise
        return modernbert_train(train)
    threads = max(1, (os.cpu_count() or 1) // topology.ranks_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ["PYTHONPATH"] = path_of_children()
    os.environ[orphans.LAUNCHER] = str(os.getpid())
    from launch.ranks import start_ranks

    return start_ranks(
        topology,
        train,
        run_id=f"modernbert-train-{config.name}",
        timeout_seconds=config.distributed.timeout_seconds,
        rendezvous_seconds=config.launch.rendezvous_seconds,
        on_gpus=gpus > 0,
        advice=with_fewer_machines(config.phases, topology, os.environ),
    )


def _render(config: RunConfig, options: argparse.Namespace) -> int:
    words = [*options.run, *(["--fresh"] if options.fresh else [])]
    text = render(options.on, config, words, nodes=options.nodes, ranks_per_node=options.ranks)
    for note in retry_notes(config.launch):
        print(note, file=sys.stderr)
    if options.out is None and not options.submit:
        print(text, end="")
        return 0
    out = options.out or Path(f"{config.name}.{TARGETS[options.on].template}")
    print(write_out(out, text), file=sys.stderr)
    return submit(options.on, out) if options.submit else 0


def make_parser() -> Parser:
    """Return the parser of the verb's arguments."""
    parser = Parser(prog="modernbert-train launch", description=__doc__)
    parser.add_argument("run", nargs="+", metavar="RUN [KEY=VALUE]", help="YAML files or a run's folder, overrides")
    parser.add_argument("--ranks", type=positive, help="processes on each machine; default: one per GPU, or one")
    parser.add_argument("--nodes", type=positive, help="machines; default: launch.nodes, or the Slurm job's")
    parser.add_argument("--node-rank", type=int, metavar="N", help="number of this machine; 0 is --rendezvous's host")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="one of several machines, and a free port of it")
    parser.add_argument("--fresh", action="store_true", help="start from scratch; the old folder is moved aside")
    parser.add_argument("--on", choices=TARGETS, help="write a job file for a scheduler instead of starting")
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file of the job; default: standard output")
    parser.add_argument("--submit", action="store_true", help="hand the job file to the scheduler's client")
    return parser


if __name__ == "__main__":
    scratch.use_for_temporary_files()
    stop_signals.end(main())
