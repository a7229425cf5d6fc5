"""`retrieval evaluate`: figures computed by hand, kept vectors, finished sets, progress."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.run_folder import held
from modernbert_train.evaluate.retrieval.beir import read_beir
from tests.support.beir import WriteBeir, recipe, result_of, words_about, write_lines
from tests.support.needs import needs
from tests.support.paths import ROOT

needs("mteb", "the extra retrieval is not installed")


def ndcg(beir: Path, score: Callable[[str, Sequence[str]], Sequence[float]]) -> float:
    """nDCG@10 of queries with one relevant document each, by the place of that document."""
    found = read_beir(beir, "test")
    (texts,) = found.texts(1 << 20)
    each = []
    for query, judged in found.qrels.items():
        (right,) = judged
        scores = list(score(found.queries[query], texts))
        place = 1 + sum(value > scores[found.document_ids.index(right)] for value in scores)
        each.append(1 / math.log2(place + 1) if place <= 10 else 0.0)
    return sum(each) / len(each)


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_figures_are_those_of_all_documents_and_vectors_that_are_kept_give_the_same(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit in the kept vectors would silently change the figures: it is refused."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(encoder), device="cpu")
    expected = ndcg(toy, lambda query, texts: model.similarity(model.encode([query]), model.encode(texts))[0].tolist())
    words = ["retrieval", "evaluate", str(toy), "--model", str(encoder), f"runs_folder={tmp_path}/runs", "device=cpu"]
    assert main([*words, "name=plain"]) == 0
    said = capsys.readouterr().out
    assert "toy: documents 120 of 120, " in said and "toy: queries 20 of 20, " in said
    found = result_of(tmp_path / "runs/plain")["figures"]
    assert found["toy"]["ndcg_at_10"] == pytest.approx(expected, abs=2e-5)
    index = f"index={tmp_path}/index"
    for name in ("first", "second"):
        assert main([*words, f"name={name}", index]) == 0
        assert result_of(tmp_path / "runs" / name)["figures"] == found
    (file,) = (tmp_path / "index").glob("*.safetensors")
    saved = file.read_bytes()
    file.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    assert main([*words, "name=third", index]) == 74
    assert "not the vectors that were written. Remove it and" in capsys.readouterr().err
    assert main([*words, "name=other", index, "max_tokens=8"]) == 0  # other vectors have other files
    with held(tmp_path / "runs/plain", ""):
        assert main([*words, "name=plain"]) == 78
    assert re.search("runs/plain: in use by process .* Wait for it, or name another", capsys.readouterr().err)


@pytest.mark.runs
@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json"])
def test_the_same_weights_with_other_settings_are_another_model(
    changed: str, encoder: Path, write_beir: WriteBeir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other model's vectors and figures would be reported as this one's."""
    model, runs = shutil.copytree(encoder, tmp_path / "model"), f"runs_folder={tmp_path}/runs"
    beir = write_beir(
        {f"d{seed}": words_about(seed, 9)[1] for seed in range(9)}, {"q": "aba"}, train=[("q", "d7", 1), ("q", "d3", 1)]
    )
    pairs = write_lines(
        tmp_path / "pairs.jsonl", ({"query": f"{seed}", "positive": words_about(seed, 9)[1]} for seed in range(9))
    )
    evaluate = ["retrieval", "evaluate", str(beir), "--model", str(model), runs, "split=train", "device=cpu", "name=a"]
    mine = ["retrieval", "mine", str(pairs), "--model", str(model), f"out={tmp_path}/mined.jsonl", "device=cpu"]
    assert main([*evaluate, f"index={tmp_path}/index"]) == main([*mine, "num_negatives=1"]) == 0
    file = model / changed
    content = json.loads(file.read_text())
    if changed == "config.json":
        content["local_attention"] = 2
    else:
        content["model"]["merges"] = content["model"]["merges"][:10]
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert main([*evaluate, f"index={tmp_path}/index"]) == 0
    assert "measured before" not in capsys.readouterr().out
    assert len([*(tmp_path / "index").glob("*.safetensors")]) == 2
    assert main([*mine, "num_negatives=1"]) == 78
    assert "model_files: " in capsys.readouterr().err
    assert main(evaluate) == 0 and "measured before" in capsys.readouterr().out


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_late_interaction_is_searched_by_every_token_with_every_token(encoder: Path, toy: Path, tmp_path: Path) -> None:
    """MaxSim computed in fp64, one query and document at a time; kept vectors are fp16."""
    from sentence_transformers import MultiVectorEncoder

    keys = {"loss": "multi_vector", "vector_width": 8, "evaluate": {}, "epochs": 3}
    assert main(["retrieval", "train", recipe(tmp_path, toy, **keys), "--model", str(encoder), "name=late"]) == 0
    run = tmp_path / "runs/late"
    model = MultiVectorEncoder(str(run / "st"), device="cpu")

    def maxsim(query: str, texts: Sequence[str]) -> list[float]:
        (own,) = model.encode_query([query])
        return [
            float((own.double() @ each.double().T).max(dim=1).values.sum()) for each in model.encode_document(texts)
        ]

    expected = ndcg(toy, maxsim)
    for name, source, more in (
        ("st", run / "st", ()),
        ("run", run, ()),
        ("kept", run / "st", (f"index={tmp_path}/i",)),
    ):
        words = [str(toy), "--model", str(source), f"runs_folder={tmp_path}/runs", f"name={name}", "device=cpu", *more]
        assert main(["retrieval", "evaluate", *words]) == 0
        found = result_of(tmp_path / "runs" / name)
        assert found["figures"]["toy"]["ndcg_at_10"] == pytest.approx(expected, abs=5e-3 if more else 2e-5)
        assert found["settings"]["pooling"] == "none: a vector for each token"


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_sparse_vectors_are_searched_by_dot_product_and_their_terms_are_counted(
    encoder: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A masked LM is measured before training, and its trained model afterwards, by transformers' own logits."""
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    def expected(weights: Path) -> tuple[float, float]:
        masked, tokenizer = AutoModelForMaskedLM.from_pretrained(weights).eval(), AutoTokenizer.from_pretrained(weights)

        def vectors(texts: Sequence[str]) -> torch.Tensor:
            with torch.no_grad():
                logits = [masked(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
            return torch.stack([each.relu().log1p().amax(dim=0).double() for each in logits])

        (texts,) = read_beir(toy, "test").texts(1 << 20)
        texts_DV = vectors(texts)
        found = ndcg(toy, lambda query, _: (texts_DV @ vectors([query])[0]).tolist())
        return found, (texts_DV > 0).sum(dim=1).double().mean().item()

    def measured(name: str, model: Path, key: str) -> tuple[float, float]:
        words = [str(toy), "--model", str(model), f"runs_folder={tmp_path}/runs", f"name={name}", "device=cpu", key]
        assert main(["retrieval", "evaluate", *words]) == 0
        found = result_of(tmp_path / "runs" / name)
        figures = found["figures"]["toy"]
        assert found["settings"]["pooling"] == "sparse"
        assert f"document_terms {figures['document_terms']:.4f}" in capsys.readouterr().out
        return figures["ndcg_at_10"], figures["document_terms"]

    before = measured("before", encoder, "pooling=sparse")
    assert before == pytest.approx(expected(encoder), abs=2e-5)
    file = recipe(tmp_path, toy, pooling="sparse", evaluate={})
    assert main(["retrieval", "train", file, "--model", str(encoder), "name=trained"]) == 0
    model, index = tmp_path / "runs/trained/st", f"index={tmp_path}/index"
    after = expected(model)
    for name in ("computed", "kept"):
        assert measured(name, model, index) == pytest.approx(after, abs=2e-5)
    assert after[0] > before[0]
    assert main(["retrieval", "train", file, "--model", str(model), "name=further", "epochs=1"]) == 0
    assert result_of(tmp_path / "runs/further")["settings"]["pooling"] == "sparse"

    words = ["retrieval", "evaluate", str(toy), f"runs_folder={tmp_path}/runs", "pooling=sparse", "--model"]
    assert main([*words, str(encoder), "normalize=true"]) == 78
    assert "normalize=true: sparse vectors are compared by dot product" in capsys.readouterr().err
    AutoModel.from_pretrained(encoder).save_pretrained(tmp_path / "headless")
    AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "headless")
    assert main([*words, str(tmp_path / "headless")]) == 78
    assert "Name a masked-language model, whose logits pooling=sparse reads" in capsys.readouterr().err


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_a_set_that_was_finished_before_a_kill_is_not_measured_again(
    encoder: Path, toy: Path, write_beir: WriteBeir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed evaluation would otherwise repeat its first sets."""
    corpus = {f"d{seed}": words_about(seed, 9)[1] for seed in range(20_000)}
    large = write_beir(corpus, {"q": "aba"}, name="large", test=[("q", "d7", 1)])
    words = ["retrieval", "evaluate", str(toy), str(large), "--model", str(encoder)]
    words += [f"runs_folder={tmp_path}/runs", "name=both", "device=cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "modernbert_train", *words], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    kept = tmp_path / "runs/both/sets/toy.json"
    while not kept.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert kept.exists() and not (tmp_path / "runs/both/result.json").exists()
    for document in range(40, 20_000):
        del corpus[f"d{document}"]
    write_beir(corpus, {"q": "aba"}, name="small/large", test=[("q", "d7", 1)])
    words[3] = str(tmp_path / "small/large")
    assert main(words) == 0
    assert f"toy: measured before, see {kept}" in capsys.readouterr().out
    assert result_of(tmp_path / "runs/both")["figures"].keys() == {"toy", "large"}
    assert main([*words, "max_tokens=8"]) == 0  # other figures
    assert "measured before" not in capsys.readouterr().out


@pytest.mark.runs
def test_a_public_set_is_a_folder_or_a_task_of_mteb(
    encoder: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A downloaded folder is used; otherwise mteb fetches the set, which fails without a network."""
    from mteb.get_tasks import get_task

    (tmp_path / "beir").mkdir()
    toy.rename(tmp_path / "beir/scifact")
    words = ["--model", str(encoder), f"runs_folder={tmp_path}/runs", f"beir_folder={tmp_path}/beir", "device=cpu"]
    assert main(["retrieval", "evaluate", "scifact", *words, "name=here"]) == 0
    assert result_of(tmp_path / "runs/here")["counts"]["scifact"]["documents"] == 120
    odd = (tmp_path / "beir/scifact").rename(tmp_path / "c\n|d\x1b[2J")
    capsys.readouterr()
    assert main(["retrieval", "evaluate", str(odd), *words, "name=odd"]) == 0
    assert r"c |d\x1b[2J ndcg_at_10" in (said := capsys.readouterr().out) and "\x1b" not in said
    odd.rename(tmp_path / "beir/scifact")

    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionError("the hub is far away")

    monkeypatch.setattr(type(get_task("NFCorpus")), "load_data", lost)  # no network in a test
    assert main(["retrieval", "evaluate", "scifact", "nfcorpus", *words, "name=both"]) == 65
    assert "mteb:NFCorpus: its data, mteb/nfcorpus, is not available (the hub is far away)" in capsys.readouterr().err
    assert result_of(tmp_path / "runs/both")["figures"].keys() == {"scifact"}
    file = recipe(tmp_path, Path("fiqa"), evaluate={})
    assert main(["retrieval", "train", file, *words]) == 65
    assert "train[0]=fiqa: not in" in (said := capsys.readouterr().err) and "fiqa.zip && unzip fiqa.zip -d" in said
