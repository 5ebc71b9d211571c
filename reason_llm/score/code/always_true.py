"""Assertions of tests that hold whatever the program gives, found by their text alone.

Such an assertion is its author's mistake, and would pay every program that ends. ``assert True``
alone is none: HumanEval's tests have it next to others, and handlers of errors as their mark.
"""

import ast
import builtins
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_PREDICATES = {"all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass"}
"""Built-in functions that say yes or no."""
_LAZY = {"enumerate", "filter", "iter", "map", "reversed", "zip"}
"""Built-in functions whose results are true, whatever is in them."""
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}  # fmt: skip
"""Comparisons of literals."""
_SAME = (ast.Eq, ast.Is, ast.LtE, ast.GtE)
"""Comparisons that hold between a value and itself."""
_WRITTEN_OUT = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.USub,
                ast.Load)  # fmt: skip
_PLAIN = (ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Load, ast.UnaryOp, ast.unaryop)


def always_true(tree: ast.Module) -> tuple[ast.Assert, str] | None:
    """The first assertion that any program or any true result passes, and its fault; or None."""
    uses = _Uses(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not is_mark(node) and (why := uses.why(node)):
            return node, why
    return None


def is_mark(node: ast.AST) -> bool:
    """Whether this is ``assert True``."""
    return (
        isinstance(node, ast.Assert)
        and isinstance(node.test, ast.Constant)
        and node.test.value is True
    )


class _Uses:
    """Names of the tests, by their use."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        self.called = {node.id for node in called if isinstance(node, ast.Name)}
        methods = [node for node in called if isinstance(node, ast.Attribute)]
        self.methods = {node.attr for node in methods if not _is_built_in(node.attr)}
        self.called_at = {ast.dump(node) for node in methods}
        self.assigned = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }
        self.defined = {
            node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def why(self, node: ast.Assert) -> str | None:
        """Fault of an assertion; None if it depends on the program."""
        if (reason := self._true(node.test)) is not None:
            return f"holds for every program: {reason}"
        if node.msg is None or not _is_literal(node.msg) or not self._is_bare(node.test):
            return None
        value = ast.literal_eval(node.msg)
        if isinstance(value, str) or value is True:
            return None
        return f"compares nothing: {ast.unparse(node.msg)} is its message"

    def _true(self, node: ast.expr) -> str | None:
        """The reason why a value is true, whatever the program gives; None if it may be false."""
        # Only what is true without being run: a doubtful rule would refuse a row with good tests.
        match node:
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                has_items = not all(isinstance(item, ast.Starred) for item in items)
                kind = type(node).__name__.lower()
                return f"a {kind} with items is true" if has_items else None
            case ast.Dict(keys=[_, *_] as keys) if any(key is not None for key in keys):
                return "a dict with items is true"
            case ast.GeneratorExp():
                return "a generator is true, whatever is in it"
            case ast.ListComp(elt=item) | ast.SetComp(elt=item) if isinstance(
                item, ast.Compare
            ) and not any(loop.ifs for loop in node.generators):
                return "a list with items is true"
            case ast.Lambda():
                return "a function that is not called is true"
            case ast.Constant(value=value) if value:
                return f"{value!r:.40} is true"
            case ast.JoinedStr(values=parts) if any(isinstance(p, ast.Constant) for p in parts):
                return "a text is true"
            case ast.NamedExpr(value=value):
                return self._true(value)
            case ast.BoolOp(op=ast.Or(), values=parts):
                return next((why for part in parts if (why := self._true(part))), None)
            case ast.BoolOp(values=parts):
                reasons = [self._true(part) for part in parts]
                return reasons[0] if all(reasons) else None
            case ast.IfExp(body=body, orelse=other):
                return self._true(body) and self._true(other)
            case ast.UnaryOp(op=ast.Not(), operand=operand) if _is_literal(operand):
                return None if ast.literal_eval(operand) else f"{ast.unparse(node)} is true"
            case ast.Compare(left=left, ops=ops, comparators=right):
                pairs = zip([left, *right], ops, right, strict=False)
                holds = all(_compares_nothing(*pair) for pair in pairs)
                return "it compares nothing of the program's" if holds else None
        return self._true_function(node)

    def _true_function(self, node: ast.expr) -> str | None:
        """The reason why a call, or a function that is not called, is true."""
        match node:
            case ast.Name(id=name) if name in self.defined or (
                name not in self.assigned
                and (name in self.called or callable(getattr(builtins, name, None)))
            ):
                return f"the function {name} is not called"
            case ast.Attribute(attr=name) if (
                name in self.methods
                or ast.dump(node) in self.called_at
                or (name.startswith(("is", "startswith", "endswith")) and _is_built_in(name))
            ):
                return f"the method {name} is not called"
            case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments) if (
                name not in self.defined | self.assigned
            ):
                return self._true_call(name, arguments)
        return None

    def _true_call(self, name: str, arguments: list[ast.expr]) -> str | None:
        match name, arguments:
            case _ if name in _LAZY:
                return f"what {name} gives is true, whatever is in it"
            case "isinstance", [_, ast.Name(id="object")]:
                return "everything is an object"
            case "bool", [value]:
                return self._true(value)
            case "any", [ast.List(elts=items) | ast.Tuple(elts=items)]:
                return next((why for item in items if (why := self._true(item))), None)
            case "all", [ast.List(elts=items) | ast.Tuple(elts=items)]:
                reasons = [self._true(item) for item in items]
                return "all its items are true" if all(reasons) else None
            case "all", [ast.GeneratorExp(elt=item)] if why := self._true(item):
                return why
            case "all", [ast.GeneratorExp(generators=[ast.comprehension(iter=values), *_])] if (
                _is_literal(values) and not ast.literal_eval(values)
            ):
                return "there is nothing to go through"
        return None

    def _is_bare(self, node: ast.expr) -> bool:
        """Whether a value of the program's is asserted without a comparison."""
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return name not in _PREDICATES and "close" not in name
            case ast.Call(func=ast.Attribute(attr=name)):
                return "close" not in name and "equal" not in name
        return isinstance(node, ast.Name | ast.Subscript | ast.BinOp)


def _is_built_in(method: str) -> bool:
    """Whether a built-in type has a method of that name."""
    kinds = (str, bytes, int, float, list, dict, set)
    return any(callable(getattr(kind, method, None)) for kind in kinds)


def _compares_nothing(left: ast.expr, how: ast.cmpop, right: ast.expr) -> bool:
    """Whether a comparison holds whatever the program gives."""
    if isinstance(how, _SAME) and ast.dump(left) == ast.dump(right):
        return all(isinstance(part, _PLAIN) for part in ast.walk(left)) or _is_literal(left)
    if type(how) in _COMPARE and _is_literal(left) and _is_literal(right):
        with suppress(TypeError):
            return _COMPARE[type(how)](ast.literal_eval(left), ast.literal_eval(right))
    match left, how, right:
        case ast.Call(func=ast.Name(id="len")), ast.GtE(), ast.Constant(value=0):
            return True
        case ast.Call(func=ast.Name(id="len")), ast.Gt(), ast.UnaryOp(op=ast.USub()):
            return True
    return False


def _is_literal(node: ast.expr) -> bool:
    """Whether a node is a literal: numbers, text, and lists, tuples, sets or dicts of these."""
    if not all(isinstance(part, _WRITTEN_OUT) for part in ast.walk(node)):
        return False
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):  # a set of lists
        return False
    return True
