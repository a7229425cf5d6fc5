"""Retrieval over 30,000 tokens, through `prepare`, `train` in rows of 32,768 with yarn, `export` and transformers.

If this breaks, a context extension trains for days and its model still reads 8,192 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from data_prep.prepare import main as prepare
from modernbert_train.__main__ import main
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.weights.hf_folder import export
from tests.support.runs import records

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
NEEDLES, HAY = ["gold", "jade", "ruby", "opal"], [f"straw{number}" for number in range(7)]
WORDS = {word: index for index, word in enumerate([*SPECIAL, *NEEDLES, *HAY])}
FAR, ROW = 30_000, 32_768
# one layer and one head of 8 pairs. In the slowest pair a query and a key at the distance FAR are opposite; scaled by 4
# they are an eighth of a turn apart
CONFIG = ModernBertConfig(
    vocab_size=16, hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16, attention_out_dropout=0.0,
    global_rope_theta=35_380.0,
)  # fmt: skip


def finder() -> dict[str, Tensor]:
    """Return weights with which [MASK] attends to a needle and predicts it."""
    weights = {name: torch.zeros_like(each) for name, each in ModernBertForMaskedLM(CONFIG).state_dict().items()}
    embedding_VD = torch.zeros(16, 16)  # channel 0: a needle; 1: [MASK]; 2 to 5: which needle; 6 and above: which hay
    embedding_VD[WORDS["[MASK]"], 1] = 1
    for number, word in enumerate(NEEDLES):
        embedding_VD[WORDS[word], [0, 2 + number]] = 1
    for number, word in enumerate(HAY):
        embedding_VD[WORDS[word], 6 + number] = 1
    weights["model.embeddings.tok_embeddings.weight"] = weights["decoder.weight"] = embedding_VD
    q_HD, k_HD, v_HD = weights["model.layers.0.attn.Wqkv.weight"].unflatten(0, (3, 16)).unbind()
    q_HD[7, 1] = k_HD[7, 0] = 3.0  # half of the slowest pair
    ids = torch.arange(2, 6)
    v_HD[ids, ids] = 1.0
    weights["model.layers.0.attn.Wo.weight"][ids, ids] = 4.0
    weights["head.dense.weight"][ids, ids] = 1.0
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
    return weights


def write_tokenizer(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, WORDS[name]) for name in ("[CLS]", "[SEP]")]
    )
    roles = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)
    return folder


@torch.no_grad()
def found(folder: Path, distance: int) -> list[str]:
    """Return the words that transformers predicts so far behind two needles."""
    model: Any = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    words = []
    for needle in NEEDLES[:2]:
        ids = [WORDS["[CLS]"], WORDS[needle], *(WORDS[HAY[i % 7]] for i in range(distance - 1)), WORDS["[MASK]"]]
        # the masks that transformers makes otherwise take 1 GB each
        hidden_D = model.model(torch.tensor([ids]), {"full_attention": None}).last_hidden_state[0, -1]
        words.append([*WORDS][int(model.decoder(model.head(hidden_D)).argmax())])
    return words


@pytest.mark.runs
def test_a_model_finds_what_stands_30_000_tokens_away(tmp_path: Path) -> None:
    """The first model finds a needle at 2,000 tokens; after a phase with yarn, at 30,000."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        hay = [HAY[(i * (number + 2)) % 7] for i in range(ROW - 4)]
        (texts / f"{number}.txt").write_text(" ".join([NEEDLES[number], *hay]), encoding="utf-8")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    sources = f"sources={{books: {{kind: text, path: {texts}, glob: '*.txt'}}}}"
    assert prepare([f"out={tmp_path}/data", sources, f"tokenizer.path={tokenizer}", "validation_share=0"]) == 0
    begun = tmp_path / "begun"
    export(finder(), CONFIG, tokenizer_folder=tokenizer, out=begun, max_tokens=8192, card="")

    run = tmp_path / "run.yaml"
    run.write_text(f"""
name: long
runs_folder: {tmp_path}/runs
data: {{train: {tmp_path}/data/train, validation: null, tokenizer: {tmp_path}/data/tokenizer, num_workers: 0}}
weights: {{init_from: {begun}}}
model: {{vocab_size: 16, hidden_size: 16, num_layers: 1, num_heads: 1, intermediate_size: 16}}
objective: {{mask_rate: 0.01}}
optim: {{name: stable_adamw, lr: 1e-3}}
compute: {{device: cpu}}
phases:
  long:
    tokens: 30_000
    row_tokens: {ROW}
    batch_rows: 1
    microbatch_tokens: {ROW}
    model: {{rope_scaling: yarn, rope_factor: 4, rope_original_tokens: 8192}}
""")
    assert main(["train", str(run)]) == 0
    trained = records(tmp_path / "runs/long")
    assert [(entry["row_tokens"], entry["tokens"]) for entry in trained] == [(ROW, ROW - 1)], "one text is one row"
    assert main(["export", str(run), "--out", str(tmp_path / "hf")]) == 0

    written = json.loads((tmp_path / "hf/config.json").read_text())
    assert written["max_position_embeddings"] == ROW
    assert written["rope_parameters"]["full_attention"] == {
        "rope_type": "yarn", "rope_theta": 35_380.0, "factor": 4.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    stored, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", begun))
    assert not torch.equal(stored["model.layers.0.attn.Wo.weight"], before["model.layers.0.attn.Wo.weight"])
    assert found(begun, 2000) == NEEDLES[:2] != found(begun, FAR)
    assert found(tmp_path / "hf", FAR) == NEEDLES[:2]
