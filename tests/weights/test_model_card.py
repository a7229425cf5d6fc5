"""The model card. If this breaks, a model is published with invented claims, or without those that the hub requires."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from modernbert_train import __version__
from modernbert_train.__main__ import main
from modernbert_train.checkpoints.evaluations import keep_result
from modernbert_train.data.dataset_card import read_card, write_card
from tests.support.front_door import Cli
from tests.support.runs import newest, records
from tests.support.tiny_run import TINY_YAML


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Write a folder with a finished run and its data."""
    folder = tmp_path_factory.mktemp("card")
    shutil.copytree(tiny_data, folder / "data")
    held_out = folder / "data/validation"
    write_card(held_out, replace(read_card(held_out), text_bytes=50_000))
    (folder / "tiny.yaml").write_text(TINY_YAML.format(runs=folder, data=folder / "data"), encoding="utf-8")
    assert main(["train", str(folder / "tiny.yaml")]) == 0
    return folder


def card(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Return header and text of a new export's README."""
    out = folder / "out"
    assert main(["export", str(folder / "tiny"), "--out", str(out), *options]) == 0
    content = (out / "README.md").read_text(encoding="utf-8")
    _, header, text = content.split("---\n", 2)
    assert ModelCard(content).data.to_dict() == yaml.safe_load(header)  # as the hub reads it
    return yaml.safe_load(header), text


def section(text: str, heading: str) -> str:
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.runs
def test_every_section_has_the_numbers_of_the_run(folder: Path) -> None:
    """Data, tokens, recipe and evaluation, compared with the files they come from."""
    _, text = card(folder)
    shards = json.loads((folder / "data/train/dataset.json").read_text())
    data = section(text, "Data")
    assert f"{shards['documents']} documents with {shards['tokens']:,} tokens" in data
    assert shards["tokenizer_sha256"][:16] in data and "lack a record of their text" in data
    found = newest(folder / "tiny")
    training = section(text, "Training")
    assert f"{found.state.tokens:,} tokens of 6,000 planned, in {found.step} steps, seed 5" in training
    assert "stable_adamw, betas (0.9, 0.98), epsilon 1e-06, weight decay 1e-05" in training
    assert (
        "| short | 4,000 | 64 | 4 to 8 | 30% | 5.00e-03 | warmup 500 tokens, constant | 10,000 | 10,000 |" in training
    )
    assert "| long | 2,000 | 128 | 4 | 30% | 5.00e-03 | constant, one_minus_sqrt to 0 over 1,000 tokens |" in training
    last = records(folder / "tiny", "validation")[-1]
    evaluation = section(text, "Evaluation")
    assert f"| this model | {last['loss']:.3f} | {last['accuracy']:.1%} |" in evaluation
    tokens = json.loads((folder / "data/validation/dataset.json").read_text())["tokens"]
    bits = last["loss"] / math.log(2) * tokens / 50_000
    assert f"This is {bits:.3f} bits per byte of text." in evaluation
    assert f"{last['predicted']} predictions" in evaluation and "15% of the tokens predicted" in evaluation


@pytest.mark.runs
def test_the_licence_is_the_users_or_unknown(folder: Path, cli: Cli) -> None:
    """A licence is a legal promise: it is copied or reported as missing, never invented."""
    header, text = card(folder)
    assert header["license"] == "unknown" and "None was stated" in section(text, "Licence")
    header, text = card(folder, "--licence", "cc-by-4.0")
    assert header["license"] == "cc-by-4.0" and "cc-by-4.0" in section(text, "Licence")
    assert header["mask_token"] == "[MASK]" and header["pipeline_tag"] == "fill-mask"
    assert header["library_name"] == "transformers" and "modernbert" in header["tags"]
    assert (
        "--licence='free: yes': not an identifier of the hub"
        in cli("export", folder / "tiny", "--out", folder / "out", "--licence", "free: yes", code=78).err
    )


def test_an_earlier_checkpoint_is_not_credited_with_later_results(folder: Path) -> None:
    """It shows its own measurement, not the run's last."""
    first = min((folder / "tiny/checkpoints").glob("step-*"))
    assert main(["export", str(first), "--out", str(folder / "first")]) == 0
    text = (folder / "first/README.md").read_text()
    early, late = [line["loss"] for line in records(folder / "tiny", "validation")]
    assert f"| {early:.3f} |" in text and f"| {late:.3f} |" not in text


@pytest.mark.runs
def test_sources_are_named_only_if_the_report_is_of_these_shards(folder: Path) -> None:
    """prepare_report.json in the shards' folder names their sources, unless it belongs to other shards."""
    shards = json.loads((folder / "data/train/dataset.json").read_text())
    counts = {key: shards[key] for key in ("documents", "tokens")}
    sources = {
        "wiki": {"kind": "hub", "path": "someone/articles", "subset": "en", "split": "train", "text_field": None},
        "mine": {"kind": "text", "path": "secret/folder", "subset": None, "split": None, "text_field": None},
    }
    report = {
        "documents_read": 70,
        "written": {"train": counts},
        "dropped": {"duplicate": 10},
        "fingerprint": {"spec": {"sources": sources}},
    }
    path = folder / "data/prepare_report.json"
    path.write_text(json.dumps(report))
    header, text = card(folder)
    data = section(text, "Data")
    assert header["datasets"] == ["someone/articles"]
    assert "- wiki: hub `someone/articles`, subset en, split train\n- mine: text\n" in data and "secret" not in text
    assert "from 70 documents read; left out: 10 duplicate" in data
    assert "Licence, by tokens" not in data
    shards = folder / "data/train/dataset.json"
    before = shards.read_text()
    mit, none = ({"documents": 1, "tokens": tokens} for tokens in (3, 1))
    fields = {"licence": {"values": {"MIT": mit}, "missing": none, "other": {"documents": 0, "tokens": 0}}}
    shards.write_text(json.dumps(json.loads(before) | {"fields": fields}))
    assert "Licence, by tokens: MIT 75 %, (missing) 25 %." in section(card(folder)[1], "Data")
    shards.write_text(before)
    path.write_text(json.dumps(report | {"written": {"train": counts | {"tokens": 1}}}))
    header, text = card(folder)
    assert "datasets" not in header and "lack a record of their text" in section(text, "Data")


def test_an_export_needs_no_shards(folder: Path, tmp_path: Path) -> None:
    """Models are exported on machines without the data; the card then makes no statement about them."""
    moved = (folder / "data/train").rename(tmp_path / "train")
    try:
        _, text = card(folder)
    finally:
        moved.rename(folder / "data/train")
    assert "not available when the model was exported" in section(text, "Data")
    assert "tokens of 6,000 planned" in section(text, "Training")


@pytest.mark.runs
def test_the_card_says_what_trained_it_and_what_was_measured_of_these_weights_alone(folder: Path) -> None:
    """Figures of other weights, or a host's name, must not be published; the run's folder and report have both."""
    run = folder / "tiny"
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [each["kind"] for each in starts] == ["start", "end"] and starts[1]["outcome"] == "finished"
    found = newest(run)
    for weights, value in ((found.weights_hash, 0.625), ("others", 0.375)):
        keep_result(found.folder, "finetune rte, dev", {"accuracy": value}, step=found.step, weights=weights, seed=1)
    try:
        _, text = card(folder)
        assert main(["report", str(run)]) == 0
    finally:
        (run / "evaluations.jsonl").unlink()
    assert f"Trained by modernbert-train {__version__}" in section(text, "Training")
    assert "on 1 x cpu, in 1 start from 20" in section(text, "Training")
    evaluation = section(text, "Evaluation")
    assert "| finetune rte, dev | accuracy | 0.6250 |" in evaluation and "0.3750" not in evaluation
    assert "Nothing else was measured: no bias, no safety." in evaluation
    page = (run / "report.html").read_text(encoding="utf-8")
    host = starts[0]["host"]
    assert host in page and "What trained it" in page and "0.6250" in page and "0.3750" in page
    assert f" {host} " not in text and str(folder) not in text
    assert records(run, "start")[0]["program"].startswith(f"modernbert-train {__version__}")
