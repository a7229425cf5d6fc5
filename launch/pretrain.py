"""From text to a model that is measured, exported and reported: pretrain TEXT... --hours 8, or --preset quickstart

It samples the text, chooses a recipe by published rules, writes it as OUT/data.yaml and OUT/run.yaml, and then runs the
verbs that a person would run by hand, each printed first. All its state is in those files and in the results of the
verbs: after a kill the same command continues. You may edit the YAMLs; edited ones are used as they are and never
overwritten. The preset brings its text and YAML files: the source of Python's standard library, and a small model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.report import fingerprint
from data_prep.sample import TextSample, look_at_text, shown, size_text
from launch.budget import MAX_HELD_OUT, MIN_HELD_OUT, Chosen, Device, choose, device_of, held_out_share
from launch.run_stages import PROGRAM, TYPED, Stage, run_stages, text_to_model
from modernbert_train.cli.arguments import read_run
from modernbert_train.cli.parser import Parser, positive, token_count
from modernbert_train.clock import Clock
from modernbert_train.config.check import check
from modernbert_train.config.describe import expected_steps
from modernbert_train.config.load import load_run, load_typed
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig, TokenizerConfig
from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.installed import YAMLS
from modernbert_train.core.lasting_output import lasting_output
from modernbert_train.core.read_json import number, read_lines
from modernbert_train.core.text import duration, number_in, plural, table, tokens_text
from modernbert_train.distributed.visible_gpus import shown_gpus
from modernbert_train.errors import (
    ConfigError,
    DataError,
    StoppedEarly,
    StorageError,
    exit_code_of,
    interrupts_as,
)
from modernbert_train.plan.answer import answer
from modernbert_train.plan.expected_loss import Expected, rule_of
from modernbert_train.plan.make import make_plan
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.plan.recipe import MAX_PASSES, SIZES, RunRequest, run_yaml
from modernbert_train.report.run_list import last_entries

MIN_DOCUMENTS = 20
TOKENIZER_BYTES = 2e9  # maximum bytes of text to train a tokenizer on
_LINE = "# pretrain: "
_MAX_DAMAGED = 0.2  # maximum share of the sampled documents: above it, the input is probably not text
_SCRIPT_SHARE = 0.05  # minimum share of a script to be listed
_OF_TEXT = ("tokens", "tokenizer", "gpus", "out", "name", "yes", "dry_run")  # options that exclude a preset
_TINY_DATA = ["out=data/quickstart-tiny", "tokenizer.vocab_size=2048"]
_ASKED = ("    def __init__([MASK], name):", "    except [MASK] as error:", "The default value is [MASK].")


@dataclass(frozen=True)
class Place:
    """Paths of a run.

    Attributes:
        out: the folder of everything.
        name: name of the run.
    """

    out: Path
    name: str

    @property
    def data_yaml(self) -> Path:
        return self.out / "data.yaml"

    @property
    def run_yaml(self) -> Path:
        return self.out / "run.yaml"

    @property
    def dataset(self) -> Path:
        return self.out / "dataset"

    @property
    def runs(self) -> Path:
        return self.out / "runs"

    @property
    def run(self) -> Path:
        return self.runs / self.name

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def begun(self) -> bool:
        """True if work exists that other YAMLs would contradict."""
        work = self.dataset.with_name(f"{self.dataset.name}.work")
        return any(path.exists() for path in (self.dataset, work, self.run))


def make_parser() -> Parser:
    """Return the parser of the verb's arguments."""
    parser = Parser(prog="modernbert-train pretrain", description=__doc__)
    words = "files or folders of text; with --preset instead KEY=VALUE, keys of its run"
    parser.add_argument("text", nargs="*", metavar="TEXT", help=words)
    much = parser.add_mutually_exclusive_group(required=True)
    much.add_argument(
        "--hours", type=_hours, metavar="H", help="train for about H hours; the model's size is chosen to fit"
    )
    much.add_argument("--size", choices=SIZES, help="size of the model; base and large are the published recipes")
    words = "the source of Python's standard library to a small model, in six to eight minutes on 2 cores"
    much.add_argument("--preset", choices=("quickstart",), help=words)
    parser.add_argument("--tiny", action="store_true", help="with the quickstart: a smaller model, in a minute")
    words = "tokens to train on, such as 300M or 2B, with --size; default: 20 a parameter, up to 4 passes over the text"
    parser.add_argument("--tokens", type=token_count, metavar="N", help=words)
    words = "an existing tokenizer, its file or folder, used with its ids; default: one is trained on the text"
    parser.add_argument("--tokenizer", metavar="PATH", help=words)
    parser.add_argument("--gpus", type=positive, metavar="N", help="GPUs that train; default: all of this machine")
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder; default: pretrained/NAME")
    parser.add_argument("--name", help="name of the run; default: the first TEXT's")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="write the YAMLs, print the plan, and exit")
    return parser


def _hours(text: str) -> float:
    hours = number_in(text)
    if not 0 < hours < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: a number of hours is expected, such as 8 or 0.5")
    return hours


@lasting_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see docs/faults.md)."""
    parser = make_parser()
    options = parser.parse_intermixed_args(arguments)
    if (wrong := _wrong_words(options)) is not None:
        parser.error(wrong)

    def interruptible() -> int:
        with interrupts_as("stopped; nothing has been trained yet."):
            return _pretrain(options) if options.preset is None else _quickstart(options)

    return exit_code_of(interruptible)


def _wrong_words(options: argparse.Namespace) -> str | None:
    """Return the error for arguments that exclude each other, if any."""
    if options.preset is not None:
        more = [f"--{key.replace('_', '-')}" for key in _OF_TEXT if getattr(options, key)]
        if wrong := [*(word for word in options.text if "=" not in word), *more]:
            return f"--preset {options.preset} has its own text and settings. Leave out {' '.join(wrong)}."
    elif not options.text:
        return "TEXT is missing: name files or folders of text, or --preset quickstart."
    elif options.tiny:
        return "--tiny belongs to --preset quickstart. Add it, or give --size tiny."
    elif options.tokens is not None and options.size is None:
        return "--tokens belongs to --size; with --hours the tokens follow from the time."
    return None


def _quickstart(options: argparse.Namespace) -> int:
    name, more = ("quickstart-tiny", _TINY_DATA) if options.tiny else ("quickstart", [])
    here = YAMLS.is_relative_to(Path.cwd())
    folder = YAMLS.relative_to(Path.cwd()) if here else YAMLS  # as a person types it
    run = [str(folder / f"{name}.yaml"), *options.text]
    config = read_run(run)
    takes = f"{'half a minute' if options.tiny else 'six to eight minutes'} on 2 cores, less on more"
    stages = text_to_model([str(folder / "data/quickstart.yaml"), *more], run, takes=takes)
    stages.append(Stage("asking the model", [*PROGRAM, "fill", f"{config.folder}/hf", *_ASKED]))
    further = [f"train {run[0] if here else f'{name}.yaml'} name=slower optim.lr=1e-3"]
    further += ["init data own_text > own_text.yaml     # your own text: edit the paths, then", "prepare own_text.yaml"]
    copied = [] if here else [f"init run {name} > {name}.yaml"]
    return _run(stages, config, "for key, value in data.[MASK]():", [*copied, *further])


def _pretrain(options: argparse.Namespace) -> int:
    place, question = _place(options), _question(options)
    print(f"looking at {' '.join(options.text)} ...", flush=True)
    sample = look_at_text(options.text)
    _refuse_damaged(sample, options.text)
    if options.tokenizer is None and any(source.kind == "fasta" for source in sample.sources.values()):
        raise ConfigError(
            f"{' '.join(options.text)}: FASTA, whose letters are the tokens. Make a tokenizer of them, "
            "`modernbert-train tokenizer letters data/letters --alphabet protein` (or dna), and name it: --tokenizer "
            "data/letters."
        )
    print(table(list(_text_rows(sample)), indent=2), flush=True)
    device = device_of(options.gpus)
    if options.gpus and not (device.here or options.dry_run):
        raise ConfigError(
            f"--gpus {options.gpus}: this machine shows {len(shown_gpus())}. --dry-run writes the YAMLs and prints the "
            f"plan; then `launch {place.run_yaml}` trains on a machine that has them."
        )
    digest = _digest(place, sample, options.tokenizer)
    if not _keeps(place, question, digest):
        chosen = choose(sample, device, options.hours, options.size, options.tokens, options.tokenizer)
        _write(place, question, digest, sample, device, chosen)
    check(load_run([place.run_yaml]), max(1, device.gpus))
    print(f"\n{table(list(_plan_rows(place, device)), indent=2)}", flush=True)
    if options.dry_run:
        print(f"\nNothing was run. The same command without --dry-run continues with {place.run_yaml}.")
        return 0
    if not options.yes:
        _ask()
    stages = text_to_model(
        [str(place.data_yaml)], [str(place.run_yaml)], ranks=max(1, device.gpus), watch=lambda: _lateness(place)
    )
    again = f"train {place.run_yaml} name=slower optim.lr=1e-3"
    return _run(stages, load_run([place.run_yaml]), "some text with a [MASK]", [again], place)


def _place(options: argparse.Namespace) -> Place:
    first = Path(options.text[0])
    name = (
        options.name
        or re.sub(r"[^A-Za-z0-9._-]+", "-", first.absolute().stem if first.is_file() else first.absolute().name).strip(
            "-."
        )
        or "mine"
    )
    out = options.out or Path("pretrained") / name
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file. Name a folder.")
    inside = next((text for text in options.text if out.resolve().is_relative_to(Path(text).resolve())), None)
    if inside is not None:
        raise ConfigError(f"--out {out}: lies in {inside}, and would become text itself. Name a folder outside of it.")
    return Place(out, name)


def _question(options: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(options, key) for key in ("text", "hours", "size", "tokens", "tokenizer", "gpus", "name")}


def _refuse_damaged(sample: TextSample, texts: Sequence[str]) -> None:
    if sample.documents < MIN_DOCUMENTS:
        raise DataError(
            f"{', '.join(texts)}: {plural(round(sample.documents), 'document')} in {shown(sample.taken)}, and some "
            f"must be held out: {MIN_DOCUMENTS} are needed. A file of plain text is one document; cut it: "
            "mkdir parts && split -C 100k --additional-suffix=.txt FILE parts/, then name parts."
        )
    if sample.damaged_share > _MAX_DAMAGED:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sample.damaged.items())
        raise DataError(
            f"{', '.join(texts)}: of {sample.sampled:,} documents that were sampled, {reasons} (docs/data.md has the "
            "reasons). Move these files away, or name only files of text."
        )


def _text_rows(sample: TextSample) -> Iterator[tuple[str, str]]:
    """Yield the rows of the plan's table that describe the sampled text."""
    documents = f"about {_two_digits(sample.documents)} documents, half of them above {size_text(sample.length(0.5))}"
    yield "text", f"{size_text(sample.text_bytes)} in {shown(sample.taken)}; {documents}"
    if sample.passed_over:
        yield "not read", f"{shown(sample.passed_over)}: no text, or of an unknown kind"
    if sample.too_long or sample.damaged:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sample.damaged.items())
        yield "left out", f"of {sample.sampled:,} documents sampled: {reasons}"
    if sample.duplicates >= 0.005:
        yield "duplicates", f"{sample.duplicates:.0%} of the documents sampled; each text is trained on once"
    scripts = [f"{name} {share:.0%}" for name, share in sample.scripts.items() if share >= 0.005]
    yield "scripts", ", ".join(scripts) or "no letters"
    if sum(share >= _SCRIPT_SHARE for share in sample.scripts.values()) > 1:
        yield "", "one tokenizer and one model for all of them; name the folder of one language to train on it alone"


def _digest(place: Place, sample: TextSample, tokenizer: str | None) -> str:
    """Hash the names, sizes and times of the files."""
    return str(fingerprint(_spec(place, sample, 8192, tokenizer))["inputs"]["digest"])


def _spec(
    place: Place, sample: TextSample, entries: int, tokenizer: str | None, text_share: float = 1.0
) -> PrepareConfig:
    damaged = sample.damaged_share
    trained = TokenizerConfig(vocab_size=entries, training_share=_training_share(text_share * sample.text_bytes))
    return PrepareConfig(
        out=str(place.dataset),
        sources=dict(sample.sources),
        tokenizer=trained if tokenizer is None else TokenizerConfig(path=tokenizer, extend=True),
        validation_share=held_out_share(sample, text_share),
        document_share=text_share,
        max_left_out=PrepareConfig.max_left_out if not damaged else float(f"{0.01 + 2 * damaged:.2g}"),
    )


def _training_share(text_bytes: float) -> float:
    return float(f"{min(1.0, TOKENIZER_BYTES / text_bytes):.1g}")


def _data_yaml(spec: PrepareConfig) -> str:
    """Format the spec as YAML, with comments on unusual values."""
    usual = SourceConfig(kind="text")
    lines = [f"out: {_value(spec.out)}", "", "sources:"]
    for name, source in spec.sources.items():
        lines.append(f"  {name}:")
        for key in ("kind", "path", "glob", "text_field", "encoding"):
            value = getattr(source, key)
            if key == "kind" or value != getattr(usual, key):
                lines.append(f"    {key}: {_value(value)}")
    lines += ["", "tokenizer:"]
    if spec.tokenizer.path is not None:
        lines.append(f"  path: {_value(spec.tokenizer.path)}")
        lines.append("  extend: true # missing special tokens are added, after its existing ids")
    else:
        lines.append(f"  vocab_size: {spec.tokenizer.vocab_size} # the same as in run.yaml, which says why")
    if spec.tokenizer.training_share < 1:
        lines.append(f"  training_share: {spec.tokenizer.training_share} # about {size_text(TOKENIZER_BYTES)} of text")
    lines += ["", f"validation_share: {spec.validation_share} # {_HELD_OUT}"]
    if spec.document_share < 1:
        lines.append(f"document_share: {spec.document_share} # drawn at random: {_ENOUGH}")
    if spec.max_left_out != PrepareConfig.max_left_out:
        lines.append(f"max_left_out: {spec.max_left_out} # a sample of the text has damaged documents")
    return "\n".join(lines) + "\n"


_HELD_OUT = f"a twentieth; of much text about {size_text(MAX_HELD_OUT)}, and at least {MIN_HELD_OUT} documents"

_ENOUGH = "as much as the run of run.yaml reads, and a fifth more; 1 takes all"


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _keeps(place: Place, question: dict[str, Any], digest: str) -> bool:
    """Return True to use the existing YAMLs, False to write them.

    Raises:
        ConfigError: they belong to other text or other options, and were used or edited.
    """
    recorded = _record(place.run_yaml)
    if recorded is None:
        if place.run_yaml.exists() or place.data_yaml.exists():
            raise ConfigError(
                f"{place.out}: has a run.yaml or data.yaml that `pretrain` did not write. Give another --out."
            )
        return False
    if recorded["digest"] == digest and recorded["question"] == question and place.data_yaml.exists():
        return True
    another = "Give another --name, or another --out." if place.out.name == place.name else "Give another --out."
    if recorded["digest"] != digest:
        was = f"{place.run_yaml}: made of other text ({' '.join(recorded['question']['text'])} as it was then)"
    else:
        changed = [key for key in question if recorded["question"].get(key) != question[key]]
        words = ", ".join(f"--{key} {recorded['question'].get(key)}" for key in changed)
        was = f"{place.run_yaml}: made with {words}"
    if place.begun:
        raise ConfigError(f"{was}, and {place.out} has work of it. {another}")
    if recorded["body"] != _body(place.run_yaml):
        raise ConfigError(f"{was}, and changed by hand since. {another}")
    return False


def _record(file: Path) -> dict[str, Any] | None:
    """Read `pretrain`'s record in a run.yaml; None if it has none."""
    record = None
    with suppress(OSError, ValueError):
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        record = json.loads(first.removeprefix(_LINE)) if first.startswith(_LINE) else None
    return record if isinstance(record, dict) and {"question", "digest", "body"} <= record.keys() else None


def _body(file: Path) -> str:
    return _sha(file.read_text(encoding="utf-8").partition("\n")[2])


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(
    place: Place, question: dict[str, Any], digest: str, sample: TextSample, device: Device, chosen: Chosen
) -> None:
    """Write both YAMLs, the run last."""
    words = [json.dumps(text) if " " in text else text for text in question["text"]]
    words += [f"--{key} {value:g}" if key == "hours" else f"--{key} {value}"
              for key, value in question.items() if key != "text" and value is not None]  # fmt: skip
    request = RunRequest(
        place.name, chosen.size, chosen.tokens, chosen.entries, device.gpus, str(place.dataset), str(place.runs),
        chosen.text_tokens, chosen.longest, question["tokenizer"],
        head=(f"Written by `{TYPED} pretrain {' '.join(words)}`; change it as you like.",), bf16=device.bf16,
    )  # fmt: skip
    body = run_yaml(request)
    record = {
        "question": question, "digest": digest, "body": _sha(body), "speed": chosen.speed,
        "text_tokens": chosen.text_tokens, "unigram_loss": chosen.unigram_loss,
        "bytes_per_token": chosen.bytes_per_token, "prepare_seconds": chosen.prepare_seconds,
    }  # fmt: skip
    spec = _spec(place, sample, chosen.entries, question["tokenizer"], chosen.text_share)
    head = f"# The text of {place.run_yaml}. Every key is in docs/config.md.\n\n"
    with os_errors_as(StorageError, f"{place.out}: cannot be written", "Give another --out."):
        place.out.mkdir(parents=True, exist_ok=True)
        write_whole(place.data_yaml, head + _data_yaml(spec))
        write_whole(place.run_yaml, f"{_LINE}{json.dumps(record)}\n{body}")


def _plan_rows(place: Place, device: Device) -> Iterator[tuple[str, str]]:
    """Yield table rows about the run that the YAMLs describe."""
    config, record = load_run([place.run_yaml]), _record(place.run_yaml) or {}
    parameters, text = count_parameters(config.model, config.objective), record.get("text_tokens")
    per_token = f", {record['bytes_per_token']:.1f} bytes a token" if "bytes_per_token" in record else ""
    yield "model", f"{parameters.total:,} parameters, {config.model.vocab_size:,} entries in the vocabulary{per_token}"
    passes = f", {config.total_tokens / text:.2g} passes over about {tokens_text(text, 2)}" if text else ""
    drawn = load_typed(PrepareConfig, [place.data_yaml]).document_share
    passes += f", {drawn:.2g} of the documents" if drawn < 1 else ""
    hours = (record.get("question") or {}).get("hours")
    steps = sum(map(expected_steps, config.phases.values()))
    yield "training", f"{tokens_text(config.total_tokens)} tokens{passes}; about {_two_digits(steps)} steps"
    if text and config.total_tokens > 1.05 * MAX_PASSES * text:
        yield "", f"more than {MAX_PASSES} passes: repeats teach less and less. More text would be better"
    if hours and (speed := record.get("speed")) and config.total_tokens < 0.7 * 3600 * hours * speed:
        most = duration(config.total_tokens / speed)
        asked = f"{hours:g} hour{'' if hours == 1 else 's'}"
        yield "", f"the text is enough for {most} of {asked}; more of it would make a better model"
    if (expected := _expected(place)) is not None:
        yield "loss", f"held out {expected}; unigram {record['unigram_loss']:.2f}"
    if device.gpus:
        plan = make_plan(config, device.gpus)
        rows = answer(plan, device.kind, [device.kind], {}).rows
        yield from [(row[0], row[1]) for row in rows if row[0] in _OF_PLAN]
    elif record.get("speed"):
        speed = record["speed"]
        took = f"{duration(config.total_tokens / speed)} of training at {speed:,.0f} tokens/s"
        precision = " in bf16" if config.compute.precision == "bf16" else ""
        before = duration(60 + record.get("prepare_seconds", 0.0))
        yield (
            "takes",
            f"{took}, measured on these {device.label}{precision}; {before} more, longer if they have other work",
        )
    else:
        yield "takes", "unknown: the speed of this machine could not be measured"
    yield "writes", f"{place.data_yaml}, {place.run_yaml}, {place.dataset}, {place.run}"


def _expected(place: Place) -> Expected | None:
    """Return the held-out loss that the plan predicts; None if the loss rule does not apply to the run."""
    config, record = load_run([place.run_yaml]), _record(place.run_yaml) or {}
    text, unigram = record.get("text_tokens"), record.get("unigram_loss")
    rule = rule_of(Clock.of(config), config.optim.name, from_scratch=config.from_scratch)
    if rule is None or not (text and unigram):
        return None
    held_out = load_typed(PrepareConfig, [place.data_yaml]).validation_share
    return rule.expect(
        count_parameters(config.model, config.objective).active,
        config.total_tokens,
        unigram_loss=unigram,
        unique_tokens=text,
        batch_tokens=max(phase.batch_rows * phase.row_tokens for phase in config.phases.values()),
        held_out_tokens=text * held_out / (1 - held_out),
    )


def _lateness(place: Place) -> str | None:
    """Return a warning once training is clearly slower than planned; None before, or after too few steps."""
    speed, entries = (_record(place.run_yaml) or {}).get("speed"), []
    with suppress(OSError):
        entries = last_entries(place.metrics, held_out=False)
    keys = ("seconds", "tokens", "seconds_left")
    steps = [each for each in entries if all(number(each.get(key)) is not None for key in keys)]
    if not speed or len(steps) < _STEPS_OF_SPEED or sum(each["seconds"] for each in steps) < _SECONDS_OF_SPEED:
        return None
    total, last = load_run([place.run_yaml]).total_tokens, steps[-1]
    planned = max(0.0, total - last["tokens"]) / speed
    if last["seconds_left"] < _LATE * planned:
        return None
    return (
        f"training is slower than planned: {duration(last['seconds_left'])} are left, and would be {duration(planned)} "
        f"at the plan's {speed:,.0f} tokens/s. It is not cut short. If this machine has other work, end that; or stop "
        "this (Ctrl-C), and the same command with another --out makes a new plan at the present speed."
    )


_STEPS_OF_SPEED, _SECONDS_OF_SPEED = 20, 10.0  # minimum of last steps and seconds that the speed is measured on
_LATE = 1.3  # warn above this factor over the planned remaining time
_OF_PLAN = ("takes", "memory", "disk", "note")


def _two_digits(number: float) -> str:
    digits = 2 - len(str(int(number)))
    return f"{round(number, min(0, digits)):,.0f}"


def _ask() -> None:
    """Ask at the terminal; raise ConfigError without a terminal, StoppedEarly unless the answer is yes."""
    if not sys.stdin.isatty():
        raise ConfigError("pretrain: there is no terminal to confirm at. Add --yes, or --dry-run for the plan only.")
    if input("\ncontinue? [y/N] ").strip().lower() not in ("y", "yes"):
        raise StoppedEarly("nothing was run; the same command asks again.")


def _run(
    stages: Sequence[Stage], config: RunConfig, asked: str, further: Sequence[str], place: Place | None = None
) -> int:
    """Run the stages, then print the outcome, a text to ask the model and further verbs; returns the exit code."""
    began = time.monotonic()
    code = run_stages(stages)
    if code == 0:
        print(f"\nDone.\n{table(list(_outcome(config, time.monotonic() - began, place)), indent=2)}\n\nNext:")
        print(f"  open {config.folder}/report.html in a browser")
        print(*(f"  {TYPED} {words}" for words in [f'fill {config.folder}/hf "{asked}"', *further]), sep="\n")
    return code


def _outcome(config: RunConfig, seconds: float, place: Place | None) -> Iterator[tuple[str, str]]:
    """Yield table rows about a finished run."""
    entries, _ = read_lines(Path(config.folder) / "metrics.jsonl")
    steps = [entry for entry in entries if entry.get("kind") == "step"]
    last_loss = statistics.mean(step["loss"] for step in steps[-20:])
    yield "tokens trained on", f"{steps[-1]['tokens']:,} in {steps[-1]['step']} steps"
    yield "training loss", f"{steps[0]['loss']:.2f} -> {last_loss:.2f} ({config.objective.summary})"
    if validations := [entry for entry in entries if entry.get("kind") == "validation"]:
        last = validations[-1]
        gain = last["unigram_loss"] - last["loss"]
        expected = None if place is None else _expected(place)
        prediction = "" if expected is None else f"; {expected}"
        yield "held-out loss", f"{last['loss']:.2f} nats, unigram {last['unigram_loss']:.2f}{prediction}"
        yield "better by" if gain >= 0 else "worse by", f"{abs(gain):.2f} nats"
        yield "held-out accuracy", f"{last['accuracy']:.1%}, unigram {last['unigram_accuracy']:.1%}"
    yield "speed", f"{statistics.median(step['tokens_per_second'] for step in steps):,.0f} tokens/s"
    yield "this call took", duration(seconds)
    yield "model", f"{config.folder}/hf  (AutoModelForMaskedLM.from_pretrained)"
    yield "metrics", f"{config.folder}/metrics.jsonl"


if __name__ == "__main__":
    sys.exit(main())
