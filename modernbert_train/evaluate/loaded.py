"""An encoder with its weights and its tokenizer, ready to embed texts. Torch is imported when it is used.

Shape legend: N texts, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from modernbert_train.config.schema import ComputeConfig, ModelConfig, ObjectiveConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from torch import Tensor

    from modernbert_train.models.encoder import OnEncoder
    from modernbert_train.vocabulary import Vocabulary
    from modernbert_train.weights.source import Source

BATCH_TOKENS = 16_384
Pooling = Literal["cls", "mean"]
Precision = Literal["auto", "fp32", "bf16"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder with its weights and its tokenizer.

    Attributes:
        module: torch's module; `module.encode(packed)` gives hidden states of packed sequences.
        config: the architecture, with the RoPE bases that the weights were last trained with.
        tokenizer: of the library tokenizers.
        max_tokens: longest sequence that it was trained on.
    """

    module: OnEncoder
    config: ModelConfig
    tokenizer: Tokenizer
    max_tokens: int
    _vocabulary: Vocabulary
    _objective: ObjectiveConfig

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling = "mean",
        batch_tokens: int = BATCH_TOKENS,
        precision: Precision = "auto",
        device: Device = "auto",
    ) -> Tensor:
        """Return the mean of the last hidden states over the tokens of each text, [CLS] and [SEP] included.

        This equals sentence-transformers' mean pooling of the exported model. Texts longer than `max_tokens` are cut.

        Args:
            texts: one text, which is one row, or several.
            pooling: mean; or cls, the state of [CLS] alone.
            batch_tokens: maximum tokens of one forward pass; a longer text gets a pass alone.
            precision: as compute.precision of a run.
            device: as compute.device.

        Returns:
            embeddings_ND: fp32, on the CPU.

        Raises:
            TypeError: one of them is not a string; names its index.
            ValueError: another argument is none of its choices, or batch_tokens is below 1.
            ConfigError: precision is bf16 on a processor or a GPU without it.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{number}]={text!r:.60}: is no text. Give a text, or a list of texts.")
        ids = self.token_ids(texts)
        return self.embed_ids(ids, pooling=pooling, batch_tokens=batch_tokens, precision=precision, device=device)

    def token_ids(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of each text, without special tokens and uncut."""
        import numpy as np

        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.asarray(each.ids, dtype=np.int32) for each in encodings]

    def embed_ids(
        self,
        ids: Sequence[NDArray[np.int32]],
        *,
        pooling: Pooling,
        batch_tokens: int,
        precision: Precision,
        device: Device = "auto",
    ) -> Tensor:
        """See `embed`, of `token_ids`."""
        for name, value, choices in (
            ("pooling", pooling, Pooling),
            ("precision", precision, Precision),
            ("device", device, Device),
        ):
            _require_choice(name, value, get_args(choices))
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens={batch_tokens}: must be at least 1, such as {BATCH_TOKENS}.")
        from modernbert_train.distributed.compute import Compute
        from modernbert_train.evaluate.embeddings import embed_packed

        settings = ComputeConfig(precision=precision, device=device)
        compute = Compute.of(settings)
        return embed_packed(
            self.module.to(compute.device),
            ids,
            self._vocabulary,
            compute,
            order=self._objective.plain_order,
            max_tokens=self.max_tokens,
            pooling=pooling,
            batch_tokens=batch_tokens,
        )


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: is not known here. Choose from {', '.join(choices)}.")


def load_model(name: str | Path) -> LoadedEncoder:
    """Load an encoder to embed texts with, or to build on.

    Args:
        name: a run's folder (its newest whole checkpoint counts), a checkpoint, a folder for Hugging Face or an id of
            the hub, or a checkpoint file of Composer; of any architecture that this package knows; see `open_model`.

    Raises:
        DataError, StorageError: there is no such model, it is damaged, or no tokenizer comes with it.
    """
    from modernbert_train.weights.source import open_model

    return load_source(open_model(name))


def load_source(source: Source) -> LoadedEncoder:
    """Load an encoder from an opened source; see `load_model`."""
    import torch

    from modernbert_train.config.schema import MaskedLmConfig
    from modernbert_train.models.build import ENCODERS
    from modernbert_train.models.encoder import OnEncoder
    from modernbert_train.vocabulary import open_tokenizer
    from modernbert_train.weights.source import phase_objective

    model = OnEncoder(ENCODERS[type(source.model)](source.model, ComputeConfig()))
    weights = source.weights()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(weights[key])
    objective = MaskedLmConfig() if source.checkpoint is None else phase_objective(source.checkpoint)
    with source.tokenizer_folder() as folder:
        tokenizer, vocabulary = open_tokenizer(folder, spell_special=False), source.vocabulary()
    return LoadedEncoder(model.eval(), source.model, tokenizer, source.max_tokens, vocabulary, objective)
