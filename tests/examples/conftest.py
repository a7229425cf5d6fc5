"""Exported encoders, like fine-tuning's, and files of words that encode their type or class."""

from __future__ import annotations

from tests.evaluate.finetune.conftest import models, one_thread, tokenizer  # noqa: F401
