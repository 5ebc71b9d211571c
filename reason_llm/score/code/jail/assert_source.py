"""Tests written as Python source: which names they ask the program for, and their assertions.

All of it is decided from the text of the tests alone. A name is asked for if the tests use it as a
global one and neither define it nor find it among the built-in names; so a program that defines
``abs``, ``check`` or ``test_sum`` beside what was asked for defines it for itself. Where the tested
function has a built-in name, as in ``assert sum(10, 15) == 6``, that name is the program's
(``_builtin_under_test``).

Each ``assert X`` becomes a call of the counter (``AssertionCounts``), and goes on where it fails.
Each function that is a test (``check``, ``test_…``) says when it is entered, so that it is run once
by whoever runs it.
"""

import ast
import math
import symtable
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

MODULES = {"array", "bisect", "calendar", "cmath", "collections", "copy", "datetime", "decimal",
           "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "numpy",
           "operator", "os", "random", "re", "statistics", "string", "sys", "time",
           "typing"}  # fmt: skip
"""Modules that tests may use without importing them, since programs mostly do; ``np``, too."""
HELPERS = {"isclose": "math", "inf": "math", "Counter": "collections", "defaultdict": "collections",
           "OrderedDict": "collections", "deepcopy": "copy", "allclose": "numpy",
           "array_equal": "numpy"}  # fmt: skip
"""What tests may use of a module without importing it, and which: where something else is tested,
these are not the program's, which would then say what equals."""
ARRAY_COMPARISONS = ("allclose", "isclose", "array_equiv", "assert_allclose", "assert_equal",
                     "assert_almost_equal", "assert_array_equal", "assert_array_almost_equal",
                     "assert_approx_equal", "assert_array_almost_equal_nulp",
                     "assert_array_max_ulp")  # fmt: skip
"""Functions of numpy and numpy.testing that compare two arrays of any shapes."""
ARRAY_ARGUMENTS = ("a", "b", "a1", "a2", "actual", "desired", "x", "y")
"""Names of what they compare, in its order."""
PROGRAM_NAME = "solution"
"""The module as which tests may import the program."""

_CASE, _ENTERED, _EXCEPTION = "__case__", "__entered__", "__exception__"
_FROM_PROGRAM = "program:"  # no identifier, so that no other name can be this one
_Function = ast.FunctionDef
_Import = ast.Import | ast.ImportFrom


class TestsSource:
    """The tests of one problem, read and made ready to run.

    Args:
        builtin: names that the tests find without defining them.

    Raises:
        SyntaxError, ValueError, RecursionError: it is no valid Python.
    """

    def __init__(self, source: str, entry_point: str | None, builtin: Container[str]) -> None:
        self.entry_point = entry_point
        self.tree = ast.parse(source)
        asserts = [node for node in ast.walk(self.tree) if isinstance(node, ast.Assert)]
        self.num_asserts = len(asserts)
        self.functions = {node.name: node for node in _tests_among(self.tree.body)}
        numbers = {id(node): number for number, node in enumerate(asserts)}
        self.is_unittest = any(_is_unittest(node) for node in self.tree.body)
        methods = [test for node in self.tree.body for test in _methods_among(node)]
        tests = [*self.functions.values(), *methods]
        bodies = [self.tree.body, *(node.body for node in tests)]
        self.certain = {numbers[id(node)] for body in bodies for node in _certain(body)}
        """The assertions that no condition stands before: loops alone can keep them from being
        run, so that one that never ran has not passed."""
        is_of_numpy = "numpy" in source or "np." in source or "allclose" in source
        self.compares_arrays = is_of_numpy and any(name in source for name in ARRAY_COMPARISONS)
        free = _free_names(source, "exec")
        self.asks_for_candidate = entry_point is not None and "candidate" in free
        free -= {"candidate"} if self.asks_for_candidate else set()
        self.modules = {name for name in free if _is_module(name, self.tree)} - {entry_point}
        of_entry = _free_names(entry_point, "eval") if entry_point is not None else set()
        asked = {n for n in free - self.modules if n not in builtin and not _is_dunder(n)}
        checks = asked & (HELPERS.keys() | _assertion_names(self.tree)) - {entry_point}
        if asked == checks and entry_point is None and not _imports_names(self.tree):
            checks = set()  # nothing else is tested
        self.asked = asked - checks
        self.helpers = checks & HELPERS.keys()
        self.asked_by_entry = {n for n in of_entry if not _is_dunder(n)}
        under_test = self._builtin_under_test(free, builtin)
        called = _called(self.tree.body)
        helpers = [n for n in self.tree.body if isinstance(n, _Function) and n.name in called]
        decided = _decided_by_program(self.tree, self.asked | {name.id for name in under_test})
        bodies += [node.body for node in helpers]
        guards = [guard for body in bodies for guard in _guards(body)]
        blocks: list[ast.stmt] = [guard for guard in guards if _names_in(guard.test) & decided]
        held = [_asserts_in(block, numbers) for block in (*blocks, *self.functions.values())]
        self.guarded = [group for group in held if group]
        """Assertions behind a condition that the program decides, by the condition, and those of
        each test: where none of them ran, the program has chosen not to be tested."""
        self.renamed = {_FROM_PROGRAM + name: name for name in {n.id for n in under_test}}
        for node in under_test:
            node.id = _FROM_PROGRAM + node.id
        self.code = compile(_Rewrite(numbers, self.functions).rewritten(self.tree), "tests.py",
                            "exec")  # fmt: skip

    def _builtin_under_test(self, free: set[str], builtin: Container[str]) -> list[ast.Name]:
        """The uses of a built-in name that mean the program's function of that name.

        They are what the tests themselves hand to a function of theirs (``check(sum)``), or, where
        the entry point or nothing else says what is tested, the name that the innermost call of
        the first assertion calls.
        """
        uses = [node for node in ast.walk(self.tree) if _is_use(node)]
        taken = {node.id for node in uses if node.id in free and node.id in builtin}
        asks_otherwise = self.asked or _imports_names(self.tree)
        if self.entry_point is not None:
            taken &= {self.entry_point}
        elif asks_otherwise:
            return []
        handed = [node for node in _handed_over(self.tree, self.functions) if node.id in taken]
        if handed or "check" in self.functions:
            return handed
        first = next((n for n in ast.walk(self.tree) if isinstance(n, ast.Assert)), None)
        called = _innermost_called(first.test) if first is not None else None
        name = self.entry_point if self.entry_point in taken else called
        return [node for node in uses if node.id == name and name in taken]


class AssertionCounts:
    """How often each assertion ran, and how often it held."""

    def __init__(self, stop_early: bool) -> None:
        self.stop_early = stop_early
        self.ran: dict[int, int] = {}
        self.held: dict[int, int] = {}

    def __call__(self, number: int, value: Any) -> None:
        """Count one run of an assertion."""
        is_true = bool(value)  # may raise; the caller then says False
        self.ran[number] = self.ran.get(number, 0) + 1
        self.held[number] = self.held.get(number, 0) + is_true
        if not is_true and self.stop_early:
            raise Stop

    def score(self, num_missing: int) -> tuple[int, int]:
        """Assertions that held, and all. One that ran more often weighs as much as any other, in
        parts: how often a loop runs may be the program's doing.

        Args:
            num_missing: assertions to count as failed, though they never ran.
        """
        parts = min(math.lcm(*self.ran.values()), 10**9)
        held = sum(self.held[n] * parts // ran for n, ran in self.ran.items())
        return held, (len(self.ran) + num_missing) * parts


class Stop(BaseException):
    """An assertion failed and no more need be run."""


def namespace_of(counts: AssertionCounts, entered: set[str]) -> dict[str, Any]:
    """What the rewritten tests need."""
    return {_CASE: counts, _ENTERED: entered.add, _EXCEPTION: Exception}


class _Rewrite(ast.NodeTransformer):
    """``assert X`` becomes: try ``__case__(n, X)``, and where X raises, ``__case__(n, False)``."""

    def __init__(self, numbers: dict[int, int], functions: dict[str, _Function]) -> None:
        self.numbers = numbers
        self.functions = functions

    def rewritten(self, tree: ast.Module) -> ast.Module:
        for name, node in self.functions.items():
            node.body.insert(0, _call_statement(_ENTERED, [ast.Constant(name)]))
        self.visit(tree)
        return ast.fix_missing_locations(tree)

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        number = ast.Constant(self.numbers[id(node)])
        case = _call_statement(_CASE, [number, node.test])
        failed = _call_statement(_CASE, [number, ast.Constant(False)])
        handler = ast.ExceptHandler(ast.Name(_EXCEPTION, ast.Load()), None, [failed])
        return ast.copy_location(ast.Try([case], [handler], [], []), node)


def _call_statement(function: str, arguments: list[ast.expr]) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(function, ast.Load()), arguments, []))


def _tests_among(body: Sequence[ast.stmt]) -> Iterator[_Function]:
    for node in body:
        if isinstance(node, _Function) and (node.name == "check" or node.name.startswith("test_")):
            yield node


def _methods_among(node: ast.stmt) -> Iterator[_Function]:
    """The tests in a class: nothing calls them but the tests themselves."""
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, _Function) and method.name.startswith("test"):
            yield method


def _is_unittest(node: ast.stmt) -> bool:
    """Whether this is a class whose failures only its runner would see."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return any(ast.unparse(base).endswith("TestCase") for base in bases)


def _certain(body: Sequence[ast.stmt]) -> Iterator[ast.Assert]:
    for node in body:
        if isinstance(node, ast.Assert):
            yield node
        elif isinstance(node, ast.For | ast.While | ast.With):
            yield from _certain(node.body)
        elif isinstance(node, ast.Try):
            yield from _certain(node.finalbody)
            if any(map(_catches_all, node.handlers)):  # whatever the program raises
                yield from (each for each in _certain(node.body) if not _must_fail(each))


def _guards(body: Sequence[ast.stmt]) -> Iterator[ast.If]:
    """The conditions that are come to, whatever the program does."""
    for node in body:
        if isinstance(node, ast.If):
            yield node
        elif isinstance(node, ast.For | ast.While | ast.With):
            yield from _guards(node.body)
        elif isinstance(node, ast.Try):
            yield from _guards([*node.body, *node.finalbody])


def _called(body: Sequence[ast.stmt]) -> set[str]:
    """The functions that statements of the tests call for themselves, as in ``check_one(3)``."""
    calls = [node.value for node in body if isinstance(node, ast.Expr)]
    found = {call.func.id for call in calls
             if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}  # fmt: skip
    loops = (node.body for node in body if isinstance(node, ast.For | ast.While | ast.With))
    return found.union(*map(_called, loops))


def _decided_by_program(tree: ast.Module, asked: set[str]) -> set[str]:
    """The names whose values may be the program's: those that the tests ask for, ``candidate``, the
    parameter of ``check``, and what is computed from such."""
    found = asked | {"candidate"}
    for node in ast.walk(tree):
        if isinstance(node, _Function) and node.name == "check":
            found |= {each.arg for each in node.args.args}
        elif isinstance(node, ast.ImportFrom) and node.module == PROGRAM_NAME:
            found |= {alias.asname or alias.name for alias in node.names}
    given = [(_names_in(target), _names_in(value)) for target, value in _bindings(tree)]
    while more := set().union(*(names for names, used in given if used & found)) - found:
        found |= more
    return found


def _bindings(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """What is bound, and what it is bound to."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((target, value) for target in targets)
            case ast.NamedExpr(target=target, value=value):
                yield target, value
            case ast.AugAssign(target=target, value=value):
                yield target, value
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield target, value
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield target, value
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                yield target, value


def _asserts_in(block: ast.stmt, numbers: Mapping[int, int]) -> set[int]:
    """Numbers of the assertions in a statement, but for those that say that it must not be come
    to."""
    return {
        numbers[id(node)]
        for node in ast.walk(block)
        if isinstance(node, ast.Assert) and not _must_fail(node)
    }


def _names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")


def _must_fail(node: ast.Assert) -> bool:
    """``assert False``, which stands where the program should have raised."""
    return isinstance(node.test, ast.Constant) and not node.test.value


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


def _is_dunder(name: str) -> bool:
    return name.startswith("__")


def _is_module(name: str, tree: ast.Module) -> bool:
    """Whether the tests use a module's name as a module: with a dot behind it, always."""
    if name not in MODULES and name != "np":
        return False
    uses = sum(_is_use(n) and n.id == name for n in ast.walk(tree))
    attributes = (n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return uses == sum(_is_use(n) and n.id == name for n in attributes)


def _imports_names(tree: ast.Module) -> bool:
    """Whether the tests import the program, other than by ``*``, which names nothing of it."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, _Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == PROGRAM_NAME and names != ["*"]:
            return True
        if isinstance(node, ast.Import) and PROGRAM_NAME in names:
            return True
    return False


def _assertion_names(tree: ast.Module) -> set[str]:
    """Names by which test frameworks are used: ``assertEqual(…)``, ``Test.assert_equals(…)``."""
    found = {"approx", "pytest", "unittest"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and _is_assertion(node.id):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and _is_assertion(node.attr):
            found |= {node.value.id} if isinstance(node.value, ast.Name) else set()
    return found


def _is_assertion(name: str) -> bool:
    return name.lower().startswith(("assert", "expect"))


def _handed_over(tree: ast.Module, functions: Container[str]) -> Iterator[ast.Name]:
    """``sum`` in ``check(sum)``, a statement of the tests that calls a test of theirs."""
    for node in tree.body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and _is_use(call.func) and call.func.id in functions:
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            yield from (each for each in given if isinstance(each, ast.Name))


def _innermost_called(test: ast.expr) -> str | None:
    """The name that the first call without a call among its arguments calls."""
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    inner = [
        call
        for call in calls
        if not any(isinstance(n, ast.Call) and n is not call for n in ast.walk(call))
    ]
    first = min(inner, key=lambda call: (call.lineno, call.col_offset), default=None)
    return first.func.id if first is not None and isinstance(first.func, ast.Name) else None
