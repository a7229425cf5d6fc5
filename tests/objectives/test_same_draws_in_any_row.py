"""The draws of a text, in any row. If this breaks, a run depends on ranks, workers and microbatches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config import schema
from modernbert_train.config.objective import MASKINGS
from modernbert_train.objectives import build_objective
from tests.support.mlm_lines import PAD, WORDS, keys, text_of

LENGTHS = [40, 1, 17, 90, 3, 60]
EACH: dict[str, schema.ObjectiveConfig] = {
    **{masking: schema.MaskedLmConfig(masking=masking) for masking in MASKINGS},
    "rates": schema.MaskedLmConfig(mask_rate=0.5, mask_spread=0.5, mask_weight="1/rate"),
    **{f"rtd {masking}": schema.ReplacedTokensConfig(masking=masking) for masking in ("exact", "bernoulli")},  # type: ignore[arg-type]
    "sop": schema.SentenceOrderConfig(),
    "permutation": schema.PermutationLmConfig(),
    "causal": schema.CausalLmConfig(),
}


def drawn(text: PackedText, inputs: Inputs, number: int) -> dict[str, Any]:
    """Return the part of the inputs that belongs to a sequence, with positions from its first token on."""
    start, end = (inputs.given or text).boundaries[number : number + 2].tolist()
    columns = {"ids_T": inputs.ids_T, "segments_T": inputs.segments_T, **inputs.targets}
    columns |= vars(inputs.given) if inputs.given else {}
    found = {
        name: each[start:end].tolist() for name, each in columns.items() if name.endswith("_T") and each is not None
    }
    for at, label in (("positions_M", "labels_M"), ("pairs_P", "swapped_P")):
        if at in columns:
            own = (columns[label] != IGNORED_LABEL) & (columns[at] >= start) & (columns[at] < end)
            found |= {name: each[own].tolist() for name, each in columns.items() if name[-2:] == at[-2:]}
            found[at] = (columns[at][own] - start).tolist()
    return found


@pytest.mark.parametrize("name", EACH)
def test_a_text_is_the_same_alone_and_among_others(name: str) -> None:
    """Its padding too. Shapes are the same for any documents, or a compiled model compiles again."""
    config = EACH[name]
    objective = build_objective(config, WORDS)
    among = text_of(LENGTHS, 9, ends=config.special_tokens - 1, between=6 * (config.name == "mlm"))
    together = objective.make(among, config)
    for number, length in enumerate(LENGTHS):
        start, end = among.boundaries[number : number + 2]
        rest = len(among.ids_T) - (end - start)
        own = np.pad(among.ids_T[start:end], (0, rest), constant_values=PAD)
        bounds = np.array([0, end - start, len(own)])
        alone = PackedText(own, np.array([1]), np.array([length]), keys(1, number), bounds)
        made = objective.make(alone, config)
        assert drawn(alone, made, 0) == drawn(among, together, number)
        assert {key: each.shape for key, each in made.targets.items()} == {
            key: each.shape for key, each in together.targets.items()
        }
        other = objective.make(replace(alone, keys_Q=keys(1, 99)), config)
        assert length < 40 or name == "causal" or drawn(alone, other, 0) != drawn(alone, made, 0), "the key matters"


@pytest.mark.parametrize("name", EACH)
def test_rows_without_a_text_are_read_too(name: str) -> None:
    """As evaluations have them, so that all ranks have as many microbatches."""
    none, pads = np.zeros(0, np.int64), np.full(64, PAD)
    made = build_objective(EACH[name], WORDS).make(
        PackedText(pads, none, none, keys(0), np.array([0, 32, 64])), EACH[name]
    )
    assert not any(made.counts.values()) and (made.targets["labels_M"] == IGNORED_LABEL).all()
    assert made.ids_T[:64].tolist() == pads.tolist()
    assert made.given is None or made.given.boundaries[:3].tolist() == [0, 32, 64]
