"""Knowledge distillation, as a variant of `objective`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import MAX_WIDTH, ModelConfig
from modernbert_train.config.objective import MaskedLmConfig

TEACHER_TERMS = ("kl", "cosine", "mse", "pooled")  # terms that need the teacher


@dataclass(frozen=True, kw_only=True)
class DistillConfig(MaskedLmConfig):
    """Masked-language modelling with a teacher, another encoder that reads the same masked text (DistilBERT, arXiv
    1910.01108). The model is trained towards the teacher's predictions, last hidden states, text embeddings, or several
    of these. Phases may have other objectives that predict tokens.

    The default weights are from DistilBERT's published code. Held-out text is measured by masked tokens only.
    """

    name: str = "distill"
    # run, checkpoint, Hugging Face folder or id, .pt of Composer: any architecture, with the run's tokenizer. Its
    # weights are frozen and not saved; a checkpoint stores their hash
    teacher: str = knob(restart=True, local=True)
    mask_rate: float = knob(
        0.15, above=0, high=1, why="as a share of the tokens; DistilBERT was trained with 0.15", phased=True
    )
    mlm_weight: float = knob(2.0, low=0)  # weight of the masked tokens' loss
    # weight of the divergence (KL) from the teacher's predictions to the model's, over masked tokens, times
    # temperature^2
    kl_weight: float = knob(5.0, low=0)
    temperature: float = knob(2.0, above=0)  # divides the logits of both
    cosine_weight: float = knob(1.0, low=0)  # weight of 1 - cosine of both last hidden states, over all tokens
    mse_weight: float = knob(0.0, low=0)  # weight of their mean squared difference
    # weight of 1 - cosine of both text embeddings: the means of the hidden states, as in embedding models
    pooled_weight: float = knob(0.0, low=0)
    # the teacher's hidden_size, if it differs from the model's: a trained matrix projects hidden states to it
    teacher_width: int | None = knob(None, above=0, high=MAX_WIDTH)
    teacher_precision: Literal["auto", "fp32", "bf16"] = "auto"  # precision of the teacher; auto: the run's

    title = "masked-language modelling with a teacher (knowledge distillation)", "1910.01108"

    @property
    def named_teacher(self) -> str:
        return self.teacher

    @property
    def summary(self) -> str:
        return super().summary + f", teacher {self.teacher}"

    @property
    def details(self) -> str:
        weights = ", ".join(f"{term} {weight:g}" for term, weight in self.terms.items())
        return super().details + f"; teacher `{self.teacher}`,\n  weights {weights}, temperature {self.temperature:g}"

    @property
    def terms(self) -> Mapping[str, float]:
        of_teacher = {term: float(getattr(self, f"{term}_weight")) for term in TEACHER_TERMS}
        return {"mlm": self.mlm_weight} | {term: weight for term, weight in of_teacher.items() if weight}

    @property
    def compares_states(self) -> bool:
        """True if hidden states are trained towards the teacher's."""
        return bool(self.cosine_weight or self.mse_weight or self.pooled_weight)

    @property
    def projected_width(self) -> int | None:
        """See `ObjectiveConfig`."""
        return self.teacher_width if self.compares_states else None

    @property
    def heads(self) -> tuple[str, ...]:
        return ("tokens", *list(self.terms)[1:])

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: hidden states of all tokens are compared or averaged, special tokens included."""
        tokens = super().uses_of_heads(sequence_tokens)["tokens"]
        return {head: tokens if head in ("tokens", "kl") else 1.0 for head in self.heads}

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`."""
        yield from super().mistakes(model)
        if self.terms.keys() == {"mlm"}:
            yield (
                f"objective.teacher={self.teacher} with kl_weight, cosine_weight, mse_weight and pooled_weight of 0: "
                "the model would learn nothing from it. Set one above 0, or objective.name=mlm."
            )

    def for_validation(self) -> MaskedLmConfig:
        """See `ObjectiveConfig`; without the teacher."""
        own = {field.name: getattr(self, field.name) for field in fields(MaskedLmConfig) if field.name != "name"}
        return MaskedLmConfig(**own).for_validation()
