"""Mistakes in a spec: all reported together, before any text is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_prep.prepare import main
from modernbert_train.__main__ import main as run
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.prepare import PrepareConfig, prepare_problems
from tests.support.corpora import Command, report_of
from tests.support.paths import ROOT

CONFIG = 78


def test_spec_with_typos(tmp_path: Path, capsys: Any) -> None:
    """All mistakes together, each with its file and the nearest key, before any text is read."""
    spec = tmp_path / "spec.yaml"
    spec.write_text("out: x\nsources:\n  a: {kind: txt, pth: p}\ntokeniser: {vocab_size: 64}\nvalidation_share: much\n")
    assert main([str(spec)]) == CONFIG
    error = capsys.readouterr().err
    for words in ("sources.a.kind='txt'", "Did you mean text", "sources.a.path?", "Did you mean tokenizer?", "'much'"):
        assert words in error
    assert error.count(str(spec)) >= 4


def test_a_file_of_another_verb_is_named_as_what_it_is(tmp_path: Path, capsys: Any) -> None:
    """Six lines of unknown keys would hide that the file is valid for another verb."""
    assert main([str(ROOT / "yamls/quickstart.yaml")]) == CONFIG
    error = capsys.readouterr().err
    assert "quickstart.yaml: is the file of a run, which `train`, `check` and `plan` read" in error
    assert error.count("\n") == 1
    assert run(["check", str(ROOT / "yamls/data/quickstart.yaml")]) == CONFIG
    assert "quickstart.yaml: is a spec of data, which `prepare` reads" in capsys.readouterr().err
    assert main([str(tmp_path)]) == CONFIG
    assert f"{tmp_path}: is a folder, and the YAML file of a spec is expected" in capsys.readouterr().err


@pytest.mark.runs
def test_a_share_of_the_documents_is_the_same_in_any_number_of_tasks(
    command: Command, tmp_path: Path, capsys: Any
) -> None:
    """A short run used to tokenise sixteen times its text; the selection must not depend on a race."""
    reports = []
    for name, task in (("one", 1 << 27), ("many", 2_000)):
        assert command("document_share=0.5", f"out={tmp_path}/{name}", f"task_bytes={task}") == 0
        reports.append(report_of(tmp_path / name))
    assert reports[0]["sources"] == reports[1]["sources"] and reports[0]["tasks"] < reports[1]["tasks"]
    assert 15 < reports[0]["dropped"]["outside_document_share"] < 45
    assert command("document_share=0.5", f"out={tmp_path}/one", f"task_bytes={1 << 27}") == 0
    assert "already complete" in capsys.readouterr().out


# every rule is broken -> the mistakes that are reported, one a line
WRONG: dict[str, str] = {
    """out: x
sources:
  mine: {kind: text, path: x, split: train, fields: {licence: x}}
  lib: {kind: python_stdlib, path: x}
  b: {kind: csv}
  c: {kind: parquet, path: x, encoding: auto}
  cp9999: {kind: text, path: y, encoding: cp9999}
  hex: {kind: text, path: z, encoding: hex}
  utf8: {kind: text, path: u, encoding: utf8}
  j: {kind: jsonl, path: x, fields: {a: b, empty: ''}, fixed_fields: {a: c}}
  two: {kind: csv, path: x, max_left_out: 2.0, delimiter: ';;'}
decontaminate:
  two: {kind: csv, path: x, max_left_out: 2.0, delimiter: ';;'}
  j: {kind: jsonl, path: x, split: test, fields: {a: b}}
streams: {field: language, values: {rest: [a], 'a b': [a], none: []}}
filters: {a: {filter: LanguageFilter}, b: {filter: RegexFilter, model: x}}
near_duplicates: {buckets: 0}
tokenizer: {vocab_size: 1000, training_share: 0, extend: true}
executor: {name: slurm, workers: 0, options: {partition: p, tasks: 3}}
max_left_out: -1
validation_share: 1
min_characters: 0
shard_bytes: 10
document_share: 0
overlap_words: 0
task_bytes: 3
""": """sources.mine.split=train: a source of kind text does not read it
sources.lib.path=x: a source of kind python_stdlib does not read it
sources.b.path: missing
sources.c.encoding=auto: a source of kind parquet does not read it
sources.cp9999.encoding=cp9999:
sources.hex.encoding=hex:
sources.utf8.encoding=utf8:
sources.mine.fields={'licence': 'x'}: a source of kind text does not read it
sources.j.fixed_fields.a: is also among its fields
sources.j: field empty is empty
sources.two.delimiter=
sources.two.max_left_out=
decontaminate.two.delimiter=
decontaminate.two.max_left_out=
decontaminate.two.max_left_out:
decontaminate.j.split=test: a source of kind jsonl does not read it
decontaminate.j: fields of an evaluation set are not counted
streams.field=language: not among the fields of the sources (a, empty, licence)
streams: 'rest' cannot be a stream's name
streams: 'a b' cannot be a stream's name
streams.values.a b: 'a' already belongs to rest
streams.values.none: empty
filters.a.model: missing. LanguageFilter needs a fastText model
filters.b.model=x: RegexFilter does not read it
near_duplicates.buckets=0
near_duplicates: not read with duplicates=exact
tokenizer.vocab_size=1000: must be a multiple of 64 and at least 320. The nearest is 1024
tokenizer.training_share=0.0
tokenizer.extend=true: there is no tokenizer.path
executor.options.time: missing
executor.options.tasks: chosen by
executor.workers=0
max_left_out=-1
validation_share=1.0
min_characters=0
shard_bytes=10
document_share=0.0
overlap_words=0: must be at least 1
task_bytes=3
""",
    """out: x
sources:
  zh: {kind: jsonl, path: a, words_field: words}
  de: {kind: jsonl, path: c}
  en: {kind: text, path: b, words_field: words}
decontaminate: {rte: {kind: jsonl, path: d, words_field: words}}
filters: {lines: {filter: C4QualityFilter}}
""": """sources.en.words_field=words: a source of kind text does not read it. Remove it.
sources.de.words_field: missing, and other sources have one. Name it too, or prepare this source as
decontaminate.rte.words_field: an evaluation set is only compared. Remove it.
filters.lines.filter=C4QualityFilter: removes lines of a text, whose words would remain. Remove it
""",
    "{out: x}": "sources: empty",
    "{out: x, sources: {a: {kind: text, path: x}}, tokenizer: {vocab_size: 384, spare_entries: 400}}": (
        "tokenizer.spare_entries=400"
    ),
    "{out: x, sources: {a: {kind: jsonl, path: x}}, streams: {scores: {a: 1}}}": (
        "streams.field: missing, and there are streams a"
    ),
    "{out: x, sources: {a: {kind: jsonl, path: x, fields: {s: s}}}, streams: {field: s}}": (
        "streams: needs either values or scores"
    ),
    "{out: x, sources: {a: {kind: jsonl, path: x, fields: {s: s}}}, streams: {field: s, scores: {a: 1, b: 1}}}": (
        "two streams begin at the same score"
    ),
}


@pytest.mark.parametrize("spec", WRONG)
def test_all_mistakes_are_reported_at_once(spec: str, tmp_path: Path, capsys: Any) -> None:
    """A key that its source ignores, or a misspelt threshold, would be silently dropped; 1 % as 1 would be 100 %."""
    (tmp_path / "spec.yaml").write_text(spec)
    assert main([str(tmp_path / "spec.yaml")]) == CONFIG
    error = capsys.readouterr().err
    mistakes = WRONG[spec].splitlines()
    assert not [each for each in mistakes if each not in error], error
    assert len(error.splitlines()) == len(mistakes), error


@pytest.mark.parametrize("name", ["quickstart", "own_text"])
def test_shipped_specs_are_valid(name: str) -> None:
    """They are the first commands that a user copies."""
    config = load_typed(PrepareConfig, [str(ROOT / f"yamls/data/{name}.yaml")], [])
    assert prepare_problems(config) == []
