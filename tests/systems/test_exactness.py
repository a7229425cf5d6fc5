"""Exactness of every encoder with every objective, and of a run that changes its objective.

A user would lose: a BERT that resumes as the same run, or a loss that does not depend on the ranks.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data_prep.prepare import main as prepare
from modernbert_train.__main__ import main, read_run
from modernbert_train.objectives.ngrams import LONGEST
from tests.support.batches import make_loader, make_path, rows_of
from tests.support.matrix import PAIRS, system
from tests.support.ranks import trained_on_two_ranks
from tests.support.runs import assert_equal_runs, assert_same_run, killed_and_gone_on, records
from tests.support.segmented_corpus import write_corpus
from tests.support.tiny_run import TinyRun
from tests.support.verbs import Says

CAUSAL_FIRST = ("objective={name: mlm}", "phases.short.objective={name: causal}")


def assert_resumes(words: TinyRun, runs: Path, step: int | None = None, least: int = 11) -> list[dict[str, Any]]:
    """Train a run; kill another at this step, or in its second phase; resume it, and return the equal steps of both."""
    assert main(["train", *words("name=whole")]) == 0
    steps = records(runs / "whole")
    killed_and_gone_on(words("name=killed"), step or sum(each["phase"] == "short" for each in steps) + 2)
    assert_equal_runs(runs / "killed", runs / "whole", least)
    return steps


# with another path of data; others are killed in separate tests, below and in test_replaced_tokens.py, or are slow
RESUMED = {("xlnet", "permutation")}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("encoder", "objective"), [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in RESUMED)) for pair in PAIRS]
)
def test_a_killed_run_resumes_as_if_it_never_was(
    tiny_run: TinyRun, tmp_path: Path, encoder: str, objective: str
) -> None:
    """With dropout, where there is some, whose draws must not depend on where a run was stopped."""
    names = {"modernbert": ("model.attention_out_dropout=0.1",), "llama": (), "gemma": (), "neobert": (), "esm": ()}
    common = (*names.get(encoder, ("model.dropout=0.1",)), "checkpoint.interval_steps=3")

    def words(name: str) -> list[str]:
        return system(tiny_run(*common, name), encoder, objective)

    assert_resumes(words, tmp_path / "runs", step=8)
    assert main(["eval", *words("name=whole")]) == 0


@pytest.mark.runs
def test_a_run_learns_causally_and_then_from_masks(tiny_run: TinyRun, tmp_path: Path) -> None:
    """One run, two objectives: killed in the second phase it continues there, with the weights of the first."""
    common = (*CAUSAL_FIRST, "checkpoint.interval_steps=3")
    steps = assert_resumes(partial(tiny_run, *common), tmp_path / "runs")
    by_phase: dict[str, list[dict[str, Any]]] = {"short": [], "long": []}
    for step in steps:
        by_phase[step["phase"]].append(step)
    # every token but [CLS] and what pads is predicted at first, and three in ten after that
    shares = {
        phase: sum(step["predicted"] for step in found) / (found[-1]["tokens"] - (4000 if phase == "long" else 0))
        for phase, found in by_phase.items()
    }
    assert shares["short"] > 0.9 and 0.2 < shares["long"] < 0.4


@pytest.mark.runs
def test_a_mask_rate_that_moves_continues_where_it_was(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Half of the tokens at first, a tenth at the end, each sequence with its own share."""
    masks = "objective={name: mlm, mask_rate: 0.5, mask_rate_end: 0.1, mask_spread: 0.1}"
    common = (masks, "phases.long=null", "phases.short.batch_warmup=null", "checkpoint.interval_steps=2")
    steps = assert_resumes(partial(tiny_run, *common), tmp_path / "runs", step=5, least=5)
    ends = [0, *(step["tokens"] for step in steps)]
    shares = [step["predicted"] / (end - start) for step, start, end in zip(steps, ends, ends[1:], strict=False)]
    assert shares[0] > 0.4 > 0.2 > shares[-1] and shares == sorted(shares, reverse=True)


DIFFUSION = (
    "{name: mlm, mask_rate: 0.5, mask_spread: 0.5, mask_weight: 1/rate, mask_token_share: 1.0, random_token_share: 0.0}"
)


@pytest.mark.slow
def test_predictions_that_weigh_one_over_their_rate_do_not_know_how_a_batch_is_cut(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """In microbatches of one row or of many; and in the phase after it all weigh the same."""
    even = "{mask_rate: 0.3, mask_spread: 0.0, mask_weight: none}"
    phases = (f"objective={DIFFUSION}", f"phases.long.objective={even}")
    common = (*phases, "phases.short.batch_warmup=null")
    assert main(["train", *tiny_run(*common, "name=whole")]) == 0
    runs = tmp_path / "runs"
    steps = records(runs / "whole")
    ends = [0, *(step["tokens"] for step in steps)]
    for step, start, end in zip(steps, ends, ends[1:], strict=False):
        share = step["predicted"] / (end - start)  # all but [CLS] and [SEP] are counted, and then three in ten
        assert share > 0.9 if step["phase"] == "short" else 0.2 < share < 0.3
    assert steps[0]["loss"] == pytest.approx(6.24, abs=1.2)  # ln 512, with what weights of a few sequences add
    cut = ("phases.short.microbatch_tokens=64", "phases.long.microbatch_tokens=128")
    assert main(["train", *tiny_run(*common, *cut, "name=cut")]) == 0
    assert_same_run(runs / "cut", runs / "whole")


def segmented(words: list[str]) -> list[str]:
    """The tiny run on text without spaces in which a segmenter has found words, which are masked whole."""
    file = Path(words[0])
    run, folder = yaml.safe_load(file.read_text()), file.parent / "segmented"
    if not folder.exists():
        corpus, _ = write_corpus(file.parent)
        source = f"sources.zh={{kind: jsonl, path: {corpus}, words_field: words}}"
        common = [f"out={folder}", source, f"tokenizer.path={run['data']['tokenizer']}", "shard_bytes=65536"]
        assert prepare([*common, "validation_share=0.1"]) == 0
    run["data"] |= {name: str(folder / name) for name in ("train", "validation", "tokenizer")}
    run["objective"] = {"name": "mlm", "masking": "ngram", "words": "segmenter"}
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    return words


@pytest.mark.slow
def test_words_of_a_segmenter_are_masked_the_same_by_any_kernel(tiny_run: TinyRun, tmp_path: Path) -> None:
    """From prepared text on: whole words alone; the same by workers, and after a kill."""
    common = ("checkpoint.interval_steps=3", "phases.long=null")
    whole = segmented(tiny_run(*common, "name=whole"))
    config = read_run(whole)
    path, parts = make_path(config), 0
    for plan, step in zip(path.planned.planner, make_loader(config), strict=True):
        for chunks, row in zip(plan.rows, rows_of(step), strict=True):
            predicted = np.isin(np.arange(plan.row_tokens), row.predicted)
            for chunk, begin in zip(chunks, row.boundaries, strict=False):
                inside = path.streams.inside_words(chunk.document)[chunk.start : chunk.start + chunk.length]
                of_word = np.cumsum(np.r_[0, inside[1:] == 0])
                here = predicted[begin + 1 : begin + 1 + chunk.length]
                sizes, chosen = np.bincount(of_word), np.bincount(of_word, here)
                short = sizes <= LONGEST
                assert (chosen == sizes * (chosen > 0))[short].all()
                parts += int((chosen > 1).sum())
    assert parts > 100
    assert main(["train", *whole]) == 0
    killed_and_gone_on(segmented(tiny_run(*common, "name=killed", "data.num_workers=1")), step=5)
    assert_equal_runs(tmp_path / "runs/killed", tmp_path / "runs/whole", least=8)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("permutation", "mlm"), ("mlm", "permutation")])
def test_a_run_learns_in_permuted_orders_and_from_masks(
    tiny_run: TinyRun, tmp_path: Path, first: str, second: str
) -> None:
    """One run, two objectives, in either order: the clock counts text alone, and a killed run continues bit by bit."""
    phases = (f"objective={{name: {second}}}", f"phases.short.objective={{name: {first}}}")
    common = (*phases, "checkpoint.interval_steps=3")
    steps = assert_resumes(partial(tiny_run, *common), tmp_path / "runs")
    ends = {step["phase"]: step["tokens"] for step in steps}
    began = {"short": 0, "long": ends["short"]}
    for phase, name in (("short", first), ("long", second)):
        predicted = sum(step["predicted"] for step in steps if step["phase"] == phase)
        share = predicted / (ends[phase] - began[phase])
        assert (0.12 < share < 1 / 6) if name == "permutation" else (0.2 < share < 0.3), (name, share)


@pytest.mark.slow
def test_a_deberta_reads_longer_rows_in_a_later_phase(tiny_run: TinyRun, tmp_path: Path, says: Says) -> None:
    """Rows of 64 tokens, then of 128: refused until that phase says how far positions go, by the YAML alone; then
    killed in it and continued to the bit. The export says both lengths."""
    short = ("model.max_positions=64", "model.max_distance=48", "checkpoint.interval_steps=3")
    said = says("check", *system(tiny_run(*short), "deberta", "mlm"), code=78)
    assert "phases.long.row_tokens=128 exceeds model.max_positions=64" in said
    longer = (*short, "phases.long.model={max_positions: 128}")
    assert_resumes(lambda name: system(tiny_run(*longer, name), "deberta", "mlm"), tmp_path / "runs")
    assert main(["export", str(tmp_path / "runs/killed")]) == 0
    said = json.loads((tmp_path / "runs/killed/hf/config.json").read_text())
    assert (said["max_position_embeddings"], said["max_relative_positions"]) == (128, 48)


def test_pairs_need_a_tokenizer_that_tells_their_texts_apart(tiny_run: TinyRun, tmp_path: Path, says: Says) -> None:
    """Else transformers would give the exported model another input than it was trained on."""
    words = system(tiny_run(), "bert", "sop")
    assert main(["check", *words]) == 0
    folder = Path(yaml.safe_load(Path(words[0]).read_text())["data"]["tokenizer"])
    content = (folder / "tokenizer.json").read_text()
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text(content.replace('"type_id": 1', '"type_id": 0'))
    said = says("check", *words, f"data.tokenizer={other}", code=78)
    assert (
        f"objective.name=sop: the halves of a pair are two segments of model.name=bert, and the tokenizer in {other}"
        in said
    )
    assert "Prepare the data again" in said


@pytest.mark.runs
def test_two_phases_may_mask_by_different_rules(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Both with one name, so counts cannot distinguish them: exact masks give the same count of a text each time."""
    phase = "{name: mlm, mask_rate: 0.3, masking: %s}"
    for second in ("exact", "bernoulli"):
        words = tiny_run("objective={name: causal}", f"name={second}", "data.validation=null")
        words += [f"phases.short.objective={phase % 'exact'}", f"phases.long.objective={phase % second}"]
        assert main(["train", *words]) == 0
    found = {name: records(tmp_path / "runs" / name) for name in ("exact", "bernoulli")}
    counts = {name: [(step["phase"], step["predicted"]) for step in steps] for name, steps in found.items()}
    short = {name: [each for each in pairs if each[0] == "short"] for name, pairs in counts.items()}
    assert short["exact"] == short["bernoulli"] and counts["exact"] != counts["bernoulli"]


OTHERS: dict[str, tuple[str, ...]] = {"causal first": CAUSAL_FIRST, "1/rate": (f"objective={DIFFUSION}",)}
# some layers are sharded, one is not; dropout is drawn again
SHARED = ("model={sharing: ffn, group_layers: 1, dropout: 0.1}", "compute.activation_checkpointing=true")
SHARED += ("objective.masking=ngram",)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("encoder", "objective"),
    [
        *PAIRS,
        *(("modernbert", how) for how in (*OTHERS, "segmented")),
        ("albert", "shared and recomputed"),
    ],
)
def test_two_ranks_are_as_one(tiny_run: TinyRun, tmp_path: Path, encoder: str, objective: str) -> None:
    """The loss of each term is a mean over the global batch, however it was cut."""

    def words(*more: str) -> list[str]:
        if objective in OTHERS:
            return tiny_run(*OTHERS[objective], *more)
        if objective == "segmented":
            return segmented(tiny_run(*more))
        if objective == "shared and recomputed":
            return system(tiny_run(*SHARED, *more), encoder, "sop")
        return system(tiny_run(*more), encoder, objective)

    for _ in trained_on_two_ranks(words, tmp_path / "runs"):
        assert len(records(tmp_path / "runs/one")) > 10
