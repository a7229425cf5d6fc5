"""Proteins from FASTA to a model of transformers, by the verbs that docs/tasks/proteins.md types."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from benchmarks.batches import lay_out
from data_prep.prepare import main as prepare
from data_prep.tokenizer import main as tokenizer
from modernbert_train.__main__ import main
from tests.support.paths import ROOT
from tests.support.runs import model_of, newest, records
from tests.support.verbs import Says

SMALL = ("hidden_size=32", "num_layers=2", "num_heads=2", "intermediate_size=64")


@pytest.mark.runs
def test_fasta_becomes_a_model_that_transformers_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    """If this breaks, days of training on proteins end in a model that reads other letters, or none."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(3)
    motif = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV"
    starts = [draw.randint(0, 40) for _ in range(80)]
    records_of = [
        f">p{i} protein {i}\n{motif[at:]}\n{motif[:at]}{draw.choice('ACDE')}\n" for i, at in enumerate(starts)
    ]
    Path("uniref50.fasta").write_text("".join(dict.fromkeys(records_of)))
    assert tokenizer(["letters", "data/letters", "--alphabet", "protein"]) == 0
    assert prepare([str(ROOT / "yamls/data/proteins.yaml"), "validation_share=0.2"]) == 0
    recipe = [str(ROOT / "yamls/recipes/esm2-8m.yaml"), "phases.low=null", "compute={device: cpu, precision: fp32}"]
    shape = "tokens: 12000, row_tokens: 80, batch_rows: 8, microbatch_tokens: 640"
    shape += ", schedule: {warmup_tokens: 1000, decay_tokens: 0}"
    words = [*recipe, *(f"model.{each}" for each in SMALL), f"phases.main={{{shape}}}", "optim.lr=0.01", "name=p"]
    words += ["data.num_workers=0", "eval={interval_tokens: 4000, max_tokens: 2000}"]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    losses = [each["loss"] for each in records(Path("runs/p"), "validation")]
    assert losses[-1] < losses[0]
    said = says("train", *words, "model.mask_id=32", code=78)
    assert "data/proteins/tokenizer has [MASK] at 4. Set model.mask_id=4." in said
    assert main(["export", "runs/p", "--licence", "mit"]) == 0

    theirs, letters = AutoModelForMaskedLM.from_pretrained("runs/p/hf"), AutoTokenizer.from_pretrained("runs/p/hf")
    assert type(theirs).__name__ == "EsmForMaskedLM"
    ids = letters("mktayi[MASK]KQRQ", "ACDE[MASK][MASK]")["input_ids"]
    ids_T = torch.tensor(ids)
    model = model_of(newest(Path("runs/p")))
    with torch.no_grad():
        ours = model.logits(model.encode(lay_out(ids_T, [0, len(ids)])), torch.arange(len(ids)))
        torch.testing.assert_close(theirs.eval()(input_ids=ids_T[None]).logits[0], ours, atol=1e-5, rtol=1e-5)
    assert says("fill", "runs/p/hf", "MKTAYIAKQR[MASK]ISFVKSHFSRQLEERLGLIEV").count("%") == 5
