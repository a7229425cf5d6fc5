"""SuperBPE (arXiv 2503.13423): byte-level BPE whose last merges join words.

The first stage is the usual BPE, which merges within words. The second continues across white space: its merges are
learned on the tokens that the first stage's merges give when text is cut only at line ends and around numbers. The
finished tokenizer cuts and merges text in the same way, so training and use agree.

The tokenizers library cannot continue a training. So the second stage trains another BPE, in which each token of the
first is one letter, and its merges are translated back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from data_prep.clean.clean_documents import training_draw
from data_prep.make_tokenizer import SPECIAL_TOKENS, add_spare, train_tokenizer
from data_prep.trim_tokenizer import merges_of
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.errors import ConfigError

_CHUNKS = pre_tokenizers.Split(Regex(r" ?\p{N}+|[\r\n]+|(?:(?! ?\p{N})[^\r\n])+"), "isolated")
_LETTERS = 0x20000  # the first of 900,000 code points without white space
_CHARACTERS = 1 << 26  # of text in the second stage, picked by hash; it takes about 40 bytes of memory a character
_AT_ONCE = 64  # texts that are tokenised together


def train_superbpe(
    texts: Callable[[], Iterable[str]], vocab_size: int, spare_entries: int, first_share: float
) -> Tokenizer:
    """Train both stages; the same texts give the same tokenizer.

    Args:
        texts: return the documents, which are read twice.
        vocab_size, spare_entries: as `train_tokenizer`.
        first_share: the part of the vocabulary, without spare entries, after which merges cross white space; 1: BPE.

    Raises:
        ConfigError: the share is not above 0 and at most 1.
    """
    if not 0 < first_share <= 1:
        raise ConfigError(f"--superbpe {first_share:g}: the first stage's share is above 0 and at most 1. Give 0.8.")
    if first_share == 1:
        return train_tokenizer(iter(texts()), vocab_size, spare_entries)
    entries, characters = vocab_size - spare_entries, 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for text in texts():
            characters += len(text)
            yield text

    first = train_tokenizer(counted(), round(first_share * entries))
    first.pre_tokenizer = pre_tokenizers.Sequence([_CHUNKS, pre_tokenizers.ByteLevel(False, use_regex=False)])
    sample = (text for text in texts() if training_draw(text) * characters < _CHARACTERS)
    model = (content := json.loads(first.to_str()))["model"]
    vocabulary, spelling = model["vocab"], {chr(_LETTERS + id): token for token, id in model["vocab"].items()}
    letters, num_merges = list(spelling)[len(SPECIAL_TOKENS) :], entries - len(vocabulary)
    second = Tokenizer(models.BPE())
    second.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # a few more: different sequences of tokens may spell one superword
    size = len(letters) + num_merges + num_merges // 50 + 64
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False, initial_alphabet=letters)
    with tokenizer_threads(True):
        second.train_from_iterator(_as_letters(first, sample), trainer)
    merged_pairs = {(left, right) for left, right, _ in merges_of(model)}
    for pair in merges_of(json.loads(second.to_str())["model"]):
        left, right = ("".join(map(spelling.__getitem__, part)) for part in pair[:2])
        if len(vocabulary) < entries and (left, right) not in merged_pairs:
            merged_pairs.add((left, right))
            model["merges"].append([left, right])
            vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer.from_str(json.dumps(content))
    add_spare(tokenizer, spare_entries)
    return tokenizer


def _as_letters(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[str]:
    """Yield texts with a letter for each token and a space between chunks."""
    tokenizer.encode_special_tokens = True
    while some := list(islice(texts, _AT_ONCE)):
        for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
            chunks = groupby(zip(encoding.word_ids, encoding.ids, strict=True), lambda pair: pair[0])
            yield " ".join("".join(chr(_LETTERS + id) for _, id in chunk) for _, chunk in chunks)
