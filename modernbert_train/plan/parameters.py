"""Count a model's parameters from its census; a test compares them with the real model.

Shape legend: V vocabulary, E width of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from modernbert_train.config.schema import MaskedLmConfig, ModelConfig, ObjectiveConfig
from modernbert_train.plan.census import census


@dataclass(frozen=True)
class Parameters:
    """Counts of parameters.

    Attributes:
        embedding: V * E, the table that the decoder shares; a lookup in the input, a matrix product in the head.
        layer: one layer of the model, with its norms; ModernBERT's first layer has one norm less.
        layers: all layers, a generator's too; a unit that several layers share counts once.
        shared: parameters that several layers share.
        rest: norms before and after the layers, heads, the decoder's bias; BERT's tables of positions and segments;
            the model's table, if a generator has a separate one.
        matrices: entries of all matrices that are multiplied with, the shared table included.
        hidden: entries of the matrices that Muon orthogonalises: all but the table.
        hidden_rows: rows of these matrices.
        units: layers, or parts of them, that no other layer shares: FSDP2 gathers each separately.
        weights: number of tensors.
        trained: all that have a gradient: without a frozen encoder, or one with adapters.
    """

    embedding: int
    layer: int
    layers: int
    shared: int
    rest: int
    matrices: int
    hidden: int
    hidden_rows: int
    units: int
    weights: int
    trained: int

    @property
    def total(self) -> int:
        return self.embedding + self.layers + self.rest

    @property
    def active(self) -> int:
        """All parameters but the embedding table."""
        return self.layers + self.rest

    @property
    def root(self) -> int:
        """Parameters outside the units: FSDP2 keeps them together, unsharded from the forward to the backward pass."""
        return self.embedding + self.rest + self.shared


def count_parameters(model: ModelConfig, objective: ObjectiveConfig | None = None, *, shards: int = 1) -> Parameters:
    """Count a model's parameters.

    Args:
        model: the encoder.
        objective: its heads are included; None: masked-language modelling.
        shards: ranks that share the weights; the padding of shards is counted, except in `matrices`, `hidden` and
            `hidden_rows`.
    """
    counted = census(model, objective)
    tables = [m for m in counted.matrices if m.place == "embedding" and m.uses]
    tables = tables or [counted.matrices[0]]  # the first matrix, if no table is multiplied with
    embedding = sum(matrix.padded(shards) for matrix in tables)
    all_layers = [matrix for matrix in counted.matrices if matrix.place == "layer"]
    layers = sum(matrix.padded(shards) for matrix in all_layers)
    generator = (objective or MaskedLmConfig()).generator_of(model)
    own = counted if generator is None else census(model)
    encoders = [model] if generator is None else [model, generator]
    return Parameters(
        embedding=embedding,
        layer=sum(
            matrix.padded(shards) // matrix.count * -(-matrix.count * matrix.passes // model.num_layers)
            for matrix in own.matrices
            if matrix.place == "layer"
        ),
        layers=layers,
        shared=sum(matrix.padded(shards) for matrix in all_layers if matrix.passes > 1),
        rest=sum(matrix.padded(shards) for matrix in counted.matrices) - embedding - layers,
        matrices=sum(matrix.numbers for matrix in counted.matrices if matrix.uses),
        hidden=sum(matrix.numbers for matrix in counted.hidden),
        hidden_rows=sum(matrix.count * matrix.rows for matrix in counted.hidden),
        units=sum(encoder.unit_passes.count(1) for encoder in encoders),
        weights=sum(matrix.weights for matrix in counted.matrices),
        trained=sum(matrix.padded(shards) for matrix in counted.matrices if matrix.trained),
    )
