"""The shape of the package, held by reading its imports.

1. Stages never import each other.           2. Imports point down.
3. A heavy library has one owner.            4. The config loads without torch.
5. No module and no function outgrows a reader.    6. Nothing runs or unpickles what others wrote.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "reason_llm").rglob("*.py"))

# Lowest first; a module may import from its own layer's package and from layers below.
LAYERS = [
    {"errors", "rollout", "train.algorithms", "jail.isolation", "jail.seccomp", "jail.launcher",
     "jail.values", "jail.program_server", "jail.program_proxy", "jail.assert_source",
     "jail.function_harness", "box", "code_cases",
     "reading", "time_limit"},
    {"files", "background", "stopping", "archive", "saved_rollouts", "yaml_text",
     "config", "config_types", "config_algorithm", "config_data", "config_score",
     "config_file",
     "command_line", "run_folder", "outcomes", "statistics", "buffer", "rows", "row_forms",
     "templates", "prompts", "data", "metrics",
     "report.curves", "report.runs", "report.rollouts", "report.token_texts", "report.repetition",
     "report.trends", "report.alarms", "report.equation", "report.payload", "report.page",
     "report.serve", "console", "screen", "trackers", "tracker_process"},
    {"train.advantages", "train.losses", "train.logprobs", "train.packing", "train.optim",
     "model.packed_attention"},
    {"model.base", "model.engine", "model.shared_weights", "model.adapter_sync", "model.adapters",
     "model.merging", "model.nf4", "model.folder", "model.unsloth", "model.shape",
     "model.decode_attention", "machine", "memory", "meter", "environment", "checkpoint"},
    {"sample", "sample.transformers_sampler", "sample.vllm_sampler", "score", "score.answer_text",
     "score.answer_form", "score.answer_tree", "score.latex_tokens",
     "score.boxed_math", "score.code_tests", "score.extraction",
     "score.custom", "score.judge", "score.math_worker", "score.sandbox", "score.shaping",
     "score.table",
     "score.tags", "score.units", "train.policy", "train.preparation", "train.tally",
     "train.replay", "train.phase"},
    {"evaluate", "backends", "job", "data_check", "collection", "rescoring", "recovery", "accuracy",
     "evaluation", "evaluation_request", "export", "model_card", "parity", "chat",
     "chat_terminal"},
    {"loop"},
]  # fmt: skip
PACKAGES_WITHOUT_CODE = {"", "jail", "model", "report", "train"}
NO_TORCH = LAYERS[0] | LAYERS[1]
OWNERS = {
    "bitsandbytes": {"model.nf4", "train.optim"},
    "peft": {
        "model.base",
        "model.adapters",
        "model.adapter_sync",
        "model.unsloth",
        "model.shape",
        "checkpoint",
    },
    "unsloth": {"model.unsloth"},
    "vllm": {"model.engine", "model.adapter_sync", "model.unsloth", "sample.vllm_sampler"},
    "datasets": {"rows"},
    "sympy": {"score.math_worker"},
    "regex": {"score.table"},
    "matplotlib": {"report.curves"},
    "tokenizers": {"report.token_texts"},
    "rich": {"console", "screen"},
    "tensorboard": {"tracker_process"},
    "wandb": {"tracker_process"},
    "trackio": {"tracker_process"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "reason_llm").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def ours(path: Path) -> set[str]:
    known = {name_of(module) for module in MODULES}
    names = {n.removeprefix("reason_llm.") for n in imports_of(path) if n.startswith("reason_llm.")}
    return (names & known) - PACKAGES_WITHOUT_CODE


def layer(name: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if name in names)


def test_every_module_has_a_layer() -> None:
    assert {name_of(m) for m in MODULES} - PACKAGES_WITHOUT_CODE == set().union(*LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_and_stages_are_apart(path: Path) -> None:
    name = name_of(path)
    if name in PACKAGES_WITHOUT_CODE:
        return
    stages = ("sample", "score", "train")
    for other in ours(path):
        assert layer(other) <= layer(name), f"{name} imports {other} from above"
        mine, theirs = name.split(".")[0], other.split(".")[0]
        both = mine in stages and theirs in stages
        assert not both or mine == theirs, f"stage {mine} imports stage {theirs}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_heavy_libraries_have_one_owner(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    for library, owners in OWNERS.items():
        assert library not in roots or name_of(path) in owners
    if name_of(path) in NO_TORCH:
        assert "torch" not in roots


@pytest.mark.parametrize(
    "module",
    ["config", "config_file", "command_line", "buffer", "prompts", "data", "report.serve"],
)
def test_light_modules_load_no_heavy_library(module: str) -> None:
    code = f"import sys, reason_llm.{module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


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


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_outgrows_a_reader(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, node.name


PROGRAMS = [*MODULES, *sorted((ROOT / "scripts").rglob("*.py"))]
RUNS_CODE = {"eval", "exec", "compile", "__import__", "execfile", "breakpoint"}
UNPICKLES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
OF_MODULES = {
    *("os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.spawnv", "os.posix_spawn"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader"),
    *("yaml.UnsafeLoader", "yaml.FullLoader", "yaml.BaseLoader", "torch.load", "numpy.load"),
    *("np.load", "importlib.import_module", "runpy.run_path", "runpy.run_module"),
    *("loader.exec_module", "spec.loader.exec_module", "torch.hub", "code.interact"),
    *("ast.literal_eval", "jinja2.Template", "jinja2.Environment"),
}
ALLOWED = {  # where, what: why
    ("reason_llm/score/code/jail/launcher.py", "os.execve"): "starts the program within the walls",
    ("reason_llm/score/custom.py", "spec.loader.exec_module"): "the user's own reward",
    ("reason_llm/model/folder.py", "torch.load"): "model.allow_pickle, tensors only",
    ("reason_llm/model/folder.py", "pickle"): "the error of torch.load",
    (
        "reason_llm/data/render.py",
        "jinja2.Environment",
    ): "splits a template into words, renders none",
}


def dangers(path: Path) -> set[str]:
    """What in a module could run or unpickle what others wrote."""
    where, found = str(path.relative_to(ROOT)), set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in RUNS_CODE:
                found.add(name)
            case ast.Attribute() if (name := ast.unparse(node)) in OF_MODULES:
                found.add(name)
            case ast.Import(names=names):
                found |= {each.name for each in names if each.name.split(".")[0] in UNPICKLES}
            case ast.ImportFrom(module=str(name)) if name.split(".")[0] in UNPICKLES:
                found.add(name)
            case ast.keyword(arg="shell" | "allow_pickle", value=value):
                found.add(f"{node.arg}={ast.unparse(value)}")
            case ast.keyword(arg="trust_remote_code" | "weights_only", value=ast.Constant(value=v)):
                safe = (node.arg, v) in {("trust_remote_code", False), ("weights_only", True)}
                found |= set() if safe else {f"{node.arg}={v}"}
    return {each for each in found if (where, each) not in ALLOWED}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_others_is_run_or_unpickled(path: Path) -> None:
    is_jailed = path.parent.name == "jail"  # runs beside a program, behind the same walls
    assert is_jailed or dangers(path) == set()


def test_what_is_allowed_is_still_there() -> None:
    for where, what in ALLOWED:
        found = ast.walk(ast.parse((ROOT / where).read_text()))
        names = {ast.unparse(n) for n in found if isinstance(n, ast.Attribute)}
        assert what in names | {name.split(".")[0] for name in imports_of(ROOT / where)}


def test_weights_are_loaded_as_tensors_alone() -> None:
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / "reason_llm/model/folder.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert [("weights_only=True" in ast.unparse(call)) for call in calls] == [True]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_loading_says_whether_code_may_run(path: Path) -> None:
    """Transformers' own default would ask on the terminal."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and re.fullmatch(
            r"Auto\w+\.from_\w+", ast.unparse(node.func)
        ):
            assert "trust_remote_code" in {each.arg for each in node.keywords}, node.lineno


OPENS = {"open", "fdopen", "read_bytes", "read_text", "fromfile", "memmap", "input"}
"""Functions of modules and methods of paths that open a file."""
OF_LIBRARIES = {"os", "io", "gzip", "bz2", "lzma", "zipfile", "tarfile", "numpy", "fileinput"}
OPEN_BY_PATH = {
    *("load_file", "safe_open", "torch.load", "shutil.copyfile", "shutil.copy", "shutil.copy2"),
}
"""They open by themselves, so they are given ``regular(path)``."""
OPENED_OTHERWISE = {  # where, what: why
    ("reason_llm/files.py", "os.open"): "the one way to read a file, and to write one",
    ("reason_llm/files.py", "os.fdopen"): "the one way to read a file, and to write one",
    ("reason_llm/run/buffer.py", "gzip.open"): "of a file that open_regular opened",
    ("reason_llm/score/code/jail/launcher.py", "os.fdopen"): "pipes",
    (
        "reason_llm/score/code/jail/launcher.py",
        ".read_text",
    ): "/proc, where nothing else is imported",
    ("reason_llm/score/code/jail/program_server.py", "os.fdopen"): "a pipe",
    (
        "reason_llm/score/code/jail/program_server.py",
        "open",
    ): "the sandbox's own solution.py, within it",
    ("reason_llm/score/code/jail/function_harness.py", "os.open"): "/dev/null, within the sandbox",
    ("reason_llm/score/math/math_worker.py", "os.fdopen"): "a pipe",
    ("reason_llm/app/tracker_process.py", "os.fdopen"): "a pipe",
    ("reason_llm/app/tracker_process.py", "os.open"): "/dev/null",
    ("scripts/benchmarks/cpu.py", ".open"): "a log in its own temporary folder, for writing",
    ("scripts/benchmarks/cpu_worker.py", "os.fdopen"): "a pipe",
}


def opened(path: Path) -> set[tuple[str, str]]:
    """Where a module opens files, and how."""
    where, found = str(path.relative_to(ROOT)), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        first = node.args[0] if node.args else None
        is_checked = isinstance(first, ast.Call) and ast.unparse(first.func) == "regular"
        if name in OPEN_BY_PATH and not is_checked:
            found.add((where, name))
        elif name.rpartition(".")[0] and last in OPENS and name not in OPEN_BY_PATH:
            found.add((where, name if name.split(".")[0] in OF_LIBRARIES else f".{last}"))
        elif name == "open":
            found.add((where, name))
    return found


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_read_in_one_way(path: Path) -> None:
    """Regular ones, bounded, without waiting for a FIFO's other end: ``reason_llm.files``."""
    assert opened(path) - OPENED_OTHERWISE.keys() == set()


def test_other_ways_are_still_there() -> None:
    assert set().union(*map(opened, PROGRAMS)) >= OPENED_OTHERWISE.keys()
