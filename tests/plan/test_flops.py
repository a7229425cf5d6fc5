"""FLOPs, the basis of MFU, hours and cost, compared with torch's counter on the real model and with explicit masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.batches import mean_loss
from modernbert_train.batch import Batch
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    CausalLmConfig,
    DebertaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
    PermutationLmConfig,
    ReplacedTokensConfig,
    SentenceOrderConfig,
    XLNetConfig,
)
from modernbert_train.models.attention.visible import QUERY_BLOCK, Visible
from modernbert_train.models.build import build_model
from modernbert_train.models.replaced import DRAWS, TOKENS
from modernbert_train.models.sop import ORDER, PAIRS
from modernbert_train.objectives.permutation import PermutationLM
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import flops_per_token, mean_keys, mean_spans
from tests.support.mlm_lines import VOCABULARY, text_of
from tests.support.plan_batches import counting_flops, make_batch

BASE = ModernBertConfig(vocab_size=2048, num_layers=4, attention_out_dropout=0.0)  # two layers of each kind
TINY = replace(BASE, vocab_size=512, hidden_size=32, num_heads=2, intermediate_size=48, local_attention=16)
LARGE = ModernBertConfig(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)
BERT = BertConfig(vocab_size=512, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=48, dropout=0.0)
ALBERT = AlbertConfig(
    vocab_size=512, embedding_size=16, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48, groups=2
)
LOCAL: dict[str, ModelConfig] = {
    "wide windows": replace(BASE, hidden_size=192, num_heads=3, intermediate_size=288),
    "tiny": TINY,
}
GLOBAL: dict[str, ModelConfig] = {
    "modernbert": replace(TINY, global_attn_every_n_layers=1),
    "bert": BERT,
    "albert": ALBERT,
    "albert, ffn shared": replace(ALBERT, sharing="ffn", groups=1),
}
EACH_GLOBAL = pytest.mark.parametrize("config", GLOBAL.values(), ids=[*GLOBAL])
MLM = MaskedLmConfig()


def counted(config: ModelConfig, batch: Batch) -> tuple[float, float]:
    """Return torch's count per token of masked tokens: forward, and forward with backward."""
    model, tokens = build_model(config, MLM), len(batch.packed.input_ids_T)
    with counting_flops() as forward, torch.no_grad():
        model(batch, figures=True)  # in training the loss computes its gradients in the forward pass
    with counting_flops() as training:
        mean_loss(model, batch).backward()
    return forward.get_total_flops() / tokens, training.get_total_flops() / tokens


def trained(model: torch.nn.Module, batch: Batch) -> float:
    """Return torch's count per token of a step on all its loss terms."""
    with counting_flops() as training:
        sum(model(batch).losses.values()).backward()
    return training.get_total_flops() / len(batch.packed.input_ids_T)


@pytest.mark.runs
@pytest.mark.parametrize("name", [*LOCAL, *GLOBAL])
def test_flops_equal_torchs_counter(name: str) -> None:
    """With only global layers the kernel computes exactly the counted pairs. In local layers it computes a block of
    queries with all keys around it and discards those outside the window; the test adds these keys. Their documents
    fill the kernel's blocks, so nothing is computed for padding; one is so long that blocks are cut."""
    config = (LOCAL | GLOBAL)[name]
    lengths, predicted = ([512, 64, 192], 230) if name in LOCAL else ([33, 7, 100], 40)
    model = census(config)
    spans = mean_spans(lengths, model)
    if isinstance(config, ModernBertConfig):
        spans = replace(spans, local=QUERY_BLOCK + 2 * config.half_window)
    flops = flops_per_token(model, spans, {"tokens": predicted / sum(lengths)})
    forward, training = counted(config, make_batch(lengths, predicted))
    assert flops.forward == pytest.approx(forward, rel=0.001)
    assert flops.training == pytest.approx(training, rel=0.001)


@pytest.mark.runs
def test_distances_are_scored_too() -> None:
    """One more product for each visible pair. The kernel computes more: each query meets all distances of its sequence,
    nearly two for each key; and a microbatch computes the keys of distances once, which is not counted per token."""
    config = XLNetConfig(vocab_size=512, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=48)
    lengths, model, width, layers = [33, 7, 100], census(config), 32, 3
    tokens, longest = sum(lengths), max(lengths)
    flops = flops_per_token(model, mean_spans(lengths, model), {"tokens": 40 / tokens})
    pairs = sum(n * n for n in lengths)
    assert flops.global_attention == pytest.approx(3 * 2 * width * layers * pairs / tokens)
    farther = sum(n * (n - 1) for n in lengths)  # distances that a query meets in addition to its keys
    once = (2 * longest - 1) * 2 * width * width
    beyond = layers * (2 * width * farther + once) / tokens
    forward, _ = counted(config, make_batch(lengths, 40))
    assert flops.forward + beyond == pytest.approx(forward, rel=1e-3)


@pytest.mark.runs
def test_content_and_distances_are_scored_apart() -> None:
    """Two more products for each visible pair, for any sharing of distances; the table meets the matrices of queries,
    keys and (unused) values once a microbatch."""
    config = DebertaConfig(
        vocab_size=512, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=48, buckets=8, max_distance=16
    )
    lengths, model, width, layers = [33, 7, 100], census(config), 32, 3
    tokens = sum(lengths)
    flops = flops_per_token(model, mean_spans(lengths, model), {"tokens": 40 / tokens})
    pairs = sum(n * n for n in lengths)
    assert flops.global_attention == pytest.approx(4 * 2 * width * layers * pairs / tokens)
    rows = {33: 16, 7: 11, 100: 16}  # distances of a sequence, instead of its keys: -8 to 7, -5 to 5
    fewer = 2 * 2 * width * sum(n * (n - rows[n]) for n in lengths)
    once = 16 * 2 * width * 3 * width
    forward, _ = counted(config, make_batch(lengths, 40))
    assert flops.forward + layers * (once - fewer) / tokens == pytest.approx(forward, rel=1e-3)


@pytest.mark.runs
@EACH_GLOBAL
def test_every_token_is_predicted_in_causal_order(config: ModelConfig) -> None:
    """The plain formula computes all pairs and hides half of them; only the visible half counts."""
    lengths, objective, model = [33, 7, 100], CausalLmConfig(), census(config, CausalLmConfig())
    tokens = sum(lengths)
    uses = objective.uses_of_heads(tokens / len(lengths))
    assert uses["tokens"] * tokens == pytest.approx(tokens - len(lengths))  # all but the last token of each
    batch = make_batch(lengths, tokens - len(lengths))
    computed = flops_per_token(model, mean_spans(lengths, model), uses)
    forward, training = counted(config, replace(batch, packed=replace(batch.packed, order="causal")))
    assert (computed.forward, computed.training) == pytest.approx((forward, training), rel=1e-3)
    seen = flops_per_token(model, mean_spans(lengths, model, "causal"), uses)
    pairs = [n * (n + 1) / 2 for n in lengths]
    assert seen.global_attention == pytest.approx(4 * 32 * len(model.windows) * sum(pairs) / tokens)
    assert (seen.layers, seen.head) == (computed.layers, computed.head)


@EACH_GLOBAL
def test_a_head_for_pairs_counts_the_pairs(config: ModelConfig) -> None:
    lengths, objective = [33, 7, 100], SentenceOrderConfig()
    batch, model = make_batch(lengths, 40), census(config, objective)
    targets = {**batch.targets, PAIRS: torch.tensor([0, 33, 40]), ORDER: torch.tensor([0, 1, 0])}
    uses = {"tokens": 40 / sum(lengths), "pair": 3 / sum(lengths)}
    assert objective.uses_of_heads(sum(lengths) / 3)["pair"] == pytest.approx(uses["pair"])
    flops = flops_per_token(model, mean_spans(lengths, model), uses)
    found = trained(build_model(config, objective), replace(batch, targets=targets))
    assert flops.training == pytest.approx(found, rel=0.001)


@pytest.mark.runs
@pytest.mark.parametrize(
    "objective",
    [
        ReplacedTokensConfig(generator_width=0.5),
        ReplacedTokensConfig(sharing="none", generator_width=0.5),
        ReplacedTokensConfig(sharing="gdes"),
        ReplacedTokensConfig(sharing="gdes", mlm_head=True),
        ReplacedTokensConfig(generator_width=0.5, mlm_head=True),
    ],
    ids=lambda objective: f"{objective.sharing}{'-mlm' * objective.mlm_head}",
)
def test_a_generator_counts_beside_the_model(objective: ReplacedTokensConfig) -> None:
    """Both read every token; the generator predicts the replaced ones, the model judges all. In phases of masked tokens
    only the generator's head for tokens counts."""
    lengths, config = [33, 7, 100], BERT
    batch, model = make_batch(lengths, 40), census(config, objective)
    targets = {**batch.targets, DRAWS: torch.arange(40) << 20, TOKENS: torch.ones(140, dtype=torch.long)}
    uses = {"generator": 40 / sum(lengths), "replaced": 1.0} | dict.fromkeys(objective.idle_heads, 0.0)
    flops = flops_per_token(model, mean_spans(lengths, model), uses)
    real = build_model(config, objective)
    found = trained(real, replace(batch, targets=targets, counts={"mlm": 40, "rtd": 140}))
    assert flops.training == pytest.approx(found, rel=0.001)
    if objective.mlm_head:
        alone = census(config, MaskedLmConfig())
        flops = flops_per_token(alone, mean_spans(lengths, alone), {"tokens": 40 / sum(lengths)})
        assert flops.training == pytest.approx(trained(real, batch), rel=0.001)


@pytest.mark.parametrize("order", ["all", "causal"])
def test_spans_equal_masks_written_out(order: Order) -> None:
    """Windows are cut at both ends of a document, documents do not see each other, and boundaries are inclusive."""
    lengths, side = [1, 8, 9, 10, 17, 40], 8
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    same = document[:, None] == document
    visible, back = Visible.around(side, order), place[:, None] - place

    def mean_seen(window: bool) -> float:
        before, after = (len(place) if each < 0 else each for each in visible.sides(window))
        return (same & (back <= before) & (-back <= after)).sum(1).double().mean().item()

    assert mean_keys(lengths, None, order) == pytest.approx(mean_seen(False))
    assert mean_keys(lengths, side, order) == pytest.approx(mean_seen(True))
    spans = mean_spans(lengths, census(TINY), order)
    assert (spans.whole, spans.local) == (pytest.approx(mean_seen(False)), pytest.approx(mean_seen(True)))


@pytest.mark.runs
def test_spans_of_a_permuted_order_equal_masks_written_out() -> None:
    """Averaged over many orders, per token of text; a window hides about the same share of them."""
    lengths, side, config = [62] * 40, 8, PermutationLmConfig()
    inputs = PermutationLM(config, VOCABULARY).make(text_of([n - 2 for n in lengths]), config)
    given, tokens = inputs.given, sum(lengths)
    assert given is not None
    sequence = np.searchsorted(given.boundaries, np.arange(len(given.ranks_T)), side="right")
    seen = (sequence[:, None] == sequence) & (given.ranks_T < given.limits_T[:, None])
    near = np.abs(given.position_ids_T[:, None] - given.position_ids_T) <= side
    share = config.query_share
    assert mean_keys(lengths, None, "given", share) == pytest.approx(seen.sum() / tokens, rel=0.02)
    assert mean_keys(lengths, side, "given", share) == pytest.approx((seen & near).sum() / tokens, rel=0.08)
    encoded = config.encoded_tokens(62)
    assert encoded * tokens == pytest.approx(tokens + inputs.counts["permutation"], rel=0.01)
    model = census(TINY, config)
    plain, more = (flops_per_token(model, mean_spans(lengths, model), {"tokens": 0.2}, each) for each in (1, encoded))
    assert more.layers == pytest.approx(encoded * plain.layers) and more.head == plain.head


@pytest.mark.parametrize(
    ("config", "length", "gflop"),
    [
        (ModernBertConfig(), 1024, 0.8241),
        (ModernBertConfig(), 8192, 1.3530),
        (LARGE, 1024, 2.3071),
        (LARGE, 8192, 3.1887),
        (BertConfig(), 512, 0.6095),
    ],
)
def test_the_published_sizes_by_hand(config: ModelConfig, length: int, gflop: float) -> None:
    """Computed by hand once: one document a row, 30 % predicted."""
    flops = flops_per_token(census(config), mean_spans([length], census(config)), {"tokens": 0.3})
    assert flops.training / 1e9 == pytest.approx(gflop, abs=1e-4)
