"""The command from text to shards, mistakes in its input, and `inspect` of what it wrote."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_prep import prepare as prepare_module
from data_prep.tasks import stages
from modernbert_train.__main__ import main
from modernbert_train.data import shard_writer as shards
from modernbert_train.data.dataset_card import file_sha256, read_card
from modernbert_train.data.statistics import length_bins
from tests.support.corpora import Command, Files, Refusal, report_of, tokens_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.runs
DATA, STORAGE, CONFIG = 65, 74, 78


def test_shards_hold_every_text_once_and_the_splits_share_none(
    command: Command, corpus: Path, texts: list[str], tmp_path: Path
) -> None:
    """The whole chain: each text comes out of the shards unchanged, in exactly one split."""
    (corpus / "copy.txt").write_text(texts[0])
    assert command("shard_bytes=65536") == 0
    out = tmp_path / "out"
    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 384
    decoded: dict[str, list[str]] = {}
    for split in ("train", "validation"):
        documents = tokens_of(out / split)
        decoded[split] = [tokenizer.decode(ids) for ids in documents]
        card = read_card(out / split)
        assert (card.documents, card.tokens) == (len(documents), sum(map(len, documents)))
        assert card.text_bytes == sum(len(text.encode()) for text in decoded[split])
        assert card.tokenizer_sha256 == file_sha256(out / "tokenizer" / "tokenizer.json")
        assert (card.vocab_size, card.dtype, card.column, card.special_tokens) == (384, "uint16", "tokens", "loader")
        assert np.load(out / split / "lengths.npy").tolist() == [len(ids) for ids in documents]
        flat = np.concatenate([np.array(ids) for ids in documents])
        assert np.load(out / split / "token_counts.npy").tolist() == np.bincount(flat, minlength=384).tolist()
        assert flat.min() > 4
    assert sorted(decoded["train"] + decoded["validation"]) == sorted(texts)
    report = report_of(out)
    assert report["dropped"] == {"duplicate": 1}
    assert report["documents_read"] == 61 == report["written"]["train"]["documents"] + len(decoded["validation"]) + 1
    assert len(decoded["validation"]) in range(3, 25)


def test_tokenizer_never_sees_validation_text(command: Command, corpus: Path, tmp_path: Path) -> None:
    """A tokenizer fitted to the held-out text makes the validation loss look better than it is."""
    assert command() == 0
    tokenizer = (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes()
    trained = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    held_out = {trained.decode(ids) for ids in tokens_of(tmp_path / "out" / "validation")}
    for file in corpus.rglob("*.txt"):
        if file.read_text() in held_out:
            file.unlink()
    assert command(f"out={tmp_path / 'train_only'}", "validation_share=0") == 0
    assert (tmp_path / "train_only" / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer
    assert not (tmp_path / "train_only" / "validation").exists()


def test_every_damaged_document_is_counted(command: Command, corpus: Path, tmp_path: Path) -> None:
    """All that was read is either written or counted as left out."""
    (corpus / "1.txt").write_bytes(b"caf\xe9")
    (corpus / "2.txt").write_bytes(b"nul\0byte")
    (corpus / "3.txt").write_bytes(b" \n\t")
    (corpus / "4.txt").symlink_to("gone")
    (corpus / "5.txt").write_bytes(b"abc")
    (corpus / "6.txt").write_bytes(b"x" * 5000)
    assert command("max_left_out=1", "min_characters=5", "max_characters=4000") == 0
    report = report_of(tmp_path / "out")
    assert report["dropped"] == {
        "empty": 1, "not_utf8": 1, "nul_byte": 1, "too_long": 1, "too_short": 1, "unreadable": 1,
    }  # fmt: skip
    written = sum(report["written"][split]["documents"] for split in ("train", "validation"))
    assert report["documents_read"] == written + sum(report["dropped"].values()) == 66
    assert report["first_dropped"]["not_utf8"][0] == f"{corpus / '1.txt'}: not UTF-8: byte 0xe9 at offset 3"
    assert (
        "offset 3" in report["first_dropped"]["nul_byte"][0]
        and "No such file" in report["first_dropped"]["unreadable"][0]
    )


def test_stop_names_file_and_byte(refusal: Refusal, corpus: Path, tmp_path: Path) -> None:
    """A user who accepts no damaged text gets the place, the exit code for "fix the input", and no folder."""
    (corpus / "part1" / "bad.txt").write_bytes(b"caf\xe9")
    said = f"error: {corpus}/part1/bad.txt: not UTF-8: byte 0xe9 at offset 3. Fix or remove it"
    assert said in refusal(DATA, "on_error=stop")
    assert not list(tmp_path.glob("out*"))


def test_too_small_corpora(refusal: Refusal, corpus: Path, tmp_path: Path) -> None:
    """One file cannot be split into two sets, and of one that is all left out nothing remains."""
    said = refusal(DATA, f"sources.mine.path={corpus / 'part0' / '000.txt'}")
    assert "validation_share=0.2 of 1 documents leaves none for" in said
    (corpus / "a.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    assert "no documents left of 2 read" in refusal(DATA, "sources.mine.kind=jsonl", "max_left_out=1")
    assert not list(tmp_path.glob("out*"))


def test_no_space_before_writing(refusal: Refusal, monkeypatch: Any) -> None:
    """Both numbers, before the work."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5000, 5000))
    error = refusal(STORAGE)
    assert "needs about 16,79" in error and "5,000 are free" in error


def test_disk_fills_up_while_writing(command: Command, refusal: Refusal, tmp_path: Path, monkeypatch: Any) -> None:
    """The estimate may be wrong, and others use the disk too; after freeing space the same command works."""
    with monkeypatch.context() as patched:

        def full(self: Any, sample: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "shard.00000.mds.zstd")

        patched.setattr(shards.MDSWriter, "write", full)
        error = refusal(STORAGE)
    assert "shard.00000.mds.zstd: No space left on device" in error and "bytes free" in error
    assert "give the same command again" in error
    assert command() == 0
    assert not (tmp_path / "out.work").exists()


def test_repeating_is_free_and_changing_is_refused(
    command: Command, corpus: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, files_of: Files
) -> None:
    """A dataset of an outdated spec must not be used, nor the same one prepared twice."""
    assert command() == 0
    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "_run", None)
        assert command() == 0
    assert "already complete" in capsys.readouterr().out
    before = files_of(tmp_path / "out")
    assert command("validation_share=0.3") == CONFIG
    error = capsys.readouterr().err
    assert "spec.validation_share: 0.2 -> 0.3" in error and "--overwrite" in error
    (corpus / "new.txt").write_text("one more document")
    assert command() == CONFIG
    assert "inputs.files: 60 -> 61" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == before
    assert command("--overwrite") == 0
    assert report_of(tmp_path / "out")["documents_read"] == 61


def test_damage_in_a_finished_dataset_is_found(command: Command, tmp_path: Path, capsys: Any) -> None:
    """A dataset that claims to be complete must be complete."""
    assert command() == 0
    (tmp_path / "out" / "train" / "index.json").write_text("{}")
    assert command() == DATA
    assert "--overwrite writes the dataset again" in capsys.readouterr().err
    assert command("--overwrite") == 0


def test_foreign_folder_is_never_touched(command: Command, tmp_path: Path, capsys: Any) -> None:
    """out=~/thesis --overwrite must not delete a thesis."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    assert command() == command("--overwrite") == CONFIG
    assert "is not a dataset of `prepare`, so it is not touched" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"thesis.tex": "years of work"}


def test_sources_that_change_while_they_are_read(refusal: Refusal, corpus: Path, monkeypatch: Any) -> None:
    """Otherwise disk estimate, tokenizer and report would describe another text than the shards."""
    save = stages.save_tokenizer

    def save_and_change(*arguments: Any) -> str:
        (corpus / "part2" / "011.txt").write_text("this came late")
        return save(*arguments)

    monkeypatch.setattr(stages, "save_tokenizer", save_and_change)
    error = refusal(DATA)
    assert "part2/011.txt: has changed since this began" in error and "Another program writes to the sources" in error


def test_existing_tokenizer_is_used(command: Command, tmp_path: Path, capsys: Any) -> None:
    """Continuing another model needs its ids; a dataset records its tokenizer file."""
    assert command() == 0
    made = tmp_path / "out" / "tokenizer"
    again = [f"out={tmp_path / 'again'}", f"tokenizer.path={made}"]
    assert command(*again) == 0
    assert tokens_of(tmp_path / "again" / "train") == tokens_of(tmp_path / "out" / "train")
    content = json.loads((made / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 500
    (tmp_path / "holes.json").write_text(json.dumps(content))
    assert command(f"out={tmp_path / 'holes'}", f"tokenizer.path={tmp_path / 'holes.json'}") == 0
    assert read_card(tmp_path / "holes" / "train").vocab_size == 501
    assert command(f"out={tmp_path / 'x'}", f"tokenizer.path={tmp_path / 'gone'}") == DATA
    assert "tokenizer.path=" in capsys.readouterr().err


def test_text_of_which_the_tokenizer_makes_nothing(command: Command, corpus: Path, tmp_path: Path) -> None:
    """A normalizer may delete all of a text; an empty sample could not be stored."""
    assert command() == 0
    content = json.loads((tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    (tmp_path / "t.json").write_text(json.dumps(content))
    (corpus / "tildes.txt").write_text("~~~")
    again = [f"out={tmp_path / 'again'}", f"tokenizer.path={tmp_path / 't.json'}"]
    assert command(*again, "on_error=stop") == DATA
    assert command(*again) == DATA
    assert command(*again, "max_left_out=0.02") == 0
    report = report_of(tmp_path / "again")
    assert report["dropped"] == {"no_tokens": 1}
    assert report["documents_read"] == 61 == 1 + sum(split["documents"] for split in report["written"].values())


def test_large_vocabularies_get_wide_tokens(tmp_path: Path) -> None:
    """Ids above 65535 in 16 bits would become other words."""
    writer = shards.ShardWriter(tmp_path / "s", 70_000, "0" * 64, 1 << 20)
    writer.write([69_999, 5])
    assert writer.finish().dtype == "uint32"
    assert tokens_of(tmp_path / "s") == [[69_999, 5]]
    assert shards.token_dtype(65_536) == np.uint16


def test_a_small_dataset_is_prepared_without_torch(corpus: Path, tmp_path: Path) -> None:
    """Streaming imports torch for its datasets: two seconds of every start, and memory of every worker."""
    script = (
        "import runpy, sys\ntry:\n    runpy.run_module('data_prep.prepare', run_name='__main__')\n"
        "except SystemExit as ended:\n    print(ended.code, sorted({'torch', 'torchmetrics'} & {*sys.modules}))"
    )
    words = [f"out={tmp_path}/out", "sources.mine.kind=text", f"sources.mine.path={corpus}", "tokenizer.vocab_size=384"]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=tmp_path, env=own)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_table_and_json_agree_with_the_shards(
    command: Command, corpus: Path, texts: list[str], tmp_path: Path, capsys: Any
) -> None:
    """Users who mix sources by these numbers must be able to trust them."""
    (corpus / "copy.txt").write_text(texts[0])
    (corpus / "empty.txt").write_text(" ")
    assert command() == 0
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["inspect", str(out), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out).values()
    lengths = np.load(out / "train/lengths.npy")
    train = facts["splits"]["train"]
    assert (train["documents"], train["tokens"], train["longest"]) == (len(lengths), lengths.sum(), lengths.max())
    assert train["percentiles"]["50"] == int(np.percentile(lengths, 50))
    assert train["histogram"] == length_bins(lengths)
    assert facts["sources"]["mine"]["dropped"] == {"duplicate": 1, "empty": 1}

    assert main(["inspect", str(out), str(out / "train")]) == 0
    table = capsys.readouterr().out
    total = sum(split["tokens"] for split in facts["splits"].values())
    assert [row.split() for row in table.splitlines() if row.startswith("  mine")] == [
        ["mine", "62", "60", f"{total:,}", "1", "0", "1", "0"]
    ]
    assert f"train: {len(lengths)} documents, {lengths.sum():,} tokens" in table
    # every text except the duplicate is in one of the two, so the bytes of both add up
    assert sum(split["text_bytes"] for split in facts["splits"].values()) == sum(len(t.encode()) for t in texts)
    folder, split, _, ratio, beside = table.splitlines()[-1].split()
    found = train["text_bytes"] / train["tokens"]
    assert (folder, split, ratio, beside) == (str(out / "train"), "train", f"{found:.2f}", "1.00")
