"""The page of every key matches the code; if this breaks, users read of keys that do not exist, or miss some."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml

from modernbert_train.config import schema
from modernbert_train.config.tools.prepare import PrepareConfig
from tests.docs.config_page import reference, slug
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def page() -> str:
    return reference()


@pytest.mark.runs
def test_the_page_is_the_one_that_the_code_writes(page: str) -> None:
    written = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert written == page, "write it again: python -m tests.docs.config_page > docs/config.md"


@pytest.mark.runs
def test_every_key_is_on_it_with_its_meaning_and_default(page: str) -> None:
    """Each under a separate heading with its whole name: a search finds it, and no table column breaks it."""
    keys = re.findall(r"^#### `([\w.<>]+)`", page, re.MULTILINE)
    assert {f"data.{field.name}" for field in dataclasses.fields(schema.DataConfig)} <= {*keys, "data.streams"}
    assert {"phases.<name>.row_tokens", "phases.<name>.schedule.decay_tokens", "start.checkpoint", "out"} <= {*keys}
    assert keys.count("optim.lr") == len(schema.VARIANTS["optim"]) and keys.count("compute.compile") == 1
    assert "#### `seed`\n\nwhole number; default `17`; at least 0 and below 2,147,483,648\n" in page
    facts = f"number; default `{schema.AdamWConfig.weight_decay}`; at least 0; a phase may have its own"
    assert f"#### `optim.weight_decay` (adamw)\n\n{facts}<br>\nnorms" in page
    assert "#### `optim.name` (adamw)\n\n`adamw` chooses these keys\n" in page
    assert "#### `name`\n\ntext; must be set; may change at a restart<br>\nletters, digits" in page
    assert "`start`: null: from scratch" in page  # the comment of a section is included too
    sections = {field.name for root in (schema.RunConfig, PrepareConfig) for field in dataclasses.fields(root)}
    assert all(re.search(rf"^###+ `{name}\b", page, re.MULTILINE) for name in sections)


@pytest.mark.runs
def test_what_stands_in_angle_brackets_is_seen(page: str) -> None:
    """Outside of code Markdown takes <name> for HTML, and hides it."""
    prose = re.sub(r"`[^`]*`", "", page)
    assert "&lt;runs_folder>/&lt;name>" in prose and "&lt;run folder>/profile" in prose
    assert set(re.findall(r"<\w*", prose)) == {"<br"}


@pytest.mark.runs
def test_values_are_as_yaml_has_them(page: str) -> None:
    """A reader copies them: null and not None, a number without a comma, no signature of a class."""
    assert not re.search(r"\bNone\b|Literal|\w+Config\(|\d,\d{3}`|<class", page)
    defaults = dict(re.findall(r"^#### `([\w.<>]+`(?: \(\w+\))?).*\n\n.*; default `([^`]*)`", page, re.MULTILINE))
    assert yaml.safe_load(defaults["model.vocab_size` (modernbert)"]) == schema.ModernBertConfig.vocab_size == 50368
    assert yaml.safe_load(defaults["data.cache_folder`"]) is None
    assert yaml.safe_load(defaults["optim.betas` (stable_adamw)"]) == list(schema.StableAdamWConfig.betas)


@pytest.mark.runs
def test_links_within_the_page_lead_somewhere(page: str) -> None:
    """Those to other pages are in test_docs.py."""
    within = re.findall(r"\]\(#([^)]*)\)", page)
    assert "phasesnamebatch_warmup" in within
    assert {*within} <= {slug(title) for title in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}


def test_choices_of_the_same_values_stand_in_one_order() -> None:
    """`typing` considers Literals in another order equal: the page would depend on the order of imports."""
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "modernbert_train").rglob("*.py")]
    literals = {words for text in files for words in re.findall(r"\bLiteral\[([^\]]*)\]", text)}
    orders = {tuple(re.findall(r'"([^"]*)"', words)) for words in literals}
    assert len(orders) == len({frozenset(values) for values in orders}), sorted(orders)
