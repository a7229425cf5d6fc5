"""Translate a run file of AnswerDotAI/ModernBERT to a run of this program, key by key; every key is accounted for.

Every key of the old file has one of three outcomes: it is translated; it is listed with the reason why it lacks a
counterpart (LEFT); or the file is refused, because its model is another architecture (FIXED) or a value is unsupported.
The tables below are also the page docs/moving.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from modernbert_train.config.read_yaml import read_yaml
from modernbert_train.core.trees import dotted
from modernbert_train.errors import ConfigError

# Their key -> this program's, with the same value.
SAME = {
    "seed": "seed",
    "mlm_probability": "objective.mask_rate",
    "model.model_config.vocab_size": "model.vocab_size",
    "model.model_config.hidden_size": "model.hidden_size",
    "model.model_config.num_hidden_layers": "model.num_layers",
    "model.model_config.num_attention_heads": "model.num_heads",
    "model.model_config.intermediate_size": "model.intermediate_size",
    "model.model_config.global_attn_every_n_layers": "model.global_attn_every_n_layers",
    "model.model_config.sliding_window": "model.local_attention",
    "model.model_config.norm_kwargs.eps": "model.norm_eps",
    "model.model_config.attn_out_dropout_prob": "model.attention_out_dropout",
    "model.model_config.init_std": "model.init_std",
    "model.model_config.init_cutoff_factor": "model.init_cutoff",
    "model.model_config.compile_model": "compute.compile",
    "model.gradient_checkpointing": "compute.activation_checkpointing",
    "optimizer.lr": "optim.lr",
    "optimizer.betas": "optim.betas",
    "optimizer.eps": "optim.eps",
    "optimizer.weight_decay": "optim.weight_decay",
    "eval_loader.dataset.mlm_probability": "objective.eval_mask_rate",
    "train_loader.num_workers": "data.num_workers",
}

# Options of FlexBERT, the reference's model, that this encoder lacks. Its defaults are another architecture, so a key
# that a run file lacks counts as FlexBERT's default. weights/composer_file.py reads the same table.
FIXED: dict[str, tuple[Any, Any]] = {  # key of model.model_config -> (required value, FlexBERT's default)
    "attention_layer": ("rope", "base"),
    "bert_layer": ("prenorm", "prenorm"),
    "mlp_layer": ("glu", "mlp"),
    "encoder_layer": ("base", "base"),
    "initial_attention_layer": (None, None),
    "initial_bert_layer": (None, None),
    "initial_mlp_layer": (None, None),
    "embedding_layer": ("sans_pos", "absolute_pos"),
    "normalization": ("layernorm", "rmsnorm"),
    "hidden_act": ("gelu", "gelu"),
    "head_pred_act": ("gelu", "gelu"),
    "head_pred_norm": (True, True),
    "init_method": ("full_megatron", "default"),
    "attn_qkv_bias": (False, False),
    "attn_out_bias": (False, False),
    "mlp_in_bias": (False, False),
    "mlp_out_bias": (False, False),
    "norm_kwargs.bias": (False, True),
    "embed_norm": (True, True),
    "final_norm": (True, False),
    "skip_first_prenorm": (True, False),
    "attention_probs_dropout_prob": (0.0, 0.0),
    "embed_dropout_prob": (0.0, 0.0),
    "mlp_dropout_prob": (0.0, 0.0),
    "rotary_emb_interleaved": (False, False),
    "rotary_emb_scale_base": (None, None),
    "rotary_emb_dim": (None, None),
    "local_attn_rotary_emb_dim": (None, None),
}

# Keys (or sections) without a counterpart, and the reason.
LEFT = {
    "model.name": "there is one model",
    "model.pretrained_model_name": "nothing is taken from another model's configuration",
    "model.tokenizer_name": "data.tokenizer",
    "tokenizer_name": "data.tokenizer names a folder; prepare writes it next to the shards",
    "model.recompute_metric_loss": "metrics are the forward's",
    "model.disable_train_metrics": "metrics are the forward's",
    "model.model_config.padding": "rows are always packed",
    "model.model_config.unpad_embeddings": "rows are always packed",
    "model.model_config.pad_logits": "logits exist where something is predicted",
    "model.model_config.masked_prediction": "logits exist where something is predicted",
    "model.model_config.sparse_prediction": "logits exist where something is predicted",
    "model.model_config.loss_function": "cross-entropy in fp32",
    "model.model_config.loss_kwargs": "cross-entropy in fp32; for a z-loss set objective.z_loss",
    "model.model_config.activation_function": "read by nothing there either",
    "model.model_config.allow_embedding_resizing": "model.vocab_size is the size",
    "model.model_config.use_fa2": "compute.attention chooses the kernel",
    "model.model_config.use_sdpa_attn_mask": "compute.attention chooses the kernel",
    "optimizer.filter_bias_norm_wd": "norms and biases are never decayed",
    "optimizer.log_grad_norm": "gradient and update norms are always logged",
    "train_loader": "tokens are packed from shards: the keys of data, and packing_window",
    "train_loader.name": "text is the only kind",
    "train_loader.drop_last": "every token has its turn",
    "train_loader.dataset.shuffle": "documents are always shuffled",
    "train_loader.dataset.shuffle_seed": "seed keys the order too",
    "train_loader.dataset.streaming": "shards are read where they are, and fetched if they are in a store",
    "train_loader.dataset.tokenizer_name": "data.tokenizer",
    "train_loader.dataset.mlm_probability": "objective.mask_rate",
    "train_loader.dataset.max_seq_len": "row_tokens of the phase",
    "train_loader.sequence_packing": "rows are always packed",
    "train_loader.dataset.sequence_packing": "rows are always packed",
    "eval_loader": "data.validation and eval",
    "data_local": "data.train",
    "data_remote": "data.train",
    "count_padding_tokens": "padding is never counted",
    "callbacks": "speed, memory, norms and packing are always measured; Composer's own go into callbacks",
    "algorithms.gradient_clipping": "StableAdamW clips each tensor's update instead; adamw has optim.max_grad_norm",
    "algorithms.rope_schedule": "did nothing; a phase may have its own model.global_rope_theta",
    "global_eval_batch_size": "validation has the training's microbatch",
    "device_eval_batch_size": "validation has the training's microbatch",
    "device_eval_microbatch_size": "validation has the training's microbatch",
    "eval_subset_num_batches": "eval.max_tokens",
    "train_subset_num_batches": "a phase ends by tokens",
    "save_folder": "checkpoints lie in the run's folder",
    "save_num_checkpoints_to_keep": "checkpoint.keep",
    "save_overwrite": "a whole checkpoint is never overwritten",
    "autoresume": "the same command always resumes",
    "load_weights_only": "weights.init_from",
    "restart_override": "rates are computed from the YAML at every step, never restored",
    "progress_bar": "logging.progress_bar",
    "log_to_console": "progress is always printed",
    "console_log_interval": "logging.line_seconds",
    "python_log_level": "errors have one form",
    "fsdp_config": "distributed.strategy",
    "compile_config": "compute.compile",
    "device": "compute.device: auto",
}
_ABSENT = object()
TOKENIZER = "data/my_text/tokenizer"


def import_config(file: Path) -> tuple[str, list[str]]:
    """Translate a run file of AnswerDotAI/ModernBERT.

    Args:
        file: YAML for their main.py; `${name}` of a key in it is resolved.

    Returns:
        YAML of this program, and a note for each key without a counterpart or that needs attention.

    Raises:
        ConfigError: the file cannot be read, or requires unsupported features; lists everything.
    """
    theirs = _Keys(file)
    ours: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9._-]", "-", str(theirs.take("run_name", file.stem)))}
    theirs.settle("mlm_probability", "train_loader.dataset.mlm_probability")
    for old, new in SAME.items():
        value = theirs.take(old)
        if value is not _ABSENT and value is not None:
            _put(ours, new, value)
    _data(theirs, ours)
    _architecture(theirs)
    _optimizer(theirs, ours)
    _put(ours, "phases.main", _phase(theirs, ours))
    _start(theirs, ours)
    _rest(theirs, ours)
    if theirs.problems:
        raise ConfigError("\n".join(theirs.problems))
    return as_yaml(ours), [*theirs.notes, *theirs.left()]


def as_yaml(ours: dict[str, Any]) -> str:
    """Return the sections of a run as YAML, in their order."""
    return yaml.safe_dump(ours, sort_keys=False)


class _Keys:
    """Keys of the old file, dotted; each is taken once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._values = dotted(read_yaml(file, {}, self.problems))
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        if self.below("phases"):
            raise ConfigError(
                f"{file}: phases is a key of this program, so the file is a run of it already. Train it: "
                f"python -m modernbert_train train {file}"
            )
        for key, value in self._values.items():
            if isinstance(value, str) and (match := re.fullmatch(r"\$\{([\w.]+)\}", value)):
                self._values[key] = self._values.get(match[1], value)

    def take(self, key: str, default: Any = _ABSENT) -> Any:
        return self._values.pop(key, default)

    def settle(self, key: str, instead: str) -> None:
        """Use the value of `instead` if a key is missing."""
        if instead in self._values:
            self._values.setdefault(key, self._values[instead])

    def below(self, section: str) -> list[str]:
        """Return the names of the sections in a section, in their order."""
        inner = (key.removeprefix(f"{section}.").split(".")[0] for key in self._values if key.startswith(f"{section}."))
        return list(dict.fromkeys(inner))

    def whole(self, key: str, unit: str, default: Any = _ABSENT) -> Any:
        """Take a number with a unit, such as `3_000_000_000tok`; without a unit, samples or rows."""
        value = self.take(key, default)
        match = re.fullmatch(r"([\d_]+)\s*(\w*)", str(value))
        if value is default or value is None:
            return default
        if match is None or match[2] not in ("", unit):
            self.problems.append(f"{key}={value} ({self.file}): not a number of {unit}, the only unit read here.")
            return default
        return int(match[1].replace("_", ""))

    def interval(self, key: str, tokens_per_step: int) -> tuple[int, str] | None:
        """Take a number of `steps` or `tokens`; None if it is missing, or beyond the end of any run."""
        value = str(self._values.get(key))
        tokens = value.endswith("tok")
        number = self.whole(key, "tok" if tokens else "ba", None)
        if number is not None and number * (1 if tokens else tokens_per_step) >= 1 << 50:
            self.notes.append(f"{key}={value}: beyond the end of any run, so the default is used")
            return None
        return None if number is None else (number, "tokens" if tokens else "steps")

    def either(self, key: str, unit: str) -> Any:
        """Take a number by `whole`, from the train loader or from its dataset."""
        of_loader = self.whole(f"train_loader.{key}", unit)
        of_dataset = self.whole(f"train_loader.dataset.{key}", unit)
        return of_dataset if of_loader is _ABSENT else of_loader

    def left(self) -> list[str]:
        """Return a note for each key that was not taken."""
        notes = {}
        for key in self._values:
            reason = next((LEFT[part] for part in _parents(key) if part in LEFT), None)
            where = next((part for part in _parents(key) if part in LEFT), key)
            notes[where] = f"{where}: {reason or 'not known here, not carried over'}"
        return list(notes.values())


def _parents(key: str) -> list[str]:
    words = key.split(".")
    return [".".join(words[:length]) for length in range(len(words), 0, -1)]


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _data(theirs: _Keys, ours: dict[str, Any]) -> None:
    """Translate folders of shards, with the commands that make them trainable here."""
    theirs.take("data_local"), theirs.take("data_remote")  # already resolved in `${data_local}`
    streams = _streams(theirs, "train_loader.dataset")
    if streams:
        _put(ours, "data.streams", streams)
    else:
        _put(ours, "data.train", _folder(theirs, "train_loader.dataset", "data.train", "data/my_text/train"))
    validation = _folder(theirs, "eval_loader.dataset", "data.validation", "data/my_text/validation")
    _put(ours, "data.validation", validation)
    _put(ours, "data.tokenizer", TOKENIZER)
    theirs.settle("tokenizer_name", "train_loader.dataset.tokenizer_name")
    name = theirs.take("tokenizer_name", "TOKENIZER")
    theirs.notes.append(
        f"data.tokenizer: a folder. Fetch tokenizer.json of {name}, and then: python -m modernbert_train tokenizer "
        f"adapt {TOKENIZER} tokenizer.json --extend"
    )


def _folder(theirs: _Keys, section: str, key: str, placeholder: str) -> str:
    """Return the folder of shards of a section, as a value for a key here."""
    local, remote = theirs.take(f"{section}.local", None), theirs.take(f"{section}.remote", None)
    split = theirs.take(f"{section}.split", None)
    if local is None and remote is None:
        theirs.notes.append(f"{key}: a placeholder; prepare the text first, see docs/data.md")
        return placeholder
    below = f"/{split}" if split else ""
    if remote is None:
        folder = f"{str(local).rstrip('/')}{below}"
        theirs.notes.append(f"{key}: first python -m modernbert_train adopt {folder} --tokenizer {TOKENIZER}")
        return folder
    name = key.removeprefix("data.").removeprefix("streams.").removesuffix(".path")
    url, out = f"{str(remote).rstrip('/')}{below}", f"data/adopted/{name}"
    theirs.notes.append(f"{key}: first python -m modernbert_train adopt {url} --tokenizer {TOKENIZER} --out {out}")
    return out


def _streams(theirs: _Keys, section: str) -> dict[str, dict[str, Any]]:
    """Translate Streaming's streams: proportions that add up to 1, or repetitions."""
    streams: dict[str, dict[str, Any]] = {}
    for name in theirs.below(f"{section}.streams"):
        here = f"{section}.streams.{name}"
        streams[name] = {"path": _folder(theirs, here, f"data.streams.{name}.path", f"data/{name}/train")}
        for share in ("proportion", "repeat"):
            value = theirs.take(f"{here}.{share}", None)
            if value is not None:
                streams[name][share] = value
        if (chosen := theirs.take(f"{here}.choose", None)) is not None:
            theirs.notes.append(
                f"{here}.choose={chosen}: samples of a pass; here data.streams.{name}.tokens counts tokens"
            )
    shares = [each["proportion"] for each in streams.values() if "proportion" in each]
    if shares and len(shares) == len(streams):
        for each in streams.values():
            each["proportion"] = each["proportion"] / sum(shares)
    return streams


def _architecture(theirs: _Keys) -> None:
    for key, (needed, default) in FIXED.items():
        value = theirs.take(f"model.model_config.{key}", default)
        if value != needed:
            theirs.problems.append(
                f"model.model_config.{key}={value} ({theirs.file}): this encoder only supports {needed}, so it cannot "
                "be trained here."
            )


def _optimizer(theirs: _Keys, ours: dict[str, Any]) -> None:
    name = theirs.take("optimizer.name", "decoupled_stableadamw")
    our_names = {"decoupled_stableadamw": "stable_adamw", "adamw": "adamw"}
    if name not in our_names:
        theirs.problems.append(f"optimizer.name={name} ({theirs.file}): only {' and '.join(our_names)} exist here.")
    ours["optim"] = {"name": our_names.get(name, name), **ours.get("optim", {})}


def _phase(theirs: _Keys, ours: dict[str, Any]) -> dict[str, Any]:
    row_tokens = theirs.take("max_seq_len", theirs.take("train_loader.dataset.max_seq_len", 1024))
    tokens = theirs.whole("max_duration", "tok")
    if tokens is _ABSENT:
        theirs.problems.append(f"max_duration ({theirs.file}): a phase here is counted in tokens. Give it as ...tok.")
        tokens = 0
    micro = theirs.take("device_train_microbatch_size", 1)
    if not isinstance(micro, int):
        theirs.notes.append(f"device_train_microbatch_size={micro}: set to one row; `plan` predicts what fits")
        micro = 1
    phase: dict[str, Any] = {
        "tokens": tokens,
        "row_tokens": row_tokens,
        "batch_rows": theirs.take("global_train_batch_size", micro),
        "microbatch_tokens": micro * row_tokens,
    }
    smallest = theirs.either("batch_size_warmup_min_size", "sp")
    over = theirs.either("batch_size_warmup_tokens", "tok")
    if smallest is not _ABSENT and over is not _ABSENT:
        phase["batch_warmup"] = {"start_rows": smallest, "step_rows": smallest, "tokens": over}
        theirs.notes.append("batch_warmup.step_rows: there it was the microbatch times the GPUs; here it is start_rows")
    phase["schedule"] = _schedule(theirs, tokens)
    theta = theirs.take("model.model_config.rotary_emb_base", 10_000.0)
    local = theirs.take("model.model_config.local_attn_rotary_emb_base", -1)
    _put(ours, "model.global_rope_theta", theta)
    _put(ours, "model.local_rope_theta", theta if local in (-1, None) else local)
    return phase


def _schedule(theirs: _Keys, tokens: int) -> dict[str, Any]:
    name = theirs.take("scheduler.name", "constant_with_warmup")
    warmup = theirs.whole("scheduler.t_warmup", "tok", 0)
    final = theirs.take("scheduler.alpha_f", 0.0)
    decay = theirs.whole("scheduler.t_decay", "tok", 0)
    theirs.take("scheduler.t_max")
    kinds = {
        "warmup_stable_decay": ("linear", decay),
        "one_minus_sqrt": ("one_minus_sqrt", decay),
        "constant_with_warmup": ("linear", 0),
        "linear_decay_with_warmup": ("linear", tokens - warmup),
        "cosine_with_warmup": ("cosine", tokens - warmup),
    }
    if name not in kinds:
        theirs.problems.append(f"scheduler.name={name} ({theirs.file}): known are {', '.join(kinds)}.")
        return {}
    kind, length = kinds[name]
    schedule: dict[str, Any] = {"warmup_tokens": warmup}
    return schedule | ({"decay_tokens": length, "decay": kind, "final_lr_ratio": final} if length else {})


def _start(theirs: _Keys, ours: dict[str, Any]) -> None:
    path, reset = theirs.take("load_path", None), theirs.take("reset_time", False)
    if path is not None:
        theirs.notes.append(
            f"load_path={path}: from their checkpoint only weights are used, as weights.init_from; to continue a run "
            f"of this program use start.checkpoint{', with start.clock=reset for reset_time' if reset else ''}"
        )
        _put(ours, "weights.init_from", path)
    grown = theirs.take("init_from_checkpoint.checkpoint_load_path", None)
    if grown is not None:
        mode = theirs.take("init_from_checkpoint.mode", "tile_weights_from_middle")
        if mode != "tile_weights_from_middle":
            theirs.problems.append(f"init_from_checkpoint.mode={mode} ({theirs.file}): only center tiling exists here.")
        run = theirs.take("init_from_checkpoint.checkpoint_run_name", None)
        theirs.take("init_from_checkpoint.checkpoint_cfg")
        _put(ours, "weights.grow_from", f"{grown}/{run}/latest-rank0.pt" if run else grown)
        _put(ours, "weights.grow_mode", "paper")


def _rest(theirs: _Keys, ours: dict[str, Any]) -> None:
    precision = theirs.take("precision", "amp_bf16")
    if precision not in ("amp_bf16", "fp32"):
        theirs.problems.append(f"precision={precision} ({theirs.file}): amp_bf16 and fp32 exist here.")
    _put(ours, "compute.precision", {"amp_bf16": "auto", "fp32": "fp32"}.get(precision, "auto"))
    phase = ours["phases"]["main"]
    tokens_per_step = phase["batch_rows"] * phase["row_tokens"]
    if (every := theirs.interval("save_interval", tokens_per_step)) is not None:
        number, unit = every
        _put(ours, f"checkpoint.interval_{unit}", number)
    if (every := theirs.interval("eval_interval", tokens_per_step)) is not None:
        number, unit = every
        _put(ours, "eval.interval_tokens", number if unit == "tokens" else number * tokens_per_step)
    wandb = {key: theirs.take(f"loggers.wandb.{key}", None) for key in ("project", "entity")}
    if wandb["project"] is not None:
        _put(ours, "loggers.wandb", {key: value for key, value in wandb.items() if value is not None})
