"""Comparisons of numpy's arrays in tests, made strict: what the program gave is never broadcast.

1 equals ``np.ones((3, 3))`` in numpy, and an empty array equals anything. Here what the program
gave must have the whole shape and the kind (number, truth, text); the tests' own side may be one
number for all. Likewise the program may not shorten a ``zip``, ``all`` or a loop over cases of the
tests.
"""

import ast
import copy
import importlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Sized
from typing import Any

from .assert_paths import Taint, call
from .pytest_substitute import approx

ARRAY_COMPARISONS = ("allclose", "isclose", "array_equal", "array_equiv", "assert_allclose",
                     "assert_equal", "assert_almost_equal", "assert_array_equal",
                     "assert_array_almost_equal", "assert_approx_equal",
                     "assert_array_almost_equal_nulp", "assert_array_max_ulp")  # fmt: skip
"""Functions of numpy and numpy.testing that compare two arrays of any shapes."""
ARRAY_ARGUMENTS = ("a", "b", "a1", "a2", "actual", "desired", "x", "y")
"""Names of what they compare, in its order."""
_EQUAL, _MINUS, _COMPARES, _ZIP = "__equal__", "__minus__", "__compares__", "__zip__"
EACH = "__each__"
_KINDS = dict.fromkeys("iufc", "number")


class StrictArrays(ast.NodeTransformer):
    """Hands comparisons of what the program gave to the functions below."""

    def __init__(self, taint: Taint, tree: ast.Module) -> None:
        self.taint = taint
        self.aliases = set(ARRAY_COMPARISONS)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                aliases = [alias for alias in node.names if alias.name in ARRAY_COMPARISONS]
                self.aliases |= {alias.asname for alias in aliases if alias.asname}
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
                names = {n.id for n in node.targets if isinstance(n, ast.Name)}
                self.aliases |= names if node.value.attr in ARRAY_COMPARISONS else set()

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """``==`` and ``!=``."""
        from_program = self._from_program(node.left, *node.comparators)
        self.generic_visit(node)
        is_comparison = len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        if not is_comparison or not any(from_program):
            return node
        is_equal = ast.Constant(isinstance(node.ops[0], ast.Eq))
        comparison = call(_EQUAL, is_equal, _flags(from_program), node.left, node.comparators[0])
        return ast.copy_location(comparison, node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """``-``."""
        from_program = self._from_program(node.left, node.right)
        self.generic_visit(node)
        if not isinstance(node.op, ast.Sub) or any(from_program) == all(from_program):
            return node
        return ast.copy_location(call(_MINUS, _flags(from_program), node.left, node.right), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """numpy's functions that compare, ``zip`` and ``all``."""
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        pair = [*node.args, *(named[n] for n in ARRAY_ARGUMENTS if n in named)]
        from_program = self._from_program(*pair)
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in self.aliases and any(
                from_program[:2]
            ):
                node.args = [node.func, _flags(from_program[:2]), *node.args]
                node.func = ast.Name(_COMPARES, ast.Load())
            case ast.Name(id="all"):
                for argument in node.args:
                    self._keep_cases(argument)
            case ast.Name(id="zip") if any(from_program) and not all(from_program) and not named:
                node.args = [_flags(from_program), *node.args]
                node.func = ast.Name(_ZIP, ast.Load())
        return node

    def visit_For(self, node: ast.For | ast.comprehension) -> ast.AST:
        """A loop over what the tests may have handed to the program."""
        values = [node.iter]
        if isinstance(node.iter, ast.Call):  # of enumerate(xs), zip(xs, ys), d.items()
            owner = [node.iter.func.value] if isinstance(node.iter.func, ast.Attribute) else []
            values += [*node.iter.args, *owner]
        watched: list[ast.expr] = [
            copy.deepcopy(value)
            for value in values
            if isinstance(value, ast.Name)
            or (isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name))
            if not self.taint.holds(value)
        ]
        if watched and not getattr(node, "is_async", False):
            node.iter = call(EACH, node.iter, ast.Tuple(watched, ast.Load()))
        return self.generic_visit(node)

    visit_comprehension = visit_For

    def _keep_cases(self, values: ast.expr) -> None:
        """``x for … if c`` becomes ``c and x for …``."""
        if not isinstance(values, ast.GeneratorExp | ast.ListComp):
            return
        is_theirs = not self.taint.holds(*(loop.iter for loop in values.generators))
        for loop in values.generators:
            if is_theirs and self.taint.holds(*loop.ifs):
                values.elt = ast.BoolOp(ast.And(), [*loop.ifs, values.elt])
                loop.ifs = []

    def _from_program(self, *values: ast.expr) -> tuple[bool, ...]:
        return tuple(map(self.taint.holds, values))


def _flags(values: Sequence[bool]) -> ast.expr:
    return ast.Tuple([ast.Constant(value) for value in values], ast.Load())


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "shape")


def _fits(from_program: Sequence[bool], pair: Sequence[Any]) -> bool:
    """Whether both values are of one kind, and no value ``from_program`` would be repeated."""
    numpy = importlib.import_module("numpy")
    arrays = [numpy.asarray(side) for side in pair]
    shapes = [array.shape for array in arrays]
    sizes = [array.size for array in arrays]
    if 0 in sizes and any(sizes):
        return False
    try:
        whole = numpy.broadcast_shapes(*shapes)
    except ValueError:
        return False
    kinds = {_KINDS.get(array.dtype.kind, array.dtype.kind) for array in arrays}
    is_one_kind = len(kinds) == 1 or not any(sizes)
    return is_one_kind and all(
        shape == whole for shape, is_given in zip(shapes, from_program, strict=True) if is_given
    )


def equal(is_equal: bool, from_program: Sequence[bool], first: Any, second: Any) -> Any:
    """``first == second``, or ``!=``."""
    pair = (first, second)
    if not any(map(_is_array, pair)) or isinstance(first, approx) or isinstance(second, approx):
        return first == second if is_equal else first != second
    numpy = importlib.import_module("numpy")
    if not _fits(from_program, pair):
        return numpy.bool_(not is_equal)
    one, other = map(numpy.asarray, pair)
    verdict = one == other if is_equal else one != other
    return verdict if verdict.ndim == 0 else _whole_truth(verdict, all if is_equal else any)


def checked_loop(
    shortened: Container[int], values: Iterable[Any], watched: Sequence[Any]
) -> Iterator[Any]:
    """The items of a loop over ``watched``; AssertionError if the program emptied or shortened it
    (``shortened`` has the ids), so that cases were left out."""
    sizes = [len(value) if isinstance(value, Sized) else 1 for value in watched]
    count = 0
    for item in values:
        count += 1
        yield item
    for value, size in zip(watched, sizes, strict=True):
        if id(value) in shortened and (count == 0 or (isinstance(value, Sized) and count < size)):
            raise AssertionError("the program emptied what the tests go over")


def _whole_truth(values: Any, truth: Callable[[Any], bool]) -> Any:
    """An array of truths that is itself true or not, as a list of lists would be."""
    numpy = importlib.import_module("numpy")
    methods = {"__bool__": lambda self: truth(self.view(numpy.ndarray).ravel().tolist())}
    return values.view(type("Truths", (numpy.ndarray,), methods))


def subtract(from_program: Sequence[bool], first: Any, second: Any) -> Any:
    """``first - second``; ValueError if what the program gave would be repeated."""
    pair = (first, second)
    if any(map(_is_array, pair)) and not _fits(from_program, pair):
        raise ValueError("what the program gave has another shape or kind")
    return first - second


def compare(
    function: Callable[..., Any], from_program: Sequence[bool], /, *pair: Any, **named: Any
) -> Any:
    """A function of ``ARRAY_COMPARISONS``, or one of that name; AssertionError if it raises where
    two differ, and they do by shape or kind."""
    module = str(getattr(function, "__module__", ""))
    compared = [*pair, *(named[name] for name in ARRAY_ARGUMENTS if name in named)][:2]
    if module.startswith("numpy") and not _fits(from_program, compared):
        if "testing" in module:
            raise AssertionError("what the program gave has another shape or kind")
        return importlib.import_module("numpy").bool_(False)
    return function(*pair, **named)


def strict_zip(from_program: Sequence[bool], *parts: Any) -> Iterator[tuple[Any, ...]]:
    """``zip``; ValueError if the program gave fewer values than the tests hold."""
    of_tests = [part for part, is_given in zip(parts, from_program, strict=True) if not is_given]
    is_sized = all(hasattr(part, "__len__") for part in of_tests)
    is_counted = is_sized and not all(type(part) is range for part in of_tests)
    wanted = min(map(len, of_tests)) if is_counted else 0
    count = 0
    for values in zip(*parts, strict=False):
        yield values
        count += 1
    if count < wanted:
        raise ValueError("the program gave fewer values than the tests hold")


CHECKS: dict[str, Any] = {_EQUAL: equal, _MINUS: subtract, _COMPARES: compare, _ZIP: strict_zip}
