"""The product without the folder ``environments``, ``images`` or ``replicas`` of the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

TRAIN = """
import runpy, sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]  # which has the folder
sys.path.insert(0, FOLDER)
sys.argv = ["scripts/train.py", *sys.argv[1:]]
runpy.run_path("scripts/train.py", run_name="__main__")
"""
IMAGES = "rows.jsonl"
"""A file of a row with an image."""
ASKING = {
    "images": (["--data.train", IMAGES],),
    "environments": (["configs/wordle_tiny.yaml"], ["--data.train", "environment?size=4"]),
    "replicas": (["--run.shards", "2"], ["--run.max_staleness", "1"]),
}
"""Options that need a folder."""


def train(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    code = TRAIN.replace("FOLDER", repr(str(folder)))
    command = [sys.executable, "-c", code, *options, "--log.console", "plain"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)


@pytest.mark.long
@pytest.mark.parametrize("without", ASKING)
def test_the_quick_start_runs_and_what_asks_for_the_folder_is_refused(
    without: str, tmp_path: Path
) -> None:
    for name in ("reason_llm", "scripts", "configs", "data", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "model").symlink_to(ROOT / "model")
    shutil.rmtree(tmp_path / "reason_llm" / without, ignore_errors=True)
    row = {"image": "a.png", "question": "Which?", "answer": "3"}
    (tmp_path / IMAGES).write_text(json.dumps(row) + "\n")
    done = train(tmp_path, "--run.steps", "1", "--eval.limit", "8")
    assert done.returncode == 0, done.stderr
    for options in ASKING[without]:
        refused = train(tmp_path, *options)
        (line,) = refused.stderr.splitlines()
        assert refused.returncode == 2 and f"needs the folder reason_llm/{without}" in line
