"""A small model that is written as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from tests.support.exported import CONFIG, write
from tests.support.front_door import cli  # noqa: F401

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]


@pytest.fixture(scope="module")
def model() -> ModernBertForMaskedLM:
    model = ModernBertForMaskedLM(CONFIG)
    initialize(model, CONFIG, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {token: i for i, token in enumerate([*"abcdefgh", *SPECIAL])}  # special ids 8 to 12
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 9), ("[SEP]", 10)]
    )
    roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **roles).save_pretrained(folder)
    return folder


@pytest.fixture
def exported(model: ModernBertForMaskedLM, tokenizer_folder: Path, tmp_path: Path) -> Path:
    return write(model, tokenizer_folder, tmp_path / "hf")
