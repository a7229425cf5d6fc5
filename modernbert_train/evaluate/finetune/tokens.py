"""Tokenize a task's texts to ids without special tokens; their names in a text become ordinary tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.examples import Example
from modernbert_train.vocabulary import Vocabulary, open_tokenizer, read_vocabulary

SPECIAL_TOKENS = 2  # [CLS] and [SEP]; the separator between two texts is part of the document
_AT_ONCE = 1024  # texts tokenised in one call


@dataclass(frozen=True)
class Reader:
    """A tokenizer with its task and maximum length.

    Attributes:
        folder: the tokenizer's.
        task: the task whose texts it tokenises.
        max_tokens: longest sequence, special tokens included.
    """

    folder: Path
    task: TaskConfig
    max_tokens: int

    @property
    def text_tokens(self) -> int:
        """Tokens between [CLS] and [SEP]."""
        return self.max_tokens - SPECIAL_TOKENS

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the library tokenizers; special tokens spelled out in a text are plain characters."""
        return open_tokenizer(self.folder)

    def ids(self, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> Iterator[list[list[int]]]:
        """Token ids of some texts of each example.

        Raises:
            DataError: the tokenizer reads a special token out of one; names the place.
        """
        special = {self.vocabulary.sep_id, self.vocabulary.cls_id}
        for at in range(0, len(examples), _AT_ONCE):
            part = texts[at : at + _AT_ONCE]
            encoded = iter(
                self.tokenizer.encode_batch_fast([text for each in part for text in each], add_special_tokens=False)
            )
            for example, each in zip(examples[at : at + _AT_ONCE], part, strict=True):
                ids_of_texts = [next(encoded).ids for _ in each]
                if any(not special.isdisjoint(ids) for ids in ids_of_texts):
                    raise DataError(f"{example.place}: the tokenizer reads [SEP] out of this text. Name another model.")
                yield ids_of_texts


def cut(text_ids: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Cut the texts to at most this many tokens: the longer of two loses its end until both are equal, then both."""
    if sum(map(len, text_ids)) <= max_tokens:
        return text_ids
    if len(text_ids) == 1:
        return [text_ids[0][:max_tokens]]
    first, second = map(len, text_ids)
    shorter = min(first, second, max_tokens // 2)
    keep = (shorter, max_tokens - shorter) if first <= second else (max_tokens - shorter, shorter)
    return [ids[:length] for ids, length in zip(text_ids, keep, strict=True)]
