"""Export a model to ONNX Runtime, and compare both on texts.

    python -m modernbert_train export runs/mine                       # -> runs/mine/hf
    python examples/export_onnx.py runs/mine/hf --texts queries.txt --int8

writes runs/mine/hf-onnx/model.onnx for any number of texts of any length; --int8 also model_int8.onnx, with 8-bit
matrices (ONNX Runtime's dynamic quantization). An encoder's output is `last_hidden_state`, a classifier's `logits`. A
file whose outputs differ from transformers' by more than a thousandth of the largest is deleted.

Shape legend: N texts, T tokens (padded), D width or classes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from onnxruntime.quantization import QuantType, quantize_dynamic

LARGEST_DIFFERENCE = 1e-3  # of fp32 outputs of two programs, relative to the largest of them
TEXTS_AT_ONCE = 8
Batch = dict[str, torch.Tensor]


def open_model(folder: Path) -> tuple[Any, Any, str]:
    """Load tokenizer, model and the name of its output, without running code from the folder."""
    (architecture,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    classes = architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))
    kind = getattr(transformers, architecture) if classes else transformers.AutoModel
    options = {} if architecture.startswith(("XLNet", "Deberta")) else {"attn_implementation": "sdpa"}
    model = kind.from_pretrained(folder, **options).float().eval()
    return transformers.AutoTokenizer.from_pretrained(folder), model, "logits" if classes else "last_hidden_state"


def export(model: Any, output: str, batch: Batch, file: Path) -> None:
    """Write the graph with dynamic batch and length."""

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            named = dict(zip(batch, inputs, strict=True))
            if model.config.model_type == "xlnet":  # its model subtracts a bool mask, which torch.onnx cannot export
                named["input_mask"] = (named.pop("attention_mask") == 0).float()
            return self.model(**named)[output]

    shapes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
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


def timed(call: Callable[[Batch], Any], batches: Sequence[Batch]) -> tuple[list[Any], float]:
    """Return the outputs, and the seconds of the faster of two passes."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        outputs = [call(batch) for batch in batches]
        times.append(time.perf_counter() - started)
    return outputs, min(times)


def compare(file: Path, batches: Sequence[Batch], expected: Sequence[Any], seconds: float) -> dict[str, float]:
    """Compare a file with the model: megabytes, largest relative difference, mean cosine of texts, speed."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    outputs, own_seconds = timed(
        lambda batch: session.run(None, {key: value.numpy() for key, value in batch.items()})[0], batches
    )
    differences, largest, cosines = [], [], []
    for batch, ours, theirs in zip(batches, outputs, expected, strict=True):
        for number, mask_T in enumerate(batch["attention_mask"].numpy().astype(bool)):
            pair = [each[number][mask_T] if each.ndim == 3 else each[number][None] for each in (ours, theirs)]
            differences.append(np.abs(pair[0] - pair[1]).max())
            largest.append(np.abs(pair[1]).max())
            first_D, second_D = (each.mean(axis=0) for each in pair)
            cosines.append(first_D @ second_D / (np.linalg.norm(first_D) * np.linalg.norm(second_D)))
    return {
        "megabytes": sum(each.stat().st_size for each in file.parent.glob(f"{file.name}*")) / 1e6,  # with its weights
        "largest_difference": float(max(differences) / max(largest)),
        "cosine": float(np.mean(cosines)),
        "milliseconds_a_text": 1000 * own_seconds / len(cosines),
        "times_as_fast": seconds / own_seconds,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Write the files, compare them, print and store the comparison."""
    parser = argparse.ArgumentParser(description="Write an exported model for ONNX Runtime, and compare both.")
    parser.add_argument("model", type=Path, help="folder that `export` or `finetune` wrote")
    parser.add_argument("--texts", type=Path, required=True, metavar="FILE", help="a text a line, to compare on")
    parser.add_argument("--int8", action="store_true", help="also with INT8 weights")
    parser.add_argument("--out", type=Path, help="default: next to the model's, hf-onnx for hf")
    options = parser.parse_args(words)
    texts = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise SystemExit(f"--texts {options.texts}: no text in it. Name a file with a text a line.")
    out = options.out or options.model.with_name(f"{options.model.name}-onnx")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer, model, output = open_model(options.model)
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    batches = []
    for at in range(0, len(texts), TEXTS_AT_ONCE):
        batch = tokenizer(texts[at : at + TEXTS_AT_ONCE], padding=True, truncation=True, return_tensors="pt")
        batches.append({key: value for key, value in batch.items() if key in inputs})
    files = [out / "model.onnx"]
    export(model, output, batches[0], files[0])
    if options.int8:
        files.append(out / "model_int8.onnx")
        quantize_dynamic(files[0], files[1], weight_type=QuantType.QInt8)
    with torch.no_grad():
        expected, seconds = timed(lambda batch: model(**batch)[output].numpy(), batches)
    compared = {file.name: compare(file, batches, expected, seconds) for file in files}
    difference = compared["model.onnx"]["largest_difference"]
    if difference > LARGEST_DIFFERENCE:
        files[0].unlink()
        raise SystemExit(
            f"{files[0]}: its outputs differ from transformers' by {difference:.2g} of the largest, more than "
            f"{LARGEST_DIFFERENCE}. It was removed. Report this with the versions of torch and onnx."
        )
    (out / "onnx.json").write_text(json.dumps({"output": output, **compared}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(compared, indent=2))


if __name__ == "__main__":
    main()
