"""Tokenizers of sequences that are not text: a token for each letter, or for each k letters.

A byte-level BPE of proteins or genomes would learn words where there are none. Lower-case (soft-masked) letters are
read as upper case, unless the alphabet has lower-case letters itself; all other characters become [UNK], which
`prepare` counts. K-mers do not overlap, as in the Nucleotide Transformer: with DNABERT's, which do, a masked token can
be read off its neighbours. From the left, each run of k plain letters is one token; the rest is single letters.
"""

from __future__ import annotations

import re
from itertools import product

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_prep.make_tokenizer import SPECIAL_TOKENS, add_spare, flags_of, set_template
from modernbert_train.errors import ConfigError
from modernbert_train.vocabulary import CONVENTION

# name -> letters of k-mers, and further letters: IUPAC's ambiguity codes, stop, gaps
ALPHABETS = {
    "protein": ("LAGVSERTIDPKQNFYMHWC", "XBUZOJ*-."),
    "dna": ("ACGT", "NRYSWKMBDHV-"),
    "esm2": ("LAGVSERTIDPKQNFYMHWC", "XBUZO.-"),
}
_ESM2 = {"cls": "<cls>", "pad": "<pad>", "sep": "<eos>", "unk": "<unk>", "mask": "<mask>"}
_MAX_KMERS = 1 << 20


def letter_tokenizer(alphabet: str, kmer: int = 1) -> tuple[Tokenizer, dict[str, str]]:
    """Make a tokenizer: special tokens with ids 0 to 4, letters, k-mers, and spare entries up to a multiple of 64.

    For `esm2` it has the special tokens and the 33 ids of facebook/esm2_*.

    Args:
        alphabet: a name in `ALPHABETS`, or the letters themselves.
        kmer: letters of a token.

    Returns:
        The tokenizer and its special tokens by role.

    Raises:
        ConfigError: a letter is repeated or is white space, or there are too many k-mers.
    """
    plain, further = ALPHABETS.get(alphabet, (alphabet, ""))
    letters = plain + further
    if len({*letters}) < max(2, len(letters)) or any(letter.isspace() for letter in letters):
        raise ConfigError(
            f"--alphabet {alphabet}: give {', '.join(ALPHABETS)}, or several letters without white space, each once."
        )
    if not 1 <= kmer <= 64 or (kmer > 1 and len(plain) ** kmer > _MAX_KMERS):
        raise ConfigError(
            f"--kmer {kmer}: {len(plain)}^{kmer} tokens, the limit is {_MAX_KMERS:,}. Give 1 or more, and fewer."
        )
    kmers = map("".join, product(plain, repeat=kmer)) if kmer > 1 else ()
    roles, tokens = CONVENTION, (*SPECIAL_TOKENS, *letters, *kmers)
    if alphabet == "esm2":
        *before, mask = (roles := _ESM2).values()
        tokens = (*before, *letters, "<null_1>", mask, *kmers)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # BPE without merges is letters, three times as fast as WordLevel; it takes a k-mer whole
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=roles["unk"], fuse_unk=False, ignore_merges=kmer > 1))
    special = {*roles.values(), "<null_1>"}
    tokenizer.add_special_tokens([AddedToken(token, **flags_of(token)) for token in tokens if token in special])
    soft = [letter for letter in letters if letter.lower() not in letters]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(letter.lower(), letter) for letter in soft])
    if kmer > 1:
        run = f"[{re.escape(plain)}]{{{kmer}}}|[\\s\\S]"
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(run), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if roles is CONVENTION:
        add_spare(tokenizer, -len(vocabulary) % 64)
    set_template(tokenizer, roles)
    return tokenizer, dict(roles)
