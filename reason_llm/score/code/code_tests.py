"""Does the program in a completion pass the tests of its problem? Programs run in the sandbox only.

``code_tests`` is 1 if all tests pass, else 0, and stops at the first that does not;
``code_tests_fraction`` is the part that passes. A whole program passes a test if it ends with exit
code 0 within its limits and prints what is expected. Expected outputs never enter the process of
the program, whichever the form of the tests (``jail/function_harness.py`` tells how).

Not here: problems with many right outputs, interactive ones, languages other than Python.
"""

import json
import math
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from reason_llm.data import (
    AssertTests,
    CallTests,
    ProgramTests,
    Tests,
    read_tests,
    same_output,
    same_value,
)
from reason_llm.errors import DataError
from reason_llm.files import read_text
from reason_llm.rollout import Completion, Prompt
from reason_llm.score.code import jail
from reason_llm.score.code.sandbox import Finished, Limits, Mode, Sandbox

TIMEOUT_SECONDS = 6.0
"""CPU time of one test; three times that in wall time, for machines that are busy."""
MAX_TIMEOUTS = 3
"""Tests of one completion that may run into a limit; the rest then fail unrun."""
MAX_CALLS_TIMEOUTS = 10
"""All calls or assertions of one completion together may take this many times the time of one."""

_PYTHON = {"python", "py", "python3", "py3"}
_HARNESS = "from jail.function_harness import main; main()"
_HARNESS_FILES = {
    f"jail/{name}.py": read_text(Path(jail.__file__).with_name(f"{name}.py"))
    for name in (
        *("function_harness", "assert_source", "assert_paths", "array_checks", "like_pytest"),
        *("program_proxy", "program_server", "values"),
    )
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program fared."""

    passed: int
    total: int
    problem: str | None
    """What went wrong first, in one line; None if every test passed."""

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


def run_tests(
    sandbox: Sandbox,
    tests: Tests,
    program: str,
    stop_early: bool,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Outcome:
    """Run the tests on a program, one after another.

    Args:
        stop_early: end at the first test that fails; those after it count as failed.

    Raises:
        SandboxError: the sandbox itself failed.
    """
    if isinstance(tests, ProgramTests):
        return _run_program_tests(sandbox, tests, program, stop_early, timeout_seconds)
    if isinstance(tests, CallTests):
        return _run_call_tests(sandbox, tests, program, stop_early, timeout_seconds)
    return _run_assert_tests(sandbox, tests, program, stop_early, timeout_seconds)


def _run_program_tests(
    sandbox: Sandbox, tests: ProgramTests, program: str, stop_early: bool, timeout_seconds: float
) -> Outcome:
    limits = Limits(cpu_seconds=math.ceil(timeout_seconds), wall_seconds=3 * timeout_seconds)
    passed, num_timeouts, problem = 0, 0, None
    for given, wanted in zip(tests.inputs, tests.outputs, strict=True):
        ended = sandbox.run(program, stdin=given, limits=limits)
        is_right = ended.status == 0 and same_output(
            wanted, ended.stdout, tests.tolerance, tests.ignore_case
        )
        passed += is_right
        num_timeouts += ended.limit is not None
        if not is_right:
            problem = problem or _problem(ended)
            if stop_early or num_timeouts == MAX_TIMEOUTS:
                break
    return Outcome(passed, len(tests.inputs), problem)


def _run_call_tests(
    sandbox: Sandbox, tests: CallTests, program: str, stop_early: bool, timeout_seconds: float
) -> Outcome:
    """All calls in one process. One that ends the process fails; those after it get another."""
    passed, first, problem = 0, 0, None
    for _ in range(MAX_TIMEOUTS):
        request = {"calls": [tests.function, tests.inputs[first:]]}
        ended, lines = _run_harness(sandbox, request, program, stop_early, timeout_seconds)
        for line, wanted in zip(lines, tests.outputs[first:], strict=False):
            is_right = "value" in line and same_value(wanted, line["value"], tests.tolerance)
            passed += is_right
            if not is_right:
                problem = problem or str(line.get("error", "a wrong result"))
        first += max(1, len(lines))
        if passed < first:
            problem = problem or _problem(ended)
        if first >= len(tests.inputs) or ended.limit is not None or (problem and stop_early):
            break
    return Outcome(passed, len(tests.inputs), problem)


def _run_assert_tests(
    sandbox: Sandbox, tests: AssertTests, program: str, stop_early: bool, timeout_seconds: float
) -> Outcome:
    request = {"asserts": tests.source, "entry_point": tests.entry_point}
    ended, lines = _run_harness(sandbox, request, program, stop_early, timeout_seconds)
    if len(lines) != 1 or "total" not in lines[0]:
        return Outcome(0, 1, str(lines[0].get("error")) if lines else _problem(ended))
    passed, total, problem = (lines[0][name] for name in ("passed", "total", "problem"))
    if problem is None and passed < total:
        problem = "an assertion fails"
    # Tests without any assertion pass by running to their end.
    return Outcome(passed, total, problem) if total else Outcome(1, 1, None)


def _run_harness(
    sandbox: Sandbox,
    request: dict[str, Any],
    program: str,
    stop_early: bool,
    timeout_seconds: float,
) -> tuple[Finished, list[dict[str, Any]]]:
    together = timeout_seconds * MAX_CALLS_TIMEOUTS
    limits = Limits(cpu_seconds=math.ceil(together), wall_seconds=together)
    request |= {"timeout_seconds": timeout_seconds, "stop_early": stop_early}
    ended = sandbox.run(
        _HARNESS,
        stdin=json.dumps(request),
        files={**_HARNESS_FILES, "solution.py": program},
        limits=limits,
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


class CodeTests:
    """The code rewards and the sandbox that they run in; both may be called from many threads.

    Raises:
        ConfigError: isolation cannot be had and ``mode`` demands it.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        timeout_seconds: float = TIMEOUT_SECONDS,
        num_workers: int | None = None,
    ) -> None:
        self.sandbox = Sandbox(mode, num_workers)
        self.timeout_seconds = timeout_seconds

    def all_pass(self, prompt: Prompt, completion: Completion) -> float:
        """1 if the last code block passes every test of the prompt, else 0.

        Raises:
            DataError: the prompt's answer holds no tests.
        """
        outcome = self.outcome(prompt, completion, stop_early=True)
        return float(outcome is not None and outcome.problem is None)

    def fraction(self, prompt: Prompt, completion: Completion) -> float:
        """The part of the prompt's tests that the last code block passes.

        Raises:
            DataError: the prompt's answer holds no tests.
        """
        outcome = self.outcome(prompt, completion, stop_early=False)
        return 0.0 if outcome is None else outcome.fraction

    def outcome(self, prompt: Prompt, completion: Completion, stop_early: bool) -> Outcome | None:
        """How the last code block fares; None without one.

        Raises:
            DataError: the prompt's answer holds no tests.
        """
        try:
            tests = read_tests(prompt.answer)
        except ValueError as error:
            raise DataError(f"{prompt.id}: {error}; fix the row's tests") from error
        program = last_code_block(completion.text)
        if program is None:
            return None
        return run_tests(self.sandbox, tests, program, stop_early, self.timeout_seconds)

    def outcomes(
        self, rollouts: Sequence[tuple[Prompt, Completion]], stop_early: bool
    ) -> list[Outcome | None]:
        """The same for many at once, as many at a time as there are workers."""
        with ThreadPoolExecutor(self.sandbox.num_workers) as threads:
            return list(
                threads.map(lambda pair: self.outcome(pair[0], pair[1], stop_early), rollouts)
            )

    def close(self) -> None:
        """End the sandbox."""
        self.sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
