"""Loss and accuracy of the objective on held-out text besides data.validation: of another domain, or of one stream.

It is measured exactly as data.validation is; see heldout.py.
"""

from __future__ import annotations

from modernbert_train.clock import Position
from modernbert_train.config.evals import BASELINE, COUNT
from modernbert_train.config.schema import HeldoutStreamConfig
from modernbert_train.core.text import tokens_text
from modernbert_train.data.facts import read_folder
from modernbert_train.distributed.compute import Compute
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.models.encoder import OnEncoder


class HeldoutStream:
    """See `Evaluator`.

    Args:
        key: evals.NAME.
        settings: the section evals.NAME.
        texts: see `HeldOutTexts`.

    Raises:
        DataError: the shards cannot be read, or were made with another tokenizer.
    """

    def __init__(self, key: str, settings: HeldoutStreamConfig, texts: HeldOutTexts) -> None:
        folder = read_folder(f"{key}.shards", settings.shards, texts.data)
        self._validation = texts.open(folder)
        self._path = settings.shards

    def __str__(self) -> str:
        return f"{self._path}, {tokens_text(self._validation.tokens)} tokens"

    def __call__(self, model: OnEncoder, now: Position, compute: Compute) -> dict[str, float]:
        """Return `loss` and `accuracy` with unigram baselines, the objective's other figures, and `num_predicted`."""
        result = self._validation.evaluate(model, now, compute)
        return {
            "loss": result.loss,
            "accuracy": result.accuracy,
            **result.figures,
            f"{BASELINE}loss": result.unigram_loss,
            f"{BASELINE}accuracy": result.unigram_accuracy,
            f"{COUNT}predicted": float(result.predicted),
        }
