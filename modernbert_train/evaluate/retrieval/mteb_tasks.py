"""Tasks of mteb by name, of any kind: its data, evaluators and main score, with this program's packed embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.config.tools.retrieval import EvaluateConfig
from modernbert_train.core.files import anything_as
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.loaded import BATCH_TOKENS, LoadedEncoder, load_source
from modernbert_train.evaluate.retrieval.runs import choose_device, encoder_source
from modernbert_train.evaluate.retrieval.sentence_model import (
    Described,
    describe,
    is_sentence_model,
    open_sentence_model,
)

if TYPE_CHECKING:
    from torch import Tensor

_QUERY, _DOCUMENT = "query", "document"  # mteb's prompt types


@dataclass(frozen=True)
class Packed:
    """An encoder with mteb's interface: packed texts in, vectors out, in fp32.

    Attributes:
        encoder: cuts texts at its max_tokens.
        about: pooling, prompts and lengths.
        device: the device that it computes on.
        mteb_model_meta: mteb's description of it.
    """

    encoder: LoadedEncoder
    about: Described
    device: Any
    mteb_model_meta: Any

    def encode(self, inputs: Any, *, prompt_type: Any = None, **_: Any) -> Tensor:
        """Embed batches of texts, with the prompt of queries or documents if the task distinguishes them."""
        from torch.nn.functional import normalize

        kind = getattr(prompt_type, "value", prompt_type)
        prompt = {_QUERY: self.about.query_prompt, _DOCUMENT: self.about.document_prompt}.get(kind, "")
        most = self.about.query_max_tokens if kind == _QUERY else self.about.max_tokens
        found = replace(self.encoder, max_tokens=most).embed(
            [prompt + text for batch in inputs for text in batch["text"]],
            pooling="cls" if self.about.pooling == "cls" else "mean",
            batch_tokens=BATCH_TOKENS,
            precision="fp32",
            device=self.device,
        )
        return normalize(found) if self.about.normalize else found

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines of all pairs."""
        from sentence_transformers.util import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosines of rows with equal index."""
        from sentence_transformers.util import pairwise_cos_sim

        return pairwise_cos_sim(embeddings1, embeddings2)


def open_for_mteb(name: str, config: EvaluateConfig) -> tuple[Any, Described]:
    """Open a model for mteb: a sentence-transformers folder as it is, any other encoder with packed texts.

    Raises:
        ConfigError, DataError, StorageError: see `open_sentence_model`.
    """
    if is_sentence_model(name):
        model = open_sentence_model(name, config)
        return model, describe(model)
    from mteb.models import ModelMeta

    source = encoder_source(name)
    encoder = load_source(source)
    most = config.max_tokens or encoder.max_tokens
    if most > encoder.max_tokens:
        raise ConfigError(f"max_tokens={most}: {name} reads {encoder.max_tokens:,} at most. Lower it, or leave it out.")
    about = Described(
        config.pooling or "mean",
        config.normalize is not False,
        config.query_prompt or "",
        config.document_prompt or "",
        min(config.query_max_tokens or most, most),
        most,
    )
    meta = ModelMeta.create_empty({"name": f"local/{Path(name).name}", "revision": "local"})
    return Packed(encoder, about, choose_device(config.device), meta), about


def find_task(name: str) -> Any:
    """Return a task of mteb, without its data.

    Raises:
        ConfigError: mteb knows none, or it is not of text.
    """
    import mteb

    try:
        task = mteb.get_task(name)
    except KeyError as error:
        raise ConfigError(f"mteb:{name}: mteb {mteb.__version__} has no such task ({error.args[0]}).") from None
    if {*task.metadata.modalities} != {"text"}:
        kinds = ", ".join(task.metadata.modalities)
        raise ConfigError(f"mteb:{name}: is of {kinds}, and the model reads text. Leave it out.")
    return task


def measure_task(task: Any, model: Any, config: EvaluateConfig, out: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure a model on a task of mteb.

    Args:
        task: see `find_task`.
        model: see `open_for_mteb`.
        config: encode_batch counts, for models of sentence-transformers.
        out: folder; mteb's own result, by split and language, is written there.

    Returns:
        figures: main_score, the mean of mteb's over splits and languages, also by the score's own name.
        about: version of mteb; dataset and revision.

    Raises:
        DataError: its data is not available.
    """
    import mteb

    about = task.metadata
    remedy = "Run where there is a network once, or leave the task out."
    with anything_as(DataError, f"mteb:{about.name}: its data, {about.dataset['path']}, cannot be had", remedy):
        for each in getattr(about, "tasks", [task]):  # of several in one, as CQADupstackRetrieval
            each.load_data()
    batch: Any = {"batch_size": config.encode_batch, "show_progress_bar": False}
    found = mteb.evaluate(model, task, encode_kwargs=batch, cache=None, co2_tracker=False, show_progress_bar=False)
    (result,) = found.task_results
    result.to_disk(out / f"mteb-{about.name}.json")
    score = float(result.get_score())
    said = {"mteb": mteb.__version__, "dataset": about.dataset["path"], "revision": result.dataset_revision}
    return {"main_score": score, about.main_score: score}, said
