"""Completion in a shell. If this breaks, Tab offers what the program then refuses, or prints errors into the prompt."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.cli.completion import SHELLS, script
from modernbert_train.cli.verbs import VERBS

# what is typed -> what must be offered, and what must not
CASES = [
    ("modernbert-train ", {verb.name for verb in VERBS}, {"checkpoint"}),
    ("modernbert-train che", {"check"}, {"train"}),
    ("modernbert-train check --r", {"--ranks"}, {"--help"}),
    ("modernbert-train gliner ", {"train", "evaluate", "predict"}, {"my.yaml"}),
    ("modernbert-train gliner predict --", {"--labels"}, {"--model"}),
    ("modernbert-train init recipe modernbert-b", {"modernbert-base"}, set()),
    ("modernbert-train grow --mode ", {"fitted", "paper"}, {"my.yaml"}),
    ("modernbert-train launch --on sl", {"slurm"}, set()),
    ("modernbert-train train m", {"my.yaml", "model.hidden_size="}, {"my.txt"}),
    ("modernbert-train train my.yaml optim.l", {"optim.lr="}, {"optim.betas="}),
    ("modernbert-train train my.yaml --fresh optim.l", {"optim.lr="}, set()),
    ("modernbert-train train my.yaml phases.", {"phases.first.tokens=", "phases.second.tokens="},
     {"phases.tokens.tokens=", "phases.stable.tokens="}),
    ("modernbert-train train phases.st", {"phases.stable.tokens="}, set()),
    ("modernbert-train train my.yaml evals.", {"evals.tone.every_tokens="}, {"evals.first.every_tokens="}),
    ("modernbert-train finetune --model runs/mine ss", {"sst2"}, set()),
    ("modernbert-train finetune rte pool", {"pooling="}, set()),
    ("modernbert-train prepare my.yaml tokenizer.v", {"tokenizer.vocab_size="}, set()),
]  # fmt: skip
VALUES = [  # the value of a key; bash is offered the value alone, since it breaks words at =
    ("optim.name=", "mu", "muon"),
    ("compute.compile=", "", "true"),
    ("phases.first.schedule.decay=", "one", "one_minus_sqrt"),
    ("data.train=", "f", "folder/"),
]
BASH = r"""
source "$1"
COMP_WORDBREAKS=$' \t\n"\'><=;|&(:'
while IFS= read -r COMP_LINE; do
  COMP_POINT=${#COMP_LINE}
  _modernbert_train_bash
  printf '%s\n' "${COMPREPLY[@]}" "--end--"
done
"""
ZSH = r"""
compdef() { }
compadd() { local name=${@[-1]}; print -rl -- ${(P)name} }
source "$1"
while IFS= read -r line; do
  words=(${(z)line}); [[ $line == *' ' ]] && words+=('')
  CURRENT=${#words}
  _modernbert_train_zsh | grep -F -- "${words[CURRENT]}"
  print -r -- --end--
done
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    text = "phases:\n  first: {tokens: 3}\n  # a word\n  second:\n    tokens: 4\n\nevals:\n  tone: {name: probe}\n"
    (folder / "my.yaml").write_text(text)
    (folder / "my.txt").write_text("no configuration")
    (folder / "folder").mkdir()
    for shell in SHELLS:
        (folder / f"completion.{shell}").write_text(script(shell))
    return folder


def offered(shell: str, home: Path, lines: list[str]) -> list[set[str]]:
    """For each line what the shell offers, in one process; nothing may be said on stderr."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (home / f"drive.{shell}").write_text(BASH if shell == "bash" else ZSH)
    plain = ["--norc"] if shell == "bash" else ["-f"]
    done = subprocess.run(
        [shell, *plain, f"drive.{shell}", f"completion.{shell}"],
        cwd=home, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    parts = done.stdout.split("--end--\n")[:-1]
    return [{line.strip() for line in part.splitlines() if line.strip()} for part in parts]


@pytest.mark.runs
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers_what_fits(shell: str, home: Path) -> None:
    found = offered(shell, home, [line for line, _, _ in CASES])
    for (line, wanted, unwanted), words in zip(CASES, found, strict=True):
        assert wanted <= words and not unwanted & words, f"{line}: {words}"


@pytest.mark.runs
@pytest.mark.parametrize("shell", SHELLS)
def test_values_of_closed_choices_are_offered(shell: str, home: Path) -> None:
    found = offered(shell, home, [f"modernbert-train train my.yaml {key}{begun}" for key, begun, _ in VALUES])
    for (key, begun, value), words in zip(VALUES, found, strict=True):
        assert (value if shell == "bash" else f"{key}{value}") in words, f"{key}{begun}: {words}"


def test_every_verb_and_option_is_in_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """A verb without completion looks as if it did not exist."""
    assert main(["completion", "bash"]) == 0
    text = capsys.readouterr().out
    assert all(f"'options {verb.name}')" in text for verb in VERBS)
    assert "'keys run')" in text and "checkpoint.interval_seconds=" in text
