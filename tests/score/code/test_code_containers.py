"""Lists and their like: what the program does to those of the tests, whenever it does it, is done
to them; classes of the program that derive from them have their own methods, and never the word on
what they equal."""

import pytest

from code_rewards import outcome
from reason_llm.score.code import CodeTests
from reason_llm.score.code.jail.shared import Shared

KEEPS = "class Box:\n    def __init__(self, xs): self.xs = xs\n"
TRACED = (
    "log = []\nwith traced(log):\n    log.append('body')\nassert log == ['in', 'body', 'out']\n"
    "try:\n    with traced(log):\n        raise KeyError\n    assert False\n"
    "except KeyError:\n    pass\nassert log[3:] == ['in', 'out']\n"
)
TRACES = (
    "from contextlib import contextmanager\n@contextmanager\ndef traced(log):\n"
    "    log.append('in')\n"
)

RIGHT: dict[str, tuple[str, str]] = {
    # what else goes over
    "attributes of an error": (
        "import pytest\nwith pytest.raises(Short) as info:\n    pay(3)\n"
        "assert info.value.missing == 3 and info.value.where.name == 'till'\n",
        "class Till: name = 'till'\nclass Short(Exception):\n"
        "    def __init__(self, missing):\n        self.missing, self._hidden = missing, object()\n"
        "        self.where = Till()\ndef pay(n): raise Short(n)\n"),
    "iterators of the tests, also endless ones": (
        "from itertools import count, islice\n"
        "assert list(islice(double(count()), 3)) == [0, 2, 4]\n"
        "it = iter([1, 2, 3])\nassert first(it) == 1 and list(it) == [2, 3]\n"
        "assert first(n for n in ()) is None\n",
        "def double(values):\n    for each in values: yield 2 * each\n"
        "def first(values): return next(values, None)\n"),
    "a function of the tests that is decorated": (
        "@counted\ndef add(a, b=0):\n    'Adds.'\n    return a + b\n"
        "assert add(1, b=2) == 3 and add.__name__ == 'add' and add.calls == 1\n"
        "assert add.__doc__ == 'Adds.'\n",
        "import functools\ndef counted(function):\n    @functools.wraps(function)\n"
        "    def call(*args, **named):\n        call.calls += 1\n"
        "        return function(*args, **named)\n    call.calls = 0\n    return call\n"),
    "an error within contexts of both": (
        "class Seen:\n    def __enter__(self): self.kinds = []\n"
        "    def __exit__(self, kind, error, trace):\n        self.kinds.append(kind)\n"
        "        return True\n"
        "seen, log = Seen(), []\nwith seen:\n    with traced(log):\n        assert log == ['in']\n"
        "        raise KeyError('x')\nassert seen.kinds == [KeyError] and log == ['in', 'out']\n",
        TRACES + "    try: yield\n    finally: log.append('out')\n"),
    "named tuples of the tests": (
        "from collections import namedtuple\nP = namedtuple('P', 'name age')\n"
        "people = [P('Ann', 31), P('Bob', 25)]\n"
        "got = oldest(people, lambda p: p.age)\n"
        "assert got.name == 'Ann' and got is people[0] and names(people) == ['Ann', 'Bob']\n",
        "def oldest(people, key): return max(people, key=key)\n"
        "def names(people): return [name for name, _ in people]\n"),
    "what an object holds by its own word": (
        "c = Cache()\nc.put('a')\nassert 'a' in c and 'b' not in c\n"
        "assert Cache.__doc__ == 'Keeps.' and 2 in upto(3)\n",
        "class Cache:\n    'Keeps.'\n    def __init__(self): self._data = {}\n"
        "    def put(self, key): self._data[key] = 1\n"
        "    def __contains__(self, key): return key in self._data\n"
        "class Up:\n    def __iter__(self): return iter([1, 2, 3])\n"
        "def upto(n): return Up()\n"),
    "a generator": (
        "import types, inspect\nassert isinstance(f(), types.GeneratorType)\n"
        "assert inspect.isgenerator(f()) and list(f()) == [1] and not inspect.isgenerator(g())\n",
        "def f(): yield 1\ndef g(): return iter([1])\n"),
    "copies, powers, properties of errors, a function given twice": (
        "import copy\nv = V(2)\nw = copy.copy(v)\nw.x = 9\nassert v.x == 2 and w.x == 9\n"
        "assert copy.deepcopy(v) == v and (v ** 3).x == 8\n"
        "seen = []\ndef hear(x): seen.append(x)\ntry:\n    v.on(hear).off(hear).tell(1)\n"
        "    assert False\nexcept Short as error:\n    assert error.by == 3 and seen == []\n",
        "class Short(Exception):\n    by = property(lambda self: self._by)\n"
        "class V:\n    def __init__(self, x): self.x, self.all = x, []\n"
        "    def __eq__(self, other): return self.x == other.x\n"
        "    def __pow__(self, n): return V(self.x ** n)\n"
        "    def on(self, f): self.all.append(f); return self\n"
        "    def off(self, f): self.all = [g for g in self.all if g != f]; return self\n"
        "    def tell(self, x):\n        for f in self.all: f(x)\n"
        "        error = Short()\n        error._by = 3\n        raise error\n"),
    "loops over lists that the program changes as it should": (
        "xs = [3, 1, 2]\nsort(xs)\nfor p, q in zip(xs, xs[1:]):\n    assert p < q\n"
        "queue, n = [5], 0\nfor x in queue:\n    n += 1\n    grow(queue)\nassert n == 4\n"
        "cut(xs)\nassert [x for x in xs] == [1, 2]\n",
        "def sort(xs): xs.sort()\ndef cut(xs): xs.pop()\n"
        "def grow(queue):\n    if len(queue) < 4: queue.append(len(queue))\n"),
    "ranges and views of dicts": (
        "d = {1: 2}\nassert total(range(4)) == 6 and total(d.values()) == 2\n"
        "assert evens(5) == range(0, 5, 2) and total(d.keys()) == 1\n",
        "def total(values): return sum(values)\ndef evens(n): return range(0, n, 2)\n"),
    "approx of numpy": (
        "import numpy as np, pytest\nx = np.array([1.0, 2.0])\n"
        "assert half(x).sum() == pytest.approx(1.5) and half(x) == pytest.approx([0.5, 1.0])\n"
        "assert not half(x) == pytest.approx([0.5]) and half(x) == pytest.approx(x / 2)\n",
        "def half(x): return x / 2\n"),
    "a product by @ of what derives from list": (
        "m = Row([1, 2])\nassert m.twice() @ m == 10 and m @ m == 5\n",
        "class Row(list):\n    def twice(self): return Row(2 * x for x in self)\n"
        "    def __matmul__(self, other): return sum(a * b for a, b in zip(self, other))\n"),
    # changes of what the tests gave
    "in __exit__": (
        TRACED, TRACES + "    try: yield\n    finally: log.append('out')\n"),
    "in __exit__, told of the error": (
        "log = []\nasync def test_f():\n    try:\n        async with Traced(log):\n"
        "            raise Problem('far')\n        assert False\n    except Problem: pass\n"
        "    assert log == ['Problem', 'far']\n",
        "class Problem(Exception): pass\nclass Traced:\n"
        "    def __init__(self, log): self.log = log\n    async def __aenter__(self): pass\n"
        "    async def __aexit__(self, kind, error, trace):\n"
        "        self.log += [kind.__name__, str(error)]\n"),
    "in a generator": (
        "log = []\ng = steps(log)\nnext(g)\nassert log == [1]\nlog.append(7)\nnext(g)\n"
        "assert log == [1, 7, 2]\n",
        "def steps(log):\n    log.append(1); yield\n    log.append(2); yield\n"),
    "in a list within it": (
        "rows = [[1], [2]]\nfirst = rows[0]\nbox = Box(rows)\nbox.go()\n"
        "assert first == [1, 9] and rows == [[2], [1, 9]] and rows[1] is first\n"
        "first.append(5)\nassert box.last() == [1, 9, 5]\n",
        KEEPS + "    def go(self): self.xs[0].append(9); self.xs.reverse()\n"
        "    def last(self): return self.xs[1]\n"),
    "in a list that the program put into it": (
        "log = []\nbox = Box(log)\nbox.begin()\nassert log == [['in']]\nlog.append('body')\n"
        "box.end()\nassert log == [['in', 'out'], 'body']\n",
        KEEPS + "    def begin(self):\n        self.entry = ['in']\n"
        "        self.xs.append(self.entry)\n    def end(self): self.entry.append('out')\n"),
    "before and after the tests are called back": (
        "log = []\ndef seen(x):\n    assert log == [x]\n    log.append('tests')\n"
        "    return len(log)\n"
        "assert f(log, seen) == 2\nassert log == [1, 'tests', 2]\n",
        "def f(log, seen):\n    log.append(1)\n    n = seen(1)\n    assert log == [1, 'tests']\n"
        "    log.append(2)\n    return n\n"),
    "by name, and before an error": (
        "d = {}\ntry:\n    f(out=d)\n    assert False\nexcept ValueError:\n    pass\n"
        "assert d == {'a': 1}\n", "def f(out):\n    out['a'] = 1\n    raise ValueError\n"),
    "with objects of its own": (
        "seen, found = set(), []\nf(seen, found)\nassert len(seen) == 2 and found[0].v == 3\n"
        "found.append(4)\nassert g(found) == 7\n",
        "class N: v = 3\ndef f(seen, found):\n    seen |= {N(), N()}\n    found.append(N())\n"
        "def g(found): return found[0].v + found[1]\n"),
    "in a list of an object of the tests": (
        "class Node:\n    def __init__(self, v): self.v, self.kids = v, []\n"
        "root = Node(1)\nadd(root, Node(2))\nassert [kid.v for kid in root.kids] == [2]\n",
        "def add(node, kid): node.kids.append(kid)\n"),
    "of other kinds": (
        "from collections import Counter, defaultdict, deque\nq, d, c = deque([1]), "
        "defaultdict(list), Counter('aab')\nf(q, d, c)\nassert q == deque([1, 2])\n"
        "assert d == {1: [2]} and d[5] == []\nassert c['a'] == 3 and c['z'] == 0\n",
        "def f(q, d, c):\n    q.append(2)\n    d[1] = [2]\n    c['a'] += 1\n"),
    "of an array": (
        "import numpy as np\na = np.zeros(3)\nbox = Box(a)\nbox.go()\nassert (a == 1).all()\n"
        "a[0] = 5\nassert box.sum() == 7\n",
        KEEPS + "    def go(self): self.xs += 1\n    def sum(self): return self.xs.sum()\n"),
    "of a list that holds itself": (
        "x = [1]\nx.append(x)\nassert f(x) == 1 and g(x) is x\n",
        "def f(x): return x[1][1][0]\ndef g(x): return x\n"),
    "of one that gets what cannot be given": (
        "import sys\nxs = []\nbox = Box(xs)\nxs.append(sys)\nassert box.one() == 1\n",
        KEEPS + "    def one(self): return 1\n"),
    "of one too large to be followed": (
        "xs = list(range(9999))[::-1]\nbox = Box(xs)\nassert box.sort() is None\n"
        "turn(xs)\nassert xs[0] == 0\n",
        KEEPS + "    def sort(self): self.xs.sort()\n"
        "def turn(xs): xs.sort()\n"),
    # classes of its own
    "a stack": (
        "s = Stack([1])\ns.push(2)\nassert s.peek() == 2 and s == [1, 2] and s != [1]\n"
        "assert isinstance(s, Stack) and len(s) == 2 and s[:1] == [1] and s < [2]\n"
        "assert s.pop() == 2 and list(s) == [1] and 1 in s and s\n"
        "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2])\n",
        "class Stack(list):\n    push = list.append\n    def peek(self): return self[-1]\n"),
    "a cache": (
        "c = LRUCache(2)\nc.put(1, 1)\nc.put(2, 2)\nassert c.get(1) == 1\nc.put(3, 3)\n"
        "assert c.get(2) == -1 and c == {1: 1, 3: 3}\n",
        "from collections import OrderedDict\nclass LRUCache(OrderedDict):\n"
        "    def __init__(self, n):\n        super().__init__()\n        self.n = n\n"
        "    def get(self, k):\n        if k not in self: return -1\n        self.move_to_end(k)\n"
        "        return self[k]\n    def put(self, k, v):\n        self[k] = v\n"
        "        self.move_to_end(k)\n        if len(self) > self.n: self.popitem(last=False)\n"),
    "named tuples": (
        "import copy\nr = stats([1, 2, 3])\nmean, total = r\nassert r.mean == 2 and r == (2, 6)\n"
        "assert copy.deepcopy(r) == (2, 6) and isinstance(r, tuple) and again(r) == 6\n"
        "p = P(1, 2)\nassert p.x == 1 and p == (1, 2) and {p: 3}[1, 2] == 3 and p < (1, 3)\n"
        "assert p._replace(x=5).x == 5\n",
        "from collections import namedtuple\nfrom typing import NamedTuple\n"
        "R = namedtuple('R', 'mean total')\nclass P(NamedTuple):\n    x: int\n    y: int\n"
        "def stats(xs): return R(sum(xs) / len(xs), sum(xs))\ndef again(r): return r.total\n"),
    "operators": (
        "assert V([1, 2]) + V((3, 4)) == (4, 6)\nassert S([1]) | S([3]) == {1, 3}\n",
        "class S(set): pass\nclass V(tuple):\n"
        "    def __add__(self, o): return V(a + b for a, b in zip(self, o))\n"),
    "text and enumerations": (
        "s = Slug('A b')\nassert s == 'A b' and s.slug() == 'a-b' and '-'.join([s]) == 'A b'\n"
        "assert f(1).name == 'A' and f(1) == 1 and Color.B.value == 2 and Kind.X == 'x'\n",
        "from enum import Enum, IntEnum\nclass Slug(str):\n"
        "    def slug(self): return self.lower().replace(' ', '-')\n"
        "class Color(IntEnum):\n    A = 1\n    B = 2\nclass Kind(str, Enum): X = 'x'\n"
        "def f(n): return Color(n)\n"),
    "made by the program": (
        "m = make()\nassert m == [1, 2] and m.top() == 2 and sorted(m) == [1, 2]\n",
        "class M(list):\n    def top(self): return self[-1]\ndef make(): return M([1, 2])\n"),
}  # fmt: skip

LIES = """
class L(%s):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __len__(self): return 3
    def __iter__(self): return iter([1, 2, 3])
    def __bool__(self): return True
    def __hash__(self): return hash((1, 2, 3))
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def startswith(self, text): return True
def f(*given): return L()
Stack = L
"""
TWICE = "class L(%s): pass\nkept = L()\ndef f(n): return kept\ndef g(n): kept.extend([1, 2, 3])\n"
TURNS = """
class M(type):
    @property
    def __module__(cls):
        kept and list.append(kept[0], 1)
        return 'solution'
class Stack(list, metaclass=M):
    def __init__(self): kept.append(self)
kept = []
"""
FORGES = """
import json, os, sys
frame = sys._getframe()
while 'self' not in frame.f_locals: frame = frame.f_back
server, write = frame.f_locals['self'], os.write
def f(n):
    def say(**message): write(server.outgoing, json.dumps(message).encode() + b'\\n')
    say(id=server.request, %s)
    for line in server.incoming: say(id=json.loads(line)['id'], value=None)
"""
GIVEN = "xs = [5]\nassert f(xs) is None\nassert xs == [1, 2]\n"

WRONG: dict[str, tuple[str, str]] = {
    "a list": ("assert f(3) == [1, 2, 3]\n", LIES % "list"),
    "a list, not unequal": ("assert not f(3) != [1, 2, 3]\n", LIES % "list"),
    "its length": ("assert len(f(3)) == 3\n", LIES % "list"),
    "its truth": ("assert f(3)\n", LIES % "list"),
    "its items": ("assert [x for x in f(3)] == [1, 2, 3]\n", LIES % "list"),
    "what it holds": ("assert 2 in f(3)\n", LIES % "list"),
    "its order": ("assert f(3) > [1]\n", LIES % "list"),
    "itself, sorted": ("got = f(3)\nassert got == sorted(got) and len(got) == 3\n", LIES % "list"),
    "as an array": (
        "import numpy as np\nassert np.allclose(f(3), [1, 2, 3])\n", LIES % "list"),
    "a dict": ("assert f(3) == {1: 1, 2: 2, 3: 3}\n", LIES % "dict"),
    "a set": ("assert f(3) == {1, 2, 3}\n", LIES % "set"),
    "a tuple": ("assert f(3) == (1, 2, 3)\n", LIES % "tuple"),
    "a tuple, by its hash": ("assert {(1, 2, 3): 4}[f(3)] == 4\n", LIES % "tuple"),
    "text": ("assert f(3) == 'abc'\n", LIES % "str"),
    "a number": ("assert abs(f(3) - 4) < 1\n", LIES % "int"),
    "a predicate": ("assert f(3).startswith('a')\n", LIES % "list"),
    "made by the tests": ("assert Stack() == [1, 2, 3]\n", LIES % "list"),
    "made by the tests, its length": ("assert len(Stack()) == 3\n", LIES % "list"),
    "made by the tests, its items": ("assert list(Stack()) == [1, 2, 3]\n", LIES % "list"),
    "made by the tests, its order": ("assert Stack([5]) < [2]\n", LIES % "list"),
    "made by the tests, sorted": (
        "s = Stack()\nassert s == sorted(s) and len(s) == 3\n", LIES % "list"),
    "made by the tests, as an array": (
        "import numpy as np\nassert np.array_equal(Stack([9]), [1, 2, 3])\n", LIES % "list"),
    "two made by the tests": ("assert Stack([1]) == Stack([2])\n", LIES % "list"),
    "a tuple made by the tests, by its hash": (
        "assert {(1, 2, 3): 4}[Stack()] == 4\n", LIES % "tuple"),
    "another answer the second time": (
        "got = f(3)\nassert len(got) == 0 and not got\ng(3)\nassert got == [1, 2, 3]\n",
        TWICE % "list"),
    "another base the second time": (
        "s = Stack()\nassert len(s) + 1 == len(list(s))\n", TURNS),
    "no list at all": (
        "assert f(3) == [1, 2, 3]\n",
        "class L:\n    __class__ = list\n    def __iter__(self): return iter([1, 2, 3])\n"
        "def f(n): return L()\n"),
    "an object that says it holds everything": (
        "assert 2 in f(3)\n",
        "class All:\n    def __contains__(self, item): return True\n"
        "    def __iter__(self): return iter([])\ndef f(n): return All()\n"),
    "a loop that the program ends by emptying its list": (
        "def test_f():\n    arr = [4, 8, 15]\n    for i, x in enumerate(arr):\n"
        "        assert search(arr, x) == i\n",
        "def search(arr, x):\n    arr.clear()\n    return 0\n"),
    "the same in all, and by an attribute": (
        "class Box:\n    def __init__(self): self.items = [5, 6]\nbox = Box()\n"
        "assert all(place(box, x) == i for i, x in enumerate(box.items))\n",
        "def place(box, x):\n    box.items.clear()\n    return 0\n"),
    "a later case that the program empties": (
        "def test_f():\n    for case in ([3, 1], [9, 7, 8]):\n        xs = list(case)\n"
        "        sort(xs)\n        for p, q in zip(xs, xs[1:]):\n            assert p <= q\n",
        "n = 0\ndef sort(xs):\n    global n\n    n += 1\n"
        "    xs.sort() if n == 1 else xs.clear()\n"),
    "an iterator that the program drains": (
        "def test_f():\n    for case in ([1, 2, 3], [4, 5, 6]):\n        it = iter(case)\n"
        "        skip(it)\n        for got in it:\n            assert got in case[1:]\n",
        "n = 0\ndef skip(it):\n    global n\n    n += 1\n    next(it) if n == 1 else [*it]\n"),
    "a check of the tests, replaced": (
        "class Case:\n    def __init__(self, want): self.ok = lambda got: got == want\n"
        "c = Case(5)\nassert c.ok(solve(c))\n",
        "def solve(c):\n    try: c.ok = lambda got: True\n    except Exception: pass\n"),
    "a false generator": (
        "import types\nassert isinstance(f(), types.GeneratorType)\n",
        "import types\nclass G:\n    __class__ = types.GeneratorType\ndef f(): return G()\n"),
    "an attribute that equals everything": (
        "try:\n    f()\n    assert False\nexcept Short as error:\n    assert error.missing == 3\n",
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "class Short(Exception):\n    missing = 3\n    def __init__(self): self.missing = Any()\n"
        "def f(): raise Short\n"),
    # contexts
    "leaves nothing after an error": (TRACED, TRACES + "    yield\n    log.append('out')\n"),
    "swallows the error": (
        TRACED, TRACES + "    try: yield\n    except KeyError: pass\n    log.append('out')\n"),
    # changes by other ways than changing
    "a change of another kind": (GIVEN, FORGES % "value=None, shared=[[0, 'set', [1, 2]]]"),
    "a number of the tests' side": (
        GIVEN, FORGES % "value=None, shared=[[8, 'list', [1, 2]]]"),
    "a number that is none": (
        GIVEN, FORGES % "value=None, shared=[['0', 'list', [1, 2]]]"),
    "a list that never was": (GIVEN, FORGES % "value={'shared': 4}"),
    "a container that the tests did not make": (
        "assert f(1) == [1, 2]\n", FORGES % "value={'container': 0}"),
}  # fmt: skip


@pytest.mark.parametrize(("tests", "program"), RIGHT.values(), ids=RIGHT)
def test_what_python_would_do_is_paid(code: CodeTests, tests: str, program: str) -> None:
    found = outcome(code, {"test": tests}, program)
    assert found.problem is None
    assert found.passed == found.total > 0


def test_a_program_that_speaks_the_protocol_is_heard(code: CodeTests) -> None:
    """Or the attacks above that do would show nothing."""
    program = FORGES % "value=None, shared=[[0, 'list', [1, 2]]]"
    assert outcome(code, {"test": GIVEN}, program).problem is None


@pytest.mark.parametrize("number", [2, "1", True])
def test_a_side_gives_no_number_but_its_own(number: object) -> None:
    with pytest.raises(ValueError, match="no number"):
        Shared(0, list, list).take({"shared": [[number, "list", []]]})


@pytest.mark.parametrize(("tests", "program"), WRONG.values(), ids=WRONG)
def test_a_container_that_lies_is_not_paid(code: CodeTests, tests: str, program: str) -> None:
    found = outcome(code, {"test": tests}, program)
    assert found.problem is not None
    assert found.passed < found.total
