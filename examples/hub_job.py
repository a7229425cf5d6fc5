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

The header names the address of your copy of this repository. TEXTS is a dataset of the hub, or a folder, with files
that `modernbert-train pretrain` reads; it also gets all further options. The job's disk is deleted when the job ends,
so its timeout includes the time for preparing the data and for the push.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download


def main(words: Sequence[str] | None = None) -> int:
    """Download the texts, train, and push; return the exit code of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(description="Pretrain an encoder and push it to the hub.")
    parser.add_argument("texts", metavar="TEXTS", help="OWNER/DATASET of the hub, or a folder")
    parser.add_argument("--push", metavar="OWNER/MODEL", help="the model on the hub; default: it is not pushed")
    parser.add_argument("--name", default="hub-job", help="name of the run")
    options, further = parser.parse_known_args(words)
    texts = Path(options.texts)
    if not texts.exists():
        texts = Path(snapshot_download(options.texts, repo_type="dataset", local_dir=f"texts/{options.name}"))
    commands = [
        ["pretrain", str(texts), "--name", options.name, "--out", f"pretrained/{options.name}", "--yes", *further]
    ]
    if options.push:
        commands.append(["push", f"pretrained/{options.name}/runs/{options.name}", options.push])
    for command in commands:
        if code := subprocess.run([sys.executable, "-m", "modernbert_train", *command], check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
