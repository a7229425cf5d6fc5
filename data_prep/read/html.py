"""Text of HTML, by inscriptis, which lays out paragraphs, lists and tables as a browser does."""

from __future__ import annotations

import re
from pathlib import Path

from modernbert_train.core.files import ending

MARKUP = (".html", ".htm", ".xhtml")  # files with tags and scripts between the text
STRIPPED = "stripped_html"
_BEGINNING = re.compile(
    r"\ufeff?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html[\s>])", re.IGNORECASE
)
_LOOKED_AT = 1 << 10  # characters


def is_html(file: str, text: str) -> bool:
    """Return True if a file is HTML by its name or its first characters."""
    return ending(Path(file)).lower() in MARKUP or _BEGINNING.match(text[:_LOOKED_AT]) is not None


def html_text(markup: str) -> str:
    """Return the text between the tags, without scripts and styles.

    Raises:
        ValueError: inscriptis cannot parse it.
    """
    from inscriptis import get_text

    try:
        return str(get_text(markup.removeprefix("\ufeff")))
    except Exception as error:  # of lxml
        raise ValueError(f"{type(error).__name__}: {error}") from None
