"""The rules between fields: each is broken alone, and each message names the keys and a value that works.

If one of these breaks, a run starts that cannot end well, and fails after hours or never.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

from modernbert_train.config.check import (
    BIAS_KERNELS,
    KERNEL_ORDERS,
    RULES,
    check,
    labelled,
)
from modernbert_train.config.describe import describe, expected_steps
from modernbert_train.config.load import load_run
from modernbert_train.config.objective import MASKINGS
from modernbert_train.config.schema import BatchWarmupConfig, MaskedLmConfig, PhaseConfig, RunConfig
from modernbert_train.errors import ConfigError
from modernbert_train.objectives.maskings import CHOOSE
from tests.support.paths import ROOT

# a file with phases is a run; others contain a model, or a spec of data preparation
YAMLS = sorted((ROOT / "yamls").rglob("*.yaml"))
RUNS = [path for path in YAMLS if "\nphases:" in path.read_text(encoding="utf-8") and path.name != "common.yaml"]
PUBLISHED = "weights.init_from=answerdotai/ModernBERT-base"
GOOD = """\
name: good
data: {train: shards/train, validation: shards/validation, tokenizer: shards/tokenizer}
optim: {lr: 1.0e-3}
phases:
  one:
    tokens: 1000
    row_tokens: 64
    batch_rows: 8
    microbatch_tokens: 128
    batch_warmup: {start_rows: 4, step_rows: 2, tokens: 500}
    schedule: {warmup_tokens: 400, decay_tokens: 600}
"""
# override -> how the only message starts
BROKEN = {
    "name=a/b": "name='a/b': a run's name becomes its folder.",
    "name=..": "name='..': a run's name",
    "name=''": "name='': a run's name",
    "objective={name: distill, teacher: t, kl_weight: 0, cosine_weight: 0, mse_weight: 0}": "objective.teacher=t with ",
    "objective={name: contrastive, matryoshka: [8, 8]}": "objective.matryoshka=[8, 8] names a width twice.",
    "objective={name: contrastive, temperature: 2, learn_temperature: true}": "objective.temperature=2 ",
    "data={download_timeout_seconds: 0, num_workers: 0}": "data.download_timeout_seconds=0.0: must be above 0.",
    "data={worker_timeout_seconds: 0}": "data.worker_timeout_seconds=0.0: must be above 0.",
    "data={worker_timeout_seconds: 120}": "data.worker_timeout_seconds=120.0 is not above twice "
    "data.download_timeout_seconds=60.0: a worker that waits for a remote shard",
    "stability.spike_window_batches=7": "stability.spike_window_batches=7: must be at least 8 and at most 1,048,576",
    "optim.lr=0": "optim.lr=0.0: must be above 0 and at most 1, usual rates lie between 1e-5 and 1e-2",
    "optim.betas=[0.9, 1.0]": "optim.betas[1]=1.0: must be at least 0 and below 1.",
    "optim={name: muon, momentum: 1.0}": "optim.momentum=1.0: must be at least 0 and below 1",
    "optim={name: normuon, row_beta: -0.1}": "optim.row_beta=-0.1: must be at least 0 and below 1",
    "optim={name: muon, newton_schulz_iterations: 0}": "optim.newton_schulz_iterations=0: must be at least 1 and at "
    "most 100, since without one nothing is",
    "optim={name: muon, adam_lr_ratio: 0}": "optim.adam_lr_ratio=0.0: must be above 0",
    "optim={name: muon, adam_decay_ratio: -1}": "optim.adam_decay_ratio=-1.0: must be at least 0",
    "seed=-1": "seed=-1: must be at least 0",
    "eval={times_per_phase: 3, interval_tokens: 5}": "eval.times_per_phase=3 and eval.interval_tokens=5: both define",
    "eval.row_tokens=7": "eval.row_tokens=7: must be at least 8",
    "distributed.strategy=hsdp": "distributed.strategy=hsdp without distributed.shard_ranks: how many ranks share",
    "distributed.shard_ranks=2": "distributed.shard_ranks=2 with distributed.strategy=ddp: only hsdp groups the",
    "distributed={strategy: hsdp, shard_ranks: 1}": "distributed.shard_ranks=1: a replica on each rank is",
    "launch.retries=-1": "launch.retries=-1: must be at least 0",
    "launch.time_limit_minutes=2": "launch.save_seconds=120 leaves no time of launch.time_limit_minutes=2.",
    "launch.rendezvous=node-1": "launch.rendezvous='node-1': HOST:PORT is expected",
    "launch.env.A-B=1": "launch.env.A-B: not a name of an environment variable.",
    "callbacks.memory_monitor={}": "callbacks.memory_monitor with compute.device=cpu: it measures GPUs only.",
    "objective.mask_rate=0": "objective.mask_rate=0.0: must be above 0 and at most 1, as a share of the tokens; the",
    "objective.random_token_share=0.3": "objective.mask_token_share=0.8 and objective.random_token_share=0.3:",
    "model.num_heads=10": "model.hidden_size=768 is not a multiple of model.num_heads=10.",
    "model.num_heads=256": "model.hidden_size/num_heads=3: rotary embeddings turn pairs.",
    "model.local_attention=127": "model.local_attention=127: half of the window is on each side.",
    "model.num_layers=21": "model.num_layers=21 with model.global_attn_every_n_layers=3 ends in a local layer, "
    "and the last must see the whole sequence. Use 19 or 22 layers.",
    "phases.one.schedule={warmup_tokens: 0, decay_tokens: 10, plateau: inverse_sqrt}": (
        "phases.one.schedule.plateau=inverse_sqrt: the learning rate falls from the end of the warmup"
    ),
    "phases.one.schedule={warmup_tokens: 1, decay_tokens: 900, plateau: inverse_sqrt, final_lr_ratio: 0.2}": (
        "phases.one.schedule.final_lr_ratio=0.2: the learning rate has fallen to 0.1 of"
    ),
    "weights.vocabulary=extend": "weights.vocabulary=extend: only weights of weights.init_from and weights.shrink_from",
    "weights={init_from: a, grow_from: b}": "weights.init_from=a and weights.grow_from=b: both define the first",
    "phases.one=null": "phases: empty, so there is nothing to train.",
    "data.train=null": "data.train: missing, and so is data.streams.",
    "data.streams={web: {path: a}}": "data.train=shards/train and data.streams (web): both name the training text.",
    "phases.one.streams={web: {proportion: 1}}": "phases.one.streams is set and data.streams is not:",
    "phases.one.lr_ratio=0": "phases.one.lr_ratio=0.0: must be above 0.",
    "phases.one.objective.name=sop": "phases.one.objective.name=sop: cannot follow objective.name=mlm in one run",
    "phases.one.optim.weight_decay=-1": "phases.one.optim.weight_decay=-1.0: must be at least 0",
    "phases.one.objective.mask_rate=0": "phases.one.objective.mask_rate=0.0: must be above 0 and at most 1",
    "phases.one.microbatch_tokens=100": "phases.one.microbatch_tokens=100 is not a multiple of phases.one.row_tokens",
    "phases.one.microbatch_tokens=32": "phases.one.microbatch_tokens=32 is not a multiple of phases.one.row_tokens",
    "phases.one.schedule.warmup_tokens=401": "phases.one.schedule: warmup_tokens=401 and decay_tokens=600 do not fit",
    "phases.one.schedule.final_lr_ratio=1.5": "phases.one.schedule.final_lr_ratio=1.5: must be at least 0 and at most",
    "phases.one.batch_warmup.start_rows=8": "phases.one.batch_warmup.start_rows=8 is not below",
    "phases.one.batch_warmup.tokens=1001": "phases.one.batch_warmup.tokens=1001 exceeds phases.one.tokens=1000:",
    "compute.attention=varlen": "compute.attention=varlen with compute.device=cpu: that kernel needs a GPU.",
    "optim.fused=true": "optim.fused=true with compute.device=cpu: those kernels need a GPU.",
    "compute={device: cpu, compile: true, search: true}": "compute.search=true on a CPU: it only tunes kernels of GPUs",
    "compute={device: cuda, compile: false, search: true}": "compute.search=true without compute.compile: it tunes",
    "compute.global_attention=flex": "compute.global_attention=flex with compute.device=cpu: that kernel needs a GPU.",
    "compute.residual_precision=bf16": "compute.residual_precision=bf16 with compute.precision=auto: products are in",
    "objective={name: rtd, generator_depth: 0.01}": "objective.generator_depth=0.01 of 22 layers leaves the generator "
    "no layer. Set it to at least 0.046.",
    "objective={name: rtd, generator_width: 0.01}": "objective.generator_width=0.01 of 12 heads leaves the generator "
    "no head. Set it to at least 0.084.",
    "objective={name: rtd, generator_width: -1}": "objective.generator_width=-1.0: must be above 0.",
    "objective={name: rtd, sharing: gdes, generator_width: 0.5}": "objective.generator_width=0.5 with "
    "objective.sharing=gdes: the tables of the generator are part of the model's",
    "objective={name: rtd, generator_width: 2}": "objective.generator_width=2 with objective.sharing=embeddings: the "
    "generator would be 1536 wide, and its embeddings 768.",
    "objective={name: rtd, mask_rate: 0}": "objective.mask_rate=0.0: must be above 0 and at most 1, as a share",
    "objective={name: rtd, mask_token_share: 0.9, random_token_share: 0.2}": "objective.mask_token_share=0.9 and ",
    "phases.one.objective={name: rtd}": "phases.one.objective.name=rtd: cannot follow objective.name=mlm in one run, "
    "... Set objective={name: rtd, mlm_head: true} ... or make it a separate run with weights.init_from.",
    "evals.heldout={name: probe, train: a.csv}": "evals.heldout: this name is reserved for the held-out text",
}
# overrides of a BERT model -> beginning of the only message
BERT = "model={name: bert}"
BROKEN_BERT = {
    "compute={precision: bf16, residual_precision: bf16}": "compute.residual_precision=bf16 with model.name=bert: ",
    "phases.one={row_tokens: 1024, microbatch_tokens: 2048}": "phases.one.row_tokens=1024 exceeds "
    "model.max_positions=512, and a sequence may fill its row. Set phases.one.row_tokens=512 and "
    "phases.one.microbatch_tokens=2048, or raise model.max_positions to 1024.",
    "eval.row_tokens=1024": "eval.row_tokens=1024 exceeds model.max_positions=512, and a sequence may fill its row. "
    "Remove eval.row_tokens",
    "{model: {segments: 1}, objective: {name: sop}}": "objective.name=sop with model.segments=1: it makes pairs,",
    "model={position_offset: 1, activation: gelu_tanh}": "model.position_offset=1 with model.activation=gelu_tanh: "
    "a position offset makes it a RoBERTa",
}
# the same for ALBERT
ALBERT = "model={name: albert}"
BROKEN_ALBERT = {
    "model={sharing: none, groups: 2}": "model.sharing=none with model.groups=2 and model.group_layers=1: these two "
    "define which layers share, and none do. Remove them, or set model.sharing=all.",
    "model={sharing: none, group_layers: 3}": "model.sharing=none with model.groups=1 and model.group_layers=3:",
    "model.groups=5": "model.num_layers=12 is not a multiple of model.groups=5 times model.group_layers=1, and each "
    "group has equally many layers, in whole turns. Set model.num_layers=10, or other groups.",
    "model={groups: 4, group_layers: 2, sharing: ffn}": "model.num_layers=12 is not a multiple of model.groups=4 times "
    "model.group_layers=2, and each group has equally many layers, in whole turns. Set model.num_layers=16, or",
    "model.groups=24": "model.num_layers=12 is not a multiple of model.groups=24 times model.group_layers=1, and each "
    "group has equally many layers, in whole turns. Set model.num_layers=24,",
    "model.groups=0": "model.groups=0: must be above 0 and at most ",
    "model.embedding_size=0": "model.embedding_size=0: must be above 0 and at most ",
    "model.dropout=1": "model.dropout=1.0: must be at least 0 and below 1.",
    "model.num_heads=7": "model.hidden_size=768 is not a multiple of model.num_heads=7.",
    "phases.one={row_tokens: 1024, microbatch_tokens: 2048}": "phases.one.row_tokens=1024 exceeds model.max_positions",
    "{model: {segments: 1}, objective: {name: sop}}": "objective.name=sop with model.segments=1: it makes pairs,",
}
Load = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    file = tmp_path_factory.mktemp("good") / "good.yaml"
    file.write_text(GOOD, encoding="utf-8")
    return cache(lambda *overrides: load_run([file], ["compute.device=cpu", *overrides]))


MIXED = ("data.train=null", "data.streams={web: {path: a}, books: {path: b}}")
# overrides of MIXED -> beginning of the only message
BROKEN_STREAMS = {
    "data.streams.web.repeat=-1": "data.streams.web.repeat=-1.0: must be at least 0",
    "data.streams.web.tokens=-1": "data.streams.web.tokens=-1: must be at least 0",
    "data.streams.web={repeat: 2, tokens: 5}": "data.streams.web: repeat=2.0 and tokens=5 are different ways",
    "data.streams.web.proportion=0.5": "data.streams.books lacks a proportion and data.streams.web has one.",
    "data.streams={web: {proportion: 0.5}, books: {proportion: 0.4}}": "data.streams: the proportions add up to 0.9 (",
    "data.streams={web: {proportion: 1.5}, books: {proportion: -0.5}}": "data.streams.books.proportion=-0.5: must be",
    "data.streams={web: {repeat: 0}, books: {tokens: 0}}": "data.streams: every stream weighs 0,",
    "data={mix_by: documents, streams: {web: {tokens: 5}}}": "data.streams.web.tokens=5 with data.mix_by=documents:",
    "data.streams={'a b': {path: c}}": "data.streams.a b: a stream's name is used in keys and records.",
    "data.alpha=1.5": "data.alpha=1.5: must be at least 0 and at most 1.",
    "phases.one.alpha=-0.1": "phases.one.alpha=-0.1: must be at least 0 and at most 1.",
    "phases.one={alpha: 0.5, streams: {web: {proportion: 1}}}": "phases.one.alpha=0.5 and phases.one.streams.web",
    "phases.one.streams={web: {}}": "phases.one.streams.web lacks a proportion. Give it one, or set alpha",
    "phases.one.streams={book: {proportion: 1}}": "phases.one.streams.book: no stream of data.streams. Did you mean "
    "phases.one.streams.books?",
    "phases.one.streams={xyz: {proportion: 1}}": "phases.one.streams.xyz: no stream of data.streams. Known: web, books",
    "phases.one.streams={web: {proportion: 0.9}}": "phases.one.streams: the proportions add up to 0.9 (web 0.9)",
    "phases.one.streams={web: {proportion: -0.5}, books: {proportion: 1.5}}": "phases.one.streams.web.proportion=-0.5:",
}


TILES = "compute={device: auto, attention: tiles}"
XLNET = "model={name: xlnet, hidden_size: 64, num_heads: 1}"
DEBERTA = "model={name: deberta, hidden_size: 64, num_heads: 1"
LONGER = "phases.one={row_tokens: 1024, microbatch_tokens: 2048}"
KERNELS = ("attention", "global_attention")
SEGMENTED = "masking: ngram, words: segmenter"
# several overrides, and the beginning of the only message, in which ... stands for any text
BROKEN_TOGETHER = [
    # with whole words the weights of a text of 2 tokens summed to 0.43 of them, of one of 5 to 0.77
    (["objective={name: rtd, masking: ngram}"],
     "objective.name=rtd with objective.masking=ngram: the generator replaces single tokens of text. Set masking to "
     "exact or bernoulli."),
    (["objective={name: mlm, mask_weight: 1/rate, masking: ngram}"],
     "objective.mask_weight=1/rate with objective.masking=ngram"),
    (["objective.words=segmenter"], "objective.words=segmenter with objective.name=mlm, objective.masking=exact: only "
     "masking=ngram masks whole words. Set objective.words=tokenizer, or objective.masking=ngram."),
    ([f"objective={{name: tlm, {SEGMENTED}}}"], "objective.words=segmenter with objective.name=tlm, "
     "objective.masking=ngram: pairs have no words. Set objective.words=tokenizer."),
    (["model={name: llama, tied: false}", "objective={name: rtd}"],
     "objective.name=rtd with model.tied=false: a generator predicts with the embedding."),
    *(([f"model={{name: llama, {keys}}}"], message) for keys, message in {
        "key_value_heads: 5": "model.key_value_heads=5: each must be shared by equally many of the 12 heads",
        "head_width: 33": "model.head_width=33: rotary embeddings turn pairs.",
        "rope_factor: 8": "model.rope_factor=8 with model.rope_scaling=none",
        "rope_scaling: yarn": "model.rope_scaling=yarn with model.rope_factor=1 scales nothing",
        "rope_scaling: yarn, rope_factor: 4, rope_beta_slow: 32":
            "model.rope_beta_fast=32 with model.rope_beta_slow=32",
        "rope_scaling: yarn, rope_factor: 4, rope_theta: 1": "model.rope_scaling=yarn with a RoPE base of 1",
        "rope_scaling: llama3, rope_factor: 8, rope_low_freq: 4": "model.rope_high_freq=4 with model.rope_low_freq=4",
        "qk_norm: true, qkv_bias: true": "model.qkv_bias=true with model.qk_norm=true",
    }.items()),
    # without a scaling it would do nothing
    (["model={local_rope_scaled: true}"], "model.local_rope_scaled=true with model.rope_scaling=none"),
    (["phases.one.model={rope_scaling: linear}"],
     "phases.one.model.rope_scaling=linear with model.rope_factor=1 scales nothing"),
    # Triton kernels need powers of two; otherwise the run would fail in its first step, with Triton's error
    ([TILES, "model.num_heads=4", "model.hidden_size=192"], "compute.attention=tiles with heads of 48: that kernel "
     "supports heads of 16, 32, 64, 128. Set compute.attention=auto."),
    # without this bias the model would not know positions
    *(([XLNET, f"compute={{device: auto, attention: {kernel}}}"], f"compute.attention={kernel} with model.name=xlnet: "
       "this model adds a bias to attention scores, which the kernel does not support. Set compute.attention=auto, or "
       "sdpa.") for kernel in ("flash", "varlen", "flex")),
    ([DEBERTA + "}", LONGER], "phases.one.row_tokens=1024 exceeds model.max_positions=512, and a sequence may fill"),
    ([DEBERTA + ", buckets: 512, max_distance: 200}"],
     "model.max_distance=200 with model.buckets=512: the first 256 distances have one bucket each"),
    ([DEBERTA + "}", "phases.one.model={max_distance: 100}"],
     "phases.one.model.max_distance=100 with model.buckets=256"),
    ([DEBERTA + ", convolution: 2}"],
     "model.convolution=2 with model.version=v2: only version v2 has one, with an equal number of tokens"),
    ([DEBERTA + ", convolution: 3}", "objective={name: causal}"],
     "model.convolution=3 with objective.name=causal: it reads both neighbours"),
    ([DEBERTA + ", version: v1, buckets: 512}", "phases.one.model={max_distance: 600}"],
     "phases.one.model.max_distance=600 with model.buckets=512: version v1 has a vector for each"),
    (["data.validation=null", "eval.interval_tokens=100"], "eval.interval_tokens is set but data.validation is not."),
    # the model is built with the run's; another would be ignored in silence
    (["objective.z_loss=0.001", "phases.one.objective={name: causal}"],
     "phases.one.objective.z_loss=0.0: must be objective.z_loss=0.001"),
    # a phase would lack a generator, or a head that predicts
    (["objective={name: rtd}", "phases.one.objective={name: mlm}"], "phases.one.objective.name=mlm: cannot follow "
     "objective.name=rtd ... Set objective.mlm_head=true, or make it a separate run with weights.init_from."),
    *((["objective={name: rtd, mlm_head: true}", f"phases.one.objective={{name: {other}}}"],
       "phases.one.objective.name= ... cannot follow objective.name=rtd ... replaced. Make it a separate run with")
      for other in ("sop", "classify, labels: [a, b]")),
    # before a GPU is needed: flex sums gradients of distances atomically, so that a resumed run would differ silently;
    # cuDNN lacks a backward pass for wide heads, and a fixed order of summation
    ([DEBERTA + "}", "compute={device: auto, attention: flex, deterministic: true}"],
     "compute.attention=flex with model.name=deberta"),
    *(([f"compute={{{compute}, {key}: cudnn}}", *model], f"compute.{key}=cudnn with {message}")
      for key in KERNELS for compute, message, *model in (
        ("device: auto", f"heads of 192: cuDNN supports multiples of 8 up to 128. Set compute.{key}=auto.",
         "model={num_heads: 1, hidden_size: 192}"),
        ("device: auto, deterministic: true", "compute.deterministic=true: "),
        ("device: cpu", f"compute.device=cpu: that kernel needs a GPU. Set compute.{key}=auto or sdpa."),
      )),
    *(([f"compute={{device: auto, {key}: {kernel}}}", f"{place}objective={{name: permutation}}"],
       f"compute.{key}={kernel} with objective.name=permutation in phases.one: that kernel does not support order "
       f"given. Set compute.{key}=auto, or one of flex, sdpa.")
      for key in KERNELS for kernel in ("flash", "varlen", "cudnn") for place in ("", "phases.one.")),
]  # fmt: skip
# nearly the same overrides, without a mistake
SOUND: list[tuple[str, ...]] = [
    *((f"objective={{name: mlm, mask_weight: 1/rate, masking: {masking}}}",) for masking in ("exact", "bernoulli")),
    ("phases.one.model={rope_scaling: linear, rope_factor: 2, local_rope_scaled: true}",),
    (TILES,),
    *((XLNET, f"compute={{device: auto, attention: {kernel}}}", f"objective={{name: {name}}}")
      for kernel in ("auto", "sdpa") for name in ("mlm", "permutation", "sop")),
    # positions change no weight's shape, so a phase of longer rows may raise them
    (DEBERTA + "}", "phases.one={row_tokens: 1024, microbatch_tokens: 2048, model: {max_positions: 1024}}"),
    ("eval.interval_tokens=100",),
    ("objective.z_loss=0.001", "phases.one.objective={name: causal, z_loss: 0.001}"),
    ("objective={name: rtd, mlm_head: true}", "phases.one.objective={name: mlm}"),
    *((f"objective={{name: {name}, {SEGMENTED}}}",) for name in ("mlm", "sop")),
    (DEBERTA + "}", "compute={device: auto, attention: flex}"),
    ("compute={device: auto, attention: flash}", "objective={name: causal}"),
    *((f"compute={{device: auto, {key}: {kernel}}}", *objective) for key in KERNELS for kernel, *objective in (
        ("cudnn",), ("flex", "objective={name: permutation}"), ("sdpa", "objective={name: permutation}"),
    )),
    MIXED,
    (*MIXED, "data.streams.web.repeat=2.5", "data.streams.books.tokens=1000"),
    (*MIXED, "data.streams={web: {proportion: 0.3333333}, books: {proportion: 0.6666667}}"),  # within 1e-6
    (*MIXED, "data.streams.books.repeat=0", "phases.one.streams={web: {proportion: 0}, books: {proportion: 1}}"),
    (*MIXED, "phases.one.streams={books: {proportion: 1}}", "data.mix_by=documents"),
]  # fmt: skip


def in_words(override: str) -> list[str]:
    """Format one override, or several sections of one, as words."""
    if not override.startswith("{"):
        return [override]
    return [f"{section}={value}" for section, value in yaml.safe_load(override).items()]


CASES = [
    ([*words, *in_words(override)], message)
    for words, rows in (((), BROKEN), ((BERT,), BROKEN_BERT), ((ALBERT,), BROKEN_ALBERT), (MIXED, BROKEN_STREAMS))
    for override, message in rows.items()
] + BROKEN_TOGETHER


def messages(config: RunConfig, num_ranks: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config, num_ranks)
    return str(error.value).splitlines()


def test_a_good_run_passes(load: Load) -> None:
    check(load())
    check(load(), num_ranks=2)


def test_every_masking_of_the_configuration_is_in_the_table() -> None:
    assert set(typing.get_args(typing.get_type_hints(MaskedLmConfig)["masking"])) == set(MASKINGS) == set(CHOOSE)


@pytest.mark.runs
@pytest.mark.parametrize(("words", "message"), CASES)
def test_one_broken_rule_gives_one_message(load: Load, words: list[str], message: str) -> None:
    """Also for a mixture: a wrong share would silently train on other text than configured."""
    (line,) = messages(load(*words))
    assert re.match(".*".join(map(re.escape, message.split(" ... "))), line), line


@pytest.mark.runs
@pytest.mark.parametrize("words", SOUND)
def test_what_can_be_trained_passes(load: Load, words: tuple[str, ...]) -> None:
    check(load(*words))


@pytest.mark.runs
def test_a_generator_is_a_fraction_of_the_model(load: Load) -> None:
    """With whole heads; a ModernBERT's generator ends in a global layer, like the model."""
    for objective, sizes in {
        "{name: rtd}": (22, 4, 256, 384),
        "{name: rtd, generator_width: 0.25, generator_depth: 0.5}": (10, 3, 192, 288),
        "{name: rtd, sharing: gdes}": (10, 12, 768, 1152),
        "{name: rtd, sharing: none, generator_width: 2}": (22, 24, 1536, 2304),
        "{name: rtd, generator_depth: 0.05}": (1, 4, 256, 384),
    }.items():
        config = load(f"objective={objective}")
        check(config)
        found = config.objective.generator_of(config.model)
        assert found is not None
        assert not [*found.mistakes()]
        assert (found.num_layers, found.num_heads, found.hidden_size, found.intermediate_size) == sizes
    bert = load(BERT, "objective={name: rtd, generator_depth: 0.5}")
    half = bert.objective.generator_of(bert.model)
    assert half is not None and (half.num_layers, half.hidden_size, half.intermediate_size) == (6, 256, 1024)


def test_the_table_of_orders_is_that_of_the_kernels() -> None:
    import torch

    from modernbert_train.models.attention import KERNELS

    assert KERNEL_ORDERS.keys() == KERNELS.keys()
    cpu = torch.device("cpu")
    for name, kernel in KERNELS.items():
        for bias, able in BIAS_KERNELS.items():
            biased = "cannot add a bias" not in str(kernel.support(cpu, torch.float32, "all", bias))
            assert biased is (name in able), name
        refused = "order given by ranks" in str(kernel.support(cpu, torch.float32, "given"))
        assert refused is ("given" not in KERNEL_ORDERS[name]), name


@pytest.mark.runs
def test_every_rule_is_broken_by_one_of_the_cases(load: Load) -> None:
    """A rule without a case here could stop working unnoticed."""
    configs = [load(*words) for words, _ in CASES]
    broken = {rule for rule in RULES for config in configs if list(rule(config, 1))}
    assert broken == set(RULES) - {labelled}  # tested in evaluate/


def test_every_broken_rule_is_reported_at_once(load: Load) -> None:
    found = messages(load("name=a b", "model.num_heads=10", "phases.one.tokens=0", "optim.lr=-1", "eval.row_tokens=7"))
    assert {line.split("=")[0] for line in found} >= {"name", "model.hidden_size", "phases.one.tokens", "optim.lr"}
    assert len(found) >= 5


def test_groups_that_share_the_weights_divide_the_ranks(load: Load) -> None:
    """If the number of ranks is unknown, as in `check` on a login node, there is no message."""
    config = load("distributed={strategy: hsdp, shard_ranks: 2}", "phases.one={batch_rows: 6, batch_warmup: null}")
    for num_ranks in (1, 2, 6):
        check(config, num_ranks)
    (line,) = messages(config, 3)
    assert line.startswith("distributed.shard_ranks=2 does not divide 3 ranks into equal groups.")


@pytest.mark.parametrize("num_ranks", [3, 4, 5, 8])
def test_every_batch_size_must_divide_among_the_ranks(load: Load, num_ranks: int) -> None:
    (line,) = messages(load(), num_ranks)  # 4, 6 and 8 rows
    assert f"rows cannot be divided evenly among {num_ranks} ranks" in line


def test_the_proposed_batch_size_works(load: Load) -> None:
    (line,) = messages(load("phases.one.batch_warmup=null", "phases.one.batch_rows=14"), 4)
    assert line.endswith("Set phases.one.batch_rows=12.")
    check(load("phases.one.batch_warmup=null", "phases.one.batch_rows=12"), 4)


@pytest.mark.parametrize("file", RUNS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_run_that_comes_with_the_project_loads_and_checks(file: Path) -> None:
    config = load_run([file])
    check(config)
    assert describe(config).startswith(f"{config.name}: good.")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        # BERT's 30,522 or GPT-2's 50,257 entries must not prevent continuing a published model
        (["model.vocab_size=50_257"], r"model.vocab_size=50257.* otherwise set 50304\."),
        (["model.vocab_size=50_304"], None),
        # Muon degrades weights that Adam trained; from scratch there is nothing to say
        (["optim.name=muon", PUBLISHED], r".*2605.10468.*optim.name=stable_adamw.*"),
        (["optim.name=muon"], None),
        ([PUBLISHED], None),
        # a rate of 5 is refused; 0.5 was called good, and trains nothing. Muon's updates are smaller
        (["optim.lr=0.5"], "optim.lr=.*"),
        (["optim.lr=0.01"], None),
        (["optim.lr=0.01", "phases.one.lr_ratio=10"], "optim.lr=.*"),
        (["optim={name: adamw, lr: 0.1}"], "optim.lr=.*"),
        (["optim={name: muon, lr: 0.05, scale: original}"], None),
        (["optim={name: muon, lr: 0.5}"], "optim.lr=.*"),
    ],
)
def test_what_trains_badly_brings_an_advice_and_is_not_refused(
    load: Load, words: list[str], advice: str | None
) -> None:
    config = load("model.vocab_size=50_304", *words)
    check(config)
    found = [line for line in describe(config).splitlines() if "advice" in line]
    assert len(found) == (advice is not None)
    assert not found or re.fullmatch(f"advice: {advice}", found[0])


def test_batch_sizes_by_hand() -> None:
    def phase(start: int, step: int, rows: int) -> PhaseConfig:
        warmup = BatchWarmupConfig(start_rows=start, step_rows=step, tokens=1)
        return PhaseConfig(tokens=1, row_tokens=8, batch_rows=rows, microbatch_tokens=8, batch_warmup=warmup)

    assert phase(768, 768, 4608).batch_sizes == [768, 1536, 2304, 3072, 3840, 4608]
    assert phase(4, 5, 10).batch_sizes == [4, 9, 10]
    assert PhaseConfig(tokens=1, row_tokens=8, batch_rows=6, microbatch_tokens=8).batch_sizes == [6]


def test_expected_steps_by_hand() -> None:
    """The first 600 tokens: 200 in batches of 2 rows of 10, 400 in batches of 4, 10 steps each; then 320 in 6 x 10."""
    warmup = BatchWarmupConfig(start_rows=2, step_rows=2, tokens=600)
    phase = PhaseConfig(tokens=920, row_tokens=10, batch_rows=6, microbatch_tokens=10, batch_warmup=warmup)
    assert expected_steps(phase) == 10 + 10 + round(320 / 60)
