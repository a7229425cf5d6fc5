"""Training for retrieval: it learns, resumes to the bit after a stop, and its result loads unchanged."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modernbert_train.__main__ import main
from modernbert_train.distributed import bf16
from modernbert_train.evaluate.retrieval.beir import read_beir
from modernbert_train.evaluate.retrieval.ranking import figures
from modernbert_train.evaluate.retrieval.runs import exported_encoder
from tests.evaluate.retrieval.mteb_task import mteb_figures
from tests.support.beir import BERT, LONGEST, WriteBeir, make_encoder
from tests.support.needs import needs
from tests.support.tiny_run import TinyRun

needs("sentence_transformers", "the extra retrieval is not installed")
DATA = Path(os.environ.get("MODERNBERT_LABELLED", Path(__file__).parents[4] / "shared/data"))
SCIFACT = DATA / "retrieval/scifact_subset"
needs_scifact = pytest.mark.skipif(not SCIFACT.is_dir(), reason="no SciFact here: MODERNBERT_LABELLED=FOLDER")


def recipe(folder: Path, beir: Path, **keys: Any) -> str:
    settings = {
        "train": [str(beir)], "evaluate": {"toy": str(beir)}, "runs_folder": str(folder / "runs"), "device": "cpu",
        "batch_size": 20, "epochs": 5, "lr": 5e-3, "warmup": 0.1,
    }  # fmt: skip
    file = folder / "toy.yaml"
    file.write_text(json.dumps(settings | keys), encoding="utf-8")
    return str(file)


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


@pytest.mark.runs
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("loss", "precision"), [pytest.param("mnrl", "auto", marks=pytest.mark.slow), ("cached_mnrl", "bf16")]
)
def test_training_finds_what_the_encoder_did_not_and_says_what_it_did(
    loss: str,
    precision: str,
    encoder: Path,
    toy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sentence_transformers import SentenceTransformer

    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: True)  # otherwise it is emulated
    file = recipe(tmp_path, toy, loss=loss, precision=precision, mini_batch=7, query_prompt="ask ", query_max_tokens=16)
    assert main(["retrieval", "evaluate", str(toy), "--model", str(encoder), f"runs_folder={tmp_path}/runs"]) == 0
    before = result_of(tmp_path / "runs/toy-encoder-test")
    assert before["seed"] is None and before["settings"]["pooling"] == "mean"
    assert main(["retrieval", "train", file, "--model", str(encoder)]) == 0
    folder = tmp_path / "runs/toy-encoder-1618"
    said = capsys.readouterr().out
    assert "toy-encoder-1618: toy ndcg_at_10 " in said and "step 25 of 25" in said
    found = result_of(folder)
    losses = [each["loss"] for each in found["training"]["losses"]]
    assert losses[-1] < 0.7 * losses[0]
    assert found["training"]["precision"] == ("bf16" if precision == "bf16" else "fp32")
    assert found["figures"]["toy"]["ndcg_at_10"] > before["figures"]["toy"]["ndcg_at_10"] + 0.15
    assert {key: found[key] for key in ("task", "source", "seed", "run")} == {
        "task": "toy", "source": str(encoder), "seed": 1618, "run": "toy-encoder-1618",
    }  # fmt: skip
    assert found["counts"]["train"]["pairs"] == 100 and found["counts"]["toy"]["queries"] == 20
    assert found["settings"]["max_tokens"] == LONGEST and found["training"]["texts_cut"] == {"anchor": 0, "positive": 0}
    assert not (folder / "checkpoints").exists()

    model = SentenceTransformer(str(folder / "st"), device="cpu")
    assert model.max_seq_length == LONGEST and model[0].query_length == 16 and model.prompts["query"] == "ask "
    assert model[1].pooling_mode == "mean"
    vectors = model.encode_query(["aba " * 100, "ase"])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)

    # a second time: no training, the same figures; also when measured separately
    assert main(["retrieval", "train", file, "--model", str(encoder)]) == 0
    assert "step " not in capsys.readouterr().out
    assert result_of(folder)["figures"] == found["figures"]
    again = ["retrieval", "evaluate", str(toy), "--model", str(folder / "st"), f"runs_folder={tmp_path}/runs"]
    assert main(again) == 0
    assert result_of(tmp_path / "runs/toy-toy-encoder-1618-test")["figures"] == found["figures"]


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_late_interaction_is_learned_and_its_figures_are_those_of_every_token_with_every_token(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MaxSim computed in fp64, one query and document at a time; accumulated batches make fewer updates."""
    from sentence_transformers import MultiVectorEncoder

    keys = {"loss": "multi_vector", "vector_width": 8, "mini_batch": 7, "accumulate": 2, "query_prompt": "ask "}
    assert main(["retrieval", "train", recipe(tmp_path, toy, **keys), "--model", str(encoder)]) == 0
    folder = tmp_path / "runs/toy-encoder-1618"
    found = result_of(folder)
    losses = [each["loss"] for each in found["training"]["losses"]]
    assert losses[-1] < 0.8 * losses[0] and "step 15 of 15" in capsys.readouterr().out

    model = MultiVectorEncoder(str(folder / "st"), device="cpu")
    beir = read_beir(toy, "test")
    (texts,) = beir.texts(1000)
    queries, documents = model.encode_query(list(beir.queries.values())), model.encode_document(texts)
    assert {matrix.shape[1] for matrix in (*queries, *documents)} == {8}
    ranked = {}
    for query, matrix in zip(beir.queries, queries, strict=True):
        scores = [float((matrix.double() @ other.double().T).max(dim=1).values.sum()) for other in documents]
        ranked[query] = [beir.document_ids[place] for place in sorted(range(len(scores)), key=lambda at: -scores[at])]
    assert figures(ranked, beir.qrels) == pytest.approx(found["figures"]["toy"], abs=1e-6)
    assert found["figures"]["toy"]["ndcg_at_10"] > 0.15 and "each token" in found["settings"]["pooling"]
    again = ["retrieval", "evaluate", str(toy), "--model", str(folder / "st"), f"runs_folder={tmp_path}/runs"]
    assert main(again) == 0
    assert result_of(tmp_path / "runs/toy-toy-encoder-1618-test")["figures"] == found["figures"]

    # with an index on disk: the figures of the stored vectors, embedded once
    for query, matrix in zip(beir.queries, queries, strict=True):
        scores = [float((matrix @ other.half().float().T).max(dim=1).values.sum()) for other in documents]
        ranked[query] = [beir.document_ids[place] for place in sorted(range(len(scores)), key=lambda at: -scores[at])]
    for _ in range(2):
        assert main([*again, f"index={tmp_path}/index", "name=kept"]) == 0
        assert result_of(tmp_path / "runs/kept")["figures"]["toy"] == pytest.approx(
            figures(ranked, beir.qrels), abs=1e-6
        )
    assert main([*again, f"index={tmp_path}/index", "name=kept", "max_tokens=32"]) == 78
    assert "vectors of another corpus, model or length (max_tokens)" in capsys.readouterr().err
    assert main(["retrieval", "evaluate", str(toy), "--model", str(encoder), f"index={tmp_path}/index"]) == 78
    assert "is of late interaction" in capsys.readouterr().err


@pytest.mark.runs
def test_both_losses_are_one_and_texts_that_are_saved_load_equal(encoder: Path, toy: Path, tmp_path: Path) -> None:
    """GradCache has the same gradient: without dropout the same weights, up to the order of sums."""
    from sentence_transformers import SentenceTransformer

    texts, vectors = ["aba ibd", "xyz"], {}
    for loss in ("mnrl", "cached_mnrl"):
        file = recipe(tmp_path, toy, loss=loss, mini_batch=7, epochs=1, evaluate={}, name=loss)
        assert main(["retrieval", "train", file, "--model", str(encoder)]) == 0
        vectors[loss] = SentenceTransformer(str(tmp_path / f"runs/{loss}/st"), device="cpu").encode(texts)
    assert np.allclose(vectors["mnrl"], vectors["cached_mnrl"], atol=2e-4)


@pytest.mark.runs
def test_a_run_that_was_stopped_resumes_to_the_same_bits(
    encoder: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a signal, which saves; after a kill or a flipped bit, when an earlier checkpoint is used."""
    from safetensors.torch import load_file
    from transformers.trainer_callback import CallbackHandler

    def words(name: str) -> list[str]:
        file = recipe(tmp_path, toy, epochs=2, evaluate={}, name=name, save_every_steps=4)
        return ["retrieval", "train", file, "--model", str(encoder)]

    assert main(words("whole")) == 0
    real = CallbackHandler.on_step_begin

    def interrupt(self: Any, args: Any, state: Any, control: Any) -> Any:
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, args, state, control)

    with monkeypatch.context() as patch:
        patch.setattr(CallbackHandler, "on_step_begin", interrupt)
        assert main(words("stopped")) == 75
    assert "SIGTERM: saved at step 7 of 10. The same command resumes." in capsys.readouterr().err
    checkpoints = tmp_path / "runs/stopped/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-4", "checkpoint-7"]
    saved = (checkpoints / "checkpoint-7/model.safetensors").read_bytes()
    (checkpoints / "checkpoint-7/model.safetensors").write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    assert main(words("stopped")) == 0
    said = capsys.readouterr()
    assert "checkpoint-7: model.safetensors is not what was saved; passed over" in said.err
    assert "resuming from" in said.out and "checkpoint-4" in said.out
    weights = [load_file(tmp_path / f"runs/{name}/st/model.safetensors") for name in ("whole", "stopped")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])

    # other settings, or another kind of folder, are not resumed
    assert main([*words("stopped"), "lr=1e-3"]) == 78
    assert "lr=0.001 here, 0.005 there" in capsys.readouterr().err
    (tmp_path / "runs/other").mkdir()
    (tmp_path / "runs/other/mine.txt").touch()
    assert main(words("other")) == 78
    assert "holds mine.txt, of something else" in capsys.readouterr().err


@pytest.mark.runs
def test_training_without_a_step_is_an_error(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen pairs with one answer allow no batch of eight without duplicates; "trained" would be untrue."""
    lines = "".join(f"question {number}\tthe one answer\n" for number in range(16))
    (tmp_path / "same.tsv").write_text(f"query\tpositive\n{lines}")
    file = recipe(tmp_path, tmp_path, train=[str(tmp_path / "same.tsv")], evaluate={}, name="none", batch_size=8)
    assert main(["retrieval", "train", file, "--model", str(encoder)]) == 65
    assert "with 17 different texts, so there was no step. Lower batch_size" in capsys.readouterr().err


@pytest.mark.runs
def test_hard_negatives_and_cls_are_trained_with_and_lengths_are_true(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exported BERT, several negatives a row; a maximum length that the model cannot read is refused."""
    from sentence_transformers import SentenceTransformer

    bert = make_encoder(tmp_path / "bert", tokenizer, BERT, init_std=0.1)
    assert SentenceTransformer(str(bert), device="cpu").max_seq_length == LONGEST  # stored in the export
    rows = [f"ask {n}\tanswer {n}\twrong {n}\tfalse {n}\n" for n in range(8)]
    (tmp_path / "a.tsv").write_text("query\tpositive\tone\ttwo\n" + "".join(rows) + f"{'ask ' * 99}\ta\tb\tc\n")
    keys = {"train": [f"{tmp_path}/a.tsv"], "negative_columns": ["one", "two"], "pooling": "cls", "normalize": False}
    file = recipe(tmp_path, tmp_path, **keys, evaluate={}, batch_size=4, epochs=1)
    assert main(["retrieval", "train", file, "--model", str(bert), "max_tokens=65"]) == 78
    assert "max_tokens=65: " in capsys.readouterr().err
    assert main(["retrieval", "train", file, "--model", str(bert), "max_tokens=24", "name=short"]) == 0
    model = SentenceTransformer(str(tmp_path / "runs/short/st"), device="cpu")
    assert [type(each).__name__ for each in model] == ["Transformer", "Pooling"]
    assert model.max_seq_length == 24 and model[1].pooling_mode == "cls"
    about = result_of(tmp_path / "runs/short")
    assert about["training"]["texts_cut"] == {"anchor": 1, "positive": 0, "negative_1": 0, "negative_2": 0}
    assert about["settings"]["pooling"] == "cls" and about["figures"] == {}


@pytest.mark.runs
def test_a_run_is_measured_as_it_is_exported(tiny_run: TinyRun, toy: Path, tmp_path: Path) -> None:
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
    assert after["scifact"] == pytest.approx(mteb_figures(SCIFACT, trained), abs=1e-6)
