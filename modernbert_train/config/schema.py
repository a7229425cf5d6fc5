"""Every knob of a run, as one tree of frozen dataclasses.

A field's comment gives its meaning, unit and source; `knob` says what bounds it and what may change it. `MISSING`, or a
`knob` without a default, marks what the user must choose. Numbers that follow from others are properties, never keys.
Only the standard library and omegaconf are imported here, so that a login node without torch can check a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from omegaconf import MISSING

from modernbert_train.config.albert import AlbertConfig as AlbertConfig
from modernbert_train.config.bert import BertConfig as BertConfig
from modernbert_train.config.bert import BertShape as BertShape
from modernbert_train.config.bert import DistilBertConfig as DistilBertConfig
from modernbert_train.config.classify import ClassifyConfig as ClassifyConfig
from modernbert_train.config.classify import LabelledConfig as LabelledConfig
from modernbert_train.config.classify import TagConfig as TagConfig
from modernbert_train.config.contrastive import ContrastiveConfig as ContrastiveConfig
from modernbert_train.config.deberta import DebertaConfig as DebertaConfig
from modernbert_train.config.distill import DistillConfig as DistillConfig
from modernbert_train.config.evals import EvaluatorConfig as EvaluatorConfig
from modernbert_train.config.evals import OtherTextConfig as OtherTextConfig
from modernbert_train.config.evals import ProbeConfig as ProbeConfig
from modernbert_train.config.evals import ScoresConfig as ScoresConfig
from modernbert_train.config.gemma import GemmaConfig as GemmaConfig
from modernbert_train.config.knob import facts_of, knob
from modernbert_train.config.launch import LaunchConfig
from modernbert_train.config.llama import LlamaConfig as LlamaConfig
from modernbert_train.config.model import ModelConfig as ModelConfig  # importers of the schema take all of it here
from modernbert_train.config.model import ModernBertConfig as ModernBertConfig
from modernbert_train.config.neobert import NeoBertConfig as NeoBertConfig
from modernbert_train.config.objective import CausalLmConfig as CausalLmConfig
from modernbert_train.config.objective import MaskedLmConfig as MaskedLmConfig
from modernbert_train.config.objective import ObjectiveConfig as ObjectiveConfig
from modernbert_train.config.objective import PermutationLmConfig as PermutationLmConfig
from modernbert_train.config.objective import SentenceOrderConfig as SentenceOrderConfig
from modernbert_train.config.objective import TranslationConfig as TranslationConfig
from modernbert_train.config.questions import AnswerConfig as AnswerConfig
from modernbert_train.config.questions import ChooseConfig as ChooseConfig
from modernbert_train.config.rtd import ReplacedTokensConfig as ReplacedTokensConfig
from modernbert_train.config.xlnet import XLNetConfig as XLNetConfig
from modernbert_train.errors import ConfigError

PLAIN_WORKERS = 1  # where nobody says how many


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """One of several folders of training shards, and how much of the training text it is; see docs/mixtures.md.

    All streams have `proportion`, or none has. Without it a stream weighs `tokens`, or `repeat` times its own size, or
    as `data.alpha` says.
    """

    path: str = knob(restart=True, local=True)  # folder of shards, local or in a store
    # share of the training text; all shares add up to 1, and 0 keeps for later phases
    proportion: float | None = knob(None, low=0, why="which leaves it to phases that name it")
    # passes over it while a stream of repeat 1 is read once; None: 1
    repeat: float | None = knob(None, low=0, why="which leaves it to phases that name it")
    # tokens of it in a run as long as the tokens of all streams together
    tokens: int | None = knob(None, low=0, why="which leaves it to phases that name it")


@dataclass(frozen=True, kw_only=True)
class PhaseStreamConfig:
    """What a phase changes about a stream."""

    # share of the phase's text; None where alpha gives it
    proportion: float | None = knob(None, low=0, why="which leaves it out")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenised MDS shards, and how they become rows."""

    # folder of training shards, as written by `prepare`; or else `streams`. The folders may move: their
    # fingerprints are compared with the checkpoint's
    train: str | None = knob(None, restart=True, local=True)
    streams: dict[str, StreamConfig] = field(default_factory=dict)  # several of them, by names of your choice
    mix_by: Literal["tokens", "documents"] = "tokens"  # what the shares of the streams are shares of
    # shares in proportion to the streams' sizes to this power, as of languages: 1 as they are, 0 all alike. None: what
    # the streams say themselves
    alpha: float | None = knob(None, low=0, high=1)
    # folder of held-out shards; None trains without validation
    validation: str | None = knob(None, restart=True, local=True)
    # folder that AutoTokenizer loads; its hash must be the one recorded beside the shards
    tokenizer: str = knob(restart=True, local=True)
    packing_window: int = knob(
        128, above=0, high=1 << 20
    )  # chunks of text that wait for a row they fill well; more pack tighter
    max_wait_rows: int = knob(
        2048, above=0, high=1 << 20
    )  # a chunk waits while at most so many rows, and packing_window more, are made
    shuffle_block_shards: int = knob(
        16, above=0, high=1 << 20
    )  # documents are shuffled within blocks of this many shuffled shards
    # processes per rank that read and mask; 0 reads in the training process. None: 1
    num_workers: int | None = knob(
        None, low=0, high=1 << 10, restart=True, why="since each is a process of this machine"
    )
    prefetch_batches: int = knob(2, above=0, high=1 << 16, restart=True)  # batches each worker prepares ahead
    # a batch that a worker does not deliver for so long ends the run
    worker_timeout_seconds: float = knob(300.0, above=0, restart=True)
    # local disk for copies of remote shards; None: ~/.cache/modernbert_train
    cache_folder: str | None = knob(None, restart=True, local=True)
    # shards read longest ago make room beyond it; None keeps all
    cache_limit_bytes: int | None = knob(None, above=0, restart=True)
    # a file of which nothing new arrives for so long, retries included, is lost
    download_timeout_seconds: float = knob(60.0, above=0, restart=True)

    @property
    def workers(self) -> int:
        """Processes per rank that read and mask."""
        return PLAIN_WORKERS if self.num_workers is None else self.num_workers

    @property
    def all_streams(self) -> dict[str, StreamConfig]:
        """The streams by name, in the order in which documents are numbered; `train` is one of that name."""
        if self.train is not None:
            return {"train": StreamConfig(path=self.train)}
        return dict(sorted(self.streams.items()))


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """First weights from elsewhere, for a run that starts from scratch; see docs/weights.md."""

    init_from: str | None = None  # same architecture: run, checkpoint, Hugging Face folder or id, .pt of Composer
    # of init_from or shrink_from, where data.tokenizer is not its own: same refuses; extend: takes one with all old
    # tokens at their ids, and more; replace: any. A new token begins as the mean of its old pieces; see
    # docs/continue.md
    vocabulary: Literal["same", "extend", "replace"] = "same"
    grow_from: str | None = None  # the same of a smaller model, enlarged by center tiling
    grow_mode: Literal["fitted", "paper"] = "fitted"  # paper: the mapping as published; see models/tiling.py
    # the same of a larger model, of whose layers, heads, channels and hidden units some are taken; see
    # models/shrinking.py
    shrink_from: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """Keys that name a model, as in init_from, with what they name; `check` refuses more than one."""
        found = {key: getattr(self, key) for key in ("init_from", "grow_from", "shrink_from")}
        return {key: name for key, name in found.items() if name is not None}


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How the model is computed: where, in which precision, with which kernels. What it computes stays the same.

    What is left at auto, or None, is as this device is fast with; see docs/speed.md.
    """

    # auto: a GPU if torch sees one, otherwise the CPU; refused on a machine that shows GPUs of which torch sees none
    device: Literal["auto", "cpu", "cuda"] = knob("auto", restart=True)
    # bf16: autocast over fp32 weights, refused where torch would imitate it. auto: bf16 on a GPU that has it, else
    # fp32; on a CPU with bf16 the start says what it would win
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    # of the sum that ModernBERT's layers add to; bf16 only where products are in it. Fewer bytes move, and it rounds
    # more: see docs/speed.md. Weights, and with them the exported model, are fp32 either way
    residual_precision: Literal["fp32", "bf16"] = "fp32"
    # kernel; auto: on Hopper FlashAttention-3 if it is installed. Without it: in global layers FlashAttention-4 if it
    # is installed (Hopper and later), in local ones tiles on Hopper, else the first that serves; it says which. tiles:
    # local layers in our own kernels, global by varlen. cudnn: global layers by cuDNN, local by varlen; on Hopper and
    # Blackwell with torch 2.15, unmeasured
    attention: Literal["auto", "varlen", "flash", "flex", "sdpa", "tiles", "cudnn"] = knob("auto", restart=True)
    # kernel of global layers; None: as attention asks
    global_attention: Literal["auto", "varlen", "flash", "flex", "sdpa", "cudnn"] | None = knob(None, restart=True)
    # queries that the kernel sdpa computes together in local layers; None: 64
    query_block: int | None = knob(None, above=0, restart=True)
    # predicted tokens whose logits exist at a time in training: less memory, or larger products; None: what
    # 1 GiB of logits holds on a GPU, and 64 MiB on a CPU
    logit_chunk: int | None = knob(None, above=0, restart=True)
    # torch.compile the layers; None: on a GPU of capability 8.0 with Triton and a C compiler
    compile: bool | None = knob(None, restart=True)
    # Inductor also searches for the launch options of each kernel that it generates (coordinate descent), on GPUs.
    # Steps may be faster; the first start on a machine takes minutes longer. Unmeasured on a GPU. Needs compute.compile
    search: bool = knob(False, restart=True)
    # threads of torch on a CPU; None: OMP_NUM_THREADS, otherwise as many as torch takes
    threads: int | None = knob(None, above=0, high=1 << 12, restart=True, why="since no machine has more cores")
    activation_checkpointing: bool = knob(False, restart=True)  # recompute each layer in the backward pass
    # GPUs add in the same order each time, so that a resumed run equals one that never stopped to the bit, as on CPUs.
    # It is slower, see docs/faults.md; a kernel that cannot is refused
    deterministic: bool = knob(False, restart=True)


# Adam moves a weight by about the rate in each step: by more than its standard deviation at the start, usually 0.02
MAX_ADAM_LR = 0.02


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Keys that every optimizer has."""

    name: str = MISSING
    # peak learning rate; a phase multiplies it by its lr_ratio
    lr: float = knob(above=0, high=1, why="usual rates lie between 1e-5 and 1e-2")
    betas: tuple[float, float] = knob((0.9, 0.98), low=0, below=1)
    eps: float = knob(1e-6, above=0)
    weight_decay: float = knob(0.0, low=0, phased=True)  # norms and biases are never decayed
    # an update in a few kernels, on GPUs: StableAdamW's two of Triton, or torch's own of adamw; equal up to fp32
    # rounding. None: on a GPU of capability 8.0 with Triton and a C compiler
    fused: bool | None = knob(None, restart=True)

    bounds_update: ClassVar[bool] = False
    """Whether an update is divided by what is above 1 of its RMS, for which the shards of a weight are summed."""

    @property
    def max_usual_lr(self) -> float | None:
        """Rate above which `check` warns; None: nothing is known of this optimizer's."""
        return None

    @property
    def newton_schulz_iterations(self) -> int:
        """Iterations by which the updates of matrices are made orthogonal; 0: they are not."""
        return 0

    @property
    def row_beta(self) -> float | None:
        """Decay rate of the mean square of each row of a matrix, where there is one."""
        return None

    def state_numbers(self, total: int, hidden: int, hidden_rows: int) -> int:
        """Return how many numbers the optimizer keeps from step to step, which a checkpoint holds too.

        `plan` predicts memory and disk by it, and the microbatch is chosen by it.

        Args:
            total: weights of the model.
            hidden: of these, entries of matrices that map hidden states, which Muon orthogonalises.
            hidden_rows: rows of those matrices.
        """
        return 2 * total  # two moments of each weight, as in Adam


@dataclass(frozen=True, kw_only=True)
class StableAdamWConfig(OptimConfig):
    """StableAdamW (arXiv 2304.13013) with fully decoupled decay: each step shrinks weights by lr / max_lr * decay.

    `max_lr` is the phase's own peak rate, so 1e-5 here is about AdamW's 0.0125 at a rate of 8e-4. Never copy the
    number to another optimizer.
    """

    name: str = "stable_adamw"
    weight_decay: float = knob(1e-5, low=0, phased=True)

    bounds_update = True

    @property
    def max_usual_lr(self) -> float | None:
        return MAX_ADAM_LR


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimConfig):
    """torch's AdamW, for comparison: decay is multiplied by the learning rate."""

    name: str = "adamw"
    weight_decay: float = knob(0.01, low=0, phased=True)
    # the gradient of a step is scaled to at most this L2 norm over all weights and ranks; None: it is not clipped
    max_grad_norm: float | None = knob(None, above=0)

    @property
    def max_usual_lr(self) -> float | None:
        return MAX_ADAM_LR


@dataclass(frozen=True, kw_only=True)
class MuonConfig(StableAdamWConfig):
    """Muon for the matrices of layers and head, StableAdamW for embeddings, norms and biases; see docs/recipe.md.

    `lr` and `weight_decay` are those of the matrices and mean what they mean to stable_adamw; `betas`, `eps` and
    `fused` are StableAdamW's.
    """

    name: str = "muon"
    momentum: float = knob(0.95, low=0, below=1, why="usual is 0.95")
    nesterov: bool = True  # orthogonalise a mixture of gradient and momentum, not the momentum alone
    # towards the orthogonal matrix; each costs three matrix products
    newton_schulz_iterations: int = knob(
        5, low=1, high=100, why="since without one nothing is orthogonalised; usual are 5"
    )
    # size of an update: match_rms_adamw: RMS 0.2, about that of Adam's, so that its rates serve (arXiv 2502.16982);
    # original: sqrt(max(1, rows / columns)) times the orthogonal matrix, with rates of some 0.02
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    # rate of embeddings, norms and biases over that of the matrices
    adam_lr_ratio: float = knob(1.0, above=0, why="where 1 is the matrices' own rate")
    # decay of embeddings over that of the matrices
    adam_decay_ratio: float = knob(1.0, low=0, why="where 0 leaves embeddings undecayed")

    @property
    def max_usual_lr(self) -> float | None:
        """See `OptimConfig`: five times more where an update's RMS is 0.2."""
        return MAX_ADAM_LR * 5

    def state_numbers(self, total: int, hidden: int, hidden_rows: int) -> int:
        """See `OptimConfig`: a momentum of each entry of a hidden matrix, two moments of every other weight."""
        return hidden + 2 * (total - hidden)


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig(MuonConfig):
    """NorMuon (arXiv 2510.05491): Muon, and every row of an orthogonalised update brought to about the same size."""

    name: str = "normuon"
    # decay rate of the mean square of each row
    row_beta: float = knob(0.95, low=0, below=1, why="usual is 0.95")

    def state_numbers(self, total: int, hidden: int, hidden_rows: int) -> int:
        """See `OptimConfig`: as Muon, and a mean square of each row of a hidden matrix."""
        return super().state_numbers(total, hidden, hidden_rows) + hidden_rows


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over one phase: linear warmup, a plateau, then a decay that ends with the phase."""

    warmup_tokens: int = knob(0, low=0)
    plateau: Literal["constant", "inverse_sqrt"] = "constant"  # inverse_sqrt: falls as sqrt(warmup_tokens / tokens)
    decay_tokens: int = knob(0, low=0)  # length of the decay at the end of the phase; 0 is a constant rate
    decay: Literal["one_minus_sqrt", "linear", "cosine"] = "one_minus_sqrt"
    final_lr_ratio: float = knob(0.0, low=0, high=1)  # rate at the end of the decay over the phase's peak rate


@dataclass(frozen=True, kw_only=True)
class BatchWarmupConfig:
    """Growth of the global batch: every size from start_rows to batch_rows, step_rows apart, for equally many steps."""

    start_rows: int = knob(above=0, high=1 << 20)
    step_rows: int = knob(above=0, high=1 << 20)
    tokens: int = knob(above=0)  # the full batch is reached when the phase has seen this many tokens


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """A range of training. Position in it is counted in tokens; weights and moments carry over from the last.

    In `model`, `objective` and `optim` stand keys of the run's sections of those names, with the values that they have
    in this phase; a key that is not given, or null, is the run's. Only keys that are marked so can be given.
    """

    tokens: int = knob(above=0)  # length of the phase, in tokens that are not padding
    # capacity of a packed row, which is also the longest sequence (the context length)
    row_tokens: int = knob(low=8, high=1 << 24, why="for text between [CLS] and [SEP]")
    batch_rows: int = knob(above=0, high=1 << 20)  # rows in one optimizer step over all ranks
    # tokens, padding included, in one forward pass on one rank; None: on a GPU the most that `plan` says
    # fits, halved if the first steps run out of memory all the same, and on a CPU one row
    microbatch_tokens: int | None = knob(None, above=0, restart=True)
    lr_ratio: float = knob(1.0, above=0)  # peak rate of the phase over optim.lr
    model: dict[str, Any] = knob(factory=dict, overrides=True)
    objective: dict[str, Any] = knob(factory=dict, overrides=True)
    optim: dict[str, Any] = knob(factory=dict, overrides=True)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch_warmup: BatchWarmupConfig | None = None
    reset_moments: bool = False  # start the phase with an empty optimizer; otherwise moments carry over
    restart_data: bool = (
        False  # start the phase with a new pass over the data; otherwise it continues from its position
    )
    streams: dict[str, PhaseStreamConfig] = field(default_factory=dict)  # other shares; a stream not named has none
    alpha: float | None = knob(None, low=0, high=1)  # as data.alpha, of all streams or of `streams`; None: that

    @property
    def overridden(self) -> list[str]:
        """Sections of the run of which the phase changes something."""
        return [each.name for each in fields(self) if facts_of(each).overrides and getattr(self, each.name)]

    @property
    def tokens_at_once(self) -> int:
        """Tokens, padding included, in one forward pass on one rank."""
        return self.row_tokens if self.microbatch_tokens is None else self.microbatch_tokens

    @property
    def microbatch_rows(self) -> int:
        return self.tokens_at_once // self.row_tokens

    @property
    def batch_sizes(self) -> list[int]:
        """Every global batch size, in rows, that the phase passes through, smallest first."""
        warmup = self.batch_warmup
        if warmup is None or warmup.step_rows < 1:
            return [self.batch_rows]
        return [*range(warmup.start_rows, self.batch_rows, warmup.step_rows), self.batch_rows]


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """A run that continues from a checkpoint of another run; only its first start reads this.

    A later phase as a run of its own resets the clock. A rollback keeps it: the same phases continue from an earlier
    checkpoint with other rates. For weights alone, without anything else, there is weights.init_from.
    """

    checkpoint: str = MISSING  # a checkpoint, or a run, whose newest checkpoint it then is
    clock: Literal["keep", "reset"] = "reset"  # reset: tokens and steps begin at 0, with the first phase
    moments: Literal["keep", "reset"] = "keep"  # the optimizer's state
    data: Literal["keep", "restart"] = "keep"  # keep: continue with the text not yet seen; restart: a new first pass


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation during training: evenly spread over each phase, the last time at its end; see docs/watching.md."""

    # None: 15, or fewer, so that all of them cost at most 5 % of the phase
    times_per_phase: int | None = knob(None, above=0)
    # instead: every so many tokens of the run, and at the end of each phase
    interval_tokens: int | None = knob(None, above=0)
    max_tokens: int | None = knob(200_000, above=0)  # tokens of data.validation used each time; None uses all of it
    # None: the row length of the phase being evaluated
    row_tokens: int | None = knob(None, low=8, high=1 << 24, why="for text between [CLS] and [SEP]")
    # texts of which each validation keeps what the model fills in, for the report; see docs/watching.md
    samples: int = knob(4, low=0, high=16, restart=True)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of the run is saved, besides the end of each phase, and how many of the saved states are kept."""

    # a checkpoint when this much time has passed; None by steps only
    interval_seconds: float | None = knob(900.0, above=0)
    interval_steps: int | None = knob(None, above=0)  # a checkpoint every so many optimizer steps
    # a checkpoint every so many tokens, kept for good: to average, to branch from
    interval_tokens: int | None = knob(None, above=0)
    # checkpoints at certain steps, kept for good; pythia: before the first, at 1, 2, 4, ..., 512, and every 1000
    milestones: Literal["none", "pythia"] = "none"
    # newest checkpoints kept; those at the end of a phase, of interval_tokens or milestones are always kept
    keep: int = knob(3, above=0)
    # a second home: s3://BUCKET/FOLDER or any URL that fsspec knows. Checkpoints are copied there behind the run and
    # verified, and the run resumes from there when its folder is gone
    copy_to: str | None = None
    copy_keep: int | None = knob(None, above=0)  # newest checkpoints kept there; None: as many as here
    # a store where nothing moves for so long has failed: it is tried again, and not waited for at the end of the run
    copy_timeout_seconds: float = knob(120.0, above=0)


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """What is done with a batch that would harm the weights. Its update is skipped before it is applied.

    stop ends the run; skip leaves the batch's update out; roll_back also takes weights and moments from a checkpoint
    before it. Clock and data advance in both. See docs/stability.md.
    """

    non_finite: Literal["stop", "skip", "roll_back"] = "stop"  # the loss or a gradient is NaN or infinite
    spike: Literal["ignore", "stop", "skip", "roll_back"] = "ignore"  # the loss jumps; ignore only records it
    # batches of the phase that a loss is compared with; no spike is seen before
    spike_window_batches: int = knob(128, low=8, high=1 << 20, why="since a spread of fewer losses means nothing")
    # a spike is so many robust standard deviations above their median ...
    spike_deviations: float = knob(8.0, above=0)
    spike_min_rise: float = knob(0.5, above=0)  # ... and at least so many nats above it
    # roll back from a spike by at least so many batches; PaLM: about 100
    spike_roll_back_batches: int = knob(0, low=0)
    max_skips: int = knob(20, low=0)  # skipped batches over the whole run; the next one stops it
    max_roll_backs: int = knob(3, low=0)  # the same for rolling back


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How several ranks share the model; see docs/plan.md."""

    strategy: Literal["ddp", "fsdp2", "hsdp"] = "ddp"  # with several ranks; hsdp: whole copies, each sharded by FSDP2
    shard_ranks: int | None = None  # hsdp only: ranks that share one copy of the weights, usually those of one machine
    timeout_seconds: float = knob(300.0, above=0)  # a collective that waits longer ends the job
    # the same until the second step of a start is done: on a machine with a cold cache the layers compile for minutes
    first_step_timeout_seconds: float = knob(1800.0, above=0)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run shows of its progress; other loggers are in `loggers`."""

    progress_bar: bool = True  # on a terminal one line that is redrawn; elsewhere, or if false, a line now and then
    line_seconds: float = knob(10.0, above=0)  # time between those lines


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Where the time of a few steps goes: a trace and a table in <run folder>/profile; see docs/watching.md."""

    steps: int = knob(3, above=0)  # optimizer steps that are recorded, of rank 0
    skip: int = knob(10, above=0)  # steps of each start before them: compilation and caches settle meanwhile
    stacks: bool = False  # with the lines of Python that called; the recorded steps get slower
    memory: bool = False  # with what is allocated and freed


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run: everything that decides its weights, and where they go."""

    name: str = knob(restart=True)  # letters, digits, '.', '_' and '-'
    runs_folder: str = knob("runs", restart=True)  # the run lives in <runs_folder>/<name>
    # packages of your own that are imported first and add encoders, objectives, optimizers or evaluations; see
    # docs/extending.md
    plugins: list[str] = knob(factory=list, restart=True)
    seed: int = knob(17, low=0, below=1 << 31, why="which Composer asks for")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModernBertConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    objective: ObjectiveConfig = field(default_factory=MaskedLmConfig)
    optim: OptimConfig = field(default_factory=StableAdamWConfig)
    # in order; at least one. What was trained stays: checkpoints/resume_rules.py compares it with the checkpoint's
    phases: dict[str, PhaseConfig] = knob(factory=dict, restart=True)
    start: StartConfig | None = None  # None: from scratch, or from what `weights` names
    eval: EvalConfig = knob(factory=EvalConfig, restart=True)
    # other measurements during training, by names of your choice; see docs/watching.md
    evals: dict[str, EvaluatorConfig] = knob(factory=dict, restart=True)
    checkpoint: CheckpointConfig = knob(factory=CheckpointConfig, restart=True)
    # it says what is done when something goes wrong, and that is recorded
    stability: StabilityConfig = knob(factory=StabilityConfig, restart=True)
    distributed: DistributedConfig = knob(factory=DistributedConfig, restart=True)
    launch: LaunchConfig = knob(factory=LaunchConfig, restart=True, local=True)
    logging: LoggingConfig = knob(factory=LoggingConfig, restart=True)
    profile: ProfileConfig | None = knob(None, restart=True)  # None: off, and nothing of it is even built
    # Composer's callbacks, each with its arguments: lr_monitor, optimizer_monitor, ...; see docs/composer.md
    callbacks: dict[str, dict[str, Any]] = knob(factory=dict, restart=True)
    # Composer's loggers, each with its arguments: wandb, tensorboard, mlflow, file, ...; see docs/composer.md
    loggers: dict[str, dict[str, Any]] = knob(factory=dict, restart=True)

    @property
    def folder(self) -> str:
        return f"{self.runs_folder}/{self.name}"

    @property
    def total_tokens(self) -> int:
        return sum(phase.tokens for phase in self.phases.values())

    @property
    def is_measured(self) -> bool:
        """Whether there is something beside the training text to measure it on."""
        return self.data.validation is not None or bool(self.evals)

    @property
    def from_scratch(self) -> bool:
        """Whether nothing that was trained is its beginning."""
        return self.start is None and not self.weights.named

    @property
    def modernbert(self) -> ModernBertConfig:
        """The model, for what knows no other encoder; raises ConfigError if it is another."""
        if not isinstance(self.model, ModernBertConfig):
            raise ConfigError(f"model.name={self.model.name}: cannot be used here yet. Set model.name=modernbert.")
        return self.model

    @property
    def mlm(self) -> MaskedLmConfig:
        """The objective, for what knows no other; raises ConfigError if it is another."""
        if not isinstance(self.objective, MaskedLmConfig):
            raise ConfigError(f"objective.name={self.objective.name}: cannot be used here yet. Set objective.name=mlm.")
        return self.objective

    @cached_property
    def in_phase(self) -> Mapping[str, RunConfig]:
        """The run as it is in each phase: with what the phase overrides, in the run's own keys."""
        return {
            name: replace(
                self, **{key: _overridden(key, getattr(self, key), getattr(phase, key)) for key in phase.overridden}
            )
            for name, phase in self.phases.items()
        }


def _overridden(section: str, value: Any, overrides: Mapping[str, Any]) -> Any:
    """A section with what a phase overrides; of another variant, what the phase gives is all there is."""
    name = overrides.get("name", value.name)
    return replace(value, **overrides) if name == value.name else VARIANTS[section][name](**overrides)


# Sections of which a phase may take another variant.
CHANGED_WHOLE = ("objective",)

# A section, or each entry of a mapping, whose schema is chosen by its `name`: section -> name -> dataclass.
VARIANTS: dict[str, dict[str, type]] = {
    "model": {
        "modernbert": ModernBertConfig,
        "bert": BertConfig,
        "distilbert": DistilBertConfig,
        "albert": AlbertConfig,
        "xlnet": XLNetConfig,
        "deberta": DebertaConfig,
        "llama": LlamaConfig,
        "gemma": GemmaConfig,
        "neobert": NeoBertConfig,
    },
    "objective": {
        "mlm": MaskedLmConfig,
        "tlm": TranslationConfig,
        "causal": CausalLmConfig,
        "sop": SentenceOrderConfig,
        "rtd": ReplacedTokensConfig,
        "permutation": PermutationLmConfig,
        "distill": DistillConfig,
        "classify": ClassifyConfig,
        "tag": TagConfig,
        "answer": AnswerConfig,
        "choose": ChooseConfig,
        "contrastive": ContrastiveConfig,
    },
    "optim": {
        "stable_adamw": StableAdamWConfig,
        "adamw": AdamWConfig,
        "muon": MuonConfig,
        "normuon": NorMuonConfig,
    },
    "evals": {"probe": ProbeConfig, "scores": ScoresConfig, "text": OtherTextConfig},
}
