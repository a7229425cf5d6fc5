"""Synthetic data for benchmarks: shards, tokenizer and card in the form of data_prep/prepare.py.

Lengths are log-normal, like filtered web text's; ids follow Zipf's law, like words. The tokenizer has one word
for each id and exists only because a run requires one.

    python -m benchmarks.corpus FOLDER --tokens 40_000_000
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from data_prep.make_tokenizer import save_tokenizer
from modernbert_train.data.shard_writer import ShardWriter
from modernbert_train.vocabulary import read_vocabulary

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
SHARD_BYTES = 1 << 26


def write_corpus(folder: Path, vocab_size: int, tokens: int, median_tokens: int, longest: int, seed: int = 0) -> None:
    """Write folder/train and folder/tokenizer.

    Args:
        folder: created here.
        vocab_size: entries of the tokenizer, special tokens included.
        tokens: approximate number to write.
        median_tokens, longest: tokens of a document.
        seed: of lengths and ids.
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
    writer = ShardWriter(folder / "train", vocabulary.num_entries, vocabulary.sha256, SHARD_BYTES)
    while writer.tokens < tokens:
        length = int(np.clip(draw.lognormal(np.log(median_tokens), 0.8), 8, longest))
        ids = np.searchsorted(frequency, draw.random(length) * frequency[-1])
        writer.write((len(SPECIAL) + ids).tolist())
    writer.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="its contents are removed")
    parser.add_argument("--vocab-size", type=int, default=50_368)
    parser.add_argument("--tokens", type=int, default=40_000_000)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    write_corpus(options.folder, options.vocab_size, options.tokens, median_tokens=300, longest=4096)


if __name__ == "__main__":
    main()
