"""Secrets in the environment, on the command line, in URLs, errors and names: absent from all output and files.

If this breaks, a key is copied with a run folder, published with a model card, or read from a log.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.config.load import load_run
from modernbert_train.core.redact import HIDDEN, has_secret, redact, redacted
from modernbert_train.errors import ConfigError, DataError
from tests.security.opening import lines_of
from tests.security.telling import SHAPES, TEXTS, WORDS
from tests.support.tiny_run import TinyRun


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.raised])
def test_each_shape_is_known_in_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES[name]
    if shape.variable:
        monkeypatch.setenv(shape.variable, shape.secret)
    text = str(shape.raised)
    assert shape.secret not in str(DataError(text)) and HIDDEN in redact(text)
    assert shape.secret not in str(redacted({"error": [text], "api_token": shape.secret, "step": 3}))


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.word])
def test_a_configuration_with_a_secret_is_refused_without_showing_it(name: str, tiny_run: TinyRun) -> None:
    shape = SHAPES[name]
    with pytest.raises(ConfigError) as refused:
        load_run(tiny_run()[:1], [str(shape.word)])
    assert shape.secret not in str(refused.value) and str(shape.word).split("=")[0] in str(refused.value)


@pytest.mark.parametrize(
    "name", ["api_key", "apikey", "x-api-key", "--private-key", "aws_secret_access_key", "auth-key", "session-token"]
)
def test_a_value_is_hidden_by_the_name_of_its_key_however_that_is_joined(name: str) -> None:
    for text in (f"{name}=1234567", f"{name}: 1234567", str({name: "1234567"})):
        assert redact(text) == text.replace("1234567", HIDDEN)
    assert redacted({name: "1234567"}) == {name: HIDDEN}


@pytest.mark.parametrize(
    "text",
    [
        "sort_key: documents", "cache-key=of-the-shards",
        "s3://bucket/folder/shard.00001.mds.zstd", "https://huggingface.co/answerdotai/ModernBERT-base", "token=5",
        "data.tokenizer=data/tokenizer: lacks [MASK]", "sftp://me@host/shards", "hash 1f816445c36c", "sk-learn",
        "tokens 1,527 to 2,030: not finite, loss nan; rank 1, documents 55", "answerdotai/ModernBERT-base@8949b909ec",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and plain words in a variable for a token hide nothing."""
    monkeypatch.setenv("HF_TOKEN", "short")
    monkeypatch.setenv("DB_PASSWORD", "tokenizer")
    assert not has_secret(text)


def test_the_folder_that_a_shell_is_in_is_no_password(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variable is called PWD; a run with that folder in a path would be refused, and messages would hide it."""
    monkeypatch.setenv("PWD", "/home/me/encoders-2")
    monkeypatch.setenv("DB_PWD", "/home/me/encoders-3")
    assert load_run(tiny_run()[:1], ["runs_folder=/home/me/encoders-2/runs"]).runs_folder == "/home/me/encoders-2/runs"
    assert str(DataError("/home/me/encoders-2/x: damaged")).startswith("/home/me/encoders-2/x")
    assert has_secret("/home/me/encoders-3")


@pytest.mark.runs
@pytest.mark.timeout(600)
def test_no_secret_is_shown_or_kept(tmp_path: Path) -> None:
    """By check, train, export, report and runs, in logs, run folders, records, pages and model cards."""
    found = {entry.pop("use"): entry for entry in lines_of("tests.security.telling", tmp_path)}
    assert {use: entry["told"] for use, entry in found.items() if entry["told"]} == {}
    # every case has really run, failed or been refused, with each secret in its place
    assert {use: entry["codes"] for use, entry in found.items()} == {
        "as words": [78, 78], "in errors": [70], "trained with": [0, 0, 0, 0],
    }  # fmt: skip
    assert all(found["as words"]["said"].count(key) >= 2 for key in WORDS)
    assert found["in errors"]["said"].count(HIDDEN) >= len(TEXTS)
