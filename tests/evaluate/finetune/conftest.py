"""Fixtures of fine-tuning."""

from tests.support.finetuning_fixtures import models, one_thread, tokenizer, write_task

__all__ = ["models", "one_thread", "tokenizer", "write_task"]
