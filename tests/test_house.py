"""The shape of the house, held by reading its imports.

1. Few rooms.               2. Imports point down the list of folders; stages never meet.
3. A folder is entered by its face; no circle, nobody takes another's private name.
4. A heavy library has one owner.       5. The config and the records load without torch.
6. What is imported is declared.
"""

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import version
from itertools import filterfalse
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conftest import ROOT
from house import MODULES, PACKAGE, imports_of, name_of, tree_of
from reason_llm.config import READERS
from reason_llm.readers import KINDS
from slices import SLICES, installed

ORDER = [
    {"errors"},
    {"files", "workers"},
    {"score.math", "score.code", "score.statistics"},
    {"rollout"},
    {"config"},
    {"data", "model"},
    {"sample", "score", "train"},
    {"environments", "images", "readers"},
    {"run"},
    {"evaluate", "replicas"},
    {"loop"},
    {"app"},
    {"__main__"},
]
"""Lowest first. What shares a line does not import each other."""
ALONE = {room for rooms in ORDER for room in rooms if "." in room}
"""Folders in a folder that could be packages of their own."""
ROOMS_OF_THE_LOOP = {"run.start.prepare", "run.opening", "run.run", "run.collect"}
"""Heavy, so not in the face of ``run``, whose records and metrics are read without torch."""
OWNERS = {
    "bitsandbytes": {"model", "train"},
    "peft": {"model", "run"},
    "unsloth": {"model"},
    "vllm": {"images", "model", "sample"},
    "datasets": {"data"},
    "sympy": {"score.math"},
    "matplotlib": {"app"},
    "tokenizers": {"app", "files", "model"},
    "trl": {"data"},
    "rich": {"app"},
    "tensorboard": {"app"},
    "wandb": {"app"},
    "trackio": {"app"},
    "ray": {"replicas"},
    "aiohttp": {"app", "environments"},
    "mcp": {"environments"},
    "mcp_types": {"environments"},
    "httpx2": {"environments"},
    "verifiers": {"environments"},
    "renderers": {"data", "environments"},
}
KNOWN = {name_of(module) for module in MODULES}
FOLDERS = {name_of(module) for module in MODULES if module.name == "__init__.py"}


def ours(path: Path) -> set[str]:
    """Modules of ours that a module imports."""
    names = {n.removeprefix("reason_llm.") for n in imports_of(path) if n.startswith("reason_llm.")}
    return names & KNOWN


def room(name: str) -> str:
    inner = ".".join(name.split(".")[:2])
    return inner if inner in ALONE else name.partition(".")[0]


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(ORDER) if room(name) in rooms)


def test_the_directory_listing_is_the_method() -> None:
    entries = [e for e in PACKAGE.iterdir() if e.name not in ("__pycache__", "py.typed")]
    assert sum(e.is_file() for e in entries) <= 7
    assert sum(e.is_dir() for e in entries) <= 13
    there = {e.stem for e in entries} - {"__init__"}
    assert there == set().union(*ORDER) - ALONE - set(filterfalse(installed, SLICES))


def test_imports_point_down() -> None:
    for path in MODULES:
        name = name_of(path)
        for other in ours(path) - {""} if name else ():
            is_below = room(other) == room(name) or floor(other) < floor(name)
            assert is_below, f"{name} imports {other}"


def test_a_slice_is_imported_by_name_alone() -> None:
    for path in MODULES:
        imported = {room(other) for other in ours(path)} & SLICES
        assert imported <= {room(name_of(path))}, name_of(path)


@pytest.mark.parametrize("name", sorted(SLICES))
def test_the_tests_of_a_slice_are_in_its_folder(name: str) -> None:
    imports = re.compile(rf"^ *(from|import) reason_llm\.{name}\b", re.MULTILINE)
    tests = [path for path in (ROOT / "tests").rglob("*.py") if imports.search(path.read_text())]
    assert {path.relative_to(ROOT / "tests").parts[0] for path in tests} <= {name}


def test_a_folder_is_entered_by_its_face() -> None:
    for path, node in [(module, node) for module in MODULES for node in ast.walk(tree_of(module))]:
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("reason_llm."):
            continue
        name, module = name_of(path), str(node.module).removeprefix("reason_llm.")
        is_inside = room(module) == room(name)
        is_a_room_of_the_loop = name == "loop" and module in ROOMS_OF_THE_LOOP
        is_a_room_of_the_loop |= room(name) == "replicas" and room(module) == "run"  # run's slice
        is_a_face = module in FOLDERS or "." not in module
        assert is_inside or is_a_face or is_a_room_of_the_loop, f"{name} imports {module}"
        for alias in node.names:
            assert not alias.name.startswith("_"), f"{alias.name} is private to {module}"


def test_there_is_no_circle() -> None:
    """Faces aside: they import what is in their folder, and nothing in it imports them."""
    graph = {}
    for path in MODULES:
        name = name_of(path)
        own = {folder for folder in FOLDERS if name == folder or name.startswith(f"{folder}.")}
        if name not in FOLDERS:
            graph[name] = ours(path) - own - {name, ""}
    for needed in graph.values():  # a face stands for everything in its folder that it shows
        for face in needed & FOLDERS:
            needed |= ours(PACKAGE / Path(*face.split(".")) / "__init__.py") - FOLDERS
        needed -= FOLDERS
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("reader", ["critic", "teacher", "reward_model"])
def test_a_reader_is_a_slice(reader: str) -> None:
    """Few modules have a name of a reader in their code; the others ask ``config.READERS``."""
    name = re.compile(rf"(^|_|\b){reader}s?(_|\b)")
    found = [
        path
        for path in MODULES
        if any(
            name.search(str(getattr(node, field, "")))
            for node in ast.walk(tree_of(path))
            for field in ("id", "attr", "arg", "name", "module")
        )
    ]
    assert len(found) <= 8, found
    assert len({path.parent for path in found}) <= 4, found


def test_readers_are_the_rows_of_the_table() -> None:
    assert KINDS.keys() == READERS.keys()


def test_environments_are_a_slice() -> None:
    """Outside of their folder an option, a record and the names of the slice's modules know them;
    the others ask for a ``Player``, ``Episodes`` or a ``RolloutSide``."""
    found = {
        name_of(path)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if room(name_of(path)) != "environments"
        if (isinstance(node, ast.Attribute) and node.attr == "environment")
        or (isinstance(node, ast.Constant) and re.match(r"environments\.", str(node.value)))
    }
    assert found == {"config.sections", "data.played", "rollout"}


def test_heavy_libraries_have_one_owner() -> None:
    for path in MODULES:
        for library in {name.split(".")[0] for name in imports_of(path)} & OWNERS.keys():
            assert room(name_of(path)) in OWNERS[library], f"{name_of(path)} imports {library}"


@pytest.mark.parametrize(
    "module",
    ["", ".config", ".data", ".run", ".score.scorer", ".app.report", ".app.cli", ".app.api"],
)
def test_light_rooms_load_no_heavy_library(module: str) -> None:
    code = f"import sys, reason_llm{module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


@pytest.mark.long
def test_a_run_without_an_environment_loads_no_server() -> None:
    code = "import sys, reason_llm.app.training; print('aiohttp' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_the_package_alone_loads_no_library() -> None:
    code = "import sys; old = {*sys.modules}; import reason_llm; print(*{*sys.modules} - old)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots = {name.split(".")[0] for name in shown.stdout.split()}
    assert roots - set(sys.stdlib_module_names) == {"reason_llm"}


IMPORTED_AS = {"yaml": "pyyaml", "PIL": "pillow"}
"""Packages by another name than their module's."""


def declared() -> dict[str, list[Requirement]]:
    """The lists of ``setup.py`` by their names."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    return {
        ast.unparse(node.targets[0]): [
            Requirement(each.value) for each in node.value.elts if isinstance(each, ast.Constant)
        ]
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    }


def test_what_is_imported_is_declared() -> None:
    roots = {name.split(".")[0] for path in MODULES for name in imports_of(path)}
    roots -= {*sys.stdlib_module_names, "reason_llm"}
    imported = {canonicalize_name(IMPORTED_AS.get(root, root)) for root in roots}
    names = {key: {canonicalize_name(r.name) for r in rows} for key, rows in declared().items()}
    extras = "VLLM", "UNSLOTH", "TRACKERS", "RAY", "GYM", "MCP", "VERIFIERS"
    optional = set().union(*(names[extra] for extra in extras))
    optional.add("triton")  # comes with torch for CUDA
    assert imported - optional - names["BASE"] == set()
    assert names["BASE"] == imported - optional


def test_what_is_installed_is_what_is_declared() -> None:
    for each in declared()["BASE"]:
        assert each.specifier.contains(version(each.name)), each


@pytest.mark.parametrize(
    ("lock", "lists"),
    [
        ("lock-cpu.txt", ("BASE", "TRACKERS", "RAY", "GYM", "VERIFIERS", "FRAMEWORKS", "TEST")),
        ("lock-gpu.txt", ("BASE", "VLLM", "TRACKERS", "RAY", "GYM", "MCP")),
    ],
)
def test_a_lock_has_a_version_of_all_that_is_declared(lock: str, lists: tuple[str, ...]) -> None:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    assert all("==" in line for line in lines)  # nothing but pins: no option, no address
    pins = [Requirement(line) for line in lines]
    for python in ("3.11", "3.12", "3.13", "3.14"):
        here = {"python_version": python, "python_full_version": f"{python}.0"}
        locked = {
            pin.name: str(pin.specifier).removeprefix("==")
            for pin in pins
            if pin.marker is None or pin.marker.evaluate(here)
        }
        for each in [requirement for name in lists for requirement in declared()[name]]:
            assert each.specifier.contains(locked[canonicalize_name(each.name)]), each
    has_cuda = [pin.name for pin in pins if pin.name.startswith(("nvidia-", "cuda-", "triton"))]
    assert bool(has_cuda) == (lock == "lock-gpu.txt")


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_threads_spin_shortly_unless_told_to(given: dict[str, str], expected: str) -> None:
    """On cores that something else uses, too, a step takes many times as long otherwise."""
    code = "import reason_llm, torch; torch.ones(9).sum()"
    taken = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LD_PRELOAD")  # a libgomp would read too early
    environment = {n: v for n, v in os.environ.items() if n not in taken}
    environment |= {"OMP_DISPLAY_ENV": "verbose", "OMP_NUM_THREADS": "2"} | given
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in shown.stderr


def test_the_sizes_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed and not met: the longest functions, and the length below which nine of ten are."""
    lengths = sorted(
        ((node.end_lineno or 0) - node.lineno + 1, f"{name_of(path)}.{node.name}")
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
    )
    with capsys.disabled():
        print(
            f"\nfunctions: {len(lengths)}, p90 {lengths[len(lengths) * 9 // 10][0]} lines,"
            f" longest {lengths[-3:]}"
        )
    assert lengths
