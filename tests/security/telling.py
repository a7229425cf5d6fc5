"""Plants secrets, does a user's work, and looks for them in all output and files.

    python -m tests.security.telling FOLDER

Prints a line of JSON for each of USES: all secrets together on the command line, in the errors of libraries, and in the
environment of a run that trains, is exported, reported and listed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.drill.warm import another_host, prepare
from tests.security.opening import make_good, open_in

KEY = "A9b8C7d6E5f4G3h2J1k0" + "M9n8P7q6R5s4T3u2V1w0"


class Shape(NamedTuple):
    """A secret.

    Attributes:
        secret: the text that must never appear.
        variable: of the environment that holds it, if one does.
        word: on the command line, if it is there.
        raised: text of an error of a library that contains it.
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


WORDS = {str(shape.word).split("=")[0]: str(shape.word) for shape in SHAPES.values() if shape.word}
TEXTS = [shape.raised for shape in SHAPES.values() if shape.raised and not shape.variable]


def plant(which: str) -> None:
    """Done in the process before its verb."""
    if which == "in errors":
        os.environ["HF_TOKEN"] = SHAPES["hub token in the environment"].secret
        _fail("; ".join(TEXTS))
    elif which == "trained with":
        os.environ.update({shape.variable: shape.secret for shape in SHAPES.values() if shape.variable})
        another_host(SHAPES["the name of a host"].secret)


# place of the secrets -> the commands that are run
USES = {
    "as words": [["check", "run.yaml", *WORDS.values()], ["train", "run.yaml", *WORDS.values()]],
    "in errors": [["train", "run.yaml", "name=told"]],
    "trained with": [
        ["train", "run.yaml", "name=told"],
        ["export", "runs/told", "--out", "out"],
        ["report", "runs/told"],
        ["report", "runs", "--json"],
    ],
}


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
    secrets = {shape.secret for shape in SHAPES.values()}
    for which, verbs in USES.items():
        case, codes, told, said = folder / "case", [], [], ""
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(folder / "good", case, symlinks=True)
        for words in verbs:
            found = open_in(case, words, folder / "output.txt", lambda which=which: plant(which))  # type: ignore[misc]
            codes.append(found["code"])
            said += (folder / "output.txt").read_text(errors="replace")
        for path in case.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            if any(secret in path.name or secret.encode() in content for secret in secrets):
                told.append(str(path.relative_to(case)))
        told += ["said"] * any(secret in said for secret in secrets)
        print(json.dumps({"use": which, "codes": codes, "told": told, "said": said[:20000]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
