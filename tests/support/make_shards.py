"""Small shards and a small tokenizer for tests, written by the very functions that data preparation uses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.data.dataset_card import DatasetCard, file_sha256, write_card
from modernbert_train.vocabulary import read_vocabulary

VOCAB_SIZE = 512


def make_texts(number: int, seed: int = 11) -> list[str]:
    """Texts of some 150 words out of 200, so that a vocabulary of 512 can be trained on a few of them."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("aeioubdklmnrst", k=draw.randint(2, 8))) for _ in range(200)]
    return [" ".join(draw.choices(words, k=150)) for _ in range(number)]


def make_tokenizer(folder: Path, texts: Iterable[str] | None = None, vocab_size: int = VOCAB_SIZE) -> Path:
    """Train a byte-level BPE and write its folder; returns the folder."""
    from data_prep.make_tokenizer import require_size, save_tokenizer, train_tokenizer

    tokenizer = train_tokenizer(iter(make_texts(40) if texts is None else texts), vocab_size)
    require_size(tokenizer, vocab_size)
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    return folder


def make_documents(tokenizer_folder: Path, lengths: Sequence[int], seed: int = 11) -> list[NDArray[np.int64]]:
    """Documents of the given lengths, in tokens, cut out of generated text."""
    from tokenizers import Tokenizer

    from data_prep.make_tokenizer import encode_documents

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    texts = make_texts(-(-sum(lengths) // 150), seed)  # a word is at least one token
    stream = np.concatenate([np.array(ids) for ids in encode_documents(tokenizer, texts)])
    ends = np.cumsum(lengths)
    return [stream[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def make_shards(
    folder: Path, documents: Sequence[NDArray[np.int64]], tokenizer_folder: Path, shard_bytes: int = 1 << 11
) -> DatasetCard:
    """Write documents, in their order, as a folder of shards: index.json, lengths.npy, token_counts.npy, dataset.json.

    Args:
        folder: made here; must not exist.
        documents: token ids without [CLS] and [SEP].
        tokenizer_folder: the tokenizer whose hash goes onto the card.
        shard_bytes: size of a shard before compression; the default gives several shards for a few documents.
    """
    from modernbert_train.data.shard_writer import ShardWriter

    vocabulary = read_vocabulary(tokenizer_folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, vocabulary.num_entries, vocabulary.sha256, shard_bytes)
    for document in documents:
        writer.write(document.tolist())
    return writer.finish()


def write_plain_card(folder: Path, documents: int, tokens: int, **more: Any) -> DatasetCard:
    """Write the card of a folder that holds an index.json and a lengths.npy."""
    card = DatasetCard(
        column="tokens",
        dtype="uint16",
        documents=documents,
        tokens=tokens,
        vocab_size=384,
        tokenizer_sha256="0" * 64,
        index_sha256=file_sha256(folder / "index.json"),
        lengths_sha256=file_sha256(folder / "lengths.npy"),
        special_tokens="loader",
        created_by="test",
        **more,
    )
    write_card(folder, card)
    return card
