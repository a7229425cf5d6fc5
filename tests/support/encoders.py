"""Small encoders of every kind, and transformers' model with the weights of one, for the tests of encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    ComputeConfig,
    DebertaConfig,
    DistilBertConfig,
    EsmConfig,
    GemmaConfig,
    LlamaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
    NeoBertConfig,
    ObjectiveConfig,
    PermutationLmConfig,
    XLNetConfig,
)
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import export_format
from modernbert_train.weights.formats.tensors import places_of, to_hf
from tests.support import neobert

PAD = 1
VOCABULARY = Vocabulary(160, cls_id=2, sep_id=3, pad_id=PAD, mask_id=4, ordinary=np.arange(5, 160), sha256="")

MODERNBERT = ModernBertConfig(
    vocab_size=160, hidden_size=64, num_layers=4, num_heads=2, intermediate_size=48, local_attention=16, init_std=0.15,
    attention_out_dropout=0.0,
)  # fmt: skip
OF_BERT: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "max_positions": 400, "init_std": 0.1
}  # fmt: skip
BERT, DISTILBERT = (kind(**OF_BERT, num_layers=3, dropout=0.0) for kind in (BertConfig, DistilBertConfig))
ROBERTA = replace(BERT, segments=1, position_offset=PAD + 1, norm_eps=1e-5)
ALBERT = AlbertConfig(**OF_BERT, num_layers=4, embedding_size=24)
XLNET = XLNetConfig(
    vocab_size=160, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, init_std=0.4, dropout=0.0
)
# buckets are few, so that sequences have near distances, far ones that share buckets, and farther ones than any bucket
# reaches; heads are 12 wide, because transformers divides by the square root of 36 in fp32
DEBERTA = DebertaConfig(
    vocab_size=160, hidden_size=48, num_layers=2, num_heads=4, intermediate_size=56, max_positions=96, buckets=8,
    max_distance=16, init_std=0.3, dropout=0.0,
)  # fmt: skip
DEBERTA_V1 = replace(DEBERTA, version="v1", buckets=16, init_std=0.2)  # its norms are always in fp32 there
DEBERTA_NARROW = replace(DEBERTA, embedding_size=24, activation="gelu_tanh", convolution=3)

LLAMA = LlamaConfig(
    vocab_size=160, hidden_size=48, num_layers=3, num_heads=4, key_value_heads=2, intermediate_size=56, init_std=0.2,
    rope_theta=1000.0,
)  # fmt: skip

STRETCHED = replace(LLAMA, rope_scaling="llama3", rope_factor=8.0, rope_original_tokens=32)
YARN = replace(LLAMA, rope_scaling="yarn", rope_factor=4.0, rope_original_tokens=24)
GEMMA = GemmaConfig(
    vocab_size=160, hidden_size=48, num_layers=4, num_heads=4, key_value_heads=2, head_width=16, intermediate_size=56,
    init_std=0.2, rope_theta=1000.0, local_rope_theta=100.0, local_attention=8, global_every=3,
)  # fmt: skip
# of Llama's and Gemma's shape
LLAMAS = {
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

NEOBERT = NeoBertConfig(
    vocab_size=160, hidden_size=48, num_layers=3, num_heads=4, intermediate_size=56, init_cutoff=0.4
)

ESM = EsmConfig(
    vocab_size=160, hidden_size=48, num_layers=3, num_heads=4, intermediate_size=56, init_std=0.2, rope_theta=1000.0
)

ENCODERS: dict[str, ModelConfig] = {
    "modernbert": MODERNBERT,
    "bert": BERT,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "albert that shares its ffn": replace(ALBERT, sharing="ffn"),
    "xlnet": XLNET,
    "deberta": DEBERTA,
    "deberta v1": DEBERTA_V1,
    "deberta, narrow": DEBERTA_NARROW,
    "llama": LLAMA,
    "neobert": NEOBERT,
    "esm": ESM,
}


def objective_of(config: ModelConfig) -> ObjectiveConfig:
    """The published configuration of each."""
    return PermutationLmConfig() if isinstance(config, XLNetConfig) else MaskedLmConfig()


def with_dropout(config: Any, share: float) -> Any:
    """Return the configuration with another dropout, under its own key; unchanged if it lacks one."""
    keys = [key for key in ("dropout", "attention_out_dropout") if key in config.__dataclass_fields__]
    return replace(config, **dict.fromkeys(keys, share))


def fill(module: nn.Module, config: ModelConfig) -> None:
    """Weights large enough for attention to matter, norms and biases that parity could miss at one and zero."""
    initialize(module, config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)


def build(config: ModelConfig, z_loss: float = 0.0, **compute: Any) -> Any:
    """The model that a run of masked tokens trains, with weights; a ForMaskedLM."""
    objective = replace(objective_of(config), z_loss=z_loss)  # type: ignore[call-arg]
    model = build_model(config, objective, ComputeConfig(**({"attention": "sdpa"} | compute)))
    fill(model, config)
    return model.eval()


def ids(size: int, seed: int = 5) -> Tensor:
    return torch.randint(5, 160, (size,), generator=torch.Generator().manual_seed(seed))


def empty_twin(config: Any, *heads: str, order: Order = "all", positions: int = 96) -> Any:
    """transformers' model of our config.json."""
    hub = export_format(config, order, {"model", *heads})
    positions = config.max_positions or positions
    settings = hub.describe(config, order, {"model", *heads}, positions, VOCABULARY)
    name = settings["architectures"][0]
    kind = getattr(neobert if name == "NeoBERTLMHead" else transformers, name)
    return kind(kind.config_class(**settings, attn_implementation="eager"))


def twin_of(model: Any, pair_head: nn.Module | None = None, order: Order = "all") -> Any:
    """The same with the weights of a model of ours, under our names of them."""
    weights = dict(model.state_dict())
    if pair_head is not None:
        weights |= {f"pair_head.{name}": tensor for name, tensor in pair_head.state_dict().items()}
    heads = {name.partition(".")[0] for name in weights}
    twin = empty_twin(model.config, *heads, order=order)
    hub = export_format(model.config, order, {"model", *heads})
    missing, unexpected = twin.load_state_dict(to_hf(hub, weights, model.config), strict=False)
    tied, unused = ("decoder.weight", "decoder.bias", "lm_loss.weight", "lm_head.weight"), ("contact_head", "inv_freq")
    assert all(name.endswith(tied) or any(part in name for part in unused) for name in missing), missing
    assert not unexpected
    twin.tie_weights()
    return twin.eval()


def assert_same_gradients(ours: dict[str, Tensor], config: ModelConfig, twin: nn.Module) -> None:
    """Where one tensor here is several equal ones there, the sum of theirs must equal ours."""
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    hub, seen = export_format(config, "all"), set[str]()
    for name, gradient in ours.items():
        places = places_of(hub, name, config)
        for numbered, part in enumerate(gradient.chunk(len(places[0]))):
            names = [place[numbered] for place in places]
            expected = sum(theirs[each] for each in names)  # type: ignore[misc]
            # a key's bias shifts all scores of a query equally: its gradient is 0 within rounding
            floor = 1e-5 if names[0].endswith("key.bias") else 0.0
            assert (part - expected).norm() <= 1e-4 * expected.norm() + floor, name
            seen.update(names)
    assert seen == theirs.keys()
