"""A generator that puts tokens in place of masked ones, and a model that tells where; see objectives/rtd.py.

The generator is an encoder with its masked-LM head, the model one with a class for each token. What they share is
modules, so that a parameter of both is one parameter, under the model's name. `sharing` is one of three:

- `none`.
- `embeddings`: the module of the model's embeddings is the generator's too; where the generator is narrower, a
  projection follows it there, and its decoder is as wide as the embedding (ELECTRA).
- `gdes`: in the model's embeddings stands for each table the generator's, without a gradient, plus a difference that
  begins at zero. So the detection trains the difference and never the generator's table, and masked-language modelling
  the table and never the difference (DeBERTaV3, arXiv 2111.09543, section 3.2).

One backward pass serves both: no gradient passes through what was drawn.

With `mlm_head` the model has a head that predicts tokens too, and a batch of another objective trains the model by that
alone. Its decoder is tied to the model's embedding, which with gdes is a sum: then it trains the difference.

Shape legend: T packed tokens, M predicted positions (padded), D model width, V vocabulary, E width of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.batch import IGNORED_LABEL, Batch, Sums
from modernbert_train.config.schema import ModelConfig, ReplacedTokensConfig
from modernbert_train.models.compiler import region
from modernbert_train.models.encoder import Encoder, OnEncoder
from modernbert_train.models.lookup import Embedding
from modernbert_train.models.masked_lm import LABELS, POSITIONS, ForMaskedLM

DRAWS, TOKENS = "draws_M", "tokens_T"  # of the targets, as objectives/rtd.py makes them
GENERATOR, TOKEN_HEAD = "generator", "token_head"  # modules beside the encoder
DELTA = ".delta.weight"  # ends the name of a difference
PROJECTION = "model.embeddings.projection.weight"  # of a generator, under its own names


class TokenClass(nn.Module):
    """One logit for each token: above 0 it was put there.

    Args:
        encoder: whose hidden states it reads.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.transform = encoder.token_head()
        self.classifier = nn.Linear(encoder.config.hidden_size, 1)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """logits_T."""
        logits_T: Tensor = self.classifier(self.transform(hidden_TD)).squeeze(-1)
        return logits_T


class Discriminator(OnEncoder):
    """An encoder with a class for each token: what is left of the training of both."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)
        self.token_head = TokenClass(encoder)

    @region
    def logits(self, hidden_TD: Tensor) -> Tensor:
        """logits_T of hidden states."""
        logits_T: Tensor = self.token_head(hidden_TD)
        return logits_T


class Projected(nn.Module):
    """Embeddings of another encoder, in the width of this one."""

    def __init__(self, shared: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.shared = shared
        self.projection = nn.Linear(self.tok_embeddings.embedding_dim, hidden_size)

    @property
    def tok_embeddings(self) -> nn.Embedding:
        """The table of the tokens, where `Encoder.embedding` looks for it."""
        table = self.shared.tok_embeddings
        assert isinstance(table, nn.Embedding)
        return table

    def forward(self, *inputs: Any) -> Tensor:
        projected_TD: Tensor = self.projection(self.shared(*inputs))
        return projected_TD


class Disentangled(nn.Module):
    """A table that is another one, without a gradient, plus a difference of its own.

    Args:
        base: of the generator, which holds it.
    """

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self._base = (base,)  # not a module of this one: its parameter has the generator's name
        self.delta = Embedding(base.num_embeddings, base.embedding_dim)

    @property
    def weight(self) -> Tensor:
        """What it comes to, whole; no parameter."""
        return self._base[0].weight.detach() + self.delta.weight

    def forward(self, ids_T: Tensor) -> Tensor:
        moved_TD: Tensor = self.delta(ids_T)
        return F.embedding(ids_T, self._base[0].weight.detach()) + moved_TD


class SumDecoder(nn.Module):
    """A decoder that is tied to a sum of tables.

    Args:
        table: whose parameters it leaves their names.
        bias: whether it has one, its own.
    """

    cast: None = None  # the sum is another in each pass

    def __init__(self, table: Disentangled, bias: bool) -> None:
        super().__init__()
        self._table = (table,)
        self.bias = nn.Parameter(torch.zeros(table.delta.num_embeddings)) if bias else None

    @property
    def weight(self) -> Tensor:
        """weight_VD; no parameter."""
        return self._table[0].weight

    def forward(self, hidden_MD: Tensor) -> Tensor:
        return F.linear(hidden_MD, self.weight, self.bias)


class ForReplacedTokens(Discriminator):
    """Generator and discriminator.

    Args:
        encoder: the discriminator's.
        generator: another.
        sharing: see the head of this file.
        generator_of: the generator's architecture, of the model's.
        z_loss: of the generator, see `masked_lm_loss_sum`.
    """

    def __init__(
        self,
        encoder: Encoder,
        generator: Encoder,
        sharing: str,
        generator_of: Callable[[ModelConfig], ModelConfig],
        *,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__(encoder)
        self._generator_of = generator_of
        if sharing == "embeddings":
            shared, width = encoder.embeddings, generator.embedding().shape[1]
            same = encoder.embedding().shape[1] == width
            generator.embeddings = shared if same else Projected(shared, generator.config.hidden_size)
        elif sharing == "gdes":
            for name in encoder.tables:
                table = getattr(generator.embeddings, name)
                assert table.weight.shape == getattr(encoder.embeddings, name).weight.shape
                setattr(encoder.embeddings, name, Disentangled(table))
        self.generator = ForMaskedLM(generator, z_loss=z_loss)

    @classmethod
    def build(
        cls, encoder: Encoder, objective: ReplacedTokensConfig, another: Callable[[ModelConfig], Encoder]
    ) -> Self:
        """See `OnEncoder`."""
        generator = another(objective.generator_of(encoder.config))
        return cls(encoder, generator, objective.sharing, objective.generator_of, z_loss=objective.z_loss)

    @classmethod
    def alone(cls, encoder: Encoder) -> Discriminator:
        """See `OnEncoder`."""
        return Discriminator(encoder)

    @property
    def encoders(self) -> list[Encoder]:
        """See `OnEncoder`."""
        return [self.model, self.generator.model]

    def set_phase(self, model: Any) -> None:
        """See `OnEncoder`."""
        super().set_phase(model)
        self.generator.set_phase(self._generator_of(model))

    def compile_layers(self, **options: Any) -> None:
        """See `OnEncoder`; the generator is compiled too."""
        super().compile_layers(**options)
        self.generator.compile_layers(**options)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `OnEncoder`: `mlm` of the generator, `rtd` over all tokens that are no pads; hits of both, and how many
        tokens were put where another had been (`rtd/replaced`)."""
        masked, targets = batch.packed, batch.targets
        positions_M, labels_M = targets[POSITIONS], targets[LABELS]
        states_MD = self.generator.encode(masked, positions_M)
        tokens, drawn_M = self.generator.predict(states_MD, batch, figures, draws_M=targets[DRAWS])
        assert drawn_M is not None
        original_T = _put(masked.input_ids_T, positions_M, labels_M, labels_M)
        read_T = _put(original_T, positions_M, labels_M, drawn_M)
        replaced_T, is_token_T = read_T != original_T, targets[TOKENS].bool()
        hidden_TD = self.encode(replace(masked, input_ids_T=read_T))
        logits_T = self.logits(self.model.token_states(hidden_TD, masked)).float()
        losses_T = F.binary_cross_entropy_with_logits(logits_T, replaced_T.float(), reduction="none")
        losses = {**tokens.losses, "rtd": losses_T.masked_fill(~is_token_T, 0.0).sum()}
        if not figures:
            return Sums(losses, {})
        found = {"rtd/hits": ((logits_T > 0) == replaced_T) & is_token_T, "rtd/replaced": replaced_T & is_token_T}
        return Sums(losses, {**tokens.figures, **{name: each_T.sum() for name, each_T in found.items()}})


class ForReplacedAndMasked(ForReplacedTokens):
    """The same, with a head on the model that predicts tokens: of a batch without the term `rtd` it alone is computed.

    Its parameters have the names that they have in a masked-LM model, `head` and `decoder`.

    Args:
        encoder, generator, sharing, generator_of: see `ForReplacedTokens`.
        z_loss: of the generator and of that head.
    """

    idles = True

    def __init__(
        self,
        encoder: Encoder,
        generator: Encoder,
        sharing: str,
        generator_of: Callable[[ModelConfig], ModelConfig],
        *,
        z_loss: float = 0.0,
    ) -> None:
        masked = ForMaskedLM(encoder, z_loss=z_loss)  # while the encoder's table is still its own
        super().__init__(encoder, generator, sharing, generator_of, z_loss=z_loss)
        table = encoder.embeddings.tok_embeddings
        if isinstance(table, Disentangled):
            masked.decoder = SumDecoder(table, encoder.config.decoder_bias)  # type: ignore[assignment]
        self.head, self.decoder = masked.head, masked.decoder
        self._masked = (masked,)  # not a module of this one, which has all that it has

    def set_phase(self, model: Any) -> None:
        """See `OnEncoder`."""
        super().set_phase(model)
        self._masked[0].config = model

    def compile_heads(self, **options: Any) -> None:
        """See `OnEncoder`; the head and the loss of tokens are compiled too."""
        super().compile_heads(**options)
        self._masked[0].compile_heads(**options)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `ForReplacedTokens`, or `ForMaskedLM` where the batch is one of masked tokens or the like."""
        if "rtd" in batch.counts:
            return super().forward(batch, figures)
        return self._masked[0](batch, figures)


def _put(ids_T: Tensor, positions_M: Tensor, labels_M: Tensor, values_M: Tensor) -> Tensor:
    """The ids with other values at the positions that have a label; what pads the positions is thrown away."""
    spare = positions_M.masked_fill(labels_M == IGNORED_LABEL, len(ids_T))
    return F.pad(ids_T, (0, 1)).scatter(0, spare, values_M)[:-1]


def discriminator_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is left of a training of both: the model with its head, its differences added in."""
    plain = {}
    for name, tensor in weights.items():
        if name.endswith(DELTA):
            name = name.removesuffix(DELTA) + ".weight"
            tensor = weights[f"{GENERATOR}.{name}"] + tensor
        if not name.startswith(f"{GENERATOR}."):
            plain[name] = tensor
    return plain


def generator_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The generator alone, as a masked-LM model, with the embeddings that it shares."""
    own = {name.removeprefix(f"{GENERATOR}."): t for name, t in weights.items() if name.startswith(f"{GENERATOR}.")}
    shared = "model.embeddings."
    if not any(name.startswith(shared) and "projection" not in name for name in own):
        own |= {name: tensor for name, tensor in weights.items() if name.startswith(shared)}
    return own
