"""A bag of words with a hidden layer: a minimal encoder."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modernbert_train.batch import Packed
from modernbert_train.config.knob import knob
from modernbert_train.config.schema import ComputeConfig, ModelConfig
from modernbert_train.models.encoder import Encoder
from modernbert_train.plan.census import Counted, Matrix, prediction_of, table_of


@dataclass(frozen=True, kw_only=True)
class BagConfig(ModelConfig):
    name: str = "bag"
    mixture: float = knob(0.5, low=0, high=1, phased=True)  # of the sequence's mean in each token's state


class Bag(Encoder):
    def __init__(self, config: BagConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = nn.ModuleDict({"tok_embeddings": nn.Embedding(config.vocab_size, config.hidden_size)})
        self.layers = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_layers))

    def forward(self, packed: Packed) -> Tensor:
        table = self.get_submodule("embeddings.tok_embeddings")
        words_TD = table(packed.input_ids_T)
        place_T = torch.arange(len(words_TD), device=words_TD.device)
        sequence_T = torch.searchsorted(packed.cu_seqlens_S[1:].contiguous(), place_T, right=True)
        sums_SD = torch.zeros(len(packed.cu_seqlens_S), words_TD.shape[1]).index_add(0, sequence_T, words_TD)
        mean_TD = sums_SD[sequence_T] / packed.cu_seqlens_S.diff()[sequence_T].unsqueeze(1)
        hidden_TD = torch.lerp(words_TD, mean_TD, self.config.mixture)
        for layer in self.layers:
            hidden_TD = hidden_TD + torch.tanh(layer(hidden_TD))
        return hidden_TD

    def embedding(self) -> nn.Parameter:
        return self.embeddings.get_parameter("tok_embeddings.weight")

    def prediction_head(self) -> nn.Module:
        return nn.Linear(self.config.hidden_size, self.config.hidden_size)

    def set_phase(self, model: BagConfig) -> None:
        self.config = model


def count(model: BagConfig) -> Counted:
    width, square = model.hidden_size, Matrix(model.hidden_size, model.hidden_size, "layer", model.num_layers, uses=1)
    bias = Matrix(width, 1, "layer", model.num_layers)
    dense_bias = Matrix(width, 1, "head", head="tokens")
    return (table_of(model), square, bias, *prediction_of(model), dense_bias), ()
