"""Runs over images: learned, killed and resumed to the same bits, and as rows to learn from."""

import base64
import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from digits import make_digits, make_model, section_of
from PIL import Image as Pillow

from conftest import config_of, tree_of
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.config import load

DIE_AT = Path(__file__).parents[1] / "fixtures" / "die_at.py"


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """The config of a short run over eight images."""
    if not (folder / "model").exists():
        make_model(folder / "model")
        make_digits.write_images(folder, "train", 8, random.Random(0))
    tree: dict[str, Any] = {
        "run": {"directory": str(folder / "runs"), "name": name, "steps": 2,
                "buffer": str(folder / f"{name}.json")},
        "model": section_of(str(folder / "model")) | {"adapter": {"rank": 4, "dropout": 0.1}},
        "data": {"train": str(folder / "train.jsonl"), "system_prompt": "none"},
        "sample": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 8},
        "score": {"rewards": [{"custom": str(folder / "reward.py:length")}]},
        "algorithm": {"name": "grpo"},
        "train": {"learning_rate": 1e-2, "gradient_checkpointing": False},
        "log": {"console": "plain"},
    }  # fmt: skip
    reward = (
        "def length(completions, **kwargs):\n    return [len(set(c)) / 9 for c in completions]\n"
    )
    (folder / "reward.py").write_text(reward)
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values if values is not None else None
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value}))
    return path


def call(config: Path, place: str, count: int) -> subprocess.CompletedProcess[str]:
    """Train, killed at a call of a place; 0: not."""
    command = [sys.executable, str(DIE_AT), place, str(count), str(config)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ})


def tensors(folder: Path, name: str) -> dict[str, bytes]:
    return tree_of(folder / "runs" / name / "adapter")


@pytest.mark.long
def test_a_kill_changes_no_bit(tmp_path: Path) -> None:
    """And the report shows the images of the rollouts."""
    training.run_training(load(write_config(tmp_path, "whole")), Console("quiet"))
    config = write_config(tmp_path, "killed")
    ended = call(config, "reason_llm.train.learner:Learner._update", 2)
    assert ended.returncode == -9, ended.stderr
    held = orjson.loads((tmp_path / "killed.json").read_bytes())
    (image,) = held["groups"][0]["prompt"]["extra"]["@attachments"]
    assert sorted(image) == ["about", "kind", "length", "sha256", "start"]
    assert sorted(image["about"]) == ["grid", "path"]
    training.run_training(load(config), Console("quiet"))
    one, other = tensors(tmp_path, "whole"), tensors(tmp_path, "killed")
    assert one["adapter_model.safetensors"] == other["adapter_model.safetensors"]
    report = (tmp_path / "runs" / "killed" / "report.html").read_text()
    packed = re.findall(r'<script type="text/plain" id="rollouts-0-\d">(.*?)</script>', report)
    assert len(packed) == 2
    for each in packed:
        content = gzip.decompress(base64.b64decode(each))
        size = int.from_bytes(content[:4], "little")
        for group in orjson.loads(content[4 : 4 + size])["groups"]:
            ((name, url),) = group["attachments"]
            thumbnail = Pillow.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
            assert (tmp_path / "train" / name).is_file() and thumbnail.size == (32, 32)


@pytest.mark.long
@pytest.mark.parametrize("packing", ["padded", "varlen"])
def test_rows_to_learn_from(tmp_path: Path, packing: str) -> None:
    """SFT on the answers lowers the loss; DPO raises the chosen answer over the rejected one."""
    write_config(tmp_path, "rows")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for row in rows:
        asked = {"image": row["image"], "prompt": row["question"]}
        row["sft"] = asked | {"completion": row["answer"]}
        row["dpo"] = asked | {"chosen": row["answer"], "rejected": "no"}
    for name, stage in {"sft": "sft", "dpo": "preference"}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row[name]) + "\n" for row in rows))
        tree = {
            "stage": stage,
            "run": {"directory": str(tmp_path / "runs"), "name": f"{name}", "steps": 6},
            "model": section_of(str(tmp_path / "model")),
            "data": {"train": str(file), "system_prompt": "none"},
            "train": {"learning_rate": 3e-2, "rows_per_step": 8, "packing": packing,
                      "gradient_checkpointing": False},
        }  # fmt: skip
        training.run_training(config_of(tree), Console("quiet"))
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["train/loss"] for line in lines if "train/loss" in line]
        assert losses[-1] < 0.7 * losses[0]
