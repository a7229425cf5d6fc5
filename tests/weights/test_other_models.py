"""Initial weights of other encoders and objectives: published models, missing heads, and impossible starts.

If this breaks, a run starts from other weights than it reports, or is refused after it has begun.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modernbert_train.__main__ import main, read_run
from modernbert_train.config.schema import AlbertConfig, BertConfig, ModernBertConfig, SentenceOrderConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.hf_folder import export, load_weights
from modernbert_train.weights.source import find_origin
from tests.support.front_door import Cli
from tests.support.runs import records, weights
from tests.support.sources import STILL, first_weights, run_of
from tests.support.tiny_run import TinyRun

SLOW = pytest.mark.slow
SMALL = {"vocab_size": 512, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
BERT: dict[str, Any] = {"name": "bert", **SMALL, "num_layers": 2, "max_positions": 128, "init_std": 0.1}
ALBERT: dict[str, Any] = {
    "name": "albert", **SMALL, "num_layers": 4, "embedding_size": 16, "max_positions": 128, "init_std": 0.1
}  # fmt: skip
MODERNBERT: dict[str, Any] = {"name": "modernbert", **SMALL, "num_layers": 4, "local_attention": 16, "init_std": 0.1}


def published(kind: Any, folder: Path, tokenizer: Path, **settings: Any) -> Path:
    """Write a model as others publish it: by transformers, with its tokenizer."""
    shape = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = kind.config_class(**{**shape, "intermediate_size": 48, "initializer_range": 0.1, **settings})
    torch.manual_seed(3)
    kind(config).save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def exported(folder: Path, model: dict[str, Any], tokenizer: Path, order: Any = "all") -> Path:
    """Write a model of ours with a pair head, if the format has one."""
    settings = {key: value for key, value in model.items() if key != "name"}
    kinds = {"bert": BertConfig, "modernbert": ModernBertConfig, "albert": AlbertConfig}
    config = kinds[model["name"]](**settings)
    built = build_model(config, SentenceOrderConfig())
    initialize(built, config, seed=11)
    export(built.state_dict(), config, order=order, max_tokens=128, tokenizer_folder=tokenizer, out=folder, card="")
    return folder


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Compare bit by bit, except zeros, which the run's one step moves by its learning rate."""
    expected = {name: tensor for name, tensor in expected.items() if name != "decoder.weight"}
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], expected[name], rtol=0, atol=1e-29) for name in expected
    )


OF_ROBERTA = {"max_position_embeddings": 129, "pad_token_id": 0, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
OF_ALBERT = {"num_hidden_layers": 4, "embedding_size": 16, "max_position_embeddings": 128, "num_hidden_groups": 2}
# class -> its settings, our model and objective, and its dropout
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "BertForMaskedLM": ({"max_position_embeddings": 128}, BERT, "mlm", "0.1"),
    "RobertaForMaskedLM": (OF_ROBERTA, BERT | {"position_offset": 1, "segments": 1, "norm_eps": 1e-5}, "mlm", "0.1"),
    "AlbertForPreTraining": (OF_ALBERT, ALBERT | {"groups": 2}, "sop", "0"),
}


@pytest.mark.runs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name.startswith("Bert") else ()) for name in PUBLISHED]
)
def test_published_models_are_trained_from_there(
    name: str, tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, cli: Cli
) -> None:
    """The first weights equal the published ones, bit by bit, with pooler and classifier if a run of sentence order
    uses them; and training continues from them."""
    theirs, (settings, model, objective, dropout) = getattr(transformers, name), PUBLISHED[name]
    folder = published(theirs, tmp_path / "theirs", tiny_data / "tokenizer", **settings)
    words = run_of(tiny_run(*STILL, f"weights.init_from={folder}"), model, objective)
    said = cli("train", *words).out
    assert same(weights(tmp_path / "runs/tiny"), load_weights(folder))
    assert f"from    weights.init_from={folder}; dropout {dropout}, as there\n" in said, "all weights are used"
    words = run_of(tiny_run(f"weights.init_from={folder}", "name=trained", "phases.long=null"), model, objective)
    cli("train", *words)
    cli("export", tmp_path / "runs/trained")
    theirs.from_pretrained(tmp_path / "runs/trained/hf")


@pytest.mark.runs
def test_a_head_that_is_there_is_taken_and_one_that_is_not_is_drawn(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, cli: Cli
) -> None:
    """BertForPreTraining's pooler and classifier, for any pretraining task; the banner names it."""
    tokenizer = tiny_data / "tokenizer"
    with_head = published(transformers.BertForPreTraining, tmp_path / "with", tokenizer, max_position_embeddings=128)
    without = published(transformers.BertForMaskedLM, tmp_path / "without", tokenizer, max_position_embeddings=128)

    def first(name: str, folder: Path, objective: str, *overrides: str) -> tuple[dict[str, Tensor], str]:
        words = run_of(tiny_run(*STILL, f"weights.init_from={folder}", f"name={name}", *overrides), BERT, objective)
        said = cli("train", *words).out
        return weights(tmp_path / "runs" / name), said

    taken, said = first("taken", with_head, "sop")
    assert same(taken, load_weights(with_head)) and "pair_head" not in said
    left, said = first("left", with_head, "mlm")
    assert "; pair_head there is left out" in said
    assert same(left, {name: t for name, t in load_weights(with_head).items() if not name.startswith("pair_head")})
    drawn, said = first("drawn", without, "sop")
    assert "; no pair_head there, drawn at random" in said
    heads = {name: t for name, t in drawn.items() if name.startswith("pair_head")}
    assert same({name: t for name, t in drawn.items() if name not in heads}, load_weights(without))
    fresh = build_model(BertConfig(**{k: v for k, v in BERT.items() if k != "name"}), SentenceOrderConfig())
    initialize(fresh, fresh.config, seed=5)  # as from scratch, with the run's seed
    assert len(heads) == 4 and same(heads, {name: fresh.state_dict()[name] for name in heads})
    # from a run, as from a folder
    _, said = first("on", tmp_path / "runs/left", "sop")
    assert "; no pair_head there, drawn at random" in said
    assert "drawn at random" in records(tmp_path / "runs/on", "start")[0]["from"]


@pytest.mark.runs
def test_a_decoder_may_become_an_encoder_and_that_is_reported(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, cli: Cli
) -> None:
    """The same weights in another order: allowed, and always reported."""
    decoder = exported(tmp_path / "decoder", MODERNBERT, tiny_data / "tokenizer", "causal")
    words = run_of(tiny_run(*STILL, f"weights.init_from={decoder}"), MODERNBERT)
    assert "; a decoder, trained in causal order, and objective.name=mlm here" in cli("train", *words).out
    assert same(weights(tmp_path / "runs/tiny"), load_weights(decoder))
    encoder = exported(tmp_path / "encoder", MODERNBERT, tiny_data / "tokenizer")
    words = run_of(tiny_run(*STILL, f"weights.init_from={encoder}", "name=other"), MODERNBERT, "causal")
    assert "; an encoder, trained to see both sides, and objective.name=causal here" in cli("train", *words).out
    assert same(weights(tmp_path / "runs/other"), load_weights(encoder))
    words = run_of(tiny_run(*STILL, f"weights.init_from={decoder}", "name=on"), MODERNBERT, "causal")
    assert "decoder, trained" not in cli("train", *words).out
    # this includes a run that ended in causal order
    words = run_of(tiny_run(*STILL, f"weights.init_from={tmp_path / 'runs/on'}", "name=back"), MODERNBERT)
    assert "a decoder, trained in causal order" in cli("train", *words).out


@pytest.mark.runs
def test_another_encoder_is_refused_by_both_names(tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, cli: Cli) -> None:
    """Not by the first size that happens to differ, and never by a traceback."""
    tokenizer = tiny_data / "tokenizer"
    bert = exported(tmp_path / "bert", BERT, tokenizer)
    modernbert = exported(tmp_path / "modernbert", MODERNBERT, tokenizer)
    for here, there, folder in (("modernbert", "bert", bert), ("bert", "modernbert", modernbert)):
        model = {"modernbert": MODERNBERT, "bert": BERT}[here]
        said = cli("train", *run_of(tiny_run(*STILL, f"weights.init_from={folder}"), model), code=78).err
        assert f"of another architecture:\n  model.name={here} here, {there} there\nSet model.name={there}" in said
        assert (
            f"model.name={here} here, {there} there, and only a modernbert can grow"
            in cli("train", *run_of(tiny_run(*STILL, f"weights.grow_from={folder}"), model), code=78).err
        )
    assert not (tmp_path / "runs/tiny").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.activation=gelu_tanh", "model.activation=gelu_tanh here, gelu there"),
        ("model.max_positions=256", "model.max_positions=256 here, 128 there"),
        ("model.segments=3", "model.segments=3 here, 2 there"),
        ("model.norm_eps=1e-5", "model.norm_eps=1e-05 here, 1e-12 there"),
    ],
)
def test_every_key_that_the_weights_depend_on_is_compared(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, cli: Cli, override: str, message: str
) -> None:
    """If only shapes were compared, another activation would pass."""
    bert = exported(tmp_path / "bert", BERT, tiny_data / "tokenizer")
    words = run_of(tiny_run(*STILL, f"weights.init_from={bert}", override), BERT)
    assert message in cli("train", *words, code=78).err


@pytest.mark.runs
def test_a_classifier_begins_with_the_pooler_of_a_model_of_pairs(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path
) -> None:
    """As transformers does: on small tasks, a random matrix instead costs accuracy."""
    bert = exported(tmp_path / "bert", BERT, tiny_data / "tokenizer")
    labels = ("objective.labels=[no,yes]", "objective.pooling=cls")
    config = read_run([*run_of(tiny_run(f"weights.init_from={bert}"), BERT, "classify"), *labels])
    origin = find_origin(config)
    assert origin is not None and origin.left_out == ("decoder", "head", "pair_head")
    assert origin.drawn == ("classifier",)
    model = build_model(config.model, config.objective)
    origin.fill(model)
    there = load_weights(bert)
    assert same({name: model.state_dict()[f"pooler.dense.{name}"] for name in ("weight", "bias")},
                {name: there[f"pair_head.dense.{name}"] for name in ("weight", "bias")})  # fmt: skip


def test_what_only_training_knows_is_not_compared(tiny_run: TinyRun, tiny_data: Path, tmp_path: Path) -> None:
    """Dropout and initialisation belong to the new run."""
    bert = exported(tmp_path / "bert", BERT, tiny_data / "tokenizer")
    other = ("model.dropout=0.3", "model.init_std=0.5", "model.init_cutoff=1")
    origin = find_origin(read_run(run_of(tiny_run(f"weights.init_from={bert}", *other), BERT)))
    assert origin is not None and origin.left_out == ("pair_head",) and origin.drawn == ()


@pytest.mark.runs
def test_a_branch_needs_the_same_heads(tiny_run: TinyRun, tmp_path: Path, cli: Cli) -> None:
    """Moments of a missing head cannot be kept; weights only can be."""
    cli("train", *run_of(tiny_run(*STILL), BERT))
    words = tiny_run(*STILL, f"start.checkpoint={tmp_path / 'runs/tiny'}", "name=branch")
    said = cli("train", *run_of(words, BERT, "sop"), code=78).err
    assert "has the heads tokens, and objective.name=sop here needs tokens, pair. Use weights.init_from" in said
    assert not (tmp_path / "runs/branch").exists()


@pytest.mark.runs
def test_a_decoder_reads_what_stands_before_the_mask(tiny_data: Path, tmp_path: Path, cli: Cli) -> None:
    """Later tokens have no effect; earlier ones do."""
    decoder = exported(tmp_path / "decoder", MODERNBERT, tiny_data / "tokenizer", "causal")
    lines = cli("fill", decoder, "ab [MASK] c", "ab [MASK] x y", "xy [MASK] c").out.splitlines()[1::2]
    assert lines[0] == lines[1] != lines[2]


@pytest.mark.runs
def test_a_model_without_its_head_fills_nothing(
    tiny_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would draw the head at random, and the predictions would be meaningless."""
    bare = published(transformers.BertModel, tmp_path / "bare", tiny_data / "tokenizer", max_position_embeddings=128)
    assert main(["fill", str(bare), "a [MASK]"]) == 65
    assert "bare: lacks decoder, head, which predicting tokens needs" in capfd.readouterr().err


@pytest.mark.runs
@pytest.mark.parametrize("sharing", [pytest.param("attention", marks=SLOW), "ffn"])
def test_equal_tensors_of_a_folder_are_one_in_a_run_that_shares_them(
    sharing: str, tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, cli: Cli
) -> None:
    """config.json cannot describe it, so the run must; tensors that differ are refused, not averaged or dropped."""
    folder = exported(tmp_path / "hf", ALBERT | {"sharing": sharing}, tiny_data / "tokenizer")
    words = run_of(tiny_run(*STILL, f"weights.init_from={folder}"), ALBERT | {"sharing": sharing}, "sop")
    found = first_weights(words, tmp_path / "runs/tiny")
    config = AlbertConfig(**{key: value for key, value in ALBERT.items() if key != "name"}, sharing=sharing)  # type: ignore[arg-type]
    assert same(found, load_weights(folder, config)) and len(found) < len(load_weights(folder)) - 1

    other = {"attention": "ffn", "ffn": "attention"}[sharing]
    words = run_of(tiny_run(*STILL, f"weights.init_from={folder}", "name=other"), ALBERT | {"sharing": other}, "sop")
    assert "and layers of this model share them. Set sharing to share less" in cli("train", *words, code=65).err
    words = run_of(tiny_run(*STILL, f"weights.init_from={folder}", "name=all"), ALBERT, "sop")
    assert "model.sharing=all here, none there" in cli("train", *words, code=78).err


@pytest.mark.runs
def test_a_distilbert_begins_with_layers_of_a_bert(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, cli: Cli
) -> None:
    """The output says which layers; heads of pairs are left out."""
    kind = transformers.BertForPreTraining
    settings = {"num_hidden_layers": 4, "max_position_embeddings": 128}
    teacher = published(kind, tmp_path / "teacher", tiny_data / "tokenizer", **settings)
    model = {**BERT, "name": "distilbert", "num_layers": 2}
    words = run_of(tiny_run(*STILL, f"weights.shrink_from={teacher}"), model)
    said = cli("train", *words).out
    found, there = weights(tmp_path / "runs/tiny"), load_weights(teacher)
    assert f"weights.shrink_from={teacher}: layers 0, 3 of 4, its first token type added to the positions;" in said
    assert "; pair_head there is left out" in said
    assert torch.equal(found["model.layers.1.attn.Wqkv.weight"], there["model.layers.3.attn.Wqkv.weight"])
    assert torch.equal(found["head.dense.weight"], there["head.dense.weight"])
    assert (
        "only masked-language models are shrunk."
        in cli("train", *run_of(tiny_run(*STILL, f"weights.shrink_from={teacher}", "name=b"), BERT, "rtd"), code=78).err
    )
