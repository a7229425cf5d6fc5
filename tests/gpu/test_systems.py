"""Every encoder and objective through `train` on the device, with its default settings there.

The oracle is the same run in fp32 on the CPU, eager, with the plain optimizer: losses and norms of gradients of each
step. If this breaks, somebody's DeBERTa or teacher trains wrongly on GPUs only, where no other test looks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_parts import DEVICE, GPU_TEST, ON_GPU
from tests.support.matrix import ENCODERS, system
from tests.support.runs import assert_alike, records
from tests.support.tiny_run import TinyRun

pytestmark = [*GPU_TEST, pytest.mark.timeout(280)]

from modernbert_train.__main__ import main
from tests.support.contrastive_fixtures import contrastive_run, pairs
from tests.support.pairs import ContrastiveRun

__all__ = ["contrastive_run", "pairs"]

SYSTEMS = (
    *((encoder, "mlm") for encoder in ENCODERS),
    *(("modernbert", objective) for objective in ("causal", "sop", "permutation", "rtd")),
    *(("xlnet", "permutation"), ("deberta", "rtd"), ("llama", "causal"), ("gemma", "causal"), ("bert", "sop")),
)
HEADS = ["model.hidden_size=128", "model.intermediate_size=192"]  # of 64, as the real ones
DROPOUT = "model.attention_out_dropout=0.0"
SHORT = ["phases.long=null", "phases.short={tokens: 2400, batch_warmup: null}", "data.validation=null"]


def on_host(*words: str) -> list[str]:
    # two threads: with as many as cores, tests side by side wait for each other's
    threads = "compute.threads=2"
    return [*words, "name=host", "compute.device=cpu", "compute.precision=fp32", "data.num_workers=0", threads]


def on_device(*words: str) -> list[str]:
    return [*words, "name=device", f"compute.device={DEVICE.type}", *(["compute.precision=bf16"] if ON_GPU else [])]


def assert_same(runs: Path, steps: int) -> None:
    """Losses within 1 % and norms of gradients within 10 % in each step."""
    apart = {"loss": 0.01, "grad_norm": 0.1} if ON_GPU else {"loss": 1e-5, "grad_norm": 1e-5}
    assert_alike(runs / "device", runs / "host", apart, least=steps)


@pytest.mark.parametrize(("encoder", "objective"), SYSTEMS, ids=str)
def test_a_system_trains_as_on_the_cpu(tiny_run: TinyRun, tmp_path: Path, encoder: str, objective: str) -> None:
    more = [*SHORT, *(HEADS if encoder != "gemma" else [])]
    more += [DROPOUT] if encoder == "modernbert" else []
    assert main(["train", *system(tiny_run(*on_host(*more)), encoder, objective)]) == 0
    assert main(["train", *system(tiny_run(*on_device(*more)), encoder, objective)]) == 0
    assert_same(tmp_path / "runs", 5)


def test_a_teacher_teaches_as_on_the_cpu(tiny_run: TinyRun, tmp_path: Path) -> None:
    """All terms: KL at the predicted positions, cosine and MSE of states, pooled states, masked tokens."""
    sized = [*SHORT, *HEADS, DROPOUT]
    assert main(["train", *tiny_run(*sized, "name=teacher", "compute.device=cpu")]) == 0
    teacher = tmp_path / "runs/teacher"
    terms = "cosine_weight: 1.0, mse_weight: 0.5, pooled_weight: 1.0"
    asked = [*sized, f"objective={{name: distill, teacher: {teacher}, {terms}}}", "model.num_layers=1"]
    assert main(["train", *tiny_run(*on_host(*asked))]) == 0
    assert main(["train", *tiny_run(*on_device(*asked))]) == 0
    assert_same(tmp_path / "runs", 5)
    found = records(tmp_path / "runs/device")
    assert {"loss/mlm", "loss/kl", "loss/cosine", "loss/mse", "loss/pooled"} <= {*found[-1]}


@pytest.mark.parametrize("late", [False, True], ids=["one vector", "a vector for each token"])
def test_pairs_are_distinguished_as_on_the_cpu(contrastive_run: ContrastiveRun, tmp_path: Path, late: bool) -> None:
    """Two passes over a batch of several microbatches, with negatives from the whole batch."""
    short = ["phases.main.tokens=8000", "data.validation=null"]
    short += ["objective.pooling=late", "objective.token_vectors=16"] if late else []
    assert main(["train", *contrastive_run(*on_host(*short))]) == 0
    assert main(["train", *contrastive_run(*on_device(*short))]) == 0
    assert_same(tmp_path / "runs", 3)
