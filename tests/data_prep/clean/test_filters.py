"""datatrove's filters and near duplicates: dropped or altered texts must be counted, and be the right ones."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_prep.clean.duplicates import _Signature
from data_prep.clean.filters import make_screen
from data_prep.clean.word_filters import PlainWords
from data_prep.prepare import main
from data_prep.tasks.work import Work
from modernbert_train.config.tools.prepare import FilterConfig, NearDuplicatesConfig
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.errors import ConfigError
from tests.support.corpora import Command, report_of, tokens_of

PROSE = "The cat sat with the dog, and that was to be all of it. They have been there for a long time."


def written(out: Path) -> list[str]:
    tokenizer = Tokenizer.from_file(str(out / "tokenizer/tokenizer.json"))
    return [tokenizer.decode(ids) for split in ("train", "validation") for ids in tokens_of(out / split)]


@pytest.mark.runs
def test_filters_drop_and_alter_and_all_is_counted(command: Command, corpus: Path, tmp_path: Path) -> None:
    """By source and reason; the sums must hold for any filter."""
    (corpus / "bad.txt").write_text("a badword in an otherwise quite ordinary text of some length\n")
    (corpus / "prose.txt").write_text("\n".join([f"{PROSE} Number {i}." for i in range(6)] + ["no end of a sentence"]))
    (corpus / "marked.txt").write_bytes(b"\xef\xbb\xbfwith a byte order mark and more than three words of text.")
    words = "filters.words={filter: RegexFilter, arguments: {regex_exp: badword}}"
    lines = "filters.lines={filter: C4QualityFilter, arguments: {min_num_sentences: 1}}"
    assert command(words, lines) == 0
    report = report_of(tmp_path / "out")
    assert report["dropped"] == {"words": 1}
    assert report["altered"]["byte_order_mark"] == 1 and report["altered"]["lines"] >= 1
    assert report["documents_read"] == 63 == 1 + sum(split["documents"] for split in report["written"].values())
    texts = written(tmp_path / "out")
    assert "\n".join(f"{PROSE} Number {i}." for i in range(6)) in texts
    assert not any("no end of a sentence" in text or "badword" in text for text in texts)


@pytest.mark.runs
def test_filters_run_once_and_decisions_are_looked_up(command: Command, corpus: Path, monkeypatch: Any) -> None:
    """A language model costs as much as tokenising; it must not run in each of the three readings."""
    from datatrove.pipeline.filters import GopherQualityFilter

    seen: list[str] = []
    monkeypatch.setattr(GopherQualityFilter, "filter", lambda self, document: bool(seen.append(document.id)) or True)
    assert command("filters.q.filter=GopherQualityFilter", "task_bytes=5000") == 0
    assert len(seen) == len(set(seen)) == 60


def test_words_without_spacy() -> None:
    """Ratios of words must be meaningful in scripts without spaces too."""
    words = PlainWords()
    assert words.word_tokenize("Don't _stop_ it, 3.14 u\u0308ber") == ["Don't", "stop", "it", "3.14", "u\u0308ber"]
    assert words.word_tokenize("日本語 text") == ["日", "本", "語", "text"]
    assert words.word_tokenize("यह एक हिन्दी वाक्य है।") == ["यह", "एक", "हिन्दी", "वाक्य", "है"]
    assert words.sent_tokenize("One. Two! Three?") == ["One.", "Two!", "Three?"]
    screen = make_screen({"q": FilterConfig(filter="GopherQualityFilter", arguments={"min_doc_words": 5})})
    assert not isinstance(screen.check("a", PROSE), LeftOut)
    dropped = screen.check("a", "too short")
    assert isinstance(dropped, LeftOut) and dropped.reason == "q: gopher_short_doc" and not dropped.damaged


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        ({"filter": "GopherQualityFilter", "arguments": {"min_words": 3}}, "has no such argument. Known here: min_doc"),
        ({"filter": "RegexFilter"}, "cannot be made .*regex_exp.*filters.f.arguments"),
    ],
)
def test_wrong_arguments_are_refused_before_reading(filter: dict[str, Any], message: str) -> None:
    """A misspelt threshold would silently filter by the default."""
    with pytest.raises(ConfigError, match=message):
        make_screen({"f": FilterConfig(**filter)})


def test_language_filter_with_a_model_of_its_own(command: Command, corpus: Path, tmp_path: Path, capsys: Any) -> None:
    """Offline, from a file; a wrong file is refused before reading."""
    fasttext = pytest.importorskip("fasttext", reason="the optional fasttext-numpy2-wheel")
    pytest.importorskip("fasteners")
    draw = random.Random(0)
    lines = []
    for language, letters in (("en", "abcde"), ("xx", "vwxyz")):
        lines += [f"__label__{language} " + " ".join("".join(draw.choices(letters, k=4)) for _ in range(20))] * 20
    (tmp_path / "train").write_text("\n".join(lines))
    model = fasttext.train_supervised(str(tmp_path / "train"), minn=1, maxn=2, epoch=20, verbose=0, thread=1)
    model.save_model(str(tmp_path / "m.bin"))
    for i in range(3):
        (corpus / f"x{i}.txt").write_text(" ".join("".join(draw.choices("vwxyz", k=4)) for _ in range(30)))
    words = ["filters.en.filter=LanguageFilter", "filters.en.arguments={languages: [en], language_threshold: 0.5}"]
    assert command(*words, f"filters.en.model={tmp_path / 'm.bin'}") == 0
    assert report_of(tmp_path / "out")["dropped"]["en"] >= 3
    for name in ("gone.bin", "train"):
        assert command(*words, f"filters.en.model={tmp_path / name}", f"out={tmp_path / 'o'}") in (65, 78)
    assert "filters.en.model=" in capsys.readouterr().err


@pytest.mark.runs
def test_the_first_of_equal_texts_survives_and_near_duplicates_go(tmp_path: Path, texts: list[str]) -> None:
    """The kept copy's source is credited; it must not depend on a race between tasks."""
    changed = [re.sub(r"^Document \d+", f"Copy {i}", text) for i, text in enumerate(texts[:20])]
    for name, content in (("a", texts), ("b", [*texts[10:30], *changed, "alone and short"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in content))
    words = [f"out={tmp_path / 'out'}", "tokenizer.vocab_size=384", "task_bytes=4000", "validation_share=0.2"]
    for name in "ba":  # b comes first
        words += [f"sources.{name}.kind=jsonl", f"sources.{name}.path={tmp_path}/{name}.jsonl"]
    assert main([*words, "duplicates=near"]) == 0
    report = report_of(tmp_path / "out")
    sources = report["sources"]
    assert sources["b"]["dropped"].get("duplicate", 0) == 0 and sources["a"]["dropped"]["duplicate"] == 20
    assert report["dropped"] == {"duplicate": 20, "near_duplicate": 20}
    assert sources["a"]["documents_read"] == 60 and sources["b"]["documents_read"] == 41
    for each in sources.values():
        kept = sum(split["documents"] for split in each["written"].values())
        assert each["documents_read"] == kept + sum(each["dropped"].values())
    kept_texts = written(tmp_path / "out")
    assert len(kept_texts) == len(set(kept_texts)) == 61
    for original, copy in zip(texts, changed, strict=False):
        assert (original in kept_texts) + (copy in kept_texts) == 1


def test_minhash_of_a_long_document_in_parts_is_that_of_the_whole(tmp_path: Path, monkeypatch: Any) -> None:
    """Five million characters at once take gigabytes; in parts they must still find the same duplicates."""
    from data_prep.clean import duplicates

    step = duplicates.near_signatures(Work(tmp_path, [1]), NearDuplicatesConfig())
    assert isinstance(step, _Signature)
    shingles = np.random.default_rng(0).integers(0, 1 << 63, (1000, 1), np.uint64)
    whole = step.get_signature(shingles)
    monkeypatch.setattr(duplicates, "_SHINGLES", 7)
    assert step.get_signature(shingles) == whole and len(whole) == 14 and len(whole[0]) == 8
