"""Assertions of tests that hold whatever the program gives, found by their text alone.

Such an assertion is its author's mistake, and would pay every program that ends. ``assert True``
alone is none: HumanEval's tests have it next to others, and handlers of errors as their mark.
"""

import ast
import builtins
from contextlib import suppress

_PREDICATES = {"all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass"}
"""Built-in functions that say yes or no."""
_LAZY = {"enumerate", "filter", "iter", "map", "reversed", "zip"}
"""Built-in functions whose results are true, whatever is in them."""


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
        if node.msg is None or not self._is_bare(node.test):
            return None
        with suppress(ValueError, TypeError):  # no literal
            value = ast.literal_eval(node.msg)
            if not isinstance(value, str) and value is not True:
                return f"compares nothing: {ast.unparse(node.msg)} is its message"
        return None

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
            case ast.BoolOp(op=ast.Or(), values=parts):
                return next((why for part in parts if (why := self._true(part))), None)
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
            case ast.Call(func=ast.Name(id=name), args=[_, *_]) if (
                name in _LAZY and name not in self.defined | self.assigned
            ):
                return f"what {name} gives is true, whatever is in it"
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
