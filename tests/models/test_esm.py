"""ESM-2 in transformers' files; test_parity.py compares its results.

If this breaks, a model of proteins that is read, or one that is published, computes something else than it did.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from modernbert_train.errors import ConfigError
from modernbert_train.weights.formats import esm
from tests.support.encoders import ESM, VOCABULARY


def test_a_mask_of_another_tokenizer_is_refused() -> None:
    """Exported, [MASK] would be an ordinary token, and an ordinary one would be zero."""
    with pytest.raises(ConfigError, match=r"model\.mask_id=5: the tokenizer's \[MASK\] is 4"):
        esm.FORMAT.describe(replace(ESM, mask_id=5), "all", (), 96, VOCABULARY)
    (line,) = replace(ESM, hidden_size=20).mistakes()
    assert "Make it even" in line
