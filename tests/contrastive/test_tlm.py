"""A text and its translation, masked together. If this breaks, [SEP] is learnt, or one side is never predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.batch import PackedText
from modernbert_train.config.schema import MaskedLmConfig, TranslationConfig
from modernbert_train.data.microbatches import MicrobatchMaker
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan
from modernbert_train.objectives import build_objective
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.objectives.tlm import Translation
from tests.support.classifiers import Documents
from tests.support.encoders import ENCODERS, build, twin_of
from tests.support.encoders import VOCABULARY as OURS
from tests.support.mlm_lines import CLS, MASK, SEP, VOCABULARY, keys, line
from tests.support.pairs import ContrastiveRun, with_streams
from tests.support.runs import assert_goes_on_to_the_bit, metrics


@pytest.mark.parametrize("masking", ["exact", "bernoulli", "ngram"])
def test_both_texts_are_masked_and_nothing_between_them(masking: str) -> None:
    """Labels are what stood there; a text without a translation is masked as by mlm, to the token."""
    ids_T, starts, lengths = line([30, 40, 12])
    ids_T[starts[0] + 10 : starts[0] + 12] = SEP, CLS
    ids_T[starts[1] + 25 : starts[1] + 27] = SEP, CLS
    text = PackedText(ids_T, starts, lengths, keys(3))
    config = TranslationConfig(mask_rate=0.5, masking=masking)  # type: ignore[arg-type]
    made = Translation(config, VOCABULARY).make(text, config)
    found = made.counts["mlm"]
    positions, labels = made.targets["positions_M"][:found], made.targets["labels_M"][:found]
    assert np.array_equal(ids_T[positions], labels) and not np.isin(labels, (SEP, CLS)).any()
    changed = np.flatnonzero(made.ids_T != ids_T)
    assert {*changed.tolist()} <= {*positions.tolist()} and (made.ids_T[positions] == MASK).sum() > found / 2
    special = np.isin(ids_T, (SEP, CLS))
    assert np.array_equal(made.ids_T[special], ids_T[special])
    for start, end in ((1, 11), (13, 31), (starts[1], starts[1] + 25), (starts[1] + 27, starts[1] + 40)):
        assert ((positions >= start) & (positions < end)).any()
    if masking == "exact":
        counts = [((positions >= s) & (positions < s + n)).sum() for s, n in zip(starts, lengths, strict=True)]
        assert counts == [14, 19, 6]
    plain = MaskedLmConfig(mask_rate=0.5, masking=masking)  # type: ignore[arg-type]
    alone = MaskedLM(plain, VOCABULARY).make(text, plain)
    assert np.array_equal(alone.ids_T[starts[2] :], made.ids_T[starts[2] :])


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@torch.no_grad()
def test_positions_of_a_translation_may_begin_again(name: str) -> None:
    """As transformers computes a pair with such position_ids, alone; and tokens between rows and pairs keep theirs."""
    pairs = [([9, 8, 7, 6], [11, 12, 13, 14, 15]), ([20, 21], [22]), ([30, 31, 32], [])]
    documents = [[*a, SEP, CLS, *b] if b else a for a, b in pairs]
    config = TranslationConfig(reset_positions=True, mask_rate=0.4)
    maker = MicrobatchMaker(Documents(documents, [[[0]]] * 3), lambda each: build_objective(each, OURS), OURS)
    rows = (tuple(Chunk(0, n, 0, len(documents[n])) for n in (0, 1)), (Chunk(0, 2, 0, 3),))
    (batch,) = maker.microbatches(rows, BatchPlan("p", 0, 0, rows, 2, 24, 2, config))
    expected = [[*range(len(a) + 2), *(range(len(b) + 2) if b else ())] for a, b in pairs]
    tails = [24 - len(expected[0]) - len(expected[1]), 24 - len(expected[2])]
    flat = [*expected[0], *expected[1], *range(tails[0]), *expected[2], *range(tails[1])]
    assert batch.packed.position_ids_T.tolist() == flat

    model = build(ENCODERS[name])
    twin, hidden_TD = twin_of(model), model.encode(batch.to("cpu").packed)
    for start, places in ((0, expected[0]), (len(expected[0]), expected[1]), (24, expected[2])):
        told = batch.packed.input_ids_T[start : start + len(places)].long()[None]
        states = twin.base_model(told, position_ids=torch.tensor([places])).last_hidden_state[0]
        torch.testing.assert_close(hidden_TD[start : start + len(places)], states, atol=1e-5, rtol=1e-5)
    whole = replace(config, reset_positions=False)
    (plain,) = maker.microbatches(rows, BatchPlan("p", 0, 0, rows, 2, 24, 2, whole))
    assert plain.packed.position_ids_T[: len(expected[0])].tolist() == [*range(len(expected[0]))]
    assert torch.equal(plain.packed.input_ids_T, batch.packed.input_ids_T), "the same masks"


@pytest.mark.slow
def test_a_run_on_translations_learns_and_resumes_to_the_bit(contrastive_run: ContrastiveRun, tmp_path: Path) -> None:
    """Words and their twins: a word masked in one text is visible in the other."""
    words = contrastive_run(
        "objective.name=tlm", "objective.reset_positions=true", "optim.lr=1e-2", "checkpoint.interval_steps=60",
        "phases.main.tokens=40_000", "phases.main.batch_rows=2",
    )  # fmt: skip
    assert main(["train", *words]) == 0
    run = tmp_path / "runs/pairs"
    steps = metrics(run, "step")
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"] and steps[0]["predicted"] > 100
    assert_goes_on_to_the_bit(words, run)


@pytest.mark.runs
@pytest.mark.parametrize("objective", ["contrastive", "tlm"])
def test_validation_is_measured_where_its_token_limit_falls_within_a_pair(
    contrastive_run: ContrastiveRun, tmp_path: Path, objective: str
) -> None:
    """Otherwise each start ends at the first validation as soon as more is held out than eval.max_tokens."""
    words = contrastive_run(f"objective.name={objective}", "eval.max_tokens=301", "phases.main.tokens=4000")
    assert main(["train", *words]) == 0
    held_out = metrics(tmp_path / "runs/pairs", "validation")
    assert held_out[-1]["predicted"] > 5


@pytest.mark.runs
@pytest.mark.parametrize("objective", ["tlm", "mlm"])
def test_pairs_and_plain_text_are_mixed_in_one_phase(
    contrastive_run: ContrastiveRun, pairs: Path, text: Path, tmp_path: Path, objective: str
) -> None:
    """Masked tokens need none of the labels that a folder of pairs has."""
    words = contrastive_run(f"objective.name={objective}", "phases.main.tokens=6000")
    assert main(["train", *with_streams(words, t=text, p=pairs / "shards/train")]) == 0
    assert metrics(tmp_path / "runs/pairs", "step")[-1]["tokens"] >= 6000


def test_no_whole_word_lies_in_both_texts() -> None:
    """The translation begins with a piece that looks like the rest of the word before it."""
    words, own = replace(VOCABULARY, inside_words=np.array([VOCABULARY.ordinary[0]])), 0
    piece = int(words.inside_words[0])
    ids_T, starts, lengths = line([40] * 300)
    for start in starts.tolist():
        ids_T[start + 20 : start + 23] = SEP, CLS, piece
    config = TranslationConfig(mask_rate=0.3, masking="ngram")
    made = Translation(config, words).make(PackedText(ids_T, starts, lengths, keys(300)), config)
    chosen = {*made.targets["positions_M"][: made.counts["mlm"]].tolist()}
    for start in starts.tolist():
        own += (start + 19 in chosen) != (start + 22 in chosen)
    assert own > 30, "as one word, both or neither would be chosen"
