"""Letters and k-mers as tokens. If this breaks, a published model of proteins reads them otherwise than in training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, EsmTokenizer
from transformers.models.esm.configuration_esm import get_default_vocab_list

from data_prep.make_tokenizer import adapt_tokenizer, encode_documents
from data_prep.tokenizer import main
from modernbert_train.vocabulary import read_vocabulary


def make(folder: Path, *words: str) -> tuple[Tokenizer, Any]:
    """The tokenizer that the command writes, as this program and as transformers read it."""
    assert main(["letters", str(folder), *words]) == 0
    return Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)


def test_transformers_reads_the_same_letters(tmp_path: Path, capsys: Any) -> None:
    """Ids, special tokens, lower case, masks written by hand; 64 entries for 5 special tokens and 29 letters."""
    ours, theirs = make(tmp_path / "p", "--alphabet", "protein")
    assert "64 entries" in capsys.readouterr().out and len(theirs) == 64
    assert theirs.tokenize("MKvx*[MASK]L") == ["M", "K", "V", "X", "*", "[MASK]", "L"]
    text = "MSTNPKPQRKTKRNTNRRPQDVKFPGGGQIVGGVYLLPRRGPRLGVRATRKTSERSQPRGRRQPIPKARRPEG"
    (ids,) = encode_documents(ours, [text])
    assert theirs(text)["input_ids"] == [2, *ids, 3] and len(ids) == len(text) and min(ids) > 4
    assert theirs.decode(ids) == text
    assert theirs("M1K")["input_ids"][2] == theirs.unk_token_id == 1
    assert encode_documents(ours, ["[MASK]"])[0].count(4) == 0, "a text cannot spell a mask"


def test_esm2_has_the_ids_of_the_released_models(tmp_path: Path) -> None:
    """Its weights, read with other ids, would take one amino acid for another."""
    ours, theirs = make(tmp_path / "esm2", "--alphabet", "esm2")
    (tmp_path / "vocab.txt").write_text("\n".join(get_default_vocab_list()), encoding="utf-8")
    released = EsmTokenizer(str(tmp_path / "vocab.txt"))
    text = "MSTNPKPQRKTKRNTNRRPQDVKFPGGGQIVGGVYLLPXBUZO.-"
    assert theirs(text)["input_ids"] == released(text)["input_ids"] and len(theirs) == 33
    assert theirs("MK<mask>L")["input_ids"] == released("MK<mask>L")["input_ids"]
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id, theirs.sep_token_id) == (1, 3, 0, 2)
    assert theirs.mask_token_id == released.mask_token_id == read_vocabulary(tmp_path / "esm2").mask_id == 32
    assert adapt_tokenizer(tmp_path / "esm2").get_vocab() == ours.get_vocab(), "prepare takes it as it is"


def test_k_mers_follow_each_other_and_the_rest_is_letters(tmp_path: Path) -> None:
    """4 ** 6 of them, in order; an N ends a run, as in the Nucleotide Transformer, and nothing overlaps."""
    ours, theirs = make(tmp_path / "d", "--alphabet", "dna", "--kmer", "6")
    assert theirs.tokenize("ACGTACgtacNACGTACG") == ["ACGTAC", "G", "T", "A", "C", "N", "ACGTAC", "G"]
    kmers = map("".join, itertools.product("ACGT", repeat=6))
    assert [theirs.convert_tokens_to_ids(kmer) for kmer in kmers] == [*range(21, 21 + 4096)]
    assert len(theirs) % 64 == 0 and theirs.decode(theirs("ACGTACGN")["input_ids"][1:-1]) == "ACGTACGN"
    assert encode_documents(ours, ["ACGTACGN"])[0] == theirs("ACGTACGN", add_special_tokens=False)["input_ids"]


def test_letters_of_ones_own_keep_their_case(tmp_path: Path) -> None:
    """Soft-masked regions are information to some: an alphabet with both cases keeps both."""
    _, theirs = make(tmp_path / "rna", "--alphabet", "ACGUacgu-]^")
    assert theirs.tokenize("AcgU-]^") == ["A", "c", "g", "U", "-", "]", "^"]
    _, theirs = make(tmp_path / "signs", "--alphabet", "]^-\\", "--kmer", "2")
    assert theirs.tokenize("]^-\\^") == ["]^", "-\\", "^"]
