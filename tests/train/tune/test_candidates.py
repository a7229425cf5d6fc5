"""What is tried on which device. A switch that is not tried is never won; one that cannot work must be named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from modernbert_train.config.load import load_run, to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.train.tune.candidates import PHASE, Case, candidate_run, label, numeric, questions
from tests.conftest import TinyRun

GPU: dict[str, Any] = {
    "on_gpu": True,
    "fit": {"precision": "amp_bf16"},
    "kernels": {"varlen": None, "flash": "flash-attn is not installed", "flex": None, "sdpa": None},
    "fused": None,
    "threads": 8,
    "cores": 16,
}
CPU: dict[str, Any] = {
    "on_gpu": False,
    "fit": {"precision": "fp32"},
    "kernels": {"varlen": "no GPU", "flash": "no GPU", "flex": "no GPU", "sdpa": None},
    "fused": "it needs a GPU",
    "threads": 4,
    "cores": 4,
}


@pytest.fixture
def run(tiny_run: TinyRun) -> RunConfig:
    config = load_run([tiny_run()[0]], [*(f"phases.{phase}.microbatch_tokens=128" for phase in ("short", "long"))])
    return replace(config, data=replace(config.data, num_workers=None))


def asked(case: Case) -> dict[str, list[str]]:
    return {each.title: [label(option) for option in each.options] for each in questions(case)}


def test_what_is_asked_on_a_gpu(run: RunConfig) -> None:
    found = asked(Case(run, "short", GPU))
    assert found["attention kernel and compiler"][:2] == [
        "compute.attention=varlen, compute.compile=false",
        "compute.attention=varlen, compute.compile=true",
    ]
    assert found["kernel of global layers"] == [
        f"compute.global_attention={name}" for name in ("varlen", "flex", "sdpa")
    ]
    assert found["optimizer"] == ["optim.fused=true"]
    assert found["data workers"] == ["data.num_workers=2", "data.num_workers=4"]
    assert "threads" not in found and "block of local layers" not in found


def test_kernels_that_differ_in_one_kind_of_layers_are_asked_of_that_kind(run: RunConfig) -> None:
    """Each candidate is minutes of a GPU. `tiles` is varlen in global layers, and is no value of their key; `cudnn` is
    varlen in local ones; sdpa is faster than varlen on long documents of one length."""
    facts = {**GPU, "kernels": {"tiles": None, "varlen": None, "sdpa": None, "cudnn": None}}
    found = asked(Case(run, "short", facts))
    named = {option.split(",")[0].split("=")[1] for option in found["attention kernel and compiler"]}
    assert named == {"tiles", "varlen", "sdpa"}
    kernels = [option.split("=")[1] for option in found["kernel of global layers"]]
    assert kernels == ["varlen", "sdpa", "cudnn"]


def test_what_is_asked_on_a_cpu(run: RunConfig) -> None:
    found = asked(Case(run, "short", CPU))
    assert found == {
        "attention kernel and compiler": [
            "compute.attention=sdpa, compute.compile=false",
            "compute.attention=sdpa, compute.compile=true",
        ],
        "threads": ["compute.threads=2", "compute.threads=1"],
        "block of local layers": ["compute.query_block=32", "compute.query_block=128"],
        "data workers": ["data.num_workers=0"],
        "microbatch": ["microbatch_tokens=64", "microbatch_tokens=256", "microbatch_tokens=512"],
    }


def test_what_cannot_be_tried_is_named_with_its_reason(run: RunConfig) -> None:
    """Without Triton, without FlashAttention, and where the environment has said how many threads."""
    bare = GPU | {"fused": "Triton is not installed"}
    left_out = {label(settings): reason for each in questions(Case(run, "short", bare)) for settings, reason in
                each.left_out}  # fmt: skip
    assert left_out == {
        "compute.attention=flash": "flash-attn is not installed",
        "optim.fused=true": "Triton is not installed",
    }
    (threads,) = (each for each in questions(Case(run, "short", CPU, omp="3")) if each.title == "threads")
    assert not threads.options and threads.left_out[0] == ({"compute.threads": 2}, "OMP_NUM_THREADS=3 is set")


def test_what_a_run_gives_is_not_tried(run: RunConfig) -> None:
    given = replace(run, compute=replace(run.compute, compile=False, attention="sdpa", threads=2, query_block=64))
    found = asked(Case(replace(given, data=replace(run.data, num_workers=1)), "short", CPU))
    assert list(found) == ["microbatch"], "and that is reported, since no run could be without it before"
    assert all(each.reported for each in questions(Case(given, "short", CPU)) if each.title == "microbatch")


def test_a_microbatch_that_nobody_gives_is_found_from_one_row_on(run: RunConfig) -> None:
    phase = replace(run.phases["short"], microbatch_tokens=None)
    case = Case(replace(run, phases={"short": phase}), "short", CPU)
    assert case.plain["microbatch_tokens"] == 64 and case.step_rows == 8
    first, *_, last = questions(case)
    assert first.title == "microbatch, at first" and not first.reported and not last.reported
    assert [label(option) for option in first.options] == [f"microbatch_tokens={n}" for n in (128, 256, 512)]


def test_chunks_of_the_loss_are_tried_where_a_microbatch_is_cut_by_them(run: RunConfig) -> None:
    """Of more tokens than it predicts a chunk changes nothing; where nothing is predicted there is none."""
    phase = replace(run.phases["short"], microbatch_tokens=None, batch_rows=4096)
    wide = replace(run, model=replace(run.model, vocab_size=50368), phases={"short": phase})
    case = Case(wide, "short", GPU)
    (question,) = (each for each in questions(case) if each.title == "chunk of the loss")
    usual = wide.model.logit_chunk(on_gpu=True, bytes_per_logit=2)
    assert usual == 10624 and [label(option) for option in question.options] == [
        "compute.logit_chunk=2688", "compute.logit_chunk=5376", "compute.logit_chunk=21248"
    ]  # fmt: skip
    assert case.cuts({"compute.logit_chunk": 2688, "microbatch_tokens": 16384})
    assert not case.cuts({"compute.logit_chunk": 2688, "microbatch_tokens": 8192})
    assert numeric({"compute.logit_chunk": 2688}) == {}
    small = replace(wide, compute=replace(wide.compute, logit_chunk=128))
    assert "chunk of the loss" not in asked(Case(small, "short", GPU))
    assert "chunk of the loss" not in asked(Case(run, "short", GPU))


def test_a_candidate_is_a_run_of_the_phase_without_what_surrounds_it(run: RunConfig) -> None:
    """It is written as YAML and read by the worker: it must load, train the phase's own model, and never end."""
    case = Case(run, "long", CPU)
    settings = case.plain | {"compute.compile": True, "data.num_workers": 0}
    candidate = candidate_run(case, settings)
    (phase,) = candidate.phases.values()
    assert list(candidate.phases) == [PHASE] and phase.batch_rows == 4 and phase.microbatch_tokens == 128
    assert candidate.model == run.in_phase["long"].model
    assert candidate.compute.compile is True and candidate.data.num_workers == 0
    assert candidate.data.validation is None and not candidate.evals and phase.schedule.warmup_tokens == 0
    assert "compute.compile: null" not in to_yaml(candidate)
    alone = next(iter(candidate_run(case, settings, rows=2).phases.values()))
    assert (alone.batch_rows, alone.microbatch_tokens) == (2, 256)


def test_what_may_compute_something_else_is_known() -> None:
    assert numeric({"compute.attention": "sdpa", "compute.threads": 2, "microbatch_tokens": 64}) == {}
    assert numeric({"compute.attention": "sdpa", "compute.query_block": 32}) != {}
    assert numeric({"compute.attention": "varlen"}) == {"compute.attention": "varlen"}
