"""How many numbers a model learns, counted from its shape; equal to the real model's, which a test builds.

Shape legend: D model width, F hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from modernbert_train.config.schema import BertConfig, ModelConfig, ModernBertConfig


@dataclass(frozen=True)
class Parameters:
    """Counts of parameters.

    Attributes:
        embedding: V * D, the table that the decoder shares; a lookup in the input, a matrix product in the head.
        layer: of one layer, its two norms included; ModernBERT's first layer has only one.
        layers: of all layers.
        rest: norms before and after the layers, the head's dense matrix and norm, the decoder's bias; BERT's tables of
            positions and segments.
        matrices: entries of all matrices that are multiplied with, the shared table included.
    """

    embedding: int
    layer: int
    layers: int
    rest: int
    matrices: int

    @property
    def total(self) -> int:
        return self.embedding + self.layers + self.rest

    @property
    def active(self) -> int:
        """All but the embedding table."""
        return self.layers + self.rest

    @property
    def hidden(self) -> int:
        """Entries of the matrices that Muon orthogonalises: all but the table."""
        return self.matrices - self.embedding

    @property
    def root(self) -> int:
        """What lies outside the layers: FSDP2 keeps it together, and whole from forward to backward."""
        return self.embedding + self.rest


def count_parameters(model: ModelConfig) -> Parameters:
    """Count a model's parameters with its masked-LM head."""
    if isinstance(model, ModernBertConfig):
        return _modernbert(model)
    if isinstance(model, BertConfig):
        return _bert(model)
    raise NotImplementedError(model.name)


def _modernbert(model: ModernBertConfig) -> Parameters:
    """149,655,232 for ModernBERT-base, 395,881,664 for large."""
    width, hidden = model.hidden_size, model.intermediate_size
    matrices = 4 * width**2 + 3 * width * hidden  # Wqkv, attn.Wo; Wi, mlp.Wo
    embedding = model.vocab_size * width
    return Parameters(
        embedding=embedding,
        layer=matrices + 2 * width,
        layers=model.num_layers * (matrices + 2 * width) - width,
        rest=2 * width + width**2 + width + model.vocab_size,
        matrices=model.num_layers * matrices + width**2 + embedding,
    )


def _bert(model: BertConfig) -> Parameters:
    """109,514,298 for base and 335,174,458 for large; of RoBERTa 124,697,433 and 355,412,057."""
    width, hidden = model.hidden_size, model.intermediate_size
    matrices = 4 * width**2 + 2 * width * hidden  # Wqkv, attn.Wo; Wi, mlp.Wo
    layer = matrices + 5 * width + hidden + 4 * width  # biases; weights and biases of two norms
    embedding = model.vocab_size * width
    tables = (model.max_positions + model.position_offset + model.segments) * width
    return Parameters(
        embedding=embedding,
        layer=layer,
        layers=model.num_layers * layer,
        rest=tables + 2 * width + width**2 + 3 * width + model.vocab_size,
        matrices=model.num_layers * matrices + width**2 + embedding,
    )


def hidden_matrices(model: ModelConfig) -> list[tuple[int, int, int]]:
    """How many matrices of how many rows and columns Muon orthogonalises, fused ones counted one by one."""
    width, hidden, layers = model.hidden_size, model.intermediate_size, model.num_layers
    gates = 2 if isinstance(model, ModernBertConfig) else 1  # value and gate of a GeGLU
    return [(4 * layers + 1, width, width), (gates * layers, hidden, width), (layers, width, hidden)]
