"""Labelled models: encoders for classes, answers or choices, as transformers' ...ForSequenceClassification etc.

The encoder has the format of its masked-LM model; this file adds the head and the labels. The objective determines the
class of transformers. An objective that the class cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from modernbert_train.config.classify import TEXT_LABELS
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    AnswerConfig,
    ChooseConfig,
    ClassifyConfig,
    LabelledConfig,
    ModelConfig,
    TagConfig,
)
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import albert, bert, deberta, distilbert, esm, llama, modernbert, xlnet
from modernbert_train.weights.formats.config_json import Content, Described
from modernbert_train.weights.formats.table_format import Around, Format, places

_MOST_LABELS = 1 << 20  # bounds the memory that a damaged file can take


@dataclass(frozen=True)
class Kind:
    """One class of transformers.

    Attributes:
        encoder: the encoder's format.
        objective: the kind of its labels.
        heads: module here -> in transformers.
        poolings: poolings it supports; empty for words and answers, which are not pooled.
        extra: further keys of its config.json, with the only supported values.
        dropout: config.json's key for the dropout before the classes.
    """

    encoder: Format
    objective: type[LabelledConfig]
    heads: Mapping[str, str]
    poolings: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    dropout: str = "classifier_dropout"


_OWN = {"head.dense": "head.dense", "head.norm": "head.norm", "classifier": "classifier"}
_ALONE = {"classifier": "classifier"}
_ANSWERS = {"classifier": "qa_outputs"}
_Texts = tuple[Any, ...]  # heads, poolings, extra and dropout of a `Kind`


def _pooled(theirs: str, *others: Any) -> _Texts:
    """Return the head of a class that reads [CLS] through a matrix of this name."""
    return {"pooler.dense": theirs, **_ALONE}, ("cls",), *others


def _family(
    name: str,
    encoder: Format,
    texts: _Texts | None = None,
    choices: _Texts | None = None,
    words: Mapping[str, str] = _ALONE,
    answers: Mapping[str, str] | None = _ANSWERS,
    suffix: str = "",
    answers_dropout: str = "classifier_dropout",
) -> dict[str, Kind]:
    """Return transformers' classes of one architecture, for texts, words, answers and choices."""
    kinds = {
        "SequenceClassification": texts and Kind(encoder, ClassifyConfig, *texts),
        "TokenClassification": Kind(encoder, TagConfig, words),
        f"QuestionAnswering{suffix}": answers and Kind(encoder, AnswerConfig, answers, dropout=answers_dropout),
        "MultipleChoice": choices and Kind(encoder, ChooseConfig, *choices),
    }
    return {f"{name}For{what}": kind for what, kind in kinds.items() if isinstance(kind, Kind)}


_MODERNBERT = (_OWN, ("cls", "mean"))
_ALBERT = _pooled("albert.pooler")
_BERT = _pooled("bert.pooler.dense")
_ROBERTA = ({"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}, ("cls",))
_DEBERTA = _pooled("pooler.dense", {"pooler_hidden_act": "tanh"}, "cls_dropout")  # GELU by default
_DISTILBERT = _pooled("pre_classifier", {}, "seq_classif_dropout")
_ESM = (_ROBERTA[0], ("cls",), {}, "hidden_dropout_prob")
_EUROBERT = ({"pooler.dense": "dense", **_ALONE}, ("mean",), {"classifier_pooling": "mean"})
# XLNet's default is a last [CLS]; here it is first, as in the other models
_SUMMARISED = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "tanh"}
_SUMMARY = {"pooler.dense": "sequence_summary.summary", "classifier": "logits_proj"}
_XLNET = (_SUMMARY, ("cls",), _SUMMARISED, "summary_last_dropout")

# class of transformers -> its description
KINDS: dict[str, Kind] = {
    **_family("ModernBert", modernbert.FORMAT, _MODERNBERT, _MODERNBERT, _OWN, _OWN),
    **_family("Albert", albert.FORMAT, _ALBERT, _ALBERT),
    **_family("Bert", bert.FORMAT, _BERT, _BERT),
    **_family("Deberta", deberta.V1, _DEBERTA),
    **_family("DebertaV2", deberta.FORMAT, _DEBERTA, _DEBERTA),
    **_family("DistilBert", distilbert.FORMAT, _DISTILBERT, _DISTILBERT, answers_dropout="qa_dropout"),
    **_family("Esm", esm.FORMAT, _ESM, answers=None),
    **_family("EuroBert", llama.EUROBERT, _EUROBERT, answers=None),
    **_family("Qwen2", llama.QWEN2, words={"classifier": "score"}, answers=None),
    **_family("Qwen3", llama.QWEN3, words={"classifier": "score"}, answers=None),
    **_family("Roberta", bert.ROBERTA, _ROBERTA, _pooled("roberta.pooler.dense")),
    **_family("XLMRoberta", bert.OTHERS[0], _ROBERTA, _pooled("roberta.pooler.dense")),
    **_family("Camembert", bert.OTHERS[1], _ROBERTA, _pooled("roberta.pooler.dense")),
    **_family("XLNet", xlnet.FORMAT, _XLNET, _XLNET, suffix="Simple"),
}
# model_type -> why transformers' class computes something different
_OTHERWISE = dict.fromkeys(
    ("qwen2", "qwen3", "gemma3_text"), " (its classes of texts read only the last token, as a decoder's)"
)


class Classifiers(Around):
    """See `HubFormat`: one class of transformers, with the labels of one objective.

    Args:
        name: of the class.
        objective: of the weights; None: it is read from config.json.
    """

    def __init__(self, name: str, objective: LabelledConfig | None = None) -> None:
        self.name, self.objective, self.kind = name, objective, KINDS[name]
        super().__init__(self.kind.encoder)

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """See `HubFormat`."""
        return super().theirs(name, config) if name.startswith("model.") else places(name, "", {}, self.kind.heads)

    def today(self, name: str) -> str | None:
        """See `HubFormat`."""
        return name if name.rpartition(".")[0] in self.kind.heads.values() else super().today(name)

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """See `HubFormat`; the one label of a regression is called score."""
        assert self.objective is not None
        encoder = self.kind.encoder.describe(config, order, {"model"}, max_tokens, vocabulary)
        about: dict[str, Any] = {"architectures": [self.name], self.kind.dropout: self.objective.dropout}
        about |= self.kind.extra
        names = self.objective.labels
        if self.kind.objective is ClassifyConfig:
            objective = cast(ClassifyConfig, self.objective)
            about["problem_type"] = TEXT_LABELS[objective.kind].problem
            names = ("score",) if objective.is_score else names
        if len(self.kind.poolings) > 1:
            about["classifier_pooling"] = cast(ClassifyConfig | ChooseConfig, self.objective).pooling
        by_number = {str(number): name for number, name in enumerate(names)}
        return encoder | about | {"id2label": by_number, "label2id": {name: int(n) for n, name in by_number.items()}}

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """See `HubFormat`."""
        content, kind = Content(raw, where), self.kind
        if raw.get("model_type") != kind.encoder.model_type:
            raise content.damaged("model_type", f"not {kind.encoder.model_type}, of a {self.name}")
        described = kind.encoder.read(raw | {"architectures": [*kind.encoder.classes.values()][:1]}, where)
        if described.order == "causal":
            raise DataError(
                f"{where}: a {self.name} in causal order; classifiers attend to both sides here. Name a model with "
                "is_causal=false, or the decoder that it was fine-tuned from."
            )
        names = raw.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # transformers' default
        numbers = [str(number) for number in range(len(names))] if isinstance(names, dict) else []
        if not numbers or len(numbers) > _MOST_LABELS or {*names} != {*numbers}:
            raise content.damaged("id2label", "not a name for each class")
        labels = tuple(str(names[number]) for number in numbers)
        for key, value in kind.extra.items():
            if raw.get(key) != value:
                raise content.unknown(value, key, given=f"of a {self.name} ")
        dropout = raw.get(kind.dropout)
        about: dict[str, Any] = {"labels": labels, "dropout": dropout if isinstance(dropout, float) else 0.0}
        if kind.objective is AnswerConfig:
            if len(labels) != 2:
                reason = f"but a {self.name} has two, for the start and the end of an answer"
                raise content.damaged("id2label", reason)
            return described._replace(objective=AnswerConfig(dropout=about["dropout"]))
        if kind.objective is TagConfig:
            return described._replace(objective=TagConfig(**about))
        kinds = {each.problem: ours for ours, each in TEXT_LABELS.items()}
        usual = "regression" if len(labels) == 1 else "single-label"  # as transformers chooses
        problem = raw.get("problem_type") or TEXT_LABELS[usual].problem
        pooling = raw.get("classifier_pooling", "cls") if len(kind.poolings) > 1 else kind.poolings[0]
        if kind.objective is ChooseConfig and pooling in kind.poolings:
            return described._replace(objective=ChooseConfig(**about | {"pooling": pooling}))
        one_score = problem in kinds and TEXT_LABELS[kinds[problem]].min_labels == 0
        if problem not in kinds or pooling not in kind.poolings or (one_score and len(labels) > 1):
            choices = f"{', '.join(kinds)} and {', '.join(kind.poolings)}, and one score"
            has = f"of a {self.name} with {len(labels)} labels "
            raise content.unknown(choices, "problem_type", "classifier_pooling", given=has)
        about |= {"kind": kinds[problem], "pooling": pooling}
        return described._replace(objective=ClassifyConfig(**about))


def classifier_format(model: ModelConfig, objective: LabelledConfig) -> Classifiers:
    """Return the format for exporting an encoder with its labels.

    Raises:
        ConfigError: transformers lacks such a class; says which exist.
    """
    for name, kind in KINDS.items():
        if (kind.encoder.model_type, kind.objective) != (model.model_type, type(objective)):
            continue
        pooling = objective.pooling  # for classes of texts
        if pooling is not None and pooling not in kind.poolings:
            raise ConfigError(
                f"objective.pooling={pooling}: transformers' {name} only reads {', '.join(kind.poolings)}, "
                f"so it would predict other classes. Train with objective.pooling={kind.poolings[0]} to export."
            )
        if objective.freeze and {*kind.heads} != {"classifier"}:
            raise ConfigError(
                f"objective.freeze=true: transformers' {name} has more than one matrix after the encoder, and this "
                "model was trained without them. Evaluate with the run itself."
            )
        return Classifiers(name, objective)
    supported = ", ".join(
        sorted({kind.encoder.model_type for kind in KINDS.values() if kind.objective is type(objective)})
    )
    why = _OTHERWISE.get(model.model_type, "") if objective.pools else ""
    raise ConfigError(
        f"objective.name={objective.name} with model.name={model.name}: no class of transformers has this head on a "
        f"{model.model_type}{why}; for {supported} there is one. Evaluate with the run itself."
    )
