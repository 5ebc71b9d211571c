"""What others wrote is never run, unpickled or read without a bound: held by reading the product's
own source.

1. No eval, pickle or shell.        2. Transformers is told whether code may run.
3. Files are opened in one way.
"""

import ast
import re
from itertools import filterfalse
from pathlib import Path

from conftest import ROOT
from house import MODULES, imports_of, tree_of
from slices import is_gone

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
LAST = {name.rpartition(".")[2] for name in OF_MODULES}
ALLOWED = {  # where, what: why
    ("reason_llm/app/cli/serve.py", "os.execv"): "becomes vLLM's server, by its own command line",
    ("reason_llm/score/code/jail/launcher.py", "os.execve"): "starts the program within the walls",
    (
        "reason_llm/data/own_code.py",
        "spec.loader.exec_module",
    ): "the user's own reward or preprocess",
    ("reason_llm/data/own_code.py", "importlib.import_module"): "an installed package's function",
    ("reason_llm/score/code/checkers.py", "pickle"): "written for the sandbox, never read",
    ("reason_llm/score/code/checkers.py", "dill"): "written for the sandbox, never read",
    ("reason_llm/environments/tasksets.py", "pickle"): "written for the sandbox, never read",
    ("reason_llm/score/code/always_true.py", "ast.literal_eval"): "of a row's tests, as a tree",
    ("reason_llm/__init__.py", "importlib.import_module"): "of a table of our own",
    ("reason_llm/app/cli/__init__.py", "importlib.import_module"): "of a table of our own",
    ("reason_llm/config/yaml_text.py", "yaml.load"): "with a SafeLoader that takes still less",
}


def dangers(path: Path) -> set[str]:
    """What in a module could run or unpickle what others wrote."""
    where, found = str(path.relative_to(ROOT)), set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in RUNS_CODE:
                found.add(name)
            case ast.Attribute(attr=last) if last in LAST and ast.unparse(node) in OF_MODULES:
                found.add(ast.unparse(node))
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


def test_nothing_of_others_is_run_or_unpickled() -> None:
    # What is in the jail runs beside a program, behind the same walls.
    outside = [path for path in PROGRAMS if path.parent.name != "jail"]
    assert {path: found for path in outside if (found := dangers(path))} == {}


def test_what_is_allowed_is_still_there() -> None:
    for where, what in filterfalse(lambda each: is_gone(each[0]), ALLOWED):
        found = ast.walk(tree_of(ROOT / where))
        names = {ast.unparse(n) for n in found if isinstance(n, ast.Attribute)}
        assert what in names | {name.split(".")[0] for name in imports_of(ROOT / where)}


def test_loading_says_whether_code_may_run() -> None:
    """Transformers' own default would ask on the terminal."""
    for path, node in [(module, node) for module in MODULES for node in ast.walk(tree_of(module))]:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.startswith("from_")
            and re.fullmatch(r"Auto\w+\.from_\w+", ast.unparse(node.func))
        ):
            assert "trust_remote_code" in {each.arg for each in node.keywords}, (path, node.lineno)


OPENS = {"open", "fdopen", "read_bytes", "read_text", "fromfile", "memmap", "input"}
"""Functions of modules and methods of paths that open a file."""
OF_LIBRARIES = {"os", "io", "gzip", "bz2", "lzma", "zipfile", "tarfile", "numpy", "fileinput"}
OPEN_BY_PATH = {
    *("load_file", "safe_open", "torch.load", "shutil.copyfile", "shutil.copy", "shutil.copy2"),
}
"""They open by themselves, so they are given ``regular(path)``."""
OPENED_OTHERWISE = {  # where, what: why
    ("reason_llm/images/files.py", ".open"): "Pillow's, of bytes in memory",
    ("reason_llm/files.py", "os.open"): "the one way to read a file, and to write one",
    ("reason_llm/files.py", "os.fdopen"): "the one way to read a file, and to write one",
    ("reason_llm/model/adapters.py", "shutil.copyfile"): "of a file that regular looked at",
    ("reason_llm/run/store/document.py", "gzip.open"): "of a file that open_regular opened",
    ("reason_llm/run/held_out.py", "gzip.open"): "of a file that open_regular opened",
    ("reason_llm/app/report/texts.py", "gzip.open"): "of a file that open_regular opened",
    ("reason_llm/score/code/jail/fork_server.py", "open"): "the program's own files, within it",
    ("reason_llm/score/code/jail/launcher.py", "os.open"): "/dev/null",
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
    ("reason_llm/score/math/math_worker.py", ".open"): "sympy's open interval",
    ("scripts/benchmarks/sides.py", ".open"): "a log in its own temporary folder, for writing",
}


def opened(path: Path) -> set[tuple[str, str]]:
    """Where a module opens files, and how."""
    where, found = str(path.relative_to(ROOT)), set()
    for node in ast.walk(tree_of(path)):
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


def test_files_are_read_in_one_way() -> None:
    """Regular ones, bounded, without waiting for a FIFO's other end: ``reason_llm.files``; other
    ways are those of the table, which are still there.
    """
    allowed = {each for each in OPENED_OTHERWISE if not is_gone(each[0])}
    assert set().union(*map(opened, PROGRAMS)) == allowed
