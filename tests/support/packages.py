"""Our packages."""

from __future__ import annotations

PACKAGES = ("modernbert_train", "data_prep", "launch")
