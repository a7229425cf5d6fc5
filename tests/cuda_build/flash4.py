"""The real FlashAttention-4 on the null device: python -m tests.cuda_build.flash4 FOLDER, which keeps its cubins.

The package compiles its kernels for sm_90a, and all its checks see tensors of the null device. Kernels are not
launched: the package brings another CUDA runtime, which needs more of the driver than the null device offers. Prints
JSON.
"""

from __future__ import annotations

import json
import os
import site
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

FOLDER = Path(sys.prefix, "flash-attn-4")  # run.sh installs it there, hidden from other tests' imports
HOPPER = {"CUTE_DSL_ARCH": "sm_90a"}


def find() -> str | None:
    """Return the reason why the package cannot be tested here, or None. Adds it to sys.path."""
    if FOLDER.is_dir():
        site.addsitedir(str(FOLDER))
    from modernbert_train.config.packages import flash_4_refusal

    return flash_4_refusal()


def look(kept: Path) -> dict[str, Any]:
    """Compile and call it: from compiled layers of ModernBERT, and directly with each kind of call."""
    import torch

    from modernbert_train.models.attention import flash4
    from modernbert_train.models.attention.visible import Visible
    from modernbert_train.models.attention.written_out import small_batch
    from tests.cuda_build import flash as flash_attention
    from tests.cuda_build import layers, train_step
    from tests.support.tiny_run import make_tiny_data

    forward, backward = flash4.load()
    calls: list[dict[str, Any]] = []

    def noted(name: str, function: Any) -> Any:
        def call(**given: Any) -> Any:
            numbers = {key: value for key, value in given.items() if isinstance(value, int | None)}
            ends = given["cu_seqlens_q"]
            assert ends.device.type == "cuda" and ends.dtype == torch.int32
            calls.append({"function": name, "sequences": len(ends) - 1, **numbers})
            return function(**given)

        return call

    both = noted("forward", forward), noted("backward", backward)
    interface = sys.modules["flash_attn.cute.interface"]
    make_tiny_data(kept / "data")
    with ExitStack() as patches:
        patches.enter_context(flash_attention.installed("flash4"))
        patches.enter_context(patch.object(interface, "is_fake_mode", lambda: True))  # compile, do not launch
        unproven = train_step.train(kept, "flash4 eager alone")
        for each in (forward, backward):
            each.compile_cache.clear()
        patches.enter_context(patch.object(flash4, "_prove", lambda *given: None))  # the device computes no values
        patches.enter_context(patch.object(flash4, "load", lambda: both))
        found = layers.look_at("modernbert-flash4", layers.Traffic())
        in_layers = [*calls]
        calls.clear()
        for order, window, deterministic, empty in (
            ("all", False, True, 1),
            ("all", True, True, 1),
            ("causal", False, False, 1),
            ("causal", True, True, 1),
            ("all", False, False, 300),
        ):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            batch = small_batch(empty).to(torch.device("cuda"))
            qkv = torch.zeros(len(batch.input_ids_T), 3, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            visible = Visible.around(64, order)  # type: ignore[arg-type]
            flash4.attend(*qkv.unbind(1), flash4.prepare(batch, visible), window).sum().backward()
        by_hand = [*calls]
        compiled = [len(each.compile_cache.cache) for each in (forward, backward)]
        run = train_step.train(kept, "flash4 compiled alone")
    return {
        "unproven": unproven["outcome"],
        "run": {key: run[key] for key in ("outcome", "faults", "graph_breaks")},
        "layers": found,
        "calls_of_layers": in_layers,
        "calls": by_hand,
        "compiled": compiled,
        "for_hopper": [b"sm_90a" in file.read_bytes() for file in sorted(kept.glob("*.cubin"))],
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    os.environ.update(HOPPER, CUTE_DSL_KEEP="cubin", CUTE_DSL_DUMP_DIR=str(folder))
    reason = find()
    assert reason is None, reason
    print(json.dumps(look(folder)))
