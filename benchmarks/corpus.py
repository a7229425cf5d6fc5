"""A data set for benchmarks where there is no text: shards, tokenizer and card as data_prep/prepare.py writes them.

Lengths are log-normal, as those of web text are after filtering; ids are as frequent as words are (Zipf's law). The
tokenizer knows one word for each id and is only there because a run asks for one.

    python -m benchmarks.corpus FOLDER --tokens 40_000_000
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from data_prep.make_tokenizer import save_tokenizer
from modernbert_train.data.dataset_card import INDEX, LENGTHS, file_sha256, file_xxh3, read_card, write_card
from modernbert_train.data.shard_writer import ShardWriter
from modernbert_train.vocabulary import read_vocabulary

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
SHARD_BYTES = 1 << 26
_MOST_LINKS = 60_000  # to one file, of ext4


def write_corpus(
    folder: Path,
    vocab_size: int,
    tokens: int,
    median_tokens: int,
    longest: int,
    seed: int = 0,
    documents: int | None = None,
) -> None:
    """Write folder/train and folder/tokenizer.

    Args:
        folder: made here.
        vocab_size: entries of the tokenizer, special tokens included.
        tokens: to write, roughly.
        median_tokens, longest: of a document.
        seed: of lengths and ids.
        documents: so many, in one shard, whatever their tokens; None: as many as it takes.
    """
    words = {name: number for number, name in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(len(SPECIAL), vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder / "tokenizer")

    vocabulary = read_vocabulary(folder / "tokenizer")
    draw = np.random.default_rng(seed)
    frequency = np.cumsum(1 / (np.arange(vocab_size - len(SPECIAL)) + 2.7))
    shard_bytes = SHARD_BYTES if documents is None else 1 << 31
    writer = ShardWriter(folder / "train", vocabulary.num_entries, vocabulary.sha256, shard_bytes)
    while writer.tokens < tokens if documents is None else writer.documents < documents:
        length = int(np.clip(draw.lognormal(np.log(median_tokens), 0.8), 8, longest))
        ids = np.searchsorted(frequency, draw.random(length) * frequency[-1])
        writer.write((len(SPECIAL) + ids).tolist())
    writer.finish()


def write_index_of(
    folder: Path, shards: int, documents: int, vocab_size: int, median_tokens: int, seed: int = 0
) -> None:
    """Write folder/train and folder/tokenizer: what a run sees of a corpus that is larger than the disk.

    Index, lengths and card have their true size. The shards are real files too, but only a few different ones, under
    as many names as the index has: hard links, which cost nothing.

    Args:
        folder: made here.
        shards, documents: of the corpus; a multiple of the shards is made of the documents.
        vocab_size, median_tokens, seed: as of `write_corpus`.
    """
    in_each = documents // shards
    distinct = -(-shards // _MOST_LINKS)
    cards, entries, lengths = [], [], []
    for number in range(distinct):
        part = folder / f"part-{number}"
        write_corpus(part, vocab_size, 0, median_tokens, 8192, seed + number, in_each)
        (entry,) = json.loads((part / "train" / INDEX).read_text(encoding="utf-8"))["shards"]
        cards.append(read_card(part / "train"))
        entries.append(entry)
        lengths.append(np.load(part / "train" / LENGTHS))
    os.replace(folder / "part-0/tokenizer", folder / "tokenizer")
    train = folder / "train"
    train.mkdir()
    text = []
    for shard in range(shards):
        entry, name = entries[shard % distinct], f"shard.{shard:06d}.mds"
        there = folder / f"part-{shard % distinct}/train" / entry["zip_data"]["basename"]
        os.link(there, train / f"{name}.zstd")
        raw = entry["raw_data"] | {"basename": name}
        text.append(json.dumps(entry | {"raw_data": raw, "zip_data": entry["zip_data"] | {"basename": f"{name}.zstd"}}))
    (train / INDEX).write_text('{"version": 2, "shards": [' + ", ".join(text) + "]}", encoding="utf-8")
    whole = np.lib.format.open_memmap(train / LENGTHS, "w+", lengths[0].dtype, (shards * in_each,))
    for shard in range(shards):
        whole[shard * in_each : (shard + 1) * in_each] = lengths[shard % distinct]
    whole.flush()
    for number in range(distinct):
        shutil.rmtree(folder / f"part-{number}")
    of_each = [cards[shard % distinct].tokens for shard in range(shards)]
    card = replace(cards[0], documents=shards * in_each, tokens=sum(of_each), index_sha256=file_sha256(train / INDEX))
    lengths_sha256, lengths_xxh3 = file_sha256(train / LENGTHS), file_xxh3(train / LENGTHS)
    write_card(train, replace(card, lengths_sha256=lengths_sha256, lengths_xxh3=lengths_xxh3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what it holds is removed")
    parser.add_argument("--vocab-size", type=int, default=50_368)
    parser.add_argument("--tokens", type=int, default=40_000_000)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    write_corpus(options.folder, options.vocab_size, options.tokens, median_tokens=300, longest=4096)


if __name__ == "__main__":
    main()
