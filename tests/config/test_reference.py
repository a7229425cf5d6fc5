"""The page of every key is what the code says; if this breaks, users read of keys that do not exist, or miss some."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from modernbert_train.config.prepare import PrepareConfig
from modernbert_train.config.reference import reference
from modernbert_train.config.schema import DataConfig, RunConfig, StableAdamWConfig

PAGE = Path(__file__).parents[2] / "docs/config.md"


def test_the_page_is_the_one_that_the_code_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "write it again: python -m modernbert_train.config.reference > docs/config.md"
    )


def test_every_key_is_on_it_with_its_meaning_and_default() -> None:
    page = reference()
    keys = set(re.findall(r"^\| `([\w.<>]+)`", page, re.MULTILINE))
    assert {f"data.{field.name}" for field in dataclasses.fields(DataConfig)} <= keys | {"data.streams"}
    assert {"phases.<name>.row_tokens", "phases.<name>.schedule.decay_tokens", "start.checkpoint", "out"} <= keys
    assert "| `seed` | whole number | 17 |" in page
    assert "optim (name: stable_adamw)" in page and f"| {StableAdamWConfig.weight_decay} |" in page
    assert "| `name` | text | must be set | letters, digits" in page
    sections = {field.name for root in (RunConfig, PrepareConfig) for field in dataclasses.fields(root)}
    assert all(re.search(rf"(`|### ){name}\b", page) for name in sections)
