"""samples.jsonl of a run: what its model filled in at each validation, as evaluate/samples.py writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modernbert_train.core.read_json import as_type, is_count, number, parse_object
from modernbert_train.core.text import shorten

SAMPLES = "samples.jsonl"
MOST = 200  # validations that are shown: the last ones
_TEXTS, _TOKENS, _GUESSES = 16, 256, 5
_LETTERS = 40  # of a token
_BYTES = 1 << 26  # read of the end of the file


def read_samples(run_folder: Path) -> list[dict[str, Any]]:
    """The samples of each validation in its order; lines that are damaged, or that a resume made void, are left out."""
    found: list[dict[str, Any]] = []
    try:
        with (run_folder / SAMPLES).open("rb") as file:
            lines = file.read(_BYTES).split(b"\n")
    except OSError:
        return []
    for line in filter(None, lines):
        entry = parse_object(line)
        try:
            sample = _sample(entry)
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
        key = (sample["step"], sample["phase"])
        found = [each for each in found if each["step"] <= key[0] and (each["step"], each["phase"]) != key]
        found.append(sample)
    return found[-MOST:]


def _sample(entry: dict[str, Any] | None) -> dict[str, Any]:
    """Each value as it should be; raises what shows that it is not."""
    if entry is None or not is_count(entry["step"]) or not is_count(entry["tokens"]):
        raise ValueError
    texts = []
    for text in entry["texts"][:_TEXTS]:
        words = [_word(word) for word in text["words"][:_TOKENS]]
        predicted = [
            {
                "at": place["at"],
                "is": _word(place["is"]),
                "guesses": [[_word(word), _share(share)] for word, share in place["guesses"][:_GUESSES]],
            }
            for place in text["predicted"][:_TOKENS]
            if is_count(place["at"]) and place["at"] < len(words)
        ]
        texts.append({"words": words, "predicted": predicted})
    return {"step": entry["step"], "tokens": entry["tokens"], "phase": str(entry["phase"])[:_LETTERS], "texts": texts}


def _word(text: Any) -> str:
    word: str = as_type(str, text, "a token")
    return shorten(word, _LETTERS)


def _share(value: Any) -> float:
    share = number(value)
    if share is None or not 0 <= share <= 1:
        raise ValueError
    return share
