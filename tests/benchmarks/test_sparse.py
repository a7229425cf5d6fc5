"""The measurement of a sparse retriever: it trains on no query that it is measured by."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.sparse import write_text


def test_pairs_are_of_documents_alone_and_a_second_start_keeps_the_files(tmp_path: Path) -> None:
    """A file with another time would be another corpus, and `prepare` would refuse to resume."""
    rows = [{"_id": "1", "text": "Cells grow. They divide. They die."}, {"_id": "2", "text": "No second sentence"}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "Do cells grow?"}), encoding="utf-8")
    documents, pairs = write_text(tmp_path, tmp_path)
    assert [json.loads(line)["text"] for line in documents.read_text().splitlines()] == [row["text"] for row in rows]
    (pair,) = (json.loads(line) for line in pairs.read_text().splitlines())
    assert pair == {"query": "Cells grow.", "positive": "They divide. They die."}
    times = [file.stat().st_mtime_ns for file in (documents, pairs)]
    write_text(tmp_path, tmp_path)
    assert [file.stat().st_mtime_ns for file in (documents, pairs)] == times
