"""Nothing stands in the package that no command reaches.

The walk begins at the scripts, the console's entry, the public names and what modules do when they
are loaded or started. From each definition it goes on to all definitions of the names and the texts
in its source, so a name that two definitions share keeps both. Tests reach nothing.
"""

import ast
import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import reason_llm
from conftest import ROOT
from house import MODULES, PACKAGE
from reason_llm.score import code as score_code, math as score_math

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(eq=False)
class Definition:
    """A function, class, method or constant of a module."""

    where: str
    name: str
    uses: set[str]
    follows: bool = False
    """A method that is called by Python or by a library: it is reached with its class."""
    methods: list["Definition"] = field(default_factory=list)


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Names, attributes and texts in pieces of source, and what is imported by another name."""
    found = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        match node:
            case ast.Name(name) | ast.Attribute(attr=name) | ast.Constant(str(name)):
                found.add(name)
            case ast.alias(name, str()):
                found.add(name)
    return found


def definitions(module: str, tree: ast.Module, own: set[str]) -> Iterator[Definition]:
    """Those of a module; its other statements are the first, which has no name.

    Args:
        own: names of all classes of the package. Of a class with another base, all methods may be
            called by a library.
    """
    others: list[ast.AST] = []
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                if name != "__all__":
                    yield Definition(f"{module}: {name}", name, names_in([node]) - {name})
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                yield Definition(f"{module}: {name}", name, names_in([node]) - {name})
            case ast.ClassDef(name):
                methods = [each for each in node.body if isinstance(each, FUNCTIONS)]
                rest = [each for each in node.body if each not in methods]
                bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
                made = Definition(f"{module}: {name}", name, set())
                made.uses = names_in([*node.bases, *node.decorator_list, *rest]) - {name}
                for each in methods:
                    is_hook = "validator" in " ".join(map(ast.unparse, each.decorator_list))
                    follows = each.name.startswith("__") or is_hook or not bases <= own
                    where = f"{module}: {name}.{each.name}"
                    uses = names_in([each]) - {each.name}
                    made.methods.append(Definition(where, each.name, uses, follows))
                yield made
            case _:
                others.append(node)
    yield Definition("", "", names_in(others))


def unreached(trees: Mapping[str, ast.Module], roots: set[str]) -> list[str]:
    """Definitions that no name of ``roots``, and nothing that runs on loading, leads to."""
    classes = {n.name for t in trees.values() for n in t.body if isinstance(n, ast.ClassDef)}
    own = classes | {"Protocol"}
    made = [each for name, tree in trees.items() for each in definitions(name, tree, own)]
    by_name = defaultdict(list)
    class_of = {}
    for each in made:
        by_name[each.name].append(each)
        for method in each.methods:
            by_name[method.name].append(method)
            class_of[method] = each
    reached: set[Definition] = set()
    named: set[str] = set()
    left = {"", *roots, *(name for name in by_name if name.startswith("__"))}
    while left:
        name = left.pop()
        named.add(name)
        new = [each for each in by_name[name] if class_of.get(each, each) in reached | {each}]
        new = [each for each in new if each not in reached]
        while new:
            each = new.pop()
            reached.add(each)
            left |= each.uses - named
            new += [m for m in each.methods if m not in reached and (m.follows or m.name in named)]
    every = [method for each in made for method in (each, *each.methods)]
    return sorted(each.where for each in every if each not in reached)


BY_TESTS_OF_DATA = {"parametrize"}
"""Called by tests that stand in a row of data, as ``pytest.mark.parametrize``."""


def test_the_walk_finds_what_nothing_reaches() -> None:
    source = """
from elsewhere import Server, tool as other
LIMIT = 3
UNUSED = 4
def used(x=LIMIT): return table[x]().shown
def lonely(): return lonely() or also_lonely()
def also_lonely(): ...
table = {3: lambda: Kept()}
class Kept(Base):
    def __init__(self): self.call("hidden")
    def shown(self): ...
    def hidden(self): ...
    def dead(self): ...
class Base: ...
class Forgotten:
    def used(self): ...
class Handler(Server):
    def do_GET(self): ...
print(Handler, other)
"""
    expected = "Forgotten Forgotten.used Kept.dead UNUSED also_lonely lonely"
    found = unreached({"m": ast.parse(source)}, {"used"})
    assert found == [f"m: {name}" for name in expected.split()]


def test_every_definition_is_reached_from_a_command_or_a_public_name() -> None:
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in MODULES
    }
    entries = importlib.metadata.entry_points(group="console_scripts", name="reason-llm")
    roots = {each.attr for each in entries} | set(reason_llm.__all__) | BY_TESTS_OF_DATA
    faces = (score_math, score_code)  # both are of use alone
    roots |= {name for face in faces for name, value in vars(face).items() if callable(value)}
    assert "main" in roots
    roots |= names_in(ast.parse(each.read_text()) for each in (ROOT / "scripts").glob("*.py"))
    assert unreached(trees, roots) == [], "\n".join(unreached(trees, roots))
