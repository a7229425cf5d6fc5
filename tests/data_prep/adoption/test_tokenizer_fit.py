"""Ids of another tokenizer are noticed in every shard. If this breaks, a model is trained on meaningless text."""

from __future__ import annotations

import argparse
import inspect
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep.adopt import adopt
from data_prep.adoption.tokenizer_fit import end_tokens, require_fit, take_sample
from modernbert_train.errors import DataError
from tests.support.layouts import write_mds
from tests.support.make_shards import make_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [inspect.getsource(module) for module in (json, inspect, pickle)]
DOCUMENTS = [text[at : at + 900] for text in TEXTS for at in range(0, 30_000, 900) if len(text) > at + 900]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Train a tokenizer on code, and another of the same size on the same code in capital letters."""
    folder = tmp_path_factory.mktemp("tokenizers")
    make_tokenizer(folder / "one", TEXTS, 1024)
    make_tokenizer(folder / "two", [text.swapcase() for text in TEXTS], 1024)
    return str(folder / "one"), str(folder / "two")


def ids_of(folder: str, text: str) -> NDArray[np.int64]:
    return np.array(Tokenizer.from_file(f"{folder}/tokenizer.json").encode(text, add_special_tokens=False).ids)


def judge(documents: list[NDArray[np.int64]], folder: str) -> None:
    require_fit(take_sample([("a", each) for each in documents], folder, end_tokens(folder)), "a", folder, False)


@pytest.mark.runs
def test_the_right_tokenizer_is_taken_also_of_documents_that_were_cut(tokenizers: tuple[str, str]) -> None:
    """Within a word, or between the bytes of a character."""
    own, _ = tokenizers
    whole = ids_of(own, "".join(DOCUMENTS[:6]))
    for start in range(3, 60):
        judge([whole[start : start + 40 + start]], own)


@pytest.mark.parametrize("shift", [1, 2, 4, 7])
def test_ids_shifted_by_a_constant_are_refused(tokenizers: tuple[str, str], shift: int) -> None:
    """As when special tokens were added in front of a vocabulary later; most ids decode to plausible words."""
    own, _ = tokenizers
    shifted = [np.minimum(ids_of(own, text) + shift, 1023) for text in DOCUMENTS[:8]]
    with pytest.raises(DataError, match=r"equal and in order .* and 98% are required"):
        judge(shifted, own)


@pytest.mark.runs
def test_ids_of_a_unigram_are_held_against_its_scores(tmp_path: Path) -> None:
    """Its entries are mostly whole words, which any ids decode to: 100 % of ids that are 50 too high."""
    own = Tokenizer(models.Unigram())
    own.pre_tokenizer, own.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    usual = {"special_tokens": SPECIAL, "unk_token": "[UNK]", "show_progress": False}
    own.train_from_iterator(TEXTS, trainers.UnigramTrainer(vocab_size=1500, **usual))
    own.save(str(tmp_path / "tokenizer.json"))
    folder, entries = str(tmp_path), own.get_vocab_size()
    rows = [ids_of(folder, text) for text in DOCUMENTS[:12]]
    judge(rows, folder)
    judge([ids_of(folder, inspect.getsource(argparse)[:5_000])], folder)  # text outside its training set
    shuffled = np.random.default_rng(0).permutation(np.arange(5, entries))
    for wrong in ([row + 50 for row in rows], [row + 300 for row in rows], [shuffled[row - 5] for row in rows]):
        with pytest.raises(
            DataError, match=r"the likeliest entries of .* as frequent as in its own text|equal and in order"
        ):
            judge([np.minimum(row, entries - 1) for row in wrong], folder)
    rows[3][7] = SPECIAL.index("[MASK]")
    with pytest.raises(DataError, match=r"\[MASK\] occurs within documents, which no text contains"):
        judge(rows, folder)


def make_word_piece(folder: Path, size: int, lowercase: bool) -> str:
    own = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    own.normalizer, own.decoder = normalizers.BertNormalizer(lowercase=lowercase), decoders.WordPiece()
    own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    usual = {"special_tokens": SPECIAL, "show_progress": False}
    own.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=size, **usual))
    folder.mkdir()
    own.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.runs
def test_ids_of_another_word_piece_are_refused(tmp_path: Path) -> None:
    """33 of 33: shifted by a constant, in another order, or of a tokenizer of other size or case; its own are taken."""
    sizes = {"small": (1000, True), "large": (2000, True), "cased": (1500, False)}
    folders = {name: make_word_piece(tmp_path / name, *settings) for name, settings in sizes.items()}
    rows = {name: [ids_of(folder, text) for text in DOCUMENTS[:12]] for name, folder in folders.items()}
    wrong = [(rows[name], folders[other]) for name in sizes for other in sizes if name != other]
    for name, folder in folders.items():
        judge(rows[name], folder)
        judge([ids_of(folder, inspect.getsource(argparse)[:5_000])], folder)  # text outside its training set
        judge([row[3:-5] for row in rows[name]], folder)  # cut within words
        entries = Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab_size()
        shifts = (1, 2, 4, 7, 50, 300)
        wrong += [([np.minimum(row + shift, entries - 1) for row in rows[name]], folder) for shift in shifts]
        orders = [np.random.default_rng(seed).permutation(np.arange(5, entries)) for seed in range(3)]
        wrong += [([order[row - 5] for row in rows[name]], folder) for order in orders]
    assert len(wrong) == 33
    for documents, folder in wrong:
        with pytest.raises(DataError, match=r"are equal and in order|as frequent as in its own text|holds token id"):
            judge(documents, folder)


@pytest.mark.runs
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_few_documents_of_another_tokenizer_are_found_wherever_they_lie(
    tokenizers: tuple[str, str], tmp_path: Path
) -> None:
    """20 of 110, at the end of a shard: the first are right."""
    own, _ = tokenizers
    rows = [ids_of(own, text) for text in (DOCUMENTS * 3)[:110]]
    rows[90:] = [(row * 389 + 17) % 1000 for row in rows[90:]]  # the same pieces, in another order
    source, out = tmp_path / "theirs", str(tmp_path / "out")
    samples = [{"input_ids": row.astype(np.uint16)} for row in rows]
    write_mds(source, {"input_ids": "ndarray:uint16"}, samples, size_limit=1 << 20)
    with pytest.raises(DataError, match=rf"{source}/shard\.00000\.mds: of .* tokens"):
        adopt(str(source), own, out=out)
    assert "110 documents" in adopt(str(source), own, out=out, anyway=True)
