"""Tests written as Python source: which names they ask the program for, and their assertions.

All of it is decided from the text of the tests alone. A name is asked for if the tests use it as a
global one and neither define it nor find it among the built-in names, but for a tested function
with a built-in name, as in ``assert sum(10, 15) == 6``. Each ``assert X`` becomes a call of the
counter (``AssertionCounts``), and continues where it fails.
"""

import ast
import math
import re
import symtable
from collections.abc import Container, Iterator, Sequence
from typing import Any, TypeGuard

from .array_checks import CHECKS, StrictArrays
from .assert_paths import (
    CASE,
    COUNT,
    TOOK,
    FunctionNode,
    LoopNode,
    Plain,
    Taint,
    Ways,
    WithNode,
    call,
    is_raises,
    last_name,
    must_fail,
)

MODULES = {"array", "asyncio", "bisect", "calendar", "cmath", "collections", "copy", "datetime",
           "decimal", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math",
           "np", "numpy", "operator", "os", "random", "re", "statistics", "string", "sys", "time",
           "typing"}  # fmt: skip
"""Modules that tests may use without importing them, since programs mostly do."""
HELPERS = {"isclose": "math", "inf": "math", "Counter": "collections", "defaultdict": "collections",
           "OrderedDict": "collections", "deepcopy": "copy", "allclose": "numpy",
           "array_equal": "numpy"}  # fmt: skip
"""Names that tests may use without importing them, by module. If something else is tested, they are
not the program's, which could otherwise decide what is equal."""
NOT_FINITE = {"nan", "inf", "infinity", "isnan", "isinf", "isfinite"}
"""Words by which tests allow NaN and infinity as a number of the program."""
PROGRAM_NAME = "solution"
"""The module as which tests may import the program."""

_ENTERED, _EXCEPTION = "__entered__", "__exception__"
_FROM_PROGRAM = "program:"  # no identifier, so that no other name can be this one


class TestsSource:
    """The tests of one problem, read and made ready to run.

    Args:
        builtin: names that the tests find without defining them.

    Raises:
        SyntaxError, ValueError, RecursionError: it is no valid Python.
    """

    def __init__(self, source: str, entry_point: str | None, builtin: Container[str]) -> None:
        self.entry_point = entry_point
        tree = ast.parse(source)
        self.tree: ast.Module = Plain(tree).visit(tree)
        ast.fix_missing_locations(self.tree)
        asserts = list(_assertions(self.tree))
        self.num_asserts = len(asserts)
        self.asserts_values = not all(map(must_fail, asserts))
        """Whether there is more than ``assert False`` where an error is expected."""
        self.functions = {
            node.name: node
            for node in _functions_among(self.tree.body, "")
            if node.name == "check" or node.name.startswith("test_")
        }
        numbers = {id(node): number for number, node in enumerate(asserts)}
        classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        bases = [last_name(base) for kind in classes for base in kind.bases]
        self.is_unittest = any(base.endswith("TestCase") for base in bases)
        methods = [test for kind in classes for test in _functions_among(kind.body, "test")]
        words = set(re.findall("[a-z]+", source.lower()))
        self.speaks_of_infinity = bool(words & NOT_FINITE)
        self.uses_numpy = "numpy" in source or "np." in source or "allclose" in source
        self.has_futures = "async" in source or "futures" in source
        free = _free_names(source, "exec")
        self.asks_for_candidate = entry_point is not None and "candidate" in free
        free -= {"candidate"} if self.asks_for_candidate else set()
        self.modules = {name for name in free if _is_module(name, self.tree)} - {entry_point}
        of_entry = _free_names(entry_point, "eval") if entry_point is not None else set()
        asked = {n for n in free - self.modules if n not in builtin and not n.startswith("__")}
        checks = asked & (HELPERS.keys() | _assertion_names(self.tree)) - {entry_point}
        if asked == checks and entry_point is None and not _imports_names(self.tree):
            checks = set()  # nothing else is tested
        self.asked = asked - checks
        self.helpers = checks & HELPERS.keys()
        self.asked_by_entry = {n for n in of_entry if not n.startswith("__")}
        under_test = self._builtin_under_test(free, builtin)
        self.tests = [
            numbers_of
            for node in self.functions.values()
            if (numbers_of := {numbers[id(n)] for n in _assertions(node) if not must_fail(n)})
        ]
        """Assertions of each test function; a test of which none ran has tested nothing."""
        taint = Taint(self.tree, self.asked | {name.id for name in under_test})
        tops = [self.tree.body, *(node.body for node in (*self.functions.values(), *methods))]
        certain = [node for body in tops for node in _certain(body)]
        certain += _handed_out(self.tree, certain, taint)
        self.certain = {numbers[id(node)] for node in certain if id(node) in numbers}
        """The assertions that no condition of the tests stands before: loops alone, or the program
        that was given a function, can keep them from being run; one that never ran has failed."""
        Ways(taint, self.num_asserts).rewritten(self.tree)
        StrictArrays(taint, self.tree).visit(self.tree)
        self.renamed = {_FROM_PROGRAM + name: name for name in {n.id for n in under_test}}
        for node in under_test:
            node.id = _FROM_PROGRAM + node.id
        for name, function in self.functions.items():  # to be run once, by whoever runs it
            function.body.insert(0, ast.Expr(call(_ENTERED, ast.Constant(name))))
        _Rewrite(numbers).visit(self.tree)
        self.code = compile(ast.fix_missing_locations(self.tree), "tests.py", "exec")

    def _builtin_under_test(self, free: set[str], builtin: Container[str]) -> list[ast.Name]:
        """Uses of a built-in name that mean the program's: arguments of test functions,
        ``check(sum)``, or, if nothing else is tested, the function in the innermost call of the
        first assertion."""
        uses = [node for node in ast.walk(self.tree) if _is_use(node)]
        candidates = {node.id for node in uses if node.id in free and node.id in builtin}
        if self.entry_point is not None:
            candidates &= {self.entry_point}
        elif self.asked or _imports_names(self.tree):
            return []
        handed = [node for node in _handed_over(self.tree, self.functions) if node.id in candidates]
        if handed or "check" in self.functions:
            return handed
        first = next((n for n in ast.walk(self.tree) if isinstance(n, ast.Assert)), None)
        called = _innermost_called(first.test) if first is not None else None
        name = self.entry_point if self.entry_point in candidates else called
        return [node for node in uses if node.id == name and name in candidates]


class AssertionCounts:
    """Counts of each assertion: runs, and runs in which it held."""

    def __init__(self, stop_early: bool) -> None:
        self.stop_early = stop_early
        self.ran: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.num_runs = 0

    def __call__(self, number: int, value: Any) -> None:
        """Count one run of an assertion."""
        is_true = bool(value)  # may raise; the caller then says False
        self.num_runs += 1
        self.ran[number] = self.ran.get(number, 0) + 1
        self.held[number] = self.held.get(number, 0) + is_true
        if not is_true and self.stop_early:
            raise Stop

    def took(self, number: int, num_runs_before: int, is_done: bool) -> None:
        """A way that the program chose has come to its end: it fails if no assertion ran on it,
        unless nothing was passed over (``is_done``)."""
        if not is_done and self.num_runs <= num_runs_before:
            self(number, False)

    def score(self, num_missing: int) -> dict[str, int]:
        """Assertions that held, and all, those that never ran among them. One that ran more often
        weighs as much as any other, in parts: how often a loop runs may be the program's doing."""
        parts = min(math.lcm(*self.ran.values()), 10**9)
        held = sum(self.held[n] * parts // ran for n, ran in self.ran.items())
        return {"passed": held, "total": (len(self.ran) + num_missing) * parts}


class Stop(BaseException):
    """Ends the tests early after a failed assertion."""


def namespace_of(counts: AssertionCounts, entered: set[str]) -> dict[str, Any]:
    """Names that the rewritten tests need."""
    count = {CASE: counts, COUNT: lambda: counts.num_runs, TOOK: counts.took}
    return {**count, _ENTERED: entered.add, _EXCEPTION: Exception, **CHECKS}


class _Rewrite(ast.NodeTransformer):
    """``assert X`` becomes: try ``__case__(n, X)``, and where X raises, ``__case__(n, False)``."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self._counted(node, [], node.test)

    def visit_With(self, node: ast.With) -> ast.stmt:
        if is_raises(node):
            return self._counted(node, [node], ast.Constant(True))
        self.generic_visit(node)
        return node

    def _counted(self, node: ast.stmt, first: list[ast.stmt], test: ast.expr) -> ast.stmt:
        number = ast.Constant(self.numbers[id(node)])
        case, failed = (call(CASE, number, outcome) for outcome in (test, ast.Constant(False)))
        error = ast.Name(_EXCEPTION, ast.Load())
        handler = ast.ExceptHandler(error, None, [ast.Expr(failed)])
        return ast.copy_location(ast.Try([*first, ast.Expr(case)], [handler], [], []), node)


def _functions_among(body: Sequence[ast.stmt], begin: str) -> list[FunctionNode]:
    return [n for n in body if isinstance(n, FunctionNode) and n.name.startswith(begin)]


def _assertions(tree: ast.AST) -> Iterator[ast.stmt]:
    """Assertions, and contexts that wait for an error; what stands in these is no assertion."""
    nodes = [tree]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.With) and is_raises(node)):
            yield node
        else:
            nodes += ast.iter_child_nodes(node)


def _certain(body: Sequence[ast.stmt], is_helper: bool = False) -> Iterator[ast.stmt]:
    """Unconditional statements without a body, except those that must not be reached. A helper that
    may return early counts only up to there."""
    for node in body:
        if isinstance(node, LoopNode | WithNode) and not is_raises(node):
            yield from _certain(node.body, is_helper)
        elif isinstance(node, ast.Try):
            yield from _certain(node.finalbody, is_helper)
            types = [handler.type for handler in node.handlers]
            caught = {last_name(kind) if kind else "Exception" for kind in types}
            if caught & {"Exception", "BaseException"} and not any(map(must_fail, node.body)):
                yield from _certain(node.body, is_helper)
        elif isinstance(node, ast.If | ast.Match):
            if is_helper and any(isinstance(n, ast.Return | ast.Continue) for n in ast.walk(node)):
                return
        elif not must_fail(node):
            yield node


def _handed_out(tree: ast.Module, certain: Sequence[ast.stmt], taint: Taint) -> Iterator[ast.stmt]:
    """The same of functions that these statements call, pass to the program or have it decorate."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    functions: dict[str, list[FunctionNode]] = {}
    for definition in ast.walk(tree):
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.setdefault(definition.name, []).append(definition)
        elif isinstance(definition, ast.ClassDef):
            for method in _functions_among(definition.body, ""):
                is_called = method.name in ("__init__", "__call__") or method.name[:2] != "__"
                if is_called and method.name not in attributes:
                    functions.setdefault(definition.name, []).append(method)
    waiting = list(certain)
    while waiting:
        node = waiting.pop()
        names = list(_used(node))
        if isinstance(node, FunctionNode) and taint.holds(*node.decorator_list):
            names.append(node.name)
        for name in names:
            for function in functions.pop(name, ()):
                inside = list(_certain(function.body, is_helper=True))
                waiting += inside
                yield from inside


def _used(node: ast.AST) -> Iterator[str]:
    """Names that a statement uses, whatever its conditions give."""
    match node:
        case ast.BoolOp(values=[first, *_]) | ast.IfExp(test=first) | ast.Assert(test=first):
            parts: list[ast.AST] = [first]
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() if any(
            loop.ifs for loop in node.generators
        ):
            parts = [loop.iter for loop in node.generators]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            parts = [*node.decorator_list]
        case ast.ClassDef() | ast.With():
            parts = []
        case ast.Call(func=function) if last_name(function).lower().endswith(("raises", "warns")):
            parts = []  # what it calls may end before its assertions
        case _:
            parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Name | ast.Attribute):
        yield last_name(node)
    for part in parts:
        yield from _used(part)


def _free_names(source: str, mode: str) -> set[str]:
    """Global names that are used anywhere and bound by no statement of the tests."""
    used: set[str] = set()
    bound: set[str] = set()
    tables = [symtable.symtable(source, "tests.py", mode)]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = table.get_type() == "module" or symbol.is_global()
            if is_global and symbol.is_referenced():
                used.add(symbol.get_name())
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
    return used - bound


def _is_use(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _is_module(name: str, tree: ast.Module) -> bool:
    """Whether the tests use a module's name as a module: with a dot behind it, always."""
    uses = {id(node) for node in ast.walk(tree) if _is_use(node) and node.id == name}
    dotted = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return name in MODULES and uses <= dotted


def _imports_names(tree: ast.Module) -> bool:
    """Whether the tests import the program, other than by ``*``, which names nothing of it."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="solution", names=names) if names[0].name != "*":
                return True
            case ast.Import(names=names) if any(alias.name == PROGRAM_NAME for alias in names):
                return True
    return False


def _assertion_names(tree: ast.Module) -> set[str]:
    """Names by which test frameworks are used: ``assertEqual(…)``, ``Test.assert_equals(…)``."""
    names = {"approx", "pytest", "unittest"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name, value=ast.Name()) if (
                name.lower().startswith(("assert", "expect"))
            ):
                names.add(last_name(node if isinstance(node, ast.Name) else node.value))
    return names


def _handed_over(tree: ast.Module, functions: Container[str]) -> Iterator[ast.Name]:
    """The names that statements pass to test functions: ``sum`` in ``check(sum)``."""
    for node in tree.body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and _is_use(call.func) and call.func.id in functions:
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            yield from (argument for argument in arguments if isinstance(argument, ast.Name))


def _innermost_called(test: ast.expr) -> str | None:
    """The name that the first call without a call among its arguments calls."""
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    inner = [c for c in calls if not any(n in calls for n in ast.walk(c) if n is not c)]
    first = min(inner, key=lambda called: (called.lineno, called.col_offset), default=None)
    return first.func.id if first is not None and isinstance(first.func, ast.Name) else None
