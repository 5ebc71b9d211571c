"""Programs that do not solve the problem and try to be paid, in the real sandbox; and programs that
do solve it and look as if they cheated.

Each attack stands with the tests that it is aimed at. None is paid, and where the program never
gives a right value, no assertion counts.
"""

from typing import Any

import pytest

from code_rewards import outcome
from reason_llm.score.code import CodeTests, Outcome

ASSERTS = {"test": "assert add(1, 2) == 3\nassert add(5, 7) == 12\n"}
CHECK = {
    "test": "def check(candidate):\n"
    "    assert candidate(1, 2) == 3\n"
    "    assert abs(candidate(5, 7) - 12) < 1e-9\n",
    "entry_point": "add",
}
ZIPPED = {"test": "for got, want in zip(map(add, [1, 5], [2, 7]), [3, 12]):\n"
                  "    assert got == want\n"}  # fmt: skip
ALL = {"test": "pairs = [(1, 2, 3), (5, 7, 12)]\n"
               "assert all(map(lambda p: add(p[0], p[1]) == p[2], pairs))\n"
               "assert all(add(a, b) == c for a, b, c in pairs)\n"
               "assert list(map(add, [1, 5], [2, 7])) == [3, 12]\n"}  # fmt: skip
STAR = {
    "test": "from solution import *\n"
    "assert len(str(add(1, 2))) == 1 and add(1, 2) == 3\nassert sum([add(5, 7)]) == 12\n"
}
MODULE = {"test": "import solution\nimport solution as s\n"
                  "assert solution.add(1, 2) == 3\nassert s.add(5, 7) == 12\n"}  # fmt: skip
PYTEST = {"test": "from solution import add\n"
                  "def test_one():\n    assert add(1, 2) == 3\n"
                  "def test_two():\n    assert add(5, 7) == 12\n"}  # fmt: skip
BESIDE = {"test": "assert callable(add)\ndef test_add():\n    assert add(5, 7) == 12\n"}
UNITTEST = {"test": "import unittest\nclass TestAdd(unittest.TestCase):\n"
                    "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n",
            "entry_point": "add"}  # fmt: skip
LISTED = {"test": "for got, want in zip(both([1, 5], [2, 7]), [3, 12]):\n    assert got == want\n"
                  "assert both([], []) == []\n"}  # fmt: skip
CALLING = {"test": "def spy(n):\n    assert n > 0\n    return n\n"
                   "assert add(1, 2, spy) == 3\n"}  # fmt: skip
FORMS = (ASSERTS, CHECK, ZIPPED, ALL, STAR, MODULE, PYTEST)

WRONG = "def add(a, b):\n    return 0\n"
STOPS = "def add(*a):\n    raise StopIteration\n"

# The program runs below the server's frames: it finds the channel there and answers in its stead.
SPEAKS = """
import json, os, sys
frames, frame = [], sys._getframe()
while frame:
    frames.append(frame.f_locals)
    frame = frame.f_back
server = next(f['self'] for f in frames if hasattr(f.get('self'), 'outgoing'))
request = next(f['request'] for f in frames if isinstance(f.get('request'), dict))
def say(**message):
    os.write(server.outgoing, json.dumps({'id': request['id'], **message}).encode() + b'\\n')
"""
LOOP = """
say(value=None)
for line in server.incoming:
    request = json.loads(line)
    name = request['function']
    if name == 'sync':
        say(value=None)
    elif name == 'get':
        say(value=%s)
    else:
        say(%s)
"""
OBJECT = "{'object': 0}"


def speaks(got: str = OBJECT, called: str = "value=0") -> str:
    return SPEAKS + LOOP % (got, called)


SUBCLASS_KEY = """
class Key(str):
    def startswith(self, *a): return False
    def __hash__(self): return str.__hash__(self)
NAMES = {'abs': lambda x: 0, 'len': lambda x: 1, 'sum': lambda x: 12, 'all': lambda x: True,
         'str': lambda x: '3', 'range': lambda *a: [], 'map': lambda *a: [], 'list': lambda x: [3],
         'zip': lambda *a: [], 'sorted': lambda x: [], '__import__': lambda *a: None}
globals()[Key('__builtins__')] = NAMES
"""

ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    # (a) the server's protocol
    "says that a name is a namespace": (
        ASSERTS, speaks("{'dict': [['__builtins__', {'dict': []}]]}")),
    "says that a name is a type": (CHECK, speaks("{'type': 'bool'}")),
    "says that a name is a type that holds no data": (ZIPPED, speaks("{'type': 'map'}")),
    "says that a name is an exception": (ASSERTS, speaks("{'exception': 'AssertionError'}")),
    "says that a name is a module": (MODULE, speaks("{'module': 'sys'}")),
    "says that a name is a callback": (CALLING, speaks("{'callback': 0}")),
    "changes the arguments into others": (
        {"test": "cases = [[1, 2, 3], [5, 7, 12]]\n"
                 "for case in cases:\n    assert add(case[0], case[1]) == case[2]\n"},
        speaks(called="value=0, changed=[{'dict': [['__case__', 0]]}, [], {}]")),
    "calls back what was never given": (
        ASSERTS, speaks(called="callback=0, arguments=[]")),
    "calls back by a negative number": (
        CALLING, speaks(called="callback=-1, arguments=[5]")),
    "calls the tests' function without end": (
        CALLING, speaks(called="callback=0, arguments=[1]")),
    "says that everything is true": (ZIPPED, speaks(called="value=True")),
    "says that every call stopped": (ALL, speaks(called="error=[['StopIteration'], '']")),
    "says that every call was interrupted": (
        ALL, speaks(called="error=[['KeyboardInterrupt'], '']")),
    "says that every call exited": (PYTEST, speaks(called="error=[['SystemExit'], '0']")),
    "says that every call ended a generator": (
        ZIPPED, speaks(called="error=[['GeneratorExit'], '']")),
    "says that the tests stopped": (CHECK, speaks(called="error=[['Stop'], '']")),
    "gives an object without a number": (ASSERTS, speaks(called="value={'object': '0'}")),
    "gives an object numbered by True": (ASSERTS, speaks(called="value={'object': True}")),
    "answers twice": (ASSERTS, SPEAKS + "say(value=None)\n" + WRONG),
    "answers before it is asked": (
        ASSERTS, SPEAKS + "say(value=None)\nsay(value={'object': 0})\nsay(value=3)\n" + WRONG),
    "answers in other words in the middle of a call": (
        ASSERTS, SPEAKS.replace("say", "say_") + "def add(a, b):\n    globals()['request'] = next("
        "f.f_locals['request'] for f in [sys._getframe(n) for n in range(1, 4)] if 'request' in "
        "f.f_locals)\n    say_(value=0)\n    return a + b\n"),
    "ends after it answered by itself": (
        ZIPPED, SPEAKS + "def add(a, b):\n    say(value=True)\n    os._exit(0)\n"),
    "patches the server": (
        ALL, SPEAKS + WRONG + "type(server).get = lambda self, name: {'__builtins__': {}}\n"
        "type(server)._encoded = lambda *a, **k: {'type': 'map'}\n"),
    "closes the channel": (ASSERTS, SPEAKS + "os.close(server.outgoing)\n" + WRONG),
    "floods the channel": (ASSERTS, SPEAKS + "while True: os.write(server.outgoing, b'{' * 65536)"),
    # (b) names that the tests lean on
    "a subclass of str as a key": (CHECK, WRONG + SUBCLASS_KEY),
    "a subclass of str as a key, to import *": (STAR, WRONG + SUBCLASS_KEY),
    "builtins of its own": (STAR, WRONG + "__builtins__ = {'len': lambda x: 1}\n"
                            "abs = len = sum = all = map = zip = lambda *a: True\nstr = 3\n"),
    "names like the counter's": (
        ASSERTS, WRONG + "__case__ = __entered__ = __exception__ = print\n"
        "globals()['program:add'] = lambda *a: 3\n"),
    # (c) the tests' own names
    "check = bool": (UNITTEST, WRONG + "check = bool\n"),
    "check = bool, tests that do not define it": (
        {"test": "def fail(): raise ValueError\n", "entry_point": "add"}, WRONG + "check = bool\n"),
    "a check that does nothing": (CHECK, WRONG + "def check(candidate): pass\n"),
    "tests of its own": (PYTEST, WRONG + "def test_one(): pass\ndef test_two(): pass\n"),
    "tests of its own beside a class": (
        UNITTEST, WRONG + "def test_add(): assert add(1, 2) == 0\n"),
    "a candidate of its own": (
        {"test": "assert candidate(1, 2) == 3\n", "entry_point": "add"},
        WRONG + "candidate = lambda a, b: 3\n"),
    "fails only in the test beside an assertion": (BESIDE, WRONG),
    # (d) loops that end before their assertions
    "stops a zip of calls": (ZIPPED, STOPS),
    "stops all of a map": (ALL, STOPS),
    "stops with a subclass": (
        ZIPPED, "class Stop(StopIteration): pass\ndef add(*a):\n    raise Stop\n"),
    "stops with a class of that name": (
        ZIPPED, "StopIteration = type('StopIteration', (Exception,), {})\n" + STOPS),
    "stops an asynchronous loop": (ZIPPED, STOPS.replace("Stop", "StopAsync")),
    "gives nothing to a loop of assertions": (LISTED, "def both(a, b): return []\n"),
    "yields nothing to a loop of assertions": (
        LISTED, "def both(a, b):\n    if not a: return []\n    return iter(())\n"),
    "an object that stops when it is indexed": (
        {"test": "for got in reversed(make()):\n    assert got == 3\n"},
        "class A:\n    def __len__(self): return 2\n"
        "    def __getitem__(self, n): raise StopIteration\ndef make(): return A()\n"),
    # (e) what the tests import
    "an __all__ of its own": (
        STAR, WRONG + "__all__ = ['add', 'len', 'str', 'sum']\nlen = sum = lambda x: 12\n"),
    "replaces its module": (
        MODULE, WRONG + "import sys\nclass M:\n    def __getattr__(self, n): return lambda *a: 3\n"
        "sys.modules['solution'] = M()\n"),
    "a module __getattr__": (
        STAR, "def __getattr__(name): return lambda *a: 3\n__all__ = ['__builtins__', 'len']\n"),
    # and besides
    "nothing, where a built-in function would pass": (
        {"test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
         "entry_point": "sum"}, "pass\n"),
    "nothing, where an imported function would pass": (
        {"test_cases": {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}},
        "class Solution:\n    pass\n"),
    "interrupts the tester": (
        ALL, WRONG + "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\n"),
    "lowers the tester's limits": (
        ASSERTS, WRONG + "import os, resource\n"
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))\n"
        "resource.prlimit(os.getppid(), resource.RLIMIT_AS, (1 << 20, 1 << 20))\n"),
    "an enumeration that equals": (
        ASSERTS, "import enum\nclass N(enum.IntEnum):\n    A = 0\n"
        "    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def add(a, b): return N.A\n"),
}  # fmt: skip


@pytest.mark.parametrize(("tests", "program"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_not_paid(code: CodeTests, tests: dict[str, Any], program: str) -> None:
    found = outcome(code, tests, program)
    assert found.problem is not None
    assert found.passed < found.total
    assert found.fraction <= 0.5


def test_a_program_that_calls_back_without_end_is_ended() -> None:
    again = "callback=0, arguments=[1]"
    program = speaks(called=f"{again})\n        while server.incoming.readline(): say({again}")
    with CodeTests("auto", timeout_seconds=0.3, num_workers=1) as hasty:
        assert outcome(hasty, CALLING, program).passed == 0


def test_a_program_that_speaks_the_protocol_is_heard(code: CodeTests) -> None:
    """Or the attacks above that do would show nothing."""
    found = outcome(code, ASSERTS, speaks(called="value=sum(request['arguments'][1:])"))
    assert found == Outcome(2, 2, None)


@pytest.mark.long
@pytest.mark.parametrize("tests", FORMS)
@pytest.mark.parametrize(
    "program",
    [
        *(WRONG, STOPS, WRONG + SUBCLASS_KEY, "def add(a, b): return None", "x = 1"),
        *(speaks(), speaks("{'type': 'bool'}")),
    ],
)
def test_no_form_pays_for_a_wrong_value(code: CodeTests, tests: Any, program: str) -> None:
    found = outcome(code, tests, program)
    assert found.problem is not None
    assert found.passed == 0


SHADOWS = (
    "def add(a, b, then=int): return then(a + b)\n"
    "def check(n): raise ValueError\ndef test_one(): raise ValueError\ncandidate = None\n"
    "abs = all = str = zip = lambda *a: 0\ndef sum(a): return -1\nmath = None\n"
    "__all__ = ['check', 'sum']\n__name__ = 'other'\n"
)


@pytest.mark.parametrize("tests", [*FORMS, BESIDE])
def test_what_else_a_right_program_defines_is_its_own(code: CodeTests, tests: Any) -> None:
    found = outcome(code, tests, SHADOWS)
    assert found.problem is None
    assert found.passed == found.total > 0


@pytest.mark.parametrize(
    ("tests", "right"),
    [
        ({"test_list": ["assert sum(10, 15) == 6", "assert set([sum(4, 6)]) == {3}"]},
         "def sum(a, b): return 6 if a == 10 else 3"),
        ({"test": "assert sum(10, 15) == 6", "entry_point": "sum"}, "def sum(a, b): return 6"),
        ({"test": "def check(candidate):\n    assert candidate(10) == 6 and sum([1]) == 1\n",
          "entry_point": "sum"}, "def sum(a): return 6"),
        ({"test": "def check(sum):\n    assert sum(10) == 6\n\ncheck(sum)\n"},
         "def sum(a): return 6"),
        ({"test": "def check(candidate):\n    assert abs(candidate(10) - 6) < 1e-9\ncheck(abs)\n",
          "entry_point": "abs"}, "def abs(a): return 6.0"),
        ({"test": "from solution import max\nassert max(10) == 6\n"}, "def max(a): return 6"),
        ({"test": "import solution\nassert solution.max(10) == list((6,))[0]\n"},
         "def max(a): return 6"),
        ({"test_cases": {"fn_name": "sum", "inputs": [[10]], "outputs": [6]}},
         "def sum(a): return 6"),
        ({"test": "assert check(70) == 6"}, "def check(n): return 6"),
        ({"test": "assert test_duplicate(70) == 6"}, "def test_duplicate(n): return 6"),
        ({"test": "assert candidate(70) == 6"}, "def candidate(n): return 6"),
        ({"test": "assert math.sqrt(f(3)) == 6"}, "def f(n): return 36"),
    ],
)  # fmt: skip
def test_a_function_may_have_any_name(code: CodeTests, tests: Any, right: str) -> None:
    found = outcome(code, tests, right)
    assert found.problem is None
    assert found.passed == found.total > 0
    wrong = (
        right.replace("return 6", "return 7 or 6").replace("36", "49").replace("else 3", "else 4")
    )
    assert outcome(code, tests, wrong, stop_early=True).problem is not None
    assert outcome(code, tests, "pass").passed == 0


def test_test_functions_run_once_beside_assertions(code: CodeTests) -> None:
    right = "calls = []\ndef add(a, b):\n    calls.append(a)\n    return a + b\n" \
            "def count(): return len(calls)\n"  # fmt: skip
    tests = {"test": "assert add(1, 2) == 3\ndef test_one():\n    assert add(1, 1) == 2\n"
                     "def test_two():\n    assert add(2, 2) == 4\ntest_one()\n"
                     "assert count() == 2\n"}  # fmt: skip
    assert outcome(code, tests, right) == Outcome(4, 4, None)
    wrong = right.replace("a + b", "a + b if (a, b) != (2, 2) else 0")
    assert outcome(code, tests, wrong) == Outcome(3, 4, "an assertion fails")


def test_an_assertion_weighs_the_same_however_often_it_runs(code: CodeTests) -> None:
    tests = {"test": "assert add(1, 2) == 3\nfor n in many():\n    assert n > 0\n"}
    found = outcome(code, tests, "def add(a, b): return 0\ndef many(): return [1] * 9999\n")
    assert found.fraction == 0.5
    half = outcome(code, tests, "def add(a, b): return 3\ndef many(): return [1, 0, 1, 0]\n")
    assert half == Outcome(6, 8, "an assertion fails")


def test_functions_of_the_tests_call_the_program_in_turn(code: CodeTests) -> None:
    tests = {
        "test": "assert apply(lambda n: double(n) + 1, 3) == 7\n"
        "def bad(n):\n    raise KeyError(n)\n"
        "try:\n    apply(bad, 3)\n    assert False\nexcept KeyError:\n    pass\n"
        "assert apply(function=lambda n: n, n=4) == 4\n"
    }
    program = "def double(n): return 2 * n\ndef apply(function, n): return function(n)\n"
    assert outcome(code, tests, program) == Outcome(2, 2, None)
