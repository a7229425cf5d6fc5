"""Models as transformers writes them, with tokenizers whose special tokens have other names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from modernbert_train.vocabulary import read_vocabulary

TEXTS = ["the quick brown fox", "jumps over the lazy dog and then sleeps", "a cat sat on the mat, on the mat!"] * 20
SIZE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 130,
}  # fmt: skip
# names of the special tokens in published tokenizers: cls, pad, sep, unk, mask
ROBERTA, MMBERT = ("<s>", "<pad>", "</s>", "<unk>", "<mask>"), ("<bos>", "<pad>", "<eos>", "<unk>", "<mask>")
EUROBERT = ("<|begin_of_text|>", "<|pad|>", "<|end_of_text|>", "<|unk|>", "<|mask|>")
BERT = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")


def tokenizer_with(names: tuple[str, ...], folder: Path, *, says: str = "roles", processor: str = "template") -> Path:
    """Write a tokenizer whose special tokens have these names.

    Args:
        names: of cls, pad, sep, unk, mask, with the ids 0 to 4.
        folder: folder of the tokenizer.
        says: keys of tokenizer_config.json: roles; decoder, bos_token and eos_token for cls and sep; map, only the keys
            of special_tokens_map.json.
        processor: kind of its post-processor; "none" for no post-processor.
    """
    cls, pad, sep, unk, mask = names
    tokenizer = Tokenizer(models.BPE(unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in names]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    if processor == "roberta":
        tokenizer.post_processor = processors.RobertaProcessing((sep, 2), (cls, 0), True, False)
    elif processor == "template":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[cls, "$A", sep], pair=[cls, "$A", sep, "$B:1", f"{sep}:1"], special_tokens=[(cls, 0), (sep, 2)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"cls_token": cls, "sep_token": sep, "pad_token": pad, "unk_token": unk, "mask_token": mask}
    if says == "decoder":
        roles = {"bos_token": cls, "eos_token": sep, "pad_token": pad, "unk_token": unk, "mask_token": mask}
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(plain | ({} if says == "map" else roles)))
    if says == "map":
        (folder / "special_tokens_map.json").write_text(json.dumps(roles | {"mask_token": {"content": mask}}))
    return folder


def saved(kind: type[Any], folder: Path, names: tuple[str, ...] = BERT, **settings: Any) -> Path:
    """Write a model as its authors would; `settings` are configuration keys, except `says` and `processor`."""
    own = {key: settings.pop(key) for key in ("says", "processor") if key in settings}
    tokenizer_with(names, folder, **own)
    entries = len(read_vocabulary(folder).ordinary) + 5
    torch.manual_seed(3)
    kind(kind.config_class(vocab_size=entries, initializer_range=0.2, **SIZE | settings)).save_pretrained(folder)
    return folder


def task_of(folder: Path, rows: Iterable[dict[str, str]], **keys: Any) -> str:
    """Write a task of labelled rows, the same for training and validation; return its file."""
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": f"{folder}/texts.jsonl", "validation": {"dev": f"{folder}/texts.jsonl"}}
    usual = {"kind": "single-label", "lr": 1e-3, "epochs": 1, "batch_texts": 16}
    (folder / "task.yaml").write_text(json.dumps(usual | files | keys))
    return f"{folder}/task.yaml"


def two_classes() -> list[dict[str, str]]:
    return [{"text": f"{n} {text}", "label": "yn"[n % 2]} for n, text in enumerate(TEXTS)]


def mean_of_states(folder: Path, text: str) -> torch.Tensor:
    """Return the mean of the last hidden states, as sentence-transformers computes it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states_TD = model(**{"input_ids": tokenizer(text, return_tensors="pt")["input_ids"]}).last_hidden_state[0]
    return states_TD.mean(dim=0)


PAD_1 = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
FOREIGN: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "roberta": (transformers.RobertaForMaskedLM, ROBERTA, {**PAD_1, "type_vocab_size": 1, "processor": "roberta"}),
    "roberta without a head": (transformers.RobertaModel, ROBERTA, {**PAD_1, "type_vocab_size": 1}),
    "xlm-roberta": (transformers.XLMRobertaModel, ROBERTA, {**PAD_1, "type_vocab_size": 1, "says": "map"}),
    "camembert": (transformers.CamembertForMaskedLM, ROBERTA, {**PAD_1, "type_vocab_size": 1}),
    # two of three layers are local, and so is the last one, unlike in a ModernBERT of this project
    "mmbert": (transformers.ModernBertForMaskedLM, MMBERT, {**PAD_1, "says": "decoder", "num_hidden_layers": 3,
        "global_attn_every_n_layers": 3, "local_attention": 16}),
    "modernbert without a head": (transformers.ModernBertModel, MMBERT, {**PAD_1, "says": "decoder"}),
    "eurobert": (transformers.EuroBertModel, EUROBERT, {**PAD_1, "says": "decoder"}),
    "deberta v3": (transformers.DebertaV2Model, BERT, {"pad_token_id": 1, "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "position_biased_input": False, "type_vocab_size": 0, "hidden_act": "gelu", "max_relative_positions": -1}),
    "bert without a head": (transformers.BertModel, BERT, {"pad_token_id": 1}),
    "esm": (transformers.EsmForMaskedLM, BERT, {**PAD_1, "mask_token_id": 4, "position_embedding_type": "rotary",
        "emb_layer_norm_before": False}),
    "distilbert without a head": (transformers.DistilBertModel, BERT, {"dim": 32, "hidden_dim": 48, "n_layers": 2,
        "n_heads": 2}),
    "electra without a head": (transformers.ElectraModel, BERT, {"embedding_size": 32}),
    "albert without a head": (transformers.AlbertModel, BERT, {"embedding_size": 16}),
}  # fmt: skip
