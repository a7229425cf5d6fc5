"""Published speeds of whole runs, compared with `plan`'s predictions; and the fit of `speed.PUBLISHED`.

    python -m benchmarks.published

Hours are of the whole run, phases weighted, every row one document. In ModernBERT's program, used by the first ten,
attention is FlashAttention-3 in global layers and 2 in local ones. The first eight are fitted: seconds a token are
`device` times the sum of its kernels plus `token`, for all models. The fit minimises squared relative errors, and each
run is also predicted by a fit to the other seven. Nothing here was timed; `published` is as found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.load import load_run
from modernbert_train.core.text import markdown_table
from modernbert_train.plan.cost import bill_of
from modernbert_train.plan.make import make_plan
from modernbert_train.plan.speed import PUBLISHED

RECIPES = Path(__file__).resolve().parent.parent / "yamls/recipes"
_MODERNBERT = ("compute.attention=varlen", "compute.global_attention=flash")
_MMBERT = (
    *_MODERNBERT, "model.vocab_size=256000",
    "phases.stable.tokens=2300000000000", "phases.context.tokens=600000000000", "phases.decay.tokens=100000000000",
    "phases.decay.schedule.decay_tokens=100000000000",
    "phases.context.objective.mask_rate=0.15", "phases.decay.objective.mask_rate=0.05",
)  # fmt: skip
_NEOBERT = (
    "model.num_layers=28", "model.intermediate_size=2048", "model.global_attn_every_n_layers=1",
    "objective.mask_rate=0.2",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run of another program.

    Attributes:
        name: of its model.
        rate: published tokens a second of one GPU; the middle of a range of hours.
        recipe: file of RECIPES with its shapes.
        overrides: differences from it.
        ranks: its GPUs.
        gpu: key of GPUS.
        compiled: layers compiled, and the update fused.
    """

    name: str
    rate: float
    recipe: str
    overrides: tuple[str, ...] = _MODERNBERT
    ranks: int = 8
    gpu: str = "h100"
    compiled: bool = True


FITTED = (  # ModernBERT issue 236 and arXiv 2412.13663; arXiv 2507.11412
    Run("ModernBERT-base", 285e3, "modernbert-base"),
    Run("ModernBERT-large", 133e3, "modernbert-large"),
    Run("Ettin 17M", 985e3, "ettin-17m", ranks=4),
    Run("Ettin 32M", 655e3, "ettin-32m", ranks=4),
    Run("Ettin 68M", 463e3, "ettin-68m", ranks=4),
    Run("Ettin 150M", 296e3, "ettin-150m", ranks=4),
    Run("Ettin 400M", 146e3, "ettin-400m", ranks=4),
    Run("Ettin 1B", 64e3, "ettin-1b", ranks=4),
)
# mmBERT's repository ("about 10" and "about 40 days" on 8 H100); arXiv 2502.19587; raufibishov.com/projects/az-neobert
OTHERS = (
    Run("mmBERT-small", 411e3, "modernbert-base", (*_MMBERT, "model.hidden_size=384", "model.num_heads=6")),
    Run("mmBERT-base", 103e3, "modernbert-base", _MMBERT),
    Run("NeoBERT, taken as eager", 97e3, "modernbert-base/1-stable", _NEOBERT, compiled=False),
    Run(
        "AzNeoBERT, H200, FlashAttention-3", 155e3, "modernbert-base/1-stable",
        (*_NEOBERT, "model.vocab_size=64000", "compute.attention=flash"), gpu="h200",
    ),
)  # fmt: skip


def alone(run: Run) -> float:
    """Return seconds a token on one of its GPUs by `speed.FASTEST`, with kernel times measured in isolation."""
    switch = str(run.compiled).lower()
    words = ["data.train=absent/train", f"compute.compile={switch}", f"optim.fused={switch}", *run.overrides]
    plan = make_plan(load_run([RECIPES / f"{run.recipe}.yaml"], words), run.ranks)
    return 1 / bill_of(plan.on(run.gpu), run.gpu, {}).tokens_per_second[1]


def fit(sums: Sequence[float], rates: Sequence[float]) -> tuple[float, float]:
    """Fit `device` and `token` of a pace by least squares of relative errors of the time.

    Args:
        sums: seconds a token, with kernel times measured in isolation.
        rates: published tokens a second.
    """
    per_token = np.array([sums, np.ones(len(sums))]) * np.array(rates)
    device, token = np.linalg.lstsq(per_token.T, np.ones(len(sums)))[0]
    return float(device), float(token)


def left_out(sums: Sequence[float], rates: Sequence[float]) -> NDArray[np.float64]:
    """Return, for each run, predicted over published tokens a second minus 1, by a fit to all others."""
    errors = []
    for index, (own, rate) in enumerate(zip(sums, rates, strict=True)):
        others = [number for number in range(len(sums)) if number != index]
        device, token = fit([sums[number] for number in others], [rates[number] for number in others])
        errors.append(1 / (device * own + token) / rate - 1)
    return np.array(errors)


def main() -> None:
    runs = [*FITTED, *OTHERS]
    sums = [alone(run) for run in runs]
    rates = [run.rate for run in runs]
    device, token = fit(sums[: len(FITTED)], rates[: len(FITTED)])
    without = [f"{error:+.0%}" for error in left_out(sums[: len(FITTED)], rates[: len(FITTED)])] + ["not fitted"] * 4
    print(f"fitted: {device:.3f} times the sum of the kernels, and {1e6 * token:.3f} us a token more\n")
    rows = []
    for run, own, error in zip(runs, sums, without, strict=True):
        predicted = 1 / (PUBLISHED.device * own + PUBLISHED.token)
        rows.append(
            [
                run.name,
                f"{run.rate / 1e3:,.0f} k",
                f"{1e-3 / own:,.0f} k",
                f"{1 / own / run.rate - 1:+.0%}",
                f"{predicted / 1e3:,.0f} k",
                f"{predicted / run.rate - 1:+.0%}",
                error,
            ]
        )
    head = ["tokens/s of a GPU", "published", "kernels alone", "error", "predicted", "error", "itself left out"]
    print(markdown_table(head, rows).replace("%", " %"))


if __name__ == "__main__":
    main()
