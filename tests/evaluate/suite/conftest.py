"""Fixtures shared with the tests of fine-tuning and retrieval."""

from tests.evaluate.finetune.conftest import models, tokenizer, write_task
from tests.evaluate.retrieval.conftest import toy, write_beir

__all__ = ["models", "tokenizer", "toy", "write_beir", "write_task"]
