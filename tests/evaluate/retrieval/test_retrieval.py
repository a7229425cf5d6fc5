"""Figures of retrieval: a run, a checkpoint and an export have the same ones; SciFact has the figures of mteb."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modernbert_train.__main__ import main
from modernbert_train.evaluate.retrieval.runs import exported_encoder
from tests.evaluate.retrieval.mteb_task import mteb_figures
from tests.support.beir import BERT, WriteBeir, make_encoder, recipe, result_of
from tests.support.needs import needs
from tests.support.tiny_run import TinyRun

needs("sentence_transformers", "the extra retrieval is not installed")
DATA = Path(os.environ.get("MODERNBERT_LABELLED", Path(__file__).parents[4] / "shared/data"))
SCIFACT = DATA / "retrieval/scifact_subset"
needs_scifact = pytest.mark.skipif(not SCIFACT.is_dir(), reason="no SciFact here: MODERNBERT_LABELLED=FOLDER")


@pytest.mark.runs
def test_a_run_is_measured_as_it_is_exported(
    tiny_run: TinyRun, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run, checkpoint and export are one model; only the export is a folder that sentence-transformers loads."""
    from sentence_transformers import SentenceTransformer

    assert main(["train", *tiny_run("checkpoint.interval_steps=100")]) == 0
    run = tmp_path / "runs/tiny"
    assert main(["export", str(run)]) == 0
    assert not (run / "hf/modules.json").exists()
    model = SentenceTransformer(str(run / "hf"), device="cpu")
    assert model.max_seq_length == 128 and model[1].pooling_mode == "mean"
    figures = []
    for number, source in enumerate((run, max((run / "checkpoints").iterdir()), run / "hf")):
        keys = [f"name=measured-{number}", f"runs_folder={tmp_path}/runs", "device=cpu"]
        assert main(["retrieval", "evaluate", str(toy), "--model", str(source), *keys]) == 0
        figures.append(result_of(tmp_path / f"runs/measured-{number}")["figures"])
    assert figures[0] == figures[1] == figures[2]
    # while the newest checkpoint is damaged, the one before it is measured, and kept as that one
    weights = max((run / "checkpoints").iterdir()) / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole):
        weights.write_bytes(content)
        capsys.readouterr()
        words = ["--model", str(run), "name=damaged", f"runs_folder={tmp_path}/runs", "device=cpu"]
        assert main(["retrieval", "evaluate", str(toy), *words]) == 0
        assert "measured before" not in capsys.readouterr().out


@pytest.mark.runs
def test_an_untrained_twin_has_the_weights_that_a_run_with_its_seed_begins_with(
    tokenizer: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a suite's row of the twin would have other weights in each task, or miss retrieval."""
    first = make_encoder(tmp_path / "first", tokenizer, BERT)
    here = load_file(first / "model.safetensors")
    for seed, same in ((3, True), (4, False)):
        with exported_encoder(f"untrained:{first}", seed) as folder:
            drawn = load_file(folder / "model.safetensors")
        assert drawn and drawn.keys() <= here.keys()
        assert all(torch.equal(drawn[name], here[name]) for name in drawn) == same
    words = [str(toy), "--model", f"untrained:{first}", f"runs_folder={tmp_path}/runs", "name=twin", "device=cpu"]
    assert main(["retrieval", "evaluate", *words]) == 0
    words[2] = f"frozen:{first}"
    assert main(["retrieval", "evaluate", *words]) == 78 and "Leave out `frozen:`" in capsys.readouterr().err


@pytest.mark.runs
def test_identical_ids_are_left_out_if_configured(encoder: Path, write_beir: WriteBeir, tmp_path: Path) -> None:
    """As in ArguAna, where a query is itself in the corpus, and would always be found first."""
    folder = write_beir({"a": "aba ibd", "b": "xyz xyw"}, {"a": "aba ibd"}, test=[("a", "b", 1)])
    found = []
    for flag in ("false", "true"):
        keys = [f"name=asked-{flag}", f"runs_folder={tmp_path}/runs", f"ignore_identical_ids={flag}", "device=cpu"]
        assert main(["retrieval", "evaluate", str(folder), "--model", str(encoder), *keys]) == 0
        found.append(result_of(tmp_path / f"runs/asked-{flag}")["figures"]["beir"]["mrr_at_10"])
    assert found == [0.5, 1.0]


def test_a_set_is_not_named_as_the_mean_of_all_sets(
    encoder: Path, write_beir: WriteBeir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures were replaced by the mean on the terminal."""
    first, other = (
        write_beir({"a": "aba", "b": "xyz"}, {"q": "aba"}, name, train=[("q", "b", 1)], test=[("q", "a", 1)])
        for name in ("mean", "other")
    )
    assert main(["retrieval", "evaluate", str(first), str(other), "--model", "bm25"]) == 78
    assert f"{first}: results have the mean of all sets under the name mean. Rename the f" in capsys.readouterr().err
    file = recipe(tmp_path, other, evaluate={"mean": str(other)})
    assert main(["retrieval", "train", file, "--model", str(encoder)]) == 78
    assert "evaluate.mean: results have the mean" in capsys.readouterr().err


@pytest.mark.weekly
@needs_scifact
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scifact_is_learned_and_measured_as_by_mteb(tmp_path: Path) -> None:
    """The judgements of its training split, then its test queries against 2,101 documents; equal to mteb's figures."""
    from sentence_transformers import SentenceTransformer

    from tests.support.beir import MODERNBERT
    from tests.support.make_shards import make_tokenizer

    texts = [json.loads(line)["text"] for line in (SCIFACT / "corpus.jsonl").read_text("utf-8").splitlines()]
    tokenizer = make_tokenizer(tmp_path / "tokenizer", texts[:300])
    model = make_encoder(tmp_path / "model", tokenizer, MODERNBERT, init_std=0.1)
    file = recipe(
        tmp_path, SCIFACT, evaluate={"scifact": str(SCIFACT)}, batch_size=32, epochs=4, encode_batch=64, name="scifact"
    )
    keys = [f"runs_folder={tmp_path}/runs", "device=cpu", "name=before"]
    assert main(["retrieval", "evaluate", str(SCIFACT), "--model", str(model), *keys]) == 0
    assert main(["retrieval", "train", file, "--model", str(model)]) == 0
    before, after = (result_of(tmp_path / f"runs/{name}")["figures"] for name in ("before", "scifact"))
    assert after["scifact"]["ndcg_at_10"] > before["scifact_subset"]["ndcg_at_10"]
    trained = SentenceTransformer(str(tmp_path / "runs/scifact/st"), device="cpu")
    assert after["scifact"] == pytest.approx(mteb_figures(SCIFACT, trained), abs=2e-5)
