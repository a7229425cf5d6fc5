"""README.md of an exported model: data, tokens, recipe, evaluation and licence, with the run's own numbers.

Unknown facts are stated as unknown; no field is left to be guessed or filled in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from modernbert_train.checkpoints.evaluations import Result, table_rows
from modernbert_train.checkpoints.provenance import Start, in_words
from modernbert_train.checkpoints.saved_state import Averaged
from modernbert_train.config.evals import BITS_PER_BYTE, TEMPERATURE
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    ModelConfig,
    ObjectiveConfig,
    PhaseConfig,
    RunConfig,
    StreamConfig,
)
from modernbert_train.core.read_json import Count, as_type, is_count, number
from modernbert_train.core.text import markdown_table
from modernbert_train.core.version import __version__
from modernbert_train.data.dataset_card import DatasetCard, prepare_report, read_card
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.init import module_of
from modernbert_train.weights.formats.config_json import PAIR_HEAD
from modernbert_train.weights.formats.tensors import heads_among
from modernbert_train.weights.names import is_hub_id

MASK = "[MASK]"
# the exported model of a run: a detector finds replaced tokens, a classifier classifies texts, a tagger words, an
# answerer finds the span of an answer, a chooser picks one of several answers
Part = Literal["model", "detector", "generator", "classifier", "tagger", "answerer", "chooser", "embedder"]
_TASKS: dict[Part, tuple[str, str]] = {  # the hub's name of the task, and transformers' class
    "classifier": ("text-classification", "AutoModelForSequenceClassification"),
    "tagger": ("token-classification", "AutoModelForTokenClassification"),
    "answerer": ("question-answering", "AutoModelForQuestionAnswering"),
    "embedder": ("feature-extraction", "AutoModel"),
    "chooser": ("multiple-choice", "AutoModelForMultipleChoice"),
}


def model_card(
    name: str,
    sections: Mapping[str, str],
    *,
    model: ModelConfig,
    order: Order = "all",
    part: Part = "model",
    licence: str | None,
    datasets: Sequence[str] = (),
    base: str | None = None,
) -> str:
    """Return a model card with the header that the Hugging Face hub reads.

    Args:
        name: of the model.
        sections: heading -> text; an empty heading is the introduction.
        model: the architecture.
        order: which tokens each token saw in training.
        part: which model of the run it is.
        licence: the hub's identifier of a licence, such as apache-2.0; None: stated as missing.
        datasets: hub ids of its training data.
        base: hub id of the model it started from.

    Raises:
        ConfigError: the licence is not an identifier.
    """
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", licence):
        raise ConfigError(
            f"--licence={licence!r}: not an identifier of the hub. Write it as apache-2.0, cc-by-4.0, mit or other."
        )
    header: dict[str, Any] = {"license": licence or "unknown", "library_name": "transformers"}
    auto = "AutoModelForMaskedLM"
    if part == "detector":
        auto = "AutoModel"
        header |= {"tags": [model.name, "replaced-token-detection", "encoder"]}
    elif part in _TASKS:
        auto = _TASKS[part][1]
        header |= {"pipeline_tag": _TASKS[part][0], "tags": [model.name, _TASKS[part][0], "encoder"]}
    elif model.single_class:
        auto = "AutoModelForCausalLM"
        kind = "decoder" if order == "causal" else "encoder"
        header |= {"pipeline_tag": "feature-extraction", "mask_token": MASK, "tags": [model.name, kind]}
    elif order == "causal":
        auto = "AutoModelForCausalLM"
        header |= {"pipeline_tag": "text-generation", "tags": [model.name, "text-generation", "decoder"]}
    else:
        header |= {"pipeline_tag": "fill-mask", "mask_token": MASK, "tags": [model.name, "fill-mask", "encoder"]}
    header |= {"datasets": list(datasets)} if datasets else {}
    header |= {"base_model": base} if base and _is_hub_id(base) else {}
    stated = f"{licence}, as stated by who exported the model."
    if licence is None:
        stated = (
            "None was stated when the model was exported; ask its makers before you use it. They can name one with "
            "`--licence` when they export, or here and as `license:` in the header."
        )
    allowed = ", trust_remote_code=True" if model.own_code else ""
    text = "\n\n".join(f"## {heading}\n\n{body}" if heading else body for heading, body in sections.items())
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in header.items())  # JSON is YAML
    return f"""---
{lines}
---

# {name}

{text}

## Use

```python
from transformers import {auto}, AutoTokenizer

path = "."  # this folder, or its id on the hub
tokenizer = AutoTokenizer.from_pretrained(path)
model = {auto}.from_pretrained(path{allowed})
```

## Licence

{stated}
"""


def run_card(
    trained: RunConfig,
    streams: Mapping[str, StreamConfig],
    *,
    phase: str,
    part: Part = "model",
    model: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    left_out: Sequence[str] = (),
    step: int,
    tokens: int,
    metrics: Sequence[dict[str, Any]],
    licence: str | None,
    average: Sequence[Averaged] = (),
    averaged_by: str = "mean",
    starts: Sequence[Start] = (),
    results: Sequence[Result] = (),
) -> str:
    """Return the model card of a run's checkpoint.

    Args:
        trained: the configuration of its training.
        streams: its training shards at their current paths; the card says which are missing.
        phase: of the checkpoint's last step.
        part: which model of the run is exported.
        model: its architecture.
        shapes: of the exported weights.
        left_out: heads that are not exported.
        step, tokens: of the checkpoint.
        metrics: lines of the run's metrics.jsonl.
        licence: see `model_card`.
        average, averaged_by: the averaged checkpoints and the method, as average.py records them.
        starts: of the run.
        results: evaluations of these weights after training.
    """
    now = trained.in_phase[phase]
    order = now.objective.plain_order
    parameters = sum(math.prod(shape) for name, shape in shapes.items() if module_of(name) not in left_out)
    trained_by = "fine-tuned" if part in _TASKS else "pretrained"
    introduction = (
        f"{architecture_title(model, order)}, with {parameters:,} parameters, {trained_by} by "
        f"{_titled(*now.objective.title)} with modernbert-train {__version__}."
    )
    if left_out:
        introduction += f" It was also trained with the heads {', '.join(left_out)}, which this format cannot store."
    elif part == "detector":
        introduction += (
            " For each token it predicts whether it was replaced. Fine-tune its encoder; the generator that chose the "
            "replacements is exported separately."
        )
    elif part == "embedder":
        kinds = {"late": "MultiVectorEncoder", "sparse": "SparseEncoder"}
        kind = kinds.get(str(now.objective.pooling), "SentenceTransformer")
        introduction += f" sentence-transformers' {kind} opens it too and returns the trained embeddings."
    elif part == "generator":
        introduction += " This is the generator; the run's main model learnt to detect its replacements."
    elif PAIR_HEAD in heads_among(shapes):
        introduction += (
            " In a pair, `token_type_ids` are 0 for `[CLS] a [SEP]` and 1 for `b [SEP]`; its second class means that "
            "`b` came before `a`."
        )
    data = {name: _read_shards(stream.path) for name, stream in streams.items()}
    sections = {
        "": introduction,
        "Data": "\n\n".join(
            (_share(name, streams[name]) if len(data) > 1 else "") + _data(*shards) for name, shards in data.items()
        )
        + "\n\nThe model inherits the limits and the rights of its text.",
        "Training": _training(trained, step, tokens)
        + (_averaging(average, averaged_by) if average else "")
        + _provenance(starts, metrics),
        "Evaluation": _evaluation(now.objective, tokens, _same_objective(trained, phase, metrics), results),
    }
    sources = [source for _, report in data.values() for source in _sources(report).values()]
    hub = [source["path"] for source in sources if source.get("kind") == "hub" and _is_hub_id(source["path"])]
    origin = next(iter(trained.weights.named.values()), None)
    about: dict[str, Any] = {"model": model, "order": order, "part": part, "datasets": hub, "base": origin}
    return model_card(trained.name, sections, licence=licence, **about)


def architecture_title(model: ModelConfig, order: Order) -> str:
    """Return the architecture in words, with a link to its paper."""
    name, paper = model.title
    kind = "decoder" if order == "causal" else "encoder"
    return f"A {_titled(f'{name} {kind}', paper)}"


def _titled(name: str, paper: str | None) -> str:
    return name if paper is None else f"{name} ([arXiv {paper}](https://arxiv.org/abs/{paper}))"


def _is_hub_id(name: str) -> bool:
    return is_hub_id(name) and not Path(name).exists()


def _read_shards(folder: str) -> tuple[DatasetCard | None, dict[str, Any]]:
    """Return the shards' card, or None without shards, and prepare's report on exactly these shards."""
    card = None
    with suppress(DataError, OSError, ValueError, KeyError, TypeError, AttributeError):  # missing or damaged
        card = read_card(folder)
        report = prepare_report(Path(folder), card)
        as_type(dict[str, Count], report["dropped"], "dropped")
        as_type(Count, report["documents_read"], "documents_read")
        for source in _sources(report).values():
            as_type(str, source["kind"], "kind")
            as_type(str | None, source.get("path"), "path")
        return card, report
    return card, {}


def _sources(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return report.get("fingerprint", {}).get("spec", {}).get("sources", {})


def _share(name: str, stream: StreamConfig) -> str:
    weights = {"proportion": stream.proportion, "repeat": stream.repeat, "tokens": stream.tokens}
    stated = "".join(f", {key} {value:,}" for key, value in weights.items() if value is not None)
    return f"**{name}**{stated}: "


def _data(card: DatasetCard | None, report: dict[str, Any]) -> str:
    if card is None:
        return "The shards were not available when the model was exported, so they are not described here."
    text = (
        f"{card.documents:,} documents with {card.tokens:,} tokens, by a tokenizer of {card.vocab_size:,} entries "
        f"(sha256 `{card.tokenizer_sha256[:16]}`; of the shards' index `{card.index_sha256[:16]}`)."
    )
    for name, counts in (card.fields or {}).items():
        text += f" {name.capitalize()}, by tokens: {counts}."
    if not report:
        return text + " The shards lack a record of their text and its sources."
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in report["dropped"].items()) or "none"
    text += f" Kept for training from {report['documents_read']:,} documents read; left out: {dropped}."
    lines = []
    for name, source in _sources(report).items():
        link = f" `{source['path']}`" if source.get("kind") == "hub" else ""
        options = "".join(f", {key} {source[key]}" for key in ("subset", "split", "text_field") if source.get(key))
        lines.append(f"- {name}: {source['kind']}{link}{options}")
    return text + " Sources:\n\n" + "\n".join(lines)


def _training(trained: RunConfig, step: int, tokens: int) -> str:
    optim, model = trained.optim, trained.model
    origin = "drawn at random (truncated normal)"
    for key, name in trained.weights.named.items():
        origin = f"`weights.{key}={name}`"
    if trained.start is not None:
        origin = f"`start.checkpoint={trained.start.checkpoint}`"
    more = model.phased_details
    heads = ("phase", "tokens", "context", "rows in a batch", "predicted", "peak learning rate", "schedule", *more)
    rows = [_phase_row(name, phase, trained) for name, phase in trained.phases.items()]
    return f"""{tokens:,} tokens of {trained.total_tokens:,} planned, in {step:,} steps, seed {trained.seed}.

- First weights: {origin}.
- Architecture: {model.num_layers} layers of width {model.hidden_size}, {model.num_heads} heads, hidden width
  {model.intermediate_size}; {model.details}.
- Objective: {_objectives(trained)}.
- Optimizer: {optim.name}, betas {tuple(optim.betas)}, epsilon {optim.eps:g}, weight decay {optim.weight_decay:g}.

{markdown_table(heads, rows)}"""


def _objectives(trained: RunConfig) -> str:
    """Return the run's objective in words, or each phase's where they differ."""
    each = {name: _objective(now.objective) for name, now in trained.in_phase.items()}
    if len(set(each.values())) <= 1:
        return _objective(trained.objective) if not each else next(iter(each.values()))
    return "; ".join(f"in {name} {text}" for name, text in each.items())


def _objective(objective: ObjectiveConfig) -> str:
    return objective.details or _titled(*objective.title)


def _phase_row(name: str, phase: PhaseConfig, trained: RunConfig) -> list[str]:
    schedule, warmup = phase.schedule, phase.batch_warmup
    schedule_words = [f"warmup {schedule.warmup_tokens:,} tokens"] if schedule.warmup_tokens else []
    schedule_words.append(schedule.plateau if schedule.decay_tokens < phase.tokens else "no plateau")
    if schedule.decay_tokens:
        schedule_words.append(f"{schedule.decay} to {schedule.final_lr_ratio:g} over {schedule.decay_tokens:,} tokens")
    size = f"{phase.batch_rows:,}" if warmup is None else f"{warmup.start_rows:,} to {phase.batch_rows:,}"
    now = trained.in_phase[name]
    cells = [name, f"{phase.tokens:,}", f"{phase.row_tokens:,}", size, f"{now.objective.predicted_share:.0%}"]
    cells += [f"{now.optim.lr * phase.lr_ratio:.2e}", ", ".join(schedule_words)]
    return [*cells, *now.model.phased_details.values()]


def _averaging(average: Sequence[Averaged], averaged_by: str) -> str:
    rows = [
        (Path(each.checkpoint).name, f"{each.step:,}", f"{each.tokens:,}", f"{each.weight:.4f}") for each in average
    ]
    return (
        f"\n\nThe weights average these checkpoints ({averaged_by}); the numbers above describe the last one.\n\n"
        + markdown_table(("checkpoint", "steps", "tokens", "weight"), rows)
    )


def _evaluation(
    objective: ObjectiveConfig, tokens: int, metrics: Sequence[dict[str, Any]], results: Sequence[Result]
) -> str:
    if objective.is_labelled:
        scores, afterwards = _scores(tokens, metrics), _results_table(results)
        return afterwards.strip() if afterwards and scores.startswith("Not measured") else scores + afterwards
    measured = [entry for entry in metrics if _is_validation(entry) and entry["tokens"] <= tokens]
    if not measured:
        afterwards = _results_table(results).strip()
        return afterwards or "Not measured: the run named no held-out text, or ended before its first validation."
    last = measured[-1]
    share = objective.for_validation().predicted_share
    questions = f"predictions in held-out documents, {share:.0%} of the tokens predicted"
    if objective.compares:
        questions = "held-out queries, each searching for its positive among all held-out texts"
    subject = "the generator" if "generator" in objective.heads else "this model"
    baseline = "guessing" if objective.compares else "unigram baseline"
    return (
        f"On {last['predicted']:,} {questions}, after {last['tokens']:,} tokens of training:\n\n"
        "| | loss (nats) | accuracy |\n| --- | --- | --- |\n"
        f"| {subject} | {last['loss']:.3f} | {last['accuracy']:.1%} |\n"
        f"| {baseline} | {last['unigram_loss']:.3f} | {last['unigram_accuracy']:.1%} |\n\n"
        f"{_bits(last)}{_detection(last)}{_temperature(last)}"
    ).rstrip() + (_results_table(results) or "\n\nNothing else was measured: no downstream task, no bias, no safety.")


def _provenance(starts: Sequence[Start], metrics: Sequence[dict[str, Any]]) -> str:
    """Describe versions, hardware and times of the training; no host or command line, since a card is published."""
    if not starts:
        return "\n\nThe version, the hardware and the time of its training were not recorded."
    times = [number(entry.get("time")) for entry in metrics[-1:]]
    return f"\n\n{in_words(starts, until=times[0] if times and times[0] is not None else math.nan)}"


def _results_table(results: Sequence[Result]) -> str:
    """Return a table of what `eval` and `finetune` measured on these weights; empty without results."""
    rows = [row[1:] for row in table_rows(results)]
    if not rows:
        return ""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    table = markdown_table(("measured afterwards", "figure", "value"), cells)
    return f"\n\n{table}\n\nNothing else was measured: no bias, no safety."


def _scores(tokens: int, metrics: Sequence[dict[str, Any]]) -> str:
    """Return a table of the last evaluation of each labelled split."""
    last = {
        entry["name"]: entry["figures"]
        for entry in metrics
        if entry.get("kind") == "evaluation" and is_count(entry.get("tokens")) and entry["tokens"] <= tokens
        if isinstance(entry.get("name"), str) and isinstance(entry.get("figures"), dict)
    }
    rows = [
        (name, figure, f"{value:.4f}")
        for name, figures in last.items()
        for figure, value in figures.items()
        if number(value) is not None and not str(figure).startswith("num_")
    ]
    if not rows:
        return "Not measured: the run named no labelled texts for it, or ended before its first evaluation."
    return markdown_table(("texts", "figure", "value"), rows)


def _bits(last: Mapping[str, Any]) -> str:
    """Return a sentence with the loss in bits per byte, which compares across tokenizers; empty if not recorded."""
    bits = number(last.get(BITS_PER_BYTE))
    return "" if bits is None else f"This is {bits:.3f} bits per byte of text.\n\n"


def _temperature(last: Mapping[str, Any]) -> str:
    """Return a sentence with the learnt temperature; empty without one."""
    temperature = number(last.get(TEMPERATURE))
    return (
        ""
        if temperature is None
        else f"Scores are divided by a learnt temperature, {temperature:.4f} at that time.\n\n"
    )


def _detection(last: Mapping[str, Any]) -> str:
    """Return a sentence on replaced token detection; empty if it was not recorded."""
    numbers = [number(last.get(f"rtd/{key}")) for key in ("accuracy", "replaced", "loss")]
    if None in numbers:
        return ""
    accuracy, replaced, loss = (float(each or 0) for each in numbers)
    detected = f"the model labelled {accuracy:.1%} of all tokens correctly, with a loss of {loss:.3f}"
    return f"{replaced:.1%} of the tokens were replaced; {detected}.\n\n"


def _same_objective(trained: RunConfig, phase: str, metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of metrics.jsonl whose phase has the same loss terms as `phase`."""
    terms = {name: [*now.objective.terms] for name, now in trained.in_phase.items()}
    return [entry for entry in metrics if terms.get(str(entry.get("phase")), terms[phase]) == terms[phase]]


def _is_validation(entry: dict[str, Any]) -> bool:
    """Return True if a line of metrics.jsonl is a complete validation."""
    figures = [number(entry.get(key)) for key in ("loss", "accuracy", "unigram_loss", "unigram_accuracy")]
    counts = is_count(entry.get("tokens")) and is_count(entry.get("predicted"))
    return entry.get("kind") == "validation" and counts and None not in figures
