"""How long a report of many runs takes to appear and to answer, in a browser without a window; its pictures in docs/.

    python -m benchmarks.pages                  # 100 runs of 2,000 points
    python -m benchmarks.pages --pictures out   # and out/comparison.png, out/live.png

The runs are made up, by formulas that look like training: no figure on the pictures was measured. Needs
chromium and its chromedriver.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

from modernbert_train.report import write_comparison
from modernbert_train.report.serve import open_server
from tests.report.browser import Browser, browser

SPOKEN = [" the", " river", " ran", " slowly", " past", " the", " old", " mill", " and", " into", " the", " sea", "."]
GUESSES = ([" and", " of", " the"], [" water", " sea", " road"], [" sea", " valley", " water"])


def make_run(folder: Path, steps: int, lr: float, seed: int, restart: int = 0) -> Path:
    """The folder of a run that never was."""
    draw = random.Random(seed)
    lines: list[dict[str, Any]] = []
    texts = []
    for i in range(1, steps + 1):
        share = i / steps
        rate = lr * min(1.0, share / 0.05) * (1.0 if share < 0.8 else math.sqrt(max(0.0, (1 - share) / 0.2)))
        level = 2.0 + 6 * math.exp(-share * 12) + 0.6 * math.exp(-share * 2) + abs(math.log10(lr / 8e-4)) * 0.25
        loss = level - 0.2 * max(0.0, share - 0.8) / 0.2 + draw.gauss(0, 0.05)
        tokens = i * 65_536
        speed = 301_500 + draw.gauss(0, 4_000)
        phase = "stable" if share <= 0.8 else "decay"
        lines.append(
            {
                "kind": "step", "step": i, "phase": phase, "tokens": tokens, "rows": 64 + 192 * min(1.0, 4 * share),
                "loss": loss, "lr": rate, "grad_norm": 0.3 + math.exp(-share * 20) + abs(draw.gauss(0, 0.05)),
                "update_norm": rate * (900 + draw.gauss(0, 20)), "tokens_per_second": speed, "mfu": speed / 8e5,
                "data_wait_share": abs(draw.gauss(0, 0.002)), "peak_memory_bytes": 41.3e9, "packing_efficiency": 0.99,
                "time": 1.78e9 + tokens / speed + (600 if restart and i > restart else 0),
            }
        )  # fmt: skip
        if i == restart:
            lines.append({"kind": "resume", "step": i, "tokens": tokens, "checkpoint": f"step-{i:08d}"})
        if i % max(1, steps // 12) == 0:
            at = {"step": i, "phase": phase, "tokens": tokens, "time": lines[-1].get("time", 1.78e9)}
            held_out = {"loss": level, "accuracy": 0.62 - level / 12, "unigram_loss": 7.4, "unigram_accuracy": 0.04}
            lines.append({"kind": "validation", **at, **held_out, "predicted": 10_000})
            texts.append({"kind": "samples", **at, "texts": [filled(level)]})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    (folder / "config.yaml").write_text(f"name: {folder.name}\nseed: {seed}\noptim:\n  lr: {lr:g}\n")
    return folder


def filled(level: float) -> dict[str, Any]:
    """A text with what is guessed at three places, the better, the lower the loss."""
    predicted = []
    for place, guesses in zip((2, 7, 11), GUESSES, strict=True):
        right = level < 2.6 + 0.4 * (place % 3)
        words = [SPOKEN[place], *guesses][:3] if right else [*guesses, SPOKEN[place]][:3]
        predicted.append({"at": place, "is": SPOKEN[place], "guesses": list(zip(words, (0.6, 0.2, 0.1), strict=True))})
    return {"words": SPOKEN, "predicted": predicted}


def measure(driven: Browser, folder: Path, runs: int, steps: int) -> None:
    """Print the milliseconds until the charts in view are drawn, and those of what a reader does then."""
    folders = [make_run(folder / f"run-{n:03d}", steps, 2e-4 * 1.04**n, n) for n in range(runs)]
    page = write_comparison(folders, folder / "many.html")
    driven.open(page, 1400, 900)
    drawn = "const c = charts.filter(c => c.visible && c.plot).length; return c && [c, performance.now()]"
    driven.run_later(drawn)
    load = driven.run("return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    print(f"{runs} runs of {steps:,} points: {page.stat().st_size / 1e6:.1f} MB, script done after {load:.0f} ms")
    acts = {
        "axis": "state.x = 'step'; redraw()", "smoothing": "state.smooth = 5; redraw()",
        "filter": "state.q = 'run-01'; table(); redraw()", "all again": "state.q = ''; table(); redraw()",
        "sort": "state.sort = {head: 'Validation loss', up: true}; table()", "pointing at a run": "focusOn(runs[7])",
    }  # fmt: skip
    for name, script in acts.items():
        took = driven.run(f"const t = performance.now(); {script}; return performance.now() - t")
        print(f"  {name}: {took:.0f} ms")
    if errors := driven.errors():
        raise SystemExit(f"the page complained: {errors}")


def pictures(driven: Browser, folder: Path, out: Path) -> None:
    """Write comparison.png and live.png."""
    rates = (2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
    folders = [make_run(folder / f"lr-{lr:g}", 600, lr, n, 300 if n == 1 else 0) for n, lr in enumerate(rates)]
    driven.open(write_comparison(folders, folder / "few.html"), 1200, 1350)
    driven.run_later("return charts.some(c => c.plot)")
    driven.picture(out / "comparison.png")
    with open_server([folders[2]], port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        driven.open_at(server.address)
        driven.run_later("return charts.some(c => c.plot)")
        driven.run("document.querySelector('#charts').before(document.querySelector('#samples'))")
        driven.picture(out / "live.png")
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write the pictures of the docs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as driven:
        if options.pictures is not None:
            pictures(driven, Path(folder) / "few", options.pictures)
        measure(driven, Path(folder) / "many", options.runs, options.steps)


if __name__ == "__main__":
    main()
