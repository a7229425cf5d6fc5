"""Data of the examples, and the files they leave."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.labelled import BAD, GOOD, PLAIN

PICKLES = (".pkl", ".bin", ".pt", ".joblib", ".pickle")


def conll(number: int, seed: int) -> str:
    """Sentences in which words of GOOD are people, pairs of words of BAD places, and all others are nothing."""
    draw = random.Random(seed)
    sentences = []
    for _ in range(number):
        lines = [f"{word}\tO" for word in draw.choices(PLAIN, k=draw.randint(2, 6))]
        if draw.random() < 0.8:
            lines.insert(draw.randrange(len(lines)), f"{draw.choice(GOOD)}\tB-a-person")
        if draw.random() < 0.4:
            lines += [f"{draw.choice(BAD)}\tB-place", f"{draw.choice(BAD)}\tI-place"]
        sentences.append("\n".join(lines))
    return "\n\n".join(sentences) + "\n"


def table(number: int, seed: int) -> str:
    """Texts of three classes, each with a word that means it."""
    draw = random.Random(seed)
    classes = {"up": GOOD, "down": BAD, "flat": PLAIN[3:]}
    lines = ["text,label"]
    for _ in range(number):
        label = draw.choice(sorted(classes))
        words = draw.choices(PLAIN[:3], k=draw.randint(1, 4))
        words.insert(draw.randrange(len(words)), draw.choice(classes[label]))
        lines.append(f"{' '.join(words)},{label}")
    return "\n".join(lines) + "\n"


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@contextmanager
def offline() -> Iterator[None]:
    """No request goes to another machine."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("asks the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield
