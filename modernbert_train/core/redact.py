"""Redact secrets from everything that is printed or stored.

Keys, tokens and passwords reach a program through its environment, its command line, a YAML file or a URL, and reappear
in errors of libraries. Logs, run folders, reports and model cards are copied and published. So a configuration with a
secret in it is refused, and errors and records pass through `redact`. It recognises the values of environment variables
with names of secrets, the key formats of the usual services, and secrets in URLs and headers; any other secret is not
recognised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_KEY = "(?:api|access|secret|private|auth|signing)[_-]?key"
_NAME = re.compile(rf"(^|[._-])({_KEY}|secret|token|password|passwd|pwd|credentials?)$", re.IGNORECASE)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bsk-[\w-]{20,}|\bxox[abeprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)",
    re.DOTALL,
)
_PLACES = (
    re.compile(r"(://[^/@\s:]*:)[^/@\s]+(?=@)"),  # user:password@ of a URL
    re.compile(r"([?&](?:X-Amz-\w+|sig|signature|\w*token|\w*key|password|AWSAccessKeyId)=)[^&\s\"']+", re.IGNORECASE),
    re.compile(r"(\bauthorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)?\s*)[^\s'\"]{6,}", re.IGNORECASE),
    re.compile(rf"((?:{_KEY}|session[_-]?token|password|passwd)['\"]?\s*[:=]\s*['\"]?)[^\s'\",;]{{6,}}", re.IGNORECASE),
)
_NO_PASSWORD = "PWD"  # an environment variable: the shell's folder
_SHORTEST = 8  # shortest value of an environment variable to redact


def is_secret_name(name: str) -> bool:
    """Return True if a key or variable of this name holds a secret."""
    return _NAME.search(name) is not None


def redact(text: str) -> str:
    """Return the text with every secret replaced by `***`."""
    for value in sorted(_in_environment(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _SHAPES.sub(HIDDEN, text)
    for place in _PLACES:
        text = place.sub(rf"\g<1>{HIDDEN}", text)
    return text


def has_secret(text: str) -> bool:
    return redact(text) != text


def redacted(value: Any) -> Any:
    """Return a JSON value with all its texts redacted, and values under a secret's name removed."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        hide = {key for key, each in value.items() if isinstance(each, str) and each and is_secret_name(str(key))}
        return {key: HIDDEN if key in hide else redacted(each) for key, each in value.items()}
    return [redacted(each) for each in value] if isinstance(value, (list, tuple)) else value


def _in_environment() -> set[str]:
    values = {value for name, value in os.environ.items() if is_secret_name(name) and name != _NO_PASSWORD}
    return {value for value in values if len(value) >= _SHORTEST and not value.isalpha()}
