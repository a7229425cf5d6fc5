"""Classes, tags, spans and choices predicted from packed texts: equal to transformers' on each text alone, after export
and import."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import (
    AnswerConfig,
    ChooseConfig,
    ClassifyConfig,
    LabelledConfig,
    ModelConfig,
    TagConfig,
)
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.build import build_model
from modernbert_train.models.classifier import Classifier
from modernbert_train.models.init import initialize
from modernbert_train.models.questions import NO_LOGIT
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.formats.classifiers import classifier_format
from modernbert_train.weights.formats.config_json import CONFIG_JSON
from modernbert_train.weights.source import open_model
from tests.support.classifiers import PAIRS, assert_opens_again, encoded, exported, made, packed
from tests.support.labelled import BERT, CONFIGS, GEMMA, LLAMA, LLAMAS, MODERNBERT

LABELS = ("no", "yes", "perhaps")


CASES = [
    ("modernbert", ClassifyConfig(labels=LABELS, pooling="mean")),
    ("modernbert", ClassifyConfig(labels=LABELS, pooling="cls", kind="multi-label")),
    ("bert", ClassifyConfig(labels=LABELS, pooling="cls", segments=2)),
    ("bert", ClassifyConfig(kind="regression", pooling="cls", segments=2)),
    ("roberta", ClassifyConfig(labels=LABELS, pooling="cls")),
    ("albert", ClassifyConfig(labels=LABELS, pooling="cls", segments=2)),
    ("xlnet", ClassifyConfig(labels=LABELS, pooling="cls", segments=2)),
    ("xlnet", ClassifyConfig(kind="regression", pooling="cls")),
    ("deberta", ClassifyConfig(labels=LABELS, pooling="cls")),
    ("distilbert", ClassifyConfig(labels=LABELS, pooling="cls")),
    ("llama", ClassifyConfig(labels=LABELS)),
    ("llama", ClassifyConfig(kind="regression")),
]
ENCODERS = CONFIGS | LLAMAS


@pytest.mark.runs
@pytest.mark.parametrize(("name", "objective"), CASES, ids=lambda each: getattr(each, "kind", each))
def test_packed_pairs_have_the_logits_of_transformers_one_by_one(
    name: str, objective: ClassifyConfig, tokenizer: Path, tmp_path: Path
) -> None:
    """Otherwise an exported model predicts other classes than the evaluated one."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = made(ENCODERS[name], objective)
    folder = exported(model, ENCODERS[name], objective, tokenizer, tmp_path / "hf")
    theirs, reader = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    kind = {"single-label": "single_label", "multi-label": "multi_label"}.get(objective.kind)
    assert theirs.config.problem_type == (f"{kind}_classification" if kind else "regression")
    assert tuple(theirs.config.id2label.values()) == (objective.labels or ("score",))

    documents = encoded(tokenizer, PAIRS)
    labels = [[[0.5]] if objective.kind == "regression" else [[1] * (3 if "multi" in objective.kind else 1)]] * 4
    batch = packed(documents, labels, objective, tokenizer, [[2, 0], [], [1, 3]])
    with torch.no_grad():
        ours = model.predict(batch)[:4]
        alone = [theirs.eval()(**reader(*PAIRS[n], return_tensors="pt")).logits[0] for n in (2, 0, 1, 3)]
    torch.testing.assert_close(ours, torch.stack(alone), atol=1e-5, rtol=1e-5)
    assert ours.std() > 0.05

    assert_opens_again(folder, model, replace(objective, labels=objective.labels or ("score",)))


@pytest.mark.parametrize("name", [*ENCODERS])
def test_tags_of_words_have_the_logits_of_transformers(name: str, tokenizer: Path, tmp_path: Path) -> None:
    """At each word's first token, in packed rows, and equal after loading."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    objective = TagConfig(labels=("O", "B-x", "I-x"))
    model = made(ENCODERS[name], objective)
    folder = exported(model, ENCODERS[name], objective, tokenizer, tmp_path / "hf")
    theirs, reader = AutoModelForTokenClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [("aki nabe ruto kelo",), ("lamu sitre",)]
    documents = encoded(tokenizer, texts)
    labels = [[n % 3 if n % 2 == 0 else IGNORED_LABEL for n in range(len(ids))] for ids in documents]
    batch = packed(documents, labels, objective, tokenizer, [[1, 0]])
    assert batch.counts == {"tag": sum(label >= 0 for each in labels for label in each)}
    with torch.no_grad():
        ours = model.predict(batch)[: batch.counts["tag"]]
        alone = []
        for number in (1, 0):
            logits = theirs.eval()(**reader(texts[number][0], return_tensors="pt")).logits[0, 1:-1]
            alone.append(logits[[n for n, label in enumerate(labels[number]) if label >= 0]])
    torch.testing.assert_close(ours, torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert_opens_again(folder, model, objective)


LOSSES: list[tuple[Any, list[Any], Any]] = [
    ("single-label", [[[2]], [[0]], [[1]], [[0]]], lambda told, so: F.cross_entropy(told, so.long().squeeze(1))),
    (
        "multi-label",
        [[[1, 0, 1]], [[0, 0, 0]], [[1, 1, 1]], [[0, 1, 0]]],
        lambda told, so: F.binary_cross_entropy_with_logits(told, so.float()),
    ),
    ("regression", [[[1.5]], [[-2.25]], [[1e-3]], [[100.0]]], lambda told, so: F.mse_loss(told, so.float())),
]


@pytest.mark.parametrize(("kind", "labels", "loss_of"), LOSSES)
def test_the_loss_is_the_mean_that_transformers_takes(
    kind: Any, labels: list[Any], loss_of: Any, tokenizer: Path
) -> None:
    """A sum over a count known on the host: the same update for any cut of a batch."""
    objective = ClassifyConfig(kind=kind, labels=() if kind == "regression" else LABELS)
    model, documents = made(MODERNBERT, objective), encoded(tokenizer, PAIRS)
    batch = packed(documents, labels, objective, tokenizer, [[0, 1], [2, 3]])
    sums = model(batch, figures=True)
    expected = loss_of(model.predict(batch)[:4], torch.tensor(np.concatenate(labels)))
    torch.testing.assert_close(sums.losses["classify"] / batch.counts["classify"], expected)
    parts = [packed(documents, labels, objective, tokenizer, [row]) for row in ([0, 1], [2, 3])]
    torch.testing.assert_close(sum(model(part).losses["classify"] for part in parts), sums.losses["classify"])
    empty = packed(documents, labels, objective, tokenizer, [[0], []])
    assert empty.counts["classify"] == batch.counts["classify"] // 4


def test_a_class_that_training_has_not_adds_nothing_to_the_loss(tokenizer: Path) -> None:
    """Its number is beyond the logits: torch would read other memory, or end the run."""
    objective = ClassifyConfig(labels=("no", "yes"))
    model, documents = made(MODERNBERT, objective), encoded(tokenizer, PAIRS)
    batch = packed(documents, [[[1]], [[2]], [[0]], [[2]]], objective, tokenizer, [[0, 1], [2, 3]])
    known = packed(documents, [[[1]], [[2]], [[0]], [[2]]], objective, tokenizer, [[0], [2]])
    assert batch.counts == {"classify": 2}
    torch.testing.assert_close(model(batch).losses["classify"], model(known).losses["classify"])


def test_every_document_of_a_class_gives_the_encoder_a_gradient(tokenizer: Path) -> None:
    """The mean excludes pads, and two texts in a row do not influence each other."""
    objective = ClassifyConfig(labels=LABELS)
    model, documents = made(MODERNBERT, objective), encoded(tokenizer, PAIRS)
    both = packed(documents, [[[1]], [[0]], [[0]], [[2]]], objective, tokenizer, [[0, 3]])
    alone = packed(documents, [[[1]], [[0]], [[0]], [[2]]], objective, tokenizer, [[3]])
    grads = []
    for batch, number in ((both, 1), (alone, 0)):
        model.zero_grad()
        model.predict(batch)[number].square().sum().backward()
        grads.append(model.model.layers[0].attn.Wqkv.weight.grad.clone())  # type: ignore[union-attr]
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-4)
    assert grads[0].abs().max() > 1e-4


@pytest.mark.parametrize("config", ENCODERS.values(), ids=[*ENCODERS])
@pytest.mark.parametrize(
    "objective",
    [ClassifyConfig(labels=LABELS), TagConfig(labels=LABELS), ClassifyConfig(labels=LABELS, freeze=True)],
    ids=["class", "tag", "frozen"],
)
def test_the_census_counts_the_real_model(config: ModelConfig, objective: LabelledConfig) -> None:
    """Otherwise banner, plan and MFU would count a head for tokens that does not exist."""
    real = build_model(config, objective)
    assert count_parameters(config, objective).total == sum(each.numel() for each in real.parameters())


@pytest.mark.parametrize("kind", ["classify", "tag"])
@pytest.mark.parametrize("name", [*CONFIGS, "llama"])
def test_what_stands_before_the_classes_is_drawn_as_transformers_draws_it(
    name: str, kind: str, tokenizer: Path, tmp_path: Path
) -> None:
    """A ModernBERT's classifier has hidden^-0.5, seven times its other matrices; smaller, it would learn later."""
    import transformers

    config = replace(ENCODERS[name], hidden_size=64, init_std=0.02)
    labels = tuple(map(str, range(200)))
    pooling = "mean" if name in ("modernbert", "llama") else "cls"
    objective = TagConfig(labels=labels) if kind == "tag" else ClassifyConfig(labels=labels, pooling=pooling)
    model = build_model(config, objective)
    initialize(model, config, 3)
    assert isinstance(model, Classifier)
    state, hub = model.state_dict(), classifier_format(config, objective)
    out = exported(model, config, objective, tokenizer, tmp_path / "model")
    torch.manual_seed(0)
    theirs = dict(getattr(transformers, hub.name)(transformers.AutoConfig.from_pretrained(out)).named_parameters())
    drawn = {key: value for key, value in state.items() if key.startswith(("classifier.", "pooler."))}
    assert len(drawn) == (4 if kind == "classify" and name != "modernbert" else 2)
    for key, mine in drawn.items():
        (its_name,) = hub.theirs(key, config)
        its = theirs[its_name].detach()
        if mine.dim() == 1:
            assert not mine.any() and not its.any()
            continue
        assert mine.std().item() == pytest.approx(its.std().item(), rel=0.05), key
        assert mine.abs().max().item() == pytest.approx(its.abs().max().item(), rel=0.2), f"{key}: truncated otherwise"
    if name == "modernbert":
        assert drawn["classifier.weight"].std().item() == pytest.approx(0.88 * 64**-0.5, rel=0.03)


LAST_TOKEN = "its classes of texts read only the last token"  # they would predict other classes
FIRST_DEBERTA = replace(CONFIGS["deberta"], version="v1")


@pytest.mark.parametrize(
    ("config", "objective", "message"),
    [
        (BERT, ClassifyConfig(labels=LABELS), "pooling=mean: transformers' BertForSequenceClassification only reads"),
        (CONFIGS["xlnet"], ClassifyConfig(labels=LABELS), "transformers' XLNetForSequenceClassification only reads"),
        (LLAMA, ClassifyConfig(labels=LABELS, pooling="cls"), "EuroBertForSequenceClassification only reads mean"),
        (LLAMAS["qwen3"], ClassifyConfig(labels=LABELS), f"on a qwen3 .{LAST_TOKEN}"),
        (LLAMAS["qwen2"], ClassifyConfig(labels=LABELS), f"on a qwen2 .{LAST_TOKEN}"),
        (GEMMA, ClassifyConfig(labels=LABELS), f"on a gemma3_text .{LAST_TOKEN}"),
        (GEMMA, TagConfig(labels=LABELS), "no class of transformers has this head on a gemma3_text; for"),
        (LLAMA, AnswerConfig(), "no class of transformers has this head on a eurobert"),
        (FIRST_DEBERTA, ChooseConfig(labels=("0", "1"), pooling="cls"), "has this head on a deberta"),
        (MODERNBERT, ClassifyConfig(labels=LABELS, freeze=True), "freeze=true: transformers' ModernBertForSequence"),
    ],
)
def test_what_transformers_cannot_say_is_not_exported(
    config: ModelConfig, objective: LabelledConfig, message: str
) -> None:
    """It is trained and measured nevertheless, and the reason is reported."""
    with pytest.raises(ConfigError, match=message):
        classifier_format(config, objective)


def test_heads_without_more_than_a_matrix_are_exported() -> None:
    assert classifier_format(FIRST_DEBERTA, AnswerConfig()).name == "DebertaForQuestionAnswering"
    assert classifier_format(BERT, TagConfig(labels=LABELS, freeze=True)).name == "BertForTokenClassification"


@pytest.mark.parametrize(
    ("config", "objective", "change", "message"),
    [
        (MODERNBERT, ClassifyConfig(labels=LABELS), {"id2label": {"0": "a", "2": "b"}}, "id2label"),
        (MODERNBERT, ClassifyConfig(labels=LABELS), {"problem_type": "ranking"}, "problem_type"),
        (MODERNBERT, ClassifyConfig(labels=LABELS), {"model_type": "bert"}, "model_type"),
        (LLAMAS["qwen3"], TagConfig(labels=LABELS), {"is_causal": True}, "Qwen3ForTokenClassification in causal order"),
    ],
)
def test_a_folder_of_other_classes_is_not_opened(
    config: ModelConfig, objective: LabelledConfig, change: dict[str, Any], message: str,
    tokenizer: Path, tmp_path: Path,
) -> None:  # fmt: skip
    folder = exported(made(config, objective), config, objective, tokenizer, tmp_path / "hf")
    raw = json.loads((folder / CONFIG_JSON).read_text())
    (folder / CONFIG_JSON).write_text(json.dumps(raw | change))
    with pytest.raises(DataError, match=message):
        open_model(folder)


# --- questions ----------------------------------------------------------------------------------------------------

SEGMENTS = {"bert": 2, "albert": 2, "xlnet": 2}
ORDER = (2, 0, 1, 3)
ROWS = [[2, 0], [], [1, 3]]


@pytest.mark.runs
@pytest.mark.parametrize("name", [*CONFIGS])
def test_spans_in_packed_windows_have_the_logits_and_the_loss_of_transformers(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    """Otherwise the exported model gives other answers than the evaluated one, or has learned something else."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    objective = AnswerConfig(segments=SEGMENTS.get(name, 1))
    model = made(CONFIGS[name], objective)
    folder = exported(model, CONFIGS[name], objective, tokenizer, tmp_path / "hf")
    theirs, reader = AutoModelForQuestionAnswering.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    documents = encoded(tokenizer, PAIRS)
    spans = [[[4, 6]], [[0, 0]], [[IGNORED_LABEL] * 2], [[5, 5]]]
    batch = packed(documents, spans, objective, tokenizer, ROWS)
    assert batch.counts == {"answer": 3}
    sums = model(batch, figures=True)
    ours, losses, at = model.predict(batch), [], 0
    for number in ORDER:
        length = len(documents[number]) + 2
        asked = reader(*PAIRS[number], return_tensors="pt")
        start, end = torch.tensor([spans[number][0][0]]), torch.tensor([spans[number][0][1]])
        known = spans[number][0][0] != IGNORED_LABEL
        told = theirs.eval()(**asked, **({"start_positions": start, "end_positions": end} if known else {}))
        alone = torch.stack([told.start_logits[0], told.end_logits[0]], dim=1)
        torch.testing.assert_close(ours[at : at + length], alone, atol=1e-5, rtol=1e-5)
        losses += [told.loss] if known else []
        at += length
    assert ours[:at].std() > 0.05
    torch.testing.assert_close(sums.losses["answer"] / 3, torch.stack(losses).mean(), atol=1e-5, rtol=1e-5)
    sums.losses["answer"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.classifier.parameters())
    assert_opens_again(folder, model, objective)


CHOICES = [
    [("aki nabe", "kelo"), ("aki nabe", "domi tinda"), ("aki nabe", "lamu")],
    [("ruto", "beru mosa"), ("ruto", "aki")],
]
POOLING = {"modernbert": "mean"}


@pytest.mark.parametrize("name", [*CONFIGS])
def test_packed_choices_have_the_logits_and_the_loss_of_transformers(
    name: str, tokenizer: Path, tmp_path: Path
) -> None:
    """Also for questions with other numbers of choices; choices do not see each other."""
    from transformers import AutoModelForMultipleChoice, AutoTokenizer

    objective = ChooseConfig(labels=("0", "1", "2"), pooling=POOLING.get(name, "cls"), segments=SEGMENTS.get(name, 1))
    model = made(CONFIGS[name], objective)
    folder = exported(model, CONFIGS[name], objective, tokenizer, tmp_path / "hf")
    theirs, reader = AutoModelForMultipleChoice.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    vocabulary = read_vocabulary(tokenizer)
    documents = []
    for each in CHOICES:
        first, *others = encoded(tokenizer, each)
        documents.append([*first, *(token for ids in others for token in (vocabulary.sep_id, vocabulary.cls_id, *ids))])
    right = [2, 0]
    batch = packed(documents, [[[number]] for number in right], objective, tokenizer, [[1], [], [0]])
    assert batch.counts == {"choose": 2}
    sums, ours = model(batch, figures=True), model.predict(batch)
    losses = []
    for place, number in enumerate((1, 0)):
        asked = reader(*zip(*CHOICES[number], strict=True), padding=True, return_tensors="pt")
        told = theirs.eval()(**{key: value[None] for key, value in asked.items()}, labels=torch.tensor([right[number]]))
        width = len(CHOICES[number])
        torch.testing.assert_close(ours[place, :width], told.logits[0], atol=1e-5, rtol=1e-5)
        assert (ours[place, width:] == NO_LOGIT).all()
        losses.append(told.loss)
    torch.testing.assert_close(sums.losses["choose"] / 2, torch.stack(losses).mean(), atol=1e-5, rtol=1e-5)
    sums.losses["choose"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.classifier.parameters())
    assert_opens_again(folder, model, objective)
