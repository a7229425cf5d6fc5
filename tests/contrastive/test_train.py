"""A run that compares texts: it learns, is measured, resumes to the bit, follows masked tokens, and is exported."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks.batches import lay_out
from modernbert_train.config.schema import VARIANTS, ContrastiveConfig
from modernbert_train.config.tools.retrieval import EvaluateConfig
from modernbert_train.errors import DataError
from modernbert_train.evaluate.retrieval.vectors import open_vectors
from modernbert_train.models.build import build_model
from modernbert_train.weights.gather import load_weights
from modernbert_train.weights.hf_folder import load_weights as load_folder
from tests.support.contrastive_models import SIZE
from tests.support.front_door import Cli
from tests.support.labelled import export_masked_lm
from tests.support.matrix import ENCODERS
from tests.support.pairs import MODEL, ContrastiveRun, as_source, make_rows, prepare_pairs
from tests.support.runs import assert_goes_on_to_the_bit, metrics, weights

# none is drawn where another library reads the same text
WHOLE = {"dropout": 0.0}
OTHERS: dict[str, dict[str, Any]] = {"bert": WHOLE, "albert": WHOLE, "xlnet": WHOLE, "deberta": WHOLE, "llama": {}}


@pytest.mark.runs
def test_it_learns_which_text_answers_and_resumes_to_the_bit(
    contrastive_run: ContrastiveRun, tmp_path: Path, cli: Cli
) -> None:
    """With dropout, whose two passes must be the same; the held-out figures are from texts it has not seen."""
    words = contrastive_run(
        "model.attention_out_dropout=0.1", "checkpoint.interval_steps=3", "objective.symmetric=true",
        "objective.learn_temperature=true", "phases.main.batch_rows=4", "phases.main.tokens=12000",
    )  # fmt: skip
    cli("train", *words)
    run = tmp_path / "runs/pairs"
    steps, held_out = metrics(run, "step"), metrics(run, "validation")
    assert steps[0]["loss"] > 3 and steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    assert held_out[-1]["predicted"] == 28 and held_out[-1]["unigram_accuracy"] == pytest.approx(1 / 56)
    assert held_out[-1]["accuracy"] > 0.3

    learnt = 0.05 * math.exp(-float(weights(run)["log_scale.bias"]))
    assert learnt != 0.05 and held_out[-1]["contrastive/temperature"] == pytest.approx(learnt, rel=1e-6)
    assert_goes_on_to_the_bit(words, run)
    assert "28 predictions" in cli("eval", run).out
    cli("export", run)
    assert f"a learnt temperature, {learnt:.4f} at" in (run / "hf/README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["modernbert", *OTHERS])
def test_it_starts_from_a_masked_language_model_and_its_export_opens_everywhere(
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path, cli: Cli, encoder: str
) -> None:
    """transformers and sentence-transformers compute the vectors that were trained; and another run starts from it."""
    import transformers
    from sentence_transformers import SentenceTransformer

    size = MODEL if encoder == "modernbert" else {"name": encoder} | ENCODERS[encoder] | OTHERS.get(encoder, {})
    config = VARIANTS["model"][encoder](**size)
    masked = export_masked_lm(config, pairs / "tokenizer", tmp_path / "mlm", seed=5)

    phase = "phases.main={tokens: 4000, row_tokens: 64, batch_rows: 16, microbatch_tokens: 256}"
    words = contrastive_run(f"weights.init_from={masked}", "objective.pooling=cls", phase, model=size)
    assert "decoder there is left out" in cli("train", *words, "data.validation=null").out
    run = tmp_path / "runs/pairs"
    cli("export", run)
    assert "on pairs of texts" in (run / "hf/README.md").read_text()

    _, report = transformers.AutoModel.from_pretrained(run / "hf", output_loading_info=True)
    assert not report["unexpected_keys"] and not [name for name in report["missing_keys"] if "pooler" not in name]
    theirs = SentenceTransformer(str(run / "hf"), device="cpu")
    texts = [row["query"] for row in make_rows(5)]
    found_PD = torch.tensor(theirs.encode(texts))
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "hf")
    ours = build_model(config, ContrastiveConfig(pooling="cls"))
    load_weights(ours, load_folder(run / "hf"))
    for text, vector_D in zip(texts, found_PD, strict=True):
        ids_T = torch.tensor(tokenizer(text)["input_ids"])
        with torch.no_grad():
            hidden_TD = ours.eval().encode(lay_out(ids_T, [0, len(ids_T)]))
        torch.testing.assert_close(F.normalize(hidden_TD[0], dim=0), vector_D, atol=1e-5, rtol=0)

    words = contrastive_run(f"weights.init_from={run / 'hf'}", "name=again", phase, model=size)
    cli("train", *words)
    said = cli("train", *words, "name=masked", "objective={name: mlm}").out
    assert "no decoder there, drawn at random" in said


@pytest.mark.runs
def test_the_export_reads_what_the_first_weights_read_and_has_what_stood_before_each_text(
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path, cli: Cli
) -> None:
    """Else a search would cut every document after the first sentences, and `encode_query` and `retrieval evaluate`
    give the model other texts than it was trained on. The first weights may be gone by then."""
    from sentence_transformers import SentenceTransformer

    prefixes = {"query_prefix": "query: ", "document_prefix": "passage: "}
    asked = (tmp_path / "shards", as_source(pairs / "pairs.jsonl"), pairs / "tokenizer")
    assert prepare_pairs(*asked, max_tokens=64, **prefixes) == 0
    masked = export_masked_lm(SIZE, pairs / "tokenizer", tmp_path / "mlm", max_tokens=512)
    data = [f"data.{key}={tmp_path}/shards/{key}" for key in ("train", "tokenizer")]
    short = "phases.main={tokens: 2000, row_tokens: 128, batch_rows: 8, microbatch_tokens: 512}"
    cli("train", *contrastive_run(*data, "data.validation=null", f"weights.init_from={masked}", short))
    shutil.rmtree(masked)
    run = tmp_path / "runs/pairs"
    cli("export", run)
    for file, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        assert json.loads((run / "hf" / file).read_text())[key] == 512
    cli("export", run / "hf", "--out", tmp_path / "again")
    for file in sorted(path.name for path in (run / "hf").glob("*.json")):
        assert (tmp_path / "again" / file).read_text() == (run / "hf" / file).read_text(), file
    encode = EvaluateConfig(device="cpu")
    assert open_vectors(str(run), encode).about == open_vectors(str(run / "hf"), encode).about
    theirs = SentenceTransformer(str(tmp_path / "runs/pairs/hf"), device="cpu")
    text = make_rows(1)[0]["query"]
    assert np.allclose(theirs.encode_query(text), theirs.encode(f"query: {text}"), atol=1e-6)
    assert np.allclose(theirs.encode_document(text), theirs.encode(f"passage: {text}"), atol=1e-6)
    assert not np.allclose(theirs.encode_query(text), theirs.encode(text), atol=1e-3)
    stored = load_file(run / "hf/model.safetensors")
    next(iter(stored.values())).view(-1)[0] = float("nan")
    save_file(stored, run / "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"pairs/hf: .* holds numbers that are not finite"):
        open_vectors(str(run / "hf"), encode)
