"""Right programs in odd dress, which are paid, and programs that look for pay without solving the
problem, which are not; programs that end within their limits.

``programs.jsonl`` has a row for each: its class and name, the tests, the program, whether it is
paid and ``counts``, the assertions or cases that pass and all of them. ``stop_early``: it is judged
as by ``code_tests``, which ends at the first failure. ``hasty``: it never ends, or is as slow, and
has little time.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from code_rewards import outcome
from reason_llm.score.code import CodeTests, Outcome
from reason_llm.score.code.jail.shared import Shared

Row = dict[str, Any]
ROWS: list[Row] = [
    json.loads(line) for line in Path(__file__).with_name("programs.jsonl").read_text().splitlines()
]
BEGIN = "def f(x):\n    if x == 1: return 1\n"
SOLVE_ONE = [row for row in ROWS if row["program"].startswith(BEGIN) and "[]" not in row["program"]]
"""The first case alone, of squares."""


def parameters(rows: list[Row]) -> list[Any]:
    return [
        pytest.param(
            row, id=f"{row['class']}: {row['name']}", marks=[pytest.mark.long] * ("long" in row)
        )
        for row in rows
    ]


@pytest.fixture(scope="module")
def hasty() -> Iterator[CodeTests]:
    """All calls of one program together have ten times 0.3 s; a machine under load has more."""
    with CodeTests("auto", timeout_seconds=0.3, num_workers=1) as code:
        yield code


@pytest.mark.parametrize("row", parameters(ROWS))
def test_right_programs_are_paid_and_no_others(code: CodeTests, hasty: CodeTests, row: Row) -> None:
    judge = hasty if "hasty" in row else code
    found = outcome(judge, row["tests"], row["program"], "stop_early" in row)
    assert (found.problem is None, found.passed == found.total) == (row["paid"], row["paid"])
    if "counts" in row:
        assert [found.passed, found.total] == row["counts"]


def test_the_table_is_large_and_has_no_row_twice() -> None:
    num_paid = sum(row["paid"] for row in ROWS)
    assert min(num_paid, len(ROWS) - num_paid) >= 140
    assert len({f"{row['tests']} {row['program']}" for row in ROWS}) == len(ROWS)


@pytest.mark.long
@pytest.mark.parametrize("row", parameters(SOLVE_ONE))
def test_the_same_tests_pay_a_right_program(code: CodeTests, row: Row) -> None:
    found = outcome(code, row["tests"], "def f(x): return x * x\n")
    assert (found.problem is None, found.passed == found.total > 0) == (True, True)


@pytest.mark.parametrize("row", parameters([r for r in ROWS if r["class"] == "any name"]))
def test_a_function_may_have_any_name(code: CodeTests, row: Row) -> None:
    wrong = row["program"].replace("return 6", "return 7 or 6").replace("36", "49")
    wrong = wrong.replace("else 3", "else 4")
    assert outcome(code, row["tests"], wrong, stop_early=True).problem is not None
    assert outcome(code, row["tests"], "pass").passed == 0


@pytest.mark.parametrize("number", [2, "1", True])
def test_a_side_gives_no_number_but_its_own(number: object) -> None:
    with pytest.raises(ValueError, match="no number"):
        Shared(0, list, list).take({"shared": [[number, "list", []]]})


LARGE = {
    "an integer": "def f(): return 10 ** 2_000_000",
    "an integer below the bound": "def f(): return (1 << 1_000_000) - 1",
    "many of them": "def f(): return [(1 << 1_000_000) - n for n in range(40)]",
    "a decimal": "from decimal import Decimal\ndef f(): return Decimal('1e999999')",
    "a forged fraction": "from fractions import Fraction\nclass F(Fraction): pass\n"
    "F.__name__ = 'Fraction'\nF.__module__ = 'fractions'\nF.__str__ = lambda s: '1e9999999'\n"
    "F.numerator = property(lambda s: 10 ** 2_000_000)\ndef f(): return F(3)",
    "a fraction of large parts": "from fractions import Fraction\n"
    "def f(): return Fraction(3 ** 600_000, 7 ** 300_000)",
    "equal hashes": "def f(): return {n * (2**61 - 1) for n in range(6000)}",
}  # fmt: skip
SHORT = ("a forged fraction",)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=name, marks=[] if name in SHORT else pytest.mark.long)
        for name, program in LARGE.items()
    ],
)
@pytest.mark.parametrize(
    "tests",
    [{"fn_name": "f", "inputs": [[]], "outputs": [3]}, {"test": "assert f() == 3\n"}],
    ids=["calls", "asserts"],
)
def test_what_is_large_is_ended_by_cpu_time(tests: Row, program: str) -> None:
    """It took up to 60 s, ten times the limit of a call; here the limit is 2 s of CPU time."""
    with CodeTests("auto", timeout_seconds=2, num_workers=1) as hasty:
        found = outcome(hasty, tests, program)
        assert found.passed < found.total
        assert found.problem not in (None, "the cpu limit")  # of the whole


def test_an_assertion_weighs_the_same_however_often_it_runs(code: CodeTests) -> None:
    tests = {"test": "assert add(1, 2) == 3\nfor n in many():\n    assert n > 0\n"}
    found = outcome(code, tests, "def add(a, b): return 0\ndef many(): return [1] * 9999\n")
    assert found.fraction == 0.5
    half = outcome(code, tests, "def add(a, b): return 3\ndef many(): return [1, 0, 1, 0]\n")
    assert half == Outcome(6, 8, "an assertion fails")


def test_test_functions_run_once_beside_assertions(code: CodeTests) -> None:
    right = "calls = []\ndef add(a, b):\n    calls.append(a)\n    return a + b\n" \
            "def count(): return len(calls)\n"  # fmt: skip
    tests = {"test": "assert add(1, 2) == 3\ndef test_one():\n    assert add(1, 1) == 2\n"
                     "def test_two():\n    assert add(2, 2) == 4\ntest_one()\n"
                     "assert count() == 2\n"}  # fmt: skip
    assert outcome(code, tests, right) == Outcome(4, 4, None)
    wrong = right.replace("a + b", "a + b if (a, b) != (2, 2) else 0")
    assert outcome(code, tests, wrong) == Outcome(3, 4, "an assertion fails")


def test_functions_of_the_tests_call_the_program_in_turn(code: CodeTests) -> None:
    tests = {
        "test": "assert apply(lambda n: double(n) + 1, 3) == 7\n"
        "def bad(n):\n    raise KeyError(n)\n"
        "try:\n    apply(bad, 3)\n    assert False\nexcept KeyError:\n    pass\n"
        "assert apply(function=lambda n: n, n=4) == 4\n"
    }
    program = "def double(n): return 2 * n\ndef apply(function, n): return function(n)\n"
    assert outcome(code, tests, program) == Outcome(2, 2, None)


@pytest.mark.long
def test_an_iterator_without_end_does_not_hold_the_worker_to_its_limit(code: CodeTests) -> None:
    tests = {"test": "for x in f(): assert x == 3\n"}
    found = outcome(code, tests, "def f():\n    while True: yield 3\n")
    assert "more than 65536 items" in str(found.problem)


@pytest.mark.long
def test_nothing_is_left_for_the_next_program() -> None:
    leave = "import os, socket, time\nopen('/tmp/left', 'w').write('3')\nif os.fork() == 0:\n" \
            "    os.setsid()\n    s = socket.socket(socket.AF_UNIX)\n    s.bind('\\0left')\n" \
            "    s.listen()\n    time.sleep(99)\ntime.sleep(0.5)\nprint(3)\n"  # fmt: skip
    look = "import os, socket\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect('\\0left')\n" \
           "except OSError: print(os.listdir('/tmp') == ['program.py'])\n"  # fmt: skip
    with CodeTests("auto", num_workers=1) as single:
        assert outcome(single, {"inputs": [""], "outputs": ["3"]}, leave).problem is None
        assert outcome(single, {"inputs": [""], "outputs": ["True"]}, look).problem is None
