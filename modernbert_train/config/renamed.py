"""Old keys, for messages about old files: renamed ones as old -> new, where `*` is any name, and removed ones.

docs/config.md lists the renamed keys. A row stays as long as files with the old key may exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RENAMED = {
    "device": "compute.device",
    "precision": "compute.precision",
    "model.attention": "compute.attention",
    "model.global_attention": "compute.global_attention",
    "model.compile": "compute.compile",
    "model.activation_checkpointing": "compute.activation_checkpointing",
    "model.z_loss": "objective.z_loss",
    "model.init_from": "weights.init_from",
    "model.grow_from": "weights.grow_from",
    "model.grow_mode": "weights.grow_mode",
    "phases.*.global_rope_theta": "phases.*.model.global_rope_theta",
    "phases.*.local_rope_theta": "phases.*.model.local_rope_theta",
    "phases.*.mask_rate": "phases.*.objective.mask_rate",
    "phases.*.weight_decay": "phases.*.optim.weight_decay",
}

# keys of earlier versions -> their replacement; configurations saved by old runs may still have them
REMOVED_KEYS = {
    "compute.tuned": "was removed with the verb `tune`. Remove it. To use what `tune` found, write the settings of its "
    "settings.json as keys of the run, microbatch_tokens as phases.NAME.microbatch_tokens.",
}
REMOVED_RECIPE_KEYS = {  # of a recipe of `retrieval train`
    "accumulate": "was removed: the negatives of a query are the texts of the whole batch, which is encoded in parts. "
    "Remove it, and set batch_size to the pairs that are compared.",
    "no_duplicates": "was removed: equal texts of a batch are never negatives of each other. Remove it.",
}


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of plain values without the keys of REMOVED_KEYS."""
    gone = {tuple(key.split(".")) for key in REMOVED_KEYS}

    def kept(branch: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        return {
            key: kept(value, (*path, key)) if isinstance(value, Mapping) else value
            for key, value in branch.items()
            if (*path, key) not in gone
        }

    return kept(tree, ())


def new_name(path: Sequence[str]) -> str | None:
    """Return the current name of an old key; None if it is not an old key."""
    for old, new in RENAMED.items():
        words = old.split(".")
        if len(words) == len(path) and all(part in ("*", word) for part, word in zip(words, path, strict=True)):
            names = [word for part, word in zip(words, path, strict=True) if part == "*"]
            return new.replace("*", "{}").format(*names) if names else new
    return None


# other frameworks' name of a key, by its last part -> this program's key, or a sentence
SYNONYMS = {
    **dict.fromkeys(("learning_rate", "peak_lr", "base_lr"), "optim.lr"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "global_batch_size", "global_train_batch_size"),
        "phases.NAME.batch_rows, in packed rows of the global batch",
    ),
    **dict.fromkeys(
        (
            "micro_batch_size", "microbatch_size", "device_train_microbatch_size", "per_device_train_batch_size",
            "device_train_batch_size",
        ),
        "phases.NAME.microbatch_tokens, in tokens of one forward pass on one rank",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches"),
        "There is none here: it follows from phases.NAME.batch_rows, phases.NAME.microbatch_tokens and the ranks",
    ),
    **dict.fromkeys(
        ("max_seq_len", "max_seq_length", "seq_len", "seq_length", "sequence_length", "context_length", "block_size",
         "max_length"),
        "phases.NAME.row_tokens",
    ),
    **dict.fromkeys(
        ("max_duration", "max_steps", "num_train_epochs", "epochs", "num_epochs", "train_steps", "total_steps",
         "max_tokens_to_train", "num_steps"),
        "phases.NAME.tokens: training is counted in tokens that are not padding",
    ),
    **dict.fromkeys(
        ("warmup_steps", "warmup_ratio", "num_warmup_steps", "t_warmup", "warmup"), "phases.NAME.schedule.warmup_tokens"
    ),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), "phases.NAME.schedule"),
    **dict.fromkeys(("mlm_probability", "masking_rate", "mask_prob", "mlm_prob"), "objective.mask_rate"),
    **dict.fromkeys(("d_model", "n_embd", "hidden_dim", "embed_dim"), "model.hidden_size"),
    **dict.fromkeys(("n_layers", "n_layer", "num_hidden_layers", "depth"), "model.num_layers"),
    **dict.fromkeys(("n_heads", "n_head", "num_attention_heads"), "model.num_heads"),
    **dict.fromkeys(("d_ff", "ffn_dim", "mlp_dim", "intermediate_dim"), "model.intermediate_size"),
    **dict.fromkeys(("rope_theta", "rope_base", "rotary_emb_base"), "model.global_rope_theta"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "optim.betas"),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), "optim.eps"),
    **dict.fromkeys(
        ("max_grad_norm", "grad_clip", "gradient_clip_val", "gradient_clipping", "clip_grad_norm", "clip_grad"),
        "optim.max_grad_norm of optim.name=adamw; stable_adamw, muon and normuon have none, because they bound each "
        "update by themselves; see docs/stability.md",
    ),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "autocast"), "compute.precision"),
    **dict.fromkeys(("torch_compile", "compile_model"), "compute.compile"),
    **dict.fromkeys(("gradient_checkpointing", "activation_recomputation"), "compute.activation_checkpointing"),
    **dict.fromkeys(("fsdp", "fsdp_config", "parallelism_config", "deepspeed"), "distributed.strategy"),
    **dict.fromkeys(("dataset", "dataset_path", "data_path", "data_dir", "train_file", "data_local"), "data.train"),
    **dict.fromkeys(("validation_file", "eval_file", "val_path"), "data.validation"),
    **dict.fromkeys(("tokenizer_name", "tokenizer_path"), "data.tokenizer"),
    **dict.fromkeys(("dataloader_num_workers", "workers"), "data.num_workers"),
    **dict.fromkeys(("output_dir", "save_folder", "save_dir", "out_dir"), "runs_folder, and name"),
    **dict.fromkeys(("run_name", "exp_name", "experiment_name"), "name"),
    **dict.fromkeys(
        ("save_steps", "save_interval", "save_every"), "checkpoint.interval_seconds or checkpoint.interval_steps"
    ),
    **dict.fromkeys(("save_total_limit", "save_num_checkpoints_to_keep"), "checkpoint.keep"),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_every"), "eval.interval_tokens"),
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint", "autoresume", "load_path"),
        "There is none here: the same command resumes from the newest checkpoint by itself; weights.init_from starts a "
        "run from other weights",
    ),
    **dict.fromkeys(("report_to", "wandb", "use_wandb"), "loggers.wandb"),
}  # fmt: skip

# other frameworks' names of allowed values -> this program's
VALUE_SYNONYMS = {
    **dict.fromkeys(("gpu", "gpus", "nvidia", "cuda:0"), "cuda"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "amp_bf16", "mixed"), "bf16"),
    **dict.fromkeys(("float32", "float", "32"), "fp32"),
    **dict.fromkeys(("fsdp", "fsdp1", "zero3", "full_shard"), "fsdp2"),
    **dict.fromkeys(("hybrid_shard", "hybrid"), "hsdp"),
}


def own_word(path: Sequence[str], names: Sequence[str]) -> str | None:
    """Return a sentence with this program's name for a key of other frameworks; None for unknown keys.

    Args:
        path: the key.
        names: of the keys that exist in its place.
    """
    word = SYNONYMS.get(path[-1])
    if word is None or (len(path) == 1 and "phases" not in names):  # not a run's
        return None
    return word if word[0].isupper() else f"Here it is {word}"
