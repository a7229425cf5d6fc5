from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from modernbert_train.clock import Position
from modernbert_train.config.evals import EvaluatorConfig
from modernbert_train.config.knob import knob
from modernbert_train.distributed.compute import Compute
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.models.encoder import OnEncoder


@dataclass(frozen=True, kw_only=True)
class NormConfig(EvaluatorConfig):
    name: str = "norm"
    power: float = knob(2.0, above=0)


class Norm:
    def __init__(self, key: str, settings: NormConfig, texts: HeldOutTexts) -> None:
        self.power = settings.power

    def __str__(self) -> str:
        return f"norm of power {self.power} of the embedding"

    def __call__(self, model: OnEncoder, now: Position, compute: Compute) -> dict[str, float]:
        weight: Tensor = model.model.embedding().detach()
        if isinstance(weight, DTensor):  # under FSDP2; every rank takes part
            weight = weight.full_tensor()
        return {"norm": float(weight.norm(self.power))}
