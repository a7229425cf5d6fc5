"""Growing a model. A mistake here stays invisible: the large model starts worse and trains anyway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.tiling import Mode, check_growth, grow, layer_sources, tiled_index
from tests.support.encoder_training import small
from tests.support.encoders import build

BASE = ModernBertConfig()
LARGE = ModernBertConfig(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)
# the published rows of base -> large: for each of 28 layers, the layer of base
PAPER_LAYERS = [0, 1, 2, 2, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 13, 13, 14, 15, 16, 16, 17, 18, 19, 20, 20, 21]


def by_rule(old: Tensor, rows: int, columns: int) -> Tensor:
    """The rule itself on both axes: new[j] = old[(j - o) mod old], o = (new - old) // 2."""
    height, width = old.shape
    from_rows = [(i - (rows - height) // 2) % height for i in range(rows)]
    from_columns = [(j - (columns - width) // 2) % width for j in range(columns)]
    return old[from_rows][:, from_columns]


def test_the_published_examples() -> None:
    """Three numbers to eight, and nine in a square to twenty-five: the rows that the reference's own test pins."""
    assert torch.tensor([1, 2, 3])[tiled_index(3, 8)].tolist() == [2, 3, 1, 2, 3, 1, 2, 3]
    square = torch.arange(1, 10).view(3, 3)
    index = tiled_index(3, 5)
    assert square[index][:, index].tolist() == [
        [9, 7, 8, 9, 7],
        [3, 1, 2, 3, 1],
        [6, 4, 5, 6, 4],
        [9, 7, 8, 9, 7],
        [3, 1, 2, 3, 1],
    ]


def test_heads_stay_whole_where_the_middle_would_cut_them() -> None:
    """12 heads to 15: the middle starts 96 values in, one and a half heads; by heads it starts after the first."""
    heads = torch.arange(12).repeat_interleave(64)
    assert heads[tiled_index(768, 960)].view(15, 64)[1].unique().tolist() == [0, 11]
    whole = heads[tiled_index(768, 960, unit=64)].view(15, 64)
    assert (whole == whole[:, :1]).all()
    assert whole[:, 0].tolist() == [11, *range(12), 0, 1]
    assert torch.equal(tiled_index(768, 1024, 64), tiled_index(768, 1024))  # the released sizes happen to fit


def test_published_layers_and_the_kinds_they_mix() -> None:
    """The table of base -> large, and why it is not the default: 12 layers learn from the other kind of attention."""
    assert layer_sources(BASE, LARGE, "paper") == PAPER_LAYERS
    assert sum(BASE.is_global(source) != LARGE.is_global(layer) for layer, source in enumerate(PAPER_LAYERS)) == 12


@pytest.mark.parametrize(("old", "new"), [(1, 1), (4, 4), (4, 7), (4, 13), (7, 10), (7, 40), (22, 28), (22, 61)])
def test_fitted_layers_of_any_depth(old: int, new: int) -> None:
    """Every layer from its own kind, in order, the first from the first, the last from the last, none used far more
    often than another."""
    configs = [replace(BASE, num_layers=depth) for depth in (old, new)]
    sources = layer_sources(*configs, "fitted")
    assert sources[0] == 0 and sources[-1] == old - 1
    for kind in (True, False):
        taken = [source for layer, source in enumerate(sources) if BASE.is_global(layer) is kind]
        assert taken == sorted(taken)
        assert set(taken) == {layer for layer in range(old) if BASE.is_global(layer) is kind}
        inner = [taken.count(source) for source in sorted(set(taken))[1:-1]]
        assert not inner or max(inner) - min(inner) <= 1


@pytest.mark.runs
def test_each_weight_of_a_grown_model_worked_by_hand() -> None:
    """Fused matrices part by part, each axis by its own offset, heads whole, norms, embedding and head by width."""
    old = small(hidden_size=96, num_heads=3, num_layers=4, intermediate_size=40)
    new = small(hidden_size=128, num_heads=4, num_layers=4, intermediate_size=56)
    state = build(old).state_dict()
    grown = grow(state, old, new)
    layer = "model.layers.2."

    def heads(part: Tensor) -> Tensor:  # of 3 heads of 32 rows, before the first of which nothing fits: 0 1 2 0
        return torch.cat((part, part[:32]))

    q, k, v = state[f"{layer}attn.Wqkv.weight"].split(96)
    expected = torch.cat([by_rule(heads(part), 128, 128) for part in (q, k, v)])
    assert torch.equal(grown[f"{layer}attn.Wqkv.weight"], expected)
    wo = state[f"{layer}attn.Wo.weight"]
    assert torch.equal(grown[f"{layer}attn.Wo.weight"], by_rule(heads(wo.T).T, 128, 128))
    value, gate = state[f"{layer}mlp.Wi.weight"].split(40)
    expected = torch.cat((by_rule(value, 56, 128), by_rule(gate, 56, 128)))
    assert torch.equal(grown[f"{layer}mlp.Wi.weight"], expected)
    assert torch.equal(grown[f"{layer}mlp.Wo.weight"], by_rule(state[f"{layer}mlp.Wo.weight"], 128, 56))
    assert torch.equal(grown["head.dense.weight"], by_rule(state["head.dense.weight"], 128, 128))
    embedding = "model.embeddings.tok_embeddings.weight"
    assert torch.equal(grown[embedding], by_rule(state[embedding], 160, 128))
    assert grown["decoder.weight"] is grown[embedding]
    assert torch.equal(grown["decoder.bias"], state["decoder.bias"])
    norms = [name for name in grown if name.endswith("norm.weight")]
    assert len(norms) == 3 + 2 * 4 - 1
    for name in norms:
        assert torch.equal(grown[name], by_rule(state[name][None], 1, 128)[0]), name


@pytest.mark.runs
def test_published_growth_of_a_whole_model() -> None:
    """Layers by depth for any kind, heads cut at the middle, a final norm that restarts at one."""
    old = small(hidden_size=64, num_heads=2, num_layers=4, intermediate_size=40)
    new = small(hidden_size=96, num_heads=3, num_layers=7, intermediate_size=56)
    state = build(old).state_dict()
    grown = grow(state, old, new, "paper")
    assert not torch.equal(state["model.final_norm.weight"], torch.ones(64))
    assert torch.equal(grown["model.final_norm.weight"], torch.ones(96))
    sources = [0, 1, 1, 2, 2, 3, 3]  # round(4 i / 7)
    for layer, source in enumerate(sources):
        ours, theirs = (f"model.layers.{number}." for number in (layer, source))
        q, k, v = state[f"{theirs}attn.Wqkv.weight"].split(64)
        expected = torch.cat([by_rule(part, 96, 96) for part in (q, k, v)])
        assert torch.equal(grown[f"{ours}attn.Wqkv.weight"], expected), layer
        expected = by_rule(state[f"{theirs}mlp.Wo.weight"], 96, 56)
        assert torch.equal(grown[f"{ours}mlp.Wo.weight"], expected), layer


def test_a_layer_taken_from_the_first_gets_a_norm_of_ones() -> None:
    """The first layer lacks an attn_norm to copy; the one that stays first must not get one either."""
    old, new = small(num_layers=4), small(num_layers=13)
    grown = grow(build(old).state_dict(), old, new)
    assert layer_sources(old, new, "fitted")[:13:3] == [0, 0, 3, 3, 3]
    assert "model.layers.0.attn_norm.weight" not in grown
    assert torch.equal(grown["model.layers.3.attn_norm.weight"], torch.ones(64))


LARGER = {"hidden_size": 768 + 64, "num_heads": 13}


@pytest.mark.parametrize(
    ("changes", "mode", "message"),
    [
        ({"hidden_size": 704, "num_heads": 11}, "fitted", r"model\.hidden_size=704, grown from 768: cannot shrink"),
        ({"vocab_size": 50432}, "fitted", r"model\.vocab_size=50432, grown from 50368: must be the same"),
        ({"hidden_size": 1024}, "fitted", r"model\.hidden_size/num_heads=85, grown from 64: must be the same"),
        ({"local_attention": 256}, "fitted", r"model\.local_attention=256, grown from 128: must be the same"),
        ({"num_layers": 28}, "paper", r"model\.hidden_size=768, grown from 768: the published code refuses an equal"),
        (LARGER | {"num_layers": 44}, "paper", r"num_layers=44, grown from 22: .*layer 22.*grow_mode=fitted"),
    ],
)
def test_what_cannot_grow_is_refused_with_both_values(changes: dict[str, Any], mode: Mode, message: str) -> None:
    """Twice the layers from an even number ends on the published rounding too: round(21.5) is 22."""
    with pytest.raises(ConfigError, match=message):
        check_growth(BASE, replace(BASE, **changes), mode)


def test_the_published_rounding_where_it_works_and_where_it_ends() -> None:
    """6 -> 14 is an IndexError in the reference; 3 -> 6 ends on round(2.5), which is 2."""
    wide = replace(BASE, **LARGER)
    three, six, fourteen = (replace(BASE, num_layers=depth) for depth in (3, 6, 14))
    assert layer_sources(three, six, "paper") == [0, 0, 1, 2, 2, 2]
    check_growth(three, replace(wide, num_layers=6), "paper")
    with pytest.raises(ConfigError, match=r"num_layers=14, grown from 6: .*needs layer 6"):
        check_growth(six, replace(wide, num_layers=14), "paper")
    check_growth(six, replace(wide, num_layers=14), "fitted")
    assert max(layer_sources(six, fourteen, "fitted")) < 6
