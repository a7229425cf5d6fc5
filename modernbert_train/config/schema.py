"""Every knob of a run, as one tree of frozen dataclasses.

A field's comment gives its meaning, unit and source. `MISSING` marks what the user must choose. Numbers that follow
from others are properties, never keys. Only the standard library and omegaconf are imported here, so that a login
node without torch can check a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from modernbert_train.config.launch import LaunchConfig


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """One of several folders of training shards, and how much of the training text it is; see docs/mixtures.md.

    All streams have `proportion`, or none has. Without it a stream weighs `tokens`, or `repeat` times its own size.
    """

    path: str = MISSING  # folder of shards, local or in a store
    proportion: float | None = None  # share of the training text; all shares add up to 1, and 0 keeps for later phases
    repeat: float | None = None  # passes over it while a stream of repeat 1 is read once; None: 1
    tokens: int | None = None  # tokens of it in a run as long as the tokens of all streams together


@dataclass(frozen=True, kw_only=True)
class PhaseStreamConfig:
    """What a phase changes about a stream."""

    proportion: float = MISSING  # share of the phase's text


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenised MDS shards, and how they become rows."""

    train: str | None = None  # folder of training shards, as written by data_prep/prepare.py; or else:
    streams: dict[str, StreamConfig] = field(default_factory=dict)  # several of them, by names of your choice
    mix_by: Literal["tokens", "documents"] = "tokens"  # what the shares of the streams are shares of
    validation: str | None = None  # folder of held-out shards; None trains without validation
    tokenizer: str = MISSING  # folder that AutoTokenizer loads; its hash must be the one recorded beside the shards
    packing_window: int = 128  # chunks of text that wait for a row they fill well; more pack tighter
    max_wait_rows: int = 2048  # a chunk waits while at most so many rows, and packing_window more, are made
    shuffle_block_shards: int = 16  # documents are shuffled within blocks of this many shuffled shards
    num_workers: int = 1  # processes per rank that read and mask; 0 reads in the training process
    prefetch_batches: int = 2  # batches each worker prepares ahead
    worker_timeout_seconds: float = 300.0  # a batch that a worker does not deliver for so long ends the run
    cache_folder: str | None = None  # local disk for copies of remote shards; None: ~/.cache/modernbert_train
    cache_limit_bytes: int | None = None  # shards read longest ago make room beyond it; None keeps all
    download_timeout_seconds: float = 60.0  # a file of which nothing new arrives for so long, retries included, is lost

    @property
    def all_streams(self) -> dict[str, StreamConfig]:
        """The streams by name, in the order in which documents are numbered; `train` is one of that name."""
        if self.train is not None:
            return {"train": StreamConfig(path=self.train)}
        return dict(sorted(self.streams.items()))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The encoder. The defaults are ModernBERT-base (arXiv 2412.13663, table 4)."""

    vocab_size: int = 50368  # rows of the embedding, at least the tokenizer's entries; multiples of 64 are faster
    hidden_size: int = 768
    num_layers: int = 22
    num_heads: int = 12
    intermediate_size: int = 1152  # width after the gate; the GeGLU input projection is twice as wide
    global_attn_every_n_layers: int = 3  # layers 0, n, 2n, ... attend globally, the others within local_attention
    local_attention: int = 128  # window of local layers in tokens, half on each side, both ends included
    local_rope_theta: float = 10_000.0  # RoPE base of local layers, unless the phase has its own
    norm_eps: float = 1e-5
    attention_out_dropout: float = 0.1  # after the attention's output projection, in training only
    init_std: float = 0.02  # "full_megatron": truncated normal, output projections divided by sqrt(2 num_layers)
    init_cutoff: float = 2.0  # truncation, in standard deviations
    z_loss: float = 0.0  # weight of the squared log-partition added to the loss; the release used none
    attention: Literal["auto", "varlen", "flash", "flex", "sdpa"] = "auto"  # kernel; auto chooses and says so
    global_attention: Literal["auto", "varlen", "flash", "flex", "sdpa"] | None = None  # global layers; None: same
    compile: bool = False  # torch.compile the layers
    activation_checkpointing: bool = False  # recompute each layer in the backward pass
    init_from: str | None = None  # first weights, same architecture: run, checkpoint, Hugging Face folder or id, .pt
    grow_from: str | None = None  # the same of a smaller model, enlarged by center tiling
    grow_mode: Literal["fitted", "paper"] = "fitted"  # paper: the mapping as published; see models/tiling.py

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def half_window(self) -> int:
        """Keys visible on each side of a query in local layers: distance 64 attends, 65 does not."""
        return self.local_attention // 2

    def is_global(self, layer: int) -> bool:
        return layer % self.global_attn_every_n_layers == 0

    def logit_chunk(self, *, on_gpu: bool, bytes_per_logit: int) -> int:
        """Predicted positions whose logits exist at the same time in training: as many as keep products efficient."""
        budget = 1 << 30 if on_gpu else 1 << 26
        return max(1, budget // (self.vocab_size * bytes_per_logit * 128)) * 128


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Masked-language modelling."""

    name: Literal["mlm"] = "mlm"
    masking: Literal["exact", "bernoulli", "reference"] = "exact"  # which tokens in training; see objectives/mlm.py
    mask_rate: float = 0.3  # share of the maskable tokens that are predicted in training
    eval_mask_rate: float = 0.15  # the same in validation, whose masking is always exact and never changes
    mask_token_share: float = 0.8  # of the predicted positions: replaced by [MASK]
    random_token_share: float = 0.1  # of the predicted positions: replaced by a random token; the rest stay


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Keys that every optimizer has."""

    name: str = MISSING
    lr: float = MISSING  # peak learning rate; a phase multiplies it by its lr_ratio
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.0  # norms and biases are never decayed


@dataclass(frozen=True, kw_only=True)
class StableAdamWConfig(OptimConfig):
    """StableAdamW (arXiv 2304.13013) with fully decoupled decay: each step shrinks weights by lr / max_lr * decay.

    `max_lr` is the phase's own peak rate, so 1e-5 here is about AdamW's 0.0125 at a rate of 8e-4. Never copy the
    number to another optimizer.
    """

    name: str = "stable_adamw"
    weight_decay: float = 1e-5
    fused: bool = False  # one Triton kernel for each half of a step, on GPUs; equal up to fp32 rounding


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimConfig):
    """torch's AdamW, for comparison: decay is multiplied by the learning rate."""

    name: str = "adamw"
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class MuonConfig(StableAdamWConfig):
    """Muon for the matrices of layers and head, StableAdamW for embeddings, norms and biases; see docs/recipe.md.

    `lr` and `weight_decay` are those of the matrices and mean what they mean to stable_adamw; `betas`, `eps` and
    `fused` are StableAdamW's.
    """

    name: str = "muon"
    momentum: float = 0.95
    nesterov: bool = True  # orthogonalise a mixture of gradient and momentum, not the momentum alone
    newton_schulz_iterations: int = 5  # towards the orthogonal matrix; each costs three matrix products
    # size of an update: match_rms_adamw: RMS 0.2, about that of Adam's, so that its rates serve (arXiv 2502.16982);
    # original: sqrt(max(1, rows / columns)) times the orthogonal matrix, with rates of some 0.02
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adam_lr_ratio: float = 1.0  # rate of embeddings, norms and biases over that of the matrices
    adam_decay_ratio: float = 1.0  # decay of embeddings over that of the matrices


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig(MuonConfig):
    """NorMuon (arXiv 2510.05491): Muon, and every row of an orthogonalised update brought to about the same size."""

    name: str = "normuon"
    row_beta: float = 0.95  # decay rate of the mean square of each row


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over one phase: linear warmup, a plateau, then a decay that ends with the phase."""

    warmup_tokens: int = 0
    plateau: Literal["constant", "inverse_sqrt"] = "constant"  # inverse_sqrt: falls as sqrt(warmup_tokens / tokens)
    decay_tokens: int = 0  # length of the decay at the end of the phase; 0 is a constant rate
    decay: Literal["one_minus_sqrt", "linear", "cosine"] = "one_minus_sqrt"
    final_lr_ratio: float = 0.0  # rate at the end of the decay over the phase's peak rate


@dataclass(frozen=True, kw_only=True)
class BatchWarmupConfig:
    """Growth of the global batch: every size from start_rows to batch_rows, step_rows apart, for equally many steps."""

    start_rows: int = MISSING
    step_rows: int = MISSING
    tokens: int = MISSING  # the full batch is reached when the phase has seen this many tokens


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """A range of training. Position in it is counted in tokens; weights and moments carry over from the last."""

    tokens: int = MISSING  # length of the phase, in tokens that are not padding
    row_tokens: int = MISSING  # capacity of a packed row, which is also the longest sequence (the context length)
    batch_rows: int = MISSING  # rows in one optimizer step over all ranks
    microbatch_tokens: int = MISSING  # tokens, padding included, in one forward pass on one rank
    lr_ratio: float = 1.0  # peak rate of the phase over optim.lr
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch_warmup: BatchWarmupConfig | None = None
    global_rope_theta: float = 10_000.0  # RoPE base of global layers; 160,000 for 8,192 tokens
    local_rope_theta: float | None = None  # the same of local layers; None: model.local_rope_theta
    mask_rate: float | None = None  # None: objective.mask_rate
    weight_decay: float | None = None  # None: optim.weight_decay
    reset_moments: bool = False  # start the phase with an empty optimizer; otherwise moments carry over
    restart_data: bool = False  # start the phase with a new pass over the data; otherwise it goes on where it stands
    streams: dict[str, PhaseStreamConfig] = field(default_factory=dict)  # other shares; a stream not named has none

    @property
    def microbatch_rows(self) -> int:
        return self.microbatch_tokens // self.row_tokens

    @property
    def batch_sizes(self) -> list[int]:
        """Every global batch size, in rows, that the phase passes through, smallest first."""
        warmup = self.batch_warmup
        if warmup is None or warmup.step_rows < 1:
            return [self.batch_rows]
        return [*range(warmup.start_rows, self.batch_rows, warmup.step_rows), self.batch_rows]

    def local_theta(self, model: ModelConfig) -> float:
        """RoPE base of local layers in this phase."""
        return model.local_rope_theta if self.local_rope_theta is None else self.local_rope_theta


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """A run that goes on from a checkpoint of another run; only its first start reads this.

    A later phase as a run of its own resets the clock. A rollback keeps it: the same phases go on from an earlier
    checkpoint with other rates. For weights alone, without anything else, there is model.init_from.
    """

    checkpoint: str = MISSING  # a checkpoint, or a run, whose newest checkpoint it then is
    clock: Literal["reset", "keep"] = "reset"  # reset: tokens and steps begin at 0, with the first phase
    moments: Literal["keep", "reset"] = "keep"  # the optimizer's state
    data: Literal["keep", "restart"] = "keep"  # keep: go on with the text not yet seen; restart: a new first pass


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation during training: evenly spread over each phase, the last time at its end; see docs/watching.md."""

    times_per_phase: int | None = None  # None: 15, or fewer, so that all of them cost at most 5 % of the phase
    interval_tokens: int | None = None  # instead: every so many tokens of the run, and at the end of each phase
    max_tokens: int | None = 200_000  # tokens of data.validation used each time; None uses all of it
    row_tokens: int | None = None  # None: the row length of the phase being evaluated


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of the run is saved, besides the end of each phase, and how many of the saved states are kept."""

    interval_seconds: float | None = 900.0  # a checkpoint when this much time has passed; None by steps only
    interval_steps: int | None = None  # a checkpoint every so many optimizer steps
    interval_tokens: int | None = None  # a checkpoint every so many tokens, kept for good: to average, to branch from
    keep: int = 3  # newest checkpoints kept; those at the end of a phase or of interval_tokens are always kept


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """What is done with a batch that would harm the weights. Its update is skipped before it is applied.

    stop ends the run; skip leaves the batch's update out; roll_back also takes weights and moments from a checkpoint
    before it. Clock and data go on in both. See docs/stability.md.
    """

    non_finite: Literal["stop", "skip", "roll_back"] = "stop"  # the loss or a gradient is NaN or infinite
    spike: Literal["ignore", "stop", "skip", "roll_back"] = "ignore"  # the loss jumps; ignore only records it
    spike_window_batches: int = 128  # batches of the phase that a loss is compared with; no spike is seen before
    spike_deviations: float = 8.0  # a spike is so many robust standard deviations above their median ...
    spike_min_rise: float = 0.5  # ... and at least so many nats above it
    spike_roll_back_batches: int = 0  # roll back from a spike by at least so many batches; PaLM: about 100
    max_skips: int = 20  # skipped batches over the whole run; the next one stops it
    max_roll_backs: int = 3  # the same for rolling back


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How several ranks share the model; see docs/scaling.md."""

    strategy: Literal["ddp", "fsdp2", "hsdp"] = "ddp"  # with several ranks; hsdp: whole copies, each sharded by FSDP2
    shard_ranks: int | None = None  # hsdp only: ranks that share one copy of the weights, usually those of one machine
    timeout_seconds: float = 300.0  # a collective that waits longer ends the job


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run shows of its progress; loggers besides it stand in `loggers`."""

    progress_bar: bool = True  # on a terminal one line that is redrawn; elsewhere, or if false, a line now and then
    line_seconds: float = 10.0  # time between those lines


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Where the time of a few steps goes: a trace and a table in <run folder>/profile; see docs/watching.md."""

    steps: int = 3  # optimizer steps that are recorded, of rank 0
    skip: int = 10  # steps of each start before them, at least 1: compilation and caches settle meanwhile
    stacks: bool = False  # with the lines of Python that called; the recorded steps get slower
    memory: bool = False  # with what is allocated and freed


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run: everything that decides its weights, and where they go."""

    name: str = MISSING  # letters, digits, '.', '_' and '-'
    runs_folder: str = "runs"  # the run lives in <runs_folder>/<name>
    seed: int = 17
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 autocast over fp32 weights, or fp32 without bf16
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=StableAdamWConfig)
    phases: dict[str, PhaseConfig] = field(default_factory=dict)  # in order; at least one
    start: StartConfig | None = None  # None: from scratch, or from model.init_from or model.grow_from
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig | None = None  # None: off, and nothing of it is even built
    # Composer's callbacks, each with its arguments: lr_monitor, optimizer_monitor, ...; see docs/composer.md
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Composer's loggers, each with its arguments: wandb, tensorboard, mlflow, file, ...; see docs/composer.md
    loggers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{self.runs_folder}/{self.name}"

    @property
    def total_tokens(self) -> int:
        return sum(phase.tokens for phase in self.phases.values())


# A section whose schema is chosen by its `name`: section -> name -> dataclass.
VARIANTS: dict[str, dict[str, type]] = {
    "optim": {
        "stable_adamw": StableAdamWConfig,
        "adamw": AdamWConfig,
        "muon": MuonConfig,
        "normuon": NorMuonConfig,
    },
}
