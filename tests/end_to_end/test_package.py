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

from conftest import ROOT

BESIDE_THE_PACKAGE = {
    str(path.relative_to(ROOT)): path
    for pattern in (
        "configs/*.yaml",
        "data/arithmetic_*.jsonl",
        "data/countdown_*.jsonl",
        "data/wordle_*.jsonl",
        "model/*/*",
        "examples/countdown.py",
        "examples/tools.py",
        "examples/wordle.py",
        "requirements/*",
    )
    for path in ROOT.glob(pattern)
}


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
    for name, path in BESIDE_THE_PACKAGE.items():
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
def test_the_wheel_holds_the_package_and_its_configs(wheel: Path) -> None:
    files = (path for path in (ROOT / "reason_llm").rglob("*") if path.is_file())
    wanted = {str(path.relative_to(ROOT)): path for path in files if "__pycache__" not in str(path)}
    wanted |= {f"reason_llm/quickstart/{name}": path for name, path in BESIDE_THE_PACKAGE.items()}
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
    assert found.get_all("Project-URL") is None  # the public index does not have us
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload().lstrip().startswith("# reason_llm")
    needed: dict[str, set[str]] = {}
    for text in found.get_all("Requires-Dist", []):
        each = Requirement(text)
        for extra in found.get_all("Provides-Extra", []):
            if each.marker is not None and each.marker.evaluate({"extra": extra}):
                needed.setdefault(extra, set()).add(each.name)
    assert {"unsloth", "gpu", "trackers"} <= needed.keys()
    assert needed["gpu"] == {"vllm", "vllm-bnb-plugin", "flash-linear-attention"}
    assert needed["unsloth"] == {"unsloth", "unsloth-zoo"}  # which caps four packages


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
def test_configs_and_lists_are_found_outside_of_the_repository(
    call: Callable[..., str], installed: Path, tmp_path: Path
) -> None:
    folder, options = tmp_path / "empty", ("--memory.budget_gib", "4", "--log.console", "plain")
    assert "sampling" in call("plan", "configs/sft_tiny.yaml", *options)
    assert "role critic" in call("plan", "configs/rlhf_ppo_tiny.yaml", "--memory.budget_gib", "4")
    small = ("--run.steps", "1", "--eval.limit", "2", "--log.console", "plain")
    assert "step 1/1" in call("train", "configs/sft_tiny.yaml", *small)
    python = "from reason_llm.model.plan.backends import INSTALL_VLLM as told; print(told)"
    told = run([installed / "python", "-c", python], folder)
    assert "'./reason_llm-0.1.0-py3-none-any.whl[gpu]'" in told
    assert Path(told.split()[-1]).read_bytes() == (ROOT / "requirements/vllm_cpu.txt").read_bytes()
    (folder / "configs").mkdir()
    (folder / "configs" / "sft_tiny.yaml").write_text("run: {steps: nothing}")
    load = "import reason_llm; reason_llm.load_config('configs/{}.yaml')"
    run([installed / "python", "-c", load.format("gsm8k_qwen2.5-7b_24gb")], folder)
    with pytest.raises(AssertionError, match=r"run\.steps"):  # the folder's own is before ours
        run([installed / "python", "-c", load.format("sft_tiny")], folder)
