"""Classes predicted from packed texts: equal to transformers' classes on each text alone, after export and import."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import (
    AnswerConfig,
    ClassifyConfig,
    ModelConfig,
    ObjectiveConfig,
    TagConfig,
)
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.build import build_model
from modernbert_train.models.classifier import Classifier
from modernbert_train.models.init import initialize
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.weights.formats.classifiers import classifier_format
from modernbert_train.weights.formats.config_json import CONFIG_JSON
from modernbert_train.weights.hf_folder import load_weights
from modernbert_train.weights.source import open_model
from tests.support.classifiers import PAIRS, encoded, exported, made, packed
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

    weights = load_weights(folder)  # import
    assert {*weights} == {*model.state_dict()}
    assert all(torch.equal(weights[key], tensor) for key, tensor in model.state_dict().items())
    source = open_model(folder)
    there = replace(objective, segments=1, labels=objective.labels or ("score",))  # as far as config.json has it
    assert source.objective == there


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
    assert open_model(folder).objective == objective


def loss_of(logits: Tensor, labels: Tensor, kind: str) -> Tensor:
    functions: dict[str, Any] = {
        "single-label": lambda: torch.nn.functional.cross_entropy(logits, labels.long().squeeze(1)),
        "multi-label": lambda: torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float()),
        "regression": lambda: torch.nn.functional.mse_loss(logits, labels.float()),
    }
    return functions[kind]()


@pytest.mark.parametrize("kind", ["single-label", "multi-label", "regression"])
def test_the_loss_is_the_mean_that_transformers_takes(kind: Any, tokenizer: Path) -> None:
    """A sum over a count known on the host: the same update for any cut of a batch."""
    objective = ClassifyConfig(kind=kind, labels=() if kind == "regression" else LABELS)
    model, documents = made(MODERNBERT, objective), encoded(tokenizer, PAIRS)
    labels = {
        "single-label": [[[2]], [[0]], [[1]], [[0]]],
        "multi-label": [[[1, 0, 1]], [[0, 0, 0]], [[1, 1, 1]], [[0, 1, 0]]],
        "regression": [[[1.5]], [[-2.25]], [[1e-3]], [[100.0]]],
    }[kind]
    batch = packed(documents, labels, objective, tokenizer, [[0, 1], [2, 3]])
    sums = model(batch, figures=True)
    expected = loss_of(model.predict(batch)[:4], torch.tensor(np.concatenate(labels)), kind)
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
def test_the_census_counts_the_real_model(config: ModelConfig, objective: ObjectiveConfig) -> None:
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


def test_what_transformers_cannot_say_is_refused_with_a_reason(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pooling=mean: transformers' BertForSequenceClassification only reads cls"):
        classifier_format(BERT, ClassifyConfig(labels=LABELS, pooling="mean"))
    with pytest.raises(ConfigError, match=r"transformers' XLNetForSequenceClassification only reads cls"):
        classifier_format(CONFIGS["xlnet"], ClassifyConfig(labels=LABELS, pooling="mean"))
    objective = ClassifyConfig(labels=LABELS)
    folder = exported(made(MODERNBERT, objective), MODERNBERT, objective, tokenizer, tmp_path / "hf")
    raw = json.loads((folder / CONFIG_JSON).read_text())
    for change in ({"id2label": {"0": "a", "2": "b"}}, {"problem_type": "ranking"}, {"model_type": "bert"}):
        (folder / CONFIG_JSON).write_text(json.dumps(raw | change))
        with pytest.raises(DataError, match="|".join(map(str, change))):
            open_model(folder)


def test_classes_of_a_decoders_shape_that_transformers_has_not(tokenizer: Path, tmp_path: Path) -> None:
    """transformers' classes for a Qwen or Gemma use only the last token: they would predict other classes."""
    for config, objective, said in [
        (LLAMA, ClassifyConfig(labels=LABELS, pooling="cls"), "EuroBertForSequenceClassification only reads mean"),
        (LLAMAS["qwen3"], ClassifyConfig(labels=LABELS), "on a qwen3 .its classes of texts read only the last token"),
        (LLAMAS["qwen2"], ClassifyConfig(labels=LABELS), "on a qwen2 .its classes of texts read only the last token"),
        (GEMMA, ClassifyConfig(labels=LABELS), "on a gemma3_text .its classes of texts read only the last token"),
        (GEMMA, TagConfig(labels=LABELS), "no class of transformers has this head on a gemma3_text; for"),
        (LLAMA, AnswerConfig(), "no class of transformers has this head on a eurobert"),
    ]:
        with pytest.raises(ConfigError, match=said):
            classifier_format(config, objective)
    objective = TagConfig(labels=LABELS)
    folder = exported(made(LLAMAS["qwen3"], objective), LLAMAS["qwen3"], objective, tokenizer, tmp_path / "hf")
    raw = json.loads((folder / CONFIG_JSON).read_text())
    (folder / CONFIG_JSON).write_text(json.dumps(raw | {"is_causal": True}))
    with pytest.raises(DataError, match="Qwen3ForTokenClassification in causal order"):
        open_model(folder)
