"""BM25, the lexical baseline of retrieval: `--model bm25`, or `rerank=bm25` to rerank its best documents.

mteb computes it with bm25s: English stop words, and Snowball's stemmer.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import AbstractContextManager, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from modernbert_train.config.tools.retrieval import EncodeConfig, EvaluateConfig
from modernbert_train.core.installed import require
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.retrieval.sentence_model import check_model

if TYPE_CHECKING:
    from modernbert_train.evaluate.retrieval.vectors import Watched

BM25 = "bm25"  # the name of the model
_MTEB_NAME = "mteb/baseline-bm25s"

# keys that only encoders have
OF_ENCODERS = frozenset(
    ["pooling", "normalize", "query_prompt", "document_prompt", "max_tokens", "query_max_tokens", "index", "rerank"]
)


@dataclass(frozen=True)
class Settings:
    """Settings and versions that determine the scores of given texts; recorded in results.

    Attributes:
        pooling: says that there are no vectors.
        bm25s, stemmer: versions of the libraries.
        k1, b, method: of BM25.
    """

    pooling: str
    bm25s: str
    stemmer: str
    k1: float
    b: float
    method: str


class Bm25:
    """BM25 with the interface of mteb's search models.

    Attributes:
        files_hash: says that there are no files.
        about: the settings.
        mteb_model_meta: mteb's description of it.
    """

    files_hash = "none"

    def __init__(self) -> None:
        from mteb import get_model

        self._model: Any = get_model(_MTEB_NAME)
        own = self._model
        self.mteb_model_meta = own.mteb_model_meta
        self.about = Settings(
            "none: counts words", version("bm25s"), f"PyStemmer {version('PyStemmer')}", own.k1, own.b, own.method
        )

    def begin(self, name: str, totals: Mapping[str, int]) -> None:
        """Begin a set; it takes seconds, so nothing is shown.

        Raises:
            ConfigError: the set is no ranking of documents.
        """
        if not totals:
            raise ConfigError(f"--model bm25: ranks documents, which {name} has none of. Leave {name} out.")

    def searcher(self, *, ranks: bool) -> Bm25:
        """Return what mteb calls for a task."""
        return self

    def index(self, corpus: Any, **how: Any) -> None:
        """Count the words of documents; see mteb's SearchProtocol."""
        with _no_progress_bars():
            self._model.index(corpus, **how)

    def search(self, queries: Any, **how: Any) -> dict[str, dict[str, float]]:
        """Return the scores of each query's best documents."""
        with _no_progress_bars():
            return self._model.search(queries, **how)

    def terms(self) -> dict[str, float]:
        """Return no further figures."""
        return {}


def _no_progress_bars() -> AbstractContextManager[object]:
    return redirect_stderr(io.StringIO())  # bm25s has no switch that mteb passes on


def check_searching(name: str, config: EncodeConfig) -> None:
    """Check a model as far as possible without torch.

    Raises:
        ConfigError: a key is for encoders only and the model is bm25, or its libraries are not installed.
        ConfigError, DataError: see `open_sentence_model`.
    """
    if name != BM25:
        check_model(name, config)
        return
    if of_encoders := [key for key in sorted(OF_ENCODERS) if getattr(config, key) is not None]:
        raise ConfigError(
            f"{of_encoders[0]}={getattr(config, of_encoders[0])}: is for encoders, and bm25 is none. Leave it out."
        )
    require("retrieval", "bm25s", "Stemmer")


def open_searching(name: str, config: EvaluateConfig, keep: str | None = None) -> Bm25 | Watched:
    """Open a model that searches: bm25, or an encoder as `open_vectors` does."""
    if name == BM25:
        return Bm25()
    from modernbert_train.evaluate.retrieval.vectors import open_vectors

    return open_vectors(name, config, keep)
