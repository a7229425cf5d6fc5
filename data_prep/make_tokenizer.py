"""Train a byte-level BPE on the corpus, or adapt an existing tokenizer to masked-language modelling.

Byte-level, because it can spell any text and so never needs [UNK]. [MASK] absorbs the space before it (lstrip), since
words include theirs; otherwise a mask written by hand would follow a stray space that training never showed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from modernbert_train.config.tools.prepare import SMALLEST_VOCABULARY
from modernbert_train.core.files import anything_as
from modernbert_train.core.read_json import read_json
from modernbert_train.core.tokenizer_threads import tokenizer_threads
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.errors import DataError
from modernbert_train.vocabulary import CONVENTION, NEEDED, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, role_tokens

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TOKENIZER_FILE = "tokenizer.json"
_MODEL_MAX_LENGTH = 8192  # longest context of the recipes; transformers truncates to it if `truncation` is set
_SPARE = "[unused"
_EXTENDED_ORDER = (UNK, CLS, SEP, PAD, MASK)  # so that OLMo's tokenizer gets the ids that ModernBERT gave it


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, spare_entries: int = 0, *, uncased: bool = False
) -> Tokenizer:
    """Train a byte-level BPE whose ids 0 to 4 are SPECIAL_TOKENS; the same texts give the same tokenizer.

    Args:
        texts: the documents, read once.
        vocab_size: entries at most, all included; a small text gives fewer, see `require_size`.
        spare_entries: entries at the end, [unused0] and so on, which no text gives.
        uncased: text is lower-cased and cut at white space and around each punctuation mark, as for uncased BERT
            (arXiv 1810.04805), so that a word has the same tokens wherever it stands. Accents are kept.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if uncased:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        each_word = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), each_word])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - spare_entries,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, **flags_of(token)) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    with tokenizer_threads(True):
        tokenizer.train_from_iterator(texts, trainer)
    add_spare(tokenizer, spare_entries)
    set_template(tokenizer)
    return tokenizer


def add_spare(tokenizer: Tokenizer, entries: int) -> None:
    """Add [unused0] and so on, which no text contains."""
    spare = [f"{_SPARE}{i}]" for i in range(entries)]
    tokenizer.add_special_tokens([AddedToken(token, **flags_of(token)) for token in spare])


def require_size(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a trained tokenizer with fewer entries than requested, because the text was too small.

    Raises:
        DataError: names the size that the text is enough for.
    """
    reached = tokenizer.get_vocab_size()
    if reached != vocab_size:
        fits = reached // 64 * 64
        remedy = f"Set tokenizer.vocab_size={fits} or less, or add text."
        if fits < SMALLEST_VOCABULARY:
            remedy = f"Add text; no vocabulary is smaller than {SMALLEST_VOCABULARY}."
        raise DataError(
            f"tokenizer.vocab_size={vocab_size}: the training documents hold too little text for it, they give "
            f"{reached} entries. {remedy}"
        )


def adapt_tokenizer(path: str | Path, extend: bool = False, spare_entries: int = 0) -> Tokenizer:
    """Load an existing tokenizer and adapt it to masked-language modelling; its ids stay as they are.

    Args:
        path: tokenizer.json or the folder that holds it.
        extend: add missing SPECIAL_TOKENS, and [unused...] entries up to a multiple of 64.
        spare_entries: with `extend`, minimum number of the latter.

    Returns:
        The tokenizer with special SPECIAL_TOKENS, [MASK] absorbing the space before it, the template
        [CLS] A [SEP] (B [SEP]), and neither truncation nor padding. No text contains an [unused...] entry. The
        tokenizer of an encoder whose special tokens have other names is unchanged, but for truncation and padding.

    Raises:
        DataError: the file is missing or not a tokenizer, or lacks special tokens; names them.
    """
    tokenizer, content = read_tokenizer(path)
    ids = tokenizer.get_vocab()
    roles = roles_of_adapted(path)
    if any(roles[role] != CONVENTION[role] for role in NEEDED):
        return tokenizer
    if extend:
        ids |= _new_entries(ids, spare_entries)
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise DataError(
            f"tokenizer.path={path}: has no {', '.join(missing)}. Set tokenizer.extend=true to add them, give another "
            "tokenizer, or set tokenizer.path=null to train one."
        )
    ours = {token for token in ids if token in SPECIAL_TOKENS or token.startswith(_SPARE)}
    added = [token for token in content.get("added_tokens") or [] if token["content"] not in ours]
    defaults = {"single_word": False, "rstrip": False}
    added += [{"id": ids[token], "content": token, **defaults, **flags_of(token)} for token in ours]
    content["added_tokens"] = sorted(added, key=lambda token: token["id"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if tokenizer.get_vocab() != ids:
        raise DataError(
            f"tokenizer.path={path}: tokens cannot be added, because its ids have holes. Give another tokenizer, or "
            "set tokenizer.path=null to train one."
        )
    set_template(tokenizer)
    return tokenizer


def roles_of_adapted(path: str | Path) -> dict[str, str]:
    """Return the special tokens of an adapted tokenizer: its own if it is an encoder's, such as a RoBERTa's."""
    roles = role_tokens(tokenizer_file(path))
    return roles if all(role in roles for role in NEEDED) else dict(CONVENTION)


def read_tokenizer(path: str | Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Load an existing tokenizer without truncation, padding and dropout; return it with its tokenizer.json.

    Raises:
        DataError: the file is missing or no tokenizer.
    """
    file = tokenizer_file(path)
    remedy = "Give a tokenizer.json of the tokenizers library, or its folder."
    with anything_as(DataError, f"tokenizer.path={path}: {file} cannot be read", remedy):
        content = read_json(file) | {"truncation": None, "padding": None}
        if dropout_of(content):  # else the same text gives other tokens each time
            content["model"]["dropout"] = None
        return Tokenizer.from_str(json.dumps(content)), content


def dropout_of(content: Mapping[str, Any]) -> float:
    """Return the share of a BPE's merges that its tokenizer.json drops at random; 0 for other models."""
    model = content.get("model")
    return (model.get("dropout") or 0.0) if isinstance(model, dict) else 0.0


def dropout_line(path: str | Path) -> Iterator[str]:
    """Yield a note on the dropout of a given tokenizer, if it has any."""
    if dropout := dropout_of(read_json(tokenizer_file(path))):
        yield f"tokenizer.path={path}: its BPE dropout of {dropout:g} is switched off: equal texts give equal tokens"


def num_entries(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one; a tokenizer with holes in its ids has fewer tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_file(path: str | Path) -> Path:
    """Return the tokenizer.json of a folder, or the file itself."""
    return Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, roles: Mapping[str, str] = CONVENTION) -> str:
    """Write a folder that transformers.AutoTokenizer loads.

    Args:
        tokenizer: trained or adapted.
        folder: to be written.
        roles: its special tokens, see `role_tokens`.

    Returns:
        sha256 of its tokenizer.json, which dataset cards store.
    """
    named: dict[str, Any] = {f"{role}_token": text for role, text in roles.items()}
    folder.mkdir(exist_ok=True)
    text = tokenizer.to_str(pretty=True)  # `save` raises a bare Exception if the disk is full
    (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    _write_json(
        folder / TOKENIZER_CONFIG,
        {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _MODEL_MAX_LENGTH,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        },
    )
    if roles["mask"] == MASK:
        named["mask_token"] = {"content": MASK, "single_word": False, "rstrip": False, **flags_of(MASK)}
        del named["mask_token"]["special"]
    _write_json(folder / SPECIAL_TOKENS_MAP, named)
    return file_sha256(folder / TOKENIZER_FILE)


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text, without [CLS] and [SEP].

    Special tokens written out in a text are spelled like any other characters.
    """
    tokenizer.encode_special_tokens = True  # "also encode them", that is, do not interpret them
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def encode_with_offsets(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[list[int], NDArray[np.int64]]]:
    """Return token ids as `encode_documents` does, and [T, 2] the first and last character offsets of each token."""
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [(each.ids, np.array(each.offsets, np.int64).reshape(-1, 2)) for each in encodings]


def require_unspoken(
    tokenizer: Tokenizer, token_counts: NDArray[np.int64], roles: Mapping[str, str] = CONVENTION
) -> None:
    """Refuse a tokenizer that makes special tokens from text.

    Args:
        tokenizer: the one that made the tokens.
        token_counts: times each id occurs, by id.
        roles: its special tokens, see `role_tokens`.

    Raises:
        DataError: the token for pad, cls, sep or mask occurs; that for unk may.
    """
    needed = [roles[role] for role in ("pad", "cls", "sep", "mask")]
    spoken = [token for token in needed if token_counts[tokenizer.token_to_id(token)]]
    if spoken:
        raise DataError(
            f"tokenizer.path: this tokenizer makes {', '.join(spoken)} from ordinary text, even as plain characters. "
            "Give one whose pre-tokenizer splits brackets from letters, or set tokenizer.path=null to train one."
        )


def flags_of(token: str) -> dict[str, bool]:
    """Return the arguments of an added token."""
    return {"lstrip": token == MASK, "normalized": False, "special": True}


def _new_entries(ids: dict[str, int], spare_entries: int) -> dict[str, int]:
    """Return the new entries of a vocabulary: the special tokens it lacks, and spare ones up to a multiple of 64."""
    new = [token for token in _EXTENDED_ORDER if token not in ids]
    first = max(ids.values()) + 1
    entries = first + len(new) + spare_entries
    numbers = (f"{_SPARE}{i}]" for i in itertools.count())
    spare = (token for token in numbers if token not in ids)
    new += itertools.islice(spare, entries + -entries % 64 - first - len(new))
    return {token: first + i for i, token in enumerate(new)}


def set_template(tokenizer: Tokenizer, roles: Mapping[str, str] = CONVENTION) -> None:
    """Set a template with the token for cls before a text and the token for sep after it."""
    cls, sep = roles["cls"], roles["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B:1", f"{sep}:1"],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)],
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
