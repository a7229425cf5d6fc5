"""datatrove's document filters of a spec, without downloads from the network.

datatrove splits text into words with spaCy and downloads language models. Unless `language` is among a filter's
arguments, words are found here by a regular expression, and the language model is a local file (word_filters.py).
datatrove is imported only if a spec has filters.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex

from modernbert_train.config.tools.prepare import ALTERING_FILTERS, LANGUAGE_FILTER, REGEX_FILTER, FilterConfig
from modernbert_train.core.files import anything_as, os_errors_as
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.errors import ConfigError


@dataclass(frozen=True)
class Screened:
    """A document that passed, and the filters that changed its text."""

    text: str
    altered: list[str]


@dataclass
class Screen:
    """The filters of a spec, in order.

    Attributes:
        blocks: name in the spec -> datatrove's filter.
        altering: filters that may change the text, to be applied again whenever the text is read.
    """

    blocks: dict[str, Any] = field(default_factory=dict)
    altering: tuple[str, ...] = ()

    def check(self, id: str, text: str) -> Screened | LeftOut:
        """Apply every filter until one drops the document."""
        if not self.blocks:
            return Screened(text, [])
        return self._apply(id, text, tuple(self.blocks))

    def filtered(self, id: str, text: str) -> str:
        """Return the text of a document that has passed `check`, as the filters change it."""
        if not self.altering:
            return text
        screened = self._apply(id, text, self.altering)
        assert isinstance(screened, Screened)
        return screened.text

    def _apply(self, id: str, text: str, names: tuple[str, ...]) -> Screened | LeftOut:
        from datatrove.data import Document

        document = Document(text=text, id=id)
        altered = []
        for name in names:
            before = document.text
            try:
                result = self.blocks[name].filter(document)
            except Exception as error:  # heuristics divide by the number of words, lines, ...
                return LeftOut(id, f"{name}: failed", f"{type(error).__name__}: {error}")
            passed, reason = result if isinstance(result, tuple) else (result, None)
            if not passed:
                return LeftOut(id, f"{name}: {reason}" if reason else name, "filtered", damaged=False)
            if document.text != before:
                altered.append(name)
        return Screened(document.text, altered)


def make_screen(filters: dict[str, FilterConfig]) -> Screen:
    """Build the filters.

    Raises:
        ConfigError: an argument is unknown or wrong, a model file or a package is missing.
    """
    blocks = {name: _make(name, each) for name, each in filters.items()}
    return Screen(blocks, tuple(name for name, each in filters.items() if each.filter in ALTERING_FILTERS))


def _make(name: str, config: FilterConfig) -> Any:
    from datatrove.pipeline import filters

    section = f"filters.{name}"
    kind = getattr(filters, config.filter)
    parameters = [key for key in inspect.signature(kind.__init__).parameters if key not in ("self", "exclusion_writer")]
    if unknown := [key for key in config.arguments if key not in parameters]:
        raise ConfigError(
            f"{section}.arguments.{unknown[0]}: {config.filter} has no such argument. Known here: "
            f"{', '.join(parameters) or 'none'}."
        )
    arguments = dict(config.arguments)
    if "language" in parameters:
        from data_prep.clean.word_filters import PlainWords

        arguments.setdefault("language", PlainWords())
    remedy = f"Correct {section}.arguments, or install what it names."
    with anything_as(ConfigError, f"{section}: {config.filter} cannot be made", remedy):
        block = kind(**arguments)
    if config.filter == LANGUAGE_FILTER:
        assert config.model is not None
        block.model = _language_model(section, Path(config.model), block.languages)
    if config.filter == REGEX_FILTER:
        block.regex = _Bounded(block.regex.pattern, config.timeout_seconds)
    return block


class _Bounded:
    """A regular expression that raises TimeoutError where it backtracks for too long, which `re` cannot.

    Args:
        pattern: of `re`.
        seconds: of one search.
    """

    def __init__(self, pattern: str, seconds: float) -> None:
        self._regex, self._seconds = regex.compile(pattern), seconds

    def search(self, text: str) -> object:
        return self._regex.search(text, timeout=self._seconds)


def _language_model(key: str, path: Path, languages: list[str] | None) -> Any:
    from data_prep.clean.word_filters import LocalLanguageModel

    if not path.is_file():
        raise ConfigError(f"{key}.model={path}: no such file. Name a fastText model file, for example lid.176.bin.")
    language_model = LocalLanguageModel(path, languages)
    with os_errors_as(ConfigError, f"{key}.model={path}: not a fastText model", "Name one.", ValueError):
        assert language_model.model is not None  # opens it
    return language_model
