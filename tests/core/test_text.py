"""How numbers are written for a reader."""

from __future__ import annotations

from modernbert_train.core.text import duration, percent, rate, tokens_text


def test_numbers_as_a_reader_wants_them() -> None:
    assert [tokens_text(t) for t in (0, 950, 12_345, 999_900, 12_300_000, 1.72e12, 1.2e15)] == [
        "0", "950", "12.3 k", "1000 k", "12.3 M", "1.72 T", "1.2 P",
    ]  # fmt: skip
    assert [rate(v) for v in (8e-4, 0.0, 1.25e-5)] == ["8e-4", "0", "1.25e-5"]
    assert [percent(2)(v) for v in (0.993, 0.0, 1.0, 0.5)] == ["99.3 %", "0 %", "100 %", "50 %"]
    assert [duration(s) for s in (5, 125, 7200, 93_784, 300_000)] == ["5 s", "2 min", "2 h", "26 h 3 min", "3 d 11 h"]
