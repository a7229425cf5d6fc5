"""`pretrain`: a user with a folder of text and one command gets a model, or learns how to correct the command.

Bad input is refused within a second, before torch is imported; an interrupted command continues when repeated.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import launch.budget
import launch.pretrain
from data_prep.sample import MIN_BYTES, look_at_text, size_text
from launch.budget import Chooser, Device, Speed, choose
from launch.run_stages import Stage, run_stages
from modernbert_train.__main__ import main
from modernbert_train.config.check import check
from modernbert_train.config.load import load_run, load_typed
from modernbert_train.config.tools.prepare import PrepareConfig, prepare_problems
from modernbert_train.core.installed import YAMLS
from modernbert_train.distributed.bf16 import cpu_has_bf16
from modernbert_train.errors import ConfigError
from modernbert_train.plan.recipe import SIZES
from tests.support.corpora import prose, write
from tests.support.jobs import environment, losses, wait_for_steps
from tests.support.make_shards import VOCAB_SIZE, make_texts, make_tokenizer
from tests.support.runs import records
from tests.support.waiting import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with 60 texts of 7 kB in texts/; each size of model trains 20,000 tokens a second."""
    for number in range(60):
        write(tmp_path, f"texts/{number}.txt", prose(7_000, number))
    monkeypatch.chdir(tmp_path)
    predicted = launch.budget._speeds

    def speeds(chooser: Chooser, device: Device, names: list[str]) -> AbstractContextManager[Speed]:
        return predicted(chooser, device, names) if device.gpus else nullcontext(lambda size: 20_000.0)

    monkeypatch.setattr(launch.budget, "_speeds", speeds)
    monkeypatch.setattr(launch.pretrain, "run_stages", lambda stages: 0)
    return tmp_path


def pretrain(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    found = launch.pretrain.main(words)
    said = capsys.readouterr()
    assert found == code, said.err or said.out
    return said.err if code else said.out


@pytest.mark.runs
def test_a_dry_run_writes_yamls_that_the_verbs_accept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = pretrain(capsys, "texts", "--size", "tiny", "--dry-run")
    assert "60 .txt" in said and "20,000 tokens/s" in said and "Nothing was run" in said
    assert re.search(r"vocabulary, \d\.\d bytes a token\n", said)
    assert re.search(r"loss +held out \d\.\d\d expected, \d\.\d\d to \d\.\d\d.*; unigram \d\.\d\d", said)
    spec = load_typed(PrepareConfig, ["pretrained/texts/data.yaml"])
    run = load_run(["pretrained/texts/run.yaml"])
    assert not prepare_problems(spec) and spec.tokenizer.vocab_size == run.model.vocab_size
    assert spec.validation_share == 0.1  # 6 of 60 documents: 3 would be too few
    check(run)
    assert run.data.train == f"{spec.out}/train" and run.folder == "pretrained/texts/runs/texts"
    assert run.compute.precision == ("bf16" if cpu_has_bf16() else "auto"), "not half as fast as this processor can"


@pytest.mark.runs
def test_a_tokenizer_that_exists_keeps_its_ids(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user who keeps another model's vocabulary must not silently get a new one."""
    make_tokenizer(folder / "theirs")
    said = pretrain(capsys, "texts", "--size", "tiny", "--tokenizer", "theirs", "--dry-run")
    spec, run = load_typed(PrepareConfig, ["pretrained/texts/data.yaml"]), load_run(["pretrained/texts/run.yaml"])
    assert (spec.tokenizer.path, spec.tokenizer.extend) == ("theirs", True) and not prepare_problems(spec)
    assert run.model.vocab_size == VOCAB_SIZE and f"{VOCAB_SIZE} entries" in said
    assert f"vocab_size: {VOCAB_SIZE} # of theirs" in Path("pretrained/texts/run.yaml").read_text(encoding="utf-8")
    missing = pretrain(capsys, "texts", "--size", "tiny", "--tokenizer", "none", "--out", "other", "--dry-run", code=65)
    assert "tokenizer.path=none" in missing


@pytest.mark.runs
def test_fasta_is_read_as_records_and_needs_a_tokenizer_of_letters(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, a file of proteins would be one document, and its tokenizer would join letters at random."""
    draw = random.Random(5)
    records = (f">p{number}\n{''.join(draw.choices('ACDEFGHIKLMNPQRSTVWY', k=400))}\n" for number in range(300))
    write(folder, "proteins/a.fasta", "".join(records))
    refused = pretrain(capsys, "proteins", "--size", "tiny", code=78)
    assert "proteins: FASTA, whose letters are the tokens. Make a tokenizer of them, `modernbert-train" in refused
    assert main(["tokenizer", "letters", "letters", "--alphabet", "protein"]) == 0
    said = pretrain(capsys, "proteins", "--size", "tiny", "--tokenizer", "letters", "--dry-run")
    assert "about 300 documents" in said and "1.0 bytes a token" in said
    (source,) = load_typed(PrepareConfig, ["pretrained/proteins/data.yaml"]).sources.values()
    assert source.kind == "fasta" and load_run(["pretrained/proteins/run.yaml"]).model.vocab_size == 64


@pytest.mark.runs
def test_a_large_packed_text_is_measured_and_only_what_the_run_reads_is_prepared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formerly 351 of 503 MB were counted, and all of it was tokenised for a run that read a sixteenth of it."""
    pieces, draw = [prose(5_000, number) for number in range(60)], random.Random(0)
    rows = [f"{number} " + " ".join(draw.sample(pieces, 10)) for number in range(1_000)]
    lines = "\n".join(json.dumps({"id": number, "text": text}) for number, text in enumerate(rows))
    (folder / "large").mkdir()
    with gzip.open(folder / "large/a.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(lines.encode())
    size = sum(map(len, rows)) / 1e6
    said = pretrain(capsys, "large", "--size", "tiny", "--tokens", "1M", "--dry-run")
    told = re.search(r"text +([\d.]+) MB in 1 \.jsonl\.gz of .*; about ([\d,]+) documents", said)
    assert told is not None, said
    assert float(told[1]) == pytest.approx(size, rel=0.1)
    assert float(told[2].replace(",", "")) == pytest.approx(1_000, rel=0.1)
    share = load_typed(PrepareConfig, ["pretrained/large/data.yaml"]).document_share
    assert 20 / size < share < 0.6 and f"{share:.2g} of the documents" in said
    assert re.search(r"takes .* of training at 20,000 tokens/s, .* more", said)


@pytest.mark.runs
def test_names_that_yaml_would_misread_are_quoted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "texts").rename(folder / "2024: texts")
    pretrain(capsys, "2024: texts", "--size", "tiny", "--dry-run")
    pretrain(capsys, "2024: texts", "--size", "tiny", "--dry-run", "--name", "2024", "--out", "my #1")
    run, spec = load_run(["my #1/run.yaml"]), load_typed(PrepareConfig, ["my #1/data.yaml"])
    assert run.name == "2024" and run.data.train == "my #1/dataset/train"
    assert [source.path for source in spec.sources.values()] == ["2024: texts"]


@pytest.mark.runs
def test_hours_say_how_many_tokens_there_are_time_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20,000 tokens/s for 0.03 hours less 90 s, nine tenths of it: 324,000 tokens."""
    pretrain(capsys, "texts", "--hours", "0.03", "--dry-run")
    assert load_run(["pretrained/texts/run.yaml"]).total_tokens == pytest.approx(324_000, abs=2_000)
    said = pretrain(capsys, "texts", "--hours", "50", "--dry-run")  # nothing has run yet, so the plan may change
    assert "the text is enough for" in said and "of 50 hours; more" in said and "4 passes" in said
    assert "of 1 hour; more" in pretrain(capsys, "texts", "--hours", "1", "--dry-run")
    said = pretrain(capsys, "texts", "--hours", "0.001", "--dry-run", code=78)
    assert "Give at least --hours 0.03" in said
    pretrain(capsys, "texts", "--hours", "0.03", "--dry-run")


@pytest.mark.runs
def test_a_machine_that_becomes_slower_is_reported_early_and_the_loss_is_set_beside_what_was_expected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve minutes were predicted and twenty-six taken, without a warning."""
    pretrain(capsys, "texts", "--hours", "0.03", "--dry-run")
    place = launch.pretrain.Place(Path("pretrained/texts"), "texts")
    place.run.mkdir(parents=True)

    def steps(seconds_left: float) -> str | None:
        line = {"kind": "step", "tokens": 24_000, "seconds": 1.0, "loss": 5.0, "seconds_left": seconds_left}
        (place.run / "metrics.jsonl").write_text(f"{json.dumps(line)}\n" * 30)
        return launch.pretrain._lateness(place)

    assert launch.pretrain._lateness(place) is None and steps(16.0) is None
    said = steps(45.0)  # 300,000 tokens are left, 15 s at 20,000 a second
    assert "45 s are left, and would be 15 s at the plan's 20,000 tokens/s. It is not cut short." in said
    held_out = {"kind": "validation", "loss": 4.6, "unigram_loss": 5.0, "accuracy": 0.1, "unigram_accuracy": 0.05}
    step = {"kind": "step", "step": 1, "tokens": 24_000, "loss": 5.0, "tokens_per_second": 9.0}
    (place.run / "metrics.jsonl").write_text(f"{json.dumps(step)}\n{json.dumps(held_out)}\n")
    said = dict(launch.pretrain._outcome(load_run([place.run_yaml]), 60.0, place))["held-out loss"]
    assert re.match(r"4\.60 nats, unigram 5\.00; [\d.]+ expected, [\d.]+ to [\d.]+", said), said


@pytest.mark.runs
def test_messages_about_a_running_command_appear_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.run_stages, "_WATCH_SECONDS", 0.01)
    words = iter([None, "slow", "slow"])
    stage = Stage("a sleep", ["-c", "import time; time.sleep(1)"], watch=lambda: next(words))
    assert run_stages([stage]) == 0
    assert capsys.readouterr().err == "warning: slow\n"


@pytest.mark.runs
def test_nobody_is_asked_where_nobody_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Add --yes" in pretrain(capsys, "texts", "--size", "tiny", code=78)


@pytest.mark.runs
def test_yamls_are_kept_once_they_were_changed_or_work_was_done(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ("texts", "--size", "tiny", "--dry-run")
    pretrain(capsys, *tiny)
    run = Path("pretrained/texts/run.yaml")
    run.write_text(run.read_text().replace("lr: 4e-3", "lr: 1e-3"))
    pretrain(capsys, *tiny)
    assert load_run([run]).optim.lr == 1e-3
    assert "changed by hand" in pretrain(capsys, "texts", "--size", "quickstart", "--dry-run", code=78)
    Path("pretrained/texts/dataset").mkdir()
    said = pretrain(capsys, "texts", "--size", "quickstart", "--dry-run", code=78)
    assert "made with --size tiny" in said and "another --out" in said
    write(folder, "texts/new.txt", prose(5_000))
    said = pretrain(capsys, *tiny, code=78)
    assert "made of other text" in said and "another --name" in said
    pretrain(capsys, *tiny, "--name", "second")
    write(folder, "mine/run.yaml", "name: mine\n")
    assert "did not write" in pretrain(capsys, *tiny, "--out", "mine", code=78)


def test_what_is_wrong_with_text_is_reported_with_its_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "empty/a.png", bytes(range(256)))
    assert "no text; not read: 1 .png" in pretrain(capsys, "empty", "--size", "tiny", code=65)
    assert "lies in ." in pretrain(capsys, ".", "--size", "tiny", code=78)
    write(folder, "little/a.txt", prose(2_000))
    said = pretrain(capsys, "little", "--size", "tiny", code=65)
    assert "2 kB of text in 1 .txt of 2 kB" in said and size_text(MIN_BYTES) in said
    write(folder, "rows/a.jsonl", '{"words": "a text of two words"}\n' * 9)
    assert "no field 'text' among 'words'" in pretrain(capsys, "rows", "--size", "tiny", code=65)
    assert "no such file or folder" in pretrain(capsys, "nowhere", "--size", "tiny", code=65)
    write(folder, "one/a.txt", prose(200_000))
    assert "1 document in 1 .txt" in pretrain(capsys, "one", "--size", "tiny", code=65)
    for number in range(40):
        write(folder, f"mixed/{number}.txt", prose(7_000, number) if number < 24 else bytes(range(1, 256)) * 40)
    assert "not_utf8" in pretrain(capsys, "mixed", "--size", "tiny", code=65)


@pytest.mark.runs
def test_a_few_damaged_files_and_several_languages_are_reported_and_trained_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "texts/broken.txt", bytes(range(1, 256)) * 40)
    for number in range(15):
        write(folder, f"texts/ru{number}.txt", "Модель читает строки и учится. " * 200 + str(number))
        write(folder, f"texts/el{number}.txt", "Το μοντέλο διαβάζει. " * 200 + str(number))  # noqa: RUF001
    said = pretrain(capsys, "texts", "--size", "tiny", "--dry-run")
    assert "not_utf8 1" in said and "Cyrillic" in said and "Greek" in said and "one tokenizer and one model" in said
    assert load_typed(PrepareConfig, ["pretrained/texts/data.yaml"]).max_left_out > 1 / 91


@pytest.mark.runs
def test_a_size_that_does_not_fit_names_the_largest_that_does(folder: Path) -> None:
    """A model must fit `plan`'s memory of the GPU; a 4090 has 25 GB."""
    sample = look_at_text(["texts"])
    (folder / "large.yaml").write_text(
        f"include: [{YAMLS / SIZES['1b'].file}]\n"
        "model: {hidden_size: 8192, num_heads: 128, intermediate_size: 16384}\n"
    )
    large = replace(SIZES["1b"], file=str(folder / "large.yaml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "1b", large)
        with pytest.raises(ConfigError, match=r"--size 1b: does not fit the memory of 1 x RTX 4090.*--size \w+"):
            choose(sample, Device(1, "rtx4090"), None, "1b", None)
    chosen = choose(sample, Device(8, "h100"), 1.0, None, None)
    assert chosen.speed is not None and chosen.speed > 1e5 and chosen.tokens <= 4.1 * chosen.text_tokens
    assert chosen.tokens >= 0.4 * chosen.size.parameters(chosen.entries)  # never a billion parameters for 100 k tokens


@pytest.mark.runs
def test_bad_input_is_refused_without_torch(tmp_path: Path) -> None:
    write(tmp_path, "little/a.txt", prose(2_000))
    code = (
        "import sys, launch.pretrain; code = launch.pretrain.main(['little', '--size', 'tiny']);"
        "assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 65 and "torch" not in done.stderr, done.stderr


@pytest.mark.slow
def test_from_a_folder_of_text_to_a_model_through_a_stop_and_a_kill(tmp_path: Path) -> None:
    """The command as typed, ended by SIGTERM during training, typed again, ended by SIGKILL, and typed again."""
    for number, text in enumerate(make_texts(300)):
        write(tmp_path, f"texts/{number:03}.txt", text)
    command = [sys.executable, "-m", "modernbert_train", "pretrain", "texts"]
    command += ["--size", "tiny", "--tokens", "60k", "--yes"]
    run = tmp_path / "pretrained/texts/runs/texts"
    before = 0
    with (tmp_path / "log").open("w") as log:
        for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
            process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=subprocess.STDOUT)
            wait_for_steps(run, before + 3, [process], 300)
            process.send_signal(number)
            assert process.wait(300) == code, (tmp_path / "log").read_text()
            until(lambda: not _at_work(tmp_path), 250)  # the killed command's training saves and ends by itself
            before = len(losses(run))
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "already complete" in done.stdout and "Done." in done.stdout
    steps = records(run)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)) and len(steps) > before
    assert (run / "report.html").is_file() and (run / "hf/README.md").is_file()
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    model = AutoModelForMaskedLM.from_pretrained(run / "hf")
    logits = model(**tokenizer("return [MASK]", return_tensors="pt")).logits
    assert logits.shape[-1] == len(tokenizer) == load_run([run.parents[1] / "run.yaml"]).model.vocab_size
    record = json.loads((run.parents[1] / "run.yaml").read_text().splitlines()[0].removeprefix("# pretrain: "))
    assert record["question"]["tokens"] == 60_000


def _at_work(folder: Path) -> bool:
    """Return True if a process has its working directory there."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                return True
    return False


@pytest.mark.runs
def test_a_stage_that_is_killed_is_named_with_what_ended_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A child killed by the system for its memory leaves no message."""
    killed = Stage("training", ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    assert run_stages([killed, Stage("never begun", ["-c", "1"])]) == 70
    said = capsys.readouterr()
    assert "error: training: the process is gone: it was ended by SIGKILL" in said.err and "dmesg" in said.err
    assert "never begun" not in said.out
