"""Every key of `retrieval train`, `retrieval evaluate` and `retrieval mine`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from modernbert_train.config.knob import bound_mistakes, knob, rate_knob
from modernbert_train.core.text import is_folder_name, is_plain_name

MTEB = "mteb:"  # prefix of a task of mteb
RANKING = ("ndcg_at_10", "recall_at_100", "mrr_at_10", "map_at_10")  # metrics of a ranking


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """Encoding of texts."""

    runs_folder: str = "runs"  # results are in <runs_folder>/<name>
    device: Literal["auto", "cpu", "cuda"] = "auto"
    beir_folder: str = "data/beir"  # folder of BEIR's public sets, by name; mteb downloads a missing one
    encode_batch: int = knob(32, low=1)  # texts encoded at the same time; changes only speed and memory
    # mean over all tokens, or the first token; sparse: a number for each token of the vocabulary, by the masked-LM head
    # (SPLADE); None: mean. A folder of sentence-transformers brings its own values of this and the next three keys
    pooling: Literal["cls", "mean", "sparse"] | None = None
    normalize: bool | None = None  # vectors of length 1; None: true
    query_prompt: str | None = None  # put before each query, with its space; None: no prompt
    document_prompt: str | None = None  # put before each document
    # longer texts are truncated, special tokens included; None: the longest text of the model's training
    max_tokens: int | None = knob(None, low=8)
    query_max_tokens: int | None = knob(None, low=8)  # limit of queries, if lower

    @property
    def seed(self) -> int | None:
        """Seed of a training; None: no training."""
        return None

    @property
    def index(self) -> str | None:
        """Folder that stores the vectors of documents; None: they are not stored."""
        return None

    @property
    def rerank(self) -> str | None:
        """Candidates that the model ranks; None: it embeds texts."""
        return None


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EncodeConfig):
    """Encoding of texts, and the evaluation."""

    name: str | None = None  # of the run; None: derived from the data, the model and, in a training, the seed
    split: str = "test"  # of a BEIR folder: the file in qrels/
    ignore_identical_ids: bool = False  # omit the document with the query's id, as for ArguAna and Quora


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(EvaluateConfig):
    """Keys that only `retrieval evaluate` has."""

    # a folder that stores the vectors of documents, with their hashes, for another search or after a kill; fp16 for
    # late interaction
    index: str | None = None
    # candidates that a model with one output, or two classes, reranks by reading query and document together: in TREC's
    # run format or BEIR's JSON; or a model of `retrieval evaluate`, whose best documents are the candidates
    rerank: str | None = None
    rerank_top: int = knob(100, low=1)  # candidates per query


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(EvaluateConfig):
    """Contrastive training on pairs or triplets of texts, and its evaluation."""

    # .jsonl, .tsv, .csv or .parquet with a column each for queries, positives and negatives; folders of such files; or
    # BEIR folders
    train: list[str] = MISSING
    query_column: str = "query"
    positive_column: str = "positive"  # a text that answers the query
    negative_columns: list[str] = field(default_factory=list)  # of hard negatives: texts that do not answer it
    train_split: str = "train"  # for BEIR folders in `train`; each relevant document is a positive
    evaluate: dict[str, str] = field(default_factory=dict)  # BEIR folders to evaluate on, by names of your choice
    # mnrl: the query's positive against all other positives and negatives of the global batch, encoded in parts
    # (GradCache, arXiv 2101.06983); cached_mnrl: another name of it; multi_vector: the same with one vector for each
    # token, and MaxSim instead of cosine (late interaction: ColBERT, arXiv 2004.12832)
    loss: Literal["mnrl", "cached_mnrl", "multi_vector"] = "mnrl"
    # texts encoded at the same time, on average; changes speed and memory only. None: 16,384 tokens of texts
    mini_batch: int | None = knob(None, low=1)
    vector_width: int = knob(128, low=1)  # multi_vector: width of a token's vector, by a trained matrix
    # factor of scores in the softmax: the inverse temperature; None: 20, and 1 for sparse vectors and for MaxSim, a sum
    # over the query's tokens
    scale: float | None = knob(None, above=0)
    # pairs in a batch, on average: a batch has as many tokens as this many pairs. Equal texts are never negatives of
    # each other
    batch_size: int = knob(64, low=2, why="since the negatives of a query are the other texts of its batch")
    epochs: float = knob(1.0, above=0)
    lr: float = rate_knob(5e-5)  # peak
    warmup: float = knob(0.05, low=0, below=1)  # share of the steps with a rising learning rate; then linearly to 0
    weight_decay: float = knob(0.0, low=0)  # of torch's AdamW: times the learning rate in each step
    seed: int = knob(1618, low=0, below=2**32)  # for order and dropout
    precision: Literal["auto", "fp32", "bf16"] = (
        "auto"  # of training; auto: bf16 autocast on a GPU that has it, else fp32
    )
    save_every_steps: int = knob(500, low=1)  # steps between checkpoints, which the same command resumes from

    @property
    def is_late(self) -> bool:
        """True if each token has a vector."""
        return self.loss == "multi_vector"


@dataclass(frozen=True, kw_only=True)
class MineConfig(EncodeConfig):
    """Hard negatives of pairs of texts: the texts of other pairs that a model finds nearest to a query.

    sentence-transformers' `mine_hard_negatives` finds them; most keys are its arguments.
    """

    out: str = MISSING  # the .jsonl that is written; `prepare` reads it
    query_column: str = "query"
    positive_column: str = "positive"  # a text that answers the query
    train_split: str = "train"  # split of BEIR folders; each relevant document is a positive
    num_negatives: int = knob(5, low=1)  # at most for each pair
    range_min: int = knob(0, low=0)  # leave out this many of the nearest texts, which may be unlabelled positives
    # choose negatives among this many nearest texts; None: range_min and, with a limit below, ten times num_negatives
    range_max: int | None = knob(None, low=1)
    max_score: float | None = None  # highest score of a negative
    min_score: float | None = None
    absolute_margin: float | None = None  # least distance of a negative's score below the positive's
    relative_margin: float | None = None  # the same as a share of the positive's score, such as 0.05 (NV-Retriever)
    sampling: Literal["top", "random"] = "top"  # how to choose among the remaining negatives
    seed: int = knob(1618, low=0, below=2**32)  # of sampling=random

    @property
    def negative_columns(self) -> list[str]:
        return []


def mine_problems(config: MineConfig) -> Iterator[str]:
    """Yield mistakes that can be found without the files."""
    yield from _encode_problems(config)
    if not config.out.endswith(".jsonl"):
        yield f"out={config.out}: does not end in .jsonl, which is written. Correct it."
    if config.range_max is not None and config.range_max - config.range_min < config.num_negatives:
        yield (
            f"range_min={config.range_min} and range_max={config.range_max} leave no {config.num_negatives} negatives. "
            f"Set range_max={config.range_min + config.num_negatives} or more."
        )
    if config.min_score is not None and config.max_score is not None and config.min_score >= config.max_score:
        yield f"min_score={config.min_score} is not below max_score={config.max_score}. Correct one of them."


def _encode_problems(config: EncodeConfig) -> Iterator[str]:
    yield from bound_mistakes(config)
    if config.max_tokens and config.query_max_tokens and config.query_max_tokens > config.max_tokens:
        yield (
            f"query_max_tokens={config.query_max_tokens} is above max_tokens={config.max_tokens}, the limit of all "
            "texts. Raise max_tokens, or lower it."
        )
    if config.pooling == "sparse" and config.normalize:
        yield "normalize=true: sparse vectors are compared by dot product. Leave it out."


def retrieval_problems(config: EvaluateConfig) -> Iterator[str]:
    """Yield mistakes that can be found without the files."""
    yield from _encode_problems(config)
    if config.name is not None and not is_folder_name(config.name):
        yield f"name={config.name}: it is a folder. Use letters, digits, '.', '_' and '-'."
    if not isinstance(config, RetrievalConfig):
        return
    if config.normalize is False:
        yield "normalize=false: training compares cosines, so the model normalizes its vectors. Leave it out."
    if config.pooling is not None and config.is_late:
        yield f"pooling={config.pooling}: loss=multi_vector has one vector for each token. Leave it out."
    if not config.train:
        yield "train: empty. Name files of pairs: train=[pairs.jsonl]."
    columns = [config.query_column, config.positive_column, *config.negative_columns]
    if len({*columns}) < len(columns):
        yield f"query_column, positive_column and negative_columns name {', '.join(columns)}. Name each column once."
    for name in config.evaluate:
        if not is_plain_name(name):
            yield f"evaluate.{name}: the name is used in results. Use letters, digits, '_' and '-'."
