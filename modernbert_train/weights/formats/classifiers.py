"""Encoders that tell classes, answers or choices, as transformers' ...ForSequenceClassification and its sisters.

The encoder is that of a format which predicts tokens; here stand what follows it there, and the labels. Which class of
transformers it is follows from the objective. What a class cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
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
from modernbert_train.weights.formats import albert, bert, deberta, distilbert, llama, modernbert, xlnet
from modernbert_train.weights.formats.config_json import Described
from modernbert_train.weights.formats.shape import Shape

# ClassifyConfig.kind -> transformers' problem_type
PROBLEMS = {
    "single-label": "single_label_classification",
    "multi-label": "multi_label_classification",
    "regression": "regression",
}
_MOST_LABELS = 1 << 20  # a number out of a damaged file must not take all memory


class Encoders(Protocol):
    """What is asked of the format of the encoder."""

    def read(self, raw: dict[str, Any], where: str) -> Described: ...

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]: ...

    def theirs(self, name: str, config: Any) -> tuple[str, ...]: ...

    def today(self, name: str) -> str | None: ...


@dataclass(frozen=True)
class Kind:
    """One class of transformers.

    Attributes:
        encoder: format of what stands before the head.
        model_type: of its config.json.
        pretrained: the class that `encoder` reads in its place.
        objective: what it tells.
        heads: our module -> theirs.
        poolings: that it can express; empty: words and answers are not pooled.
        says: further keys of its config.json, where only these values are known.
        dropout: the key of config.json for the dropout before the classes.
    """

    encoder: Encoders
    model_type: str
    pretrained: str
    objective: type[LabelledConfig]
    heads: Mapping[str, str]
    poolings: tuple[str, ...] = ()
    says: Mapping[str, Any] = field(default_factory=dict)
    dropout: str = "classifier_dropout"


_OWN = {"head.dense": "head.dense", "head.norm": "head.norm", "classifier": "classifier"}
_ALBERT = (albert, "albert", "AlbertForMaskedLM")
_BERT, _ROBERTA = (bert, "bert", "BertForMaskedLM"), (bert, "roberta", "RobertaForMaskedLM")
_DISTILBERT = (distilbert, "distilbert", distilbert.ARCHITECTURE)
_DEBERTA = {kind: (deberta, kind, name) for kind, (_, name) in deberta.VERSIONS.items()}
_CONTEXT = {"pooler.dense": "pooler.dense", "classifier": "classifier"}  # of DeBERTa, with GELU unless it says tanh
_ANSWERS = {"classifier": "qa_outputs"}
_LLAMA = {kind: (llama, kind, name) for kind, (name, _) in llama.KINDS.items()}
_MODERNBERT = (modernbert, "modernbert", modernbert.ARCHITECTURE)
_XLNET = (xlnet, "xlnet", xlnet.ARCHITECTURE)
_SUMMARY = {"pooler.dense": "sequence_summary.summary", "classifier": "logits_proj"}
# its [CLS] comes last, by default; here it is first, as everywhere
_SUMMARISED = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "tanh"}

# class of transformers -> what it is
KINDS: dict[str, Kind] = {
    "ModernBertForSequenceClassification": Kind(*_MODERNBERT, ClassifyConfig, _OWN, ("cls", "mean")),
    "ModernBertForTokenClassification": Kind(*_MODERNBERT, TagConfig, _OWN),
    "ModernBertForQuestionAnswering": Kind(*_MODERNBERT, AnswerConfig, _OWN),
    "ModernBertForMultipleChoice": Kind(*_MODERNBERT, ChooseConfig, _OWN, ("cls", "mean")),
    "AlbertForSequenceClassification": Kind(
        *_ALBERT, ClassifyConfig, {"pooler.dense": "albert.pooler", "classifier": "classifier"}, ("cls",)
    ),
    "AlbertForTokenClassification": Kind(*_ALBERT, TagConfig, {"classifier": "classifier"}),
    "AlbertForQuestionAnswering": Kind(*_ALBERT, AnswerConfig, _ANSWERS),
    "AlbertForMultipleChoice": Kind(
        *_ALBERT, ChooseConfig, {"pooler.dense": "albert.pooler", "classifier": "classifier"}, ("cls",)
    ),
    "BertForSequenceClassification": Kind(
        *_BERT, ClassifyConfig, {"pooler.dense": "bert.pooler.dense", "classifier": "classifier"}, ("cls",)
    ),
    "BertForTokenClassification": Kind(*_BERT, TagConfig, {"classifier": "classifier"}),
    "BertForQuestionAnswering": Kind(*_BERT, AnswerConfig, _ANSWERS),
    "BertForMultipleChoice": Kind(
        *_BERT, ChooseConfig, {"pooler.dense": "bert.pooler.dense", "classifier": "classifier"}, ("cls",)
    ),
    "DebertaForSequenceClassification": Kind(
        *_DEBERTA["deberta"], ClassifyConfig, _CONTEXT, ("cls",), {"pooler_hidden_act": "tanh"}, "cls_dropout"
    ),
    "DebertaForTokenClassification": Kind(*_DEBERTA["deberta"], TagConfig, {"classifier": "classifier"}),
    "DebertaForQuestionAnswering": Kind(*_DEBERTA["deberta"], AnswerConfig, _ANSWERS),
    "DebertaV2ForSequenceClassification": Kind(
        *_DEBERTA["deberta-v2"], ClassifyConfig, _CONTEXT, ("cls",), {"pooler_hidden_act": "tanh"}, "cls_dropout"
    ),
    "DebertaV2ForTokenClassification": Kind(*_DEBERTA["deberta-v2"], TagConfig, {"classifier": "classifier"}),
    "DebertaV2ForQuestionAnswering": Kind(*_DEBERTA["deberta-v2"], AnswerConfig, _ANSWERS),
    "DebertaV2ForMultipleChoice": Kind(
        *_DEBERTA["deberta-v2"], ChooseConfig, _CONTEXT, ("cls",), {"pooler_hidden_act": "tanh"}, "cls_dropout"
    ),
    "DistilBertForSequenceClassification": Kind(
        *_DISTILBERT,
        ClassifyConfig,
        {"pooler.dense": "pre_classifier", "classifier": "classifier"},
        ("cls",),
        dropout="seq_classif_dropout",
    ),
    "DistilBertForTokenClassification": Kind(*_DISTILBERT, TagConfig, {"classifier": "classifier"}),
    "DistilBertForQuestionAnswering": Kind(*_DISTILBERT, AnswerConfig, _ANSWERS, dropout="qa_dropout"),
    "DistilBertForMultipleChoice": Kind(
        *_DISTILBERT,
        ChooseConfig,
        {"pooler.dense": "pre_classifier", "classifier": "classifier"},
        ("cls",),
        dropout="seq_classif_dropout",
    ),
    "EuroBertForSequenceClassification": Kind(
        *_LLAMA["eurobert"],
        ClassifyConfig,
        {"pooler.dense": "dense", "classifier": "classifier"},
        ("mean",),
        {"classifier_pooling": "mean"},
    ),
    "EuroBertForTokenClassification": Kind(*_LLAMA["eurobert"], TagConfig, {"classifier": "classifier"}),
    "Qwen2ForTokenClassification": Kind(*_LLAMA["qwen2"], TagConfig, {"classifier": "score"}),
    "Qwen3ForTokenClassification": Kind(*_LLAMA["qwen3"], TagConfig, {"classifier": "score"}),
    "RobertaForSequenceClassification": Kind(
        *_ROBERTA,
        ClassifyConfig,
        {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"},
        ("cls",),
    ),
    "RobertaForTokenClassification": Kind(*_ROBERTA, TagConfig, {"classifier": "classifier"}),
    "RobertaForQuestionAnswering": Kind(*_ROBERTA, AnswerConfig, _ANSWERS),
    "RobertaForMultipleChoice": Kind(
        *_ROBERTA, ChooseConfig, {"pooler.dense": "roberta.pooler.dense", "classifier": "classifier"}, ("cls",)
    ),
    "XLNetForSequenceClassification": Kind(
        *_XLNET, ClassifyConfig, _SUMMARY, ("cls",), _SUMMARISED, dropout="summary_last_dropout"
    ),
    "XLNetForTokenClassification": Kind(*_XLNET, TagConfig, {"classifier": "classifier"}),
    "XLNetForQuestionAnsweringSimple": Kind(*_XLNET, AnswerConfig, _ANSWERS),
    "XLNetForMultipleChoice": Kind(
        *_XLNET, ChooseConfig, _SUMMARY, ("cls",), _SUMMARISED, dropout="summary_last_dropout"
    ),
}
# model_type -> why its classes in transformers tell something else than what is trained here
_OTHERWISE = dict.fromkeys(
    ("qwen2", "qwen3", "gemma3_text"), " (its classes of texts read the last token alone, as a decoder's)"
)


@dataclass(frozen=True)
class Classifiers:
    """See `HubFormat`: one class of transformers, with the labels of one objective.

    Attributes:
        name: of the class.
        objective: what the weights tell; None: to be read.
    """

    name: str
    objective: LabelledConfig | None = None

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def theirs(self, name: str, config: Any) -> tuple[str, ...]:
        """See `HubFormat`."""
        module, _, end = name.rpartition(".")
        if name.startswith("model."):
            return self.kind.encoder.theirs(name, config)
        return (f"{self.kind.heads[module]}.{end}",) if module in self.kind.heads else ()

    def today(self, name: str) -> str | None:
        """See `HubFormat`."""
        return self.kind.encoder.today(name)

    def shape(self, name: str, config: Any) -> Shape | None:
        """See `HubFormat`."""
        ask = getattr(self.kind.encoder, "shape", None)
        found: Shape | None = ask(name, config) if ask and name.startswith("model.") else None
        return found

    def describe(
        self, config: Any, order: Order, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """See `HubFormat`; of a score the one label is called score."""
        assert self.objective is not None
        encoder = self.kind.encoder.describe(config, order, {"model"}, max_tokens, vocabulary)
        about: dict[str, Any] = {"architectures": [self.name], self.kind.dropout: self.objective.dropout}
        about |= self.kind.says
        names = self.objective.labels
        if self.kind.objective is ClassifyConfig:
            objective = cast(ClassifyConfig, self.objective)
            about["problem_type"] = PROBLEMS[objective.kind]
            names = ("score",) if objective.kind == "regression" else names
        if len(self.kind.poolings) > 1:
            about["classifier_pooling"] = cast(ClassifyConfig | ChooseConfig, self.objective).pooling
        by_number = {str(number): name for number, name in enumerate(names)}
        return encoder | about | {"id2label": by_number, "label2id": {name: int(n) for n, name in by_number.items()}}

    def read(self, raw: dict[str, Any], where: str) -> Described:
        """See `HubFormat`."""
        kind = self.kind
        if raw.get("model_type") != kind.model_type:
            raise DataError(
                f"{where}: model_type={shown(raw.get('model_type'))} of a {self.name}. Restore it from a copy."
            )
        said = kind.encoder.read(raw | {"architectures": [kind.pretrained]}, where)
        if said.order == "causal":
            raise DataError(
                f"{where}: a {self.name} in causal order; classifiers attend to both sides here. Name a model with "
                "is_causal=false, or the decoder that it was made of."
            )
        given = raw.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # transformers' default
        numbers = [str(number) for number in range(len(given))] if isinstance(given, dict) else []
        if not numbers or len(numbers) > _MOST_LABELS or {*given} != {*numbers}:
            raise DataError(f"{where}: id2label={shown(given)}, not a name for each class. Restore it from a copy.")
        labels = tuple(str(given[number]) for number in numbers)
        for key, value in kind.says.items():
            if raw.get(key) != value:
                raise DataError(
                    f"{where}: {key}={shown(raw.get(key))}; of a {self.name} only {value} is known. Name another model."
                )
        dropout = raw.get(kind.dropout)
        about: dict[str, Any] = {"labels": labels, "dropout": dropout if isinstance(dropout, float) else 0.0}
        if kind.objective is AnswerConfig:
            if len(labels) != 2:
                raise DataError(
                    f"{where}: id2label={shown(given)}; a {self.name} has two, for the start and the end of an answer. "
                    "Restore it from a copy."
                )
            return said._replace(objective=AnswerConfig(dropout=about["dropout"]))
        if kind.objective is TagConfig:
            return said._replace(objective=TagConfig(**about))
        problem = raw.get("problem_type") or ("regression" if len(labels) == 1 else PROBLEMS["single-label"])
        kinds = {theirs: ours for ours, theirs in PROBLEMS.items()}
        pooling = raw.get("classifier_pooling", "cls") if len(kind.poolings) > 1 else kind.poolings[0]
        if kind.objective is ChooseConfig and pooling in kind.poolings:
            return said._replace(objective=ChooseConfig(**about | {"pooling": pooling}))
        if problem not in kinds or pooling not in kind.poolings or (problem == "regression" and len(labels) > 1):
            raise DataError(
                f"{where}: problem_type={shown(problem)}, classifier_pooling={shown(pooling)} with {len(labels)} "
                f"labels; of a {self.name} {', '.join(kinds)} and {', '.join(kind.poolings)} can be read, and one "
                "score. Name another model."
            )
        about |= {"kind": kinds[problem], "pooling": pooling}
        return said._replace(objective=ClassifyConfig(**about))


def classifier_format(model: ModelConfig, objective: LabelledConfig) -> Classifiers:
    """The format that an encoder with its classes is exported in.

    Raises:
        ConfigError: transformers has no such class; says which is missing.
    """
    for name, kind in KINDS.items():
        if (kind.model_type, kind.objective) != (model.model_type, type(objective)):
            continue
        pooling = getattr(objective, "pooling", None)  # of texts
        if pooling is not None and pooling not in kind.poolings:
            raise ConfigError(
                f"objective.pooling={pooling}: transformers' {name} reads {', '.join(kind.poolings)} alone, "
                f"so it would tell other classes. Train with objective.pooling={kind.poolings[0]} to export."
            )
        if objective.freeze and {*kind.heads} != {"classifier"}:
            raise ConfigError(
                f"objective.freeze=true: transformers' {name} has more than one matrix behind the encoder, and this "
                "one was trained without. Measure with the run itself."
            )
        return Classifiers(name, objective)
    known = ", ".join(sorted({kind.model_type for kind in KINDS.values() if kind.objective is type(objective)}))
    why = _OTHERWISE.get(model.model_type, "") if objective.pools else ""
    raise ConfigError(
        f"objective.name={objective.name} with model.name={model.name}: no class of transformers has this head on a "
        f"{model.model_type}{why}; those of {known} have. Measure with the run itself."
    )
