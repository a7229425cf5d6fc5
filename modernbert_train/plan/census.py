"""Count a model's matrices, their products and its layers' windows, from its configuration.

Parameters, FLOPs, the work of Muon and the bytes that GPUs send all follow from this. Another architecture is one
function here and a row in `ENCODER_COUNTS`; another head is a row in `HEAD_COUNTS`. Tests compare every one with the
real model.

Shape legend: D model width, E width of the embedding, F hidden width, V vocabulary, L layers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from modernbert_train.config.plugins import Rows
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    BertShape,
    ContrastiveConfig,
    DebertaConfig,
    DistilBertConfig,
    EsmConfig,
    GemmaConfig,
    LabelledConfig,
    LlamaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
    NeoBertConfig,
    ObjectiveConfig,
    ReplacedTokensConfig,
    XLNetConfig,
)

Place = Literal["embedding", "layer", "head"]


@dataclass(frozen=True)
class Matrix:
    """Matrices of one shape, or vectors as matrices of one column.

    Attributes:
        rows, columns: shape of each.
        place: location: table, layer, or elsewhere.
        count: number of separate matrices.
        uses: matrix products with each per pass; 0 for norms, biases, and tables that are only looked up.
        passes: layers that share it; each of them computes its products.
        head: the head whose positions it is multiplied with, a name of `ObjectiveConfig.heads`; None: every token. For
            a vector, the head it belongs to.
        once: its product has the same size for any number of tokens of a microbatch; not counted as FLOPs of a token.
        parts: number of these matrices stacked in one weight.
        trained: False for weights that stay as they are, under adapters or a classifier of a frozen encoder.
    """

    rows: int
    columns: int
    place: Place
    count: int = 1
    uses: int = 0
    passes: int = 1
    head: str | None = None
    once: bool = False
    parts: int = 1
    trained: bool = True

    @property
    def numbers(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def weights(self) -> int:
        """Number of tensors that store them."""
        return self.count // self.parts

    def padded(self, shards: int) -> int:
        """Return the numbers including FSDP2's padding, which gives all shards of a weight equally many rows."""
        return self.weights * -(-self.parts * self.rows // shards) * shards * self.columns


@dataclass(frozen=True)
class Census:
    """A model with its heads.

    Attributes:
        matrices: all matrices and vectors.
        windows: for each layer, a generator's too, the tokens that a token sees on each side; None: its whole sequence.
        key_flops: FLOPs of a token in each layer's attention, for each key that it sees.
    """

    matrices: tuple[Matrix, ...]
    windows: tuple[int | None, ...]
    key_flops: tuple[int, ...]

    @property
    def hidden(self) -> list[Matrix]:
        """Matrices that Muon orthogonalises, fused ones separately: all trained products, but the embedding."""
        return [matrix for matrix in self.matrices if matrix.uses and matrix.trained and matrix.place != "embedding"]

    @property
    def num_global(self) -> int:
        """Number of layers without a window."""
        return sum(window is None for window in self.windows)


@functools.cache
def census(model: ModelConfig, objective: ObjectiveConfig | None = None) -> Census:
    """Count a model.

    Args:
        model: the encoder.
        objective: its heads are included; None: masked-language modelling.
    """
    objective = objective or MaskedLmConfig()
    matrices, windows = ENCODER_COUNTS[type(model)](model)
    if "tokens" not in objective.heads:
        matrices = _without_tokens(matrices, idle="tokens" in objective.idle_heads)
    heads = tuple(matrix for head in objective.heads if head in HEAD_COUNTS for matrix in HEAD_COUNTS[head](model))
    if objective.is_labelled:
        heads += _classifier(model, labelled := cast(LabelledConfig, objective))
        matrices = _adapted(matrices, labelled)
    heads += _projection(model, objective)
    if objective.compares and cast(ContrastiveConfig, objective).learn_temperature:
        heads += (Matrix(1, 1, "head", head="vectors"),)
    own = Census((*matrices, *heads), windows, (2 * model.key_products * model.attention_width,) * len(windows))
    generator = objective.generator_of(model)
    if generator is None:
        return own
    other, sharing = census(generator), cast(ReplacedTokensConfig, objective).sharing
    matrices = _generator(other.matrices, own.matrices, generator.hidden_size, sharing)
    return Census(matrices, (*windows, *other.windows), (*own.key_flops, *other.key_flops))


def _without_tokens(matrices: Iterable[Matrix], *, idle: bool) -> tuple[Matrix, ...]:
    """Return an encoder without its head for tokens; with `idle`, the head is kept for a later phase."""
    kept: list[Matrix] = []
    table, *_ = matrices = tuple(matrices)
    for matrix in matrices:
        if matrix.head != "tokens" or (idle and matrix.place == "head"):
            kept.append(matrix)
        elif matrix is table or (idle and matrix.place != "head"):
            kept.append(replace(matrix, uses=0, head=None))
    return tuple(kept)


def _generator(generator: Iterable[Matrix], model: tuple[Matrix, ...], width: int, sharing: str) -> tuple[Matrix, ...]:
    """Return a model with a generator of this width. See models/replaced.py: in gdes sharing the difference tables are
    as large as the tables they are added to, so gdes counts like no sharing."""
    own = [replace(matrix, head="generator") if matrix.head == "tokens" else matrix for matrix in generator]
    if sharing != "embeddings":
        return (*model, *own)
    table, *rest = model  # the table is first
    wide = table.columns
    own = [matrix for matrix in own if matrix.place != "embedding"]
    projection: tuple[Matrix, ...] = ()
    if wide != next(iter(generator)).columns:
        own = [replace(m, rows=wide) if m.head == "generator" and m.rows == width else m for m in own]
        # XLNet otherwise lacks a dense matrix
        if not any(matrix.uses and matrix.head == "generator" for matrix in own):
            own += [Matrix(wide, width, "head", uses=1, head="generator"), Matrix(wide, 1, "head", head="generator")]
        projection = (Matrix(width, wide, "head", uses=1), Matrix(width, 1, "head"))
    return (replace(table, uses=1, head="generator"), *rest, *own, *projection)


Counted = tuple[tuple[Matrix, ...], tuple[int | None, ...]]  # an encoder with the head that predicts tokens


def _modernbert(model: ModernBertConfig) -> Counted:
    """Count ModernBERT: the decoder has the only bias; the first layer has one norm, the others two."""
    width, hidden, layers = model.hidden_size, model.intermediate_size, model.num_layers
    windows = tuple(None if model.is_global(index) else model.half_window for index in range(layers))
    return (
        table_of(model),
        *_attention(width, layers),
        Matrix(hidden, width, "layer", 2 * layers, uses=1, parts=2),  # Wi: values and gates
        Matrix(width, hidden, "layer", layers, uses=1),  # mlp.Wo
        Matrix(width, 1, "layer", 2 * layers - 1),
        Matrix(width, 1, "embedding"),  # its norm
        Matrix(width, 1, "head"),  # the last layer's norm
        *prediction_of(model),
        Matrix(width, 1, "head", head="tokens"),  # the head's
    ), windows


def _bert(model: BertShape | EsmConfig) -> Counted:
    """Count BERT: biases everywhere, in norms too. Tables of positions and segments are only looked up.

    ESM-2 lacks these tables, and its norm is the last one.
    """
    width, hidden, layers = model.hidden_size, model.intermediate_size, model.num_layers
    rows = (model.max_positions or 0) + model.position_offset
    return (
        table_of(model),
        *([Matrix(rows, width, "embedding")] if rows else []),
        *([Matrix(model.segments, width, "embedding")] if model.segments else []),
        Matrix(width, 1, "embedding" if rows else "head", 2),
        *_attention(width, layers),
        Matrix(hidden, width, "layer", layers, uses=1),  # Wi
        Matrix(width, hidden, "layer", layers, uses=1),  # mlp.Wo
        Matrix(width, 1, "layer", 3 * layers, parts=3),  # bias of Wqkv
        Matrix(width, 1, "layer", (2 + 4) * layers),  # biases of the two Wo; two norms
        Matrix(hidden, 1, "layer", layers),
        *prediction_of(model),
        Matrix(width, 1, "head", 3, head="tokens"),  # bias of the dense matrix, norm
    ), (None,) * layers


def _albert(model: AlbertConfig) -> Counted:
    """Count ALBERT: as BERT, with narrow tables, a projection, and units that several layers share."""
    width, hidden, narrow = model.hidden_size, model.intermediate_size, model.embedding_size
    attentions, ffns = (Counter(model.passes(part)) for part in ("attention", "ffn"))
    of_attentions = (
        (
            *_attention(width, each, passes),
            Matrix(width, 1, "layer", 3 * each, passes=passes, parts=3),  # bias of Wqkv
            Matrix(width, 1, "layer", 3 * each, passes=passes),  # bias of Wo, norm
        )
        for passes, each in attentions.items()
    )
    of_ffns = (
        (
            Matrix(hidden, width, "layer", each, uses=1, passes=passes),  # Wi
            Matrix(width, hidden, "layer", each, uses=1, passes=passes),  # Wo
            Matrix(hidden, 1, "layer", each, passes=passes),
            Matrix(width, 1, "layer", 3 * each, passes=passes),
        )
        for passes, each in ffns.items()
    )
    return (
        table_of(model),
        Matrix(model.max_positions, narrow, "embedding"),
        Matrix(model.segments, narrow, "embedding"),
        Matrix(narrow, 1, "embedding", 2),
        Matrix(width, narrow, "head", uses=1),  # the projection
        Matrix(width, 1, "head"),
        *(matrix for unit in (*of_attentions, *of_ffns) for matrix in unit),
        *prediction_of(model),
        Matrix(narrow, 1, "head", 3, head="tokens"),  # bias of the dense matrix, norm
    ), (None,) * model.num_layers


def _xlnet(model: XLNetConfig) -> Counted:
    """Count XLNet: attention has biases of heads only; keys of distances are computed once a microbatch."""
    width, hidden, layers = model.hidden_size, model.intermediate_size, model.num_layers
    return (
        table_of(model),
        Matrix(1, width, "embedding"),  # of query tokens
        *_attention(width, layers),
        Matrix(width, width, "layer", layers, uses=1, once=True),  # Wr
        Matrix(hidden, width, "layer", layers, uses=1),  # Wi
        Matrix(width, hidden, "layer", layers, uses=1),  # mlp.Wo
        Matrix(model.num_heads, model.head_size, "layer", 3 * layers),  # biases of heads
        Matrix(2, width, "layer", layers),  # segments
        Matrix(width, 1, "layer", (1 + 4) * layers),  # bias of mlp.Wo; two norms
        Matrix(hidden, 1, "layer", layers),
        Matrix(model.vocab_size, 1, "head", head="tokens"),  # the decoder's bias
    ), (None,) * layers


def _deberta(model: DebertaConfig) -> Counted:
    """Count DeBERTa: distances are multiplied with Wqkv, or with separate matrices, once a microbatch."""
    width, hidden, layers = model.hidden_size, model.intermediate_size, model.num_layers
    first = model.version == "v1"
    own = (Matrix(width, width, "layer", 2 * layers, uses=1, once=True),) if first else ()
    qkv = Matrix(3 * width, width, "layer", layers, uses=1)  # version 1 interleaves it by head, so it is one matrix
    wide = model.convolution * width
    convolution = (Matrix(width, wide, "head", uses=1), Matrix(width, 1, "head", 3)) if wide else ()  # bias, norm
    narrow = (Matrix(width, model.embedding_width, "head", uses=1),) if model.embedding_size else ()
    return (
        table_of(model),
        *((qkv, Matrix(width, width, "layer", layers, uses=1)) if first else _attention(width, layers)),
        *own,  # Wquery and Wkey, of distances
        Matrix(hidden, width, "layer", layers, uses=1),  # Wi
        Matrix(width, hidden, "layer", layers, uses=1),  # mlp.Wo
        *(() if first else (Matrix(width, 1, "layer", 3 * layers, parts=3),)),  # bias of Wqkv
        Matrix(width, 1, "layer", (9 if first else 6) * layers),  # of both Wo, norms; queries, values, Wquery
        Matrix(hidden, 1, "layer", layers),
        *narrow,
        *convolution,
        Matrix(model.distance_rows, width, "head"),
        Matrix(width, 1, "head", 2 if first else 4),  # norm of the embedding, and of distances
        *prediction_of(model),
        Matrix(model.embedding_width, 1, "head", 3, head="tokens"),  # bias of the dense matrix, norm
    ), (None,) * layers


def _llama(model: LlamaConfig) -> Counted:
    """Count Llama: norms without biases; keys and values may have fewer heads than queries."""
    width, hidden, layers, across = model.hidden_size, model.intermediate_size, model.num_layers, model.attention_width
    keys = model.kv_heads * model.head_size
    biases = (Matrix(across, 1, "layer", layers), Matrix(keys, 1, "layer", 2 * layers, parts=2))
    return (
        table_of(model),
        Matrix(across, width, "layer", layers, uses=1),  # Wq
        Matrix(keys, width, "layer", 2 * layers, uses=1, parts=2),  # Wkv
        Matrix(width, across, "layer", layers, uses=1),  # attn.Wo
        Matrix(hidden, width, "layer", 2 * layers, uses=1, parts=2),  # Wi: gates and values
        Matrix(width, hidden, "layer", layers, uses=1),  # mlp.Wo
        Matrix(width, 1, "layer", 2 * layers),
        *((Matrix(model.head_size, 1, "layer", 2 * layers),) if model.qk_norm else ()),
        *(biases if model.qkv_bias else ()),
        *(() if model.tied else (Matrix(model.vocab_size, width, "embedding", uses=1, head="tokens"),)),
        Matrix(width, 1, "head"),  # the last norm
    ), (None,) * layers


def _gemma(model: GemmaConfig) -> Counted:
    """Count Gemma: as Llama, with two more norms a layer, and windows."""
    matrices, _ = _llama(model)
    windows = tuple(None if model.is_global(index) else model.half_window("all") for index in range(model.num_layers))
    return (*matrices, Matrix(model.hidden_size, 1, "layer", 2 * model.num_layers)), windows


def _neobert(model: NeoBertConfig) -> Counted:
    """Count NeoBERT: as Llama, with Wqkv as one matrix interleaved by head, and a bias of the decoder."""
    width, hidden, layers = model.hidden_size, model.intermediate_size, model.num_layers
    return (
        table_of(model),
        Matrix(3 * width, width, "layer", layers, uses=1),  # Wqkv
        Matrix(width, width, "layer", layers, uses=1),  # attn.Wo
        Matrix(hidden, width, "layer", 2 * layers, uses=1, parts=2),  # Wi: gates and values
        Matrix(width, hidden, "layer", layers, uses=1),  # mlp.Wo
        Matrix(width, 1, "layer", 2 * layers),
        Matrix(model.vocab_size, width, "embedding", uses=1, head="tokens"),  # the decoder
        Matrix(model.vocab_size, 1, "head", head="tokens"),
        Matrix(width, 1, "head"),  # the last norm
    ), (None,) * layers


def _attention(width: int, count: int, passes: int = 1) -> tuple[Matrix, ...]:
    """Return Wqkv and attn.Wo of this number of layers."""
    return (
        Matrix(width, width, "layer", 3 * count, uses=1, passes=passes, parts=3),
        Matrix(width, width, "layer", count, uses=1, passes=passes),
    )


def table_of(model: ModelConfig) -> Matrix:
    """Return the embedding: looked up by every token; if tied to the decoder, also multiplied with predictions."""
    uses, head = (1, "tokens") if model.tied else (0, None)
    return Matrix(model.vocab_size, model.embedding_width, "embedding", uses=uses, head=head)


def prediction_of(model: ModelConfig) -> tuple[Matrix, ...]:
    """Return the dense matrix of the head that predicts tokens, and the decoder's bias."""
    dense = Matrix(model.embedding_width, model.hidden_size, "head", uses=1, head="tokens")
    return dense, Matrix(model.vocab_size, 1, "head", head="tokens")


def _pair(model: ModelConfig) -> tuple[Matrix, ...]:
    """See `PairHead` of models/sop.py."""
    width = model.hidden_size
    return (
        Matrix(width, width, "head", uses=1, head="pair"),
        Matrix(2, width, "head", uses=1, head="pair"),
        Matrix(width, 1, "head"),
        Matrix(2, 1, "head"),
    )


def _replaced(model: ModelConfig) -> tuple[Matrix, ...]:
    """See `TokenClass` of models/replaced.py; its transform is the encoder's."""
    width = model.hidden_size
    return (
        Matrix(width, width, "head", uses=1, head="replaced"),
        Matrix(1, width, "head", uses=1, head="replaced"),
        Matrix(width, 1, "head", _TRANSFORM_VECTORS.get(type(model), 1), head="replaced"),
        Matrix(1, 1, "head", head="replaced"),
    )


# vectors in the encoder's transform: DeBERTa's bias and norm (weight, bias); others have a bias or a norm's weight
_TRANSFORM_VECTORS: dict[type[ModelConfig], int] = {DebertaConfig: 3}


def _classifier(model: ModelConfig, objective: LabelledConfig) -> tuple[Matrix, ...]:
    """See models/classifier.py: ModernBERT keeps the dense head for tokens, others pool texts; a frozen encoder has
    neither."""
    (head,), width, logits = objective.heads, model.hidden_size, objective.num_logits
    between: tuple[Matrix, ...] = ()
    if not objective.freeze and (model.pooler_activation is None or objective.pools):
        between = (Matrix(width, width, "head", uses=1, head=head), Matrix(width, 1, "head"))  # norm, or bias
    return *between, Matrix(logits, width, "head", uses=1, head=head), Matrix(logits, 1, "head")


def _adapted(matrices: Iterable[Matrix], objective: LabelledConfig) -> tuple[Matrix, ...]:
    """Return an encoder with its adapters, two matrices for each weight of a layer; `targets` may leave out some."""
    if objective.lora is None:
        return tuple(replace(each, trained=not objective.freeze) for each in matrices)
    rank, adapted = objective.lora.rank, [replace(each, trained=False) for each in matrices]
    for each in [each for each in adapted if each.place == "layer" and each.uses]:
        adapted.append(replace(each, rows=rank, count=each.weights, parts=1, trained=True))
        adapted.append(
            replace(each, rows=each.parts * each.rows, columns=rank, count=each.weights, parts=1, trained=True)
        )
    return tuple(adapted)


def _projection(model: ModelConfig, objective: ObjectiveConfig) -> tuple[Matrix, ...]:
    """See models/distilled.py: projects hidden states of all tokens to the teacher's width. See models/contrastive.py:
    projects them to the width of token vectors, without a bias."""
    width = objective.projected_width
    if width is None:
        return ()
    matrix = Matrix(width, model.hidden_size, "head", uses=1, head=objective.heads[-1])
    return (matrix,) if objective.compares else (matrix, Matrix(width, 1, "head"))


ENCODER_COUNTS: Rows[type[ModelConfig], Callable[[Any], Counted]] = Rows(
    "count",
    {
        ModernBertConfig: _modernbert,
        BertConfig: _bert,
        DistilBertConfig: _bert,
        AlbertConfig: _albert,
        XLNetConfig: _xlnet,
        DebertaConfig: _deberta,
        LlamaConfig: _llama,
        GemmaConfig: _gemma,
        NeoBertConfig: _neobert,
        EsmConfig: _bert,
    },
)

# further heads of an objective; the encoder includes the head that predicts tokens
HEAD_COUNTS: dict[str, Callable[[ModelConfig], tuple[Matrix, ...]]] = {"pair": _pair, "replaced": _replaced}
