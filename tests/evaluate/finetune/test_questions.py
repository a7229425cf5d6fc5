"""Answers in packed windows, and packed choices: equal to transformers' classes on each alone, also after loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import AnswerConfig, ChooseConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.questions import NO_LOGIT
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.formats.classifiers import classifier_format
from modernbert_train.weights.hf_folder import load_weights
from modernbert_train.weights.source import open_model
from tests.support.classifiers import PAIRS, encoded, exported, made, packed
from tests.support.labelled import CONFIGS

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
    weights = load_weights(folder)  # import
    assert {*weights} == {*model.state_dict()}
    assert all(torch.equal(weights[key], tensor) for key, tensor in model.state_dict().items())
    assert open_model(folder).objective == replace(objective, segments=1)  # as far as config.json has it
    assert count_parameters(CONFIGS[name], objective).total == sum(p.numel() for p in model.parameters())


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
    weights = load_weights(folder)  # import
    assert {*weights} == {*model.state_dict()}
    assert open_model(folder).objective == replace(objective, segments=1)
    assert count_parameters(CONFIGS[name], objective).total == sum(p.numel() for p in model.parameters())


def test_choices_of_a_deberta_of_the_first_version_have_no_place_in_transformers() -> None:
    """They are trained and measured nevertheless, and the reason is reported."""
    first = replace(CONFIGS["deberta"], version="v1")
    with pytest.raises(ConfigError, match="no class of transformers has this head on a deberta"):
        classifier_format(first, ChooseConfig(labels=("0", "1"), pooling="cls"))
    assert classifier_format(first, AnswerConfig()).name == "DebertaForQuestionAnswering"
