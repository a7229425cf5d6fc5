"""Generator and discriminator: compared with transformers' ELECTRA, and the training of shared parameters.

A user would lose: an ELECTRA that matches the published one, tokens drawn from the generator's distribution, or
embeddings that only the intended loss trains.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.batches import lay_out
from modernbert_train.batch import IGNORED_LABEL, Batch, Sums
from modernbert_train.config.schema import BertConfig, ComputeConfig, MaskedLmConfig, ModelConfig, ReplacedTokensConfig
from modernbert_train.models import attention
from modernbert_train.models.build import build_model
from modernbert_train.models.heads import ChunkedLoss, loss_and_gradient, sample
from modernbert_train.models.init import initialize
from modernbert_train.models.replaced import (
    DRAWS,
    PROJECTION,
    TOKENS,
    ForReplacedTokens,
    discriminator_of,
    generator_of,
)
from modernbert_train.weights.formats.electra import FORMAT
from modernbert_train.weights.formats.tensors import to_hf
from modernbert_train.weights.gather import load_weights
from tests.support import encoders
from tests.support.encoder_training import opaque_attention

BERT, MODERN = (replace(each, init_std=0.4) for each in (encoders.BERT, encoders.MODERNBERT))
ALBERT = replace(encoders.ALBERT, group_layers=2, init_std=0.4)
BOUNDARIES = (0, 40, 64)
MASK, PADS = 3, 4


def built(model: ModelConfig, **objective: Any) -> ForReplacedTokens:
    made = build_model(model, ReplacedTokensConfig(**objective), ComputeConfig(attention="sdpa"))
    initialize(made, model, seed=3)
    drawn = torch.Generator().manual_seed(4)
    for name, parameter in made.named_parameters():  # norms, biases and differences that a test could miss at 0 and 1
        if parameter.dim() == 1 or "delta" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=drawn)
    assert isinstance(made, ForReplacedTokens)
    return made.eval()


def batch_of() -> Batch:
    """Two sequences and a tail of pads; 12 positions are replaced, 4 places are spare."""
    drawn = torch.Generator().manual_seed(1)
    original_T = torch.randint(5, 160, (64 + PADS,), generator=drawn)
    positions_M = torch.randperm(64, generator=drawn)[:12].sort().values
    labels_M, ids_T = original_T[positions_M], original_T.clone()
    ids_T[positions_M[:10]] = MASK
    targets = {
        "positions_M": F.pad(positions_M, (0, 4)),
        "labels_M": F.pad(labels_M, (0, 4), value=IGNORED_LABEL),
        DRAWS: F.pad(torch.randint(0, 1 << 31, (12,), generator=drawn), (0, 4)),
        TOKENS: F.pad(torch.ones(64, dtype=torch.long), (0, PADS)),
    }
    packed = lay_out(ids_T, [*BOUNDARIES, 64 + PADS])
    return Batch(packed, targets, {"mlm": 12, "rtd": 64}, 64, 1)


def drawn_by(model: ForReplacedTokens, batch: Batch) -> Tensor:
    with torch.no_grad():
        states_MD = model.generator.encode(batch.packed, batch.targets["positions_M"])
        found = model.generator.predict(states_MD, batch, False, batch.targets[DRAWS])[1]
    assert found is not None
    return found[:12]


def electra(model: ForReplacedTokens, kind: type, part: ModelConfig, weights: dict[str, Tensor]) -> Any:
    assert isinstance(part, BertConfig)
    wide = weights[PROJECTION].shape[1] if PROJECTION in weights else part.hidden_size
    twin = kind(
        transformers.ElectraConfig(
            vocab_size=part.vocab_size, embedding_size=wide, hidden_size=part.hidden_size, hidden_act="gelu",
            num_hidden_layers=part.num_layers, num_attention_heads=part.num_heads, layer_norm_eps=part.norm_eps,
            intermediate_size=part.intermediate_size, max_position_embeddings=part.max_positions,
            attn_implementation="eager",
        )
    )  # fmt: skip
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    missing, unexpected = twin.load_state_dict(to_hf(FORMAT, weights, part, shapes), strict=False)
    assert not unexpected and set(missing) <= {"generator_lm_head.weight"}
    return twin.eval()


SHARED = [
    {"sharing": "embeddings", "generator_width": 0.5},
    {"sharing": "embeddings", "generator_width": 1.0, "generator_depth": 0.5},
    {"sharing": "none", "generator_width": 0.25},
    {"sharing": "gdes"},
]


EACH = pytest.mark.parametrize(
    ("config", "objective"), [*((BERT, each) for each in SHARED), (MODERN, SHARED[3]), (ALBERT, SHARED[0])]
)


@pytest.mark.parametrize("objective", SHARED, ids=lambda o: f"{o['sharing']}-{o.get('generator_width', 1)}")
@pytest.mark.parametrize("figures", [False, True])
def test_losses_equal_transformers_electra(objective: dict[str, Any], figures: bool) -> None:
    """Given the same samples: the generator's sum over replaced positions, the discriminator's over all tokens but
    pads, each sequence alone there."""
    model, batch = built(BERT, **objective), batch_of()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    small = ReplacedTokensConfig(**objective).generator_of(BERT)
    generator = electra(model, transformers.ElectraForMaskedLM, small, generator_of(weights))
    told = electra(model, transformers.ElectraForPreTraining, BERT, discriminator_of(weights))
    with torch.no_grad():
        sums: Sums = model(batch, figures=figures)
        ids_T = batch.packed.input_ids_T
        positions_M, labels_M = (batch.targets[name][:12] for name in ("positions_M", "labels_M"))
        original_T, read_T = ids_T.clone(), ids_T.clone()
        original_T[positions_M], read_T[positions_M] = labels_M, drawn_by(model, batch)
        mlm, rtd, hits = 0.0, 0.0, 0
        for start, end in itertools.pairwise(BOUNDARIES):
            labels_T = torch.full((end - start,), IGNORED_LABEL)
            here = (positions_M >= start) & (positions_M < end)
            labels_T[positions_M[here] - start] = labels_M[here]
            alone = generator(input_ids=ids_T[None, start:end], labels=labels_T[None])
            mlm += float(alone.loss) * int(here.sum())
            replaced_T = (read_T != original_T)[start:end].long()
            both = told(input_ids=read_T[None, start:end], labels=replaced_T[None])
            rtd += float(both.loss) * (end - start)
            hits += int(((both.logits[0] > 0) == replaced_T.bool()).sum())
    assert float(sums.losses["mlm"]) == pytest.approx(mlm, rel=1e-6, abs=1e-6)
    assert float(sums.losses["rtd"]) == pytest.approx(rtd, rel=1e-6, abs=1e-6)
    assert (read_T != original_T).sum() > 6, "something must have been replaced"
    if figures:
        assert int(sums.figures["rtd/hits"]) == hits
        assert int(sums.figures["rtd/replaced"]) == int((read_T != original_T).sum())
        assert "mlm/hits" in sums.figures


@EACH
def test_gradients_reach_what_they_should_and_nothing_else(config: ModelConfig, objective: dict[str, Any]) -> None:
    """No gradient flows through sampled tokens: of the generator, detection trains only modules shared without a
    difference. With gdes the tables get the generator's gradient alone and the differences the detection's, exactly."""
    model, batch = built(config, **objective), batch_of()

    def reached(term: str) -> set[str]:
        model.zero_grad()
        model(batch).losses[term].backward()
        return {name for name, p in model.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}

    names = {name for name, _ in model.named_parameters()}
    own = {name for name in names if name.startswith("generator.")}
    shared = {n for n in names if n.startswith("model.embeddings.")} if objective["sharing"] == "embeddings" else set()
    assert reached("mlm") == own | shared
    assert reached("rtd") == names - own
    model.zero_grad()
    losses = model(batch).losses
    (losses["mlm"] + 50 * losses["rtd"]).backward()
    assert all(p.grad is not None for p in model.parameters()), "under DDP each must have one in every step"


@pytest.mark.parametrize("config", [BERT, MODERN, ALBERT], ids=lambda c: c.name)
def test_a_difference_begins_at_zero_and_is_added_in(config: ModelConfig) -> None:
    """A gdes model begins with the generator's embeddings, and the export computes the trained function."""
    made = build_model(config, ReplacedTokensConfig(sharing="gdes"), ComputeConfig(attention="sdpa"))
    initialize(made, config, seed=3)
    tables = [name for name, _ in made.named_parameters() if name.endswith(".delta.weight")]
    assert len(tables) == len(made.model.tables) and not any(made.get_parameter(name).any() for name in tables)

    model, batch = built(config, sharing="gdes"), batch_of()
    plain = discriminator_of(dict(model.named_parameters()))
    assert not any(name.startswith("generator.") or "delta" in name for name in plain)
    alone = ForReplacedTokens.alone(build_model(config, ReplacedTokensConfig(sharing="none")).model)
    missing = alone.load_state_dict(plain)
    assert not missing.missing_keys
    with torch.no_grad():
        expected = model.encode(batch.packed)
        torch.testing.assert_close(alone.eval().encode(batch.packed), expected, atol=1e-5, rtol=0)


@EACH
def test_a_batch_of_masked_tokens_trains_the_model_alone(config: ModelConfig, objective: dict[str, Any]) -> None:
    """An unused parameter has no gradient, not a gradient of zero: else it would decay, with moments. The loss equals a
    masked-LM model's with the same weights, its decoder tied to the sum if there is one; the loss of replaced tokens is
    the same with and without that head."""
    model, batch = built(config, mlm_head=True, **objective), batch_of()
    masked = replace(batch, targets={n: batch.targets[n] for n in ("positions_M", "labels_M")}, counts={"mlm": 12})
    alone = build_model(config, MaskedLmConfig(), ComputeConfig(attention="sdpa"))
    left = discriminator_of({name: parameter.detach() for name, parameter in model.named_parameters()})
    load_weights(alone, {name: tensor for name, tensor in left.items() if not name.startswith("token_head.")})
    for figures in (True, False):
        sums, expected = model(masked, figures), alone.eval()(masked, figures)
        assert sums.losses.keys() == {"mlm"} and sums.figures == expected.figures
        torch.testing.assert_close(sums.losses["mlm"], expected.losses["mlm"], rtol=1e-5, atol=1e-5)
    sums.losses["mlm"].backward()
    idle = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    of = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert {name.partition(".")[0] for name in idle} == {"generator", "token_head"}
    assert idle == {name for name, _ in model.named_parameters() if name.startswith(("generator.", "token_head."))}
    assert of == {"model", "head", "decoder", "generator", "token_head"}

    model.zero_grad()
    losses = model(batch).losses
    (losses["mlm"] + 50 * losses["rtd"]).backward()
    idle = {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.grad is None}
    assert idle == {"head", "decoder"}
    without = built(config, **objective)
    load_weights(without, {n: p.detach() for n, p in model.named_parameters() if n in dict(without.named_parameters())})
    again = without(batch).losses
    assert all(torch.equal(losses[term], again[term]) for term in ("mlm", "rtd"))


def test_a_generator_is_drawn_as_a_model_of_its_own_depth() -> None:
    """ModernBERT's output projections are smaller in a deeper model."""
    model = build_model(MODERN, ReplacedTokensConfig(sharing="none", generator_depth=0.25, generator_width=1.0))
    initialize(model, MODERN, seed=1)
    outputs = [model.get_parameter(f"{part}layers.0.mlp.Wo.weight") for part in ("model.", "generator.model.")]
    stds = [float(weight.detach().std()) for weight in outputs]
    assert stds[1] / stds[0] == pytest.approx(2.0, rel=0.1)


@pytest.mark.runs
def test_drawn_tokens_follow_the_softmax() -> None:
    """Chi-square over every token that is expected often enough; its bound is passed once in 10^6."""
    drawn = torch.Generator().manual_seed(0)
    logits_V = 2 * torch.randn(1000, generator=drawn)
    count = 200_000
    draws = torch.randint(0, 1 << 31, (count,), generator=drawn)
    found = torch.cat([sample(logits_V.exp().expand(1000, -1), part) for part in draws.split(1000)])
    expected_V = count * logits_V.double().softmax(0)
    often = expected_V >= 5
    seen_V = torch.bincount(found, minlength=1000)
    statistic = float(((seen_V - expected_V).square() / expected_V)[often].sum())
    freedom = int(often.sum()) - 1
    assert freedom > 500 and statistic < freedom + 4.9 * (2 * freedom) ** 0.5 + 16


@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 512, 50_368])
def test_a_token_without_weight_is_never_drawn(size: int) -> None:
    """At the ends of the range, where rounding could step over the last one, and in the first and the last block."""
    draws = torch.tensor([0, 1, (1 << 30), (1 << 31) - 2, (1 << 31) - 1])
    for at in {0, size // 2, size - 1}:
        weights = torch.zeros(5, size)
        weights[:, at] = 1e-3
        assert sample(weights, draws).tolist() == [at] * 5
    even = sample(torch.ones(5, size), draws)
    assert even[0] == 0 and even[-1] == size - 1


def test_chunks_draw_what_all_logits_at_once_would() -> None:
    """Training never has all of them; the sampled tokens must not depend on the chunks."""
    model, batch = built(BERT, sharing="none"), batch_of()
    generator, draws_M = model.generator, batch.targets[DRAWS]
    with torch.no_grad():
        hidden_MD = generator.encode(batch.packed, batch.targets["positions_M"])
        _, at_once = generator.predict(hidden_MD, batch, True, draws_M)
        hidden_MD = generator.head(hidden_MD)
        for chunk in (1, 5, 16):
            inputs = (hidden_MD, generator.decoder.weight, generator.decoder.bias, batch.targets["labels_M"], draws_M)
            _, found = ChunkedLoss.apply(*inputs, 0.0, chunk, loss_and_gradient)
            assert torch.equal(found, at_once)


@pytest.mark.parametrize("config", [BERT, MODERN, ALBERT], ids=lambda c: c.name)
def test_a_microbatch_without_a_prediction_still_judges_its_tokens(config: ModelConfig) -> None:
    """Texts too short to be masked: the generator's sum is 0 with a graph, or a rank would wait for its gradient."""
    model, batch = built(config, sharing="embeddings"), batch_of()
    targets = batch.targets | {"labels_M": torch.full((16,), IGNORED_LABEL)}
    sums = model(replace(batch, targets=targets, counts={"mlm": 0, "rtd": 64}))
    assert float(sums.losses["mlm"]) == 0 and float(sums.losses["rtd"]) > 0
    (sums.losses["mlm"] + sums.losses["rtd"]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_phase_changes_the_generator_too() -> None:
    """RoPE bases of both, and the generator's own size stays."""
    model = built(MODERN, sharing="gdes")
    model.set_phase(replace(MODERN, global_rope_theta=160_000.0))
    generator = model.generator.model.config
    assert generator.global_rope_theta == 160_000.0 and model.model.config.global_rope_theta == 160_000.0
    assert generator.num_layers == 1 and [len(each.layers) for each in model.encoders] == [4, 1]
    assert isinstance(model.generator.decoder, nn.Linear)


@pytest.mark.runs
def test_both_encoders_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two widths, a loss that samples, and the regions around both: seven graphs for any text, and the same
    gradients."""
    torch._dynamo.reset()
    counters.clear()
    kernel = opaque_attention()
    monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: kernel)
    model, plain = built(BERT, sharing="none"), built(BERT, sharing="none")
    plain.load_state_dict(model.state_dict())
    model.compile_layers(backend="aot_eager")
    first = batch_of()
    second = replace(first, packed=replace(first.packed, cu_seqlens_S=torch.tensor([0, 10, 20, 30, 68]).int()))
    graphs = []
    for batch in (first, second):
        gradients = []
        for each in (model, plain):
            each.zero_grad()
            losses = each(batch).losses
            (losses["mlm"] + losses["rtd"]).backward()
            gradients.append(each.token_head.classifier.weight.grad)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [7, 7]
