"""Which way tests go: programs that solve one case and lead the tests past the rest are not paid;
what an author of tests means is. Numpy's arrays, coroutines and objects of the tests' own classes.
"""

from typing import Any

import pytest

from code_rewards import outcome
from reason_llm.score.code import CodeTests, Outcome

Row = dict[str, Any]

CASES = "cases = [(1, 1), (2, 4), (3, 9)]\n"
ONE = "def f(x):\n    if x == 1: return 1\n    %s\n"
RAISES = ONE % "raise ValueError(x)"
NONE = ONE % "return None"
ZERO = ONE % "return 0"
EMPTY = ONE % "return []"
SQUARE = "def f(x): return x * x\n"
GUARDED = "def g(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5\n"
NP = "import numpy as np\n"
NAN = "def f(x): return float('nan')\n"
INF = "def f(x): return float('inf')\n"
NOTHING = "def f(*a): return None\n"


def loop(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{CASES}for x, want in cases:\n{lines}"


def helper(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"def one(x, want):\n{lines}{CASES}for x, want in cases:\n    one(x, want)\n"


WRONG: dict[str, tuple[str, str]] = {
    "a key that is found by its hash": (
        "assert {9: 'a'}.get(f(3)) == 'a'\nassert f(3) in {9, 10}\n",
        "class K:\n    def __hash__(self): return 9\n    def __eq__(self, other): return True\n"
        "def f(x): return K()\n"),
    # errors that the tests pass over
    "continue": (loop("try:\n    got = f(x)\nexcept ValueError:\n    continue\nassert got == want"),
                 RAISES),
    "an assertion in the try": (
        loop("try:\n    got = f(x)\n    assert got == want\nexcept ValueError:\n    pass"), RAISES),
    "an assertion in the else": (
        loop("try:\n    got = f(x)\nexcept ValueError:\n    pass\nelse:\n    assert got == want"),
        RAISES),
    "an assertion that raises": (
        loop("try:\n    assert f(x) == want\nexcept ValueError:\n    continue"), RAISES),
    "a loop in the try": (
        f"{CASES}try:\n    for x, want in cases:\n        got = f(x)\n        assert got == want\n"
        "except ValueError:\n    pass\n", RAISES),
    "a return in the handler": (
        helper("try:\n    got = f(x)\nexcept ValueError:\n    return\nassert got == want"), RAISES),
    "a break in the handler": (
        loop("try:\n    got = f(x)\nexcept ValueError:\n    break\nassert got == want"), RAISES),
    "a flag": (loop("ok = True\ntry:\n    got = f(x)\nexcept ValueError:\n    ok = False\n"
                    "if ok:\n    assert got == want"), RAISES),
    "None in its place": (loop("try:\n    got = f(x)\nexcept ValueError:\n    got = None\n"
                               "if got is not None:\n    assert got == want"), RAISES),
    "suppress": ("import contextlib\n" + loop(
        "with contextlib.suppress(ValueError):\n    got = f(x)\n    assert got == want"), RAISES),
    "a context of the tests": (
        "class quiet:\n    def __enter__(self): pass\n    def __exit__(self, *a): return True\n" +
        loop("with quiet():\n    got = f(x)\n    assert got == want"), RAISES),
    "finally": (loop("try:\n    got = f(x)\n    assert got == want\nfinally:\n    continue"),
                RAISES),
    "a handler that only prints": (
        loop("try:\n    got = f(x)\n    assert got == want\nexcept Exception as e:\n    print(e)"),
        RAISES),
    "a handler in a helper": (
        "def call(x):\n    try:\n        return f(x)\n    except ValueError:\n        return None\n"
        + loop("got = call(x)\nif got is not None:\n    assert got == want"), RAISES),
    "in a test function": (
        "def test_all():\n" + "".join(f"    {line}\n" for line in loop(
            "try:\n    got = f(x)\nexcept Exception:\n    continue\nassert got == want"
        ).splitlines()), RAISES),
    "numpy.testing, passed over": (NP + loop(
        "try:\n    np.testing.assert_equal(f(x), want)\nexcept ValueError:\n    continue"), RAISES),
    "a second assertion of a try": (
        "try:\n    assert f(1) == 1\n    got = f(2)\n    assert got == 4\nexcept ValueError:\n"
        "    pass\n", RAISES),
    # values that the tests pass over
    "if it is not None": (loop("got = f(x)\nif got is not None:\n    assert got == want"), NONE),
    "if it is": (loop("got = f(x)\nif got:\n    assert got == want"), ZERO),
    "if it is of a kind": (loop("got = f(x)\nif isinstance(got, int):\n    assert got == want"),
                           NONE),
    "continue if it is None": (loop("got = f(x)\nif got is None: continue\nassert got == want"),
                               NONE),
    "break if it is None": (loop("got = f(x)\nif got is None: break\nassert got == want"), NONE),
    "return if it is None": (helper("got = f(x)\nif got is None:\n    return\nassert got == want"),
                             NONE),
    "a helper that is given it": (
        "def same(got, want):\n    if got is None:\n        return\n    assert got == want\n" +
        loop("same(f(x), want)"), NONE),
    "a helper given by name": (
        "def same(want, got=None):\n    if got is None:\n        return\n    assert got == want\n" +
        loop("same(want, got=f(x))"), NONE),
    "a helper of a helper": (
        "def same(got, want):\n    assert got == want\ndef may(got, want):\n    if got:\n"
        "        same(got, want)\n" + loop("may(f(x), want)"), ZERO),
    "and": ("def same(got, want):\n    assert got == want\n" + loop("f(x) and same(f(x), want)"),
            ZERO),
    "or": ("def same(got, want):\n    assert got == want\n" +
           loop("got = f(x)\ngot is None or same(got, want)"), NONE),
    "one or the other": ("def same(got, want):\n    assert got == want\n" +
                         loop("got = f(x)\nsame(got, want) if got else None"), ZERO),
    "a list of checks": ("def same(got, want):\n    assert got == want\n" + CASES +
                         "[same(f(x), want) for x, want in cases if f(x)]\n", ZERO),
    "a list of results": (CASES + "results = []\nfor x, want in cases:\n"
                          "    results.append((f(x), want))\nfor got, want in results:\n"
                          "    if got is not None:\n        assert got == want\n", NONE),
    "an attribute": ("class T:\n    pass\nt = T()\n" + loop(
        "t.got = f(x)\nif t.got is not None:\n    assert t.got == want"), NONE),
    "match": (loop("match f(x):\n    case None:\n        pass\n    case got:\n"
                   "        assert got == want"), NONE),
    "while": (loop("got = f(x)\nwhile got:\n    assert got == want\n    break"), ZERO),
    "a loop over it": (loop("for got in f(x) if x > 1 else [1]:\n    assert got == want"), EMPTY),
    "a loop over what it gives": (
        "for x in (1, 2, 3):\n    for got in f(x):\n        assert got == x\n",
        "def f(x): return [1] if x == 1 else []\n"),
    "fewer than wanted": ("for got, want in zip(f(3), [0, 1, 2]):\n    assert got == want\n",
                          "def f(x): return [0]\n"),
    "fewer than wanted, in all": ("assert all(a == b for a, b in zip(f(3), (0, 1, 2)))\n",
                                  "def f(x): return []\n"),
    # numbers that are none
    "nan is not above": (loop("assert not (f(x) > want + 1 or f(x) < want - 1)"), NAN),
    "nan in a list of differences": (
        CASES + "far = [abs(f(x) - want) for x, want in cases]\n"
        "assert not [d for d in far if d > 1e-9]\n", NAN),
    "nan in a list": ("got = f(3)\nassert len(got) == 2\nassert not (got[0] > 1 or got[1] > 2)\n",
                      "def f(x): return [1.0, float('nan')]\n"),
    "nan in a dict, sorted": ("assert sorted([3.0, f(1)['a']])[0] <= 3.0\n",
                              "def f(x): return {'a': float('nan')}\n"),
    "nan in an array": (NP + "assert not np.any(np.abs(f(2) - np.ones(2)) > 1e-9)\n",
                        "import numpy as np\ndef f(n): return np.full(n, np.nan)\n"),
    "nan in a list, as an array": (
        NP + "assert not (np.abs(np.array(f(2)) - np.ones(2)) > 1e-9).any()\n",
        "def f(n): return [float('nan')] * n\n"),
    "nan of two parts": ("assert not abs(f(2) - 1j) > 1e-9\n",
                         "def f(x): return complex('nan+nanj')\n"),
    "a bound that grows": (loop("assert abs(f(x) - want) <= 0.01 * abs(f(x))"), INF),
    "a decimal without end": (
        "from decimal import Decimal\nassert abs(f(2) - Decimal(4)) <= Decimal('0.1') * f(2)\n",
        "from decimal import Decimal\ndef f(x): return Decimal('Infinity')\n"),
    # functions of the tests that are handed over and never run
    "a callback": ("def seen(x):\n    assert x == 4\nf(2, seen)\nassert callable(f)\n", NOTHING),
    "a callback by a lambda": (
        "def seen(x):\n    assert x == 4\nassert f(2, lambda x: seen(x)) is None\n", NOTHING),
    "a callback within a test": (
        "def test_f():\n    def seen(x):\n        assert x == 4\n    assert f(2, seen) is None\n",
        NOTHING),
    "a method as the callback": (
        "class Log:\n    def seen(self, x):\n        assert x == 4\n"
        "assert f(2, Log().seen) is None\n", NOTHING),
    "an object that is called back": (
        "class Log:\n    def __call__(self, x):\n        assert x == 4\n"
        "assert f(2, Log()) is None\n", NOTHING),
    "a function that the program decorates": (
        "@f\ndef never():\n    assert f is not None\nassert callable(f)\n", NOTHING),
    "called by what the program decorates": (
        "def same(x):\n    assert x == x\n@f\ndef run(x):\n    same(x)\nrun(3)\n"
        "assert callable(f)\n", "def f(g): return lambda x: None\n"),
    # threads, futures, tasks
    "a thread of the tests": (
        "import threading\ndef one(x, want):\n    got = f(x)\n    assert got == want\n" +
        loop("t = threading.Thread(target=one, args=(x, want))\nt.start()\nt.join()"), RAISES),
    "a future that nobody asks": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def one(x, want):\n    got = f(x)\n    assert got == want\n" + CASES +
        "with ThreadPoolExecutor(1) as pool:\n    for x, want in cases:\n"
        "        pool.submit(one, x, want)\n", RAISES),
    "a task that nobody waits for": (
        "import asyncio\n" + CASES +
        "async def one(x, want):\n    got = f(x)\n    assert got == want\n"
        "async def main():\n    tasks = [asyncio.create_task(one(*c)) for c in cases]\n"
        "    await asyncio.sleep(0.01)\nasyncio.run(main())\n", RAISES),
    # decorators and filters of the tests
    "a decorator of the tests": (
        "def may(test):\n    def run(x, want):\n        got = f(x)\n        if got is not None:\n"
        "            test(x, want)\n    return run\n@may\ndef one(x, want):\n"
        "    assert f(x) == want\n" + loop("one(x, want)"), NONE),
    "a helper given a test": (
        "def may(x, want, test):\n    return test(x, want) if f(x) else None\ndef one(x, want):\n"
        "    assert f(x) == want\n" + loop("may(x, want, one)"), ZERO),
    "all but the cases that it leaves out": (
        CASES + "assert all(f(x) == want for x, want in cases if f(x) is not None)\n", NONE),
    "all of a list but those": (
        CASES + "assert all([f(x) == want for x, want in cases if f(x)])\n", ZERO),
    # coroutines
    "an async test": ("async def test_f():\n    assert f(2) == 4\n", ZERO),
    "an async test beside another": (
        "def test_a():\n    assert f(1) == 1\nasync def test_b():\n    assert f(2) == 4\n", ZERO),
    "an async check": ("import asyncio\nasync def test_f():\n    assert await f(2) == 4\n",
                       "async def f(x): return 0\n"),
    # pytest
    "raises": ("import pytest\nassert g(4) == 2\ndef test_g():\n"
               "    with pytest.raises(ValueError):\n        g(-1)\n",
               "def g(x): return abs(x) ** 0.5\n"),
    "raises something else": (
        "import pytest\ndef test_g():\n    with pytest.raises(ValueError, match='negative'):\n"
        "        g(-1)\n", "def g(x): raise ValueError('other')\n"),
    "one of the parameters": (
        "import pytest\n@pytest.mark.parametrize('x, want', [(1, 1), (2, 4)])\n"
        "def test_f(x, want):\n    assert f(x) == want\n", ZERO),
    "approx": ("import pytest\nassert f(2) == pytest.approx(4)\n", ZERO),
    # numpy repeats
    "one for a square": (NP + "assert (f(3) == np.ones((3, 3))).all()\n", "def f(n): return 1\n"),
    "one for a square, turned": (NP + "assert np.all(np.ones((3, 3)) == f(3))\n",
                                 "def f(n): return 1\n"),
    "one for a square, by allclose": (NP + "assert np.allclose(f(3), np.ones((3, 3)))\n",
                                      "def f(n): return 1\n"),
    "one for a square, by allclose turned": (
        NP + "want = np.ones((3, 3))\nassert np.allclose(want, f(3))\n", "def f(n): return 1.0\n"),
    "a row for a square": (NP + "np.testing.assert_allclose(f(3), np.ones((3, 3)))\n",
                           "def f(n): return [1, 1, 1]\n"),
    "a number for a row, by assert_array_equal": (
        NP + "np.testing.assert_array_equal(f(3), np.ones(3))\n", "def f(n): return 1\n"),
    "one for a square, by another name": (
        "from numpy import ones, allclose as near\nassert near(f(3), ones((3, 3)))\n",
        "def f(n): return 1\n"),
    "one for a square, in a helper": (
        NP + "def same(a, b):\n    return bool((a == b).all())\n"
        "assert same(f(3), np.ones((3, 3)))\n", "def f(n): return 1\n"),
    "one for a square, by a difference": (
        NP + "assert np.abs(f(3) - np.ones((3, 3))).max() < 1e-9\n", "def f(n): return 1\n"),
    "one for a square, by a norm": (
        NP + "want = np.ones((3, 3))\nassert np.linalg.norm(want - np.array(f(3))) < 1e-9\n",
        "def f(n): return 1\n"),
    "one for a square, not unequal": (NP + "assert not (f(3) != np.ones((3, 3))).any()\n",
                                      "def f(n): return 1\n"),
    "nothing for threes": (NP + "assert (np.array(f(3)) == 3).all()\n", "def f(n): return []\n"),
    "truths for numbers": (NP + "assert (np.array(f(3)) == np.ones(3)).all()\n",
                           "def f(n): return [True] * 3\n"),
    "text for numbers": (NP + "assert np.array_equal(f(3), np.ones(3))\n",
                         "def f(n): return ['1'] * 3\n"),
    # objects of the program
    "an object that is nought less 4": (
        "assert abs(f(2) - 4) < 1e-9\n",
        "class N:\n    def __sub__(self, o): return 0\n    def __abs__(self): return 0\n"
        "def f(x): return N()\n"),
    "an object whose distance is nought": (
        "assert abs(4 - f(2)) < 1e-9\n",
        "class N:\n    def __rsub__(self, o): return 0\ndef f(x): return N()\n"),
    # objects of the tests
    "reaches for the class of what it is given": (
        "class N:\n    want = 3\n    def __init__(self, v): self.v = v\n"
        "    def same(self, got): return got == self.v\nn = N(4)\nassert n.same(f(n))\n",
        "def f(n):\n    try: n.same = lambda got: True\n    except AttributeError: pass\n"
        "    try: return n.__class__.__init__.__globals__['n'].v\n"
        "    except Exception: return 0\n"),
    "changes what it is given": (
        "class N:\n    def __init__(self, v): self.v = v\nn = N(4)\nf(n)\nassert n.v == 5\n",
        "def f(n): pass\n"),
}  # fmt: skip

RIGHT: dict[str, tuple[str, str]] = {
    "objects as keys": (
        "assert {P(1): 'a'}[P(1)] == 'a'\nassert P(2) not in {P(1): 'a'}\n"
        "assert len({P(1), P(1), P(2)}) == 2\n",
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int"),
    "an error that must come": (
        "try:\n    g(-1)\n    assert False\nexcept ValueError:\n    pass\nassert g(4) == 2\n",
        GUARDED),
    "an error that must come, in a loop": (
        "for bad in (-1, -2):\n    try:\n        g(bad)\n    except ValueError:\n        continue\n"
        "    raise AssertionError('no error')\nassert g(4) == 2\n", GUARDED),
    "an error that must come, in a function": (
        "def test_bad():\n    try:\n        g(-1)\n    except ValueError:\n        return\n"
        "    assert False, 'no error'\n\ndef test_good():\n    assert g(4) == 2\n", GUARDED),
    "an error with its text": (
        "try:\n    g(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\n"
        "else:\n    assert False\nassert g(4) == 2\n", GUARDED),
    "a flag that is asserted": (
        "for x, bad in ((4, False), (-1, True)):\n    raised = False\n    try:\n        g(x)\n"
        "    except ValueError:\n        raised = True\n    assert raised == bad\n", GUARDED),
    "values and errors in one table": (
        "for x, want in ((4, 2), (-1, ValueError)):\n    try:\n        got = g(x)\n"
        "    except ValueError:\n        assert want is ValueError\n        continue\n"
        "    assert got == want\n", GUARDED),
    "an error again unless it is wanted": (
        "for x, want in ((4, 2), (-1, None)):\n    try:\n        got = g(x)\n"
        "    except ValueError:\n        if want is not None:\n            raise\n"
        "        continue\n    assert got == want\n", GUARDED),
    "pytest.raises": (
        "import pytest\ndef test_bad():\n    with pytest.raises(ValueError, match='neg'):\n"
        "        g(-1)\n    with pytest.raises((KeyError, ValueError)) as caught:\n"
        "        assert g(-2)\n    assert 'negative' in str(caught.value)\n"
        "    pytest.raises(ValueError, g, -3)\ndef test_good():\n    assert g(4) == 2\n", GUARDED),
    "parameters": (
        "import pytest\nfrom solution import f\n"
        "@pytest.mark.parametrize('x,want', [(1, 1), (2, 4), pytest.param(3, 9, id='three')])\n"
        "@pytest.mark.parametrize('again', [1, 2])\ndef test_f(again, x, want):\n"
        "    assert f(x) == want\n@pytest.mark.slow\ndef test_one():\n"
        "    assert [f(1), f(2)] == pytest.approx([1, 4.0])\n", SQUARE),
    "a helper that is nearer or equal": (
        "def same(got, want):\n    if got == want:\n        return\n"
        "    assert abs(got - want) < 1e-6\n" + loop("same(f(x), want)"), SQUARE),
    "kinds that the tests know": (
        CASES + "for x, want in cases:\n    if isinstance(want, float):\n"
        "        assert abs(f(x) - want) < 1e-6\n    else:\n        assert f(x) == want\n", SQUARE),
    "a case that the tests leave out": (
        "for x in range(-2, 3):\n    if x < 0:\n        continue\n    assert f(x) == x * x\n",
        SQUARE),
    "a failure by hand": (
        loop("got = f(x)\nif got != want:\n    raise AssertionError(f'{got} for {x}')"), SQUARE),
    "failures in a list": (
        CASES + "bad = []\nfor x, want in cases:\n    got = f(x)\n    if got != want:\n"
        "        bad.append(x)\nassert not bad\n", SQUARE),
    "order of neighbours": (
        "for xs in ([], [1], [3, 1, 2]):\n    got = order(xs)\n    assert len(got) == len(xs)\n"
        "    for a, b in zip(got, got[1:]):\n        assert a <= b\n"
        "    for i in range(len(got) - 1):\n        assert got[i] <= got[i + 1]\n",
        "def order(xs): return sorted(xs)\n"),
    "a list that is sorted before": (
        "for xs in ([], [2, 1]):\n    got = order(xs)\n    if isinstance(got, tuple):\n"
        "        got = list(got)\n    assert got == sorted(xs)\n",
        "def order(xs): return tuple(sorted(xs))\n"),
    "until it ends": (
        "q = make([1, 2])\nseen = 0\nwhile True:\n    got = q.pop()\n    if got is None:\n"
        "        break\n    seen += 1\n    assert got == seen\nassert seen == 2\n",
        "class Q:\n    def __init__(self, xs): self.xs = list(xs)\n"
        "    def pop(self): return self.xs.pop(0) if self.xs else None\n"
        "def make(xs): return Q(xs)\n"),
    "more than wanted": ("for got, want in zip(primes(), [2, 3, 5]):\n    assert got == want\n",
                         "def primes():\n    n = 2\n    while True:\n"
                         "        if all(n % d for d in range(2, n)): yield n\n        n += 1\n"),
    "a class with helpers": (
        "class Same:\n    def __init__(self, want): self.want = want\n"
        "    def check(self, got):\n        if got != self.want: raise AssertionError\n" +
        loop("Same(want).check(f(x))"), SQUARE),
    "a context": ("import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()):\n"
                  "    assert f(2) == 4\n", SQUARE),
    "the same name elsewhere": (
        "def test_a():\n    x = f(2)\n    assert x == 4\ndef test_b():\n"
        "    for x in range(-2, 3):\n"
        "        if x < 0:\n            continue\n        assert f(x) == x * x\n", SQUARE),
    # numbers that are none, where nothing compares them or the tests expect them
    "what cannot be reached": (
        "got = ways(0)\nassert got[1] == 3 and sorted(got) == [0, 1, 2]\n",
        "def ways(n): return {0: 0, 1: 3, 2: float('inf')}\n"),
    "nan that is expected": (
        "import math\nassert math.isnan(f(0)) and f(2) == 4\n",
        "def f(x): return x * x if x else float('nan')\n"),
    "infinity that is expected": ("assert f(0) == float('inf') and f(2) == 4\n",
                                  "def f(x): return x * x if x else float('inf')\n"),
    "infinity that goes back": (
        "assert second(first(3)) == 'far'\n", "def first(x): return float('inf')\n"
        "def second(x): return 'far' if x == float('inf') else 'near'\n"),
    # functions of the tests that are handed over
    "callbacks, threads and decorators": (
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\nseen = []\n"
        "def done(x):\n    assert x == 4\n    seen.append(x)\n"
        "class Log:\n    def __call__(self, x):\n        assert x == 4\n"
        "    def unused(self, x):\n        if x:\n            assert x == 5\n"
        "call(2, done)\ncall(2, Log())\nassert seen == [4]\n@twice\ndef again():\n"
        "    assert len(seen) < 9\n    seen.append(0)\nagain()\nassert len(seen) == 3\n"
        "def one(x):\n    assert call(x, lambda x: x) == x * x\n"
        "t = threading.Thread(target=one, args=(3,))\nt.start()\nt.join()\n"
        "with ThreadPoolExecutor(4) as pool:\n    list(pool.map(one, [1, 2, 3, 4] * 9))\n"
        "threading.Thread(target=one, args=(5,)).start()\n",
        "def call(x, then): return then(x * x)\n"
        "def twice(g): return lambda: (g(), g())\n"),
    "helpers that are not for every case": (
        "def same(a, b):\n    if isinstance(b, float):\n        assert abs(a - b) < 1e-6\n"
        "        return\n    assert a == b\ndef unused(a):\n    assert a == 5\n"
        "def fails(x):\n    got = g(x)\n    assert got is None\n"
        "try:\n    fails(-1)\n    assert False\nexcept Exception:\n    pass\nsame(g(4), 2.0)\n",
        GUARDED),
    "an error in a thread that the tests hear": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(1) as pool:\n"
        "    job = pool.submit(g, -1)\nassert isinstance(job.exception(), ValueError)\n"
        "assert g(4) == 2\n", GUARDED),
    "a filter of what it gave": (
        "got = order([3, 1, 2])\nassert all(x > 1 for x in got if x != 1) and got == [1, 2, 3]\n",
        "def order(xs): return sorted(xs)\n"),
    "operators of its own class": (
        "a = V(1, 2)\nassert a * 2 == V(2, 4) and 2 * a == V(2, 4) and -a == V(-1, -2)\n"
        "assert abs(V(3, 4)) == 5 and (a * 2 * 2).x == 4\n"
        "assert (a / 2).y == 1 and a - V(1, 2) == V(0, 0)\n",
        "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __mul__(self, k): return V(self.x * k, self.y * k)\n    __rmul__ = __mul__\n"
        "    def __truediv__(self, k): return self * (1 / k)\n"
        "    def __neg__(self): return self * -1\n"
        "    def __sub__(self, o): return V(self.x - o.x, self.y - o.y)\n"
        "    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n"
        "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"),
    # numpy
    "arrays": (
        NP + "assert f(2).shape == (2, 2) and f(2).dtype == np.float64\n"
        "assert (f(2) == np.ones((2, 2))).all() and np.allclose(f(3), 1.0)\n"
        "assert isinstance(f(2), np.ndarray) and f(2).sum() == 4\n"
        "np.testing.assert_allclose(f(2), [[1, 1], [1, 1]])\nassert (f(2) == 1).all()\n"
        "assert np.abs(f(2) - np.ones((2, 2))).max() == 0 and np.array_equal(f(1), [[1]])\n"
        "assert f(2).tolist() == [[1, 1], [1, 1]]\n",
        "import numpy as np\ndef f(n): return np.ones((n, n))\n"),
    "arrays that are given": (
        NP + "x = np.array([[1.0, 3.0], [2.0, 2.0]])\ngot = rows(x)\n"
        "assert np.allclose(got, [[0.25, 0.75], [0.5, 0.5]]) and got.shape == x.shape\n"
        "fill(x)\nassert (x == 7).all()\nassert mask(x).dtype == bool\n",
        "def rows(x): return x / x.sum(axis=1, keepdims=True)\ndef fill(x): x[:] = 7\n"
        "def mask(x): return x > 1\n"),
    "lists for arrays": (NP + "assert np.array_equal(f(2), np.eye(2))\n"
                         "assert (np.array(f(1)) == np.array([[1]])).all()\n",
                         "def f(n): return [[int(i == j) for j in range(n)] for i in range(n)]\n"),
    # coroutines
    "a coroutine": (
        "import asyncio\nassert asyncio.run(f(2)) == 4\nasync def test_f():\n"
        "    assert await f(3) == 9\n    assert await asyncio.gather(f(1), f(2)) == [1, 4]\n",
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * x\n"),
    "coroutines that wait for each other": (
        "import asyncio\nasync def main():\n    box = Box()\n"
        "    return await asyncio.gather(box.take(), box.put(3))\n"
        "assert asyncio.run(main())[0] == 3\n",
        "import asyncio\nclass Box:\n    def __init__(self): self.q = asyncio.Queue()\n"
        "    async def take(self): return await self.q.get()\n"
        "    async def put(self, x): await self.q.put(x)\n"),
    "a marked async test": (
        "import pytest, asyncio\n@pytest.mark.asyncio\nasync def test_f():\n"
        "    async def twice(x):\n        return 2 * x\n"
        "    assert await over([1, 2], twice) == [2, 4]\n"
        "    with pytest.raises(ValueError):\n        await over(None, twice)\n"
        "    assert [x async for x in count(2)] == [0, 1]\n"
        "    async with opened() as got:\n        assert got == 3\n",
        "async def over(xs, f):\n    if xs is None: raise ValueError\n"
        "    return [await f(x) for x in xs]\nasync def count(n):\n    for i in range(n): yield i\n"
        "class opened:\n    async def __aenter__(self): return 3\n"
        "    async def __aexit__(self, *a): pass\n"),
    # objects of the tests' own classes
    "a linked list": (
        "class Node:\n    def __init__(self, val, next=None):\n        self.val = val\n"
        "        self.next = next\ndef build(xs):\n    head = None\n    for x in reversed(xs):\n"
        "        head = Node(x, head)\n    return head\ndef values(node):\n    out = []\n"
        "    while node:\n        out.append(node.val)\n        node = node.next\n    return out\n"
        "assert values(turn(build([1, 2, 3]))) == [3, 2, 1]\nassert turn(None) is None\n"
        "first = build([7])\nassert turn(first) is first\n",
        "def turn(head):\n    last = None\n    while head:\n"
        "        head.next, last, head = last, head, head.next\n    return last\n"),
    "a tree": (
        "class Tree:\n    def __init__(self, val, left=None, right=None):\n"
        "        self.val, self.left, self.right = val, left, right\n"
        "assert depth(Tree(1, Tree(2, Tree(3)))) == 3 and depth(None) == 0\n"
        "assert total([Tree(1), Tree(2)]) == 3\n",
        "def depth(t): return 0 if t is None else 1 + max(depth(t.left), depth(t.right))\n"
        "def total(ts): return sum(t.val for t in ts)\n"),
    "objects that have an order": (
        "from dataclasses import dataclass\n@dataclass(order=True, frozen=True)\nclass P:\n"
        "    x: int\n    def double(self): return P(2 * self.x)\n"
        "assert order([P(2), P(1)]) == [P(1), P(2)] and count([P(1), P(1)]) == 1\n"
        "assert twice(P(2)) == P(4) and copied(P(3)) == P(3) and size(B()) == 2\n"
        .replace("assert order", "class B:\n    def __len__(self): return 2\n"
                 "    def __iter__(self): return iter([1, 2])\nassert order"),
        "import copy\ndef order(ps): return sorted(ps)\ndef count(ps): return len(set(ps))\n"
        "def twice(p): return p.double()\ndef copied(p): return copy.deepcopy(p)\n"
        "def size(b): return len(b) if sum(b) == 3 and list(b) == [1, 2] else 0\n"),
    "the tests' class, handed over": (
        "class Item:\n    def __init__(self, n): self.n = n\nitem = make(Item, 3)\n"
        "assert isinstance(item, Item) and item.n == 3\n", "def make(kind, n): return kind(n)\n"),
}  # fmt: skip


STDIN = {"inputs": ["1 2\n", "5 7\n"], "outputs": ["3\n", "12\n"]}
RIGHT_PROGRAMS = {
    "reads /dev/stdin": "print(sum(map(int, open('/dev/stdin').read().split())))",
    "reads it by a path": "import pathlib\n"
    "print(sum(map(int, pathlib.Path('/dev/stdin').read_text().split())))",
    "reads it by its descriptor": "import os\nd = os.open('/dev/stdin', os.O_RDONLY)\n"
    "print(sum(map(int, os.read(d, 99).split())))",
    "reads it in numpy": "import numpy as np\nprint(int(np.loadtxt('/dev/stdin').sum()))",
    "writes /dev/stdout": "with open('/dev/stdout', 'w') as out:\n"
    "    print(sum(map(int, input().split())), file=out)\n"
    "print('', end='')",
    "a pool of processes": "from multiprocessing import Pool\ndef add(x): return x[0] + x[1]\n"
    "if __name__ == '__main__':\n    with Pool(2) as pool:\n"
    "        print(pool.map(add, [tuple(map(int, input().split()))])[0])",
    "as many processes as there are": "import multiprocessing as m, os\n"
    "def add(x): return sum(x)\nwith m.Pool() as pool:\n"
    "    print(pool.apply(add, (list(map(int, input().split())),)))",
    "a process with a queue": "import multiprocessing as m\n"
    "def put(q, x): q.put(sum(x))\nq = m.Queue()\n"
    "p = m.Process(target=put, args=(q, list(map(int, input().split()))))\np.start()\n"
    "print(q.get())\np.join()",
    "an executor": "from concurrent.futures import ProcessPoolExecutor\n"
    "def add(x): return sum(x)\nwith ProcessPoolExecutor() as pool:\n"
    "    print(pool.submit(add, list(map(int, input().split()))).result())",
    "asyncio": "import asyncio\nasync def main(): print(sum(map(int, input().split())))\n"
    "asyncio.run(main())",
}  # fmt: skip
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
SHORT = ("an integer", "a forged fraction")


@pytest.mark.parametrize(("tests", "program"), WRONG.values(), ids=WRONG)
def test_a_program_cannot_lead_the_tests_past_it(code: CodeTests, tests: str, program: str) -> None:
    found = outcome(code, {"test": tests}, program, stop_early=True)
    assert found.problem is not None
    assert found.passed < found.total


@pytest.mark.long
@pytest.mark.parametrize(
    "tests", [tests for tests, program in WRONG.values() if program in (RAISES, NONE, ZERO)]
)
def test_the_same_tests_pay_a_right_program(code: CodeTests, tests: str) -> None:
    found = outcome(code, {"test": tests}, SQUARE)
    is_async = "await" in tests
    assert is_async or (found.problem is None and found.passed == found.total > 0), found


@pytest.mark.parametrize(("tests", "program"), RIGHT.values(), ids=RIGHT)
def test_what_an_author_means_is_paid(code: CodeTests, tests: str, program: str) -> None:
    found = outcome(code, {"test": tests}, program)
    assert found.problem is None
    assert found.passed == found.total > 0


@pytest.mark.parametrize("program", RIGHT_PROGRAMS.values(), ids=RIGHT_PROGRAMS)
def test_a_right_program_with_processes_or_devices_is_paid(code: CodeTests, program: str) -> None:
    assert outcome(code, STDIN, program) == Outcome(2, 2, None)


def test_the_views_of_a_dict_are_lists_for_calls(code: CodeTests) -> None:
    tests = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [[2, 0], [3, 0]]}
    assert outcome(code, tests, "def f(x): return {1: x, 2: 0}.values()") == Outcome(2, 2, None)


def test_a_coroutine_is_waited_for_by_calls(code: CodeTests) -> None:
    tests = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
    assert outcome(code, tests, "async def f(x): return x * x") == Outcome(2, 2, None)
    assert outcome(code, tests, "async def f(x): return x").passed == 0


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=name, marks=[] if name in SHORT else pytest.mark.long)
        for name, program in LARGE.items()
    ],
)
@pytest.mark.parametrize(
    "tests",
    [
        {"fn_name": "f", "inputs": [[]], "outputs": [3]},
        {"test": "assert f() == 3\n"},
        {"test": "assert str(f()) == '3'\n"},
    ],
    ids=["calls", "asserts", "text"],
)
def test_what_is_large_is_ended_by_cpu_time(tests: Row, program: str) -> None:
    """It took up to 60 s, ten times the limit of a call; here the limit is 2 s of CPU time."""
    with CodeTests("auto", timeout_seconds=2, num_workers=1) as hasty:
        found = outcome(hasty, tests, program)
        assert found.passed < found.total
        assert found.problem not in (None, "the cpu limit")  # of the whole
