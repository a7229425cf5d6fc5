"""The rows that make the toys part of the framework: one in each table, and no edit elsewhere."""

from collections.abc import Callable
from typing import Any

from modernbert_train.config.schema import VARIANTS
from modernbert_train.evaluate.evaluators import EVALUATORS
from modernbert_train.models.build import ENCODERS
from modernbert_train.objectives import OBJECTIVES
from modernbert_train.optim.optimizers import OPTIMIZERS
from modernbert_train.plan.census import ENCODER_COUNTS
from modernbert_train.weights.formats import EXPORTS, FORMATS
from tests.extension import toy_format
from tests.extension.toy_encoder import Bag, BagConfig, count
from tests.extension.toy_evaluator import Norm, NormConfig
from tests.extension.toy_objective import FirstToken, FirstTokenConfig
from tests.support.toy_optimizer import SignConfig, build


def add(put: Callable[[dict[Any, Any], Any, Any], None] = dict.__setitem__) -> None:
    """Put a row into each table; a test takes them out again."""
    put(VARIANTS["model"], "bag", BagConfig)
    put(VARIANTS["objective"], "first", FirstTokenConfig)
    put(VARIANTS["optim"], "sign", SignConfig)
    put(ENCODERS, BagConfig, Bag)
    put(ENCODER_COUNTS, BagConfig, count)
    put(OBJECTIVES, FirstTokenConfig, FirstToken)
    put(OPTIMIZERS, SignConfig, build)
    put(VARIANTS["evals"], "norm", NormConfig)
    put(EVALUATORS, NormConfig, Norm)
    put(FORMATS, "bag", toy_format)
    put(EXPORTS, (BagConfig, "all"), toy_format)
