"""Fixtures shared with the tests of fine-tuning and retrieval."""

from tests.support.finetuning_fixtures import models, tokenizer, write_task
from tests.support.retrieval_fixtures import toy, write_beir
from tests.support.suites import real_suite, stand_ins, suite

__all__ = ["models", "real_suite", "stand_ins", "suite", "tokenizer", "toy", "write_beir", "write_task"]
