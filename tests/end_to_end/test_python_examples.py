"""The examples of docs/configs.md, as scripts in an empty folder and as a notebook's cells, and
``examples/quickstart.ipynb``."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from documents import blocks

EXAMPLES = [b.text for b in blocks(ROOT / "docs" / "configs.md") if b.language == "python"]


def environment(folder: Path) -> dict[str, str]:
    paths = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **paths}


def run_script(text: str, folder: Path) -> str:
    (folder / "example.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_examples_run_one_after_the_other_in_an_empty_folder(tmp_path: Path) -> None:
    assert len(EXAMPLES) == 3
    first = run_script(EXAMPLES[0], tmp_path)
    assert first.splitlines()[-1] == "3 runs/totals/adapter runs/totals/report.html"
    assert "step 3/3" in first
    config = (tmp_path / "runs" / "totals" / "resolved_config.yaml").read_text()
    assert "custom: python:__main__.right_total" in config
    again = run_script(EXAMPLES[0].replace('"steps": 3', '"steps": 4'), tmp_path)
    assert "resumes after step 3" in again and "step 4/4" in again
    steps, *accuracy = run_script(EXAMPLES[1], tmp_path).split()
    assert steps == "2" and all(0 <= float(text) <= 1 for text in accuracy)
    judged = run_script(EXAMPLES[2], tmp_path)
    assert "['adapter', 'base'] think_answer_tags\n" in judged
    assert judged.splitlines()[-1] == "True"


@pytest.mark.long
def test_the_readme_s_example_runs_in_an_empty_folder(tmp_path: Path) -> None:
    (text,) = (b.text for b in blocks(ROOT / "README.md") if b.language == "python")
    assert run_script(text, tmp_path).splitlines()[-1] == "runs/totals/report.html"


STATE = """
import logging, signal, sys
def state():
    return (logging.getLogger("reason_llm").handlers, logging.getLogger("reason_llm").level,
            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdout.errors)
before = state()
"""
LONG = """
config["run"] = {"name": "long", "steps": 400, "buffer": "long.json"}
try:
    reason_llm.train(config, rewards=[right_total], rows=rows)
except KeyboardInterrupt as stopped:
    print("caught", type(stopped).__name__)
"""
GO_ON = """
import orjson, pathlib
done = len(pathlib.Path("runs/long/metrics.jsonl").read_text().splitlines()) - 1
config["run"]["steps"] = done + 1
summary = reason_llm.train(config, rewards=[right_total], rows=rows)
print(summary["steps"] == done + 1, state() == before)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Any:
    """A real kernel of IPython in an empty folder, at sockets of files: a free port that was found
    may be another program's when the kernel takes it."""
    pytest.importorskip("ipykernel")
    manager_module = pytest.importorskip("jupyter_client.manager")
    with tempfile.TemporaryDirectory(prefix="k-", dir="/tmp") as sockets:  # a short path
        manager = manager_module.KernelManager(transport="ipc", ip=f"{sockets}/kernel")
        manager.kernel_spec.argv[0] = sys.executable
        manager.start_kernel(cwd=str(tmp_path), env=environment(tmp_path))
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=600)
        yield manager, client
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(kernel: Any, text: str, stop_at: str | None = None) -> tuple[str, list[str]]:
    """Standard output and the types of what was displayed; stops the cell once at a word."""
    manager, client = kernel
    asked, shown, displayed, deadline = client.execute(text), "", [], time.monotonic() + 600
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=600)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            shown += content["text"]
        elif kind == "display_data":
            displayed += content["data"]
        elif kind == "error":
            raise AssertionError("\n".join(content["traceback"]))
        elif kind == "status" and content["execution_state"] == "idle":
            return shown, displayed
        if stop_at is not None and stop_at in shown:
            manager.interrupt_kernel()
            stop_at = None
    raise AssertionError(f"the cell did not end: {shown}")


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # of jupyter's own
def test_a_notebook_shows_progress_and_a_plot_and_stops_and_goes_on(kernel: Any) -> None:
    run_cell(kernel, STATE)
    shown, displayed = run_cell(kernel, EXAMPLES[0])
    assert "step 1/3" in shown and "\x1b[" not in shown
    assert "image/png" in displayed
    stopped, displayed = run_cell(kernel, LONG, stop_at="step 2/400")
    assert "the same call resumes it" in stopped and "caught Stopped" in stopped
    assert displayed == []
    shown, displayed = run_cell(kernel, GO_ON)
    assert "True True" in shown
    assert "image/png" in displayed


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # of jupyter's own
def test_the_quick_start_s_notebook_runs_from_top_to_bottom(kernel: Any, tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"])
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    trained, *_ = [run_cell(kernel, text)[0] for text in cells]
    before, after = (float(x) for x in re.findall(r"([0-9.]+)%", trained.splitlines()[-1]))
    assert after > before + 10
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    assert (tmp_path / "exported" / "notebook" / "config.json").is_file()
