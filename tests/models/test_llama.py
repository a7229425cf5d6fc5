"""Encoders and decoders of Llama's and Gemma's shape in transformers' files; test_parity.py compares their results.

If this breaks, a decoder that is read, or an encoder that is published, computes something else than it did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.batches import lay_out
from modernbert_train.config.schema import LlamaConfig
from modernbert_train.plan import parameters as planned
from modernbert_train.weights.formats import gemma, read
from tests.support.encoders import LLAMA, LLAMAS, build

EACH = pytest.mark.parametrize("config", LLAMAS.values(), ids=LLAMAS)
BOUNDARIES = (0, 45, 70, 76)


@pytest.mark.parametrize("config", [LLAMA, LLAMAS["untied"]], ids=["tied", "untied"])
def test_the_loss_in_chunks_is_that_of_logits(config: LlamaConfig) -> None:
    """A decoder without a bias, tied or not."""
    grads = []
    for chunk in (128, None):
        model = build(config, logit_chunk=chunk)
        batch = masked(76)
        hidden_MD = model.encode(lay_out(torch.arange(76), BOUNDARIES), batch.targets["positions_M"])
        sums, _ = model.predict(hidden_MD, batch, figures=chunk is None)
        sums.losses["mlm"].backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-4, rtol=1e-4)


def masked(tokens: int) -> Any:
    from types import SimpleNamespace

    targets = {"positions_M": torch.arange(0, tokens, 3), "labels_M": torch.arange(0, tokens, 3) % 160}
    return SimpleNamespace(targets=targets, counts={"mlm": 26})


def test_the_configs_of_released_models_are_read() -> None:
    """Of meta-llama/Llama-3.2-1B, Qwen/Qwen3-0.6B and google/gemma-3-270m, as transformers 4 wrote them."""
    llama32 = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "vocab_size": 128256,
    }  # fmt: skip
    found = read(llama32, "config.json")
    assert planned.count_parameters(found.model).total == 1_235_814_400 and found.order == "causal"
    qwen3 = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    assert planned.count_parameters(read(qwen3, "config.json").model).total == 596_049_920
    gemma3 = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "_sliding_window_pattern": 6,
        "attention_bias": False, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
        "intermediate_size": 2048, "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": False, "vocab_size": 262144,
    }  # fmt: skip
    assert planned.count_parameters(gemma.FORMAT.read(gemma3, "config.json").model).total == 268_098_176


@EACH
def test_every_norm_has_the_epsilon_of_the_configuration(config: LlamaConfig) -> None:
    """At 1e-5 the parity with transformers does not show which number it is."""
    model = build(replace(config, norm_eps=0.25))
    found = {name: module.eps for name, module in model.named_modules() if hasattr(module, "eps")}
    assert "model.final_norm" in found and {*found.values()} == {0.25}
