"""Keys of encoders whose rotary positions can be scaled, to read longer texts than those that they were trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import MOST_WIDTH, ModelConfig


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(ModelConfig):
    """Scaling of rotary positions, with transformers' names of it."""

    # divide the angles of positions by rope_factor: linear: all of them; llama3, as Llama 3.1, and yarn (arXiv
    # 2309.00071): the slow ones, the fast ones not, and those between by degrees; none: no angle
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = knob("none", phased=True)
    rope_factor: float = knob(1.0, low=1, phased=True)  # texts are longer by this factor
    # tokens of the longest text before scaling; an angle is slow or fast by its full turns within such a text
    rope_original_tokens: int = knob(8192, above=0, high=MOST_WIDTH, phased=True)
    rope_low_freq: float = knob(1.0, above=0, phased=True)  # llama3: angles with fewer turns are slow
    rope_high_freq: float = knob(4.0, above=0, phased=True)  # llama3: angles with more turns are fast
    rope_beta_slow: float = knob(1.0, above=0, phased=True)  # yarn: as rope_low_freq
    rope_beta_fast: float = knob(32.0, above=0, phased=True)  # yarn: as rope_high_freq
    # yarn: queries and keys are multiplied by it; None: 0.1 ln(rope_factor) + 1
    rope_attention_factor: float | None = knob(None, above=0, phased=True)

    @property
    def local_rope_scaled(self) -> bool:
        """True if rope_scaling is also of local layers; a key of encoders that have such layers."""
        return False

    @property
    def thetas(self) -> Mapping[bool, float]:
        """RoPE bases of global (True) and local (False) layers."""
        raise NotImplementedError

    def is_scaled(self, is_global: bool) -> bool:
        """True if rope_scaling applies to global (True) or local (False) layers."""
        return self.rope_scaling != "none" and (is_global or self.local_rope_scaled)

    def described_base(self, is_global: bool = True) -> str:
        """The RoPE base and its scaling in words, for a model card and for a run's first lines."""
        scaled = f", {self.rope_scaling} by {self.rope_factor:g}" if self.is_scaled(is_global) else ""
        return f"{self.thetas[is_global]:,.0f}{scaled}"

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        if self.rope_factor != 1 and self.rope_scaling == "none":
            yield f"model.rope_factor={self.rope_factor:g} with model.rope_scaling=none: set yarn, linear, llama3 or 1."
        if self.rope_factor == 1 and self.rope_scaling != "none" and self.rope_attention_factor is None:
            yield f"model.rope_scaling={self.rope_scaling} with model.rope_factor=1 scales nothing: set a larger one."
        if self.rope_scaling == "llama3" and self.rope_high_freq <= self.rope_low_freq:
            yield (
                f"model.rope_high_freq={self.rope_high_freq:g} with model.rope_low_freq={self.rope_low_freq:g}: set a "
                "larger one; Llama 3.1 has 4 and 1."
            )
        if self.rope_scaling == "yarn" and self.rope_beta_fast <= self.rope_beta_slow:
            yield (
                f"model.rope_beta_fast={self.rope_beta_fast:g} with model.rope_beta_slow={self.rope_beta_slow:g}: set "
                "a larger one; the paper has 32 and 1."
            )
        if self.rope_scaling == "yarn" and min(self.thetas.values()) <= 1:
            yield f"model.rope_scaling=yarn with a RoPE base of {min(self.thetas.values()):g}: set one above 1."
        if self.local_rope_scaled and self.rope_scaling == "none":
            yield "model.local_rope_scaled=true with model.rope_scaling=none: set linear, llama3 or yarn, or false."
