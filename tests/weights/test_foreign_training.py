"""Models of other families are trained with their own tokenizers as their authors' code trains them.

Users begin from such models. If this breaks, a published recipe gives another model here, for unknown reasons.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from modernbert_train import load_model
from modernbert_train.__main__ import main
from tests.support.beir import recipe
from tests.support.finetuning import FAST, metrics, plain_losses
from tests.support.foreign import FOREIGN, TEXTS, saved, task_of
from tests.support.needs import needs

pytestmark = [pytest.mark.runs, pytest.mark.timeout(280)]
STEPS, TOKENS = 4, 16
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
# name in FOREIGN -> prefix of its classes, and the settings of their heads
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta": ("Roberta", NO_DROPOUT),
    "xlm-roberta": ("XLMRoberta", NO_DROPOUT),
    "camembert": ("Camembert", NO_DROPOUT),
    "mmbert": ("ModernBert", {"classifier_pooling": "mean"}),
    "eurobert": ("EuroBert", {"classifier_pooling": "mean"}),
    "deberta v3": ("DebertaV2", {**NO_DROPOUT, "cls_dropout": 0.0, "pooler_hidden_act": "tanh"}),
    "bert without a head": ("Bert", NO_DROPOUT),
    "esm": ("Esm", NO_DROPOUT),
}
NAMES = [name if name in ("roberta", "mmbert") else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES]


def texts_of(tokenizer: Any, number: int) -> list[str]:
    """Return texts of as many tokens as a row holds, so that a batch of both loops holds the same texts."""
    words, found = " ".join(TEXTS).split(), []
    for start in range(len(words)):
        for end in range(start + 1, start + TOKENS):
            text = " ".join(words[start:end])
            if len(tokenizer(text)["input_ids"]) == TOKENS and text not in found:
                found.append(text)
    return found[:number]


@pytest.mark.parametrize("name", NAMES)
def test_fine_tuning_has_the_losses_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    prefix, head = CLASSES[name]
    _, names, settings = FOREIGN[name]
    kind = getattr(transformers, f"{prefix}ForSequenceClassification")
    folder = saved(kind, tmp_path / "model", names, **settings | head | {"id2label": {0: "no", 1: "yes"}})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [{"text": text, "label": ("no", "yes")[n % 2]} for n, text in enumerate(texts_of(tokenizer, 8))]
    assert len(rows) == 8
    task = task_of(tmp_path, rows, labels=["no", "yes"], steps=STEPS, batch_texts=8, weight_decay=0.0, warmup=0.25)
    words = ["--model", str(folder), f"runs_folder={tmp_path}/runs", "name=own", *FAST]
    assert main(["finetune", task, *words]) == 0
    steps = [entry for entry in metrics(tmp_path / "runs/own") if entry["kind"] == "step"]

    model = kind.from_pretrained(folder).eval()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
    ids = tokenizer([row["text"] for row in rows], return_tensors="pt")["input_ids"]
    batch = {"input_ids": ids, "labels": torch.tensor([n % 2 for n in range(8)])}
    losses = plain_losses(model, batch, optimizer, [entry["lr"] for entry in steps])
    assert len(steps) == STEPS and abs(losses[0] - losses[-1]) > 1e-3
    assert [entry["loss"] for entry in steps] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "runs/own/hf").eval()
    torch.testing.assert_close(exported(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_an_encoder_is_trained_for_retrieval_and_again_after_the_library_saved_it(name: str, tmp_path: Path) -> None:
    """sentence-transformers reads the vectors that were trained, and what it saves is the same model here."""
    needs("sentence_transformers", "the extra retrieval is not installed")
    from sentence_transformers import SentenceTransformer

    kind, names, settings = FOREIGN[name]
    folder = saved(kind, tmp_path / "model", names, **settings)
    lines = [f"{number} {one}\t{number} {two}" for number, (one, two) in enumerate(itertools.pairwise(TEXTS))]
    (tmp_path / "mine.tsv").write_text("\n".join(["query\tpositive", *lines[:16]]) + "\n")
    keys: dict[str, Any] = {"train": [f"{tmp_path}/mine.tsv"], "evaluate": {}, "batch_size": 8, "epochs": 1}
    words = ["retrieval", "train", recipe(tmp_path, tmp_path, **keys, max_tokens=32)]
    assert main([*words, "--model", str(folder), "name=first"]) == 0
    st = tmp_path / "runs/first/st"
    library = SentenceTransformer(str(st), device="cpu")
    vectors = np.asarray(library.encode(TEXTS[:3]))
    ours = torch.nn.functional.normalize(load_model(st).embed(TEXTS[:3])).numpy()
    before = torch.nn.functional.normalize(load_model(folder).embed(TEXTS[:3])).numpy()
    assert np.allclose(ours, vectors, atol=1e-5) and np.abs(vectors - before).max() > 1e-3

    library.save(str(tmp_path / "again"))
    for own, model in (("direct", st), ("saved", tmp_path / "again")):
        assert main([*words, "--model", str(model), f"name={own}"]) == 0
    one, two = ([entry["loss"] for entry in metrics(tmp_path / f"runs/{own}")] for own in ("direct", "saved"))
    assert one == two and len(one) > 1
