"""`make quickstart`, `modernbert-train quickstart`: from Python's standard library to a small pretrained ModernBERT.

Every step is one of the documented commands, printed before it runs, so that what happened here can be done again by
hand on other text. Each step leaves finished work alone and continues with unfinished work, so running this again after
Ctrl-C or a crash resumes where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from launch.stages import PROGRAM, Stage, run_stages, text_to_model  # noqa: E402
from modernbert_train.cli.arguments import read_run  # noqa: E402
from modernbert_train.cli.parser import Parser  # noqa: E402
from modernbert_train.config.schema import RunConfig  # noqa: E402
from modernbert_train.core.installed import CHECKOUT, YAMLS  # noqa: E402
from modernbert_train.core.read_json import read_lines  # noqa: E402
from modernbert_train.core.text import duration, table  # noqa: E402
from modernbert_train.errors import exit_code_of  # noqa: E402

HOME = CHECKOUT or Path.cwd()  # where data and runs go
SPECS = Path("yamls") if CHECKOUT else YAMLS  # as the commands name them
DATA, RUN = str(SPECS / "data/quickstart.yaml"), str(SPECS / "quickstart.yaml")
TINY_RUN = str(SPECS / "quickstart-tiny.yaml")
TINY_DATA = ["out=data/quickstart-tiny", "tokenizer.vocab_size=2048"]
TEXTS = (
    "    def __init__([MASK], name):",
    "    except [MASK] as error:",
    "The default value is [MASK].",
)


def main(overrides: list[str] | None = None) -> int:
    """Run every step; overrides (a.b=c) go to the run's configuration. Returns the exit code of a failed step, or 0."""
    options = make_parser().parse_args(overrides)
    return exit_code_of(lambda: _all_steps(options))


def _all_steps(options: argparse.Namespace) -> int:
    run = [TINY_RUN if options.tiny else RUN, *options.overrides]
    config = read_run([str(HOME / run[0]), *run[1:]])
    model = f"{config.folder}/hf"
    started = time.monotonic()
    takes = f"{'half a minute' if options.tiny else 'five to seven minutes'} on 2 cores, less on more"
    stages = text_to_model([DATA, *(TINY_DATA if options.tiny else [])], run, HOME, takes=takes)
    stages.append(Stage("asking the model", [*PROGRAM, "fill", model, *TEXTS]))
    code = run_stages(stages, HOME)
    if code != 0:
        return code
    print(_summary(config, run[0], model, time.monotonic() - started))
    return 0


def make_parser() -> Parser:
    """The arguments of the command."""
    parser = Parser(prog="modernbert-train quickstart", description=__doc__)
    words = "a smaller model in a minute, by yamls/quickstart-tiny.yaml: whether all works here"
    parser.add_argument("--tiny", action="store_true", help=words)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of yamls/quickstart.yaml")
    return parser


def _summary(config: RunConfig, file: str, model: str, seconds: float) -> str:
    folder = HOME / config.folder
    entries, _ = read_lines(folder / "metrics.jsonl")
    steps = [entry for entry in entries if entry.get("kind") == "step"]
    validation = [entry for entry in entries if entry.get("kind") == "validation"][-1]
    gain = validation["unigram_loss"] - validation["loss"]
    last_loss = statistics.mean(step["loss"] for step in steps[-20:])
    rows = [
        ("tokens trained on", f"{steps[-1]['tokens']:,} in {steps[-1]['step']} steps"),
        (
            "training loss",
            f"{steps[0]['loss']:.2f} -> {last_loss:.2f} (30 % masked)",
        ),
        ("held-out loss", f"{validation['loss']:.2f}, unigram {validation['unigram_loss']:.2f} (15 % masked, nats)"),
        ("better by" if gain >= 0 else "worse by", f"{abs(gain):.2f} nats"),
        ("held-out accuracy", f"{validation['accuracy']:.1%}, unigram {validation['unigram_accuracy']:.1%}"),
        ("speed", f"{statistics.median(step['tokens_per_second'] for step in steps):,.0f} tokens/s"),
        ("this call took", duration(seconds)),
        ("model", f"{model}  (AutoModelForMaskedLM.from_pretrained)"),
        ("report", f"{config.folder}/report.html"),
        ("metrics", f"{config.folder}/metrics.jsonl"),
    ]
    program = ".venv/bin/python -m modernbert_train" if CHECKOUT else "modernbert-train"
    again = [f"train {file} name=slower optim.lr=1e-3"]
    if not CHECKOUT:  # the YAML lies among the installed packages
        name = Path(file).stem
        again = [f"init run {name} > {name}.yaml", f"train {name}.yaml name=slower optim.lr=1e-3"]
    other_rate = "\n".join(f"  {program} {words}" for words in again)
    return f"""
Done.
{table(rows, indent=2)}

Next:
  open {config.folder}/report.html in a browser
  {program} fill {model} "for key, value in data.[MASK]():"
{other_rate}
  {program} init data own_text > own_text.yaml     # your own text: edit the paths, then
  {program} prepare own_text.yaml
"""


if __name__ == "__main__":
    sys.exit(main())
