"""`retrieval evaluate`: a run, a checkpoint and an export have trec_eval's figures; kept vectors; BM25."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modernbert_train.checkpoints.run_folder import held
from modernbert_train.evaluate.retrieval.beir import read_beir
from modernbert_train.evaluate.retrieval.runs import exported_encoder
from tests.support import forked
from tests.support.beir import (
    BERT,
    WriteBeir,
    figures_of,
    flip_last_bit,
    make_encoder,
    recipe,
    result_of,
    words_about,
    write_lines,
)
from tests.support.front_door import Cli
from tests.support.make_shards import make_tokenizer
from tests.support.needs import needs
from tests.support.runs import metrics
from tests.support.tiny_run import TinyRun

needs("mteb", "the extra retrieval is not installed")


DATA = Path(os.environ.get("MODERNBERT_LABELLED", Path(__file__).parents[4] / "shared/data"))
SCIFACT = DATA / "retrieval/scifact_subset"
needs_scifact = pytest.mark.skipif(not SCIFACT.is_dir(), reason="no SciFact here: MODERNBERT_LABELLED=FOLDER")


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_figures_are_those_of_all_documents_and_vectors_that_are_kept_give_the_same(
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    """A flipped bit in the kept vectors would silently change the figures: it is refused."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(encoder), device="cpu")
    expected = figures_of(toy, lambda query, texts: model.similarity(model.encode([query]), model.encode(texts))[0])
    words = ["retrieval", "evaluate", toy, "--model", encoder, f"runs_folder={tmp_path}/runs", "device=cpu"]
    said = cli(*words, "name=plain").out
    assert "toy: documents 120 of 120, " in said and "toy: queries 20 of 20, " in said
    found = result_of(tmp_path / "runs/plain")["figures"]
    assert {name: found["toy"][name] for name in expected} == pytest.approx(expected, abs=2e-5)
    index = f"index={tmp_path}/index"
    for name in ("first", "second"):
        cli(*words, f"name={name}", index)
        assert result_of(tmp_path / "runs" / name)["figures"] == found
    (file,) = (tmp_path / "index").glob("*.safetensors")
    flip_last_bit(file)
    said = cli(*words, "name=third", index, code=74).err
    assert "not the vectors that were written. Remove it and" in said
    cli(*words, "name=other", index, "max_tokens=8")  # other vectors have other files
    with held(tmp_path / "runs/plain", ""):
        said = cli(*words, "name=plain", code=78).err
    assert re.search("runs/plain: in use by process .* Wait for it, or name another", said)


@pytest.mark.runs
@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json"])
def test_the_same_weights_with_other_settings_are_another_model(
    changed: str, encoder: Path, write_beir: WriteBeir, tmp_path: Path, cli: Cli
) -> None:
    """The other model's vectors and figures would be reported as this one's."""
    model, runs = shutil.copytree(encoder, tmp_path / "model"), f"runs_folder={tmp_path}/runs"
    texts = {f"d{seed}": words_about(seed, 9)[1] for seed in range(9)}
    beir = write_beir(texts, {"q": "aba"}, train=[("q", "d7", 1), ("q", "d3", 1)])
    pairs = write_lines(tmp_path / "pairs.jsonl", ({"query": key, "positive": text} for key, text in texts.items()))
    evaluate = ["retrieval", "evaluate", beir, "--model", model, runs, "split=train", "device=cpu", "name=a"]
    mine = ["retrieval", "mine", pairs, "--model", model, f"out={tmp_path}/mined.jsonl", "device=cpu"]
    cli(*evaluate, f"index={tmp_path}/index")
    cli(*mine, "num_negatives=1")
    file = model / changed
    content = json.loads(file.read_text())
    if changed == "config.json":
        content["local_attention"] = 2
    else:
        content["model"]["merges"] = content["model"]["merges"][:10]
    file.write_text(json.dumps(content))
    assert "measured before" not in cli(*evaluate, f"index={tmp_path}/index").out
    assert len([*(tmp_path / "index").glob("*.safetensors")]) == 2
    assert "model_files: " in cli(*mine, "num_negatives=1", code=78).err
    assert "measured before" in cli(*evaluate).out


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_late_interaction_is_learned_and_searched_by_every_token_with_every_token(
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    """MaxSim computed in fp64, one query and document at a time; kept vectors are fp16."""
    from sentence_transformers import MultiVectorEncoder

    keys = {"loss": "multi_vector", "vector_width": 8, "mini_batch": 7, "query_prompt": "ask "}
    cli("retrieval", "train", recipe(tmp_path, toy, **keys), "--model", encoder, "name=late")
    run = tmp_path / "runs/late"
    steps = [entry["loss"] for entry in metrics(run, "step")]
    assert steps[-1] < 0.8 * steps[0] and "each token" in result_of(run)["settings"]["pooling"]
    model = MultiVectorEncoder(str(run / "st"), device="cpu")
    assert {matrix.shape[1] for matrix in model.encode_query(["aba ibd", "xyz"])} == {8}

    def maxsim(query: str, texts: Sequence[str]) -> list[float]:
        (own,) = model.encode_query([query])
        return [
            float((own.double() @ each.double().T).max(dim=1).values.sum()) for each in model.encode_document(texts)
        ]

    expected = figures_of(toy, maxsim)["ndcg_at_10"]
    for name, source, more in (
        ("st", run / "st", ()),
        ("run", run, ()),
        ("kept", run / "st", (f"index={tmp_path}/i",)),
    ):
        words = [toy, "--model", source, f"runs_folder={tmp_path}/runs", f"name={name}", "device=cpu", *more]
        cli("retrieval", "evaluate", *words)
        found = result_of(tmp_path / "runs" / name)
        assert found["figures"]["toy"]["ndcg_at_10"] == pytest.approx(expected, abs=5e-3 if more else 2e-5)
        assert found["settings"]["pooling"] == "none: a vector for each token"


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_sparse_vectors_are_searched_by_dot_product_and_their_terms_are_counted(
    encoder: Path, toy: Path, tmp_path: Path, cli: Cli
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
        found = figures_of(toy, lambda query, _: texts_DV @ vectors([query])[0])
        return found["ndcg_at_10"], (texts_DV > 0).sum(dim=1).double().mean().item()

    def measured(name: str, model: Path, key: str) -> tuple[float, float]:
        words = [toy, "--model", model, f"runs_folder={tmp_path}/runs", f"name={name}", "device=cpu", key]
        said = cli("retrieval", "evaluate", *words).out
        found = result_of(tmp_path / "runs" / name)
        figures = found["figures"]["toy"]
        assert found["settings"]["pooling"] == "sparse"
        assert f"document_terms {figures['document_terms']:.4f}" in said
        return figures["ndcg_at_10"], figures["document_terms"]

    before = measured("before", encoder, "pooling=sparse")
    assert before == pytest.approx(expected(encoder), abs=2e-5)
    file = recipe(tmp_path, toy, pooling="sparse", evaluate={})
    cli("retrieval", "train", file, "--model", encoder, "name=trained")
    model, index = tmp_path / "runs/trained/st", f"index={tmp_path}/index"
    after = expected(model)
    for name in ("computed", "kept"):
        assert measured(name, model, index) == pytest.approx(after, abs=2e-5)
    assert after[0] > before[0]
    cli("retrieval", "train", file, "--model", model, "name=further", "epochs=1")
    assert result_of(tmp_path / "runs/further")["settings"]["pooling"] == "sparse"

    words = ["retrieval", "evaluate", toy, f"runs_folder={tmp_path}/runs", "pooling=sparse", "--model"]
    said = cli(*words, encoder, "normalize=true", code=78).err
    assert "normalize=true: sparse vectors are compared by dot product" in said
    AutoModel.from_pretrained(encoder).save_pretrained(tmp_path / "headless")
    AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "headless")
    said = cli(*words, tmp_path / "headless", code=78).err
    assert "Name a masked-language model, whose logits pooling=sparse reads" in said


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_a_set_that_was_finished_before_a_kill_is_not_measured_again(
    encoder: Path, toy: Path, write_beir: WriteBeir, tmp_path: Path, cli: Cli
) -> None:
    """A killed evaluation would otherwise repeat its first sets."""
    corpus = {f"d{seed}": words_about(seed, 9)[1] for seed in range(20_000)}
    large = write_beir(corpus, {"q": "aba"}, name="large", test=[("q", "d7", 1)])
    words = ["retrieval", "evaluate", str(toy), str(large), "--model", str(encoder)]
    words += [f"runs_folder={tmp_path}/runs", "name=both", "device=cpu"]
    process = forked.Popen([sys.executable, "-m", "modernbert_train", *words])
    kept = tmp_path / "runs/both/sets/toy.json"
    while not kept.exists() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert kept.exists() and not (tmp_path / "runs/both/result.json").exists()
    few = {name: corpus[name] for name in list(corpus)[:40]}
    words[3] = str(write_beir(few, {"q": "aba"}, name="small/large", test=[("q", "d7", 1)]))
    assert f"toy: measured before, see {kept}" in cli(*words).out
    assert result_of(tmp_path / "runs/both")["figures"].keys() == {"toy", "large"}
    assert "measured before" not in cli(*words, "max_tokens=8").out  # other figures


@pytest.mark.runs
def test_a_public_set_is_a_folder_or_a_task_of_mteb(
    encoder: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """A downloaded folder is used; otherwise mteb fetches the set, which fails without a network."""
    from mteb.get_tasks import get_task

    (tmp_path / "beir").mkdir()
    toy.rename(tmp_path / "beir/scifact")
    words = ["--model", encoder, f"runs_folder={tmp_path}/runs", f"beir_folder={tmp_path}/beir", "device=cpu"]
    cli("retrieval", "evaluate", "scifact", *words, "name=here")
    assert result_of(tmp_path / "runs/here")["counts"]["scifact"]["documents"] == 120
    odd = (tmp_path / "beir/scifact").rename(tmp_path / "c\n|d\x1b[2J")
    said = cli("retrieval", "evaluate", odd, *words, "name=odd").out
    assert r"c |d\x1b[2J ndcg_at_10" in said and "\x1b" not in said
    odd.rename(tmp_path / "beir/scifact")

    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionError("the hub is far away")

    monkeypatch.setattr(type(get_task("NFCorpus")), "load_data", lost)  # no network in a test
    said = cli("retrieval", "evaluate", "scifact", "nfcorpus", *words, "name=both", code=65).err
    assert "mteb:NFCorpus: its data, mteb/nfcorpus, is not available (the hub is far away)" in said
    assert result_of(tmp_path / "runs/both")["figures"].keys() == {"scifact"}
    said = cli("retrieval", "train", recipe(tmp_path, Path("fiqa"), evaluate={}), *words, code=65).err
    assert "train[0]=fiqa: not in" in said and "fiqa.zip && unzip fiqa.zip -d" in said


@pytest.mark.runs
def test_a_run_is_measured_as_it_is_exported(tiny_run: TinyRun, toy: Path, tmp_path: Path, cli: Cli) -> None:
    """Run, checkpoint and export are one model; only the export is a folder that sentence-transformers loads."""
    from sentence_transformers import SentenceTransformer

    cli("train", *tiny_run("checkpoint.interval_steps=100"))
    run = tmp_path / "runs/tiny"
    cli("export", run)
    assert not (run / "hf/modules.json").exists()
    model = SentenceTransformer(str(run / "hf"), device="cpu")
    assert model.max_seq_length == 128 and model[1].pooling_mode == "mean"
    figures = []
    for number, source in enumerate((run, max((run / "checkpoints").iterdir()), run / "hf")):
        keys = [f"name=measured-{number}", f"runs_folder={tmp_path}/runs", "device=cpu"]
        cli("retrieval", "evaluate", toy, "--model", source, *keys)
        figures.append(result_of(tmp_path / f"runs/measured-{number}")["figures"])
    assert figures[0] == figures[1] == figures[2]
    # while the newest checkpoint is damaged, the one before it is measured, and kept as that one
    for _ in range(2):
        flip_last_bit(max((run / "checkpoints").iterdir()) / "model.safetensors")
        words = ["--model", run, "name=damaged", f"runs_folder={tmp_path}/runs", "device=cpu"]
        assert "measured before" not in cli("retrieval", "evaluate", toy, *words).out


@pytest.mark.runs
def test_an_untrained_twin_has_the_weights_that_a_run_with_its_seed_begins_with(
    tokenizer: Path, toy: Path, tmp_path: Path, cli: Cli
) -> None:
    """Otherwise a suite's row of the twin would have other weights in each task, or miss retrieval."""
    first = make_encoder(tmp_path / "first", tokenizer, BERT)
    here = load_file(first / "model.safetensors")
    for seed, same in ((3, True), (4, False)):
        with exported_encoder(f"untrained:{first}", seed) as folder:
            drawn = load_file(folder / "model.safetensors")
        assert drawn and drawn.keys() <= here.keys()
        assert all(torch.equal(drawn[name], here[name]) for name in drawn) == same
    words = ["retrieval", "evaluate", toy, f"runs_folder={tmp_path}/runs", "name=twin", "device=cpu", "--model"]
    cli(*words, f"untrained:{first}")
    assert "Leave out `frozen:`" in cli(*words, f"frozen:{first}", code=78).err


@pytest.mark.runs
def test_identical_ids_are_left_out_if_configured(
    encoder: Path, write_beir: WriteBeir, tmp_path: Path, cli: Cli
) -> None:
    """As in ArguAna, where a query is itself in the corpus, and would always be found first."""
    folder = write_beir({"a": "aba ibd", "b": "xyz xyw"}, {"a": "aba ibd"}, test=[("a", "b", 1)])
    found = []
    for flag in ("false", "true"):
        keys = [f"name=asked-{flag}", f"runs_folder={tmp_path}/runs", f"ignore_identical_ids={flag}", "device=cpu"]
        cli("retrieval", "evaluate", folder, "--model", encoder, *keys)
        found.append(result_of(tmp_path / f"runs/asked-{flag}")["figures"]["beir"]["mrr_at_10"])
    assert found == [0.5, 1.0]


def test_a_set_is_not_named_as_the_mean_of_all_sets(
    encoder: Path, write_beir: WriteBeir, tmp_path: Path, cli: Cli
) -> None:
    """Its figures were replaced by the mean on the terminal."""
    first, other = (
        write_beir({"a": "aba", "b": "xyz"}, {"q": "aba"}, name, train=[("q", "b", 1)], test=[("q", "a", 1)])
        for name in ("mean", "other")
    )
    said = cli("retrieval", "evaluate", first, other, "--model", "bm25", code=78).err
    assert f"{first}: results have the mean of all sets under the name mean. Rename the f" in said
    file = recipe(tmp_path, other, evaluate={"mean": str(other)})
    said = cli("retrieval", "train", file, "--model", encoder, code=78).err
    assert "evaluate.mean: results have the mean" in said


@pytest.mark.weekly
@needs_scifact
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scifact_is_learned_and_measured_as_by_trec_eval(tmp_path: Path, cli: Cli) -> None:
    """The judgements of its training split, then its test queries against 2,101 documents."""
    from sentence_transformers import SentenceTransformer

    texts = [json.loads(line)["text"] for line in (SCIFACT / "corpus.jsonl").read_text("utf-8").splitlines()]
    tokenizer = make_tokenizer(tmp_path / "tokenizer", texts[:300])
    model = make_encoder(tmp_path / "model", tokenizer, init_std=0.1)
    own = {"evaluate": {"scifact": str(SCIFACT)}, "batch_size": 32, "epochs": 4, "encode_batch": 64, "name": "scifact"}
    runs = f"runs_folder={tmp_path}/runs"
    cli("retrieval", "evaluate", SCIFACT, "--model", model, runs, "device=cpu", "name=before")
    cli("retrieval", "train", recipe(tmp_path, SCIFACT, **own), "--model", model)
    before, after = (result_of(tmp_path / f"runs/{name}")["figures"] for name in ("before", "scifact"))
    assert after["scifact"]["ndcg_at_10"] > before["scifact_subset"]["ndcg_at_10"]
    trained = SentenceTransformer(str(tmp_path / "runs/scifact/st"), device="cpu")
    (documents,) = read_beir(SCIFACT, "test").texts(1 << 20)
    vectors = trained.encode_document(documents)
    expected = figures_of(SCIFACT, lambda query, _: vectors @ trained.encode_query(query))
    assert {name: after["scifact"][name] for name in expected} == pytest.approx(expected, abs=2e-5)


# --- bm25, the baseline that a user compares an encoder with -----------------------------------------------------


def scores(documents: list[list[str]], query: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """BM25 as Lucene computes it, written out."""
    frequency = Counter(word for words in documents for word in {*words})
    mean = sum(map(len, documents)) / len(documents)
    found = []
    for words in documents:
        counts, norm = Counter(words), k1 * (1 - b + b * len(words) / mean)
        idf = {word: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for word, n in frequency.items()}
        found.append(sum(idf[word] * counts[word] / (counts[word] + norm) for word in query if counts[word]))
    return found


def test_its_figures_are_those_of_the_formula_and_its_candidates_can_be_reranked(
    tmp_path: Path, write_beir: WriteBeir, cli: Cli
) -> None:
    """Of the words, as a user sees them: running and runs are one, and `the` is none."""
    texts = {
        "d1": "the fox runs over the hill",
        "d2": "a fox is running, running and running",
        "d3": "the hill over the town",
        "d4": "the town of the foxes by a river in the long valley",
    }
    queries = {"q1": "the running fox", "q2": "town hill", "q3": "rivers"}
    folder = write_beir(texts, queries, test=[("q1", "d1", 1), ("q2", "d4", 1), ("q3", "d4", 1)])
    words = [["fox", "run", "hill"], ["fox", "run", "run", "run"], ["hill", "town"],
             ["town", "fox", "river", "long", "valley"]]  # fmt: skip
    expected = 0.0
    for query, right in ((["run", "fox"], 0), (["town", "hill"], 3), (["river"], 3)):
        own = scores(words, query)
        expected += 1 / math.log2(2 + sum(each > own[right] for each in own)) / 3
    said = cli("retrieval", "evaluate", folder, "--model", "bm25", f"runs_folder={tmp_path}/runs", "name=a")
    assert f"ndcg_at_10 {expected:.4f}" in said.out and "%|" not in said.err
    found = result_of(tmp_path / "runs/a")
    assert found["figures"]["beir"]["ndcg_at_10"] == pytest.approx(expected, abs=1e-5) and expected < 1
    assert found["settings"]["k1"] == 1.5 and found["settings"]["bm25s"]


def test_a_folder_may_have_the_longest_name(tmp_path: Path, write_beir: WriteBeir, cli: Cli) -> None:
    """Its figures were computed, and their file had a name that no disk takes."""
    folder = write_beir({"d1": "a red fox", "d2": "a hen"}, {"q1": "foxes"}, name="n" * 253, test=[("q1", "d1", 1)])
    cli("retrieval", "evaluate", folder, "--model", "bm25", f"runs_folder={tmp_path}/runs", "name=a")
    assert result_of(tmp_path / "runs/a")["figures"][folder.name]["ndcg_at_10"] == 1


def test_a_key_of_encoders_is_refused(toy: Path, cli: Cli) -> None:
    """The figures would ignore the key."""
    said = cli("retrieval", "evaluate", toy, "--model", "bm25", "pooling=cls", code=78).err
    assert "pooling=cls: is for encoders, and bm25 is none. Leave it out." in said
