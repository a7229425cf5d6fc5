"""`onnx`: an exported model as ONNX, held against the original on texts, and with INT8 weights and what they cost.

The graph is torch.onnx's of the transformers model, with any number of texts of any length; INT8 is ONNX Runtime's
dynamic quantization of matrices. An encoder gives `last_hidden_state`, one with classes `logits`.

Shape legend: N texts, T tokens (padded), D width or classes.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modernbert_train.downstream.runs import require
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.files import write_whole
from modernbert_train.text import table

MODEL, INT8, RESULT = "model.onnx", "model_int8.onnx", "onnx.json"
LARGEST_DIFFERENCE = 1e-3  # of fp32 outputs of two programs, relative to the largest of them
_TEXTS_AT_ONCE = 8


@dataclass(frozen=True)
class Comparison:
    """A file beside the model that it was made of.

    Attributes:
        megabytes: of the file.
        largest_difference: of any output, over the largest output.
        cosine: mean over texts, of the mean state of a text, or of its logits.
        milliseconds: of a text, in batches of eight, on this machine.
        ratio: how much faster than transformers, same texts and threads, in this run.
    """

    megabytes: float
    largest_difference: float
    cosine: float
    milliseconds: float
    ratio: float


def write_onnx(folder: Path, texts: Sequence[str], *, out: Path | None = None, int8: bool = False) -> Path:
    """Write a model for ONNX Runtime, and compare it.

    Args:
        folder: for Hugging Face, as `export` and `finetune` leave it.
        texts: to compare on.
        out: where to; None: a folder beside it, hf-onnx of hf, since an export replaces its own whole.
        int8: also with INT8 weights.

    Returns:
        The folder with the files and onnx.json, the comparison.

    Raises:
        ConfigError: a library is missing, there is no such model, or no text.
        DataError: ONNX Runtime computes something else than transformers.
    """
    require("onnx", "onnx", "onnxruntime", "onnxscript")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json. Name the folder of an exported model, such as runs/NAME/hf.")
    if not texts:
        raise ConfigError("--texts: no text in it. Give a file with a text a line, such as those it will be used on.")
    import torch

    out = folder.with_name(f"{folder.name}-onnx") if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    reader, model, output = _open(folder)
    batches = [
        {
            key: value
            for key, value in reader(
                list(texts[at : at + _TEXTS_AT_ONCE]), padding=True, truncation=True, return_tensors="pt"
            ).items()
            if key in ("input_ids", "attention_mask", "token_type_ids")
        }
        for at in range(0, len(texts), _TEXTS_AT_ONCE)
    ]
    _trace(model, output, batches[0], out / MODEL)

    @torch.no_grad()
    def theirs(batch: dict[str, Any]) -> Any:
        return model(**batch)[output].numpy()

    expected, seconds = _timed(theirs, batches)
    files = [MODEL]
    if int8:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(out / MODEL, out / INT8, weight_type=QuantType.QInt8)
        files.append(INT8)
    found = {name: _compared(out / name, batches, expected, seconds, output) for name in files}
    if found[MODEL].largest_difference > LARGEST_DIFFERENCE:
        (out / MODEL).unlink()
        raise DataError(
            f"{out / MODEL}: its outputs differ from transformers' by {found[MODEL].largest_difference:.2g} of the "
            f"largest, more than {LARGEST_DIFFERENCE}. It was removed. Report this with the versions of torch and onnx."
        )
    content = {"model": folder.name, "texts": len(texts), "output": output}
    write_whole(out / RESULT, json.dumps(content | {name: asdict(each) for name, each in found.items()}, indent=2))
    print(
        table(
            [
                ["file", "MB", "largest difference", "cosine", "ms a text", "over transformers"],
                *map(_row, found.items()),
            ]
        )
    )
    return out


def _open(folder: Path) -> tuple[Any, Any, str]:
    """Tokenizer, model and the name of its output; nothing in the folder is run."""
    import transformers

    from modernbert_train.own_files import require_own_files

    require_own_files(folder)
    transformers.logging.set_verbosity_error()
    (architecture,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    classes = architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))
    kind = getattr(transformers, architecture) if classes else transformers.AutoModel
    options = {} if architecture.startswith("XLNet") else {"attn_implementation": "sdpa"}
    model = kind.from_pretrained(folder, **options).float().eval()
    return transformers.AutoTokenizer.from_pretrained(folder), model, "logits" if classes else "last_hidden_state"


def _trace(model: Any, output: str, batch: dict[str, Any], file: Path) -> None:
    import torch

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            named = dict(zip(batch, inputs, strict=True))
            if model.config.model_type == "xlnet":  # it subtracts a mask from a number, which torch.onnx cannot write
                named["input_mask"] = (named.pop("attention_mask") == 0).float()
            return self.model(**named)[output]

    shapes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own parts
        program = torch.onnx.export(
            Named().eval(),
            tuple(batch.values()),
            dynamo=True,
            dynamic_shapes=(tuple(shapes for _ in batch),),
            input_names=list(batch),
            output_names=[output],
            verbose=False,
        )
    assert program is not None
    program.save(str(file))


def _timed(call: Callable[[dict[str, Any]], Any], batches: Sequence[dict[str, Any]]) -> tuple[list[Any], float]:
    """Outputs, and the seconds of the faster of two passes."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        outputs = [call(batch) for batch in batches]
        times.append(time.perf_counter() - started)
    return outputs, min(times)


def _compared(
    file: Path, batches: Sequence[dict[str, Any]], expected: Sequence[Any], seconds: float, output: str
) -> Comparison:
    import numpy as np
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def ours(batch: dict[str, Any]) -> Any:
        return session.run(None, {key: value.numpy() for key, value in batch.items()})[0]

    found, own_seconds = _timed(ours, batches)
    differences, largest, cosines = [], [], []
    for batch, mine, theirs in zip(batches, found, expected, strict=True):
        mask_NT = batch["attention_mask"].numpy().astype(bool)
        for number, mask_T in enumerate(mask_NT):
            pair = [each[number][mask_T] if each.ndim == 3 else each[number][None] for each in (mine, theirs)]
            differences.append(np.abs(pair[0] - pair[1]).max())
            largest.append(np.abs(pair[1]).max())
            first_D, second_D = (each.mean(axis=0) for each in pair)
            cosines.append(first_D @ second_D / (np.linalg.norm(first_D) * np.linalg.norm(second_D)))
    size = sum(each.stat().st_size for each in file.parent.glob(f"{file.name}*"))  # large weights lie beside it
    return Comparison(
        megabytes=size / 1e6,
        largest_difference=float(max(differences) / max(largest)),
        cosine=float(np.mean(cosines)),
        milliseconds=1000 * own_seconds / len(cosines),
        ratio=seconds / own_seconds,
    )


def _row(named: tuple[str, Comparison]) -> list[str]:
    name, each = named
    difference, cosine = f"{each.largest_difference:.1e}", f"{each.cosine:.6f}"
    return [name, f"{each.megabytes:.1f}", difference, cosine, f"{each.milliseconds:.2f}", f"{each.ratio:.2f}x"]
