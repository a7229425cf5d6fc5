# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["modernbert-train", "huggingface_hub"]
#
# [tool.uv.sources]
# modernbert-train = { git = "https://github.com/OWNER/modernbert-train" }
# ///
"""Pretrain an encoder and push it to the hub, as one job of a service that runs scripts with uv.

    hf jobs uv run --flavor a10g-small --secrets HF_TOKEN --timeout 2h examples/hub_job.py OWNER/TEXTS \
        --push OWNER/MODEL --hours 1
    uv run examples/hub_job.py my/texts --hours 1            # on this machine

Replace OWNER in the header by the owner of your copy of this repository. TEXTS is a dataset of the hub, or a folder,
with files that `modernbert-train pretrain` reads; it also gets all further options. A dataset's README.md is left out,
and so are the files of its other splits if it has one named train; the job prints their names. The job's disk is
deleted when the job ends, so its timeout includes the time for preparing the data and for the push.
"""

from __future__ import annotations

import argparse
import glob
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import list_repo_files, snapshot_download

TRAINING = {"train", "training"}
HELD_OUT = {"test", "testing", "eval", "evaluation", "valid", "validation", "val", "dev"}  # as `datasets` reads names


def left_out(files: Sequence[str]) -> list[str]:
    """Return the files of a dataset that are not to be trained on: its README, and its splits other than train."""
    words = {file: set(re.split(r"[\W_]+", file.lower())) for file in files}
    has_training = any(words[file] & TRAINING for file in files)
    held_out = [file for file in files if words[file] & HELD_OUT and not words[file] & TRAINING]
    return [*(file for file in files if file == "README.md"), *(held_out if has_training else [])]


def main(words: Sequence[str] | None = None) -> int:
    """Download the texts, train, and push; return the exit code of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(description="Pretrain an encoder and push it to the hub.")
    parser.add_argument("texts", metavar="TEXTS", help="OWNER/DATASET of the hub, or a folder")
    parser.add_argument("--push", metavar="OWNER/MODEL", help="the model on the hub; default: it is not pushed")
    parser.add_argument("--name", default="hub-job", help="name of the run")
    options, further = parser.parse_known_args(words)
    texts = Path(options.texts)
    if not texts.exists():
        ignored = left_out(list_repo_files(options.texts, repo_type="dataset"))
        if ignored:
            print(f"{options.texts}: not trained on: {', '.join(ignored)}", flush=True)
        texts = Path(
            snapshot_download(
                options.texts,
                repo_type="dataset",
                local_dir=f"texts/{options.name}",
                ignore_patterns=[glob.escape(file) for file in ignored],
            )
        )
    commands = [
        ["pretrain", str(texts), "--name", options.name, "--out", f"pretrained/{options.name}", "--yes", *further]
    ]
    if options.push and "--dry-run" not in further:
        commands.append(["push", f"pretrained/{options.name}/runs/{options.name}", options.push])
    for command in commands:
        if code := subprocess.run([sys.executable, "-m", "modernbert_train", *command], check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
