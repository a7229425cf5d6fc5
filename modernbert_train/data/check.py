"""Do the shards, the tokenizer and the model belong together? Answered from small files, without torch."""

from __future__ import annotations

from collections.abc import Iterator

from modernbert_train.config.schema import RunConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import read_vocabulary


def check_data(config: RunConfig) -> None:
    """Compare the cards of the shards with the tokenizer and the model.

    Raises:
        DataError: a folder is missing or damaged, or the shards were made with another tokenizer.
        ConfigError: the model's vocabulary does not fit the tokenizer.
    """
    vocabulary = read_vocabulary(config.data.tokenizer)
    if vocabulary.num_entries > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer in {config.data.tokenizer}, "
            f"which has {vocabulary.num_entries} entries. Set model.vocab_size="
            f"{-(-vocabulary.num_entries // 64) * 64}."
        )
    mistakes = [message for folder in _folders(config) for message in _mismatch(config, folder, vocabulary.sha256)]
    if mistakes:
        raise DataError("\n".join(mistakes))


def _folders(config: RunConfig) -> list[tuple[str, str]]:
    folders = [("data.train", config.data.train)]
    if config.data.validation is not None:
        folders.append(("data.validation", config.data.validation))
    return folders


def _mismatch(config: RunConfig, folder: tuple[str, str], sha256: str) -> Iterator[str]:
    key, path = folder
    card = read_card(path)
    if card.tokenizer_sha256 != sha256:
        yield (
            f"{key}={path}: made with another tokenizer (sha256 {card.tokenizer_sha256[:12]}...) than data.tokenizer="
            f"{config.data.tokenizer} ({sha256[:12]}...). Every token would mean something else. Name the tokenizer "
            "folder beside the shards, or prepare them again."
        )
    if card.tokens == 0:
        yield f"{key}={path}: the shards hold no tokens. Prepare them again from more text."
