"""The questions of one tune: each candidate is found right or wrong, timed, and taken or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from modernbert_train.config.auto import MICROBATCH
from modernbert_train.errors import RunError
from modernbert_train.train.tune.candidates import Case, Question, Settings, label, numeric
from modernbert_train.train.tune.findings import Row
from modernbert_train.train.tune.journal import Journal
from modernbert_train.train.tune.pool import Commands, Pool, launch
from modernbert_train.train.tune.process import Failure
from modernbert_train.train.tune.search import halve, paired

TURN_SECONDS = 1.0  # that a candidate trains in a turn
LEAST_STEPS, MOST_STEPS = 2, 40  # of a turn
PARITY_SECONDS = 900.0
PARITY_TOKENS = 512  # of the batch that parity is held on, in whole rows
NEEDS = {"InvalidCxxCompiler": "a C++ compiler (on Debian and Ubuntu: apt install g++)."}  # by what torch raises
TODAY = "today's settings"
_FEW_TURNS = 4  # in the last comparison, where each turn is a process of its own


def _outcome(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """For the journal: what was found, or why nothing was."""
    try:
        return do()
    except Failure as failure:
        return {"error": failure.text, "full": failure.full}


@dataclass
class Tuning:
    """A tune under way.

    Attributes:
        case: what is tuned.
        journal: what was measured.
        folder: of the case.
        command: what starts a worker.
        pool: those that are there.
        say: prints a line.
        rows: of the table, so far.
        advice: for the user.
        first_seconds: of the first step of settings, by their label: compilation, if there is any.
    """

    case: Case
    journal: Journal
    folder: Path
    command: Commands
    pool: Pool
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    first_seconds: dict[str, float] = field(default_factory=dict)

    def fitting(self, settings: Settings) -> tuple[Settings, int]:
        """Today's settings, with the microbatch halved until it fits; and how many steps are a turn.

        Raises:
            RunError: not even one row fits, or they fail otherwise.
        """
        row_tokens = self.case.config.phases[self.case.phase].row_tokens
        while True:
            found = self.journal.once(["fits", settings], partial(self._start, settings))
            if "error" not in found:
                if not self.case.facts["on_gpu"]:
                    self.pool.room_for(found["peak_bytes"], self.case.facts["memory_bytes"])
                steps = math.ceil(TURN_SECONDS / max(1e-3, found["seconds"]))
                return settings, min(MOST_STEPS, max(LEAST_STEPS, steps))
            if not found["full"]:
                raise RunError(f"tune: the run cannot train with the settings that it has: {found['error']}")
            rows = settings[MICROBATCH] // row_tokens
            if rows == 1:
                raise RunError(
                    f"tune: not even one row of {row_tokens:,} tokens fits in memory: {found['error']}. Lower "
                    f"phases.{self.case.phase}.row_tokens, or set compute.activation_checkpointing=true."
                )
            smaller = settings | {MICROBATCH: rows // 2 * row_tokens}
            self.say(_line(self._row(TODAY, label(settings, smaller), "does not fit", found["error"])))
            if self.case.gives_microbatch:
                self.advice.append(
                    f"phases.{self.case.phase}.{MICROBATCH}={settings[MICROBATCH]} does not fit here: set "
                    f"{smaller[MICROBATCH]}, or leave the key out."
                )
            settings = smaller

    def ask(self, question: Question, now: Settings, steps: int) -> Settings:
        """The best settings, with what the answer to a question changes."""
        for option, reason in question.left_out:
            self.say(_line(self._row(question.title, label(option), "left out", reason)))
        options = [now | option for option in question.options if (now | option) != now]
        options = [now, *(option for option in options if self.case.cuts(option))]
        options = [option for option in options if self.is_right(question.title, option, now)]
        if len(options) < 2:
            return options[0] if options else now
        taken, timed = halve(
            len(options), self._visit(question.title, options), steps, together=self._together(options)
        )
        base = timed[0].rate
        for number, (option, each) in enumerate(zip(options, timed, strict=True)):
            if each.failure is not None:
                outcome, text = ("does not fit" if each.failure.full else "failed"), each.failure.text
                row = self._row(question.title, label(option, now), outcome, text)
            else:
                is_best = number == taken
                outcome = "taken" if is_best and not question.reported else "fastest" if is_best else "slower"
                row = self._row(question.title, label(option, now), outcome)
                row.tokens_per_second, row.steps = each.rate, len(each.rates)
                row.ratio = each.rate / base if base else None
                row.first_seconds = self.first_seconds[label(option)]
            self.say(_line(row))
        return now if taken is None else options[taken]

    def compare(self, today: Settings, found: Settings, steps: int) -> tuple[list[float], list[float]]:
        """Both in turns, at the end."""
        self.say(f"in turns: today's settings, and {label(found, today)}")
        options = [today, found]
        turns = {} if self._together(options) else {"turns": _FEW_TURNS}
        return paired(self._visit("today's settings and those found", options), steps, **turns)

    def _together(self, options: list[Settings]) -> bool:
        return len(options) <= self.pool.most

    def _visit(self, title: str, options: list[Settings]) -> Callable[[int, str, int], list[float]]:
        def visit(number: int, turn: str, steps: int) -> list[float]:
            found = self.journal.once(
                [title, turn, options[number], steps], lambda: self._steps(options[number], steps)
            )
            if "error" in found:
                raise Failure(found["error"], found["full"])
            name = label(options[number])
            self.first_seconds[name] = max(self.first_seconds.get(name, 0.0), found["first_seconds"])
            rates: list[float] = found["rates"]
            return rates

        return visit

    def _steps(self, settings: Settings, steps: int) -> dict[str, Any]:
        def take() -> dict[str, Any]:
            rates = self.pool.steps(settings, steps)
            return {"rates": rates, "first_seconds": self.pool.first_seconds[label(settings)]}

        return _outcome(take)

    def _start(self, settings: Settings) -> dict[str, Any]:
        return _outcome(lambda: dict(self.pool.start(settings)))

    def is_right(self, title: str, settings: Settings, now: Settings) -> bool:
        """Whether settings compute what the plain form does; a row for those that do not."""
        own = numeric(settings)
        if not own:
            return True
        found = self.journal.once(["parity", own], lambda: self._parity(settings))
        if not found["equal"]:
            row = self._row(title, label(settings, now), found["outcome"], found["text"])
            self.say(_line(row))
        return bool(found["equal"])

    def _parity(self, settings: Settings) -> dict[str, Any]:
        if self.case.facts["on_gpu"]:
            self.pool.close()  # which leaves the memory to it
        rows = max(1, PARITY_TOKENS // self.case.config.phases[self.case.phase].row_tokens)
        process = launch(self.case, self.folder, self.command, settings, rows=rows)
        try:
            found = process.ask(PARITY_SECONDS, do="parity")
        except Failure as failure:
            needs = [NEEDS[each] for each in NEEDS if each in failure.text]
            outcome = "does not fit" if failure.full else "failed"
            return {"equal": False, "outcome": outcome, "text": " Needs ".join([failure.text, *needs])}
        finally:
            process.close()
        return {"equal": found["equal"], "outcome": "wrong", "text": found["text"]}

    def _row(self, question: str, settings: str, outcome: str, text: str = "") -> Row:
        self.rows.append(Row(question, settings, outcome, text))
        return self.rows[-1]


def _line(row: Row) -> str:
    speed = "" if row.ratio is None else f" {row.tokens_per_second:,.0f} tokens/s, {row.ratio:.2f} x"
    first = "" if row.first_seconds is None else f", first step {row.first_seconds:.1f} s"
    return f"  {row.question}: {row.settings}: {row.outcome}{speed}{first}{f', {row.text}' if row.text else ''}"
