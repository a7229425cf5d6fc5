"""A run's folder and its page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.data.field_counts import Amount, FieldCounts
from modernbert_train.data.statistics import FolderStatistics, RunStatistics, SourceCounts, length_bins
from modernbert_train.report.page import write_report

VOID = {"meta", "link", "br", "wbr", "input"}


class Page(HTMLParser):
    """Collects elements as (tag, attributes, own text) and rejects tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {[self.found[i][0] for i in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))
        if tag not in VOID:
            self.open.append(len(self.found) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            tag, attributes, text = self.found[self.open[-1]]
            self.found[self.open[-1]] = (tag, attributes, text + data)

    def texts(self, tag: str) -> list[str]:
        return [text for name, _, text in self.found if name == tag]

    def document(self) -> dict[str, Any]:
        data = next(x for t, a, x in self.found if t == "script" and a.get("type") == "application/json")
        parsed = json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(parsed, dict)
        return parsed

    def run(self, number: int = 0) -> dict[str, Any]:
        found = self.document()["runs"][number]
        assert isinstance(found, dict)
        return found


def run_folder(tmp_path: Path, *records: dict[str, Any], tail: str = "", config: str | None = "name: a\n") -> Path:
    folder = tmp_path / "a-run"
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text("utf-8"))


def table_of(run: dict[str, Any], title: str) -> list[list[str]]:
    return next(table["rows"] for table in run["tables"] if table["title"].startswith(title))


def sample(number: int, guess: str = " cat", **more: Any) -> dict[str, Any]:
    text = {
        "words": [" the", " dog"],
        "predicted": [{"at": 1, "is": " dog", "guesses": [[guess, 0.5], [" dog", 0.25]]}],
    }
    return {"kind": "samples", "step": number, "phase": "stable", "tokens": number * 100, "texts": [text]} | more


CONFIG = (
    "name: {name}\nruns_folder: runs\noptim:\n  lr: {lr}\n  name: stable_adamw\nphases:\n  stable:\n    tokens: 9000\n"
)


def run(folder: Path, *records: dict[str, Any], lr: str = "0.001", config: str = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    if config:
        (folder / "config.yaml").write_text(config.format(name=json.dumps(folder.name), lr=lr))
    return folder


HOSTILE = "<script>alert(1)</script>"


def statistics() -> RunStatistics:
    sources = {"web": SourceCounts(10, 6, 900, 3, 0, 1), HOSTILE: SourceCounts(2, 2, 100, 0, 0, 0)}
    fields = {"licence": FieldCounts({"MIT": Amount(4, 750)}, missing=Amount(2, 250))}
    lengths = length_bins(np.array([20, 40, 40, 900]))
    one, two = (FolderStatistics(4, 1000, lengths, fields, sources) for _ in range(2))
    return RunStatistics({"english": one, "german": two}, FolderStatistics(1, 5, None, {}, {}))
