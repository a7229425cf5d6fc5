"""The teacher of objective.teacher: opened and compared with the run before the model is built, then read.

Every rank reads it whole and keeps its share if the model is sharded. Hashes of its used tensors and of its
configuration are saved with each checkpoint, so a resumed run refuses another teacher, in any place and format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from modernbert_train.config.distill import DistillConfig
from modernbert_train.config.knob import facts_of
from modernbert_train.config.schema import (
    ComputeConfig,
    MaskedLmConfig,
    ModelConfig,
    ObjectiveConfig,
    PhaseConfig,
    RunConfig,
)
from modernbert_train.data.fingerprint import TEACHER, TEACHER_CONFIG
from modernbert_train.errors import ConfigError
from modernbert_train.models.build import build_model
from modernbert_train.models.distilled import Distilled, Teacher
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.init import module_of
from modernbert_train.weights.formats.tensors import DECODER, MASKED_LM
from modernbert_train.weights.source import Source, check_same_tokenizer, open_model


@dataclass(frozen=True)
class FoundTeacher:
    """A teacher that was opened but not yet read.

    Attributes:
        source: its weights on disk.
        sha256: hash of the weights that are used.
        objective: the run's objective.
    """

    source: Source
    sha256: str
    objective: DistillConfig

    @property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of everything that determines the teacher's outputs: its weights, its configuration and order.

        A RoPE base or a window changes every output but no tensor. Keys at their defaults are left out, so the hash
        stays the same when a later version adds keys.
        """
        model = self.source.model
        used = {
            field.name: getattr(model, field.name)
            for field in fields(model)
            if not facts_of(field).training and getattr(model, field.name) != field.default
        }
        text = json.dumps({"order": self.source.order, **used}, sort_keys=True, default=str)
        return {TEACHER: self.sha256, TEACHER_CONFIG: hashlib.sha256(text.encode()).hexdigest()}

    def describe(self) -> str:
        """Return one line for the banner."""
        model = self.source.model
        text = f"{self.source.folder}, {model.name} of {model.num_layers} layers of width {model.hidden_size}"
        return f"{text}, hash {self.sha256[:12]}"

    def read(
        self, settings: ComputeConfig, device: torch.device, *, bf16: bool, mesh: DeviceMesh | None = None
    ) -> Teacher:
        """Read the teacher onto a device.

        Args:
            settings: the run's section `compute`.
            device: of this rank.
            bf16: True if the run uses bf16.
            mesh: the ranks that share its weights; None: this rank holds all.

        Raises:
            DataError: see `Source.weights`.
        """
        objective = self.objective
        # the run's attention kernel may not support the teacher's architecture
        compute = replace(settings, attention="auto", global_attention=None, activation_checkpointing=False)
        built = build_model(self.source.model, MaskedLmConfig(), compute)
        model: OnEncoder = built if objective.kl_weight else OnEncoder(built.model)
        weights = _used(self.source.weights(), objective)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        model.to(device)
        if settings.compile:
            model.compile_layers()
        precision = objective.teacher_precision
        teacher = Teacher(model, bf16=bf16 if precision == "auto" else precision == "bf16")
        if mesh is not None:
            teacher.shard(mesh)
        return teacher

    def teach(self, model: nn.Module, settings: ComputeConfig, device: torch.device, *, bf16: bool) -> None:
        """Read the teacher and attach it to a model, sharded like the model.

        Args:
            model: a `Distilled`, where it trains.
            settings, device, bf16: see `read`.
        """
        assert isinstance(model, Distilled)
        mesh = getattr(next(model.parameters()), "device_mesh", None)  # of a model that is sharded
        model.listen(self.read(settings, device, bf16=bf16, mesh=mesh))


def find_teacher(
    objective: ObjectiveConfig,
    model: ModelConfig,
    phases: Collection[PhaseConfig],
    tokenizer: str,
    runs_folder: str = RunConfig.runs_folder,
) -> FoundTeacher | None:
    """Open the model that objective.teacher names, and compare it with the run.

    Args:
        objective, model, phases: of the run.
        tokenizer: data.tokenizer.
        runs_folder: see `look_up`.

    Returns:
        None for an objective without teacher.

    Raises:
        ConfigError: another tokenizer, vocabulary or width, no masked-LM head, or too few positions.
        DataError, StorageError: see `open_model` and `Source.weights`.
    """
    if objective.named_teacher is None:
        return None
    objective = cast(DistillConfig, objective)
    key = f"objective.teacher={objective.teacher}"
    source = open_model(objective.teacher, runs_folder=runs_folder)
    teacher, width = source.model, objective.teacher_width or model.hidden_size
    check_same_tokenizer(source, tokenizer, key)
    if source.order == "causal":
        raise ConfigError(
            f"{key}: a decoder, which sees nothing after a masked token. Name a model that sees both sides."
        )
    if objective.compares_states and width != teacher.hidden_size:
        raise ConfigError(
            f"{key}: its hidden states are {teacher.hidden_size} wide, and the model compares {width} with them. "
            f"Set objective.teacher_width={teacher.hidden_size}, or cosine_weight, mse_weight and pooled_weight to 0."
        )
    longest, max_positions = max(phase.row_tokens for phase in phases), teacher.max_positions
    if max_positions is not None and max_positions < longest:
        raise ConfigError(
            f"{key}: has {max_positions} positions, and rows are {longest} tokens long. Shorten row_tokens."
        )
    if objective.kl_weight:
        source.require_predictions(key, "Set objective.kl_weight=0, or name a model with a masked-LM head.")
        if teacher.vocab_size != model.vocab_size:
            raise ConfigError(
                f"{key}: predicts {teacher.vocab_size} tokens, and model.vocab_size={model.vocab_size}. Make them "
                "equal, or set objective.kl_weight=0."
            )
    return FoundTeacher(source, _hash(_used(source.weights(), objective)), objective)


def _used(weights: Mapping[str, Tensor], objective: DistillConfig) -> dict[str, Tensor]:
    modules = MASKED_LM if objective.kl_weight else ("model",)
    return {name: tensor for name, tensor in weights.items() if module_of(name) in modules}


def _hash(weights: Mapping[str, Tensor]) -> str:
    """Hash names and values, without a tied decoder, which checkpoints omit too."""
    sha256, tables = hashlib.sha256(), [tensor for name, tensor in weights.items() if "tok_embeddings" in name]
    for name in sorted(weights):
        if name == DECODER and any(torch.equal(weights[name], table) for table in tables):
            continue
        sha256.update(name.encode())
        sha256.update(weights[name].float().contiguous().numpy().data)
    return sha256.hexdigest()
