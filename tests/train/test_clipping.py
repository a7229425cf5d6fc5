"""optim.max_grad_norm compared with torch's clipping: the same weights on one rank, under DDP and under FSDP2.

If this breaks, AdamW diverges where other programs' does not, each rank clips by another norm, or a resumed run differs
from an uninterrupted one.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor, nn

from modernbert_train.__main__ import read_run
from modernbert_train.config.load import load_run
from modernbert_train.errors import ConfigError
from modernbert_train.optim.stable_adamw import clip
from modernbert_train.train import session
from tests.support.gloo import run_ranks
from tests.support.runs import records, weights
from tests.support.tiny_run import TinyRun

SHORT = (
    "optim={name: adamw, lr: 5e-3}",
    "phases.long=null",
    "phases.short.batch_warmup=null",
    "phases.short.tokens=2000",
    "data.validation=null",
    "checkpoint.interval_steps=2",
    "checkpoint.keep=100",
)
MOST = 0.3  # norms are about 1


class TorchsClipping(Callback):
    """The usual clipping between backward pass and update."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        nn.utils.clip_grad_norm_(state.model.parameters(), MOST)


def train_all(words: list[str], strategies: list[str]) -> None:
    """Train on one rank with our clipping, with torch's, and without."""
    session.joined = lambda *_: nullcontext()  # the test's own process group
    for strategy in strategies:
        own = [*words, f"distributed.strategy={strategy}"]
        session.train(read_run([*own, f"name={strategy}-ours", f"optim.max_grad_norm={MOST}"]))
        session.train(read_run([*own, f"name={strategy}-none"]))
        session.build_callbacks = lambda *_: [TorchsClipping()]
        session.train(read_run([*own, f"name={strategy}-torch"]))
        session.build_callbacks = lambda *_: []


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("ranks", "strategies"), [(1, ["ddp"]), pytest.param(2, ["ddp", "fsdp2"], marks=pytest.mark.slow)]
)
def test_clipping_is_torchs(ranks: int, strategies: list[str], tiny_run: TinyRun, tmp_path: Path) -> None:
    run_ranks(train_all, ranks, tiny_run(*SHORT), strategies, timeout_seconds=110)
    for strategy in strategies:
        ours, theirs, none = (weights(tmp_path / "runs" / f"{strategy}-{name}") for name in ("ours", "torch", "none"))
        assert distance(ours, theirs) < 2e-6
        assert distance(ours, none) > 1e-3, "nothing was clipped, so the test shows nothing"
        norms = [records(tmp_path / "runs" / f"{strategy}-{name}")[0]["grad_norm"] for name in ("ours", "none")]
        assert norms[0] == norms[1] > MOST, "the record has the norm before clipping"


def grads(*values: list[float] | None) -> list[nn.Parameter]:
    found = []
    for each in values:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = None if each is None else torch.tensor(each)
        found.append(parameter)
    return found


def test_short_gradients_are_left_to_the_bit_and_long_ones_get_the_norm() -> None:
    parameters = grads([3.0, 0.0], None, [0.0, 4.0])
    clip(parameters, 5.0, 5.1)
    assert [p.grad.tolist() for p in parameters if p.grad is not None] == [[3.0, 0.0], [0.0, 4.0]]
    clip(parameters, 5.0, 1.0)
    first, none, second = (p.grad for p in parameters)
    assert none is None and first is not None and second is not None
    assert torch.cat([first, second]).tolist() == pytest.approx([0.6, 0.0, 0.0, 0.8])


def test_a_norm_that_is_no_number_is_not_hidden() -> None:
    """With stability.non_finite=ignore the weights then become NaN, as with torch."""
    parameters = grads([float("nan"), 0.0], [1.0, 1.0])
    clip(parameters, float("nan"), 1.0)
    assert all(bool(p.grad.isnan().all()) for p in parameters if p.grad is not None)


@pytest.mark.parametrize("name", ["stable_adamw", "muon", "normuon"])
def test_optimizers_that_bound_their_updates_refuse_it_with_the_reason(name: str, tiny_run: TinyRun) -> None:
    file, *_ = tiny_run()
    with pytest.raises(ConfigError) as caught:
        load_run([Path(file)], [f"optim={{name: {name}, lr: 1e-3, max_grad_norm: 1.0}}"])
    (line,) = str(caught.value).splitlines()
    assert line.startswith("optim.max_grad_norm ") and "because they bound each update by themselves" in line
