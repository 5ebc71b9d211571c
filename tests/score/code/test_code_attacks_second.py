"""A second set of programs that do not solve the problem and try to be paid, written by another
hand than the first (``test_code_attacks.py``) and than the tester; programs that end within their
limits; and right programs in odd dress, which are paid.
"""

from typing import Any

import pytest

from code_rewards import outcome
from marks import most_are_long
from reason_llm.score.code import CodeTests

pytestmark = pytest.mark.long
Row = dict[str, Any]

ASSERTS: Row = {"test": "assert add(1, 2) == 3\nassert add(5, 7) == 12\n"}
CHECK: Row = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
                      "    assert candidate(5, 7) == 12\n", "entry_point": "add"}  # fmt: skip
CALLS: Row = {"fn_name": "add", "inputs": [[1, 2], [5, 7]], "outputs": [3, 12]}
STDIO: Row = {"inputs": ["1 2\n", "5 7\n"], "outputs": ["3\n", "12\n"]}
LOOSE: Row = {**STDIO, "tolerance": 1e-6}
METHOD: Row = {"test": "def check(candidate):\n    assert candidate([2, 7], 9) == [0, 1]\n"
                       "    assert candidate(nums=[3, 3], target=6) == [0, 1]\n",
               "entry_point": "Solution().twoSum"}  # fmt: skip
STACK: Row = {"test": "s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4\n"
                      "assert len(s) == 1\nassert s.pop() == 3\n"}  # fmt: skip
NUMPY: Row = {"test": "import numpy as np\nassert np.allclose(add(1, 2), [3, 4, 5])\n"
                      "assert (np.array(add(1, 2)) == np.array([3, 4, 5])).all()\n"}  # fmt: skip
SCALAR: Row = {"test": "import numpy as np\nnp.testing.assert_allclose(add(1, 2), [3.0, 4.0])\n"}
RAISES: Row = {"test": "def raises(function):\n    try:\n        function()\n"
                       "    except ValueError:\n        return True\n    return False\n"
                       "assert add(1, 2) == 3\nassert not raises(lambda: add(5, 7))\n"}  # fmt: skip
STRINGS: Row = {"test": "assert isinstance(name(1), str)\nassert name(1).upper() == 'ONE'\n"
                        "assert f'{name(2)}' == 'two' and str(name(3)) == 'three'\n"}  # fmt: skip
SORTED: Row = {"test": "assert sorted(order(3)) == [1, 2, 3]\nassert list(order(2)) == [1, 2]\n"
                       "assert set(order(2)) == {1, 2}\nassert len(order(2)) == 2\n"}  # fmt: skip

WRONG = "def add(a, b):\n    return 0\n"
LIAR = """
class Liar:
    def __init__(self, *a, **k): pass
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a, **k): return True
    def __eq__(self, other): return True
    __ne__ = __lt__ = __gt__ = lambda self, other: False
    __le__ = __ge__ = __contains__ = __eq__
    def __hash__(self): return hash(3)
    def __bool__(self): return True
    def __len__(self): return 1
    def __float__(self): return 3.0
    def __index__(self): return 3
    __int__ = __index__
    def __rsub__(self, other): return 0
    __sub__ = __abs__ = __add__ = __radd__ = __round__ = __rsub__
    def __instancecheck__(self, other): return True
def add(*a): return Liar()
"""
LYING_ARRAY = """
class A:
    __array_interface__ = {'shape': %s, 'typestr': '%s', 'data': (4096, False), 'version': 3}
def add(a, b): return A()
"""
LYING_STRING = """
class S(str):
    def __eq__(self, other): return True
    def __hash__(self): return hash('ONE')
    def upper(self): return self
    def __str__(self): return self
    def __format__(self, how): return self
def name(n): return S('no')
"""
LYING_INT = """
class N(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    def __int__(self): return self
    def __hash__(self): return 3
def add(a, b): return N(0)
"""
LYING_LIST = """
class L(list):
    def __eq__(self, other): return True
    def __len__(self): return 2
    def __iter__(self): return iter([L(), L()])
    def __lt__(self, other): return True
def order(n): return L([7])
def twoSum(*a, **k): return L([7])
class Solution:
    twoSum = twoSum
"""
PRINTS = """
import json, os, sys
paid = json.dumps({'passed': 2, 'total': 2, 'problem': None}) + '\\n' + json.dumps({'value': 3})
print(paid)
for number in range(64):
    try: os.write(number, paid.encode() + b'\\n')
    except OSError: pass
"""
SEARCHES = """
import gc, os, sys, glob
found = [repr(each) for each in gc.get_objects() if isinstance(each, (dict, list, str))][:20000]
for path in [*glob.glob('/proc/*/mem'), '/proc/self/environ', '/dev/stdin', '/dev/fd/0', *glob.glob(
        '/tmp/**', recursive=True), *glob.glob('/tmp/reason_llm/**/*.py', recursive=True)]:
    try:
        with open(path, errors='replace') as file: found.append(file.read(1 << 20))
    except OSError: pass
try: found.append(os.read(0, 1 << 16).decode())
except OSError: pass
found += map(repr, os.environ.items())
text = ' '.join(found)
def add(a, b): return a + b if '5, ' + '7)' in text else 0
"""
SHADOWS = """
import os
for name in ('math', 'numpy', 'json', 'unittest', 'collections', 'sitecustomize', 'string'):
    with open(name + '.py', 'w') as file:
        file.write('isclose = allclose = Counter = lambda *a, **k: 1\\nexit = quit = print\\n'
                   'def __getattr__(name): return lambda *a, **k: 1\\n')
"""
REWRITES = """
import os
for folder, _, names in os.walk('.'):
    for name in names:
        with open(os.path.join(folder, name), 'w') as file:
            file.write('class AssertionCounts: score = lambda *a: (2, 2)\\ndef main(): pass\\n')
"""
PATCHES = """
import builtins, json, sys, time, os, types, operator
for name in ('len', 'sorted', 'list', 'isinstance', 'all', 'any', 'abs', 'str', 'set', 'sum'):
    setattr(builtins, name, lambda *a, **k: True)
operator.eq = lambda a, b: True
json.loads = lambda text: {'function': 'sync', 'id': 0, 'arguments': [], 'named': {}}
"""
PARENT = "import os, signal\n%s\n" + WRONG

EMPTY = "def f(n): return []\n"
FORGES = (
    "setattr(__import__('sys').modules['jail.assert_source'].AssertionCounts, '__call__', "
    "lambda self, n, value: (self.ran.update({n: 1}), self.held.update({n: 1})))"
)

ATTACKS: dict[str, tuple[Row, str]] = {
    # objects that lie
    "an object that is everything": (ASSERTS, LIAR),
    "an object that is everything, to check": (CHECK, LIAR),
    "an object that is everything, as JSON": (CALLS, LIAR),
    "an object among tolerances": (
        {"test": "assert abs(add(1, 2) - 3) < 1e-6\nassert round(add(1, 2)) == 3\n"}, LIAR),
    "an object that is within and holds": (
        {"test": "assert add(1, 2) in {3}\nassert add(1, 2) in [3]\nassert int(add(1, 2)) == 3\n"},
        LIAR),
    "an object by isclose": ({"test": "import math\nassert math.isclose(add(1, 2), 3)\n"}, LIAR),
    "an object that is an instance of all": (
        {"test": "assert isinstance(add(1, 2), int)\nassert type(add(1, 2)) is int\n"},
        LIAR + "Liar.__class__ = int\n"),
    "an int that equals": (ASSERTS, LYING_INT),
    "an int that equals, as JSON": (CALLS, LYING_INT),
    "a str that equals": (STRINGS, LYING_STRING),
    "a list that equals": (SORTED, LYING_LIST),
    "a list that equals, from a method": (METHOD, LYING_LIST),
    "a class whose objects do nothing": (STACK, "class Stack(list):\n    push = list.clear\n"),
    "a class that answers by itself": (STACK, LIAR + "Stack = Liar\n"),
    "a metaclass": (STACK, "class M(type):\n    def __call__(s): return s\n"
                    "    def __len__(s): return 1\n    pop = push = lambda s, *a: 4\n"
                    "class Stack(metaclass=M): pass\n"),
    "not a number": (
        {"test": "assert abs(add(1, 2) - 3) < 1e-6\nassert add(1, 2) == add(1, 2)\n"
                 "assert min(add(1, 2), 3) == max(add(1, 2), 3)\n"},
        "def add(a, b): return float('nan')"),
    "an infinity, as JSON": ({**CALLS, "tolerance": 0.1}, "def add(a, b): return float('inf')"),
    "a float beside a large integer": (
        {"fn_name": "f", "inputs": [[80]], "outputs": [23416728348467685]},
        "def f(n): return 23416728348468000.0"),
    "nothing for what is small": (
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [6.67e-11, 1.3e-10]},
        "def f(n): return 0.0"),
    "much, where the tolerance is large": (
        {**CALLS, "tolerance": 1}, "def add(a, b): return 1e12"),
    "much, where the tolerance is large, printed": ({**STDIO, "tolerance": 1}, "print(1e12)"),
    "a fraction that equals": (
        {"test": "from fractions import Fraction\nassert add(1, 2) == Fraction(3)\n"},
        "from fractions import Fraction\nclass F(Fraction):\n    __eq__ = lambda *a: True\n"
        "def add(a, b): return F(0)\n"),
    "a decimal that is no number": (
        {"test": "from decimal import Decimal\nassert add(1, 2) == Decimal(3)\n"
                 "assert abs(add(1, 2) - Decimal(3)) < 1\n"},
        "from decimal import Decimal\ndef add(a, b): return Decimal('nan')\n"),
    # what a library asks of an object behind the tests' back
    "an array without elements": (NUMPY, LYING_ARRAY % ((0, 1), "<f8")),
    "an array of the tester's memory": (SCALAR, LYING_ARRAY % ((2,), "<f8")),
    "an array of the tester's objects": (NUMPY, LYING_ARRAY % ((0, 3), "|O")),
    "an object that numpy converts": (
        SCALAR, LIAR + "Liar.__array__ = lambda s, *a, **k: [3.0, 4.0]\n"
        "Liar.__array_priority__ = 1e9\n"),
    # names that the tests lean on
    "isclose of its own": ({"test": "assert isclose(add(1, 2), 3)\n"},
                           WRONG + "def isclose(*a, **k): return True\n"),
    "isclose of its own, to check": (
        {"test": "def check(candidate):\n    assert isclose(candidate(1, 2), 3)\n",
         "entry_point": "add"}, WRONG + "def isclose(*a, **k): return True\n"),
    "Counter of its own": ({"test": "from solution import add\n"
                                    "assert Counter(add(1, 2)) == Counter([3])\n"},
                           LIAR + "Counter = Liar\n"),
    "deepcopy of its own": ({"test": "xs = [3, 1]\nys = deepcopy(xs)\nassert add(xs, 1) == ys\n"},
                            "def deepcopy(xs): return []\ndef add(xs, n): return []\n"),
    "approx of its own": ({"test": "assert add(1, 2) == pytest.approx(3)\n"},
                          LIAR + "class pytest: approx = Liar\n"),
    "assertEqual of its own": ({"test": "assertEqual(add(1, 2), 3)\n"},
                               WRONG + "def assertEqual(*a): pass\n"),
    "a self of its own": ({"test": "self.assertEqual(add(1, 2), 3)\n"}, LIAR + "self = Liar()\n"),
    "a framework of its own": ({"test": "Test.assert_equals(add(1, 2), 3)\n"},
                               LIAR + "Test = Liar()\n"),
    "an exit of its own": ({"test": "if add(1, 2) != 3:\n    exit(1)\n"},
                           WRONG + "def exit(*a): pass\nquit = exit\n"),
    # tests that do not run, or that run on something else
    "nothing, where * leaves a built-in function": (
        {"test": "from solution import *\nassert max([1, 3, 2]) == 3\n"}, "pass"),
    "nothing, where * leaves an imported function": (
        {"test": "# of class Solution\nfrom solution import *\nassert add(1, 2) == 3\n"}, "pass"),
    "nothing, where the tests have their own": (
        {"test": "try:\n    from solution import add\nexcept ImportError:\n"
                 "    def add(a, b): return a + b\nassert add(1, 2) == 3\n"}, "pass"),
    "fails only in a class beside an assertion": (
        {"test": "assert callable(add)\nclass TestAdd:\n    def test_one(self):\n"
                 "        assert add(1, 2) == 3\n"}, WRONG),
    "fails only in unittest's runner": (
        {"test": "import unittest\nclass T(unittest.TestCase):\n    def test_one(self):\n"
                 "        self.assertEqual(add(1, 2), 3)\n"
                 "unittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(T))\n"},
        WRONG),
    "raises where the tests go on": (
        {"test": "assert add(0, 0) == 0\ntry:\n    got = add(1, 2)\n    assert got == 3\n"
                 "except Exception as error:\n    print(error)\n"},
        "def add(a, b):\n    if a: raise KeyError\n    return 0\n"),
    "a decorator that runs no test": (
        {"test": "@twice\ndef test_one():\n    assert twice(lambda: 3)() == 6\n"},
        "def twice(f): return lambda *a: None\n"),
    "a context that swallows": (
        {"test": "with guard():\n    assert add(1, 2) == 3\n    raise KeyError\n"},
        WRONG + "class guard:\n    def __enter__(s): return s\n"
        "    def __exit__(s, *a): return True\n"),
    "raises an assertion": (CHECK, "def add(a, b): raise AssertionError"),
    "raises what Python ends with": (ASSERTS, "def add(a, b): raise SystemExit(0)"),
    "raises a group": (RAISES, "def add(a, b): raise BaseExceptionGroup('', [StopIteration()])"),
    "raises by another's name": (
        {"test": "for got, want in zip(map(add, [1], [2]), [3]):\n    assert got == want\n"},
        "class E(Exception): pass\nE.__name__ = 'StopIteration'\ndef add(a, b): raise E\n"),
    "raises with a line of descent that lies": (
        RAISES, "class M(type):\n    __mro__ = (StopIteration, GeneratorExit)\n"
        "class E(Exception, metaclass=M): pass\ndef add(a, b): raise E\n"),
    "throws where it is closed": (
        {"test": "assert list(zip(add(1, 2), [3])) == [(3, 3)]\n"},
        "def add(a, b):\n    try:\n        while True: yield 0\n"
        "    except GeneratorExit: raise StopIteration\n"),
    # what the program makes the tests skip
    "nothing, where the tests ask if there is something": (
        {"test": "assert callable(f)\nr = f(3)\nif r:\n    assert r == 3\n"}, "def f(n): pass"),
    "nothing, in one of two tests": (
        {"test": "def test_a():\n    assert f(0) is None\ndef test_b():\n    r = f(3)\n"
                 "    if r is not None:\n        assert r == 3\n"}, "def f(n): pass"),
    "nothing, to check": (
        {"test": "def check(candidate):\n    assert candidate(0) is None\n    for n in (1, 2):\n"
                 "        if (r := candidate(n)) is not None:\n            assert r == n\n",
         "entry_point": "f"}, "def f(n): pass"),
    "nothing, to a helper of the tests": (
        {"test": "def one(n):\n    r = f(n)\n    if r:\n        assert r == n\n"
                 "assert f(0) is None\nfor n in (1, 2):\n    one(n)\n"}, "def f(n): pass"),
    "an error, where the tests pass over it": (
        {"test": "def test_a():\n    try:\n        assert f(3) == 3\n    except TypeError:\n"
                 "        pass\ndef test_b():\n    assert f(0) == 0\n"},
        "def f(n):\n    if n: raise TypeError\n    return 0\n"),
    # comparisons that compare nothing
    "an empty list, by allclose": (
        {"test": "import numpy as np\nassert np.allclose(f(1), 3.0)\n"}, EMPTY),
    "an empty list, by allclose with both arrays": (
        {"test": "import numpy as np\nassert np.allclose(np.array(f(1)), np.array([3]))\n"}, EMPTY),
    "an empty list, by allclose the other way": (
        {"test": "from numpy import allclose\nassert allclose(b=f(1), a=3.0)\n"}, EMPTY),
    "an empty list, by allclose without an import": ({"test": "assert allclose(f(1), 3)\n"}, EMPTY),
    "an empty list, by isclose": (
        {"test": "import numpy\nassert numpy.isclose(f(1), 3.0).all()\n"}, EMPTY),
    "an empty list, by numpy.testing": (
        {"test": "import numpy as np\nassert callable(f)\nnp.testing.assert_allclose(f(1), 3.0)\n"},
        EMPTY),
    "an empty list, by a name of numpy.testing": (
        {"test": "from numpy.testing import assert_almost_equal as same\nassert callable(f)\n"
                 "same(f(1), 3.0)\n"}, EMPTY),
    "an object that says yes": (
        {"test": "assert add(1, 2).startswith('3')\nassert add(3, 4).isdigit()\n"
                 "assert add(1, 2).issubset({3})\n"}, LIAR),
    # functions that the tests hand over
    "eval, handed over": (
        {"test": "assert f(eval, '1+2') == 3\nassert f(eval, '2+2') == 4\n"},
        "def f(run, text):\n    try: run(" + repr(FORGES) + ")\n    except Exception: pass\n"
        "    return 0\n"),
    "exec, handed over in a dict": (
        {"test": "assert f({'run': exec}, '1') == 3\nassert f({'run': exec}, '2') == 4\n"},
        "def f(given, text):\n    given['run'](" + repr(FORGES) + ")\n    return 0\n"),
    "globals, handed over": (
        {"test": "want = 3\nassert f(globals) == want\n"},
        "def f(given):\n    try: return given()['want']\n    except KeyError: return 0\n"),
    "getattr, handed over": (
        {"test": "assert f(getattr) == 3\n"},
        "def f(get):\n    for kind in get(Exception, '__subclasses__')(): pass\n"
        "    return get(f, '__globals__').get('want', 0)\n"),
    # the tester's process
    "prints a verdict everywhere": (ASSERTS, PRINTS + WRONG),
    "prints a verdict everywhere, as JSON": (CALLS, PRINTS + WRONG),
    "prints a verdict at its end": (
        CHECK, WRONG + f"import atexit\natexit.register(exec, {PRINTS!r})\nraise SystemExit(0)\n"),
    "prints a verdict from a thread": (
        ASSERTS, WRONG + f"import threading\nthreading.Thread(target=exec, args=({PRINTS!r},"
        " {})).start()\n"),
    "prints a verdict when it is deleted": (
        ASSERTS, f"class D:\n    def __del__(self): exec({PRINTS!r}, {{}})\n"
        "def add(a, b): return D() and 0\n"),
    "reads whatever is there": (ASSERTS, SEARCHES),
    "waits and reads whatever is there": (CHECK, "import time\ntime.sleep(0.5)\n" + SEARCHES),
    "modules beside the tests": (
        {"test": "import math, string, unittest\nassert math.isclose(add(1, 2), 3)\n"},
        SHADOWS + WRONG),
    "rewrites the tester": (ASSERTS, REWRITES + WRONG),
    "patches what compares": (SORTED, PATCHES + "def order(n): return [7]\n"),
    "an import hook": (
        {"test": "import statistics\nassert statistics.mean([add(1, 2)]) == 3\n"},
        WRONG + "import sys\nclass H:\n    def find_spec(self, *a): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, H())\nsys.modules.clear()\n"),
    "traces the server": (
        ASSERTS, WRONG + "import sys\n"
        "sys.settrace(lambda frame, *a: frame.f_locals.update(answer={'value': 3}))\n"),
    "goes on in a child": (ASSERTS, WRONG + "import os\nif os.fork(): os._exit(0)\n"),
    "ends well at once": (ASSERTS, "import os\nos._exit(0)\n"),
    "ends well in the call": (CALLS, "import os\ndef add(a, b): os._exit(0)\n"),
    "ends the tester": (ASSERTS, PARENT % "os.kill(os.getppid(), signal.SIGTERM)"),
    "ends all": (CALLS, PARENT % "os.kill(-1, signal.SIGKILL)"),
    "changes what it is given": (
        {"test": "case = [[1], [3]]\nassert add(case, 0) == [3]\nassert case == [[1], [3]]\n"},
        "def add(xs, n):\n    xs[1][:] = []\n    return xs[1]\n"),
    "a default that remembers": (
        {"test": "want = [12]\nassert add(5, want[:0]) == want\nassert add(5, [1]) == want\n"},
        "def add(n, xs, seen=[]):\n    seen.append(xs)\n    return seen[-1]\n"),
    # printed output
    "prints nothing and ends well": (STDIO, "import sys\nsys.exit(0)\n"),
    "prints all there could be": (STDIO, "print(*range(20), sep='\\n')"),
    "prints not a number": (LOOSE, "print('nan')"),
    "prints an infinity": (LOOSE, "print('1e999')"),
    "prints blanks": (LOOSE, "print(' \\x00 \\n' * 3)"),
    "prints after the first and fails": (STDIO, "print(3)\nraise SystemExit(1)\n"),
}  # fmt: skip


@pytest.mark.parametrize(("tests", "program"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_not_paid(code: CodeTests, tests: Row, program: str) -> None:
    assert outcome(code, tests, program, stop_early=True).problem is not None
    found = outcome(code, tests, program)
    assert found.problem is not None
    assert found.passed < found.total


HANGS = {
    "in a call": (ASSERTS, "def add(a, b):\n    while True: pass\n"),
    "asleep": (CALLS, "import time\ndef add(a, b): time.sleep(1e6)\n"),
    "while it is read": (CHECK, "while True: pass"),
    "in a signal's handler": (ASSERTS, PARENT % "os.kill(os.getppid(), signal.SIGSTOP)"),
    "in a child": (ASSERTS, WRONG + "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(99)\n"),
    "without end": ({"test": "assert list(add(1, 2)) == [3]\n"},
                    "def add(a, b):\n    while True: yield 3\n"),
    "in lists of lists": (CALLS, "def add(a, b):\n    x = []\n    for _ in range(10**6): x = [x]\n"
                          "    return x\n"),
    "in itself": (CALLS, "def add(a, b):\n    x = []\n    x.append(x)\n    return x\n"),
    "with much memory": (ASSERTS, "def add(a, b): return [0] * 10**9"),
    "with many children": (ASSERTS, "import os\nwhile True:\n    try: os.fork()\n"
                           "    except OSError: pass\n"),
    "with many threads": (STDIO, "import threading, time\nwhile True:\n    threading.Thread("
                          "target=time.sleep, args=(99,)).start()\n"),
    "with much output": (STDIO, "while True: print('3' * 9999)"),
    "with many files": (STDIO, "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').write('x' * 99999)\n"
                        "    n += 1\n"),
    "with a large number": (CALLS, "def add(a, b): return 10 ** (10 ** 9)"),
    "with equal hashes": ({"test": "assert set(add(1, 2)) == {3}\n"},
                          "def add(a, b): return [n * (2**61 - 1) for n in range(200000)]"),
    "by a pattern of its own": ({"test": "import re\nassert re.match(add(1, 2), 'a' * 60)\n"},
                                "def add(a, b): return '(a|a|aa)*b'"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", most_are_long(HANGS, ["in a call", "with many children", "in itself"])
)
def test_a_program_that_does_not_end_is_ended(name: str) -> None:
    """All calls of one program together have ten times 0.3 s; a machine under load has more."""
    with CodeTests("auto", timeout_seconds=0.3, num_workers=1) as hasty:
        found = outcome(hasty, *HANGS[name])
        assert found.passed < found.total


def test_an_iterator_without_end_does_not_hold_the_worker_to_its_limit(code: CodeTests) -> None:
    tests = {"test": "for x in f(): assert x == 3\n"}
    found = outcome(code, tests, "def f():\n    while True: yield 3\n")
    assert "more than 65536 items" in str(found.problem)


def test_nothing_is_left_for_the_next_program(code: CodeTests) -> None:
    leave = "import os, socket, time\nopen('/tmp/left', 'w').write('3')\nif os.fork() == 0:\n" \
            "    os.setsid()\n    s = socket.socket(socket.AF_UNIX)\n    s.bind('\\0left')\n" \
            "    s.listen()\n    time.sleep(99)\ntime.sleep(0.5)\nprint(3)\n"  # fmt: skip
    look = "import os, socket\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect('\\0left')\n" \
           "except OSError: print(os.listdir('/tmp') == ['program.py'])\n"  # fmt: skip
    with CodeTests("auto", num_workers=1) as single:
        assert outcome(single, {"inputs": [""], "outputs": ["3"]}, leave).problem is None
        assert outcome(single, {"inputs": [""], "outputs": ["True"]}, look).problem is None


RIGHT: dict[str, tuple[Row, str]] = {
    "an error that derives from a built-in one": (
        {"test": "try:\n    root(-1)\n    assert False\nexcept ValueError as error:\n"
                 "    assert str(error) == 'below'\nassert root(4) == 2\n"},
        "class Negative(ValueError): pass\ndef root(n):\n    if n < 0: raise Negative('below')\n"
        "    return round(n ** 0.5)\n"),
    "an error that derives from its own": (
        {"test": "for bad in (-1, 0):\n    try:\n        take(bad)\n        assert False\n"
                 "    except Problem:\n        pass\nassert take(1) == 1\n"},
        "class Problem(Exception): pass\nclass Low(Problem): pass\nclass Nought(Low): pass\n"
        "def take(n):\n    if n < 1: raise (Nought if n == 0 else Low)(n)\n    return n\n"),
    "an error that the tests import, of a class between": (
        {"test": "from solution import Low, take\ntry:\n    take(0)\n    assert False\n"
                 "except KeyError:\n    assert issubclass(Low, LookupError)\n"},
        "class Low(KeyError): pass\nclass Lower(Low): pass\ndef take(n): raise Lower(n)\n"),
    "objects of its class": (
        {"test": "assert isinstance(make(1), Point)\nassert make(1) == Point(1)\n"
                 "assert not isinstance(3, Point)\nassert make(2).x == 2\n"},
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Point:\n    x: int\n"
        "def make(x): return Point(x)\n"),
    "a context": (
        {"test": "with opened() as got:\n    assert got.is_open\nassert not got.is_open\n"},
        "class opened:\n    is_open = False\n    def __enter__(s):\n        s.is_open = True\n"
        "        return s\n    def __exit__(s, *a): s.is_open = False\n"),
    "a generator, where the tests take any": (SORTED, "def order(n): return range(1, n + 1)\n"),
    "a named tuple and a default dict": (
        {"test": "assert pair() == (1, 2) and pair()[1] == 2\n"
                 "assert count('aab') == {'a': 2, 'b': 1}\n"},
        "from collections import *\nP = namedtuple('P', 'a b')\ndef pair(): return P(1, 2)\n"
        "def count(t):\n    d = defaultdict(int)\n    for c in t: d[c] += 1\n    return d\n"),
    "data of the standard library": (
        {"test": "from fractions import Fraction\nfrom decimal import Decimal\n"
                 "from collections import deque\nimport datetime as d\n"
                 "assert half(1) == Fraction(1, 2) and price() == Decimal('0.50')\n"
                 "assert line(2) == deque([0, Fraction(1)])\n"
                 "assert days() == [d.date(2020, 2, 1), d.datetime(2020, 2, 1, 5)]\n"
                 "assert half(Fraction(1, 2)) == 0.25\n"},
        "from fractions import Fraction\nfrom decimal import Decimal\n"
        "from collections import deque\n"
        "import datetime as d\ndef half(n): return Fraction(n) / 2\n"
        "def price(): return Decimal('0.50')\ndef line(n): return deque(map(Fraction, range(n)))\n"
        "def days(): return [d.date(2020, 2, 1), d.datetime(2020, 2, 1, 5)]\n"),
    "numbers of numpy": (
        {"test": "assert add(1, 2) == 3 and isinstance(add(1, 2), int)\n"
                 "assert rows(2) == [[1, 1], [1, 1]]\n"},
        "import numpy as np\ndef add(a, b): return np.int64(a) + np.int64(b)\n"
        "def rows(n): return np.ones((n, n), int)\n"),
    "recursion with a cache": (
        {"test": "assert fib(400) == fib(399) + fib(398)\nassert fib(80) == 23416728348467685\n"},
        "import functools\n@functools.lru_cache(None)\ndef fib(n): return n if n < 2 else"
        " fib(n - 1) + fib(n - 2)\n"),
    "helpers with built-in names": (
        CHECK, "def sum(*a): return 0\ndef len(x): return -1\nclass int: pass\n"
        "def exit(): raise KeyError\ndef isclose(*a): return False\ndef add(a, b): return a + b\n"),
    "an instance that is called": (
        ASSERTS, "class Add:\n    def __call__(self, a, b): return a + b\nadd = Add()\n"),
    "a partial function": (
        CALLS, "import functools, operator\nadd = functools.partial(operator.add)\n"),
    "a static method": (
        METHOD, "class Solution:\n    @staticmethod\n    def twoSum(nums, target):\n"
        "        return next([i, j] for i, a in enumerate(nums) for j, b in enumerate(nums)\n"
        "                    if i < j and a + b == target)\n"),
    "a main that would fail": (
        ASSERTS, "def add(a, b): return a + b\nif __name__ == '__main__':\n    raise KeyError\n"),
    "an end by exit": (STDIO, "print(sum(map(int, input().split())))\nexit()\n"),
    "an end by quit": (STDIO, "def main():\n    print(sum(map(int, input().split())))\n    quit()\n"
                       "main()\n"),
    "a function named like a helper": (
        {"test": "assert isclose(1, 1) is True\nassert isclose(1, 2) is False\n"},
        "def isclose(a, b): return a == b\n"),
    "a function named like an assertion": (
        {"test": "def check(candidate):\n    assert candidate(2) is True\n    "
                 "assert assert_even(3) is False\n", "entry_point": "assert_even"},
        "def assert_even(n): return n % 2 == 0\n"),
    "an error where any would do": (
        {"test": "try:\n    half(None)\n    assert False, 'no error'\nexcept Exception:\n"
                 "    pass\nassert half(4) == 2\n"}, "def half(n): return n / 2\n"),
    "conditions that it meets, and those of the machine": (
        {"test": "import sys\nr = f(3)\nif r > 2:\n    assert r == 3\nelse:\n    assert r == 1\n"
                 "if r != 3:\n    assert False\nif sys.platform == 'none':\n    assert r == 7\n"},
        "def f(n): return n\n"),
    "empty arrays and equal ones": (
        {"test": "import numpy as np\nassert np.allclose(f(0), [])\n"
                 "assert np.allclose(f(2), 3.0) and np.allclose(a=f(1), b=3)\n"
                 "np.testing.assert_allclose(f(2), [3, 3], rtol=1e-5)\n"
                 "assert not np.allclose(f(2), 4) and not np.allclose(f(0), 3)\n"},
        "def f(n): return [3.0] * n\n"),
    "predicates of a class under test": (
        {"test": "t = Trie()\nt.insert('ab')\nassert t.startswith('a')\n"
                 "assert not t.startswith('b')\nassert 'ab'.startswith(first(t))\n"},
        "class Trie:\n    def __init__(self): self.words = []\n"
        "    def insert(self, word): self.words.append(word)\n"
        "    def startswith(self, p): return any(w.startswith(p) for w in self.words)\n"
        "def first(t): return t.words[0]\n"),
    "functions that the tests hand over": (
        {"test": "assert f(len, 'abc') == 3 and f(sorted, [2, 1]) == [1, 2]\n"
                 "assert f(lambda x: x * 2, 2) == 4 and f(eval, '1+1') == 2\n"
                 "assert f(str.upper, 'a') == 'A' and f(abs, -1) == 1\n"},
        "def f(function, value): return function(value)\n"),
    "floats for integers": ({"fn_name": "f", "inputs": [[4]], "outputs": [2]},
                            "def f(n): return n ** 0.5 + 1e-15\n"),
    "a sum that is nearly nought": ({"fn_name": "f", "inputs": [[1]], "outputs": [0.0]},
                                    "def f(n): return 0.1 + 0.2 - 0.3\n"),
}  # fmt: skip


@pytest.mark.parametrize(("tests", "program"), RIGHT.values(), ids=RIGHT)
def test_a_right_program_in_odd_dress_is_paid(code: CodeTests, tests: Row, program: str) -> None:
    found = outcome(code, tests, program)
    assert found.problem is None
    assert found.passed == found.total > 0
