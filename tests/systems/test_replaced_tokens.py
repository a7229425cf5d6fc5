"""A run that learns to detect replaced tokens, from its start to its exports.

A user would lose: a discriminator with the same output in transformers, embeddings with their training, or a continued
run that restarts its generator only with a notice.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.batches import lay_out
from modernbert_train.__main__ import main
from modernbert_train.checkpoints.checkpoint import Checkpoint, verify
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.models.replaced import ForReplacedAndMasked
from modernbert_train.weights.hf_folder import load_weights as load_folder
from modernbert_train.weights.source import open_model
from tests.support.faulty import Fault, Killed, at_fault
from tests.support.matrix import system
from tests.support.ranks import trained_on_two_ranks
from tests.support.runs import assert_equal_runs, killed_and_gone_on, model_of, newest, records, weights
from tests.support.tiny_run import TinyRun
from tests.support.verbs import Says

SHARING = ("embeddings", "none", "gdes")
SHORT = ("phases.long=null", "phases.short.tokens=1500", "phases.short.schedule.warmup_tokens=100")
DISCRIMINATOR = {"modernbert": "ModernBertForTokenClassification", "bert": "ElectraForPreTraining"}
GENERATOR = {"modernbert": "ModernBertForMaskedLM", "bert": "ElectraForMaskedLM"}
BOUNDARIES = (0, 40, 60)


def drawn_ids(count: int) -> torch.Tensor:
    return torch.randint(5, 500, (count,), generator=torch.Generator().manual_seed(1))


def generated(model: Any, ids_T: torch.Tensor, boundaries: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of the generator, of sequences in one packed buffer."""
    with torch.no_grad():
        generator, packed = model.generator, lay_out(ids_T, boundaries)
        return generator.logits(generator.encode(packed), torch.arange(len(ids_T)))


def assert_same_logits(twin: Any, ids_T: torch.Tensor, expected_T: torch.Tensor, boundaries: tuple[int, ...]) -> None:
    """Each sequence alone there."""
    with torch.no_grad():
        for start, end in itertools.pairwise(boundaries):
            logits = twin(input_ids=ids_T[None, start:end])[0][0]
            torch.testing.assert_close(logits, expected_T[start:end], atol=1e-5, rtol=0)


def assert_same_weights_return(run: Path) -> None:
    again, own = load_folder(run / "hf"), open_model(run).weights()
    assert again.keys() == own.keys() and all(torch.equal(tensor, again[name]) for name, tensor in own.items())


def opened(folder: Path, named: str) -> Any:
    assert json.loads((folder / "config.json").read_text())["architectures"] == [named]
    twin, report = getattr(transformers, named).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return twin.eval()


@pytest.mark.runs
@pytest.mark.parametrize(
    ("encoder", "sharing"),
    [
        ("modernbert", "embeddings"),
        ("bert", "gdes"),
        pytest.param("bert", "none", marks=pytest.mark.slow),
        pytest.param("bert", "embeddings", marks=pytest.mark.slow),
        pytest.param("modernbert", "gdes", marks=pytest.mark.slow),
        pytest.param("modernbert", "none", marks=pytest.mark.slow),
    ],
)
def test_both_parts_compute_the_same_in_transformers(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Says, encoder: str, sharing: str
) -> None:
    """Of two sequences in one packed buffer here, each alone there. Shared parts and differences are whole in each."""
    words = [*system(tiny_run(*SHORT), encoder, "rtd"), f"objective.sharing={sharing}", "objective.generator_depth=0.5"]
    assert main(["train", *words]) == 0
    run, capsys_out = tmp_path / "runs/tiny", capsys.readouterr()
    assert "generator" not in capsys_out.err
    model, ids_T = model_of(newest(run)), drawn_ids(60)
    with torch.no_grad():
        told_T = model.logits(model.encode(lay_out(ids_T, BOUNDARIES)))

    assert main(["export", str(run), "--licence", "mit"]) == 0
    card = (run / "hf/README.md").read_text()
    assert "arxiv.org/abs/2003.10555" in card and "AutoModelForMaskedLM" not in card
    assert "of the tokens were replaced" in card
    twin = opened(run / "hf", DISCRIMINATOR[encoder])
    if encoder == "modernbert":  # two classes: original, whose logit is 0, and replaced
        told_T = torch.stack((torch.zeros(60), told_T), dim=1)
    assert_same_logits(twin, ids_T, told_T, BOUNDARIES)
    assert_same_weights_return(run)

    done = main(["export", str(run), "--generator"])
    if encoder == "modernbert" and sharing == "embeddings":
        assert done == 78 and "embeddings are wider than its layers" in capsys.readouterr().err
        return
    assert done == 0
    twin = opened(run / "hf-generator", GENERATOR[encoder])
    assert_same_logits(twin, ids_T, generated(model, ids_T, BOUNDARIES), BOUNDARIES)
    assert says("fill", str(run / "hf-generator"), "a [MASK] c").count("%") == 5


@pytest.mark.runs
@pytest.mark.parametrize(
    ("encoder", "named", "more"),
    [
        ("albert", "AlbertForMaskedLM", ()),
        pytest.param("xlnet", "XLNetLMHeadModel", ("objective.sharing=none",), marks=pytest.mark.slow),
    ],
)
def test_of_some_only_the_generator_is_exported(
    tiny_run: TinyRun,
    tmp_path: Path,
    says: Says,
    encoder: str,
    named: str,
    more: tuple[str, ...],
) -> None:
    """transformers lacks ALBERT or XLNet with this head. An ALBERT's embeddings are narrow: both models use them
    unchanged."""
    assert main(["train", *system(tiny_run(*SHORT, *more), encoder, "rtd")]) == 0
    run = tmp_path / "runs/tiny"
    said = says("export", str(run), code=78)
    assert "lacks such a model for weights that were trained to detect replaced tokens" in said
    assert main(["export", str(run), "--generator"]) == 0
    twin = opened(run / "hf-generator", named)
    ids_T = drawn_ids(30)
    assert_same_logits(twin, ids_T, generated(model_of(newest(run)), ids_T, (0, 30)), (0, 30))


@pytest.mark.runs
def test_a_deberta_v3_is_exported_as_the_released_one(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The encoder's states in transformers, its head under the names of the released file, and the generator as what
    predicts masked tokens."""
    assert main(["train", *system(tiny_run(*SHORT, "objective.sharing=gdes"), "deberta", "rtd")]) == 0
    run = tmp_path / "runs/tiny"
    model = model_of(newest(run))
    assert model.get_parameter("model.embeddings.tok_embeddings.delta.weight").any()
    assert main(["export", str(run)]) == 0 and main(["export", str(run), "--generator"]) == 0
    assert json.loads((run / "hf/config.json").read_text())["architectures"] == ["DebertaV2Model"]
    twin, report = transformers.AutoModel.from_pretrained(run / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert {name.split(".")[0] for name in report["unexpected_keys"]} == {"mask_predictions"}
    generator = opened(run / "hf-generator", "DebertaV2ForMaskedLM")
    ids_T = drawn_ids(60)
    with torch.no_grad():
        assert_same_logits(twin.eval(), ids_T, model.encode(lay_out(ids_T, BOUNDARIES)), BOUNDARIES)
    assert_same_logits(generator, ids_T, generated(model, ids_T, BOUNDARIES), BOUNDARIES)
    assert_same_weights_return(run)


@pytest.mark.runs
def test_a_roberta_is_exported_with_positions_from_zero(tiny_run: TinyRun, tmp_path: Path) -> None:
    """transformers lacks an ELECTRA that counts positions from the padding's."""
    model = ("model.position_offset=1", "model.segments=1")
    words = [*system(tiny_run(*SHORT), "bert", "rtd"), *model]
    assert main(["train", *words]) == 0
    run = tmp_path / "runs/tiny"
    assert main(["export", str(run)]) == 0 and main(["export", str(run), "--generator"]) == 0
    twin, ids_T = model_of(newest(run)), drawn_ids(30)
    with torch.no_grad():
        expected_T = twin.logits(twin.encode(lay_out(ids_T, (0, 30))))
    assert_same_logits(opened(run / "hf", "ElectraForPreTraining"), ids_T, expected_T, (0, 30))
    assert opened(run / "hf-generator", "ElectraForMaskedLM").config.embedding_size == 32


@pytest.mark.runs
def test_the_cut_into_microbatches_does_not_matter(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Samples depend on the text: losses and the number of replaced tokens do not depend on the split of the batch."""
    found = []
    for size in (128, 512):
        cut = (f"name=cut-{size}", f"phases.short.microbatch_tokens={size}")
        words = system(tiny_run(*SHORT, "model.dropout=0", *cut), "bert", "rtd")
        assert main(["train", *words]) == 0
        found.append(records(tmp_path / f"runs/cut-{size}"))
    tokens = 0
    for one, other in zip(*found, strict=True):
        for key in ("loss/mlm", "loss/rtd", "loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=2e-4), (one["step"], key)
        assert (one["count/mlm"], one["count/rtd"]) == (other["count/mlm"], other["count/rtd"])
        tokens += one["count/rtd"]
        assert tokens == one["tokens"]


@pytest.mark.runs
def test_held_out_text_is_measured_by_name(tiny_run: TinyRun, tmp_path: Path, says: Says) -> None:
    words = system(tiny_run(*SHORT), "modernbert", "rtd")
    assert main(["train", *words]) == 0
    last = records(tmp_path / "runs/tiny", "validation")[-1]
    assert {"loss", "accuracy", "rtd/loss", "rtd/accuracy", "rtd/replaced"} <= last.keys()
    assert 0.1 < last["rtd/replaced"] < 0.15, "almost all of the 15 % that a generator without knowledge fills"
    assert last["rtd/accuracy"] > 0.5
    assert f"rtd/accuracy {last['rtd/accuracy']:.4f}" in says("eval", *words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharing", ["gdes", *(pytest.param(each, marks=pytest.mark.slow) for each in SHARING if each != "gdes")]
)
def test_weights_pass_from_one_objective_to_another(tiny_run: TinyRun, tmp_path: Path, sharing: str) -> None:
    """Masked first, then replaced tokens, then masked again, each a separate run: the encoder passes whole, the
    generator restarts, and with gdes the table has the old values and the difference is zero."""
    rtd = (*SHORT, f"objective.sharing={sharing}")
    assert main(["train", *system(tiny_run(*SHORT, "name=first"), "bert", "mlm")]) == 0
    first = weights(tmp_path / "runs/first")
    still = ("phases.short.lr_ratio=1e-9", "optim.weight_decay=0")
    named = (f"weights.init_from={tmp_path / 'runs/first'}", "name=second")
    assert main(["train", *system(tiny_run(*rtd, *still, *named), "bert", "rtd")]) == 0
    second = open_model(tmp_path / "runs/second").weights()
    assert {name.partition(".")[0] for name in second} == {"model", "token_head"}
    for name, tensor in second.items():
        if name.startswith("model."):
            torch.testing.assert_close(tensor, first[name], atol=1e-6, rtol=0, msg=name)
    raw = weights(tmp_path / "runs/second")
    if sharing == "gdes":
        assert raw["model.embeddings.tok_embeddings.delta.weight"].abs().max() < 1e-6
    back = (*still, f"weights.init_from={tmp_path / 'runs/second'}", "name=third")
    assert main(["train", *system(tiny_run(*SHORT, *back), "bert", "mlm")]) == 0
    third = weights(tmp_path / "runs/third")
    torch.testing.assert_close(third["model.layers.1.mlp.Wo.weight"], first["model.layers.1.mlp.Wo.weight"])


OPTIMIZERS = {name: f"optim={{name: {name}, lr: 5e-3, weight_decay: 0.01}}" for name in ("adamw", "muon", "normuon")}
OPTIMIZERS["stable_adamw"] = "optim={name: stable_adamw, lr: 5e-3, weight_decay: 1e-4}"
# parameters that each phase leaves unchanged
IDLE = {"rtd": ("head.", "decoder.")} | dict.fromkeys(("mlm", "causal", "permutation"), ("generator.", "token_head."))


def both(first: str, sharing: str, optim: str = "stable_adamw") -> tuple[str, ...]:
    """A run that changes from one to the other between its phases."""
    phase = "long.objective={name: mlm, mask_rate: 0.2}" if first == "rtd" else f"short.objective={{name: {first}}}"
    return ("objective.mlm_head=true", f"objective.sharing={sharing}", OPTIMIZERS[optim], f"phases.{phase}")


def at_the_switch(run: Path) -> Checkpoint:
    found = [verify(path) for path in (run / "checkpoints").iterdir()]
    (switch,) = (each for each in found if each.phase_end and each.state.phase == "short")
    return switch


def assert_idle_stood_still(run: Path, first: str) -> None:
    """In the first phase the parameters it lacks, in the second the other's, bit by bit; and no moments move."""
    switch, last = at_the_switch(run), newest(run)
    fresh = build_model(switch.config.model, switch.config.objective)
    initialize(fresh, switch.config.model, switch.config.seed)
    before, after = switch.weights(), last.weights()
    for name, parameter in fresh.named_parameters():
        if name.startswith(IDLE[first]):
            assert torch.equal(before[name], parameter), name
        elif name.endswith("weight"):  # a bias may have a gradient of zero
            assert not torch.equal(before[name], parameter), name
    moments, later = switch.optimizer(), last.optimizer()
    assert moments and not [key for key in moments if key.partition("/")[2].startswith(IDLE[first])]
    still = IDLE["mlm" if first == "rtd" else "rtd"]
    for name in before:
        if name.startswith(still) or name.endswith("weight"):
            assert torch.equal(before[name], after[name]) is name.startswith(still), name
    kept = [key for key in moments if key.partition("/")[2].startswith(still)]
    assert kept and all(torch.equal(moments[key], later[key]) for key in kept)
    assert {key.partition("/")[2] for key in later} == set(after)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("encoder", "first", "sharing", "optim"),
    [
        ("bert", "mlm", "gdes", "normuon"),
        pytest.param("modernbert", "mlm", "embeddings", "stable_adamw", marks=pytest.mark.slow),
        pytest.param("modernbert", "mlm", "gdes", "stable_adamw", marks=pytest.mark.slow),
        pytest.param("bert", "rtd", "none", "adamw", marks=pytest.mark.slow),
        pytest.param("albert", "rtd", "gdes", "stable_adamw", marks=pytest.mark.slow),
        pytest.param("xlnet", "permutation", "embeddings", "muon", marks=pytest.mark.slow),
        pytest.param("modernbert", "causal", "gdes", "stable_adamw", marks=pytest.mark.slow),
    ],
)
def test_a_run_learns_masked_tokens_and_replaced_ones(
    tiny_run: TinyRun, tmp_path: Path, encoder: str, first: str, sharing: str, optim: str
) -> None:
    """One run, in either order. Idle parameters do not even decay; the run learns in both; each phase is measured
    by its own objective; killed in each phase it continues bit by bit."""
    dropout = "model.attention_out_dropout=0.1" if encoder == "modernbert" else "model.dropout=0.1"
    common = (*both(first, sharing, optim), dropout, "checkpoint.interval_steps=3")
    assert main(["train", *system(tiny_run(*common, "name=whole"), encoder, "rtd")]) == 0
    whole = tmp_path / "runs/whole"
    assert_idle_stood_still(whole, first)
    steps = {phase: [s for s in records(whole) if s["phase"] == phase] for phase in ("short", "long")}
    second = "mlm" if first == "rtd" else "rtd"
    for phase, name in (("short", first), ("long", second)):
        assert all(("loss/rtd" in step) is (name == "rtd") for step in steps[phase])
        measured = [each for each in records(whole, "validation") if each["phase"] == phase]
        assert measured and all(("rtd/loss" in each) is (name == "rtd") for each in measured)
        key = "loss/rtd" if name == "rtd" else "loss"
        assert steps[phase][-1][key] < steps[phase][0][key], (name, "does not learn")
    killed = system(tiny_run(*common, "name=killed"), encoder, "rtd")
    with at_fault(kill_at=5), pytest.raises(Killed):
        main(["train", *killed])
    killed_and_gone_on(killed, step=len(steps["short"]) + 2)
    assert_equal_runs(tmp_path / "runs/killed", whole)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("encoder", "sharing"), [pytest.param("bert", "gdes", marks=pytest.mark.slow), ("modernbert", "embeddings")]
)
def test_each_phase_is_exported_as_what_it_trained(
    tiny_run: TinyRun, tmp_path: Path, says: Says, encoder: str, sharing: str
) -> None:
    """The first as a masked-LM model, whose decoder is tied to the effective embeddings; the last as a discriminator.
    An untrained generator is not exported. Probes read the model in both."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"a b {i % 7}", "label": i % 2}) + "\n" for i in range(40)))
    probe = f"evals.toy={{name: probe, train: {texts}, every_tokens: 3000}}"
    words = [*system(tiny_run(*both("mlm", sharing)), encoder, "rtd"), probe]
    assert main(["train", *words]) == 0
    run = tmp_path / "runs/tiny"
    assert {each["phase"] for each in records(run, "evaluation")} == {"short", "long"}
    switch = at_the_switch(run)
    first = run / f"hf-{switch.folder.name}"
    assert "rtd" not in says("eval", str(switch.folder))
    said = says("export", str(switch.folder), "--generator", code=78)
    assert "in phase short, which leaves the generator idle" in said
    assert main(["export", str(switch.folder)]) == 0
    card = (first / "README.md").read_text()
    assert "AutoModelForMaskedLM" in card and "| this model |" in card and "of the tokens were replaced" not in card
    twin = opened(first, {"bert": "BertForMaskedLM", "modernbert": "ModernBertForMaskedLM"}[encoder])
    model, ids_T = model_of(switch), drawn_ids(30)
    assert isinstance(model, ForReplacedAndMasked)
    with torch.no_grad():
        logits_TV = model.decoder(model.head(model.encode(lay_out(ids_T, (0, 30)))))
    assert_same_logits(twin, ids_T, logits_TV, (0, 30))
    assert main(["export", str(run)]) == 0 and "of the tokens were replaced" in (run / "hf/README.md").read_text()
    opened(run / "hf", DISCRIMINATOR[encoder])
    assert main(["export", str(run), "--generator"]) == (78 if encoder == "modernbert" else 0)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("first", "sharing", "optim"),
    [("mlm", "gdes", "stable_adamw"), ("rtd", "embeddings", "muon"), ("mlm", "none", "adamw")],
)
def test_two_ranks_leave_the_same_idle(tiny_run: TinyRun, tmp_path: Path, first: str, sharing: str, optim: str) -> None:
    """Sharded and replicated: a parameter without a gradient on one rank gets none from another."""

    def words(*more: str) -> list[str]:
        return system(tiny_run(*both(first, sharing, optim), *more), "bert", "rtd")

    for run in trained_on_two_ranks(words, tmp_path / "runs"):
        assert_idle_stood_still(run, first)


@pytest.mark.runs
def test_what_was_trained_beside_a_model_must_fit_a_branch(tiny_run: TinyRun, tmp_path: Path, says: Says) -> None:
    """With another sharing weights would be unused; a separate run continues."""
    assert main(["train", *system(tiny_run(*SHORT, "name=first"), "bert", "rtd")]) == 0
    branch = (*SHORT, "name=second", f"start.checkpoint={tmp_path / 'runs/first'}")
    said = says("train", *system(tiny_run(*branch), "bert", "rtd"), "objective.sharing=none", code=78)
    assert "its heads or generator have other shapes" in said
    assert not (tmp_path / "runs/second").exists()
    assert main(["train", *system(tiny_run(*branch), "bert", "rtd")]) == 0


@pytest.mark.runs
def test_a_layer_of_the_generator_that_gives_nan_is_named(tiny_run: TinyRun, tmp_path: Path) -> None:
    """It is computed first. The update is left out whole, the discriminator's too."""
    words = system(tiny_run(*SHORT, "stability.non_finite=skip"), "modernbert", "rtd")
    with at_fault(Fault("forward", steps=(3,))):
        assert main(["train", *words]) == 0
    (fault,) = [json.loads(line) for line in (tmp_path / "runs/tiny/faults.jsonl").read_text().splitlines()]
    assert fault["microbatches"][0]["place"] == "generator.model.layers.2.mlp, forward"
    assert [step["step"] for step in records(tmp_path / "runs/tiny")] == [1, 2, 4, 5]
