"""Formats as a whole: which models are exported as what; and properties of single ones.

If this breaks, a model is published, or read, as one that computes something else. A single lost bit makes another.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.config.load import load_run
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    BertConfig,
    ComputeConfig,
    DebertaConfig,
    LlamaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
    NeoBertConfig,
    PermutationLmConfig,
    SentenceOrderConfig,
    XLNetConfig,
)
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.build import all_shapes, build_model, shapes_of
from modernbert_train.models.init import initialize
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.models.replaced import Discriminator
from modernbert_train.plan import parameters as planned
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.fill import fill
from modernbert_train.weights.formats import (
    CLASSES,
    DISCRIMINATORS,
    EXPORTS,
    FORMATS,
    albert,
    deberta,
    export_format,
    format_of,
    modernbert,
    modernbert_tokens,
    neobert,
    read,
)
from modernbert_train.weights.formats.classifiers import KINDS
from modernbert_train.weights.formats.sentence_encoder import SentenceEncoder
from modernbert_train.weights.formats.tensors import from_hf, heads_among, places_of, to_hf, unsupported_heads
from modernbert_train.weights.hf_folder import export
from tests.support.encoders import (
    ALBERT,
    DEBERTA,
    ENCODERS,
    LLAMAS,
    NEOBERT,
    ROBERTA,
    VOCABULARY,
    XLNET,
    build,
    objective_of,
    twin_of,
)
from tests.support.encoders import (
    fill as randomize,
)
from tests.support.front_door import Cli
from tests.weights.formats.models import SAID, UNSAID, assert_equal, describe, weights_of, write

MODELS: dict[str, ModelConfig] = ENCODERS | {"roberta": ROBERTA} | {name: LLAMAS[name] for name in ("untied", "qwen3")}
DECODERS = (ModernBertConfig, BertConfig, XLNetConfig, LlamaConfig)  # architectures with a decoder in transformers
ORDERS: list[tuple[ModelConfig, Any]] = [
    *(
        (config, order)
        for config in MODELS.values()
        for order in ("all", "causal")
        if order == "all" or isinstance(config, DECODERS)
    ),
    *((config, "given") for config in MODELS.values()),  # as for models that see all
]


@pytest.mark.parametrize(("config", "order"), ORDERS)
def test_every_parameter_has_a_place_of_its_own(config: ModelConfig, order: Any) -> None:
    """For every encoder with every head: two with one name would overwrite each other, a nameless one would be lost."""
    hub = export_format(config, order)
    shapes = all_shapes(config)
    places = [name for ours in shapes for parts in places_of(hub, ours, config) for name in parts]
    assert len(set(places)) == len(places)
    assert [name for name in places if hub.today(name) != name] == []
    lost = {ours.partition(".")[0] for ours in shapes if not places_of(hub, ours, config)}
    of_tokens = set() if isinstance(config, DebertaConfig) else {"token_head"}
    of_pairs = set() if config.model_type in ("bert", "albert") else {"pair_head"}
    assert lost == of_tokens | of_pairs
    assert {*shapes_of(config, SentenceOrderConfig())} == {each for each in shapes if not each.startswith("token_head")}


@pytest.mark.parametrize("name", ["modernbert", "bert"])
def test_a_head_that_detects_replaced_tokens_has_a_place_of_its_own(name: str) -> None:
    """The head has a separate format; only a generator's predictions of tokens have a place there."""
    config = MODELS[name]
    hub = export_format(config, "all", {"model", "token_head"})
    shapes = [name for name in all_shapes(config) if name.startswith(("model.", "token_head."))]
    places = [name for ours in shapes for parts in places_of(hub, ours, config) for name in parts]
    assert len(set(places)) == len(places) >= len(shapes)
    assert [name for name in places if hub.today(name) != name] == []


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_pair_head_is_kept_where_it_has_a_place(config: ModelConfig) -> None:
    model = build_model(config, SentenceOrderConfig())
    initialize(model, config, seed=3)
    weights = model.state_dict()
    hub = export_format(config, "all")
    back = from_hf(hub, to_hf(hub, weights, config), config, "file")
    kept = () if unsupported_heads(hub, weights, config) else ("pair_head",)
    assert heads_among(back) == kept
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())


def test_tables_are_of_one_another() -> None:
    """Every model that can be exported can be read again."""
    written = {export_format(config, order) for config, order in ORDERS} | {*EXPORTS.values()}
    assert written | {*DISCRIMINATORS.values()} <= {*FORMATS.values(), modernbert_tokens.FORMAT}
    assert (
        {*CLASSES} == {*KINDS} > {modernbert_tokens.ARCHITECTURE}
    )  # which classes are exported: tests/evaluate/finetune


def test_an_untied_decoder_is_not_exported() -> None:
    config = MODELS["modernbert"]
    weights = dict(build_model(config, SentenceOrderConfig()).state_dict())
    weights["decoder.weight"] = weights["decoder.weight"] + 1
    with pytest.raises(ConfigError, match=r"decoder\.weight is not tied"):
        to_hf(modernbert.FORMAT, weights, config)


def test_scaled_positions_of_local_layers_alone_are_refused_and_layer_types_win() -> None:
    """If the scaling were ignored, a Gemma 3 would compute its local layers differently from transformers."""
    raw = json.loads(transformers.CONFIG_MAPPING["gemma3_text"]().to_json_string(use_diff=False))
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    with pytest.raises(DataError, match="local layers are scaled as global ones here"):
        read(raw | {"rope_parameters": raw["rope_parameters"] | {"sliding_attention": scaled}}, "x")
    types = ["sliding_attention", "full_attention"] * 13
    assert read(raw | {"layer_types": types, "_sliding_window_pattern": 6}, "x").model.global_every == 2


LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.{}."


def test_copies_that_differ_are_not_one_tensor() -> None:
    """If one number differs, the run would start from another model than it names."""
    config = UNSAID["albert, ffn"]
    stored = to_hf(albert.FORMAT, weights_of(config), config)
    name = LAYER.format(2, 0) + "ffn_output.weight"
    stored[name] = stored[name].clone()
    stored[name][3, 5] += 1e-6
    with pytest.raises(DataError, match=rf"^file: {name} differs from .*groups\.0\..*layers of this model share them"):
        from_hf(albert.FORMAT, stored, config, "file")
    assert len(from_hf(albert.FORMAT, stored, SAID["albert, none"], "file")) > 60
    with pytest.raises(DataError, match=r"\d+ tensors are unknown"):  # another number of groups
        from_hf(albert.FORMAT, stored, ALBERT, "file")


@pytest.mark.runs
def test_import_config_reads_an_albert_and_sees_what_it_shares(tmp_path: Path, cli: Cli) -> None:
    """The weights decide; without them only config.json is known."""
    read = {way: config for way, config in SAID.items() if way.startswith("albert")}
    for way, config in {**read, "attention": UNSAID["albert, attention"], "ffn": UNSAID["albert, ffn"]}.items():
        folder = write(tmp_path / way, config, weights_of(config))
        cli("init", "from", folder / "config.json", "--out", tmp_path / f"{way}.yaml")
        ours = yaml.safe_load((tmp_path / f"{way}.yaml").read_text())
        assert ours["weights"] == {"init_from": str(folder)} and ours["objective"] == {"name": "mlm"}
        assert load_run([tmp_path / f"{way}.yaml"], ["name=x", "data.tokenizer=x", "optim.lr=1"]).model == config
        (folder / "model.safetensors").unlink()
        out = cli("init", "from", folder / "config.json")
        model = yaml.safe_load(out.out)["model"]
        assert model["sharing"] == (config.sharing if way in SAID else "none")
        assert "weights.init_from: the folder lacks model.safetensors" in out.err


@torch.no_grad()
def test_the_head_of_released_files_is_read_as_transformers_does(tmp_path: Path) -> None:
    """With legacy=False, as `save_pretrained` stores it; otherwise transformers draws a new head."""
    torch.manual_seed(3)
    settings = transformers.DebertaV2Config(**describe(DEBERTA) | {"legacy": False, "initializer_range": 0.3})
    twin = transformers.DebertaV2ForMaskedLM(settings).eval()
    twin.save_pretrained(tmp_path)
    said = read(json.loads((tmp_path / "config.json").read_text()), "config.json")
    model = build_model(said.model, MaskedLmConfig(), ComputeConfig(attention="sdpa"))
    assert isinstance(model, ForMaskedLM)
    stored = load_file(tmp_path / "model.safetensors")
    model.load_state_dict(from_hf(export_format(said.model, "all"), stored, said.model, "file"))
    ids_T = torch.arange(5, 35)
    logits_TV = model.eval().logits(model.encode(lay_out(ids_T, [0, 30])), torch.arange(30))
    torch.testing.assert_close(logits_TV, twin(ids_T[None]).logits[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_head_that_detects_replaced_tokens_is_v3s() -> None:
    """With the names of the released files, and computed the same: the first token's state is added, then norm, dense
    matrix, GELU and one logit."""
    encoder = build_model(DEBERTA, MaskedLmConfig()).model
    model = Discriminator(encoder).eval()  # type: ignore[arg-type]
    randomize(model, DEBERTA)
    weights = model.state_dict()
    there = to_hf(deberta.FORMAT, weights, DEBERTA)
    assert_equal(from_hf(deberta.FORMAT, there, DEBERTA, "file"), weights)
    assert deberta.FORMAT.read(describe(DEBERTA, modules=("model", "token_head")), "file").detects
    packed = lay_out(torch.arange(5, 35), [0, 20, 30, 30])
    hidden_TD = model.encode(packed)
    logits_T = model.logits(model.model.token_states(hidden_TD, packed))

    def of(name: str) -> Tensor:
        return there[f"mask_predictions.{name}"]

    for own in (slice(0, 20), slice(20, 30)):
        mixed = hidden_TD[own] + hidden_TD[own.start]
        mixed = torch.nn.functional.layer_norm(mixed, (48,), of("LayerNorm.weight"), of("LayerNorm.bias"), 1e-7)
        mixed = torch.nn.functional.gelu(mixed @ of("dense.weight").T + of("dense.bias"))
        expected = (mixed @ of("classifier.weight").T + of("classifier.bias")).squeeze(-1)
        torch.testing.assert_close(logits_T[own], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("order", "objective"), [("all", "mlm"), ("causal", "causal"), ("given", "permutation")])
def test_import_config_continues_with_what_it_was_trained_on(
    tmp_path: Path, cli: Cli, order: Order, objective: str
) -> None:
    """For our config.json; a published one means permuted orders."""
    (tmp_path / "config.json").write_text(json.dumps(describe(XLNET, order)))
    ours = yaml.safe_load(cli("init", "from", tmp_path / "config.json").out)
    settings = {key: value for key, value in ours["model"].items() if key != "name"}
    assert ours["model"]["name"] == "xlnet" and XLNetConfig(**settings) == XLNET
    assert ours["objective"] == {"name": objective}


@pytest.mark.runs
def test_a_mask_is_filled_by_what_was_trained_to(tiny_data: Path, tmp_path: Path) -> None:
    """After permuted orders by a query token, after masks at [MASK]: the other was never trained."""
    config = replace(XLNET, vocab_size=512)
    weights, vocabulary = weights_of(config, PermutationLmConfig()), read_vocabulary(tiny_data / "tokenizer")
    words = "the day was [MASK] and long"
    said = {}
    for order in ("all", "given"):
        folder = tmp_path / order
        export(
            weights, config, order=order, max_tokens=64, tokenizer_folder=tiny_data / "tokenizer",
            out=folder, card="",
        )  # fmt: skip
        said[order] = fill(folder, [words], top=3)
    twin = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "given")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "given")
    ids = tokenizer(words, return_tensors="pt")["input_ids"]
    place = (ids[0] == vocabulary.mask_id).float()[None, None]
    with torch.no_grad():
        plain = twin(ids).logits[0, int(place.argmax())]
        asked = twin(ids, perm_mask=place.expand(1, ids.shape[1], -1), target_mapping=place).logits[0, 0]
    for order, logits in (("all", plain), ("given", asked)):
        assert json.dumps(tokenizer.decode([int(logits.argmax())]), ensure_ascii=False) in said[order].split("\n")[1]
    assert said["all"] != said["given"]


# config.json of chandar-lab/NeoBERT
NEOBERT_RELEASED: dict[str, Any] = {
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {
        "AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT",
        "AutoModelForMaskedLM": "model.NeoBERTLMHead",
        "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
    },
    "classifier_init_range": 0.02, "decoder_init_range": 0.02, "dim_head": 64, "embedding_init_range": 0.02,
    "hidden_size": 768, "intermediate_size": 3072,
    "kwargs": {
        "classifier_init_range": 0.02, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
        "trust_remote_code": True,
    },
    "max_length": 4096, "model_type": "neobert", "norm_eps": 1e-05, "num_attention_heads": 12,
    "num_hidden_layers": 28, "pad_token_id": 0, "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32", "transformers_version": "4.48.2", "trust_remote_code": True, "vocab_size": 30522,
}  # fmt: skip


def test_the_released_neobert_is_read_and_written_bit_by_bit() -> None:
    """Its configuration, the shapes of its files, and weights under its names; test_parity.py compares its results with
    the paper, written out."""
    found = neobert.FORMAT.read(NEOBERT_RELEASED, "config.json")
    assert (found.model, found.max_tokens, found.order) == (NeoBertConfig(), 4096, "all")
    # 28 x (2304 x 768 + 768^2 + 4096 x 768 + 768 x 2048 + 2 x 768) + 2 x 30522 x 768 + 30522 + 768
    assert planned.count_parameters(found.model).total == 245_136_954
    said = neobert.FORMAT.describe(found.model, "all", ("model",), 4096, VOCABULARY)
    assert {key: said[key] for key in said.keys() & NEOBERT_RELEASED.keys() - {"auto_map", "pad_token_id"}} == {
        key: NEOBERT_RELEASED[key] for key in said.keys() & NEOBERT_RELEASED.keys() - {"auto_map", "pad_token_id"}
    }
    assert said["auto_map"]["AutoModel"] == "chandar-lab/NeoBERT--model.NeoBERT"
    shapes = shapes_of(found.model, objective_of(found.model))
    names = {name: shape for ours, shape in shapes.items() for name in neobert.FORMAT.theirs(ours, found.model)}
    assert len(names) == 172
    layer = "model.transformer_encoder.0"
    assert names[f"{layer}.qkv.weight"] == (2304, 768) and names[f"{layer}.ffn.w12.weight"] == (4096, 768)
    assert names["decoder.bias"] == (30522,) and names[f"{layer}.ffn.w3.weight"] == (768, 2048)

    stored = {name: tensor.clone() for name, tensor in twin_of(build(NEOBERT)).state_dict().items()}
    weights = from_hf(neobert.FORMAT, stored, NEOBERT, "file")
    assert not torch.equal(weights["decoder.weight"], weights["model.embeddings.tok_embeddings.weight"])
    back = to_hf(neobert.FORMAT, weights, NEOBERT)
    assert back.keys() == stored.keys() and all(torch.equal(back[name], stored[name]) for name in stored)


def test_a_neobert_for_vectors_is_the_bare_class_of_its_code() -> None:
    """As AutoModel opens it; and it is read again."""
    raw = SentenceEncoder(neobert.FORMAT).describe(NEOBERT, "all", ("model",), 96, VOCABULARY)
    assert raw["architectures"] == ["NeoBERT"] and raw["auto_map"]["AutoModel"].endswith(".NeoBERT")
    assert replace(format_of(raw, "file").read(raw, "file").model, init_cutoff=NEOBERT.init_cutoff) == NEOBERT


def test_a_width_that_neoberts_code_would_round_is_refused() -> None:
    """An export of it would not load."""
    (line,) = replace(NEOBERT, intermediate_size=60).mistakes()
    assert line.startswith("model.intermediate_size=60: the published code rounds it to a multiple of 8")
    assert not [*NEOBERT.mistakes()]
