"""A small exported model, and changes to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.weights.hf_folder import export

CONFIG = ModernBertConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=5,
    num_heads=2,
    intermediate_size=48,
    global_attn_every_n_layers=2,
    local_attention=8,
    global_rope_theta=80_000.0,
    local_rope_theta=5_000.0,
    norm_eps=1e-4,
    init_std=0.2,
)


def write(
    model: ModernBertForMaskedLM, tokenizer_folder: Path, out: Path, config: ModernBertConfig = CONFIG, **changes: Any
) -> Path:
    arguments: dict[str, Any] = {"max_tokens": 512, "card": "# A model\n"}
    export(model.state_dict(), config, tokenizer_folder=tokenizer_folder, out=out, **(arguments | changes))
    return out


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))
