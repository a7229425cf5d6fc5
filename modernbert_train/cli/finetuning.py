"""The verb `finetune`, for one run or many."""

from __future__ import annotations

import argparse
from pathlib import Path

from modernbert_train.cli.arguments import MODEL, is_override, many_imports
from modernbert_train.cli.parser import Call, positive, whole
from modernbert_train.core.installed import YAMLS
from modernbert_train.distributed.launched import refuse_ranks
from modernbert_train.errors import ConfigError


def finetune(parser: argparse.ArgumentParser) -> Call:
    """Add the arguments of `finetune`, and return its call."""
    words = (
        "tasks: names from yamls/tasks, such as mnli, or YAML files of your own; keys of the task, such as lr= or "
        "data=, and of the run, such as compute.device="
    )
    parser.add_argument("run", nargs="*", metavar="TASK [KEY=VALUE]", help=words)
    words = f"{MODEL}; each also as frozen:MODEL and untrained:MODEL"
    parser.add_argument("--model", nargs="+", required=True, metavar="MODEL", help=words)
    words = "one run each, overriding seed=; several need --out; the paper's are 1618 42 6033 3145"
    parser.add_argument("--seeds", nargs="+", type=whole, metavar="N", help=words)
    words = "folder for many runs (every task with every model and seed) and their table"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=words)
    words = "parallel runs; default: one for each GPU, or one"
    parser.add_argument("--jobs", type=positive, metavar="N", help=words)
    parser.add_argument("--retry", action="store_true", help="repeat runs of --out that failed before")
    return _finetune


def _is_task(word: str) -> bool:
    """Return True if a word after --model is a task: a YAML file, or a task's name without a folder of that name."""
    if Path(word).suffix in (".yaml", ".yml"):
        return True
    return (YAMLS / "tasks" / f"{word}.yaml").is_file() and not Path(word).exists()


def words_of(options: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    """Return tasks, models and overrides. The task may come before or after --model, which takes several words.

    Raises:
        ConfigError: a task or a model is missing.
    """
    after = options.model
    overrides = [word for word in (*options.run, *after) if is_override(word)]
    after = [word for word in after if word not in overrides]
    tasks = [word for word in options.run if word not in overrides] + [word for word in after if _is_task(word)]
    models = [word for word in after if not _is_task(word)]
    if not tasks:
        task_names = ", ".join(sorted(path.stem for path in (YAMLS / "tasks").glob("*.yaml")))
        raise ConfigError(
            f"finetune {' '.join([*options.run, *after])}: names no task. Name one of {task_names}, or a YAML file of "
            "your own, before --model or after it."
        )
    if not models:
        raise ConfigError("--model: names none. Name a run, a checkpoint or a Hugging Face folder.")
    return tasks, models, overrides


def _finetune(options: argparse.Namespace) -> None:
    tasks, models, overrides = words_of(options)
    seeds = list(dict.fromkeys(options.seeds or ()))
    if options.out is None and (len(tasks) > 1 or len(models) > 1 or len(seeds) > 1 or options.jobs):
        named = f" and seeds {' '.join(map(str, seeds))}" if len(seeds) > 1 else ""
        raise ConfigError(
            f"finetune of {', '.join(tasks)} with {', '.join(models)}{named}: several runs need a folder for their "
            "table. Add --out runs/judged; or name one task, one --model and one seed, without --jobs."
        )
    if options.out is None and options.retry:
        raise ConfigError("--retry: is for many runs. Add --out, or start a single one again without it.")
    if options.out is not None:
        refuse_ranks("finetune --out")
        from modernbert_train.evaluate.suite.run_suite import finetune_many

        finetune_many(tasks, models, options.seeds, options.out, options.jobs, overrides, retry=options.retry)
        return
    from modernbert_train.evaluate.finetune.task import check_before, named_model
    from modernbert_train.report.progress import stage
    from modernbert_train.weights.names import look_up

    words = [*overrides, *(f"seed={seed}" for seed in seeds)]
    check_before(tasks[0], models[0], words)
    look_up(named_model(models[0]).source)
    stage("loading torch and Composer")
    with many_imports():
        from modernbert_train.train.finetune import finetune

    finetune(tasks[0], models[0], words)
