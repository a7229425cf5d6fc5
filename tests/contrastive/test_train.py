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
import yaml
from safetensors.torch import load_file, save_file

from benchmarks.batches import lay_out
from modernbert_train.__main__ import main
from modernbert_train.config.schema import VARIANTS, ContrastiveConfig, MaskedLmConfig
from modernbert_train.config.tools.retrieval import EvaluateConfig
from modernbert_train.errors import DataError
from modernbert_train.evaluate.retrieval.vectors import open_vectors
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.gather import load_weights
from modernbert_train.weights.hf_folder import export
from modernbert_train.weights.hf_folder import load_weights as load_folder
from tests.support.matrix import ENCODERS
from tests.support.pairs import MODEL, ContrastiveRun, as_source, make_rows
from tests.support.runs import assert_goes_on_to_the_bit, metrics, weights

# none is drawn where another library reads the same text
WHOLE = {"dropout": 0.0}
OTHERS: dict[str, dict[str, Any]] = {"bert": WHOLE, "albert": WHOLE, "xlnet": WHOLE, "deberta": WHOLE, "llama": {}}


@pytest.mark.runs
def test_it_learns_which_text_answers_and_resumes_to_the_bit(
    contrastive_run: ContrastiveRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dropout, whose two passes must be the same; the held-out figures are from texts it has not seen."""
    words = contrastive_run(
        "model.attention_out_dropout=0.1", "checkpoint.interval_steps=3", "objective.symmetric=true",
        "objective.learn_temperature=true", "phases.main.batch_rows=4", "phases.main.tokens=12000",
    )  # fmt: skip
    assert main(["train", *words]) == 0
    run = tmp_path / "runs/pairs"
    steps, held_out = metrics(run, "step"), metrics(run, "validation")
    assert steps[0]["loss"] > 3 and steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    assert held_out[-1]["predicted"] == 28 and held_out[-1]["unigram_accuracy"] == pytest.approx(1 / 56)
    assert held_out[-1]["accuracy"] > 0.3

    learnt = 0.05 * math.exp(-float(weights(run)["log_scale.bias"]))
    assert learnt != 0.05 and held_out[-1]["contrastive/temperature"] == pytest.approx(learnt, rel=1e-6)
    assert_goes_on_to_the_bit(words, run)
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    assert "28 predictions" in capsys.readouterr().out
    assert main(["export", str(run)]) == 0
    assert f"a learnt temperature, {learnt:.4f} at" in (run / "hf/README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["modernbert", *OTHERS])
def test_it_starts_from_a_masked_language_model_and_its_export_opens_everywhere(
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], encoder: str
) -> None:
    """transformers and sentence-transformers compute the vectors that were trained; and another run starts from it."""
    import transformers
    from sentence_transformers import SentenceTransformer

    size = MODEL if encoder == "modernbert" else {"name": encoder} | ENCODERS[encoder] | OTHERS.get(encoder, {})
    config = VARIANTS["model"][encoder](**size)
    masked = build_model(config, MaskedLmConfig())
    initialize(masked, config, 5)
    state = {
        name: tensor for name, tensor in masked.state_dict().items() if name != "decoder.weight" or not config.tied
    }
    export(state, config, max_tokens=64, tokenizer_folder=pairs / "tokenizer", out=tmp_path / "mlm", card="")

    words = contrastive_run(f"weights.init_from={tmp_path / 'mlm'}", "objective.pooling=cls", model=size)
    words += [
        "data.validation=null",
        "phases.main={tokens: 4000, row_tokens: 64, batch_rows: 16, microbatch_tokens: 256}",
    ]
    assert main(["train", *words]) == 0
    run = tmp_path / "runs/pairs"
    assert "decoder there is left out" in capsys.readouterr().out
    assert main(["export", str(run)]) == 0
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

    words = contrastive_run(f"weights.init_from={run / 'hf'}", "name=again", model=size)
    words.append("phases.main={tokens: 3000, row_tokens: 64, batch_rows: 16, microbatch_tokens: 256}")
    assert main(["train", *words]) == 0
    assert main(["train", *words, "name=masked", "objective={name: mlm}"]) == 0
    assert "no decoder there, drawn at random" in capsys.readouterr().out


@pytest.mark.runs
def test_pairs_are_short_and_the_export_reads_what_the_first_weights_read(
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path
) -> None:
    """Else a search would cut every document after the first sentences; the first weights may be gone by then."""
    config = VARIANTS["model"]["modernbert"](**MODEL)
    model = build_model(config, MaskedLmConfig())
    initialize(model, config, 5)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "decoder.weight"}
    export(state, config, max_tokens=512, tokenizer_folder=pairs / "tokenizer", out=tmp_path / "mlm", card="")
    words = contrastive_run(f"weights.init_from={tmp_path / 'mlm'}", "data.validation=null", "phases.main.tokens=2000")
    assert main(["train", *words]) == 0
    shutil.rmtree(tmp_path / "mlm")
    run = tmp_path / "runs/pairs"
    assert main(["export", str(run)]) == 0
    for file, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        assert json.loads((run / "hf" / file).read_text())[key] == 512


@pytest.mark.runs
def test_what_stood_before_each_text_is_in_the_export(
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path
) -> None:
    """Else `encode_query` and `retrieval evaluate` give the model other texts than it was trained on."""
    from sentence_transformers import SentenceTransformer

    spec = {"out": str(tmp_path / "shards"), "sources": {"mine": as_source(pairs / "pairs.jsonl")}}
    prefixes = {"query_prefix": "query: ", "document_prefix": "passage: "}
    spec |= {"pairs": {"max_tokens": 64, **prefixes}, "tokenizer": {"path": str(pairs / "tokenizer")}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    assert main(["prepare", str(tmp_path / "spec.yaml")]) == 0
    data = [f"data.{key}={tmp_path}/shards/{key}" for key in ("train", "tokenizer")]
    short = "phases.main={tokens: 2000, row_tokens: 128, batch_rows: 8, microbatch_tokens: 512}"
    assert main(["train", *contrastive_run(*data, "data.validation=null", short)]) == 0
    run = tmp_path / "runs/pairs"
    assert main(["export", str(run)]) == 0
    assert main(["export", str(run / "hf"), "--out", str(tmp_path / "again")]) == 0
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
