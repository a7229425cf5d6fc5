"""A checkpoint in the format of AnswerDotAI's training code: Composer's Trainer, run on a model with that code's names.

Written from the published names and configuration keys (arXiv 2412.13663's repository), without any of its code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from modernbert_train import import_stubs
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM


def flexbert_settings(config: ModernBertConfig) -> dict[str, Any]:
    """Return that code's model_config for one of our architectures, with the keys inherited from bert-base."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "global_attn_every_n_layers": config.global_attn_every_n_layers,
        "sliding_window": config.local_attention,
        "rotary_emb_base": 10_000.0,
        "local_attn_rotary_emb_base": -1,  # the global one
        "rotary_emb_dim": None,
        "rotary_emb_scale_base": None,
        "rotary_emb_interleaved": False,
        "local_attn_rotary_emb_dim": None,
        "norm_kwargs": {"eps": config.norm_eps, "bias": False},
        "normalization": "layernorm",
        "attention_layer": "rope",
        "bert_layer": "prenorm",
        "embedding_layer": "sans_pos",
        "encoder_layer": "base",
        "mlp_layer": "glu",
        "padding": "unpadded",
        "embed_norm": True,
        "final_norm": True,
        "skip_first_prenorm": True,
        "hidden_act": "gelu",
        "head_pred_act": "gelu",
        "head_pred_bias": False,
        "head_pred_norm": True,
        "attn_qkv_bias": False,
        "attn_out_bias": False,
        "mlp_in_bias": False,
        "mlp_out_bias": False,
        "decoder_bias": True,
        "attn_out_dropout_prob": 0.1,
        "init_method": "full_megatron",
        "init_std": config.init_std,
        "init_cutoff_factor": config.init_cutoff,
        "initial_attention_layer": None,
        "initial_bert_layer": None,
        "initial_mlp_layer": None,
        "num_initial_layers": 1,
        "loss_kwargs": {"reduction": "mean"},
        "architectures": ["BertForMaskedLM"],
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
    }


class FlexBertConfig(transformers.BertConfig):
    """bert-base's configuration with more keys, like the reference."""


class FlexBertForMaskedLM(transformers.PreTrainedModel):
    """Our modules under the reference's names; the forward pass only gives every parameter a gradient."""

    config_class = FlexBertConfig

    def __init__(self, config: FlexBertConfig, ours: ModernBertForMaskedLM) -> None:
        super().__init__(config)
        self.bert = nn.Module()
        self.bert.embeddings = ours.model.embeddings
        self.bert.encoder = nn.Module()
        self.bert.encoder.layers = ours.model.layers
        self.bert.final_norm = ours.model.final_norm
        self.head, self.decoder = ours.head, ours.decoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.decoder(self.head(self.bert.final_norm(self.bert.embeddings(input_ids))))
        rest = sum(parameter.square().sum() for parameter in self.bert.encoder.parameters())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * rest
        return {"loss": loss, "logits": logits}


def write_reference_checkpoint(
    folder: Path, config: ModernBertConfig, tokenizer: Path | None
) -> tuple[Path, dict[str, Tensor]]:
    """Train two batches with Composer and let it save.

    Args:
        folder: folder of the file.
        config: the architecture.
        tokenizer: a tokenizer folder, stored in the file; None: Composer holds the model without transformers' wrapper,
            and configuration and tokenizer are not in the file.

    Returns:
        The file, and its weights under our names, without decoder.weight.
    """
    import_stubs.install()
    from composer import Trainer
    from composer.callbacks import LRMonitor, SpeedMonitor
    from composer.metrics.nlp import LanguageCrossEntropy, MaskedAccuracy
    from composer.models import ComposerModel, HuggingFaceModel
    from composer.optim import ConstantScheduler, DecoupledAdamW

    ours = ModernBertForMaskedLM(config)
    initialize(ours, config, seed=7)
    model = FlexBertForMaskedLM(FlexBertConfig(**flexbert_settings(config)), ours)
    if tokenizer is not None:
        wrapped = HuggingFaceModel(
            model,
            transformers.AutoTokenizer.from_pretrained(tokenizer),
            use_logits=True,
            metrics=[LanguageCrossEntropy(ignore_index=-100), MaskedAccuracy(ignore_index=-100)],
            allow_embedding_resizing=True,
        )
    else:

        class Plain(ComposerModel):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                return self.model(**batch)

            def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
                return outputs["loss"]

        wrapped = Plain()
    ids = torch.arange(8) % config.vocab_size
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for _ in range(8)]
    trainer = Trainer(
        model=wrapped,
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=4),
        max_duration="2ba",
        optimizers=DecoupledAdamW(wrapped.parameters(), lr=1e-3),
        schedulers=ConstantScheduler(),
        callbacks=[SpeedMonitor(window_size=1), LRMonitor()],
        device="cpu",
        progress_bar=False,
        seed=1,
        run_name="reference",
    )
    trainer.fit()
    saved = trainer.save_checkpoint(str(folder / "ep{epoch}-ba{batch}-rank{rank}.pt"))
    trainer.close()
    assert saved is not None
    names = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    return Path(saved), names
