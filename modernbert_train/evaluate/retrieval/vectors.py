"""Encoders with the interface of mteb's models: show progress, and keep the vectors of documents on disk.

Any encoder computes packed batches in fp32. A folder of sentence-transformers is computed by that library, and so are
late interaction and sparse vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from modernbert_train.config.contrastive import ContrastiveConfig
from modernbert_train.config.tools.retrieval import EvaluateConfig
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.loaded import BATCH_TOKENS, LoadedEncoder, load_source
from modernbert_train.evaluate.retrieval.kept import Vectors, kept_vectors
from modernbert_train.evaluate.retrieval.runs import choose_device, encoder_source
from modernbert_train.evaluate.retrieval.sentence_model import (
    Described,
    describe,
    files_hash,
    is_multi_vector,
    is_sparse,
    open_sentence_model,
    pinned,
    sentence_folder,
)
from modernbert_train.report.counting import Counting

if TYPE_CHECKING:
    from modernbert_train.evaluate.retrieval.sentence_model import Model

_QUERY, _DOCUMENT = "query", "document"  # mteb's prompt types
_KINDS = {_QUERY: "queries", _DOCUMENT: "documents"}
_AT_ONCE = 1024  # texts between two updates of the progress line, and in one file of kept vectors
_CHUNK = 50_000  # documents whose vectors are in memory together
_LATE_CHUNK = 4096  # the same for token vectors and sparse vectors
_CPU_PRODUCTS = 2**20  # token vectors and products of a chunk, in numbers, that fit in a CPU's cache


@dataclass(frozen=True)
class Packed:
    """An encoder that computes packed texts, in fp32.

    Attributes:
        encoder: cuts texts at its max_tokens.
        about: pooling, prompts and lengths.
        device: the device that it computes on.
    """

    encoder: LoadedEncoder
    about: Described
    device: Any

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: Any) -> Tensor:
        """Embed batches of texts, with the prompt of queries or documents where the task distinguishes them."""
        from torch.nn.functional import normalize

        kind = getattr(prompt_type, "value", prompt_type)
        prompt = {_QUERY: self.about.query_prompt, _DOCUMENT: self.about.document_prompt}.get(kind, "")
        max_tokens = self.about.query_max_tokens if kind == _QUERY else self.about.max_tokens
        vectors = replace(self.encoder, max_tokens=max_tokens).embed(
            [prompt + text for batch in inputs for text in batch["text"]],
            pooling="cls" if self.about.pooling == "cls" else "mean",
            batch_tokens=BATCH_TOKENS,
            precision="fp32",
            device=self.device,
        )
        return normalize(vectors) if self.about.normalize else vectors


@dataclass(frozen=True)
class Late:
    """A model of sentence-transformers with a vector for each token."""

    model: Any

    def encode(self, inputs: Any, *, prompt_type: Any = None, batch_size: int = 32, **_: Any) -> list[Tensor]:
        """Embed batches of texts; return a matrix of token vectors for each text."""
        as_query = getattr(prompt_type, "value", prompt_type) == _QUERY
        encode = self.model.encode_query if as_query else self.model.encode_document
        texts = [text for batch in inputs for text in batch["text"]]
        return list(encode(texts, batch_size=batch_size, show_progress_bar=False))

    def similarity(self, queries: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
        """Score every pair, in the order of lengths: the library pads each chunk to its longest text."""
        rows, columns = (sorted(range(len(each)), key=lambda at: len(each[at])) for each in (queries, documents))
        ordered = self.model.similarity(
            [queries[row] for row in rows],
            [documents[column] for column in columns],
            chunk_elements=_CPU_PRODUCTS if documents[0].device.type == "cpu" else None,
        )
        scores = torch.empty_like(ordered)
        scores[torch.tensor(rows).unsqueeze(1), torch.tensor(columns)] = ordered
        return scores


@dataclass
class Watched:
    """A model for mteb: shows how many texts are embedded, and keeps vectors of documents.

    Attributes:
        inner: encodes batches of texts.
        scores: similarity of each query with each document.
        pairwise: similarity of rows with the same index.
        about: pooling, prompts and lengths.
        files_hash: see `files_hash`.
        keep: folder of kept vectors; None: nothing is kept.
        mteb_model_meta: mteb's description of it.
    """

    inner: Any
    scores: Callable[[Any, Any], Tensor]
    pairwise: Callable[[Any, Any], Tensor]
    about: Described
    files_hash: str
    keep: Path | None
    mteb_model_meta: Any
    _counting: dict[str, Counting] = field(default_factory=dict)
    _texts: Counter[str] = field(default_factory=Counter)
    _terms: Counter[str] = field(default_factory=Counter)
    _set: str = ""

    def begin(self, name: str, totals: Mapping[str, int]) -> None:
        """Begin a set; `totals`: its numbers of queries and documents, where they are known."""
        self._set = name
        self._counting = {kind: Counting(f"{name}: {kind}", total) for kind, total in totals.items()}
        self._texts, self._terms = Counter(), Counter()

    def encode(self, inputs: Any, *, prompt_type: Any = None, **how: Any) -> Vectors:
        """Embed the texts of a data loader."""
        from torch.utils.data import DataLoader

        rows, kind = inputs.dataset, _KINDS.get(getattr(prompt_type, "value", prompt_type), "texts")
        unfinished = self._counting.get(kind)
        counting = (
            unfinished
            if unfinished is not None and unfinished.done < unfinished.total
            else Counting(f"{self._set}: {kind}", len(rows))
        )
        blocks: list[Any] = []
        for start in range(0, len(rows), _AT_ONCE):
            part = rows.select(range(start, min(start + _AT_ONCE, len(rows))))
            loader = DataLoader(part, batch_size=inputs.batch_size, collate_fn=inputs.collate_fn)

            def make(loader: Any = loader) -> Any:
                return self.inner.encode(loader, prompt_type=prompt_type, **how)

            blocks.append(self._kept(loader, make) if kind == "documents" else make())
            counting.add(len(part))
        vectors = [torch.as_tensor(each) for part in blocks for each in (part if isinstance(part, list) else [part])]
        numbers = [each.coalesce().values() if each.is_sparse else each for each in vectors]
        if not all(each.isfinite().all() for each in numbers):
            raise DataError(f"{self._set}: the model gives vectors that are not finite. Name another model.")
        if vectors[0].is_sparse:
            self._texts[kind] += len(rows)
            self._terms[kind] += sum(int((each != 0).sum()) for each in numbers)
        return vectors if isinstance(blocks[0], list) else torch.cat(vectors)

    def terms(self) -> dict[str, float]:
        """Return the mean number of terms in sparse vectors of a set; nothing for dense ones."""
        return {
            f"{prompt}_terms": self._terms[kind] / self._texts[kind]
            for prompt, kind in _KINDS.items()
            if self._texts[kind]
        }

    def searcher(self, *, ranks: bool) -> Any:
        """Return the model for an mteb task; to rank documents, wrapped to embed them in chunks that fit in memory."""
        from mteb.models import SearchEncoderWrapper

        large = isinstance(self.inner, Late) or self.about.pooling == "sparse"
        return SearchEncoderWrapper(self, _LATE_CHUNK if large else _CHUNK) if ranks else self

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Score every pair of a row of the first with a row of the second."""
        return self.scores(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Score the rows with the same index."""
        return self.pairwise(embeddings1, embeddings2)

    def _kept(self, loader: Any, make: Callable[[], Vectors]) -> Vectors:
        if self.keep is None:
            return make()
        texts = [text for batch in loader for text in batch["text"]]
        return kept_vectors(self.keep, [self.files_hash, asdict(self.about), texts], make)


def open_vectors(name: str, config: EvaluateConfig, keep: str | None = None) -> Watched:
    """Open a model that embeds texts.

    Args:
        name: see `open_model`; a folder of sentence-transformers has its own pooling, prompts and lengths.
        config: pooling, prompts, lengths and the device.
        keep: folder of kept vectors of documents.

    Raises:
        ConfigError: it asks for more tokens than the model reads, or for a GPU that is not there.
        DataError, StorageError: see `open_model` and `open_sentence_model`.
    """
    from mteb.models import ModelMeta
    from sentence_transformers.util import cos_sim, pairwise_cos_sim

    from modernbert_train.weights.export import own_prompts

    folder = None if keep is None else Path(keep)
    meta = ModelMeta.create_empty({"name": f"local/{Path(name).name}", "revision": "local"})
    name = pinned(name)
    own, trained, source = sentence_folder(name), None, None
    if own is None:
        source = encoder_source(name)
        trained = source.objective if source.objective is not None and source.objective.compares else None
    dense = config.pooling != "sparse" and (trained is None or trained.pooling in ("cls", "mean"))
    if source is None or not dense:
        model = open_sentence_model(own or name, config)
        inner, scores, pairwise = _library(model)
        return Watched(inner, scores, pairwise, describe(model), files_hash(name), folder, meta)
    encoder = load_source(source)
    max_tokens = config.max_tokens or encoder.max_tokens
    if max_tokens > encoder.max_tokens:
        raise ConfigError(
            f"max_tokens={max_tokens}: {name} reads {encoder.max_tokens:,} at most. Lower it, or leave it out."
        )
    prompts, query_tokens = own_prompts(source) or {}, config.query_max_tokens
    if trained is not None:
        query_tokens = query_tokens or cast(ContrastiveConfig, trained).query_max_tokens
    about = Described(
        config.pooling or (trained.pooling if trained is not None else None) or "mean",
        config.normalize is not False,
        prompts.get("query", "") if config.query_prompt is None else config.query_prompt,
        prompts.get("document", "") if config.document_prompt is None else config.document_prompt,
        min(query_tokens or max_tokens, max_tokens),
        max_tokens,
    )
    packed = Packed(encoder, about, choose_device(config.device))
    return Watched(packed, cos_sim, pairwise_cos_sim, about, files_hash(name), folder, meta)


def _library(model: Model) -> tuple[Any, Any, Any]:
    """Return the library's encoder and its two similarities; for one vector a text, mteb's wrapper adds prompts."""
    if is_multi_vector(model):
        late = Late(model)
        return late, late.similarity, model.similarity_pairwise
    from mteb.models import SentenceTransformerEncoderWrapper, SparseEncoderWrapper

    wrapped = SparseEncoderWrapper(model) if is_sparse(model) else SentenceTransformerEncoderWrapper(model)
    return wrapped, wrapped.similarity, wrapped.similarity_pairwise
