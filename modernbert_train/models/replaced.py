"""Replaced-token detection: a generator fills masked positions, a discriminator finds the fillings (objectives/rtd.py).

The generator is an encoder with a masked-LM head; the discriminator has one logit for each token. They share modules,
so a shared parameter exists once, under the discriminator's name. `sharing` is one of three:

- `none`.
- `embeddings`: the generator uses the discriminator's embedding module. A narrower generator projects its output, and
  its decoder is as wide as the embedding (ELECTRA).
- `gdes`: each embedding table of the discriminator is the generator's table, without a gradient, plus a difference that
  starts at zero. Detection trains the difference only, and masked-language modelling the table only (DeBERTaV3,
  arXiv 2111.09543, section 3.2).

One backward pass serves both: no gradient flows through the sampled tokens.

With `mlm_head` the discriminator can predict tokens too, and batches of another objective train it by that head only.
Its decoder is tied to the discriminator's embedding; with gdes that is a sum, of which the difference is trained.

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

DRAWS, TOKENS = "draws_M", "tokens_T"  # keys of the targets that objectives/rtd.py makes
GENERATOR, TOKEN_HEAD = "generator", "token_head"  # names of modules next to the encoder
DELTA = ".delta.weight"  # suffix of a difference's parameter name
PROJECTION = "model.embeddings.projection.weight"  # in the generator's own state dict


class TokenClass(nn.Module):
    """One logit for each token: positive if the token was replaced.

    Args:
        encoder: reads this encoder's hidden states.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.transform = encoder.token_head()
        self.classifier = nn.Linear(encoder.config.hidden_size, 1)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Return logits_T."""
        logits_T: Tensor = self.classifier(self.transform(hidden_TD)).squeeze(-1)
        return logits_T


class Discriminator(OnEncoder):
    """An encoder with one logit for each token; this is what remains after training, without the generator."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)
        self.token_head = TokenClass(encoder)

    @region
    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits_T for hidden states."""
        logits_T: Tensor = self.token_head(hidden_TD)
        return logits_T


class Projected(nn.Module):
    """Embeddings of another encoder, projected to this encoder's width."""

    def __init__(self, shared: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.shared = shared
        self.projection = nn.Linear(self.tok_embeddings.embedding_dim, hidden_size)

    @property
    def tok_embeddings(self) -> nn.Embedding:
        """The token table, where `Encoder.embedding` looks for it."""
        table = self.shared.tok_embeddings
        assert isinstance(table, nn.Embedding)
        return table

    def forward(self, *inputs: Any) -> Tensor:
        projected_TD: Tensor = self.projection(self.shared(*inputs))
        return projected_TD


class Disentangled(nn.Module):
    """An embedding table that is a frozen view of another table plus a trained difference.

    Args:
        base: the generator's table; it stays the generator's module.
    """

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple, so that it is not registered here and keeps the generator's name
        self.delta = Embedding(base.num_embeddings, base.embedding_dim)

    @property
    def weight(self) -> Tensor:
        """The effective weight as a full tensor (not a parameter)."""
        return self._base[0].weight.detach() + self.delta.weight

    def forward(self, ids_T: Tensor) -> Tensor:
        moved_TD: Tensor = self.delta(ids_T)
        return F.embedding(ids_T, self._base[0].weight.detach()) + moved_TD


class SumDecoder(nn.Module):
    """A decoder tied to a sum of tables.

    Args:
        table: the sum; its parameters keep their names.
        bias: True if the decoder has its own bias.
    """

    cast: None = None  # never cached by `casts.cast_once`: the sum changes in each pass

    def __init__(self, table: Disentangled, bias: bool) -> None:
        super().__init__()
        self._table = (table,)
        self.bias = nn.Parameter(torch.zeros(table.delta.num_embeddings)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The effective weight_VD (not a parameter)."""
        return self._table[0].weight

    def forward(self, hidden_MD: Tensor) -> Tensor:
        return F.linear(hidden_MD, self.weight, self.bias)


class ForReplacedTokens(Discriminator):
    """Generator and discriminator.

    Args:
        encoder: of the discriminator.
        generator: the generator's encoder.
        sharing: see the top of this file.
        generator_of: returns the generator's architecture for a discriminator's.
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
        """See `OnEncoder`; compiles the generator too."""
        super().compile_layers(**options)
        self.generator.compile_layers(**options)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `OnEncoder`. Sums: `mlm` of the generator and `rtd` over all tokens that are not pads; figures: hits of
        both, and the number of tokens that differ from the original (`rtd/replaced`)."""
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
        counted = {"rtd/hits": ((logits_T > 0) == replaced_T) & is_token_T, "rtd/replaced": replaced_T & is_token_T}
        return Sums(losses, {**tokens.figures, **{name: each_T.sum() for name, each_T in counted.items()}})


class ForReplacedAndMasked(ForReplacedTokens):
    """`ForReplacedTokens` with a masked-LM head on the discriminator, trained by batches without the term `rtd`.

    Its parameters are named as in a masked-LM model: `head` and `decoder`.

    Args:
        encoder, generator, sharing, generator_of: see `ForReplacedTokens`.
        z_loss: of the generator and of this head.
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
        masked = ForMaskedLM(encoder, z_loss=z_loss)  # before super() replaces the encoder's table by a sum
        super().__init__(encoder, generator, sharing, generator_of, z_loss=z_loss)
        table = encoder.embeddings.tok_embeddings
        if isinstance(table, Disentangled):
            masked.decoder = SumDecoder(table, encoder.config.decoder_bias)  # type: ignore[assignment]
        self.head, self.decoder = masked.head, masked.decoder
        self._masked = (masked,)  # in a tuple: its parameters are registered as `head` and `decoder` above

    def set_phase(self, model: Any) -> None:
        """See `OnEncoder`."""
        super().set_phase(model)
        self._masked[0].config = model

    def compile_heads(self, **options: Any) -> None:
        """See `OnEncoder`; compiles the masked-LM head and its loss too."""
        super().compile_heads(**options)
        self._masked[0].compile_heads(**options)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `ForReplacedTokens`; a batch of any other objective is computed by `ForMaskedLM`."""
        if "rtd" in batch.counts:
            return super().forward(batch, figures)
        return self._masked[0](batch, figures)


def _put(ids_T: Tensor, positions_M: Tensor, labels_M: Tensor, values_M: Tensor) -> Tensor:
    """Return the ids with new values at the labelled positions; padding positions write to a spare slot."""
    spare = positions_M.masked_fill(labels_M == IGNORED_LABEL, len(ids_T))
    return F.pad(ids_T, (0, 1)).scatter(0, spare, values_M)[:-1]


def discriminator_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the discriminator's state dict: without the generator, differences added to their tables."""
    plain = {}
    for name, tensor in weights.items():
        if name.endswith(DELTA):
            name = name.removesuffix(DELTA) + ".weight"
            tensor = weights[f"{GENERATOR}.{name}"] + tensor
        if not name.startswith(f"{GENERATOR}."):
            plain[name] = tensor
    return plain


def generator_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the generator's state dict as a masked-LM model, with the embeddings that it shares."""
    own = {name.removeprefix(f"{GENERATOR}."): t for name, t in weights.items() if name.startswith(f"{GENERATOR}.")}
    shared = "model.embeddings."
    if not any(name.startswith(shared) and "projection" not in name for name in own):
        own |= {name: tensor for name, tensor in weights.items() if name.startswith(shared)}
    return own
