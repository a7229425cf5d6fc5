"""Every knob of retrieval: what `retrieval train` and `retrieval evaluate` read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from modernbert_train.config.knob import knob, knobs

MTEB = "mteb:"  # before the name of a task of mteb, where a folder could stand
RANKING = ("ndcg_at_10", "recall_at_100", "mrr_at_10", "map_at_10")  # what is measured of a ranking
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How texts become vectors, and what is measured with them."""

    name: str | None = None  # of the run; None: made of the data, the model and, where it is trained, the seed
    runs_folder: str = "runs"  # results are in <runs_folder>/<name>
    device: Literal["auto", "cpu", "cuda"] = "auto"
    split: str = "test"  # of a BEIR folder: the file in qrels/
    beir_folder: str = "data/beir"  # of BEIR's public sets, by name; one that is not there is downloaded
    encode_batch: int = knob(32, low=1)  # texts that are encoded at once; changes speed and memory alone
    ignore_identical_ids: bool = False  # leave out the document that has the query's id, as for ArguAna and Quora
    # over all tokens, or the first; None: mean. A folder of sentence-transformers has its own, and of the next three
    pooling: Literal["cls", "mean"] | None = None
    normalize: bool | None = None  # vectors of length 1; None: true
    query_prompt: str | None = None  # put before each query, its space included; None: nothing
    document_prompt: str | None = None  # before each document
    # longer texts are cut, special tokens included; None: what the model was trained on
    max_tokens: int | None = knob(None, low=8)
    query_max_tokens: int | None = knob(None, low=8)  # of queries, where it is fewer

    @property
    def seed(self) -> int | None:
        """Seed of a training; None: nothing is trained."""
        return None

    @property
    def index(self) -> str | None:
        """Folder that keeps the vectors of documents; None: they are not kept."""
        return None

    @property
    def token_vectors(self) -> int | None:
        """Width of the vectors of a model that is to have one for each token; None: one for each text."""
        return None


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(EvaluateConfig):
    """What `retrieval evaluate` alone can do."""

    # late interaction: a folder that keeps the vectors of documents, in fp16, for another search or after a kill
    index: str | None = None
    # what a model with one output, or two classes, ranks anew by reading query and document together: candidates in
    # TREC's run format or BEIR's JSON, or a model of `retrieval evaluate`, whose best are taken
    rerank: str | None = None
    rerank_top: int = knob(100, low=1)  # candidates of each query that count


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(EvaluateConfig):
    """Contrastive training on pairs or triplets of texts, with what it is measured on."""

    # .jsonl, .tsv or .csv with a column each for queries, positives and negatives; or BEIR folders
    train: list[str] = MISSING
    query_column: str = "query"
    positive_column: str = "positive"  # a text that answers the query
    negative_columns: list[str] = field(default_factory=list)  # hard negatives: texts that do not, one a column
    train_split: str = "train"  # of BEIR folders in `train`, of which each relevant document is a positive
    evaluate: dict[str, str] = field(default_factory=dict)  # BEIR folders to measure on, by names of your choice
    # mnrl: the query's positive against all other positives and negatives of the batch; cached_mnrl: the same, encoded
    # in small parts, for batches that do not fit in memory (GradCache, arXiv 2101.06983); multi_vector: the same with a
    # vector for each token, and MaxSim for its cosine (late interaction: ColBERT, arXiv 2004.12832)
    loss: Literal["mnrl", "cached_mnrl", "multi_vector"] = "mnrl"
    mini_batch: int = knob(16, low=1)  # cached_mnrl, multi_vector: texts that are encoded at once
    vector_width: int = knob(128, low=1)  # multi_vector: of a token, by a matrix that is trained with the encoder
    # of scores in the softmax: the inverse of its temperature; None: 20, and 1 of MaxSim, a sum over the query's tokens
    scale: float | None = knob(None, above=0)
    batch_size: int = knob(64, low=2, why="since the negatives of a query are the other texts of its batch")
    accumulate: int = knob(1, low=1)  # batches in one update; each has its own texts as negatives
    no_duplicates: bool = True  # no text twice in a batch, where it would be a negative of its own query
    epochs: float = knob(1.0, above=0)
    lr: float = knob(5e-5, above=0)  # peak
    warmup: float = knob(0.05, low=0, below=1)  # share of the steps in which the rate rises; then linearly to 0
    weight_decay: float = knob(0.0, low=0)  # torch's AdamW: times the rate in each step
    seed: int = knob(1618, low=0, below=2**32)  # of the order and of dropout
    precision: Literal["auto", "fp32", "bf16"] = (
        "auto"  # of training; auto: bf16 autocast on a GPU that has it, else fp32
    )
    save_every_steps: int = knob(500, low=1)  # steps between checkpoints, which the same command resumes from

    @property
    def token_vectors(self) -> int | None:
        return self.vector_width if self.loss == "multi_vector" else None


def retrieval_problems(config: EvaluateConfig) -> Iterator[str]:
    """What is wrong, as far as it can be told without the files."""
    for key, value, facts in knobs(config):
        yield from facts.mistakes(key, value)
    if config.name is not None and not _RUN_NAME.fullmatch(config.name):
        yield f"name={config.name}: it is a folder. Use letters, digits, '.', '_' and '-'."
    if config.max_tokens and config.query_max_tokens and config.query_max_tokens > config.max_tokens:
        yield (
            f"query_max_tokens={config.query_max_tokens} is above max_tokens={config.max_tokens}, which holds for all "
            "texts. Raise max_tokens, or lower it."
        )
    if not isinstance(config, RetrievalConfig):
        return
    if not config.train:
        yield "train: nothing to learn from. Name files of pairs: train=[pairs.jsonl]."
    columns = [config.query_column, config.positive_column, *config.negative_columns]
    if len({*columns}) < len(columns):
        yield f"query_column, positive_column and negative_columns name {', '.join(columns)}. Name each column once."
    for name in config.evaluate:
        if not name.replace("_", "").replace("-", "").isalnum():
            yield f"evaluate.{name}: the name is used in results. Use letters, digits, '_' and '-'."
