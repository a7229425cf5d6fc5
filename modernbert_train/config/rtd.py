"""Replaced-token detection, as a variant of `objective`, and its generator, derived from a run's `model`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import ModelConfig
from modernbert_train.config.objective import MASKINGS, MaskedLmConfig, MaskingName, maskings


@dataclass(frozen=True, kw_only=True)
class ReplacedTokensConfig(MaskedLmConfig):
    """Replaced-token detection (ELECTRA, arXiv 2003.10555): a generator, smaller than the model, replaces masked tokens
    by likely ones, and the model predicts for every token whether it was replaced.

    The defaults are ELECTRA-base's; for DeBERTaV3's (arXiv 2111.09543) set sharing=gdes and the values in the comments.
    """

    name: str = "rtd"
    masking: MaskingName = "exact"  # how to choose the replaced tokens, single tokens of text: exact or bernoulli
    words: Literal["tokenizer"] = "tokenizer"  # whole words are not replaced
    # share of the text that the generator predicts and replaces; ELECTRA: 0.15, large 0.25
    mask_rate: float = knob(0.15, above=0, high=1, why="as a share of the tokens; ELECTRA used 0.15", phased=True)
    # share of the replaced positions where the generator reads [MASK]; ELECTRA: 0.85 (else the token), DeBERTaV3: 1
    mask_token_share: float = knob(0.85, low=0)
    # share of the replaced positions where the generator reads a random token; both: 0
    random_token_share: float = knob(0.0, low=0)
    # weight of the detection's loss; the generator's is 1; ELECTRA: 50, DeBERTaV3's code: 10
    rtd_weight: float = knob(50.0, above=0, phased=True)
    # weights that generator and model share. embeddings: the embeddings, norm included (ELECTRA). gdes: the generator's
    # tables of tokens and positions, which the detection does not train, plus a difference, which it trains
    # (DeBERTaV3). none: no weights
    sharing: Literal["none", "embeddings", "gdes"] = "embeddings"
    # layers of the generator as a share of the model's. None: 1, with gdes 0.5
    generator_depth: float | None = knob(None, above=0)
    # its width as a share of the model's, in whole heads. None: 1/3 (ELECTRA-base; small and large: 1/4), with gdes 1
    generator_width: float | None = knob(None, above=0)
    # gives the model a masked-LM head too, so that phases may train it by mlm, causal or permutation. Such phases do
    # not train generator and detection; phases of rtd do not train that head
    mlm_head: bool = False
    token_head_key = "mlm_head"

    title = "replaced-token detection", "2003.10555"

    @property
    def details(self) -> str:
        return super().details + (
            f"; a generator of {self.depth:.3g} of the\n"
            f"  layers and {self.width:.3g} of the width replaces them by likely tokens, which the model detects,\n"
            f"  with weight {self.rtd_weight:g}; sharing {self.sharing}"
        )

    @property
    def terms(self) -> Mapping[str, float]:
        return {"mlm": 1.0, "rtd": self.rtd_weight}

    heads = ("generator", "replaced")

    @property
    def idle_heads(self) -> tuple[str, ...]:
        return ("tokens",) if self.mlm_head else ()

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: the model classifies every token, special ones included."""
        uses = {"generator": self.predicted_share * (1 - self.special_tokens / sequence_tokens), "replaced": 1.0}
        return uses | dict.fromkeys(self.idle_heads, 0.0)

    @property
    def depth(self) -> float:
        return self.generator_depth or (0.5 if self.sharing == "gdes" else 1.0)

    @property
    def width(self) -> float:
        return self.generator_width or (1.0 if self.sharing == "gdes" else 1 / 3)

    def generator_of(self, model: ModelConfig) -> ModelConfig:
        """See `ObjectiveConfig`."""
        return model.scaled(self.depth, self.width)

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`: the generator must be an encoder, and shared tables must have its width."""
        yield from super().mistakes(model)
        if MASKINGS[self.masking].takes_special or MASKINGS[self.masking].whole_words:
            yield (
                f"objective.name={self.name} with objective.masking={self.masking}: the generator replaces single "
                f"tokens of text. Set masking to {maskings(whole_words=False)}."
            )
        if not model.tied:
            yield (
                f"objective.name={self.name} with model.tied=false: a generator predicts with the embedding. Set "
                "model.tied=true, or choose another model."
            )
        generator = self.generator_of(model)
        for key, fraction, total, unit, left in (
            ("depth", self.depth, model.num_layers, "layer", generator.num_layers),
            ("width", self.width, model.num_heads, "head", generator.num_heads),
        ):
            if left < 1:
                yield (
                    f"objective.generator_{key}={fraction:.3g} of {total} {unit}s leaves the generator no {unit}. Set "
                    f"it to at least {math.ceil(1000 / total) / 1000:g}."
                )
        if self.sharing == "gdes" and generator.hidden_size != model.hidden_size:
            yield (
                f"objective.generator_width={self.width:.3g} with objective.sharing=gdes: the tables of the generator "
                "are part of the model's, so both must have the same width. Set objective.generator_width=1, or "
                "sharing=embeddings."
            )
        if self.sharing == "embeddings" and generator.hidden_size > model.hidden_size:
            yield (
                f"objective.generator_width={self.width:.3g} with objective.sharing=embeddings: the generator would be "
                f"{generator.hidden_size} wide, and its embeddings {model.hidden_size}. Set objective.generator_width "
                "to at most 1, or sharing=none."
            )
