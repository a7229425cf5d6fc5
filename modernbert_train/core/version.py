"""The version of this package: `modernbert_train.__version__`, for modules inside, which do not import their root."""

from __future__ import annotations

__version__ = "0.1.0"
