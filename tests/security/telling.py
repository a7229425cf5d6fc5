"""Plants secrets, does what a user does, and looks for them in all that was said and written.

    python -m tests.security.telling FOLDER

Prints a line of JSON for each shape. Each is planted once in the environment and the command line of a run that trains,
is exported, reported, listed and doctored, and once in its configuration.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.drill.warm import another_host, prepare
from tests.security.opening import make_good, open_in

KEY = "A9b8C7d6E5f4G3h2J1k0" + "M9n8P7q6R5s4T3u2V1w0"


class Shape(NamedTuple):
    """A secret.

    Attributes:
        secret: what must be found nowhere.
        variable: of the environment that holds it, if one does.
        word: on the command line, if it stands there.
        raised: text of an error of a library in which it comes back.
    """

    secret: str
    variable: str | None = None
    word: str | None = None
    raised: str | None = None


SHAPES = {
    "AWS secret key in the environment": Shape(KEY, "AWS_SECRET_ACCESS_KEY", raised=f"SignatureDoesNotMatch {KEY}"),
    "AWS key id": Shape("AKIA" + "Q7W6E5R4T3Y2U1I0", word="data.tokenizer=s3/AKIA" + "Q7W6E5R4T3Y2U1I0"),
    "AWS keys in a URL": Shape(KEY, word=f"data.train=s3://AKIAQ7W6E5R4T3Y2U1I0:{KEY}@bucket/shards"),
    "signature of a URL": Shape(KEY, word=f"data.train=https://store/shards?X-Amz-Signature={KEY}&x=1"),
    "hub token in the environment": Shape("hf_" + KEY, "HF_TOKEN", raised=f"401 for Bearer hf_{KEY}"),
    "hub token on the command line": Shape("hf_" + KEY, word=f"weights.init_from=hf_{KEY}"),
    "wandb key in the environment": Shape("0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c", "WANDB_API_KEY"),
    "user and password in a URL": Shape("hunter2-" + KEY[:6], word=f"data.train=sftp://me:hunter2-{KEY[:6]}@host/x"),
    "a key under its name": Shape(KEY, word=f"loggers.neptune.api_token={KEY}"),
    "a variable for the ranks": Shape(KEY, word=f"launch.env.MY_SERVICE_TOKEN={KEY}"),
    "a token of GitHub": Shape("ghp_" + KEY, word=f"runs_folder=https://ghp_{KEY}@github.com/x"),
    "a header in an error": Shape(KEY, raised=f"request failed: {{'Authorization': 'Bearer {KEY}'}}"),
    "a private key in an error": Shape(
        KEY, raised=f"bad key: -----BEGIN RSA PRIVATE KEY-----\n{KEY}\n-----END RSA PRIVATE KEY-----"
    ),
    "a web token in an error": Shape(
        f"eyJhbGciOiJIUzI1.{KEY}.{KEY}", raised=f"token eyJhbGciOiJIUzI1.{KEY}.{KEY} has expired"
    ),
    "a password of a database in an error": Shape(KEY, raised=f"cannot connect to postgresql://sweep:{KEY}@db/x"),
    "the name of a host": Shape("hf_" + KEY),
}


def uses(shape: Shape, name: str) -> Iterator[tuple[list[str], Any]]:
    """Words, and what is done in the process before."""

    def before() -> None:
        if shape.variable:
            os.environ[shape.variable] = shape.secret
        if name == "the name of a host":
            another_host(shape.secret)
        if shape.raised is not None:
            _fail(shape.raised)

    more = [shape.word] if shape.word else []
    yield ["check", "run.yaml", *more], before
    yield ["train", "run.yaml", "name=told", *more], before
    if shape.raised is None and shape.word is None:
        yield ["export", "runs/told", "--out", "out"], before
        yield ["report", "runs/told"], before
        yield ["runs", "runs", "--json"], before


def _fail(text: str) -> None:
    """Every forward pass fails, as a library's call would."""
    from modernbert_train.train.adapters import ComposerObjective

    def forward(*given: Any, **named: Any) -> Any:
        raise OSError(text)

    ComposerObjective.forward = forward  # type: ignore[method-assign]


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    (folder / "tmp").mkdir(parents=True)
    prepare()
    make_good(folder / "good")
    for name, shape in SHAPES.items():
        case, codes, told = folder / "case", [], []
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(folder / "good", case, symlinks=True)
        for words, before in uses(shape, name):
            found = open_in(case, words, folder / "output.txt", before)
            codes.append(found["code"])
            if shape.secret in (folder / "output.txt").read_text(errors="replace"):
                told.append(f"said by {words[0]}")
        for path in case.rglob("*"):
            if shape.secret in path.name or (path.is_file() and shape.secret.encode() in path.read_bytes()):
                told.append(str(path.relative_to(case)))
        print(json.dumps({"name": name, "codes": codes, "told": told}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
