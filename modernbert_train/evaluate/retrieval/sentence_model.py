"""Encoders in sentence-transformers' form: open a run, a checkpoint or a model as one.

sentence-transformers also opens a plain export, with mean pooling and the training length. Its folders state
both, and the prompts, the lengths of queries and documents, and whether vectors are normalized.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modernbert_train.config.tools.retrieval import EncodeConfig
from modernbert_train.core.files import anything_as, os_errors_as
from modernbert_train.core.own_files import require_own_files
from modernbert_train.core.read_json import read_json
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.retrieval.runs import (
    choose_device,
    encoder_named,
    encoder_source,
    exported_encoder,
    quiet,
)
from modernbert_train.weights.formats.sentence_encoder import SETTINGS, read_own
from modernbert_train.weights.names import MODULES, fetched, is_hub_id, look_up, weights_hash

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

    Model = SentenceTransformer | MultiVectorEncoder | SparseEncoder

_OWN = ("pooling", "normalize", "query_prompt", "document_prompt")  # keys that such a folder sets itself
_LIBRARY = "sentence_transformers."
CROSS, _MULTI, _SPARSE = "CrossEncoder", "MultiVectorEncoder", "SparseEncoder"
_OLD_POOLING = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}  # keys before version 5


@dataclass(frozen=True)
class Described:
    """The resolved settings that turn texts into vectors; recorded in results.

    Attributes:
        pooling: how token vectors become one vector.
        normalize: True if vectors have length 1.
        query_prompt, document_prompt: prefix of each text.
        query_max_tokens, max_tokens: lengths at which queries and documents are cut.
    """

    pooling: str
    normalize: bool
    query_prompt: str
    document_prompt: str
    query_max_tokens: int
    max_tokens: int


def is_sentence_model(name: str) -> bool:
    """True if a name is the path of a sentence-transformers folder."""
    return (Path(name) / MODULES).is_file()


def check_sentence_model(name: str, config: EncodeConfig) -> None:
    """Reject a folder that brings code, and keys that it sets itself; without importing the library.

    Raises:
        ConfigError, DataError: see above.
    """
    folder = Path(name)
    require_own_files(folder)
    remedy, damage = "Restore it from a copy, or write the folder again.", (ValueError, TypeError, KeyError)
    with os_errors_as(DataError, f"{folder / MODULES}: is damaged", remedy, *damage):
        modules = read_json(folder / MODULES)
        types = [str(each["type"]) for each in modules]
        paths = [folder / str(each["path"]) for each in modules]
    for kind, path in zip(types, paths, strict=True):
        if not kind.startswith(_LIBRARY):
            raise DataError(
                f"{folder / MODULES}: {kind[:80]} is code of the folder, which is not run. Name another model."
            )
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{folder / MODULES}: {path} lies elsewhere. Restore it from a copy.")
        require_own_files(path)
    if its_own := [key for key in _OWN if getattr(config, key) is not None]:
        raise ConfigError(
            f"{its_own[0]}={getattr(config, its_own[0])}: {folder} has its own. Leave it out, or name the encoder."
        )


def check_model(name: str, config: EncodeConfig) -> None:
    """Check a model as far as possible without torch.

    Raises:
        ConfigError, DataError: see `open_sentence_model`.
    """
    if is_sentence_model(name):
        check_sentence_model(name, config)
    else:
        look_up(encoder_named(name).source, config.runs_folder)


def own_settings(name: str) -> dict[str, Any]:
    """Return pooling and prompts of a folder of sentence-transformers, for training it further; without the library.

    Raises:
        ConfigError: it has modules that training would leave out.
        DataError: it is damaged.
    """
    folder, damage = Path(name), (ValueError, TypeError, KeyError, StopIteration)
    with os_errors_as(DataError, f"{folder / MODULES}: is damaged", "Restore it from a copy.", *damage):
        modules = {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in read_json(folder / MODULES)}
        if other := modules.keys() - {"Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Normalize"}:
            raise ConfigError(
                f"--model={name}: has {', '.join(sorted(other))}, which training leaves out. Name the encoder, or "
                "another model."
            )
        if "SpladePooling" in modules:
            pooling = "sparse"
        else:
            about = read_json(folder / modules["Pooling"] / "config.json")
            pooling = about.get("pooling_mode") or next(mode for mode, key in _OLD_POOLING.items() if about.get(key))
        prompts, _ = read_own(folder)
        return {
            "pooling": str(pooling),
            "query_prompt": prompts.get("query"),
            "document_prompt": prompts.get("document"),
        }


def is_multi_vector(model: Model) -> bool:
    """True if a text has a vector for each of its tokens."""
    return type(model).__name__ == _MULTI


def is_sparse(model: Model) -> bool:
    """True if a text's vector has a number for each token of the vocabulary."""
    return type(model).__name__ == _SPARSE


def class_of(folder: Path) -> str:
    """Return the class of a folder, read without opening it; old versions write none."""
    about = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    named = about.get("model_type") if isinstance(about, dict) else None
    return named if named in (_MULTI, _SPARSE, CROSS) else "SentenceTransformer"


def sentence_folder(name: str) -> str | None:
    """Return the folder of a model of sentence-transformers, fetched if the hub has it; None for any other model.

    Raises:
        DataError: there is no such model.
    """
    if is_sentence_model(name):
        return name
    if not is_hub_id(name) or Path(name).exists():
        return None
    folder = fetched(look_up(name))  # of an old layout, the folder of its encoder
    return next((str(each) for each in (folder, folder.parent) if is_sentence_model(str(each))), None)


def pinned(name: str) -> str:
    """Return the name of a run's newest whole checkpoint, for a run that may be training; any other name unchanged."""
    named = encoder_named(name)
    if is_sentence_model(named.source) or look_up(named.source).kind != "run":
        return name
    from modernbert_train.checkpoints.checkpoint import newest_checkpoint

    return ":".join((*named.baseline, str(newest_checkpoint(Path(named.source)).folder)))


def files_hash(name: str) -> str:
    """Return a hash of all files that determine the output of a model, after the names of its baselines.

    Args:
        name: see `pinned`, under which the model was opened.

    Raises:
        DataError: a file cannot be read.
    """
    named = encoder_named(name)
    model_hash = weights_hash(sentence_folder(named.source) or named.source, whole=True)
    if model_hash is None:
        raise DataError(f"--model={name}: its files cannot be read. Restore them from a copy, or name another model.")
    return ":".join((*named.baseline, model_hash))


def open_sentence_model(name: str, config: EncodeConfig) -> Model:
    """Open a model for vectors of texts, in fp32.

    Args:
        name: see `open_model`; or a folder of sentence-transformers.
        config: pooling, prompts, lengths and the device.

    Raises:
        ConfigError: it gives no vectors, or the keys ask for more tokens than it was trained on, or for a missing GPU.
        DataError, StorageError: see `open_model`; or the library cannot open the folder.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if (own := sentence_folder(name)) is not None:
        check_sentence_model(own, config)
        model = _load(own, config)
    else:
        with exported_encoder(name) as folder, quiet():
            if is_sentence_model(str(folder)):  # a run of contrastive training, which has its own pooling
                check_sentence_model(str(folder), config)
                model = _load(str(folder), config)
            else:
                if config.pooling == "sparse":
                    remedy = "Name a masked-language model, whose logits pooling=sparse reads; or another pooling."
                    encoder_source(name).require_predictions(f"--model={name}", remedy)
                model = _build(folder, config)
    limit = model.max_seq_length
    if limit is None:
        raise DataError(f"{name}: sets no maximum length, so its texts cannot be cut. Name another model.")
    max_tokens = config.max_tokens or limit
    if max_tokens > limit:
        raise ConfigError(f"max_tokens={max_tokens}: {name} reads {limit:,} at most. Lower it, or leave it out.")
    model.max_seq_length = max_tokens
    encoder: Any = model[0]
    if config.query_max_tokens is not None:
        encoder.query_length = config.query_max_tokens
    if (getattr(encoder, "query_length", None) or max_tokens) >= max_tokens:
        encoder.query_length = None  # not a separate limit
    return model.eval()


def _build(folder: Path, config: EncodeConfig) -> Model:
    from sentence_transformers import SentenceTransformer, SparseEncoder
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    sparse = config.pooling == "sparse"
    how: dict[str, Any] = {"transformer_task": "fill-mask" if sparse else "feature-extraction"}
    with _opening(folder):
        encoder = Transformer(
            str(folder), model_kwargs=own | {"dtype": "float32"}, processor_kwargs={**own}, config_kwargs={**own}, **how
        )
    prompts = {"query": config.query_prompt or "", "document": config.document_prompt or ""}
    device = choose_device(config.device)
    if sparse:
        return SparseEncoder(modules=[encoder, SpladePooling("max")], device=device, prompts=prompts)
    width = encoder.get_embedding_dimension()
    modules: list[Any] = [encoder, Pooling(width, config.pooling or "mean")]
    if config.normalize is None or config.normalize:
        modules.append(Normalize())
    return SentenceTransformer(modules=modules, device=device, prompts=prompts, similarity_fn_name="cosine")


def _load(name: str, config: EncodeConfig) -> Model:
    """Open a folder with the library instead of `open_model`: it has modules and encoders, such as MPNet, that this
    program lacks, so only the library gives the vectors that the authors measured."""
    import sentence_transformers

    from modernbert_train.weights.source import require_finite

    if (named := class_of(Path(name))) == CROSS:
        raise ConfigError(
            f"--model={name}: scores pairs of texts, and gives no vectors. Give it a first stage, rerank=."
        )
    kind = getattr(sentence_transformers, named)
    device = choose_device(config.device)
    settings: dict[str, Any] = {"device": device, "local_files_only": True, "trust_remote_code": False}
    with _opening(name):
        model: Model = kind(name, model_kwargs={"dtype": "float32"}, **settings)
    for key, tensor in model.state_dict().items():
        require_finite(Path(name), key, tensor)
    return model


def _opening(folder: object) -> AbstractContextManager[None]:
    remedy = "Export it again, or name another."
    return anything_as(DataError, f"{folder}: sentence-transformers cannot open it", remedy)


def describe(model: Model) -> Described:
    """Return the settings with which a model makes vectors."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    encoder: Any = model[0]
    max_tokens = encoder.max_seq_length
    pooling = next((each.pooling_mode for each in model if isinstance(each, Pooling)), "its own")
    pooling = "none: a vector for each token" if is_multi_vector(model) else "sparse" if is_sparse(model) else pooling
    return Described(
        pooling if isinstance(pooling, str) else ", ".join(pooling),
        any(isinstance(each, Normalize) for each in model),
        (model.prompts or {}).get("query") or "",
        (model.prompts or {}).get("document") or "",
        getattr(encoder, "query_length", None) or max_tokens,
        max_tokens,
    )
