"""Code rewards in the real sandbox, on examples worked by hand, and programs that try to pass
without solving the problem."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from code_rewards import outcome
from marks import most_are_long
from reason_llm.config.score import RewardSpec, ScoreSection
from reason_llm.errors import DataError
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.score import Scorer
from reason_llm.score.code import CodeTests, Outcome

ADD = {"inputs": ["1 2\n", "5 7\n", "10 -3\n"], "outputs": ["3\n", "12\n", "7\n"]}
ADD_CALLS = {"fn_name": "add", "inputs": [[1, 2], [5, 7]], "outputs": [[3], [12]]}
ADD_ASSERTS = {"assert_code": "assert add(1, 2) == 3\nassert add(5, 7) == 12\n"}


@pytest.fixture(scope="module")
def hasty() -> Iterator[CodeTests]:
    """For programs that never end, which fail on a machine of any speed."""
    with CodeTests("auto", timeout_seconds=3, num_workers=2) as code:
        yield code


@pytest.fixture(scope="module")
def brief() -> Iterator[CodeTests]:
    """For programs that never end and of which nothing right is awaited."""
    with CodeTests("auto", timeout_seconds=0.5, num_workers=2) as code:
        yield code


def rewards(text: str, answer: str = json.dumps(ADD)) -> dict[str, float]:
    """Both rewards of a completion."""
    specs = [RewardSpec(name="code_tests"), RewardSpec(name="code_tests_fraction")]
    group = Group(Prompt("data.jsonl:7", "", (), answer), (Completion((1,), text, (0.0,), "stop"),))
    with Scorer(ScoreSection(rewards=specs), max_new_tokens=9) as scorer:
        return dict(scorer.score([group])[0].completions[0].rewards)


def fraction(code: CodeTests, tests: Any, program: str) -> tuple[int, int]:
    found = outcome(code, tests, program)
    assert (found.problem is None) == (found.passed == found.total), found
    return found.passed, found.total


# --- programs with input and output


def test_without_a_block_the_reward_is_0(code: CodeTests) -> None:
    assert code.outcome(json.dumps(ADD), "print(3)") is None
    assert rewards("print(3)") == {"code_tests": 0, "code_tests_fraction": 0}


def test_programs_are_judged_by_what_they_print(code: CodeTests, brief: CodeTests) -> None:
    good = "a, b = map(int, input().split())\nprint(a + b)"
    assert fraction(code, ADD, good) == (3, 3)
    assert fraction(code, ADD, good.replace("a + b", "abs(a) + abs(b)")) == (2, 3)
    assert fraction(code, ADD, good + "\nraise SystemExit(1)") == (0, 3)
    assert fraction(code, ADD, good + "\ninput()") == (0, 3)
    assert fraction(code, ADD, "def f(:") == (0, 3)
    assert outcome(brief, ADD, "import time; time.sleep(99)", stop_early=True).passed == 0
    assert fraction(code, ADD, f"import sys\nif True:\n    {good.splitlines()[0]}\nprint(a + b)\n"
                               "sys.exit(0)") == (3, 3)  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.write(1, b'3\\xff\\n')",
        "import os; os.close(1)",
        "import io, sys; sys.stdout = io.StringIO(); print(3)",
        "import os; os._exit(0)",
        "print(3); import os; os.abort()",
        "print(3)\nwhile True: print(3)",
        "print('passed 3/3'); raise SystemExit(0)",
        "import builtins; builtins.str.__eq__ = lambda a, b: True",
        "import sys, gc; print([o for o in gc.get_objects() if '12' in repr(o)][:1])",
        "print('3 ' * 10**7)",
    ],
)
def test_a_cheating_program_prints_nothing_right(
    code: CodeTests, brief: CodeTests, program: str
) -> None:
    judge = brief if "while True" in program else code
    assert outcome(judge, ADD, program, stop_early=True).passed == 0


def test_the_two_rewards() -> None:
    half, right = (f"```python\nprint({p})\n```" for p in ("12", "sum(map(int, input().split()))"))
    third = pytest.approx(1 / 3)
    assert rewards(half) == {"code_tests": 0, "code_tests_fraction": third}
    assert rewards(right) == {"code_tests": 1, "code_tests_fraction": 1}


def test_all_pass_stops_at_the_first_failure(code: CodeTests) -> None:
    assert outcome(code, ADD, "print(12)", stop_early=True) == Outcome(0, 3, "a wrong output")
    assert outcome(code, ADD, "print(12)") == Outcome(1, 3, "a wrong output")


def test_a_program_that_always_hangs_is_not_waited_for_each_time(brief: CodeTests) -> None:
    tests = {"inputs": ["1\n"] * 50, "outputs": ["1\n"] * 50}
    found = outcome(brief, tests, "while True: pass")
    assert (found.passed, found.total) == (0, 50)
    assert found.problem in ("the cpu limit", "the time limit")


@pytest.mark.long
def test_many_are_judged_at_once_and_none_depends_on_another(hasty: CodeTests) -> None:
    programs = ["print(sum(map(int, input().split())))", "while True: pass", "print(3)"] * 2
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda program: outcome(hasty, ADD, program, True), programs))
    assert [one.passed for one in found] == [3, 0, 1] * 2


# --- calls


def test_functions_are_judged_by_what_they_return(code: CodeTests) -> None:
    assert fraction(code, ADD_CALLS, "def add(a, b): return a + b") == (2, 2)
    assert fraction(code, ADD_CALLS, "def add(a, b): return 3") == (1, 2)
    assert fraction(code, ADD_CALLS, "def add(a, b): print(a + b)") == (0, 2)
    assert fraction(code, ADD_CALLS, "def sub(a, b): return a + b") == (0, 2)
    assert fraction(code, ADD_CALLS, "def add(a, b): return str(a + b)") == (0, 2)
    assert fraction(code, ADD_CALLS, "print(1)\ndef add(a, b): print(2); return a + b") == (2, 2)
    # Outputs that are all lists of one are PRIME's form of the values, or the lists themselves.
    assert fraction(code, ADD_CALLS, "def add(a, b): return [a + b]") == (2, 2)


def test_a_method_of_class_solution_is_called_on_a_fresh_one(code: CodeTests) -> None:
    program = (
        "class Solution:\n"
        "    def __init__(self): self.seen = 0\n"
        "    def add(self, a: int, b: Optional[int]) -> List[int]:\n"
        "        self.seen += 1\n"
        "        return a + b if self.seen == 1 and inf > 0 else pow(2, 3, 5)\n"
    )
    assert fraction(code, ADD_CALLS, program) == (2, 2)
    assert fraction(code, ADD_CALLS, "x: List[int] = []\ndef add(a, b): return a + b") == (0, 2)


@pytest.mark.parametrize(
    "bad",
    most_are_long(
        ["while True: pass", "import os; os._exit(0)", "1 / 0", "raise SystemExit", "f(n)"],
        ["import os; os._exit(0)", "1 / 0"],
    ),
)
def test_a_call_that_ends_the_program_costs_only_itself(hasty: CodeTests, bad: str) -> None:
    tests = {"fn_name": "f", "inputs": [[n] for n in range(6)], "outputs": [[n] for n in range(6)]}
    program = f"def f(n):\n    if n == 2:\n        {bad}\n    return n\n"
    assert fraction(hasty, tests, program) == (5, 6)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("(1, [2, (3,)])", [1, [2, [3]]]),
        ("{1: 'a', None: {2.5: True}}", {"1": "a", "null": {"2.5": True}}),
        ("(n for n in range(3))", [0, 1, 2]),
        ("range(3)", [0, 1, 2]),
        ("0.1 + 0.2", 0.3),
        ("[float('inf'), -0.0]", [float("inf"), 0]),
        ("float('nan')", float("nan")),
        ("__import__('numpy').arange(3)", [0, 1, 2]),
        ("__import__('numpy').float64(1.5)", 1.5),
        ("2 ** 2000", 2**2000),
        ("'a\\ud800\\n'", "a\ud800\n"),
        ("None", None),
        ("__import__('collections').Counter('aab')", {"a": 2, "b": 1}),
    ],
)
def test_returned_values_are_compared_as_json(code: CodeTests, value: str, expected: Any) -> None:
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [[expected]]}
    assert fraction(code, tests, f"def f(): return {value}") == (1, 1)


@pytest.mark.parametrize(
    "value",
    [
        "3",
        "{1, 2}",
        "'[1, 2]'",
        "object()",
        "10 ** 5000",
        "type('L', (list,), {'__eq__': lambda a, b: True})()",
        "type('A', (), {'__eq__': lambda a, b: True})()",
        "'x' * 10 ** 8",
        "__import__('functools').reduce(lambda a, b: [a], range(5000))",
        "__import__('functools').reduce(lambda a, b: [a], range(2000))",
    ],
)
def test_a_returned_value_cannot_pretend(code: CodeTests, value: str) -> None:
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [[[1, 2]]]}
    assert fraction(code, tests, f"def f(): return {value}") == (0, 1)


# --- assertions


def test_assertions_are_counted(code: CodeTests) -> None:
    assert fraction(code, ADD_ASSERTS, "def add(a, b): return a + b") == (2, 2)
    assert fraction(code, ADD_ASSERTS, "def add(a, b): return 12") == (1, 2)
    assert fraction(code, ADD_ASSERTS, "def add(a, b): raise ValueError") == (0, 2)
    assert fraction(code, ADD_ASSERTS, "def sub(a, b): return a + b") == (0, 2)
    assert fraction(code, ADD_ASSERTS, "def add(a, b:") == (0, 2)


def test_humaneval_leetcode_and_pytest_forms(code: CodeTests) -> None:
    check = (
        "def check(candidate):\n    for n in range(3):\n        assert candidate(n, 1) == n + 1\n"
    )
    add = "def add(a, b): return a + b"
    human_eval = {"test": check, "entry_point": "add"}
    assert fraction(code, human_eval, add) == (3, 3)
    assert fraction(code, human_eval, "def add(a, b): return 1") == (1, 3)
    assert fraction(code, {"test": check + "check(add)\n"}, add) == (3, 3)
    method = "class Solution:\n    def add(self, a, b): return a + b"
    assert fraction(code, {"test": check + "check(Solution().add)"}, method) == (3, 3)
    assert fraction(code, {"test": check, "entry_point": "Solution().add"}, method) == (3, 3)
    pytest_form = "from solution import add\ndef test_add():\n    assert add(1, 2) == 3\n"
    assert fraction(code, {"test": pytest_form}, add) == (1, 1)
    assert fraction(
        code, {"test_list": ["assert add(1, 2) == 3", "assert add(1, 1) == 2"]}, add
    ) == (2, 2)
    assert fraction(code, {"test": "def f(): assert add(1, 2) == 3"}, add) == (0, 1)


def test_what_tests_may_do_with_a_program(code: CodeTests) -> None:
    program = (
        "import math\nfrom dataclasses import dataclass\nfrom collections import Counter\n"
        "LIMIT = 7\n"
        "class TooMuch(Exception): pass\n"
        "@dataclass(order=True)\nclass Point:\n    x: int\n    y: int = 0\n"
        "    def move(self, d): self.x += d; return self\n"
        "    def __getitem__(self, i): return (self.x, self.y)[i]\n"
        "    def __len__(self): return 2\n"
        "def origin(): return Point(0)\n"
        "def fill(items, table): items.append(1); table['a'] = items\n"
        "def apply(f, x, kind=int): return f(kind(x))\n"
        "def count(n):\n    yield from range(n)\n"
        "def fail(n):\n    if n > LIMIT: raise TooMuch('no')\n    raise ValueError(n)\n"
        "def kinds(): return (1, [2.5], {3}, {'a': None}, b'x', 1j, frozenset([1]), Counter('a'))\n"
    )
    asserts = (
        "p = Point(1, y=2)\n"
        "assert p.x == 1 and p.move(3).x == 4 and p[1] == 2 and len(p) == 2\n"
        "p.y = 5\nassert p.y == 5 and str(p) == 'Point(x=4, y=5)' and list(p)[:2] == [4, 5]\n"
        "assert p == Point(4, 5) and p != Point(0) and Point(0) < p and origin() == Point(0)\n"
        "items, table = [], {}\nfill(items, table)\nassert items == [1] and table == {'a': [1]}\n"
        "assert apply(lambda x: x * 2, '4') == 8 and apply(str, 1, kind=float) == '1.0'\n"
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6\n"
        "assert math.isclose(apply(math.sqrt, 4), 2) and LIMIT == 7\n"
        "try:\n    fail(1)\n    assert False\n"
        "except ValueError as error:\n    assert str(error) == '1'\n"
        "try:\n    fail(9)\n    assert False\nexcept TooMuch:\n    pass\n"
        "k = kinds()\n"
        "assert k == (1, [2.5], {3}, {'a': None}, b'x', 1j, frozenset([1]), {'a': 1})\n"
        "assert isinstance(k, tuple) and type(k[6]) is frozenset\n"
    )
    found = outcome(code, {"test": asserts}, program)
    assert (found.passed, found.total, found.problem) == (10, 10, None)


# --- programs that try to pass without solving


def test_a_planted_module_is_not_imported_by_the_tests(code: CodeTests) -> None:
    tests = {"test": "import random, statistics\nassert statistics.mean([add(1, 2), 1]) == 2\n"}
    plant = (
        "for name in ('random', 'statistics'):\n"
        "    with open(name + '.py', 'w') as file: file.write('mean = lambda x: 2')\n"
    )
    assert fraction(code, tests, plant + "def add(a, b): return 0") == (0, 1)
    assert fraction(code, tests, plant + "def add(a, b): return 3") == (1, 1)


def test_a_program_that_stops_the_tester_fails() -> None:
    program = "import os\nos.kill(os.getppid(), 19)\ndef add(a, b): return a + b"
    with CodeTests("auto", timeout_seconds=0.2, num_workers=1) as brief:
        assert outcome(brief, ADD_ASSERTS, program, True) == Outcome(0, 1, "the time limit")


def test_tests_lean_on_nothing_that_the_program_defines(code: CodeTests) -> None:
    tests = {"test": "import math\nassert abs(half(3) - 1.5) < 1e-9\n"
                     "assert math.isclose(half(1), 0.5)\nassert all([half(2) == 1])\n"}  # fmt: skip
    good = "def half(n): return n / 2"
    assert fraction(code, tests, good) == (3, 3)
    always = (
        "class Yes:\n"
        "    def __getattr__(self, name): return lambda *a, **k: True\n"
        "    def __sub__(self, other): return self\n"
        "    def __abs__(self): return self\n"
        "    def __lt__(self, other): return True\n"
        "    def __float__(self): return 0.5\n"
        "    def __eq__(self, other): return True\n"
        "abs = lambda x: -1\nall = lambda x: True\nmath = Yes()\n"
        "def half(n): return Yes()\n"
    )
    assert fraction(code, tests, always) == (0, 3)


def test_an_answer_that_holds_no_tests_names_its_row() -> None:
    with pytest.raises(DataError, match=r"^data\.jsonl:7: .*no valid JSON"):
        rewards("", answer="")
