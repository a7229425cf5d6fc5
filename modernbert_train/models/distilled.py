"""A masked-LM model trained towards a teacher; see objectives/distill.py.

The teacher is an encoder with fixed weights that reads the same masked text. It is not part of the model, so it is
neither trained nor saved. Every rank holds a full copy, or a shard of its encoder if the model is sharded. The
divergence of predictions is computed like the loss, in chunks, with the gradient in the forward pass (`ChunkedLoss`),
so the full logits of neither model ever exist.

Shape legend: T packed tokens, S sequences (padded), M predicted positions (padded), C positions of a chunk, D model
width, E width of the teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from modernbert_train.batch import IGNORED_LABEL, Batch, Packed, Sums
from modernbert_train.config.distill import TEACHER_TERMS
from modernbert_train.config.schema import DistillConfig, ModelConfig
from modernbert_train.models.casts import Linear
from modernbert_train.models.encoder import Encoder, OnEncoder
from modernbert_train.models.heads import ChunkedLoss
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.lookup import take_rows
from modernbert_train.models.masked_lm import LABELS, POSITIONS, ForMaskedLM
from modernbert_train.models.sharding import sharded_units

TOKENS = "tokens_T"  # key of a target that objectives/distill.py makes: 1 where a token is not a pad
PROJECTION = "projection"  # module that maps the model's hidden states to the teacher's width


class Teacher:
    """An encoder with fixed weights, in evaluation mode.

    Args:
        model: with its weights, on its device. Only a `ForMaskedLM` can predict.
        bf16: compute in autocast to bf16 and keep matrices in bf16; else in fp32.
    """

    def __init__(self, model: OnEncoder, *, bf16: bool) -> None:
        self.model = model.eval().requires_grad_(False)
        self._bf16 = bf16
        self._decoder_VE: Tensor | None = None
        tied = {id(model.model.embedding())}  # stays in fp32, since tokens are looked up in it too
        for linear in (each for each in model.modules() if bf16 and isinstance(each, nn.Linear)):
            if id(linear.weight) not in tied:
                linear.weight.data = linear.weight.data.bfloat16()
        if isinstance(model, ForMaskedLM):
            self._decoder_VE = model.decoder.weight.to(torch.bfloat16 if bf16 else torch.float32)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the encoder's weights over a mesh: a layer is gathered for its forward pass, then freed.

        The prediction head and the decoder stay whole, since every chunk of logits reads them.
        """
        for unit in sharded_units(self.model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        fully_shard(self.model.model, mesh=mesh, reshard_after_forward=True)
        if isinstance(self.model, ForMaskedLM) and self.model.config.tied:  # else the full table would be kept as well
            self.model.decoder.weight = self.model.model.embedding()

    @torch.no_grad()
    def states(self, packed: Packed) -> Tensor:
        """Return the teacher's last hidden states, hidden_TE."""
        with torch.autocast(packed.input_ids_T.device.type, torch.bfloat16, enabled=self._bf16):
            return self.model.encode(packed)

    @torch.no_grad()
    def transformed(self, hidden_TE: Tensor, positions_M: Tensor) -> Tensor:
        """Return the input of the teacher's decoder at positions of the packed buffer."""
        assert isinstance(self.model, ForMaskedLM)
        with torch.autocast(hidden_TE.device.type, torch.bfloat16, enabled=self._bf16):
            transformed: Tensor = self.model.transformed(take_rows(hidden_TE, positions_M))
        return transformed

    @torch.no_grad()
    def logits(self, transformed_CE: Tensor) -> Tensor:
        """Return logits_CV for the output of `transformed`."""
        assert self._decoder_VE is not None and isinstance(self.model, ForMaskedLM)
        bias, dtype = self.model.decoder.bias, self._decoder_VE.dtype
        with torch.autocast(transformed_CE.device.type, enabled=False):
            return F.linear(transformed_CE.to(dtype), self._decoder_VE, None if bias is None else bias.to(dtype))


def divergence_and_gradient(
    logits_CV: Tensor, teacher_CV: Tensor, real_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the sum over positions of KL(teacher || model) * temperature^2, and its gradient by the model's logits.

    Logits are divided by the temperature, as in Hinton et al. (arXiv 1503.02531).

    Args:
        logits_CV, teacher_CV: of the model and of the teacher.
        real_C: True at the positions to compare.
        temperature: divides both.

    Returns:
        divergence: fp32 scalar.
        gradient_CV: temperature * (softmax of the model's - softmax of the teacher's), 0 at positions not compared; in
            the precision of logits_CV.
    """
    own_dtype = logits_CV.dtype
    log_model_CV = (logits_CV.float() / temperature).log_softmax(dim=-1)
    log_teacher_CV = (teacher_CV.float() / temperature).log_softmax(dim=-1)
    teacher_share_CV = log_teacher_CV.exp()
    sum_C = (teacher_share_CV * (log_teacher_CV - log_model_CV)).sum(dim=-1)
    gradient_CV = (log_model_CV.exp_() - teacher_share_CV) * (temperature * real_C).unsqueeze(1)
    return temperature**2 * torch.where(real_C, sum_C, 0.0).sum(), gradient_CV.to(own_dtype)


class Distilled(ForMaskedLM):
    """Encoder, head and decoder, with a teacher once `listen` is called; batches of other objectives do not use it.

    Args:
        encoder: of any architecture.
        objective: the loss terms, and the width of the teacher.
    """

    idles = True  # the projection is unused in phases of other objectives

    def __init__(self, encoder: Encoder, objective: DistillConfig) -> None:
        super().__init__(encoder, z_loss=objective.z_loss)
        self.objective = objective
        if objective.projected_width is not None:
            self.projection = Linear(encoder.config.hidden_size, objective.projected_width)
        self._teachers: tuple[Teacher, ...] = ()  # in a tuple, so that it is not registered as a module
        self._divergence_and_gradient = divergence_and_gradient

    @classmethod
    def build(cls, encoder: Encoder, objective: DistillConfig, another: Callable[[ModelConfig], Encoder]) -> Self:
        """See `OnEncoder`."""
        return cls(encoder, objective)

    @classmethod
    def alone(cls, encoder: Encoder) -> ForMaskedLM:
        """See `OnEncoder`."""
        return ForMaskedLM(encoder)

    def listen(self, teacher: Teacher) -> None:
        """Train towards this teacher; call it before the first training batch."""
        self._teachers = (teacher,)

    def compile_heads(self, **options: Any) -> None:
        """See `OnEncoder`; compiles the divergence too."""
        super().compile_heads(**options)
        self._divergence_and_gradient = torch.compile(divergence_and_gradient, dynamic=False, **options)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `ForMaskedLM`; in addition to `mlm`, the terms of `TEACHER_TERMS` that the batch counts."""
        if not batch.counts.keys() & {*TEACHER_TERMS}:
            return super().forward(batch, figures)
        hidden_TD = self.encode(batch.packed)
        assert self._teachers, "a training batch before `listen`"
        (teacher,) = self._teachers
        teacher_TE = teacher.states(batch.packed)
        hidden_MD = self.transformed(take_rows(hidden_TD, batch.targets[POSITIONS]))
        tokens, _ = self.predicted(hidden_MD, batch, figures)
        losses = dict(tokens.losses)
        if "kl" in batch.counts:
            losses["kl"] = self._divergence(hidden_MD, batch, teacher, teacher_TE)
        if self.objective.compares_states:
            losses |= self._compared(hidden_TD, teacher_TE, batch)
        return Sums({term: losses[term] for term in batch.counts}, tokens.figures)

    def _divergence(self, hidden_MD: Tensor, batch: Batch, teacher: Teacher, teacher_TE: Tensor) -> Tensor:
        positions_M, labels_M = batch.targets[POSITIONS], batch.targets[LABELS]
        read_ME = teacher.transformed(teacher_TE, positions_M)
        place_M = torch.arange(len(labels_M), device=labels_M.device)
        place_M = place_M.masked_fill(labels_M == IGNORED_LABEL, IGNORED_LABEL)
        # logits of model and teacher exist at the same time, so a chunk is half as long
        chunk = max(1, self.logit_chunk(compute_dtype(hidden_MD), on_gpu=hidden_MD.is_cuda) // 2)
        step = partial(self._step, teacher=teacher, read_ME=read_ME)
        weight_VD, bias_V, cast_VD = self.decoder.weight, self.decoder.bias, self.decoder.cast
        loss_sum, _ = ChunkedLoss.apply(hidden_MD, weight_VD, bias_V, place_M, None, 0.0, chunk, step, cast_VD)
        divergence: Tensor = loss_sum
        return divergence

    def _step(
        self,
        logits_CV: Tensor,
        place_C: Tensor,
        z_loss: float,
        draws_C: None,
        weights_C: None,
        *,
        teacher: Teacher,
        read_ME: Tensor,
    ) -> tuple[Tensor, Tensor, None]:
        """Compute one chunk for `ChunkedLoss`; its labels argument carries indices into the predictions instead."""
        teacher_CV = teacher.logits(read_ME.index_select(0, place_C.clamp(min=0)))
        real_C = place_C != IGNORED_LABEL
        return *self._divergence_and_gradient(logits_CV, teacher_CV, real_C, self.objective.temperature), None

    def _compared(self, hidden_TD: Tensor, teacher_TE: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return `cosine` and `mse`, in fp32, over tokens that are not pads, and `pooled` over their sequences."""
        real_T = batch.targets[TOKENS].bool()
        ours_TE = (self.projection(hidden_TD) if self.objective.projected_width is not None else hidden_TD).float()
        theirs_TE, losses = teacher_TE.float(), {}
        if self.objective.cosine_weight:
            losses["cosine"] = 1 - F.cosine_similarity(ours_TE, theirs_TE, dim=-1)
        if self.objective.mse_weight:
            losses["mse"] = (ours_TE - theirs_TE).square().mean(dim=-1)
        sums = {term: each_T.masked_fill(~real_T, 0.0).sum() for term, each_T in losses.items()}
        if self.objective.pooled_weight:
            # the cosine of sums equals the cosine of means; sums over pads or no tokens are 0 and masked below
            lengths_S = batch.packed.cu_seqlens_S.diff().long()
            ours_SE, theirs_SE = (
                torch.segment_reduce(
                    each_TE * real_T.unsqueeze(1), "sum", lengths=lengths_S, axis=0, unsafe=True, initial=0
                )
                for each_TE in (ours_TE, theirs_TE)
            )
            apart_S = 1 - F.cosine_similarity(ours_SE, theirs_SE, dim=-1)
            sums["pooled"] = apart_S.masked_fill(theirs_SE.abs().sum(dim=-1) == 0, 0.0).sum()
        return sums
