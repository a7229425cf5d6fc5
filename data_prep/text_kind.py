"""Text as a kind of `prepare`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from data_prep.report import REPORT, Fingerprint, describe
from modernbert_train.config.tools.prepare import PrepareConfig
from modernbert_train.core.installed import require

if TYPE_CHECKING:
    from data_prep.tasks.executors import Stage
    from data_prep.tasks.work import Work

__all__ = ["REPORT", "check", "describe", "make_stages"]


def check(config: PrepareConfig) -> None:
    """Check filters, evaluation sets and the tokenizer now, since a stage would need them only after an hour.

    Raises:
        ConfigError, DataError: one of them cannot be used.
    """
    from data_prep.clean.contamination import evaluations_of
    from data_prep.clean.filters import make_screen
    from data_prep.make_tokenizer import adapt_tokenizer, dropout_line

    for name, source in config.sources.items():
        if source.strip == "html":
            require("html", "inscriptis", key=f"sources.{name}.strip=html")
    make_screen(config.filters)
    evaluations_of(config)
    if config.tokenizer.path is not None:
        adapt_tokenizer(config.tokenizer.path, config.tokenizer.extend, config.tokenizer.spare_entries)
        for line in dropout_line(config.tokenizer.path):
            print(line, file=sys.stderr, flush=True)


def make_stages(work: Work, config: PrepareConfig, identity: Fingerprint) -> list[Stage]:
    """Return the stages of a spec, see tasks/stages.py, which imports datatrove."""
    from data_prep.tasks.stages import make_stages

    return make_stages(work, config, identity)
