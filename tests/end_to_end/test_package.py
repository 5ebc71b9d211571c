"""The wheel, installed in an environment of its own: the commands run in an empty folder, without
a network and without the repository."""

import importlib.metadata as metadata
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement

from conftest import ROOT, TINY
from documents import blocks

QUICK_START = {
    "configs/quickstart.yaml": ROOT / "configs" / "quickstart.yaml",
    **{f"data/arithmetic_{name}.jsonl": ROOT / "data" / f"arithmetic_{name}.jsonl"
       for name in ("train", "test")},
    **{f"model/tiny/{path.name}": path for path in TINY.iterdir()},
}  # fmt: skip


def run(words: list[str | Path], folder: Path, **environment: str) -> str:
    """What a program printed; its exit code is 0."""
    inherited = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, env=inherited | environment
    )
    assert ended.returncode == 0, f"{words}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a source distribution, as an index gets it; the checkout is left as it is."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    copytree(ROOT / "reason_llm", source / "reason_llm", ignore=ignore_patterns("__pycache__"))
    for name, path in QUICK_START.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(path.read_bytes())
    run([sys.executable, "setup.py", "-q", "sdist"], source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", source / "wheels"]
    run([sys.executable, "-m", "pip", "wheel", *options, archive], source)
    (built,) = (source / "wheels").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment that has the wheel, and sees what it depends on."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    options = ["-q", "--no-deps", "--no-index"]
    python = home / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], home)
    others = [sysconfig.get_path("purelib"), *sys.path]
    found = dict.fromkeys(path for path in others if Path(path).name == "site-packages")
    (packages / "others.pth").write_text("\n".join(found) + "\n")
    return home / "bin"


@pytest.mark.long
def test_the_wheel_holds_the_package_and_the_quick_start(wheel: Path) -> None:
    files = (path for path in (ROOT / "reason_llm").rglob("*") if path.is_file())
    wanted = {str(path.relative_to(ROOT)): path for path in files if "__pycache__" not in str(path)}
    wanted |= {f"reason_llm/quickstart/{name}": path for name, path in QUICK_START.items()}
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        assert names == set(wanted)
        assert all(opened.read(name) == path.read_bytes() for name, path in wanted.items())


@pytest.mark.long
def test_the_metadata_tells_what_it_is_and_what_is_optional(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("/METADATA"))
        found = metadata.PathDistribution(zipfile.Path(opened, f"{Path(name).parent}/")).metadata
    assert found["Summary"].startswith("Reinforcement learning and RLHF of language models")
    assert "Releases, https://pypi.org" in found.get_all("Project-URL", [""])[0]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().lstrip().startswith("# reason_llm")
    needed: dict[str, set[str]] = {}
    for text in found.get_all("Requires-Dist", []):
        each = Requirement(text)
        for extra in found.get_all("Provides-Extra", []):
            if each.marker is not None and each.marker.evaluate({"extra": extra}):
                needed.setdefault(extra, set()).add(each.name)
    assert {"vllm", "unsloth", "gpu", "trackers"} <= needed.keys()
    assert needed["gpu"] == needed["vllm"] | needed["unsloth"]
    assert "unsloth" not in needed["vllm"] and "unsloth" in needed["unsloth"]


@pytest.fixture
def call(installed: Path, tmp_path: Path) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        command: list[str | Path] = [installed / "reason-llm", *arguments]
        environment = {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return run(command, tmp_path / "empty", **environment)

    (tmp_path / "empty").mkdir()
    return call


@pytest.mark.long
def test_the_quick_start_runs_in_an_empty_folder(
    call: Callable[..., str], installed: Path, tmp_path: Path
) -> None:
    where = "import reason_llm; print(reason_llm.__file__)"
    assert run([installed / "python", "-c", where], tmp_path).startswith(str(installed.parent))
    assert "reason-llm COMMAND" in call("--help")
    assert "sampling" in call("plan")
    folder = tmp_path / "empty"
    assert list(folder.iterdir()) == []
    shown = call("train", "--run.steps", "2", "--eval.limit", "4", "--log.console", "plain")
    assert "step 2/2" in shown
    assert sorted(path.name for path in folder.iterdir()) == ["data", "runs"]
    assert (folder / "data" / "buffer.json").exists()
    assert (folder / "runs" / "quickstart" / "report.html").exists()
    config = (folder / "runs" / "quickstart" / "resolved_config.yaml").read_text()
    assert str(installed.parent) in config
    assert str(ROOT) not in config


@pytest.mark.long
def test_an_example_of_the_python_api_runs_in_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    """With a reward in TRL's form and rows of its own."""
    first = next(b for b in blocks(ROOT / "docs" / "python.md") if b.language == "python")
    (tmp_path / "example.py").write_text(first.text)
    environment = {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    shown = run([installed / "python", "example.py"], tmp_path, **environment)
    assert shown.splitlines()[-1] == "3 runs/totals/adapter runs/totals/report.html"
    config = (tmp_path / "runs" / "totals" / "resolved_config.yaml").read_text()
    assert str(installed.parent) in config
