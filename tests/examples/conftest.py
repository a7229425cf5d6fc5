"""Exported encoders, like fine-tuning's, and files of words that encode their type or class."""

from __future__ import annotations

from tests.support.finetuning_fixtures import models, one_thread, tokenizer

__all__ = ["models", "one_thread", "tokenizer"]
