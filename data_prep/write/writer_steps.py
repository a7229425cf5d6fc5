"""The last step of a task: tokenise its documents and write them as shards.

A task uses one core: the tokenizers library is limited to the calling thread if there are as many tasks as cores. The
output of a task depends only on its input; an interrupted task starts again with an empty folder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data_prep.clean.clean_documents import Tally
from data_prep.clean.duplicates import Excluded
from data_prep.make_tokenizer import (
    TOKENIZER_FILE,
    encode_documents,
    encode_with_offsets,
    num_entries,
    require_unspoken,
)
from data_prep.read.reader_steps import FIELDS, SOURCE, SPLIT, WORDS, Step
from data_prep.read.segmented_words import inside_words
from data_prep.tasks.work import Work
from modernbert_train.config.tools.prepare import PrepareConfig, has_words
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.data.read.rows import LeftOut
from modernbert_train.vocabulary import role_tokens

_BATCH_CHARACTERS = 1 << 18  # text tokenised together; takes about 200 bytes of memory a character


class WriteShards(Step[PrepareConfig]):
    """Step that tokenises a task's documents and writes a folder of shards for each of their splits.

    Args:
        work, config, stage: see `Step`; with the tokenizer made.
        excluded: counters of the duplicates that earlier steps skip.
        threads: tokenise with a thread for each core, because no other task runs at the same time.
    """

    type = "writer"
    name = "shards"

    def __init__(
        self, work: Work, config: PrepareConfig, stage: str, excluded: list[Excluded], threads: bool = False
    ) -> None:
        super().__init__(work, config, stage)
        self._excluded = excluded
        self._threads = threads

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> None:
        """Write a task's shards, and then the tally.

        Raises:
            DataError: a text gives no tokens and `on_error` is `stop`; the tokenizer makes special tokens from text.
        """
        from modernbert_train.data.shard_writer import ShardWriter  # imports streaming and torch, which takes seconds

        started = time.monotonic()
        folder = self._work.shards(rank)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file = self._work.tokenizer / TOKENIZER_FILE
        tokenizer = Tokenizer.from_file(str(file))
        entries, sha256 = num_entries(tokenizer), file_sha256(file)
        writers: dict[str, ShardWriter] = {}
        tally, with_words = Tally(), has_words(self._config)
        roles = role_tokens(file)
        unknown_id = tokenizer.token_to_id(roles.get("unk", ""))
        for batch in _batches(data or ()):
            with tokenizer_threads(self._threads):
                encoded = _encode(tokenizer, batch, with_words)
            for document, (ids, inside) in zip(batch, encoded, strict=True):
                source, split = document.metadata[SOURCE], document.metadata[SPLIT]
                if not ids:
                    item = LeftOut(document.id, "no_tokens", "the tokenizer makes no token of this text")
                    tally.leave_out(source, item, self._config.on_error)
                    continue
                if split not in writers:
                    writers[split] = ShardWriter(
                        folder / split, entries, sha256, self._config.shard_bytes, words=with_words
                    )
                writers[split].write(ids, inside_words=inside)
                counts = tally.source(source)
                counts.documents[split] += 1
                counts.text_bytes[split] += len(document.text.encode("utf-8"))
                counts.tokens[split] += len(ids)
                if unknown_id is not None and unknown_id in ids:
                    counts.altered["unknown_tokens"] += 1
                tally.count_fields(split, document.metadata[FIELDS], len(ids))
        for writer in writers.values():
            writer.finish()
            require_unspoken(tokenizer, writer.token_counts, roles)
        for excluded in self._excluded:
            tally.add(excluded.tally)
        self._leave(tally, rank, started)


def _encode(
    tokenizer: Tokenizer, batch: list[Document], with_words: bool
) -> Sequence[tuple[list[int], NDArray[Any] | None]]:
    """Return the token ids of each document, and with words, which of the tokens continue a word."""
    texts = [document.text for document in batch]
    if not with_words:
        return [(ids, None) for ids in encode_documents(tokenizer, texts)]
    return [
        (ids, inside_words(document.metadata[WORDS], document.text, offsets_T2))
        for document, (ids, offsets_T2) in zip(batch, encode_with_offsets(tokenizer, texts), strict=True)
    ]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
