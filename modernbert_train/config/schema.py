"""Every key of a run, as one tree of frozen dataclasses.

A field's comment gives its meaning, unit and source; `knob` gives its bounds and what may change it. `MISSING`, or a
`knob` without a default, marks required keys. Numbers that follow from others are properties, never keys.
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
from modernbert_train.config.bert import EsmConfig as EsmConfig
from modernbert_train.config.classify import ClassifyConfig as ClassifyConfig
from modernbert_train.config.classify import LabelledConfig as LabelledConfig
from modernbert_train.config.classify import TagConfig as TagConfig
from modernbert_train.config.contrastive import ContrastiveConfig as ContrastiveConfig
from modernbert_train.config.deberta import DebertaConfig as DebertaConfig
from modernbert_train.config.distill import DistillConfig as DistillConfig
from modernbert_train.config.evals import EvaluatorConfig as EvaluatorConfig
from modernbert_train.config.evals import HeldoutStreamConfig as HeldoutStreamConfig
from modernbert_train.config.evals import ProbeConfig as ProbeConfig
from modernbert_train.config.evals import ScoresConfig as ScoresConfig
from modernbert_train.config.gemma import GemmaConfig as GemmaConfig
from modernbert_train.config.knob import facts_of, knob, rate_knob
from modernbert_train.config.launch import LaunchConfig
from modernbert_train.config.llama import LlamaConfig as LlamaConfig
from modernbert_train.config.model import ModelConfig as ModelConfig  # re-exported
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

PLAIN_WORKERS = 1  # if data.num_workers is not set


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """One of several folders of training shards, and its share of the training text; see docs/mixtures.md.

    Either all streams have `proportion` or none. Without it a stream weighs `tokens`, or `repeat` times its own size,
    or follows `data.alpha`.
    """

    path: str = knob(restart=True, local=True)  # folder of shards, local or in a store
    # share of the training text; all shares add up to 1; 0: only for phases that name it
    proportion: float | None = knob(None, low=0, why="which leaves it to phases that name it")
    # passes over it for one pass over a stream with repeat 1; None: 1
    repeat: float | None = knob(None, low=0, why="which leaves it to phases that name it")
    # tokens of it in a run as long as all streams together
    tokens: int | None = knob(None, low=0, why="which leaves it to phases that name it")


@dataclass(frozen=True, kw_only=True)
class PhaseStreamConfig:
    """A phase's changes to a stream."""

    # share of the phase's text; None if alpha defines it
    proportion: float | None = knob(None, low=0, why="which leaves it out")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenised MDS shards, and how they are packed into rows."""

    # folder of training shards, as written by `prepare`; or else `streams`. Folders may move: fingerprints are compared
    # with the checkpoint's
    train: str | None = knob(None, restart=True, local=True)
    streams: dict[str, StreamConfig] = field(default_factory=dict)  # several folders, by names of your choice
    mix_by: Literal["tokens", "documents"] = "tokens"  # unit of the streams' shares
    # shares proportional to the streams' sizes to this power, as for languages: 1 proportional, 0 all equal. None: the
    # streams' keys define the shares
    alpha: float | None = knob(None, low=0, high=1)
    # folder of held-out shards; None trains without validation
    validation: str | None = knob(None, restart=True, local=True)
    # folder that AutoTokenizer loads; its hash must be the one stored with the shards
    tokenizer: str = knob(restart=True, local=True)
    packing_window: int = knob(
        128, above=0, high=1 << 20
    )  # chunks of text that wait for a row with a good fit; more pack tighter
    max_wait_rows: int = knob(
        2048, above=0, high=1 << 20
    )  # a chunk waits for at most this many rows, plus packing_window
    shuffle_block_shards: int = knob(
        16, above=0, high=1 << 20
    )  # documents are shuffled within blocks of this many shuffled shards
    # processes per rank that read and mask; 0 reads in the training process. None: 1
    num_workers: int | None = knob(
        None, low=0, high=1 << 10, restart=True, why="since each is a process of this machine"
    )
    prefetch_batches: int = knob(2, above=0, high=1 << 16, restart=True)  # batches each worker prepares ahead
    # timeout for a worker's next batch, after which the run ends
    worker_timeout_seconds: float = knob(300.0, above=0, restart=True)
    # local disk for copies of remote shards; None: ~/.cache/modernbert_train
    cache_folder: str | None = knob(None, restart=True, local=True)
    # size limit, beyond which the shards read longest ago are deleted; None keeps all
    cache_limit_bytes: int | None = knob(None, above=0, restart=True)
    # timeout without new bytes of a file, retries included, after which the download fails
    download_timeout_seconds: float = knob(60.0, above=0, restart=True)

    @property
    def workers(self) -> int:
        """Processes per rank that read and mask."""
        return PLAIN_WORKERS if self.num_workers is None else self.num_workers

    @property
    def all_streams(self) -> dict[str, StreamConfig]:
        """The streams by name, in the order in which documents are numbered; `train` is one stream of that name."""
        if self.train is not None:
            return {"train": StreamConfig(path=self.train)}
        return dict(sorted(self.streams.items()))


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """First weights from another model, for a run that starts from scratch; see docs/weights.md."""

    init_from: str | None = None  # same architecture: run, checkpoint, Hugging Face folder or id, .pt of Composer
    # for init_from or shrink_from with another tokenizer than data.tokenizer: same: refused; extend: the new tokenizer
    # must have all old tokens at their ids; replace: any tokenizer. A new token starts as the mean of its old pieces;
    # see docs/continue.md
    vocabulary: Literal["same", "extend", "replace"] = "same"
    grow_from: str | None = None  # a smaller model, named like init_from, enlarged by center tiling
    grow_mode: Literal["fitted", "paper"] = "fitted"  # paper: the mapping as published; see models/tiling.py
    # a larger model, named like init_from, from which layers, heads, channels and hidden units are selected; see
    # models/shrinking.py
    shrink_from: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """The set keys that name a model, with their values; `check` refuses more than one."""
        names = {key: getattr(self, key) for key in ("init_from", "grow_from", "shrink_from")}
        return {key: name for key, name in names.items() if name is not None}


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How the model is computed: device, precision, kernels. The computed function stays the same.

    Keys left at auto, or None, get fast values for this device; see docs/speed.md.
    """

    # auto: a GPU if torch sees one, otherwise the CPU; an error if the machine has GPUs and torch sees none
    device: Literal["auto", "cpu", "cuda"] = knob("auto", restart=True)
    # bf16: autocast over fp32 weights, refused where torch would emulate it. auto: bf16 on a GPU that supports it, else
    # fp32; on a CPU with bf16 the start says how much faster it would be
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    # precision of the residual stream of ModernBERT's layers; bf16 only if products are in bf16. It moves fewer bytes
    # and rounds more: see docs/speed.md. Weights, and so the exported model, are fp32 either way
    residual_precision: Literal["fp32", "bf16"] = "fp32"
    # kernel; auto: on Hopper FlashAttention-3 if it is installed. Else, in global layers FlashAttention-4 if it is
    # installed (Hopper and later), in local layers tiles on Hopper, else the first that supports the run; the run names
    # it. tiles: local layers in this program's kernels, global by varlen. cudnn: global layers by cuDNN, local by
    # varlen; on Hopper and Blackwell with torch 2.15, unmeasured
    attention: Literal["auto", "varlen", "flash", "flex", "sdpa", "tiles", "cudnn"] = knob("auto", restart=True)
    # kernel of global layers; None: as attention
    global_attention: Literal["auto", "varlen", "flash", "flex", "sdpa", "cudnn"] | None = knob(None, restart=True)
    # queries that the kernel sdpa processes together in local layers; None: 64
    query_block: int | None = knob(None, above=0, restart=True)
    # predicted tokens whose logits exist at the same time in training: fewer need less memory, more make larger
    # products; None: 1 GiB of logits on a GPU, 64 MiB on a CPU
    logit_chunk: int | None = knob(None, above=0, restart=True)
    # torch.compile the layers; None: on a GPU of capability 8.0 with Triton and a C compiler
    compile: bool | None = knob(None, restart=True)
    # Inductor also searches for the launch options of each kernel that it generates (coordinate descent), on GPUs.
    # Steps may be faster; the first start on a machine takes minutes longer. Unmeasured on a GPU. Needs compute.compile
    search: bool = knob(False, restart=True)
    # threads of torch on a CPU; None: OMP_NUM_THREADS, otherwise torch's default
    threads: int | None = knob(None, above=0, high=1 << 12, restart=True, why="since no machine has more cores")
    activation_checkpointing: bool = knob(False, restart=True)  # recompute each layer in the backward pass
    # GPUs add in a fixed order, so a resumed run equals an uninterrupted one to the bit, as on CPUs. It is slower, see
    # docs/faults.md; kernels without a fixed order are refused
    deterministic: bool = knob(False, restart=True)

    def logits_at_once(self, vocab_size: int, *, on_gpu: bool, bytes_per_logit: int) -> int:
        """Return the number of predicted positions whose logits exist at the same time in training: `logit_chunk`, or
        enough for efficient products."""
        budget = 1 << 30 if on_gpu else 1 << 26
        return self.logit_chunk or max(1, budget // (vocab_size * bytes_per_logit * 128)) * 128


# Adam moves a weight by about the learning rate in each step: above this, by more than its initial deviation, 0.02
MAX_ADAM_LR = 0.02


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Keys of every optimizer."""

    name: str = MISSING
    # peak learning rate; a phase multiplies it by its lr_ratio
    lr: float = rate_knob()
    betas: tuple[float, float] = knob((0.9, 0.98), low=0, below=1)
    eps: float = knob(1e-6, above=0)
    weight_decay: float = knob(0.0, low=0, phased=True)  # norms and biases are never decayed
    # an update in a few GPU kernels: two Triton kernels for StableAdamW, torch's own for adamw; equal up to fp32
    # rounding. None: on a GPU of capability 8.0 with Triton and a C compiler
    fused: bool | None = knob(None, restart=True)

    bounds_update: ClassVar[bool] = False
    """True if updates are clipped to RMS 1, which needs a sum over the shards of a weight."""

    max_usual_lr: ClassVar[float | None] = None
    """Learning rate above which `check` warns; None: not known for this optimizer."""

    @property
    def max_grad_norm(self) -> float | None:
        """Norm to which the gradient of a step is clipped; None: it is not clipped."""
        return None

    @property
    def newton_schulz_iterations(self) -> int:
        """Iterations that orthogonalise the updates of matrices; 0: none."""
        return 0

    @property
    def row_beta(self) -> float | None:
        """Decay rate of the mean square of each row of a matrix; None: not used."""
        return None

    def state_numbers(self, total: int, hidden: int, hidden_rows: int) -> int:
        """Return how many numbers the optimizer keeps between steps, which checkpoints store too.

        Used by `plan` to predict memory and disk, and to choose the microbatch.

        Args:
            total: weights of the model.
            hidden: of these, entries of matrices that map hidden states, which Muon orthogonalises.
            hidden_rows: rows of those matrices.
        """
        return 2 * total  # two moments of each weight, as in Adam


@dataclass(frozen=True, kw_only=True)
class StableAdamWConfig(OptimConfig):
    """StableAdamW (arXiv 2304.13013) with fully decoupled decay: each step shrinks weights by lr / max_lr * decay.

    `max_lr` is the phase's peak learning rate, so 1e-5 here is about AdamW's 0.0125 at a learning rate of 8e-4. Never
    copy the number to another optimizer.
    """

    name: str = "stable_adamw"
    weight_decay: float = knob(1e-5, low=0, phased=True)

    bounds_update = True
    max_usual_lr = MAX_ADAM_LR


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimConfig):
    """torch's AdamW, for comparison: decay is multiplied by the learning rate."""

    name: str = "adamw"
    weight_decay: float = knob(0.01, low=0, phased=True)
    # clips the gradient to this L2 norm over all weights and ranks; None: no clipping
    max_grad_norm: float | None = knob(None, above=0)

    max_usual_lr = MAX_ADAM_LR


@dataclass(frozen=True, kw_only=True)
class MuonConfig(StableAdamWConfig):
    """Muon for the matrices of layers and head, StableAdamW for embeddings, norms and biases; see docs/recipe.md.

    `lr` and `weight_decay` apply to the matrices, with the meaning of stable_adamw; `betas`, `eps` and `fused` are
    StableAdamW's.
    """

    name: str = "muon"
    momentum: float = knob(0.95, low=0, below=1, why="usual is 0.95")
    nesterov: bool = True  # orthogonalise a mixture of gradient and momentum, not the momentum alone
    # iterations of the orthogonalisation; each takes three matrix products
    newton_schulz_iterations: int = knob(
        5, low=1, high=100, why="since without one nothing is orthogonalised; usual are 5"
    )
    # size of an update: match_rms_adamw: RMS 0.2, about Adam's, so that its learning rates work (arXiv 2502.16982);
    # original: sqrt(max(1, rows / columns)) times the orthogonal matrix, with learning rates of about 0.02
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    # decay an entry of a matrix only where the update moves it towards zero too (arXiv 2510.12402)
    cautious_decay: bool = False
    # learning rate of embeddings, norms and biases, relative to the matrices'
    adam_lr_ratio: float = knob(1.0, above=0, why="where 1 is the matrices' own rate")
    # decay of embeddings, relative to the matrices'
    adam_decay_ratio: float = knob(1.0, low=0, why="where 0 leaves embeddings undecayed")

    max_usual_lr = MAX_ADAM_LR * 5  # since an update's RMS is 0.2

    def state_numbers(self, total: int, hidden: int, hidden_rows: int) -> int:
        """See `OptimConfig`: a momentum of each entry of a hidden matrix, two moments of every other weight."""
        return hidden + 2 * (total - hidden)


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig(MuonConfig):
    """NorMuon (arXiv 2510.05491): Muon, with every row of an orthogonalised update scaled to about the same size."""

    name: str = "normuon"
    # decay rate of the mean square of each row
    row_beta: float = knob(0.95, low=0, below=1, why="usual is 0.95")

    def state_numbers(self, total: int, hidden: int, hidden_rows: int) -> int:
        """See `OptimConfig`: like Muon, plus a mean square of each row of a hidden matrix."""
        return super().state_numbers(total, hidden, hidden_rows) + hidden_rows


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over one phase: linear warmup, a plateau, then a decay that ends with the phase."""

    warmup_tokens: int = knob(0, low=0)
    plateau: Literal["constant", "inverse_sqrt"] = "constant"  # inverse_sqrt: falls as sqrt(warmup_tokens / tokens)
    decay_tokens: int = knob(0, low=0)  # length of the decay at the end of the phase; 0: no decay
    decay: Literal["one_minus_sqrt", "linear", "cosine"] = "one_minus_sqrt"
    final_lr_ratio: float = knob(0.0, low=0, high=1)  # learning rate after the decay, relative to the phase's peak


@dataclass(frozen=True, kw_only=True)
class BatchWarmupConfig:
    """Growth of the global batch from start_rows to batch_rows, by step_rows, with equally many steps at each size."""

    start_rows: int = knob(above=0, high=1 << 20)
    step_rows: int = knob(above=0, high=1 << 20)
    tokens: int = knob(above=0)  # the full batch is reached when the phase has seen this many tokens


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """A range of training. Position in it is counted in tokens; weights and moments carry over from the last.

    `model`, `objective` and `optim` hold keys of the run's sections of those names, with their values in this phase; a
    missing or null key is the run's. Only keys marked for this can be given.
    """

    tokens: int = knob(above=0)  # length of the phase, in tokens that are not padding
    # capacity of a packed row, which is also the longest sequence (the context length)
    row_tokens: int = knob(low=8, high=1 << 24, why="for text between [CLS] and [SEP]")
    batch_rows: int = knob(above=0, high=1 << 20)  # rows in one optimizer step over all ranks
    # tokens, padding included, in one forward pass on one rank; None: on a GPU the largest that fits as `plan`
    # predicts, halved if the first steps still run out of memory, and on a CPU one row
    microbatch_tokens: int | None = knob(None, above=0, restart=True)
    lr_ratio: float = knob(1.0, above=0)  # peak learning rate of the phase, relative to optim.lr
    model: dict[str, Any] = knob(factory=dict, overrides=True)
    objective: dict[str, Any] = knob(factory=dict, overrides=True)
    optim: dict[str, Any] = knob(factory=dict, overrides=True)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch_warmup: BatchWarmupConfig | None = None
    reset_moments: bool = False  # start the phase with an empty optimizer; otherwise moments carry over
    restart_data: bool = (
        False  # start the phase with a new pass over the data; otherwise it continues from its position
    )
    streams: dict[str, PhaseStreamConfig] = field(default_factory=dict)  # other shares; a missing stream is not read
    alpha: float | None = knob(None, low=0, high=1)  # as data.alpha, for all streams or for `streams`; None: data.alpha

    @property
    def overridden(self) -> list[str]:
        """Sections of the run in which the phase overrides keys."""
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
        """Every global batch size of the phase, in rows, smallest first."""
        warmup = self.batch_warmup
        if warmup is None or warmup.step_rows < 1:
            return [self.batch_rows]
        return [*range(warmup.start_rows, self.batch_rows, warmup.step_rows), self.batch_rows]


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """A run that continues from a checkpoint of another run; only its first start reads this.

    A later phase as a separate run resets the clock. A rollback keeps it: the same phases continue from an earlier
    checkpoint with other learning rates. To use only the weights, there is weights.init_from.
    """

    checkpoint: str = MISSING  # a checkpoint, or a run, of which the newest checkpoint is used
    clock: Literal["keep", "reset"] = "reset"  # reset: tokens and steps begin at 0, with the first phase
    moments: Literal["keep", "reset"] = "keep"  # the optimizer's state
    data: Literal["keep", "restart"] = "keep"  # keep: continue with text not yet seen; restart: a new first pass


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation during training: evenly spread over each phase, the last one at its end; see docs/watching.md."""

    # None: 15, or fewer, so that all of them cost at most 5 % of the phase
    times_per_phase: int | None = knob(None, above=0)
    # alternative: at this interval in tokens of the run, and at the end of each phase
    interval_tokens: int | None = knob(None, above=0)
    max_tokens: int | None = knob(200_000, above=0)  # tokens of data.validation per validation; None: all
    # None: the row length of the current phase
    row_tokens: int | None = knob(None, low=8, high=1 << 24, why="for text between [CLS] and [SEP]")
    # texts whose predicted tokens each validation keeps, for the report; see docs/watching.md
    samples: int = knob(4, low=0, high=16, restart=True)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Intervals of checkpoints, besides those at the end of each phase, and how many are kept."""

    # interval in time; None: only by steps
    interval_seconds: float | None = knob(900.0, above=0)
    interval_steps: int | None = knob(None, above=0)  # interval in optimizer steps
    # interval in tokens; these checkpoints are kept forever, to average or to branch from
    interval_tokens: int | None = knob(None, above=0)
    # checkpoints at certain steps, kept forever; pythia: before the first, at 1, 2, 4, ..., 512, and every 1000
    milestones: Literal["none", "pythia"] = "none"
    # newest checkpoints kept; those at the end of a phase, of interval_tokens or milestones are always kept
    keep: int = knob(3, above=0)
    # replica: s3://BUCKET/FOLDER or any URL that fsspec supports. Checkpoints are copied there in the background and
    # verified; if the run's folder is gone, the run resumes from there
    copy_to: str | None = None
    copy_keep: int | None = knob(None, above=0)  # newest checkpoints kept there; None: checkpoint.keep
    # timeout without progress of a store: it is tried again later, but not waited for at the end of the run
    copy_timeout_seconds: float = knob(120.0, above=0)


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """Handling of a batch that would harm the weights. Its update is skipped before it is applied.

    stop ends the run; skip omits the batch's update; roll_back also restores weights and moments from a checkpoint
    before it. Clock and data advance in both. See docs/stability.md.
    """

    non_finite: Literal["stop", "skip", "roll_back"] = "stop"  # the loss or a gradient is NaN or infinite
    spike: Literal["ignore", "stop", "skip", "roll_back"] = "ignore"  # the loss jumps; ignore: only recorded
    # batches of the phase that a loss is compared with; spikes are detected only after so many
    spike_window_batches: int = knob(128, low=8, high=1 << 20, why="since a spread of fewer losses means nothing")
    # a spike is this many robust standard deviations above their median ...
    spike_deviations: float = knob(8.0, above=0)
    spike_min_rise: float = knob(0.5, above=0)  # ... and at least this many nats above it
    # minimum number of batches to roll back from a spike; PaLM: about 100
    spike_roll_back_batches: int = knob(0, low=0)
    max_skips: int = knob(20, low=0)  # skipped batches over the whole run; one more stops it
    max_roll_backs: int = knob(3, low=0)  # rollbacks over the whole run; one more stops it


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How several ranks share the model; see docs/plan.md."""

    strategy: Literal["ddp", "fsdp2", "hsdp"] = "ddp"  # for several ranks; hsdp: replicas, each sharded by FSDP2
    shard_ranks: int | None = None  # hsdp only: ranks that share one replica, usually the ranks of one machine
    timeout_seconds: float = knob(300.0, above=0)  # a collective that waits longer ends the job
    # timeout until the second step of a start: on a machine with a cold cache the layers compile for minutes
    first_step_timeout_seconds: float = knob(1800.0, above=0)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Progress output of a run; other loggers are in `loggers`."""

    progress_bar: bool = True  # on a terminal one line that is redrawn; elsewhere, or if false, a line now and then
    line_seconds: float = knob(10.0, above=0)  # time between those lines


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profile a few steps: a trace and a table in <run folder>/profile; see docs/watching.md."""

    steps: int = knob(3, above=0)  # recorded optimizer steps, on rank 0
    skip: int = knob(10, above=0)  # steps of each start before recording, while compilation and caches settle
    stacks: bool = False  # record Python's call stacks; makes the recorded steps slower
    memory: bool = False  # record allocations


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run: everything that decides its weights, and its folder."""

    name: str = knob(restart=True)  # letters, digits, '.', '_' and '-'
    runs_folder: str = knob("runs", restart=True)  # the run's folder is <runs_folder>/<name>
    # your packages, imported first, which add encoders, objectives, optimizers or evaluations; see
    # docs/extending.md
    plugins: list[str] = knob(factory=list, restart=True)
    seed: int = knob(17, low=0, below=1 << 31, why="which Composer requires")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModernBertConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    objective: ObjectiveConfig = field(default_factory=MaskedLmConfig)
    optim: OptimConfig = field(default_factory=StableAdamWConfig)
    # in order; at least one. Trained phases must stay: checkpoints/resume_rules.py compares them with the checkpoint's
    phases: dict[str, PhaseConfig] = knob(factory=dict, restart=True)
    start: StartConfig | None = None  # None: from scratch, or from the model of `weights`
    eval: EvalConfig = knob(factory=EvalConfig, restart=True)
    # other evaluations during training, by names of your choice; see docs/watching.md
    evals: dict[str, EvaluatorConfig] = knob(factory=dict, restart=True)
    checkpoint: CheckpointConfig = knob(factory=CheckpointConfig, restart=True)
    # every skip and rollback is recorded
    stability: StabilityConfig = knob(factory=StabilityConfig, restart=True)
    distributed: DistributedConfig = knob(factory=DistributedConfig, restart=True)
    launch: LaunchConfig = knob(factory=LaunchConfig, restart=True, local=True)
    logging: LoggingConfig = knob(factory=LoggingConfig, restart=True)
    profile: ProfileConfig | None = knob(None, restart=True)  # None: off, without any cost
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
        """True if the run has validation text or evaluations."""
        return self.data.validation is not None or bool(self.evals)

    @property
    def from_scratch(self) -> bool:
        """True if the run starts from freshly initialized weights."""
        return self.start is None and not self.weights.named

    @property
    def reads_labels(self) -> bool:
        """True if an objective of the run reads labels, so that held-out documents are read whole."""
        return any(now.objective.reads_labels for now in (self, *self.in_phase.values()))

    @property
    def modernbert(self) -> ModernBertConfig:
        """The model, for code that only supports ModernBERT; raises ConfigError if it is another."""
        if not isinstance(self.model, ModernBertConfig):
            raise ConfigError(f"model.name={self.model.name}: cannot be used here yet. Set model.name=modernbert.")
        return self.model

    @cached_property
    def in_phase(self) -> Mapping[str, RunConfig]:
        """The run in each phase, with the phase's overrides applied."""
        return {
            name: replace(
                self, **{key: _overridden(key, getattr(self, key), getattr(phase, key)) for key in phase.overridden}
            )
            for name, phase in self.phases.items()
        }


def _overridden(section: str, value: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a section with a phase's overrides; for another variant, the overrides are the whole section."""
    name = overrides.get("name", value.name)
    return replace(value, **overrides) if name == value.name else VARIANTS[section][name](**overrides)


# Sections for which a phase may choose another variant.
CHANGED_WHOLE = ("objective",)

# A section, or each entry of a mapping, with a schema chosen by its `name`: section -> name -> dataclass.
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
        "esm": EsmConfig,
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
    "evals": {"probe": ProbeConfig, "scores": ScoresConfig, "text": HeldoutStreamConfig},
}
