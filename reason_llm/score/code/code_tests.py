"""Runs the program of a completion on the tests of its problem. Programs run in the sandbox only,
and expected outputs never enter their process. A whole program passes a test if it ends with exit
code 0 within its limits and prints the expected output.
"""

import json
import math
import textwrap
from dataclasses import dataclass, replace
from typing import Any, Self

from reason_llm.score.code.cases import (
    AssertTests,
    CallTests,
    ProgramTests,
    read_tests,
    same_output,
    same_value,
)
from reason_llm.score.code.sandbox import Finished, Limits, Mode, Sandbox

TIMEOUT_SECONDS = 6.0  # CPU time of one test; three times that in wall time, on a busy machine
MAX_TIMEOUTS = 3
"""Tests of one completion that may run into a limit; the rest then fail unrun."""
MAX_CALLS_TIMEOUTS = 10
"""All calls or assertions of one completion together may take this many times the time of one."""

WRONG_RESULT = "a wrong result"
_PYTHON = {"python", "py", "python3", "py3"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program's tests."""

    passed: int
    total: int
    problem: str | None
    """The first failure in one line; None if every test passed."""

    @property
    def fraction(self) -> float:
        """The part of the tests that passed."""
        return self.passed / self.total


def last_code_block(text: str) -> str | None:
    """The last ``python`` block; without one, the last block that names no language; None without
    any. A block that is not closed ends with the text."""
    named: str | None = None
    unnamed: str | None = None
    language: str | None = None
    lines: list[str] = []
    for line in [*text.split("\n"), "```"]:
        mark = _fence(line)
        if mark is None or (language is not None and mark and mark not in _PYTHON):
            lines.append(line)
            continue
        if language in _PYTHON:
            named = textwrap.dedent("\n".join(lines))
        elif language == "":
            unnamed = textwrap.dedent("\n".join(lines))
        language = None if language is not None and not mark else mark
        lines = []
    return named if named is not None else unnamed


def _fence(line: str) -> str | None:
    """The language that a line with three backticks names, perhaps none; None for other lines."""
    line = line.strip()
    if not line.startswith("```"):
        return None
    words = line.lstrip("`").split()
    return words[0].lower() if words else ""


class CodeTests:
    """Runs tests in a separate sandbox; may be called from many threads. Closed on leaving the
    ``with``.

    Args:
        timeout_seconds: CPU time of one test.
        num_workers: programs at once; None: one per core.

    Raises:
        ConfigError: ``mode`` demands isolation, which is not available.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        timeout_seconds: float = TIMEOUT_SECONDS,
        num_workers: int | None = None,
    ) -> None:
        self.sandbox = Sandbox(mode, num_workers)
        self.timeout_seconds = timeout_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.sandbox.close()

    def outcome(self, tests: str, text: str, stop_early: bool = False) -> Outcome | None:
        """Run the last code block of a text; None without one.

        Args:
            tests: as ``read_tests`` takes them.
            stop_early: end at the first test that fails; those after it count as failed.

        Raises:
            ValueError: these are no tests. SandboxError: the sandbox itself failed.
        """
        read, program = read_tests(tests), last_code_block(text)
        if program is None:
            return None
        if isinstance(read, ProgramTests):
            return self._programs(read, program, stop_early)
        if isinstance(read, CallTests):
            outcome = self._calls(read, program, stop_early)
            if read.may_be_lists and outcome.problem == WRONG_RESULT:
                outputs = tuple([output] for output in read.outputs)
                other = self._calls(replace(read, outputs=outputs), program, stop_early)
                return max(outcome, other, key=lambda candidate: candidate.passed)
            return outcome
        return self._asserts(read, program, stop_early)

    def _programs(self, tests: ProgramTests, program: str, stop_early: bool) -> Outcome:
        seconds = self.timeout_seconds
        limits = Limits(cpu_seconds=math.ceil(seconds), wall_seconds=3 * seconds)
        passed, num_timeouts, problem = 0, 0, None
        for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
            ended = self.sandbox.run(program, stdin=stdin, limits=limits)
            is_right = ended.status == 0 and same_output(
                expected, ended.stdout, tests.tolerance, tests.ignore_case
            )
            passed += is_right
            num_timeouts += ended.limit is not None
            if not is_right:
                problem = problem or _problem(ended)
                if stop_early or num_timeouts == MAX_TIMEOUTS:
                    break
        return Outcome(passed, len(tests.inputs), problem)

    def _calls(self, tests: CallTests, program: str, stop_early: bool) -> Outcome:
        """All calls in one process. One that ends the process fails; those after it get another."""
        passed, first, problem = 0, 0, None
        for _ in range(MAX_TIMEOUTS):
            request = {"calls": [tests.function, tests.inputs[first:]]}
            ended, lines = self._run_harness(request, program, stop_early)
            for line, expected in zip(lines, tests.outputs[first:], strict=False):
                is_right = "value" in line and same_value(expected, line["value"], tests.tolerance)
                passed += is_right
                if not is_right:
                    problem = problem or str(line.get("error", WRONG_RESULT))
            first += max(1, len(lines))
            if passed < first:
                problem = problem or _problem(ended)
            if first >= len(tests.inputs) or ended.limit is not None or (problem and stop_early):
                break
        if passed < len(tests.inputs):  # also where a limit ended it between two right results
            problem = problem or _problem(ended)
        return Outcome(passed, len(tests.inputs), problem)

    def _asserts(self, tests: AssertTests, program: str, stop_early: bool) -> Outcome:
        request = {"asserts": tests.source, "entry_point": tests.entry_point}
        ended, lines = self._run_harness(request, program, stop_early)
        if len(lines) != 1 or "total" not in lines[0]:
            return Outcome(0, 1, str(lines[0].get("error")) if lines else _problem(ended))
        passed, total, problem = (lines[0][name] for name in ("passed", "total", "problem"))
        if problem is None and passed < total:
            problem = "an assertion fails"
        # Tests without any assertion pass by running to their end.
        return Outcome(passed, total, problem) if total else Outcome(1, 1, None)

    def _run_harness(
        self, request: dict[str, Any], program: str, stop_early: bool
    ) -> tuple[Finished, list[dict[str, Any]]]:
        """The tester's lines of JSON, from within the sandbox."""
        together = self.timeout_seconds * MAX_CALLS_TIMEOUTS
        ended = self.sandbox.run(
            program,
            stdin=json.dumps(
                {**request, "timeout_seconds": self.timeout_seconds, "stop_early": stop_early}
            ),
            limits=Limits(cpu_seconds=math.ceil(together), wall_seconds=together),
            is_tester=True,
        )
        return ended, [_parsed(line) for line in ended.stdout.split("\n")[:-1]]


def _parsed(line: str) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, lists in lists in …
        return {"error": str(error)}
    return message


def _problem(ended: Finished) -> str:
    if ended.limit is not None:
        return f"the {ended.limit} limit"
    if ended.status != 0:
        last = ended.stderr.strip().rpartition("\n")[2]
        return f"exit code {ended.status}: {last[:200]}"
    return "a wrong output"
