"""Guess the encoding of text that is not UTF-8, or refuse to guess.

Any bytes are valid text in Windows-1252, so text of other encodings, binary files and damaged UTF-8 must be recognised
by their bytes: text of the western languages is mostly ASCII and lacks control characters, its other bytes do not form
the sequences of UTF-8, and its letters in each line belong to one language. Polish as Windows-1252 has "³" within
words, Czech "ì" next to "ø", Turkish "ð" next to "ç".
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from modernbert_train.data.read.unpacked import open_unpacked

UTF_8 = "utf-8"
AUTO = "auto"
_UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_CONTROLS = np.array([byte < 32 and chr(byte) not in "\t\n\r\f\x1b" for byte in range(256)])
SURE = 4  # characters
_BEGINNING = 1 << 20  # bytes checked to see whether a file is UTF-8
_LOOKED_AT = 1 << 26  # bytes of a file
_GUESSED_AT = 1 << 16  # bytes that are not UTF-8, for a library that tries every encoding
_UNDEFINED = (0x81, 0x8D, 0x8F, 0x90, 0x9D)  # in Windows-1252
_MOST_OTHER = 0.3  # share of bytes beyond ASCII; western text has at most a tenth, Cyrillic text mostly such bytes
_SAMPLE = 1 << 20  # bytes of lines beyond ASCII whose letters are checked
_MOST_STRANGE = 0.1  # share of strange letters in a western line, and ...
_MOST_STRANGE_LINES = 0.05  # ... of strange lines in a text; no western text in our sample had one
# letters beyond ASCII of the western languages, and those that their texts borrow
_ALPHABETS = (
    "àâæçéèêëîïôœùûüÿ",  # French
    "äöüßéèà",  # German
    "áéíóúüñïç",  # Spanish, Irish
    "áâãàçéêíóôõúü",  # Portuguese
    "àèéìòùîó",  # Italian, Gaelic
    "éèëêïöüáóíúàâôûç",  # Dutch, Afrikaans, Welsh
    "æøåéèêòôóäöü",  # Danish, Norwegian
    "åäöéàüá",  # Swedish
    "åäöšžéü",  # Finnish
    "áðéíóúýþæöø",  # Icelandic, Faroese
    "äõöüšžé",  # Estonian
    "àçèéíïòóúüñ",  # Catalan
    "ëçéèôâ",  # Albanian
)
_SIGNS = "ªºµƒˆ"  # signs that `isalpha` counts as letters
_BETWEEN = re.compile(  # signs that western text does not have within words
    r"(?<=[^\W\d_])[^\w\s\x00-\x7f\u2018-\u201d\u2013\u2014\u2026\u2039\u203a«»·®\u2122\xad](?=[^\W\d_])"
    r"|(?<=[^\W\d_])[ªº¹²³](?=[^\W\d_])|(?<=[^\W\d_])[¿¡]"
)
_RUNS = re.compile(r"[^\W\d_\x00-\x7f]{3,}")
_CAPITALS = re.compile(r"(?<=[a-z])[À-ÖØ-ÞŠŒŽŸ]")
_ZEROS = 0.4  # share of zero bytes at every second position above which text without a mark is UTF-16


def guess(raw: bytes) -> str | None:
    """Return the encoding that `auto` takes: utf-8, utf-16-le, utf-16-be or cp1252; None if unsure."""
    if (marked := _UTF_16.get(raw[:2])) is not None:
        return marked
    counts = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
    if counts[0]:
        return _unmarked_utf_16(raw)
    text = raw.decode(UTF_8, "replace")
    bad = text.count("\ufffd")
    if not bad:
        return UTF_8
    damaged = sum(char > "\x7f" for char in text) >= 2 * bad
    western = counts[128:].sum() <= _MOST_OTHER * len(raw) and not counts[list(_UNDEFINED)].any()
    if damaged or not western or counts[_CONTROLS].any():
        return None
    sample = b"".join(line for line in raw.splitlines(keepends=True) if not line.isascii())
    return "cp1252" if _has_western_letters(sample[:_SAMPLE]) else None


def beginning(content: BinaryIO) -> bytes:
    """Read the first whole lines of a file, for a guess."""
    block = content.read(_LOOKED_AT)
    return block if len(block) < _LOOKED_AT else block[: block.rfind(b"\n") + 1]


def _unmarked_utf_16(raw: bytes) -> str | None:
    """Detect UTF-16 without a mark: text of the western languages has a zero in every second byte."""
    even, odd = (raw[parity::2].count(0) / max(1, len(raw) // 2) for parity in (0, 1))
    if len(raw) % 2 == 0 and max(even, odd) >= _ZEROS and min(even, odd) < 0.01:
        return "utf-16-le" if odd > even else "utf-16-be"
    return None


def _has_western_letters(sample: bytes) -> bool:
    lines = sample.decode("cp1252", "replace").splitlines()
    strange = sum(_strangeness(line) > _MOST_STRANGE for line in lines)
    return strange <= _MOST_STRANGE_LINES * len(lines)


def _strangeness(line: str) -> float:
    """Return the share of characters beyond ASCII that no western language has there."""
    beyond = [char for char in line.lower() if char > "\x7f"]
    letters = Counter(char for char in beyond if char.isalpha() and char not in _SIGNS)
    others = min(sum(count for char, count in letters.items() if char not in alphabet) for alphabet in _ALPHABETS)
    runs = sum(len(run) for run in _RUNS.findall(line))
    return (others + runs + len(_BETWEEN.findall(line)) + len(_CAPITALS.findall(line))) / max(1, len(beyond))


def look_at(file: Path) -> str | None:
    """Guess the encoding of a file or of its lines that are not UTF-8, also where `auto` would not.

    Raises:
        OSError, EOFError, ValueError: it cannot be read.
    """
    with open_unpacked(file) as content:
        block = beginning(content)
    if (encoding := guess(block)) is not None:
        return encoding
    lines = b"".join(line for line in block.splitlines(keepends=True) if not _is_utf_8(line))
    if (encoding := guess(lines)) is not None:
        return encoding
    from charset_normalizer import from_bytes

    best = from_bytes(lines[:_GUESSED_AT]).best()
    return None if best is None else best.encoding


def _is_utf_8(raw: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        raw.decode(UTF_8)
        return True
    return False


def is_surely_utf_8(raw: bytes, sure: int = SURE) -> bool:
    """Return True if bytes are UTF-8 with several characters beyond ASCII; other encodings give that only by chance."""
    return not raw.isascii() and _is_utf_8(raw) and sum(char > "\x7f" for char in raw.decode(UTF_8)) >= sure


def is_utf_8_file(file: Path, encoding: str) -> bool:
    """Return True if a file of a source with a named encoding surely begins in UTF-8."""
    if encoding in (AUTO, UTF_8) or not is_ascii_based(encoding):
        return False
    with open_unpacked(file) as content:
        block = content.read(_BEGINNING)
    return is_surely_utf_8(block[: block.rfind(b"\n") + 1] if len(block) == _BEGINNING else block)


def has_utf_16_mark(begin: bytes) -> bool:
    return begin[:2] in _UTF_16


def codec_of(encoding: str, begin: bytes) -> str:
    """Return Python's name of an encoding; UTF-16 without a byte order mark is little-endian, as Windows writes it."""
    if encoding == "utf-16":
        return _UTF_16.get(begin[:2], "utf-16-le")
    return encoding


def is_ascii_based(encoding: str) -> bool:
    """Return True if bytes below 128 are ASCII characters, so that lines are found before decoding."""
    return encoding == AUTO or "{}\n".encode(encoding) == b"{}\n"


def family(codec: str) -> str:
    """Return an encoding's name in the configuration and the report."""
    return "utf-16" if codec.startswith("utf-16") else codec
