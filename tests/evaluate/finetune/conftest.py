"""Fixtures of fine-tuning."""

from tests.support.finetuning_fixtures import hub, models, one_thread, tokenizer, tuning, write_task
from tests.support.suites import stand_ins

__all__ = ["hub", "models", "one_thread", "stand_ins", "tokenizer", "tuning", "write_task"]
