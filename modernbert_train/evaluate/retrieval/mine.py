"""`retrieval mine`: find hard negatives of pairs with a model, by sentence-transformers' `mine_hard_negatives`.

Embedding takes nearly all of the time, so vectors are kept in OUT.work until the end, and the same command resumes
after a kill. The output is a .jsonl that `prepare` reads: query, positive, negatives and the model's scores of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.retrieval import MineConfig, mine_problems
from modernbert_train.core.claim import changes, refuse
from modernbert_train.core.files import ending, os_errors_as, values_as, write_out
from modernbert_train.core.installed import require
from modernbert_train.core.read_json import read_json
from modernbert_train.data.read.task_rows import ENDS, table_rows
from modernbert_train.distributed.launched import refuse_ranks
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.evaluate.retrieval.beir import beir_folder, training_pairs
from modernbert_train.evaluate.retrieval.kept import kept_vectors
from modernbert_train.evaluate.retrieval.sentence_model import (
    check_model,
    describe,
    files_hash,
    is_multi_vector,
    is_sparse,
    open_sentence_model,
    pinned,
)
from modernbert_train.report.counting import Counting

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
REPORT = ".report.json"
_AT_ONCE = 512  # texts whose vectors are written together
_DIGITS = 6  # of a score: fp32 has seven
_LIMITS = ("range_min", "range_max", "max_score", "min_score", "absolute_margin", "relative_margin")

Mined = dict[tuple[str, ...], list[tuple[str, float]]]  # pair -> its negatives with their scores


def mine(files: Sequence[str], model: str, overrides: Sequence[str]) -> Path:
    """Find hard negatives of the pairs in files.

    Args:
        files: tables of pairs, or BEIR folders.
        model: see `open_sentence_model`.
        overrides: keys of `MineConfig`.

    Returns:
        Path of the .jsonl.

    Raises:
        RunError: anything that the user has to fix.
    """
    refuse_ranks("retrieval mine")
    config = load_typed(MineConfig, [], overrides)
    if problems := list(mine_problems(config)):
        raise ConfigError("\n".join(problems))
    require("retrieval", "sentence_transformers", "datasets")
    check_model(model, config)
    out, report = Path(config.out), Path(f"{config.out}{REPORT}")
    rows, counts = _read_all(dict(zip(files, files, strict=True)), config)
    pairs = list(rows)
    if len({positive for _, positive in pairs}) < 2:
        raise DataError(
            f"{', '.join(files)}: {len(pairs):,} pairs are left ({_listed(counts)}), and mining compares a query with "
            "the positives of others. Give more."
        )
    model = pinned(model)
    opened = open_sentence_model(model, config)
    if is_multi_vector(opened) or is_sparse(opened):
        kind = "sparse vectors" if is_sparse(opened) else "a vector for each token"
        raise ConfigError(f"--model={model}: has {kind}, and mining needs one dense vector a text. Name another.")
    requested = _asked(config, model, opened, pairs)
    if out.exists():
        _require_same(out, report, requested)
        shutil.rmtree(f"{config.out}.work", ignore_errors=True)
        print(f"already complete\n{_described(out, read_json(report))}")
        return out
    mined, positive_scores = _mine(opened, model, config, pairs, Path(f"{config.out}.work"), requested)
    lines, counts = _lines(pairs, mined, positive_scores, counts)
    if not counts["negatives"]:
        limits = ", ".join(f"{key}={value}" for key in _LIMITS if (value := getattr(config, key)) is not None)
        raise DataError(
            f"{limits}: no text is far enough from its query's positive to be a negative of any of {len(pairs):,} "
            "pairs. Lower the margins, raise max_score, or widen the range."
        )
    scores = [*positive_scores, *(score for each in mined.values() for _, score in each)]
    low, high = math.floor(min(scores)), math.ceil(max(scores))
    about = {"asked": requested, "counts": counts, "score_range": [low, max(high, low + 1)]}
    write_out(report, json.dumps(about, indent=2) + "\n")
    write_out(out, "".join(lines))
    shutil.rmtree(f"{config.out}.work")
    print(_described(out, about))
    return out


def _read_all(names: Mapping[str, str], config: MineConfig) -> tuple[dict[tuple[str, ...], None], dict[str, int]]:
    """Return all rows of files or BEIR folders, by their names for messages, and the numbers left out, by reason.

    Raises:
        DataError: a file is missing, broken or lacks a column.
    """
    skipped = dict.fromkeys(("skipped_empty", "skipped_duplicates"), 0)
    rows: dict[tuple[str, ...], None] = {}
    for named, name in names.items():
        for row in _rows(beir_folder(name, config.beir_folder), named, config):
            if not all(text.strip() for text in row):
                skipped["skipped_empty"] += 1
            elif row in rows:
                skipped["skipped_duplicates"] += 1
            else:
                rows[row] = None
    return rows, skipped


def _rows(path: Path, named: str, config: MineConfig) -> Iterator[tuple[str, ...]]:
    if path.is_dir():
        yield from training_pairs(path, config.train_split)
        return
    if ending(path) not in ENDS:
        raise DataError(f"{named}: unknown file type. Name one of {', '.join(ENDS)}, or a BEIR folder.")
    columns = [config.query_column, config.positive_column]
    with values_as(DataError, named):
        for row in table_rows(path, columns, keys="query_column and positive_column"):
            yield row.texts


def _asked(
    config: MineConfig, name: str, model: SentenceTransformer, pairs: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """Return everything that determines the output."""
    texts = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    settings = {key: value for key, value in asdict(config).items() if key not in ("out", "device", "encode_batch")}
    return {"texts": texts, "model_files": files_hash(name), "model": asdict(describe(model)), **settings}


def _require_same(out: Path, report: Path, requested: dict[str, Any]) -> None:
    """Refuse to replace a file, unless the same request wrote it."""
    remedy = "Give another file with out=..., or remove it."
    if not report.is_file():
        raise ConfigError(f"out={out}: exists, and `retrieval mine` did not write it. {remedy}")
    with os_errors_as(StorageError, f"{report}: is damaged", remedy, ValueError, KeyError, TypeError):
        before = read_json(report)["asked"]
    now = json.loads(json.dumps(requested))
    refuse(f"out={out}", changes({key: before.get(key) for key in now}, now), remedy)


def _mine(
    model: SentenceTransformer,
    name: str,
    config: MineConfig,
    pairs: Sequence[tuple[str, ...]],
    folder: Path,
    requested: dict[str, Any],
) -> tuple[Mined, list[float]]:
    """Return the negatives of each pair, and the score of its positive."""
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    kept = {}
    for side in ("document", "query"):
        about = {key: requested[key] for key in ("texts", "model_files", "model")} | {"side": side}
        kept[side] = _Kept(getattr(model, f"encode_{side}"), folder / side, about, name)
        setattr(model, f"encode_{side}", kept[side])
    state = random.getstate()
    random.seed(config.seed)  # the library samples with it
    try:
        rows_mined = mine_hard_negatives(
            Dataset.from_dict({"query": [q for q, _ in pairs], "positive": [p for _, p in pairs]}),
            model,
            num_negatives=config.num_negatives,
            sampling_strategy=config.sampling,
            output_format="triplet",
            output_scores=True,
            batch_size=config.encode_batch,
            verbose=False,
            **{key: getattr(config, key) for key in _LIMITS},
        )
    finally:
        random.setstate(state)
    mined: Mined = {}
    for row in rows_mined:
        mined.setdefault((row["query"], row["positive"]), []).append(
            (row["negative"], round(row["scores"][1], _DIGITS))
        )
    both = [
        kept[side].of([pair[side_index] for pair in pairs]) for side_index, side in enumerate(("query", "document"))
    ]
    return mined, [round(score, _DIGITS) for score in model.similarity_pairwise(*both).tolist()]


class _Kept:
    """A model's encode method whose vectors are kept on disk."""

    def __init__(self, encode: Any, folder: Path, about: dict[str, Any], name: str) -> None:
        self._encode, self._folder, self._about, self._name = encode, folder, about, name
        self._rows: dict[str, int] = {}
        self._vectors_ND: NDArray[np.float32]

    def of(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of encoded texts."""
        return self._vectors_ND[[self._rows[text] for text in texts]]

    def __call__(self, texts: Sequence[str], batch_size: int, **_: Any) -> NDArray[np.float32]:
        counting, blocks = Counting(f"{self._folder.name}:", len(texts)), []
        for first in range(0, len(texts), _AT_ONCE):
            part = list(texts[first : first + _AT_ONCE])

            def make(part: list[str] = part) -> Any:
                part_ND = self._encode(part, batch_size=batch_size, normalize_embeddings=True, convert_to_tensor=True)
                if not part_ND.isfinite().all():
                    raise DataError(f"--model={self._name}: gives vectors that are not numbers. Name another model.")
                counting.add(len(part))
                return part_ND

            blocks.append(np.asarray(kept_vectors(self._folder, [self._about, part], make)))
            counting.skip(first + len(part))
        self._rows = {text: row for row, text in enumerate(texts)}
        self._vectors_ND = np.concatenate(blocks)
        return self._vectors_ND


def _lines(
    pairs: Sequence[tuple[str, ...]], mined: Mined, positive_scores: Sequence[float], skipped: dict[str, int]
) -> tuple[list[str], dict[str, int]]:
    """Return the lines of the output, and the counts."""
    counts, lines = Counter({"pairs": len(pairs), "negatives": 0, "pairs_without_negatives": 0}), []
    answers: dict[str, set[str]] = {}  # query -> itself and its positives, stripped as below
    for query, positive in pairs:
        answers.setdefault(query, {query.strip()}).add(positive.strip())
    for (query, positive), positive_score in zip(pairs, positive_scores, strict=True):
        every = mined.get((query, positive), [])
        own = [(text, score) for text, score in every if text.strip() not in answers[query]]
        row = {"query": query, "positive": positive, "negatives": [text for text, _ in own]}
        row |= {"positive_score": positive_score, "negative_scores": [score for _, score in own]}
        counts.update(negatives=len(own), contradictions=len(every) - len(own), pairs_without_negatives=not own)
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return lines, dict(counts) | skipped


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {key.replace('_', ' ')}" for key, number in counts.items() if number) or "none"


def _described(out: Path, about: dict[str, Any]) -> str:
    low, high = about["score_range"]
    return (
        f"{out}: {_listed(about['counts'])}\n`prepare` reads it with pairs.negatives=[negatives] pairs.max_negatives="
        f"{about['asked']['num_negatives']}; for distillation also with pairs.scores=[positive_score,negative_scores] "
        f"pairs.score_range=[{low},{high}]"
    )
