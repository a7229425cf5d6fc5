"""Facts of the data: one start of any command hashes each file once and parses the tokenizer once.

If this breaks, nothing is wrong but the time: a corpus of 1.6 billion documents has 6 GB of lengths, and a start that
hashes them seven times keeps all GPUs waiting for minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from modernbert_train import vocabulary
from modernbert_train.__main__ import main, read_run
from modernbert_train.data import dataset_card
from modernbert_train.data.check_shards import check_data, without_words
from modernbert_train.data.fingerprint import data_fingerprint
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.train import session
from modernbert_train.vocabulary import read_vocabulary
from tests.support.tiny_run import TINY_YAML, TinyRun

SHORT = (
    *("phases.long=null", "phases.short.tokens=200", "phases.short.batch_warmup=null"),
    "phases.short.schedule.warmup_tokens=100",
)
CARDS = {"train/index.json", "train/lengths.npy", "validation/index.json", "validation/lengths.npy"}
COUNTS = {"train/token_counts.npy"}
HASHED = {"check": CARDS, "plan": CARDS, "inspect": CARDS, "train": CARDS | COUNTS, "eval": CARDS | COUNTS}


@pytest.mark.runs
def test_a_start_hashes_each_file_once_and_parses_the_tokenizer_once(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to the last step, in this process; each command has a copy that it has never seen."""
    functions = hashlib.file_digest, dataset_card.file_xxh3, vocabulary.parse_json
    digest, fast_digest, parse = (Mock(wraps=function) for function in functions)
    monkeypatch.setattr(hashlib, "file_digest", digest)
    for module in (dataset_card, session):
        monkeypatch.setattr(module, "file_xxh3", fast_digest)
    monkeypatch.setattr(vocabulary, "parse_json", parse)
    for verb in HASHED:
        shutil.copytree(tiny_data, tmp_path / verb)
    time.sleep(0.15)
    for verb, expected in HASHED.items():
        file = tmp_path / f"{verb}.yaml"
        file.write_text(TINY_YAML.format(runs=tmp_path / "runs", data=tmp_path / verb), encoding="utf-8")
        for each in (digest, fast_digest, parse):
            each.reset_mock()
        assert main([verb, str(file), *SHORT]) == 0
        hashed = [Path(call.args[0].name) for call in digest.call_args_list]
        hashed += [call.args[0] for call in fast_digest.call_args_list]
        assert sorted("/".join(path.parts[-2:]) for path in hashed) == sorted(expected), verb
        assert parse.call_count == 1, verb


@pytest.mark.runs
def test_data_exchanged_within_a_process_are_seen(tiny_data: Path, tmp_path: Path, tiny_run: TinyRun) -> None:
    """A notebook lives long; a file of the same size and with the same time is another one all the same."""
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    config = read_run(tiny_run(*(f"data.{key}={data / key}" for key in ("train", "validation", "tokenizer"))))
    time.sleep(0.15)
    before = data_fingerprint(check_data(config))

    change_last_byte(data / "train/token_counts.npy")
    now = data_fingerprint(check_data(config))
    assert {key for key in now if now[key] != before[key]} == {"token counts"}
    change_last_byte(data / "train/lengths.npy")
    with pytest.raises(DataError, match=r"train/lengths\.npy: sha256"):
        check_data(config)
    change_last_byte(data / "train/lengths.npy")
    check_data(config)
    tokenizer = data / "tokenizer/tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    with pytest.raises(DataError, match="made with another tokenizer"):
        check_data(config)


def test_positions_begin_at_0_or_after_the_padding(tiny_run: TinyRun, tmp_path: Path) -> None:
    """A RoBERTa whose positions begin anywhere else computes something else in transformers."""
    run = yaml.safe_load(Path(tiny_run()[0]).read_text())
    del run["phases"]["long"]["model"]
    file, after_pad = tmp_path / "roberta.yaml", read_vocabulary(run["data"]["tokenizer"]).pad_id + 1
    run["model"] = {"name": "bert"}
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    for offset in (0, after_pad):
        check_data(read_run([str(file), f"model.position_offset={offset}"]))
    with pytest.raises(
        ConfigError, match=rf"model\.position_offset=7: .* has \[PAD\] at .*position_offset={after_pad}, or 0"
    ):
        check_data(read_run([str(file), "model.position_offset=7"]))


@pytest.mark.runs
def test_a_tokenizer_without_words_is_named_where_words_are_masked(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then each token is a separate word, and n-grams consist of tokens. The tiny one has marks."""
    assert main(["check", *tiny_run("objective.masking=ngram")]) == 0
    assert "does not mark" not in capsys.readouterr().out
    special = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3}
    added = [{"id": i, "content": text, "special": True} for text, i in special.items()]
    tokens = {"model": {"vocab": special | {"the": 4, "play": 5}}, "added_tokens": added}
    (tmp_path / "wordless").mkdir()
    (tmp_path / "wordless/tokenizer.json").write_text(json.dumps(tokens))
    there = f"data.tokenizer={tmp_path}/wordless"
    assert without_words(read_run(tiny_run(there))) is None
    for asked in ("objective.masking=ngram", "objective={name: sop, masking: ngram}"):
        said = without_words(read_run(tiny_run(there, asked)))
        assert said is not None and "wordless does not mark which tokens continue a word, so each token cou" in said


def test_shards_without_words_are_refused_where_these_are_masked(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their card, before torch is imported; not where no phase that masks words reads them, nor held-out text."""
    words = "objective={name: mlm, masking: ngram, words: segmenter}"
    for verb in ("check", "train"):
        assert main([verb, *tiny_run(words)]) == 65
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "data.train=" in line and "its documents lack words, which objective.words=segmenter masks" in line
        assert "again with sources.NAME.words_field, or set objective.words=tokenizer; with data.streams, give" in line
    path = read_run(tiny_run()).data.train
    streams = (
        f"data={{train: null, streams: {{a: {{path: {path}, proportion: 1}}, b: {{path: {path}, proportion: 0}}}}}}"
    )
    with pytest.raises(DataError) as refused:
        check_data(read_run(tiny_run(words, streams)))
    assert str(refused.value).startswith("data.streams.a.path=") and "streams.b" not in str(refused.value)


def change_last_byte(file: Path) -> None:
    """And put its time back."""
    old, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
