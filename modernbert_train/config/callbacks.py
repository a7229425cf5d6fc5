"""Composer's callbacks and loggers that a run may use, with their arguments, as data: `check` works without Composer.

The names are Composer's, as in YAML files of its users. train/callbacks.py has the classes; a test compares the
arguments with their constructors. Plugins that cannot work in this trainer are refused with the reason.
"""

from __future__ import annotations

# section -> name -> arguments of the constructor
ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "callbacks": {
        "free_outputs": (),
        "lr_monitor": (),
        "memory_monitor": ("memory_keys", "dist_aggregate_batch_interval"),
        "memory_snapshot": ("skip_batches", "interval", "max_entries", "folder", "filename", "overwrite"),
        "oom_observer": ("max_entries", "folder", "filename", "overwrite"),
        "optimizer_monitor": ("log_optimizer_metrics", "batch_log_interval"),
        "runtime_estimator": ("skip_batches", "time_unit"),
        "speed_monitor": ("window_size", "gpu_flops_available", "time_unit"),
        "system_metrics_monitor": ("log_all_data",),
    },
    "loggers": {
        "cometml": ("workspace", "project_name", "log_code", "log_graph", "name", "exp_kwargs"),
        "console": ("log_interval", "stream", "log_traces"),
        "file": ("capture_stdout", "capture_stderr", "buffer_size", "log_traces", "flush_interval"),
        "in_memory": (),
        "mlflow": (
            "experiment_name",
            "run_name",
            "tags",
            "tracking_uri",
            "flush_interval",
            "synchronous",
            "log_system_metrics",
            "rename_metrics",
            "ignore_metrics",
            "ignore_hyperparameters",
            "run_group",
            "resume",
            "logging_buffer_seconds",
            "log_duplicated_metric_every_n_steps",
        ),
        "neptune": ("project", "base_namespace", "mode"),
        "slack": ("include_keys", "log_interval", "max_logs_per_message", "channel_id"),
        "tensorboard": ("log_dir", "flush_interval"),
        "trackio": ("project", "name", "group", "space_id", "server_url"),
        "wandb": ("project", "group", "name", "entity", "tags", "init_kwargs"),
    },
}

# plugin -> the package it needs besides Composer
PACKAGES = {
    "cometml": "comet_ml",
    "mlflow": "mlflow",
    "neptune": "neptune",
    "slack": "slack_sdk",
    "system_metrics_monitor": "psutil",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}

GPU_ONLY = ("memory_monitor", "memory_snapshot", "oom_observer")  # callbacks that measure nothing on a CPU

_OUR_CHECKPOINTS = "the checkpoint: section writes and finds checkpoints here, not Composer"
_OUR_VALIDATION = "it reads Composer's metrics, and validation here is measured by the eval: section"
_RANK_ZERO = "loggers run only on rank 0 here, so a failing one cannot leave the other ranks waiting"
_ONE_FILE = "every start writes a new file into the run's folder, named by its time"
_NO_UPLOADS = "nothing here uploads files through loggers; copy them yourself"
_SECRET = "it would be saved with the run's configuration; set the environment variable {} instead"

# path below the root -> why it cannot work here
REFUSED: dict[str, str] = {
    "callbacks.activation_monitor": "it logs each first index of a tensor separately, which is a token here",
    "callbacks.checkpoint_saver": _OUR_CHECKPOINTS,
    "callbacks.early_stopper": _OUR_VALIDATION,
    "callbacks.export_for_inference": "`python -m modernbert_train export` writes a Hugging Face model",
    "callbacks.generate": "an encoder generates no text",
    "callbacks.image_visualizer": "there are no images",
    "callbacks.load_checkpoint": f"{_OUR_CHECKPOINTS}; first weights from elsewhere are weights.init_from",
    "callbacks.memory_snapshot.remote_file_name": _NO_UPLOADS,
    "callbacks.mlperf": "it writes the log of another benchmark",
    "callbacks.nan_monitor": "the stability: section sees NaN and infinity on every rank; this sees NaN on one",
    "callbacks.oom_observer.remote_file_name": _NO_UPLOADS,
    "callbacks.threshold_stopper": _OUR_VALIDATION,
    "loggers.cometml.rank_zero_only": _RANK_ZERO,
    "loggers.file.filename": _ONE_FILE,
    "loggers.file.overwrite": _ONE_FILE,
    "loggers.file.remote_file_name": _NO_UPLOADS,
    "loggers.mlflow.model_registry_prefix": _NO_UPLOADS,
    "loggers.mlflow.model_registry_uri": _NO_UPLOADS,
    "loggers.mlflow.rank_zero_only": _RANK_ZERO,
    "loggers.mosaicml": "it reports to a platform that does not start this trainer",
    "loggers.neptune.api_token": _SECRET.format("NEPTUNE_API_TOKEN"),
    "loggers.neptune.rank_zero_only": _RANK_ZERO,
    "loggers.neptune.upload_checkpoints": _OUR_CHECKPOINTS,
    "loggers.progress_bar": "the bar on a terminal is logging.progress_bar",
    "loggers.remote_uploader_downloader": _NO_UPLOADS,
    "loggers.slack.formatter_func": "a function cannot be written in YAML",
    "loggers.slack.slack_logging_api_key": _SECRET.format("SLACK_LOGGING_API_KEY"),
    "loggers.tensorboard.rank_zero_only": _RANK_ZERO,
    "loggers.wandb.log_artifacts": _OUR_CHECKPOINTS,
    "loggers.wandb.rank_zero_only": _RANK_ZERO,
}
