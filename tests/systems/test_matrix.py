"""Every encoder with every objective: it trains, resumes as if never stopped, is measured, two ranks equal one, and an
export computes the same in transformers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.batches import lay_out
from modernbert_train.__main__ import main
from modernbert_train.models.sop import WithOrder
from modernbert_train.weights.hf_folder import load_weights as load_folder
from tests.support import neobert
from tests.support.matrix import COMPARING, ENCODERS, OBJECTIVES, PAIRS, system
from tests.support.runs import model_of, newest
from tests.support.tiny_run import TinyRun
from tests.support.verbs import Says

# the weights of every encoder are compared in tests/weights/formats; the whole matrix takes minutes
USUAL = {("modernbert", "causal"), ("bert", "sop"), ("xlnet", "permutation"), ("llama", "causal"), ("neobert", "mlm")}
USUAL |= {("esm", "permutation")}
USUAL |= {("distilbert", "distill"), ("bert", "late")}
MATRIX = [pytest.param(*pair, marks=[] if pair in USUAL else pytest.mark.slow) for pair in PAIRS]


# transformers' class of the export
EXPORTED = {
    ("modernbert", "mlm"): "ModernBertForMaskedLM",
    ("modernbert", "causal"): "ModernBertDecoderForCausalLM",
    ("modernbert", "sop"): "ModernBertForMaskedLM",
    ("modernbert", "permutation"): "ModernBertForMaskedLM",
    ("bert", "mlm"): "BertForMaskedLM",
    ("bert", "causal"): "BertLMHeadModel",
    ("bert", "sop"): "BertForPreTraining",
    ("bert", "permutation"): "BertForMaskedLM",
    **{("distilbert", objective): "DistilBertForMaskedLM" for objective in ("mlm", "sop", "permutation")},
    ("albert", "mlm"): "AlbertForMaskedLM",
    ("albert", "sop"): "AlbertForPreTraining",
    ("albert", "permutation"): "AlbertForMaskedLM",
    **{("deberta", objective): "DebertaV2ForMaskedLM" for objective in ("mlm", "sop", "permutation")},
    **{("llama", objective): "EuroBertForMaskedLM" for objective in ("mlm", "sop", "permutation")},
    ("llama", "causal"): "LlamaForCausalLM",
    **{("gemma", objective): "Gemma3ForCausalLM" for objective in ("mlm", "sop", "permutation", "causal")},
    **{("esm", objective): "EsmForMaskedLM" for objective in ("mlm", "sop", "permutation")},
    **{("neobert", objective): "NeoBERTLMHead" for objective in ("mlm", "sop", "permutation")},
    **{("xlnet", objective): "XLNetLMHeadModel" for objective in OBJECTIVES if objective not in ("rtd", *COMPARING)},
}
EXPORTED |= {(encoder, "distill"): EXPORTED[encoder, "mlm"] for encoder in ENCODERS}
# and sentence-transformers, which would need code of the hub for a NeoBERT
COMPARED = [(encoder, objective) for encoder in ENCODERS for objective in COMPARING if encoder != "neobert"]
ARXIV = {
    "modernbert": "2412.13663",
    "bert": "1810.04805",
    "distilbert": "1910.01108",
    "albert": "1909.11942",
    "xlnet": "1906.08237",
    "deberta": "2006.03654",
    "llama": "2302.13971",
    "gemma": "2503.19786",
    "neobert": "2502.19587",
}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("encoder", "objective"), [each for each in MATRIX if each.values in EXPORTED], ids=lambda value: str(value)
)
def test_exported_it_computes_the_same_in_transformers(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says, encoder: str, objective: str
) -> None:
    """Of two sequences in one packed buffer here, each alone there; segments and the pair head too."""
    words = system(tiny_run("phases.long=null"), encoder, objective)
    assert main(["train", *words]) == 0
    run = tmp_path / "runs/tiny"
    said = says("export", str(run), "--licence", "mit")
    assert ("left out: pair_head" in said) is (objective == "sop" and encoder not in ("bert", "albert"))
    card = (run / "hf/README.md").read_text()
    assert (f"arxiv.org/abs/{ARXIV[encoder]}" if encoder in ARXIV else "ESM-2") in card
    assert ("layers share: all, in 1 group of 2 alternating layers" in card) is (encoder == "albert")
    assert ("trust_remote_code" in card) is (encoder == "neobert")
    assert ("AutoModelForCausalLM" in card) is (objective == "causal" or encoder in ("xlnet", "gemma"))
    assert ("arxiv.org/abs/1909.11942" in card) is (objective == "sop" or encoder == "albert")
    assert ("arxiv.org/abs/1906.08237" in card) is (objective == "permutation" or encoder == "xlnet")

    named = EXPORTED[encoder, objective]
    assert json.loads((run / "hf/config.json").read_text())["architectures"] == [named]
    neobert.register()  # which transformers has not
    kind = getattr(neobert if encoder == "neobert" else transformers, named)
    twin, report = kind.from_pretrained(run / "hf", output_loading_info=True)
    contacts = {f"esm.contact_head.regression.{end}" for end in ("weight", "bias")}
    contacts.add("esm.rotary_embeddings.inv_freq")  # computed, not read
    assert {*report["missing_keys"]} == (contacts if encoder == "esm" else set()) and not report["unexpected_keys"]
    pair = transformers.AutoTokenizer.from_pretrained(run / "hf")("a b", "c")
    typed = objective == "sop" and encoder in ("bert", "albert", "xlnet")
    paired = typed and encoder != "xlnet"
    assert (sorted({*pair.get("token_type_ids", [0])}) == [0, 1]) is typed
    found = newest(run)
    model = model_of(found)
    ids_T = torch.randint(5, 500, (60,), generator=torch.Generator().manual_seed(1))
    segments_T = torch.tensor([0] * 10 + [1] * 30 + [0] * 5 + [1] * 15)
    packed = lay_out(ids_T, [0, 40, 60], order=found.config.objective.plain_order)
    packed = replace(packed, segment_ids_T=segments_T if typed else None)
    with torch.no_grad():
        hidden_TD = model.encode(packed)
        logits_TV = model.logits(hidden_TD, torch.arange(60))
        for start, end in ((0, 40), (40, 60)):
            inputs = {"input_ids": ids_T[None, start:end]}
            if typed:
                inputs["token_type_ids"] = segments_T[None, start:end]
            theirs = twin.eval()(**inputs)
            logits = theirs.prediction_logits if paired else theirs.logits
            torch.testing.assert_close(logits[0], logits_TV[start:end], atol=1e-5, rtol=0)
            if paired:
                assert isinstance(model, WithOrder)
                order = model.pair_head(hidden_TD[start])
                pair_logits = theirs.seq_relationship_logits if encoder == "bert" else theirs.sop_logits
                torch.testing.assert_close(pair_logits[0], order, atol=1e-5, rtol=0)

    capsys.readouterr()
    assert main(["fill", str(run / "hf"), "a [MASK] c"]) == 0
    filled = capsys.readouterr()
    assert filled.out.count("%") == 5 and not filled.err

    # and reading it returns exactly these weights
    weights = load_folder(run / "hf")
    assert all(torch.equal(weights[name], tensor) for name, tensor in found.weights().items() if name in weights)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("encoder", "objective"), [each for each in MATRIX if each.values in COMPARED], ids=lambda value: str(value)
)
def test_exported_it_scores_the_same_in_sentence_transformers(
    tiny_run: TinyRun, tmp_path: Path, encoder: str, objective: str
) -> None:
    """Texts of other lengths in one batch there, each alone here: cosines of means, or MaxSim of tokens."""
    import sentence_transformers

    words = system(tiny_run("phases.long=null"), encoder, objective)
    assert main(["plan", *words]) == 0 and main(["train", *words]) == 0
    run = tmp_path / "runs/tiny"
    assert main(["export", str(run)]) == 0
    name = "MultiVectorEncoder" if objective == "late" else "SentenceTransformer"
    theirs = getattr(sentence_transformers, name)(str(run / "hf"), device="cpu")
    queries, documents = ["1 qu 1", "20 qu 3 or so"], ["1 po 1", "20 po 3 and some more words", "ne"]
    scores_QC = theirs.similarity(theirs.encode_query(queries), theirs.encode_document(documents))

    model = model_of(newest(run))

    def vectors(text: str) -> torch.Tensor:
        ids_T = torch.tensor(theirs.tokenizer(text)["input_ids"])
        with torch.no_grad():
            hidden_TD = model.encode(lay_out(ids_T, [0, len(ids_T)]))
            rows = (
                model.get_submodule("token_projection")(hidden_TD) if objective == "late" else hidden_TD.mean(0)[None]
            )
        return torch.nn.functional.normalize(rows, dim=1)

    for query, scores_C in zip(queries, scores_QC, strict=True):
        each = [(vectors(query) @ vectors(document).T).max(dim=1).values.sum() for document in documents]
        torch.testing.assert_close(scores_C, torch.stack(each), atol=1e-5, rtol=1e-5)


@pytest.mark.runs
def test_an_albert_of_causal_order_is_not_exported(tiny_run: TinyRun, tmp_path: Path, says: Says) -> None:
    """transformers lacks its decoder, and the encoder would let tokens see later ones."""
    assert main(["train", *system(tiny_run("phases.long=null"), "albert", "causal")]) == 0
    said = says("export", str(tmp_path / "runs/tiny"), code=78)
    assert "model.name=albert: transformers lacks such a model for weights" in said
    assert not (tmp_path / "runs/tiny/hf").exists()
