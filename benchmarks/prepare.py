"""Tokens a second and core of data preparation, beside the tokenizers library alone on the same text in the same run.

    python -m benchmarks.prepare                                        # the standard library's text, one minute
    python -m benchmarks.prepare --kind jsonl --tokenizer tokenizer.json my/*.jsonl.zst

Rates are by processor time, which other work on the machine disturbs little; the clock says something only on an idle
machine.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_prep.make_tokenizer import adapt_tokenizer, save_tokenizer, train_tokenizer
from data_prep.prepare import prepare
from data_prep.read.sources import read_source
from data_prep.stats import dataset_stats
from data_prep.tasks.executors import LocalTasks
from data_prep.tasks.stages import make_stages
from data_prep.tasks.work import make_work
from data_prep.tasks.workers import Workers
from modernbert_train.config.tools.prepare import ExecutorConfig, PrepareConfig, SourceConfig, TokenizerConfig
from modernbert_train.tokenizer_threads import tokenizer_threads

ROUNDS = 3
VOCAB_SIZE = 32_768
BATCH = 16  # documents; more are no faster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*", help="files; without any, the standard library")
    parser.add_argument("--kind", default="text", choices=("text", "jsonl", "parquet", "csv"))
    parser.add_argument("--tokenizer", help="tokenizer.json; without one, one is trained on the text")
    arguments = parser.parse_args()
    sources: dict[str, Any] = {"stdlib": SourceConfig(kind="python_stdlib")}
    if arguments.text:
        sources = {f"text{i}": SourceConfig(kind=arguments.kind, path=path) for i, path in enumerate(arguments.text)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [
            item.text
            for source, settings in sources.items()
            for item in read_source(source, settings, PrepareConfig.max_characters)
            if hasattr(item, "text") and item.text.strip() and len(item.text) <= PrepareConfig.max_characters
        ]
        tokenizer = _tokenizer(arguments.tokenizer, texts)
        save_tokenizer(tokenizer, folder / "tokenizer")
        config = PrepareConfig(
            out=str(folder / "out"),
            sources=sources,
            tokenizer=TokenizerConfig(path=str(folder / "tokenizer"), extend=True),
            executor=ExecutorConfig(workers=1),
        )
        rates: dict[str, list[float]] = {}
        for round in range(ROUNDS):  # in turns, so that a busy machine disturbs all alike
            for case, rate in (_alone(tokenizer, texts) | _stages(config, folder / f"work{round}")).items():
                rates.setdefault(case, []).append(rate)
        characters = sum(map(len, texts))
        print(f"{len(texts):,} documents, {characters:,} characters; median of {ROUNDS} rounds, one core")
        reference = statistics.median(rates["tokenizers alone, encode_batch"])
        for case, measured in rates.items():
            rate = statistics.median(measured)
            print(f"  {case:42} {rate / 1e6:6.3f} M tokens/s  {rate / reference:5.2f} x encode_batch")
        for workers in (1, 2):
            clock, processor, tokens = _whole(config, folder, workers)
            rate = tokens / processor / 1e6
            print(
                f"  whole command, {workers} at a time: {clock:.1f} s by the clock; with start-up {processor:.1f} s of "
                f"processor time, {rate:.3f} M tokens/s and core"
            )


def _tokenizer(path: str | None, texts: list[str]) -> Tokenizer:
    return adapt_tokenizer(path, extend=True) if path else train_tokenizer(iter(texts), VOCAB_SIZE)


def _alone(tokenizer: Tokenizer, texts: list[str]) -> dict[str, float]:
    """Texts in memory to encodings, on one thread."""
    rates = {}
    tokenizer.encode_special_tokens = True
    for name in ("encode_batch", "encode_batch_fast"):
        encode = getattr(tokenizer, name)
        started, tokens = time.process_time(), 0
        with tokenizer_threads(False):
            for i in range(0, len(texts), BATCH):
                tokens += sum(map(len, encode(texts[i : i + BATCH], add_special_tokens=False)))
        rates[f"tokenizers alone, {name}"] = tokens / (time.process_time() - started)
    return rates


def _stages(config: PrepareConfig, folder: Path) -> dict[str, float]:
    """All stages in this process: the tokenising tasks alone, and together with the others."""
    import modernbert_train.data.shard_writer  # noqa: F401  imports torch, which is start-up

    work = make_work(folder, config, {})
    seconds = {}
    for stage in make_stages(work, config, {}):
        started = time.process_time()
        LocalTasks(stage, work, (1, 1)).run_with(Workers(1), 1)
        seconds[stage.cost.name] = time.process_time() - started
    splits = dataset_stats(Path(config.out))["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    return {
        "prepare, the tokenising tasks": tokens / seconds["tokenise"],
        "prepare, all stages": tokens / sum(seconds.values()),
    }


def _whole(config: PrepareConfig, folder: Path, workers: int) -> tuple[float, float, int]:
    """Seconds by the clock, of all processors, and tokens."""
    out = folder / f"out{workers}"
    again = PrepareConfig(
        out=str(out), sources=config.sources, tokenizer=config.tokenizer, executor=ExecutorConfig(workers=workers)
    )
    clock, processor = time.perf_counter(), _processor_seconds()
    prepare(again)
    clock, processor = time.perf_counter() - clock, _processor_seconds() - processor
    return clock, processor, sum(split["tokens"] for split in dataset_stats(out)["splits"].values())


def _processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
