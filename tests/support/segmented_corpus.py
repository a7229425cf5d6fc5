"""A corpus whose words a segmenter finds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHARACTERS = "天地玄黃宇宙洪荒日月盈昃辰宿列張"


def write_corpus(folder: Path, documents: int = 80) -> tuple[Path, list[dict[str, Any]]]:
    """Write texts without spaces of words of one to four characters, the same in every run."""
    draw = random.Random(5)
    rows = []
    for _ in range(documents):
        words = ["".join(draw.choices(CHARACTERS, k=draw.randint(1, 4))) for _ in range(draw.randint(20, 60))]
        rows.append({"text": "".join(words), "words": words})
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, rows
