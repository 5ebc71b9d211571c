"""Finds the branches of tests that the program decides.

The rule: wherever a value or an error of the program decides which way the tests go, the way taken
comes to an assertion, if another way would have. ``Ways`` notes before a decision how many
assertions were evaluated (``__count__``), and where its branches end, ``__took__`` compares. Not
here: what an assertion itself accepts, such as ``assert got is None or got == 3``.
"""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

CASE, COUNT, TOOK = "__case__", "__count__", "__took__"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
LoopNode = ast.For | ast.AsyncFor | ast.While
WithNode = ast.With | ast.AsyncWith
COMPARISONS = ("isclose", "allclose", "array_equal")
_ADDS = {"add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update"}
_WHOLE = {"len", "sorted", "list", "tuple", "set", "Counter"}
_GLOBAL = 0
_NEVER = 1 << 60  # larger than any count

Key = tuple[int, str]
"""A scope and a name in it; scope 0 is the module, -1 an attribute's name on whatever object."""


class Taint:
    """The names that hold what the program gave, by scope, whatever the order of statements.
    ``asked`` are global names that are the program's."""

    def __init__(self, tree: ast.Module, asked: Iterable[str]) -> None:
        self.keys: dict[int, Key] = {}
        """The scope and name that a node stands for, by its id."""
        self._edges: list[tuple[set[Key], set[Key]]] = []
        self.functions = {n.name: n for n in ast.walk(tree) if isinstance(n, FunctionNode)}
        self.handed: dict[str, set[str]] = {}
        """For each function's name, the parameters as which it is passed on."""
        self._name_scopes(tree, [(_GLOBAL, set())])
        self.names: set[Key] = {(_GLOBAL, name) for name in asked} | {(_GLOBAL, "candidate")}
        for node in ast.walk(tree):
            self._collect(node)
        while added := {k for to, of in self._edges if of & self.names for k in to} - self.names:
            self.names |= added

    def holds(self, *trees: ast.AST | None) -> bool:
        """Whether any of these uses what the program gave."""
        return any(tree is not None and self._used(tree) & self.names for tree in trees)

    def _name_scopes(self, node: ast.AST, scopes: list[tuple[int, set[str]]]) -> None:
        if isinstance(node, FunctionNode | ast.Lambda):
            for outside in [*getattr(node, "decorator_list", ()), *node.args.defaults]:
                self._name_scopes(outside, scopes)
            scopes = [*scopes, (id(node), _locals(node))]
            body = node.body if isinstance(node.body, list) else [node.body]
            for inside in [*body, *ast.walk(node.args)]:
                if isinstance(inside, ast.arg):
                    self.keys[id(inside)] = (id(node), inside.arg)
                elif inside in body:
                    self._name_scopes(inside, scopes)
            return
        match node:
            case ast.Name(id=name) | ast.ExceptHandler(name=str(name)):
                owners = (scope for scope, names in reversed(scopes) if name in names)
                self.keys[id(node)] = (next(owners, _GLOBAL), name)
        for child in ast.iter_child_nodes(node):
            self._name_scopes(child, scopes)

    def _used(self, tree: ast.AST) -> set[Key]:
        names = {self.keys[id(n)] for n in ast.walk(tree) if id(n) in self.keys}
        return names | {(-1, n.attr) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}

    def _collect(self, node: ast.AST) -> None:
        """Values that one node passes on, and the names that receive them."""
        # Statement order is ignored: a loop or a callback may run a later statement first.
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case (
                ast.NamedExpr(target=target, value=value)
                | ast.AugAssign(target=target, value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.withitem(optional_vars=ast.expr() as target, context_expr=value)
            ):
                self._bind(target, value)
            case (
                ast.For(target=target, iter=value)
                | ast.AsyncFor(target=target, iter=value)
                | ast.comprehension(target=target, iter=value)
            ):
                self._bind_loop(target, value)
            case ast.Call():
                self._collect_call(node)
            case ast.If(test=test):
                self._implicit([*node.body, *node.orelse], [test])
            case ast.Match(subject=subject, cases=cases):
                self._implicit([s for case in cases for s in case.body], [subject])
            case ast.Try(body=body, handlers=handlers, orelse=orelse):
                self._implicit([s for h in handlers for s in h.body] + orelse, body)
                caught = {self.keys[id(h)] for h in handlers if h.name}
                self._edges.append((caught, set().union(*map(self._used, body))))
            case ast.ImportFrom(module="solution", names=names):
                self.names |= {(_GLOBAL, alias.asname or alias.name) for alias in names}
            case ast.Import(names=names):
                self.names |= {(_GLOBAL, a.asname or a.name) for a in names if a.name == "solution"}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for decorator in node.decorator_list:
                    self._note_handed(last_name(decorator), 0, node.name)
                returned = {(_GLOBAL, node.name), (-1, node.name)}
                for child in ast.walk(node):
                    if isinstance(child, ast.Return | ast.Yield | ast.YieldFrom) and child.value:
                        self._edges.append((returned, self._used(child.value)))
                if node.name == "check":
                    self.names |= {(id(node), a.arg) for a in node.args.args}

    def _collect_call(self, call: ast.Call) -> None:
        """Values flow into parameters and collections, and calls into functions passed to them."""
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        name = last_name(call.func)
        if name in self.functions:
            function = self.functions[name]
            names = [a.arg for a in [*function.args.posonlyargs, *function.args.args]]
            names = names[1:] if isinstance(call.func, ast.Attribute) else names
            if any(isinstance(value, ast.Starred) for value in values):
                self._flow_into(function, values)
            else:
                pairs = [*zip(names, call.args, strict=False)]
                pairs += [(str(keyword.arg), keyword.value) for keyword in call.keywords]
                for parameter, value in pairs:
                    self._edges.append(({(id(function), parameter)}, self._used(value)))
        for place, argument in enumerate(values):
            if isinstance(argument, ast.Name) and argument.id in self.functions:
                self._note_handed(name, place, argument.id)
                self._flow_into(self.functions[argument.id], [call])
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDS:
            for value in values:
                self._bind(call.func.value, value)

    def _note_handed(self, to: str, place: int, name: str) -> None:
        parameters = self.functions[to].args.args if to in self.functions else []
        if place < len(parameters):
            self.handed.setdefault(name, set()).add(parameters[place].arg)

    def _flow_into(self, function: FunctionNode, values: Sequence[ast.AST]) -> None:
        names = {(id(function), n.arg) for n in ast.walk(function.args) if isinstance(n, ast.arg)}
        self._edges.append((names, set().union(*map(self._used, values))))

    def _implicit(self, body: Sequence[ast.stmt], deciding: Sequence[ast.AST]) -> None:
        """Names bound on a way that the program chooses count as the program's."""
        nodes = (n for statement in body for n in ast.walk(statement))
        stored = (n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        bound = {self.keys[id(n)] for n in stored}
        self._edges.append((bound, set().union(*map(self._used, deciding))))

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for one, other in zip(targets, values, strict=True):
                    self._bind(one, other)
            case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
                for one in targets:
                    self._bind(one, value)
            case ((ast.Starred(value=inner) | ast.Subscript(value=inner)), _):
                self._bind(inner, value)
            case ast.Attribute(attr=name), _:
                self._edges.append(({(-1, name)}, self._used(value)))
            case ast.Name(), _:
                self._edges.append(({self.keys[id(target)]}, self._used(value)))

    def _bind_loop(self, target: ast.AST, iterable: ast.AST) -> None:
        """A number that a loop counts is the tests' own, however often the loop runs."""
        match target, iterable:
            case _, ast.Call(func=ast.Name(id="range")):
                pass
            case ast.Tuple(elts=[_, item]), ast.Call(func=ast.Name("enumerate"), args=[values, *_]):
                self._bind_loop(item, values)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name("zip"), args=values) if len(
                targets
            ) == len(values):
                for one, other in zip(targets, values, strict=True):
                    self._bind(one, other)
            case _:
                self._bind(target, iterable)


def _locals(function: FunctionNode | ast.Lambda) -> set[str]:
    bound = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    outer: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                outer |= set(names)
    return bound - outer


def last_name(function: ast.expr) -> str:
    """``f`` of ``f(…)``, of ``self.f(…)`` and of ``module.f(…)``."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


# --- what statements are


def must_fail(node: ast.AST) -> bool:
    """Whether a statement must not be reached: ``assert False``, ``raise``, ``pytest.fail()``."""
    match node:
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=ast.Constant(value=value))):
            return bool(value)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="fail"))):
            return True
    return isinstance(node, ast.Raise)


def is_raises(node: ast.stmt) -> bool:
    """``with pytest.raises(…):`` is an assertion as a whole."""
    return isinstance(node, WithNode) and any(
        isinstance(item.context_expr, ast.Call)
        and last_name(item.context_expr.func) in ("raises", "warns")
        for item in node.items
    )


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Continue | ast.Break | ast.Return | ast.Raise)


class Plain(ast.NodeTransformer):
    """Other ways to write a condition become ``if``, other ways to assert become ``assert``.

    ``if bad: raise AssertionError`` is ``assert not bad``; ``got and same(got, 3)`` is an ``if``;
    ``np.testing.assert_equal(a, b)`` is an assertion that fails where it raises.
    """

    def __init__(self, tree: ast.Module) -> None:
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        self.imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in imports
            for alias in node.names
            if "solution" not in (alias.name, getattr(node, "module", None))
        } | {"np", "numpy"}

    def visit_If(self, node: ast.If) -> ast.stmt:
        """``if bad: raise AssertionError``."""
        self.generic_visit(node)
        match node.body:
            case [
                ast.Raise(exc=None)
                | ast.Raise(exc=ast.Name(id="AssertionError"))
                | ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError")))
            ]:
                is_assertion = not node.orelse
            case [only]:
                is_assertion = not node.orelse and isinstance(only, ast.Assert) and must_fail(only)
            case _:
                return node
        assertion = ast.Assert(ast.UnaryOp(ast.Not(), node.test))
        return ast.copy_location(assertion, node) if is_assertion else node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Conditions without ``if``, and functions that assert."""
        match node.value:
            case ast.BoolOp(op=op, values=[first, *rest]):
                is_or = isinstance(op, ast.Or)
                then = rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
                test = ast.UnaryOp(ast.Not(), first) if is_or else first
                statement: ast.stmt = ast.If(test, [self.visit_Expr(ast.Expr(then))], [])
            case ast.IfExp(test=test, body=body, orelse=other):
                statement = ast.If(test, [ast.Expr(body)], [ast.Expr(other)])
            case ast.ListComp(elt=item, generators=loops):
                statement = self.visit_Expr(ast.Expr(item))
                for loop in reversed(loops):
                    for condition in reversed(loop.ifs):
                        statement = ast.If(condition, [statement], [])
                    statement = ast.For(loop.target, loop.iter, [statement], [])
            case ast.Call(func=function) if self._asserts(function):
                true_unless_it_raises = ast.Tuple([node.value], ast.Load())
                statement = ast.Assert(true_unless_it_raises)
            case _:
                return node
        return ast.fix_missing_locations(ast.copy_location(statement, node))

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        """``return None if got is None else same(got, 3)``."""
        if not isinstance(value := node.value, ast.IfExp):
            return node
        branch = ast.If(value.test, [ast.Return(value.body)], [ast.Return(value.orelse)])
        return ast.fix_missing_locations(ast.copy_location(branch, node))

    def visit_With(self, node: ast.With) -> ast.AST:
        """Statements that expect an error stay as they are."""
        return node if is_raises(node) else self.generic_visit(node)

    def _asserts(self, function: ast.expr) -> bool:
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        is_imported = isinstance(root, ast.Name) and root.id in self.imported
        return is_imported and last_name(function).lower().startswith("assert")


# --- the counting


@dataclass(frozen=True, slots=True)
class _Way:
    """The context of a statement."""

    # variable that notes the count before the nearest decision of the program's
    name: str | None = None
    in_loop: bool = False  # that decision stands in the nearest loop: ``continue`` leaves it
    after: bool = False  # an assertion follows in the body of the nearest loop or function
    after_loop: bool = False  # one follows in the function
    loop_has: bool = False  # the nearest loop has one
    # variable of the nearest ``while True``, which a ``break`` ends as a condition would
    endless: str | None = None
    branches: bool = False  # a branch of the nearest decision has an assertion
    # variable that is true where no assertion of the ``try`` was passed over
    done: str | None = None
    siblings: Sequence[ast.stmt] = ()  # the statements of the same body


class Ways:
    """Puts the counting into tests; numbers from ``num_asserts`` on stand for ways."""

    def __init__(self, taint: Taint, num_asserts: int) -> None:
        self.taint = taint
        self.num_ways = 0
        self._first = num_asserts
        self.asserting: set[str] = set()
        while added := {
            name
            for name, function in taint.functions.items()
            if name not in self.asserting
            and any(
                self._asserts(node) for node in ast.walk(function) if isinstance(node, ast.stmt)
            )
        }:
            self.asserting |= added | {p for n in added for p in taint.handed.get(n, ())}

    def rewritten(self, tree: ast.Module) -> None:
        """Rewrite in place."""
        tree.body = self._block(tree.body, _Way())

    def reaches(self, body: Sequence[ast.stmt]) -> bool:
        """Whether statements reach an assertion, unless the program decides otherwise."""
        return any(map(self._node_reaches, body))

    def _asserts(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Assert):
            return not must_fail(node)
        if is_raises(node):
            return True
        if isinstance(node, FunctionNode | ast.ClassDef | LoopNode | WithNode | ast.If | ast.Try):
            return False
        return any(
            isinstance(n, ast.Call) and last_name(n.func) in self.asserting for n in ast.walk(node)
        )

    def _node_reaches(self, node: ast.stmt) -> bool:
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                first, second = self.reaches(body), self.reaches(orelse)
                return first or second if self.taint.holds(test) else first and second
            case ast.Match(subject=subject, cases=cases):
                return self.taint.holds(subject) and any(self.reaches(c.body) for c in cases)
            case ast.Try(body=body, orelse=orelse, finalbody=last):
                is_due = self.reaches(body) and not any(map(must_fail, body))
                return is_due or self.reaches(orelse) or self.reaches(last)
            case ast.For() | ast.AsyncFor() | ast.While() | ast.With() | ast.AsyncWith():
                return is_raises(node) or self.reaches(node.body)
        return self._asserts(node)

    def _block(self, body: Sequence[ast.stmt], way: _Way) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        for place, node in enumerate(body):
            rest = self.reaches(body[place + 1 :])
            after, after_loop = way.after or rest, way.after_loop or rest
            inner = replace(way, after=after, after_loop=after_loop, siblings=body)
            statements += self._statement(node, inner)
        return statements

    def _statement(self, node: ast.stmt, way: _Way) -> list[ast.stmt]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                node.body = self._block(node.body, _Way())
            case ast.Continue() | ast.Break() | ast.Return():
                return [*self._jump(node, way), node]
            case ast.If():
                return self._branches(node, node.test, [node.body, node.orelse], way)
            case ast.Match():
                bodies = [case.body for case in node.cases]
                return self._branches(node, node.subject, bodies, way)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, way)
            case ast.Try():
                return self._try(node, way)
            case ast.With() | ast.AsyncWith() if not is_raises(node):
                return self._with(node, way)
        return [node]

    def _jump(self, node: ast.stmt, way: _Way) -> list[ast.stmt]:
        if way.name is None or not (way.in_loop or isinstance(node, ast.Return)):
            return []
        if self._asserts(node):
            return []  # return same(got, want)
        if not isinstance(node, ast.Continue) and way.endless is not None:
            return [self._took(way.endless, None)]
        skips = {ast.Continue: way.after, ast.Break: way.after or way.loop_has}
        if skips.get(type(node), way.after_loop):
            return [self._took(way.name, None)]
        return [self._took(way.name, way.done)] if way.branches else []

    def _branches(
        self, node: ast.stmt, deciding: ast.expr, bodies: list[list[ast.stmt]], way: _Way
    ) -> list[ast.stmt]:
        dues = [self.reaches(body) for body in bodies]
        name = self._name()
        if not self.taint.holds(deciding):
            for body in bodies:
                body[:] = self._block(body, way)
            return [node]
        inner = replace(way, name=name, in_loop=True, branches=any(dues), done=None)
        needs = any(
            due and not (_leaves(body) and (way.after or way.after_loop))
            for due, body in zip(dues, bodies, strict=True)
        ) and not self._is_checked_by_sibling(deciding, way.siblings)
        for body in bodies:
            body[:] = self._block(body, inner)
        if isinstance(node, ast.If) and (equal := self._equality(node.test)) is not None:
            held = ast.Expr(call(CASE, self._number(), ast.Constant(True)))
            (node.body if equal else node.orelse).insert(0, held)
        return [self._noted(name), node, *([self._took(name, None)] if needs else [])]

    def _loop(self, node: LoopNode, way: _Way) -> list[ast.stmt]:
        values = node.test if isinstance(node, ast.While) else node.iter
        has = self.reaches(node.body)
        is_checked = self._is_checked_by_sibling(values, way.siblings)
        name = self._name()
        is_endless = isinstance(node, ast.While) and isinstance(values, ast.Constant)
        after_loop, endless = way.after_loop or has, name if is_endless and has else None
        inner = replace(
            way, in_loop=False, after=False, after_loop=after_loop, loop_has=has, endless=endless
        )
        node.body = self._block(node.body, inner)
        node.orelse = self._block(node.orelse, way)
        if not has or not (is_endless or self.taint.holds(values)):
            return [node]
        return [self._noted(name), node, *([] if is_checked else [self._took(name, None)])]

    def _try(self, node: ast.Try, way: _Way) -> list[ast.stmt]:
        # A handler, or a jump in ``finally``, can hide that an assertion did not run.
        is_decided = self.taint.holds(*node.body) and bool(node.handlers or _jumps(node.finalbody))
        must_raise = any(map(must_fail, node.body))
        has = (self.reaches(node.body) and not must_raise) or self.reaches(node.orelse)
        name, done = self._name(), self._name()
        if is_decided and has:
            self._mark(node.orelse if self.reaches(node.orelse) else node.body, done)
        node.body = self._block(
            node.body, replace(way, after=way.after or self.reaches(node.orelse))
        )
        node.orelse = self._block(node.orelse, way)
        if not is_decided:
            for handler in node.handlers:
                handler.body = self._block(handler.body, way)
            node.finalbody = self._block(node.finalbody, way)
            return [node]
        for handler in node.handlers:
            inner = replace(way, name=name, in_loop=True, branches=has, done=done if has else None)
            leaves = _leaves(handler.body)
            body = self._block(handler.body, inner)
            end = [self._took(name, done)] if has and not leaves else []
            handler.body = [self._noted(name), *body, *end]
        if has and _jumps(node.finalbody):
            node.finalbody.insert(0, self._took(None, done))
        return [_set(done, ast.Constant(False)), node] if has else [node]

    def _with(self, node: WithNode, way: _Way) -> list[ast.stmt]:
        """A context may swallow what its body raises."""
        is_decided = self.taint.holds(*node.body) and self.reaches(node.body)
        done = self._name()
        if is_decided:
            self._mark(node.body, done)
        node.body = self._block(node.body, way)
        if not is_decided:
            return [node]
        return [_set(done, ast.Constant(False)), node, self._took(None, done)]

    def _mark(self, body: list[ast.stmt], done: str) -> None:
        """Note behind the last assertion that none was passed over; ``raise`` at the end of a
        context leaves those around it, too."""
        last = max(i for i, statement in enumerate(body) if self._node_reaches(statement))
        match body[last]:
            case ast.With(body=[*_, ast.Raise()] as inner) if self.reaches(inner):
                self._mark(inner, done)
            case _:
                body.insert(last + 1, _set(done, ast.Constant(True)))

    def _is_checked_by_sibling(self, values: ast.expr, siblings: Sequence[ast.stmt]) -> bool:
        """Whether an assertion of the same body says, by ``==``, what or how long this value is;
        then its being empty is no choice of the program's."""
        match values:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                values = inner
            case ast.Compare(left=ast.Call(func=ast.Name(id="len")) as inner):
                values = inner
        used = {self.taint.keys[id(n)] for n in ast.walk(values) if isinstance(n, ast.Name)}
        names = used & self.taint.names
        if not names or isinstance(values, ast.Compare | ast.BoolOp | ast.Subscript):
            return False
        # Such an assertion fails anyway where the program gives an empty value.
        checked: set[Key] = set()
        for node in siblings:
            test = node.test if isinstance(node, ast.Assert) else None
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
                for side in (test.left, *test.comparators):
                    match side:
                        case ast.Name():
                            checked.add(self.taint.keys[id(side)])
                        case ast.Call(func=ast.Name(name), args=[ast.Name() as argument, *_]) if (
                            name in _WHOLE
                        ):
                            checked.add(self.taint.keys[id(argument)])
        return names <= checked

    def _equality(self, test: ast.expr) -> bool | None:
        """Whether a condition compares what the program gave with what the tests hold: True where
        it holds if they are equal, False if they differ; None: it does no such thing."""
        match test:
            case ast.Compare(left=first, ops=[ast.Eq() | ast.NotEq() as how], comparators=[second]):
                is_equal = isinstance(how, ast.Eq)
            case ast.Call(func=function, args=[first, second, *_]) if (
                last_name(function) in COMPARISONS
            ):
                is_equal = True
            case _:
                return None
        pair = sorted((first, second), key=self.taint.holds)
        if self.taint.holds(pair[0]) or not any(isinstance(n, ast.Name) for n in ast.walk(pair[0])):
            return None
        return is_equal

    def _name(self) -> str:
        self.num_ways += 1
        return f"__way{self.num_ways}__"

    def _number(self) -> ast.expr:
        self.num_ways += 1
        return ast.Constant(self._first + self.num_ways)

    def _noted(self, name: str) -> ast.stmt:
        return _set(name, call(COUNT))

    def _took(self, name: str | None, done: str | None) -> ast.stmt:
        way = ast.Constant(_NEVER) if name is None else ast.Name(name, ast.Load())
        is_done = ast.Constant(False) if done is None else ast.Name(done, ast.Load())
        return ast.Expr(call(TOOK, self._number(), way, is_done))


def _jumps(body: Sequence[ast.stmt]) -> bool:
    nodes = (n for statement in body for n in ast.walk(statement))
    return any(isinstance(n, ast.Continue | ast.Break | ast.Return) for n in nodes)


def _set(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def call(function: str, *arguments: ast.expr) -> ast.Call:
    """A call of a function in the namespace of the rewritten tests."""
    return ast.Call(ast.Name(function, ast.Load()), [*arguments], [])
