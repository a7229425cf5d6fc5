"""The encoder speedrun: the least compute to a held-out loss on fixed public text.

    python -m benchmarks.speedrun benchmarks/speedrun.yaml --out speedrun

downloads the text (Python projects from PyPI, by SHA-256), prepares it with a tokenizer of 8,192 entries, trains the
recipe, measures the whole held-out text, and prints the row for docs/speedrun.md. The referee is the run's own record:
the shards have the hashes below, it starts from nothing, and every step is in metrics.jsonl. A run that was stopped
resumes with the same command; its CPU seconds add up in OUT/RECIPE.json.

The rules are in docs/speedrun.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import cpuinfo
import yaml

from modernbert_train.config.load import load_run
from modernbert_train.core.files import write_whole

TARGET = 4.12  # nats per predicted token of the held-out text, 15 % predicted: the first row's loss
# wheels of PyPI: the same bytes everywhere
TRAIN = {
    "ansible_core==2.18.6": "12a34749a7b20f0f1536bd3e3b2e137341867e4642e351273e96647161f595c0",
    "celery==5.5.3": "0b5761a07057acee94694464ca482416b959568904c9dfa41ce8413a7d65d525",
    "django==5.2.1": "a9b680e84f9a0e71da83e399f1e922e1ab37b2173ced046b541c72e1589a5961",
    "docutils==0.21.2": "dafca5b9e384f0e419294eb4d2ff9fa826435bf15f15b7bd45723e8ad76811b2",
    "networkx==3.5": "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec",
    "nltk==3.9.1": "4fa26829c5b00715afe3061398a8989dc643b92ce7dd93fb4585a70930d168a1",
    "pygments==2.19.1": "9ea1544ad55cecf4b8242fab6dd35a93bbce657034b0611ee383099054ab6d8c",
    "sphinx==8.2.3": "4405915165f13521d875a8c29c8970800a0141c14cc5416a38feca4ea5d9b9c3",
    "sympy==1.14.0": "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
    "twisted==24.11.0": "fe403076c71f04d5d2d789a755b687c5637ec3bcd3b2b8252d76f2ba65f54261",
}
HELD_OUT = {
    "flask==3.1.1": "07aae2bb5eaf77993ef57e357491839f5fd9f4dc281593a81a9e4d79a24f295c",
    "scrapy==2.13.2": "6f29826da4f11ba9528336c698e6979e6a0861d6f897d0553f687cfe403d279e",
    "werkzeug==3.1.3": "54b78bf3716d19a65be4fceccc0d1d7b89e608834989dfae50ea87564639213e",
}
# index_sha256 of the prepared shards
SHARDS = {
    "train": "faa6155cc8f8498ddc9badfdcfdce819e8cbf2c2410b510366893b0ad3cf32ee",
    "validation": "cd080be0489723eefb47b09121e4e30cd32fc2ffcfbce122ceb36878f4d973bf",
}
MODULE = [sys.executable, "-m", "modernbert_train"]


def fetch(wheels: dict[str, str], folder: Path) -> list[Path]:
    """Download wheels by hash; return them in the order given."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in wheels.items()))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--dest",
        str(folder),
    ]
    if subprocess.run([*command, "--only-binary=:all:", "-r", str(listed)], check=False).returncode:
        raise SystemExit(f"{listed}: these wheels cannot be downloaded with these hashes (see above).")
    by_name = {path.name.split("-")[0].lower(): path for path in folder.glob("*.whl")}
    return [by_name[name.split("==")[0].lower()] for name in wheels]


def write_text(wheels: list[Path], out: Path) -> None:
    """Write the Python files of wheels as JSON lines, in the order of their names."""
    partial = out.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened:
                for name in sorted(each for each in opened.namelist() if each.endswith(".py")):
                    text = opened.read(name).decode("utf-8", errors="replace")
                    file.write(json.dumps({"text": text, "path": f"{wheel.name}/{name}"}) + "\n")
    partial.rename(out)


def prepare(out: Path) -> None:
    """Make the shards once, and refuse any that differ by a byte from the protocol's."""
    data = out / "data"
    if not (data / "train").exists():
        for part, wheels in (("train", TRAIN), ("validation", HELD_OUT)):
            if not (text := out / f"{part}.jsonl").exists():  # `prepare` resumes on the same file only
                write_text(fetch(wheels, out / "wheels" / part), text)
        tokenizer: dict[str, Any] = {"vocab_size": 8192}
        for part in ("train", "validation"):
            folder = out / f"prepared-{part}"
            spec = {
                "out": str(folder),
                "sources": {part: {"kind": "jsonl", "path": str(out / f"{part}.jsonl")}},
                "tokenizer": tokenizer,
                "validation_share": 0.0,
            }
            (out / f"{part}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
            must(["prepare", str(out / f"{part}.yaml")])
            tokenizer = {"path": str(folder / "tokenizer")}
        data.mkdir()
        for name, folder in (
            ("tokenizer", "train/tokenizer"),
            ("validation", "validation/train"),
            ("train", "train/train"),
        ):
            (data / name).symlink_to(out / f"prepared-{folder}", target_is_directory=True)
    for part, expected in SHARDS.items():
        sha256 = json.loads((data / part / "dataset.json").read_text())["index_sha256"]
        if sha256 != expected:
            raise SystemExit(f"{data / part}: shards {sha256}, and the speedrun's are {expected}: another text or "
                             "tokenizer. Remove the folder to make them again.")  # fmt: skip


def run(words: list[str]) -> tuple[int, float]:
    """Run a verb of the product to its end, and pass a SIGTERM on to it; return its exit code and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([*MODULE, *words])
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the verb too
    code = process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def must(words: list[str]) -> None:
    """Run a verb; SystemExit if it fails."""
    if code := run(words)[0]:
        raise SystemExit(f"{' '.join(words[:2])}: exit code {code}")


def train(words: list[str], clock: Path) -> float:
    """Train to the end, or resume; return the CPU seconds of all starts, which `clock` keeps.

    Raises:
        SystemExit: the run stopped, or the seconds of an earlier start were lost with a process that was killed.
    """
    kept = json.loads(clock.read_text()) if clock.exists() else {"cpu_seconds": 0.0, "state": "stopped"}
    if kept["state"] == "running":
        raise SystemExit(
            f"{clock}: a start was killed, so its CPU seconds are not known. Remove the run and this file."
        )
    if kept["state"] == "finished":
        return float(kept["cpu_seconds"])
    write_whole(clock, json.dumps(kept | {"state": "running"}))
    code, seconds = run(["train", *words])
    kept = {"cpu_seconds": kept["cpu_seconds"] + seconds, "state": "stopped" if code else "finished"}
    write_whole(clock, json.dumps(kept))
    if code:
        raise SystemExit(f"train: exit code {code}, after {kept['cpu_seconds']:,.0f} CPU seconds; see above")
    return float(kept["cpu_seconds"])


def referee(folder: Path, out: Path) -> dict[str, Any]:
    """Return the figures of a finished run; SystemExit if its record breaks a rule."""
    config = load_run([folder / "config.yaml"])
    if config.weights.named or config.start is not None or config.objective.name == "distill":
        raise SystemExit(f"{folder}: begins with weights from elsewhere. A speedrun starts from nothing.")
    for part in SHARDS:
        if Path(getattr(config.data, part)).resolve() != (out / "data" / part).resolve():
            raise SystemExit(f"{folder}: data.{part} is not {out / 'data' / part}.")
    steps = [entry for line in (folder / "metrics.jsonl").read_text().splitlines()
             if (entry := json.loads(line))["kind"] == "step"]  # fmt: skip
    if [entry["step"] for entry in steps] != list(range(1, len(steps) + 1)):
        raise SystemExit(f"{folder}/metrics.jsonl: does not have every step once.")
    loss = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["figures"]["loss"]
    return {"loss": loss, "tokens": steps[-1]["tokens"], "seconds": sum(entry["seconds"] for entry in steps)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="YAML file of a run; its section `data` is replaced")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    prepare(out)
    name = options.recipe.stem
    words = [str(options.recipe), f"name={name}", f"runs_folder={out / 'runs'}",
             *(f"data.{part}={out / 'data' / part}" for part in ("train", "validation", "tokenizer"))]  # fmt: skip
    spent = train(words, out / f"{name}.json")
    must(["eval", *words, "eval.max_tokens=null", "eval.row_tokens=512", "objective.eval_mask_rate=0.15"])
    seen = referee(out / "runs" / name, out)
    reached = seen["loss"] <= TARGET
    print(f"target {TARGET}: {'reached' if reached else 'NOT reached'}")
    print("| date | recipe | held-out loss | tokens | CPU seconds | training minutes | on |")
    on = f"{os.cpu_count()} x {cpuinfo.get_cpu_info().get('brand_raw', platform.machine())}"
    print(f"| {date.today()} | {name} | {seen['loss']:.4f} | {seen['tokens']:,} | {spent:,.0f} "
          f"| {seen['seconds'] / 60:.1f} | {on} |")  # fmt: skip
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
