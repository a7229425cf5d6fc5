"""Encoders and decoders of Llama's and Gemma's shape, held against transformers' classes, both ways.

If this breaks, a decoder that is read, or an encoder that is published, computes something else than it did.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.config.schema import GemmaConfig, LlamaConfig, MaskedLmConfig
from modernbert_train.errors import DataError
from modernbert_train.models.build import build_model
from modernbert_train.plan import parameters as planned
from modernbert_train.weights.formats import export_format, gemma, llama, read_folder
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from tests.support.encoders import LLAMA, VOCABULARY, build

STRETCHED = replace(LLAMA, rope_scaling="llama3", rope_factor=8.0, rope_original_tokens=32)
YARN = replace(LLAMA, rope_scaling="yarn", rope_factor=4.0, rope_original_tokens=24)
GEMMA = GemmaConfig(
    vocab_size=160, hidden_size=48, num_layers=4, num_heads=4, key_value_heads=2, head_width=16, intermediate_size=56,
    init_std=0.2, rope_theta=1000.0, local_rope_theta=100.0, local_attention=8, global_every=3,
)  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "untied": replace(LLAMA, tied=False, key_value_heads=None),
    "qwen3": replace(LLAMA, qk_norm=True, head_width=16),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "llama3": STRETCHED,
    "linear": replace(LLAMA, rope_scaling="linear", rope_factor=4.0),
    "yarn": YARN,
    "yarn, with a factor of attention": replace(YARN, rope_attention_factor=0.8, rope_beta_fast=3.0, head_width=16),
    "qwen3, yarn": replace(YARN, qk_norm=True),
    "gemma": GEMMA,
    "gemma, linear": replace(GEMMA, rope_scaling="linear", rope_factor=4.0),
    "gemma, yarn in all layers": replace(
        GEMMA, rope_scaling="yarn", rope_factor=4.0, rope_original_tokens=24, local_rope_scaled=True
    ),
}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
BOUNDARIES = (0, 45, 70, 76)


def described(config: LlamaConfig, order: Any = "all") -> dict[str, Any]:
    return export_format(config, order).describe(config, order, ("model",), 96, VOCABULARY)


def twin_of(model: Any, order: Any) -> Any:
    """Transformers' model, of what we write."""
    raw = described(model.config, order)
    kind = getattr(transformers, raw["architectures"][0])
    twin = kind(kind.config_class(**raw))
    missing = twin.load_state_dict(
        to_hf(export_format(model.config, order), dict(model.state_dict()), model.config), strict=False
    )
    assert missing.missing_keys == (["lm_head.weight"] if model.config.tied else []) and not missing.unexpected_keys
    return twin.eval()


@pytest.mark.runs
@pytest.mark.parametrize("order", ["all", "causal"])
@EACH
def test_logits_and_gradients_equal_transformers(config: LlamaConfig, order: Any) -> None:
    """Sequences in one packed buffer here, one by one there."""
    model = build(config)
    twin = twin_of(model, order)
    ids_T = torch.randint(5, 160, (76,), generator=torch.Generator().manual_seed(0))  # no [PAD]
    weight_TV = torch.randn(76, 160, generator=torch.Generator().manual_seed(1))
    logits_TV = model.logits(model.encode(lay_out(ids_T, BOUNDARIES, order=order)), torch.arange(76))
    theirs_TV = torch.cat([twin(ids_T[None, a:b]).logits[0] for a, b in itertools.pairwise(BOUNDARIES)])
    torch.testing.assert_close(theirs_TV, logits_TV, atol=1e-5, rtol=1e-5)
    for logits in (logits_TV, theirs_TV):
        (logits * weight_TV).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    grads |= {"decoder.weight": grads["model.embeddings.tok_embeddings.weight"]} if config.tied else {}
    for name, grad in to_hf(export_format(config, order), grads, config).items():  # type: ignore[arg-type]
        expected: Tensor = twin.get_parameter(name).grad
        torch.testing.assert_close(grad, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.runs
@pytest.mark.parametrize("order", ["all", "causal"])
@EACH
def test_what_transformers_saves_comes_back_from_us_bit_by_bit(tmp_path: Path, config: LlamaConfig, order: Any) -> None:
    twin_of(build(config), order).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found, hub = read_folder(tmp_path), export_format(config, order)
    assert (replace(found.model, init_cutoff=config.init_cutoff), found.max_tokens, found.order) == (config, 96, order)
    weights = from_hf(hub, stored, config, "file")
    back = to_hf(hub, weights, config)
    assert back.keys() == stored.keys() and all(torch.equal(back[name], stored[name]) for name in stored)
    build_model(config, MaskedLmConfig()).load_state_dict(weights, strict=True)
    body = {name.removeprefix("model."): tensor for name, tensor in stored.items()}  # as an embedding model is saved
    if config.tied:
        assert torch.equal(from_hf(hub, body, config, "file")["decoder.weight"], weights["decoder.weight"])


@pytest.mark.parametrize("config", [LLAMA, CONFIGS["untied"]], ids=["tied", "untied"])
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "every layer of this encoder"),
        ({"use_sliding_window": True}, "use_sliding_window=True; this encoder only knows False"),
        ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe'; only model_type=eurobert, llama, qwen2, qwen3"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope'.*default, linear, llama3 and yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'.*default, linear, llama3 and yarn"),
        ({"rope_scaling": {"type": "yarn"}}, "without a factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor=0.5, not a number from 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "with truncate=true"),
        ({"partial_rotary_factor": 0.5}, "of whole heads"),
    ],
)
def test_what_this_encoder_cannot_compute_is_named(change: dict[str, Any], message: str) -> None:
    """Windows, experts and other positions would be left out in silence."""
    raw = json.loads(json.dumps(described(CONFIGS["qwen3"], "causal"))) | change
    with pytest.raises(DataError, match=message):
        llama.read(raw, "config.json")


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
    found = llama.read(llama32, "config.json")
    assert planned.count_parameters(found.model).total == 1_235_814_400 and found.order == "causal"
    qwen3 = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    assert planned.count_parameters(llama.read(qwen3, "config.json").model).total == 596_049_920
    gemma3 = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "_sliding_window_pattern": 6,
        "attention_bias": False, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
        "intermediate_size": 2048, "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": False, "vocab_size": 262144,
    }  # fmt: skip
    assert planned.count_parameters(gemma.read(gemma3, "config.json").model).total == 268_098_176


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_pre_attn_scalar": 24}, "query_pre_attn_scalar=24 with head_dim=16"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
            "this encoder knows one in every n",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0; this encoder only knows None"),
        ({"model_type": "gemma3"}, "only model_type=gemma3_text"),
    ],
)
def test_what_a_gemma_cannot_compute_is_named(change: dict[str, Any], message: str) -> None:
    raw = json.loads(json.dumps(described(GEMMA, "causal"))) | change
    with pytest.raises(DataError, match=message):
        gemma.read(raw, "config.json")


@EACH
def test_every_norm_has_the_epsilon_of_the_configuration(config: LlamaConfig) -> None:
    """At 1e-5 the parity with transformers does not show which number it is."""
    model = build(replace(config, norm_eps=0.25))
    found = {name: module.eps for name, module in model.named_modules() if hasattr(module, "eps")}
    assert "model.final_norm" in found and {*found.values()} == {0.25}
