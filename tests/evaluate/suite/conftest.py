"""Fixtures shared with the tests of fine-tuning and retrieval."""

from tests.support.finetuning_fixtures import models, tokenizer, write_task
from tests.support.retrieval_fixtures import toy, write_beir

__all__ = ["models", "tokenizer", "toy", "write_beir", "write_task"]
