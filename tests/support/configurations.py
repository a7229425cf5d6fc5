"""Configurations for tests of their rules."""

from __future__ import annotations

from collections.abc import Callable

from modernbert_train.config.schema import RunConfig

BASE = """\
name: base
data: {train: shards/train, tokenizer: shards/tokenizer}
optim: {lr: 1.0e-3}
phases:
  stable: {tokens: 1_000_000, row_tokens: 64, batch_rows: 4, microbatch_tokens: 64}
  decay: {tokens: 500_000, row_tokens: 64, batch_rows: 4, microbatch_tokens: 64}
"""
Load = Callable[..., RunConfig]
Refused = Callable[..., list[str]]


# keys that their published files set, with the values of base's first phase
THEIRS = """\
data_local: /data
data_remote:
max_seq_len: 1024
tokenizer_name: some/tokenizer
mlm_probability: 0.3
count_padding_tokens: false
run_name: base pretrain
model:
  name: flex_bert
  pretrained_model_name: bert-base-uncased
  tokenizer_name: ${tokenizer_name}
  model_config:
    vocab_size: 50368
    init_method: full_megatron
    num_hidden_layers: 22
    hidden_size: 768
    intermediate_size: 1152
    num_attention_heads: 12
    attention_layer: rope
    attention_probs_dropout_prob: 0.0
    attn_out_bias: false
    attn_out_dropout_prob: 0.1
    attn_qkv_bias: false
    bert_layer: prenorm
    embed_dropout_prob: 0.0
    embed_norm: true
    final_norm: true
    skip_first_prenorm: true
    embedding_layer: sans_pos
    loss_function: fa_cross_entropy
    loss_kwargs: {reduction: mean}
    mlp_layer: glu
    normalization: layernorm
    norm_kwargs: {eps: 1e-5, bias: false}
    hidden_act: gelu
    padding: unpadded
    rotary_emb_base: 10000.0
    local_attn_rotary_emb_base: -1
    sliding_window: 128
    global_attn_every_n_layers: 3
    unpad_embeddings: true
    masked_prediction: true
train_loader:
  name: text
  num_workers: 6
  dataset:
    local: ${data_local}
    remote: ${data_remote}
    split: train
    shuffle_seed: 21
    mlm_probability: ${mlm_probability}
    sequence_packing: true
    batch_size_warmup_min_size: 768
    batch_size_warmup_tokens: 50_000_000_000tok
eval_loader: {dataset: {mlm_probability: 0.15}}
scheduler: {name: warmup_stable_decay, t_warmup: 3_000_000_000tok, alpha_f: 0.0, t_decay: 0tok}
optimizer:
  name: decoupled_stableadamw
  lr: 8e-4
  betas: [0.9, 0.98]
  eps: 1.0e-06
  weight_decay: 1.0e-5
  filter_bias_norm_wd: true
algorithms: {}
max_duration: 1_719_000_000_000tok
eval_interval: 4000ba
save_interval: 4000ba
global_train_batch_size: 4608
device_train_microbatch_size: 96
precision: amp_bf16
seed: 17
autoresume: true
loggers: {wandb: {project: bert, entity: us}}
callbacks: {speed_monitor: {window_size: 100}}
made_up: 3
"""
