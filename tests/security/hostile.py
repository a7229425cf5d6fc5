"""Hostile files, a row for each: the damage to a good folder, by its first line's `Case`.

None is ever committed; each is made when it is opened. Code that runs writes a file called `ran`, an escape from the
folder writes one called `escaped`, and both are searched for outside the case.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

Plant = Callable[[Path], object]
HUGE = 1 << 30
DEEP = 100_000


class Calls:
    """A pickle of it calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def write(name: str, content: str | bytes) -> Plant:
    def plant(case: Path) -> None:
        path = case / name
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return plant


def runs(case: Path) -> str:
    return f"touch {case.parent}/ran"


def torch_file(make: Callable[[Path], Any], name: str = "file.pt", **how: Any) -> Plant:
    return lambda case: torch.save(make(case), case / name, **how)


def raw_pickle(name: str, protocol: int = 2) -> Plant:
    def plant(case: Path) -> None:
        (case / name).unlink(missing_ok=True)
        (case / name).write_bytes(pickle.dumps({"model": Calls(os.system, runs(case))}, protocol))

    return plant


def named_pickle(module: str, function: str, argument: Callable[[Path], str]) -> Plant:
    """A pickle in torch's zip that calls a function by its name, which need not be imported here."""

    def plant(case: Path) -> None:
        text = argument(case).encode()
        call = f"c{module}\n{function}\n".encode() + b"(X" + struct.pack("<I", len(text)) + text + b"tR."
        with zipfile.ZipFile(case / "file.pt", "w") as file:
            file.writestr("archive/data.pkl", b"\x80\x02" + call)
            file.writestr("archive/version", "3")

    return plant


def zip_bomb(case: Path) -> None:
    torch.save({"state": {"model": {"a": torch.zeros(4)}}}, case / "whole.pt")
    with (
        zipfile.ZipFile(case / "whole.pt") as whole,
        zipfile.ZipFile(case / "file.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bomb,
    ):
        for each in whole.namelist():
            content = whole.read(each)
            with bomb.open(each, "w", force_zip64=True) as file:
                if each.endswith("data/0"):
                    for _ in range(HUGE >> 24):
                        file.write(bytes(1 << 24))
                else:
                    file.write(content)


def zip_escape(case: Path) -> None:
    with zipfile.ZipFile(case / "file.pt", "w") as file:
        file.writestr("../escaped", "x")
        file.writestr("../data.pkl", b"\x80\x02}.")


def header(text: str | bytes, length: int | None = None, body: bytes = bytes(64)) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def tensor(shape: list[Any], offsets: list[Any], dtype: str = "F32") -> str:
    return json.dumps({"embeddings.tok_embeddings.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Plant:
    def plant(case: Path) -> None:
        content = json.loads((case / name).read_text())
        change(content)
        (case / name).write_text(json.dumps(content))

    return plant


def link(name: str, target: str) -> Plant:
    def plant(case: Path) -> None:
        path = case / name
        path.unlink(missing_ok=True)
        path.symlink_to(target.format(case=case))

    return plant


def called(name: str) -> Plant:
    """The good configuration with another name, as YAML has it."""

    def plant(case: Path) -> None:
        text = (case / "run.yaml").read_text()
        write("run.yaml", text.replace("name: run\n", f"name: {name}\n", 1))(case)

    return plant


def sparse(name: str, start: str = "") -> Plant:
    """A gigabyte that takes no disk."""

    def plant(case: Path) -> None:
        write(name, start)(case)
        os.truncate(case / name, HUGE)

    return plant


def first_shard(case: Path) -> Path:
    return sorted((case / "data/train").glob("shard*"))[0]


def shard_bomb(case: Path) -> None:
    """A gigabyte of zeros, with the right size and hash in the index."""
    import xxhash

    path, packer = first_shard(case), zstandard.ZstdCompressor().compressobj()
    packed = b"".join(packer.compress(bytes(1 << 24)) for _ in range(HUGE >> 24)) + packer.flush()
    path.write_bytes(packed)
    index = json.loads((case / "data/train/index.json").read_text())
    for shard in index["shards"]:
        stored = shard["zip_data"] or shard["raw_data"]
        if stored["basename"] == path.name:
            stored["bytes"] = len(packed)
            stored["hashes"] = {
                name: getattr(xxhash, name)(packed).hexdigest() if name.startswith("xx") else value
                for name, value in stored["hashes"].items()
            }
    (case / "data/train/index.json").write_text(json.dumps(index))


def each_shard(change: Callable[[dict[str, Any]], Any]) -> Plant:
    return edit("data/train/index.json", lambda index: [change(shard) for shard in index["shards"]])


def stored(shard: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = shard["zip_data"] or shard["raw_data"]
    return found


def numpy_file(name: str, shape: str, descr: str = "'<i4'") -> Plant:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"
    return write(name, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + bytes(64))


def object_array(name: str) -> Plant:
    def plant(case: Path) -> None:
        buffer = io.BytesIO()
        np.save(buffer, np.array([Calls(os.system, runs(case))], dtype=object), allow_pickle=True)
        write(name, buffer.getvalue())(case)

    return plant


def code_beside(case: Path, **config: Any) -> None:
    """The code that `trust_remote_code` would run."""
    code = f"import os\nos.system({runs(case)!r})\nclass C: pass\nclass M: pass\nclass T: pass\n"
    (case / "hf/own.py").write_text(code)
    edit("hf/config.json", lambda content: content.update(config))(case)


AUTO = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoModelForMaskedLM": "own.M", "AutoTokenizer": ["own.T", None]}


def pipe(name: str) -> Plant:
    def plant(case: Path) -> None:
        (case / name).unlink(missing_ok=True)
        os.mkfifo(case / name)

    return plant


def add_line(name: str, entry: dict[str, Any]) -> Plant:
    def plant(case: Path) -> None:
        with (case / name).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    return plant


def last_checkpoint(case: Path) -> Path:
    return sorted((case / "runs/run/checkpoints").iterdir())[-1]


def in_checkpoint(pattern: str, plant: Callable[[str], Plant]) -> Plant:
    def planted(case: Path) -> None:
        path = sorted(last_checkpoint(case).glob(pattern))[0]
        plant(str(path.relative_to(case)))(case)

    return planted


def text_bomb(name: str, pack: Callable[[Any], Any]) -> Plant:
    def plant(case: Path) -> None:
        with (case / name).open("wb") as file, pack(file) as packed:
            packed.write(b'{"text": "')
            for _ in range(HUGE >> 24):
                packed.write(b"a" * (1 << 24))
            packed.write(b'"}\n')

    return plant


SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
RUN, INDEX, HF = "runs/run", "data/train/index.json", "hf/model.safetensors"
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))

# name -> kind (the verbs that open it), the planted file
HOSTILE: dict[str, tuple[str, Plant]] = {
    # pickles
    "pickle: os.system": ("composer", torch_file(lambda case: {"state": Calls(os.system, runs(case))})),
    "pickle: eval": (
        "composer",
        torch_file(lambda case: Calls(eval, f"__import__('os').system({runs(case)!r})")),
    ),
    "pickle: exec": ("composer", torch_file(lambda case: Calls(exec, f"import os; os.system({runs(case)!r})"))),
    "pickle: inside a list of tensors": (
        "composer",
        torch_file(lambda case: {"state": {"model": {"a": torch.zeros(2), "b": Calls(os.system, runs(case))}}}),
    ),
    "pickle: the old format of torch": (
        "composer",
        torch_file(lambda case: Calls(os.system, runs(case)), _use_new_zipfile_serialization=False),
    ),
    "pickle: a storage's bytes": (
        "composer",
        torch_file(
            lambda case: Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(os.system, runs(case))))
        ),
    ),
    "pickle: no zip": ("composer", raw_pickle("file.pt")),
    "pickle: protocol 5": ("composer", raw_pickle("file.pt", 5)),
    "pickle: posix.system": ("composer", named_pickle("posix", "system", runs)),
    "pickle: subprocess": ("composer", named_pickle("subprocess", "getoutput", runs)),
    "pickle: runpy": ("composer", named_pickle("runpy", "run_path", lambda case: str(case / "hf/own.py"))),
    "pickle: torch.hub": ("composer", named_pickle("torch.hub", "_import_module", runs)),
    "pickle: an alias in numpy": ("composer", named_pickle("numpy.testing._private.utils", "runstring", runs)),
    "pickle: a dotted name": ("composer", named_pickle("torch", "os.system", runs)),
    "pickle: as weights of a folder": ("model", lambda case: (
        (case / HF).unlink(), raw_pickle("hf/pytorch_model.bin")(case))),
    "pickle: called safetensors": ("model", raw_pickle(HF)),
    "pickle: beside the weights": ("model", raw_pickle("hf/training_args.bin")),
    "pickle: lengths of documents": ("data", object_array("data/train/lengths.npy")),
    "pickle: counts of tokens": ("data", object_array("data/train/token_counts.npy")),
    "pickle: a column of shards": (
        "data", each_shard(lambda shard: shard.update(column_encodings=["pkl"] * len(shard["column_encodings"])))),
    "pickle: weights of a checkpoint": ("run", in_checkpoint("model*", raw_pickle)),
    "pickle: more in a checkpoint": ("run", lambda case: raw_pickle(
        str((last_checkpoint(case) / "rng.pkl").relative_to(case)))(case)),
    # headers of tensors
    "bomb: a zip of tensors": ("composer", zip_bomb),
    "zip: names outside": ("composer", zip_escape),
    "tensors: a header of 2^63 bytes": ("model", write(HF, header("{}", 1 << 63))),
    "tensors: a header of 90 MB that is not there": ("model", write(HF, header("{}", 90_000_000))),
    "tensors: a deep header": ("model", write(HF, header('{"a":' * DEEP))),
    "tensors: offsets beyond the file": ("model", write(HF, header(tensor([4, 4], [0, 1 << 40])))),
    "tensors: negative offsets": ("model", write(HF, header(tensor([4, 4], [-64, 0])))),
    "tensors: a shape of 2^80": ("model", write(HF, header(tensor([1 << 40, 1 << 40], [0, 64])))),
    "tensors: an unknown type": ("model", write(HF, header(tensor([4, 4], [0, 64], "F7")))),
    "tensors: a header that is no text": ("model", write(HF, header(b"\xff\xfe" * 50))),
    "tensors: in a checkpoint": ("run", in_checkpoint("model*", lambda name: write(name, header("{}", 1 << 62)))),
    # JSON
    "json: a deep config": ("model", write("hf/config.json", '{"a":' * DEEP)),
    "json: a config of a gigabyte": ("model", sparse("hf/config.json", '{"a": "')),
    "json: 10^9 layers": (
        "model", edit("hf/config.json", lambda c: c.update(num_hidden_layers=10**9, layer_types=None))),
    "json: a width of 10^9": (
        "model", edit("hf/config.json", lambda c: c.update(hidden_size=10**9, intermediate_size=10**9))),
    "json: a vocabulary of 10^12": ("model", edit("hf/config.json", lambda c: c.update(vocab_size=10**12))),
    "json: weights mapped outside": ("model", lambda case: (
        (case / HF).rename(case / "hf/o.safetensors"),
        write("hf/model.safetensors.index.json", '{"weight_map": {"a": "../../escaped"}}')(case))),
    "json: a deep tokenizer": ("tokenizer", write("data/tokenizer/tokenizer.json", "[" * DEEP)),
    "json: a tokenizer of a gigabyte": ("tokenizer", sparse("data/tokenizer/tokenizer.json", '{"a": "')),
    "json: a token of id 2^62": ("tokenizer", edit(
        "data/tokenizer/tokenizer.json", lambda c: c["model"]["vocab"].update(w7=1 << 62))),
    "json: a tokenizer with a regular expression that never ends": ("tokenizer", edit(
        "data/tokenizer/tokenizer.json", lambda c: c.update(pre_tokenizer={
            "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}))),
    "json: a deep index": ("data", write(INDEX, '{"shards":' + "[" * DEEP)),
    "json: an index of a gigabyte": ("data", sparse(INDEX, '{"shards": [')),
    "json: 10^12 documents": ("data", each_shard(lambda shard: shard.update(samples=10**12))),
    "json: shards of 10^15 bytes": ("data", each_shard(lambda shard: stored(shard).update(bytes=10**15))),
    "json: unpacked to 10^15 bytes": ("data", each_shard(lambda shard: shard["raw_data"].update(bytes=10**15))),
    "json: a huge card": ("data", sparse("data/train/dataset.json", '{"a": "')),
    "json: a card of infinite tokens": ("data", write("data/train/dataset.json", '{"tokens": Infinity}')),
    "json: a deep manifest": ("run", in_checkpoint("MANIFEST*", lambda name: write(name, "[" * DEEP))),
    "json: a manifest of a gigabyte": ("run", in_checkpoint("MANIFEST*", lambda name: sparse(name, '{"a": "'))),
    "json: a manifest of files outside": ("run", in_checkpoint("MANIFEST*", lambda name: edit(
        name, lambda c: c["files"].update({"../../../../../escaped": {"bytes": 1, "xxh3_128": "0"}})))),
    # arrays
    "array: a shape of 10^15": ("data", numpy_file("data/train/lengths.npy", "(1000000000000000,)")),
    "array: a deep shape": ("data", numpy_file("data/train/lengths.npy", "(" * 500 + ")" * 500)),
    "array: a type that is code": (
        "data", numpy_file("data/train/lengths.npy", "(3,)", "__import__('os').system('touch ../ran')")),
    # paths and links
    "path: a shard outside": ("data", each_shard(lambda shard: stored(shard).update(basename="../../../escaped"))),
    "path: an absolute shard": ("data", each_shard(lambda shard: stored(shard).update(basename="/etc/passwd"))),
    "path: a shard called NUL": ("data", each_shard(lambda shard: stored(shard).update(basename="a\0b"))),
    "link: a shard": ("data", lambda case: link(str(first_shard(case).relative_to(case)), "/etc/passwd")(case)),
    "link: the card": ("data", link("data/train/dataset.json", "{case}/../secret")),
    "link: a device": ("data", link(INDEX, "/dev/zero")),
    "link: a circle": ("data", link(INDEX, "index.json")),
    "link: a tokenizer": ("tokenizer", link("data/tokenizer/tokenizer.json", "{case}/../secret")),
    "link: weights": ("model", link(HF, "{case}/../secret")),
    "link: the lock of a run": ("run", link(f"{RUN}/.lock", "{case}/../victim")),
    "link: the record of a run": ("run", link(f"{RUN}/metrics.jsonl", "{case}/../victim")),
    "link: the starts of a run": ("run", link(f"{RUN}/starts.jsonl", "{case}/../victim")),
    "link: the report of a run": ("run", link(f"{RUN}/report.html", "{case}/../victim")),
    "link: the configuration of a run": ("run", link(f"{RUN}/config.yaml", "{case}/../victim")),
    "link: a file of a checkpoint": ("run", in_checkpoint("state.json", lambda name: link(name, "/dev/zero"))),
    "pipe: a shard": ("data", lambda case: pipe(str(first_shard(case).relative_to(case)))(case)),
    "pipe: the configuration of a model": ("model", pipe("hf/config.json")),
    "pipe: a file of a checkpoint": ("run", in_checkpoint("state.json", pipe)),
    "pipe: the record of a run": ("run", pipe(f"{RUN}/metrics.jsonl")),
    # compressed
    "bomb: a shard": ("data", shard_bomb),
    "bomb: a shard that says 2^60 bytes": ("data", lambda case: first_shard(case).write_bytes(
        b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + bytes(64))),
    "bomb: a text in zstd": ("text", text_bomb(
        "text/a.jsonl.zst", lambda file: zstandard.ZstdCompressor().stream_writer(file, closefd=False))),
    "bomb: a text in gzip": ("text", text_bomb(
        "text/a.jsonl.gz", lambda file: gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1))),
    "text: a deep line": ("text", write("text/a.jsonl", "[" * DEEP + "\n")),
    "text: a parquet that is none": ("text", write("text/a.parquet", b"PAR1" + b"\xff" * 200 + b"PAR1")),
    "text: a link": ("text", link("text/a.txt", "{case}/../secret")),
    # YAML
    "yaml: a Python object": ("yaml", write("run.yaml", "name: !!python/object/apply:os.system ['touch ../ran']\n")),
    "yaml: a Python name": ("yaml", write("run.yaml", "name: !!python/name:os.system ''\n")),
    "yaml: a module": ("yaml", write("run.yaml", "name: !!python/module:own ''\n")),
    "yaml: a thousand million laughs": ("yaml", write("run.yaml", LAUGHS)),
    "yaml: deep": ("yaml", write("run.yaml", "a: " + "[" * DEEP)),
    "yaml: a gigabyte": ("yaml", sparse("run.yaml", "name: a\n# ")),
    "yaml: an interpolation of the environment": ("yaml", called("x-${oc.env:PLANTED_SECRET}")),
    "yaml: an interpolation that runs code": ("yaml", write("run.yaml", "name: ${oc.decode:'x'}\n")),
    "yaml: a circle of interpolations": ("yaml", write("run.yaml", "name: ${seed}\nseed: ${name}\n")),
    "yaml: a name that is a path": ("yaml", called("../../escaped")),
    "yaml: a name with a line break": ("yaml", called('"a\\nb"')),
    "yaml: the configuration of a run": (
        "run", write(f"{RUN}/config.yaml", "name: !!python/object/apply:os.system ['touch ../ran']\n")),
    # HTML and terminals
    "html: a name": ("yaml", called(json.dumps(SCRIPT))),
    "html: a phase on record": ("page", add_line(f"{RUN}/metrics.jsonl", {
        "kind": "step", "step": 9999, "phase": SCRIPT, "loss": 1.0, "tokens": 10**6, "lr": 0.1, SCRIPT: 1})),
    "html: a start on record": ("page", add_line(f"{RUN}/starts.jsonl", {
        "kind": "start", "step": 0, "tokens": 0, "host": SCRIPT, "command": [SCRIPT], "device": SCRIPT,
        "commit": SCRIPT, "libraries": {SCRIPT: SCRIPT}, "time": 1.0})),
    "html: a fault on record": ("page", write(f"{RUN}/faults.jsonl", json.dumps({
        "kind": "fault", "step": 2, "tokens_before": 1, "tokens": 2, "fault": SCRIPT, "action": "skip",
        "message": SCRIPT, "time": 1.0}) + "\n")),
    "html: an evaluation on record": ("page", write(f"{RUN}/evaluations.jsonl", json.dumps({
        "name": SCRIPT, "step": 2, "checkpoint": SCRIPT, "figures": {SCRIPT: 0.5}, "weights": "a"}) + "\n")),
    "json: a record of a gigabyte": ("page", sparse(f"{RUN}/metrics.jsonl", '{"kind": "step", "a": "')),
    "json: a deep record": ("page", write(f"{RUN}/metrics.jsonl", '{"step":' * DEEP + "\n")),
    # folders with code
    "code: auto_map of a model": ("model", lambda case: code_beside(case, auto_map=AUTO)),
    "code: an unknown model with auto_map": ("model", lambda case: code_beside(
        case, auto_map=AUTO, model_type="perceptron")),
    "code: a tokenizer's own class": ("model", lambda case: (
        code_beside(case), write("hf/tokenizer_config.json", json.dumps(
            {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["own.T", None]}}))(case))),
    "code: a chat template": ("model", edit("hf/tokenizer_config.json", lambda c: c.update(
        chat_template="{{ cycler.__init__.__globals__.os.popen('touch ../ran') }}"))),
    "code: modules that would be imported first": ("yaml", lambda case: [
        write(f"{name}.py", f"import os\nos.system({runs(case)!r})\n")(case)
        for name in ("sitecustomize", "torch", "yaml", "own", "composer", "numpy")]),
}  # fmt: skip

# kind -> verbs that open it, the cheapest first: with the rest only in the slow tests
VERBS: dict[str, list[list[str]]] = {
    "yaml": [["check", "run.yaml"], ["plan", "run.yaml"], ["init", "from", "run.yaml"], ["train", "run.yaml"]],
    "data": [
        ["inspect", "run.yaml"],
        ["check", "run.yaml"],
        ["train", "run.yaml", "name=other"],
        ["inspect", "data/train"],
    ],
    "tokenizer": [
        ["check", "run.yaml"],
        ["train", "run.yaml", "name=other"],
        ["prepare", "prepare.yaml", "tokenizer.path=data/tokenizer"],
    ],
    "model": [
        ["train", "run.yaml", "name=other", "weights.init_from=hf"],
        ["fill", "hf", "w7 [MASK]"],
        ["init", "from", "hf/config.json"],
    ],
    "composer": [
        ["export", "file.pt", "--out", "out"],
        ["train", "run.yaml", "name=other", "weights.init_from=file.pt"],
    ],
    "run": [
        ["export", RUN, "--out", "out"],
        ["train", "run.yaml"],
        ["report", RUN],
        ["report", "runs"],
        ["eval", RUN],
        ["average", RUN, "--last", "2", "--out", "mean"],
        ["train", "run.yaml", "name=other", f"start.checkpoint={RUN}"],
        ["checkpoints", "list", RUN],
        ["checkpoints", "verify", RUN],
    ],
    "page": [
        ["report", RUN],
        ["report", "runs"],
        ["train", "run.yaml"],
    ],
    "text": [["prepare", "prepare.yaml"]],
}
