"""A configuration becomes a Composer Trainer, on one page. Read this first.

shards -> planner -> workers -> loader -+
model -> FSDP2 or DDP ------------------+-> composer.Trainer -> checkpoints
optimizer <- clock <- callbacks --------+
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from composer import Trainer
from composer.utils import dist

from modernbert_train.config.check import check
from modernbert_train.config.schema import DataConfig, RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.dataset_card import TOKEN_COUNTS, read_card
from modernbert_train.data.loader import MicrobatchMaker, PackedLoader
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shuffle import ShuffledPieces
from modernbert_train.errors import ConfigError, StoppedEarly
from modernbert_train.models.attention import choose_kernel
from modernbert_train.models.init import count_parameters, initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.optim import build_optimizer
from modernbert_train.train.adapters import ComposerMaskedLM, assert_sharded, data_spec, parallelism
from modernbert_train.train.callbacks import Measure, SafeReport, Save, SetClock, Validate
from modernbert_train.train.evaluate import MASK_SEED, Unigram, Validation
from modernbert_train.train.logging import build_loggers
from modernbert_train.train.origin import Origin, find_origin
from modernbert_train.train.progress import Progress
from modernbert_train.train.ranks import composer_device, joined, on_rank_zero
from modernbert_train.train.run_folder import RunFolder
from modernbert_train.train.start import Start, any_checkpoint, find_branch, find_start, origin_text, restore
from modernbert_train.vocabulary import Vocabulary, read_vocabulary


def train(config: RunConfig, *, fresh: bool = False) -> None:
    """Train a run to its end, from wherever it stands.

    Args:
        config: the run; its rules are checked again with the true number of ranks.
        fresh: put what the run's folder holds aside and start from scratch.

    Raises:
        RunError: anything that the user has to mend; StoppedEarly when a signal ended the run after a checkpoint.
    """
    device = choose_device(config)
    if device.type == "cpu":
        keep_freed_memory()
    with joined(device, config.distributed.timeout_seconds):
        check(config, dist.get_world_size())
        folder = RunFolder(config)
        # before the folder is made, so that a mistake in it can be mended under the same name
        first = on_rank_zero(lambda: fresh or not any_checkpoint(folder))
        origin = on_rank_zero(lambda: find_origin(config) if first else None)
        branch = on_rank_zero(lambda: find_branch(config) if first else None)
        changed = on_rank_zero(lambda: folder.open(fresh=fresh))
        if dist.get_global_rank() == 0 and changed:
            print("changed since the last start:", *changed, sep="\n  ")
        try:
            _train(config, folder, device, origin, branch)
        finally:
            folder.close()


def _train(
    config: RunConfig, folder: RunFolder, device: torch.device, origin: Origin | None, branch: Start | None
) -> None:
    rank, num_ranks = dist.get_global_rank(), dist.get_world_size()
    start = branch or on_rank_zero(lambda: find_start(folder))
    if start.tokens >= config.total_tokens:
        if rank == 0:
            print(f"{config.name}: already trained to its end, {start.tokens:,} tokens. Nothing to do.")
        return
    vocabulary = read_vocabulary(config.data.tokenizer)
    loader = build_loader(config, vocabulary, rank, num_ranks)
    model = build_model(config)
    if origin is not None:
        origin.fill(model)
    fingerprint = data_fingerprint(config, vocabulary)
    progress = Progress(config, visible=rank == 0, tokens=start.tokens)
    recorder = folder if rank == 0 else None
    save = Save(config, loader, folder, fingerprint)
    callbacks = [SetClock(config, start.phase), Measure(config, recorder, progress, start.left_out)]
    bf16 = resolve_precision(config, device) == "amp_bf16"
    if config.data.validation is not None:
        callbacks.append(Validate(config, build_validation(config, vocabulary), recorder, progress, bf16))
    callbacks.append(save)
    if rank == 0:
        callbacks.append(SafeReport(folder.path))
        _print_banner(config, model, origin_text(start, origin), device, num_ranks)

    trainer = Trainer(
        model=ComposerMaskedLM(model),
        optimizers=build_optimizer(config, model),
        train_dataloader=data_spec(loader, device),
        max_duration=f"{config.total_tokens}tok",
        spin_dataloaders=False,  # our loader starts where it is told; Composer would read everything before it again
        accumulate_train_batch_on_tokens=True,
        device_train_microbatch_size=1,  # the loader cuts microbatches itself; SetClock shows their size
        device=composer_device(device),
        precision=resolve_precision(config, device),
        parallelism_config=parallelism(config, num_ranks),
        dist_timeout=config.distributed.timeout_seconds,
        seed=config.seed,
        run_name=config.name,
        callbacks=callbacks,
        loggers=build_loggers(config),
        progress_bar=False,
        python_log_level="error",
    )
    if config.distributed.strategy == "fsdp2" and num_ranks > 1:
        assert_sharded(trainer.state.model)
    if start.checkpoint is not None:
        restore(trainer, loader, start, fingerprint)
    on_rank_zero(lambda: _record_start(folder, start, origin))
    save.listen()
    try:
        trainer.fit()
    finally:
        trainer.close()
    if save.stopped:
        raise StoppedEarly(
            f"{folder.path}: stopped at {trainer.state.timestamp.token.value:,} of {config.total_tokens:,} tokens, "
            "checkpoint written. The same command goes on from here."
        )


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the next allocation instead of giving each large tensor back to the system.

    Every operation of a CPU step allocates its result, and fresh pages cost a fault each: 8 % of the quickstart's step
    (2 cores, medians of 3). Has no effect with another C library.
    """
    mmap_max, trim_threshold = -4, -1  # the names' numbers in malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def choose_device(config: RunConfig) -> torch.device:
    """The device asked for.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no GPU here. Set device=auto or cpu, or run `doctor` to see why.")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def resolve_precision(config: RunConfig, device: torch.device) -> str:
    """Composer's name of the precision: bf16 autocast over fp32 weights on GPUs, fp32 on CPUs.

    Raises:
        ConfigError: bf16 on a CPU.
    """
    if config.precision == "bf16" and device.type == "cpu":
        raise ConfigError("precision=bf16: this machine trains on its CPU, which Composer does in fp32 only. Use auto.")
    return "fp32" if config.precision == "fp32" or device.type == "cpu" else "amp_bf16"


def build_model(config: RunConfig) -> ModernBertForMaskedLM:
    """The model with its initial weights, the same on every rank."""
    model = ModernBertForMaskedLM(config.model)
    initialize(model, config.model, config.seed)
    if config.model.compile:
        model.compile_layers()
    return model


def _shards(config: RunConfig, folder: str, vocabulary: Vocabulary) -> TokenShards:
    block = 2 * config.data.shuffle_block_shards  # a block is finished while the next is begun
    return TokenShards(folder, read_card(folder).column, vocabulary.num_entries, max_open_shards=block)


def build_loader(config: RunConfig, vocabulary: Vocabulary, rank: int, num_ranks: int) -> PackedLoader:
    """One rank's training batches."""
    check_data(config)
    data: DataConfig = config.data
    shards = _shards(config, data.train, vocabulary)
    pieces = ShuffledPieces(shards.shard_documents, shards.lengths, data.shuffle_block_shards, config.seed)
    return PackedLoader(
        BatchPlanner(config, pieces),
        MicrobatchMaker(shards, MaskedLM(config.objective, vocabulary), vocabulary, config.seed),
        rank=rank,
        num_ranks=num_ranks,
        num_workers=data.num_workers,
        prefetch_batches=data.prefetch_batches,
    )


def build_validation(config: RunConfig, vocabulary: Vocabulary) -> Validation:
    """The held-out text, with the unigram baseline of the training text."""
    assert config.data.validation is not None
    shards = _shards(config, config.data.validation, vocabulary)
    return Validation(
        config,
        MicrobatchMaker(shards, MaskedLM(config.objective, vocabulary), vocabulary, MASK_SEED),
        shards.lengths,
        Unigram.from_counts(Path(config.data.train) / TOKEN_COUNTS, config.model.vocab_size),
    )


def data_fingerprint(config: RunConfig, vocabulary: Vocabulary) -> dict[str, str]:
    """Hashes that change when the training data or the tokenizer does."""
    card = read_card(config.data.train)
    return {"shards": card.index_sha256, "lengths": card.lengths_sha256, "tokenizer": vocabulary.sha256}


def _record_start(folder: RunFolder, start: Start, origin: Origin | None) -> None:
    for text in start.passed_over:
        print(f"warning: passed over a damaged checkpoint: {text}")
    step = start.step
    if start.checkpoint is None or start.branch is not None:
        folder.rewind_metrics(-1)
        folder.record({"kind": "start", "step": step, "tokens": start.tokens, "from": origin_text(start, origin)})
        return
    folder.rewind_metrics(step)
    folder.record({"kind": "resume", "step": step, "tokens": start.tokens, "checkpoint": start.checkpoint.folder.name})


def _print_banner(
    config: RunConfig, model: ModernBertForMaskedLM, origin: str, device: torch.device, num_ranks: int
) -> None:
    phases = ", ".join(f"{name} {phase.tokens:,} x {phase.row_tokens}" for name, phase in config.phases.items())
    precision = resolve_precision(config, device)
    dtype = torch.bfloat16 if precision == "amp_bf16" else torch.float32
    choices = (config.model.global_attention or config.model.attention, config.model.attention)
    kernels = dict.fromkeys(choose_kernel(choice, device, dtype).name for choice in choices)
    strategy = f", {config.distributed.strategy}" if num_ranks > 1 else ""
    print(
        f"{config.name}: {count_parameters(model):,} parameters, {config.total_tokens:,} tokens\n"
        f"  phases  {phases}\n"
        f"  on      {num_ranks} x {device.type}, {precision}{strategy}, attention {' and '.join(kernels)}\n"
        f"  from    {origin}\n"
        f"  folder  {config.folder}",
        flush=True,
    )
