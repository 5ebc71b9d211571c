"""Contexts beyond a model's positions, by YaRN.

1. The frequencies by hand.             2. A run and its export.
3. Both engines agree.                  4. Positions that cannot be scaled.
"""

import json
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import families
from conftest import TINY
from reason_llm.config import ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import positions
from reason_llm.model.base import context_limit
from reason_llm.model.plan.outline import outline

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """The tiny model, as if it had been trained on 64 positions."""
    shutil.copytree(TINY, folder := tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return folder


def test_fast_dimensions_stay_and_slow_ones_are_scaled(short: Path) -> None:
    config = positions.extend(AutoConfig.from_pretrained(short), 256)
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    plain = 10000.0 ** -(torch.arange(0, 32, 2) / 32)  # heads of 32
    turns = 64 * plain / (2 * math.pi)  # within the positions; YaRN keeps 32 and more of them
    assert turns[0] > 10
    torch.testing.assert_close(rotary.inv_freq[0], plain[0])
    torch.testing.assert_close(rotary.inv_freq[turns < 1][1:], plain[turns < 1][1:] / 4)
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


def run_of(short: Path, tmp_path: Path, script: Call, *more: str) -> tuple[Path, str]:
    out = tmp_path / "runs" / "long"
    code, shown, error = script(
        "train.py", "configs/quickstart.yaml", "--run.name", "long", "--run.steps", "1",
        "--run.directory", tmp_path / "runs", "--run.buffer", tmp_path / "buffer.json",
        "--model.path", short, "--model.context_tokens", "256", "--sample.prompts_per_step", "4",
        "--sample.max_new_tokens", "24", "--eval.limit", "4", *more,
    )  # fmt: skip
    assert code == 0, shown + error
    return out, shown + error


def test_a_run_and_its_export(short: Path, tmp_path: Path, script: Call) -> None:
    run, shown = run_of(short, tmp_path, script)
    assert f"context_tokens=256 exceeds the 64 positions of {short}: YaRN scales them by 4" in shown
    code, shown, error = script(
        "export.py", run, "--out", tmp_path / "merged", "--dtype", "float32"
    )
    assert code == 0 and "effect of the adapter: max" in shown, shown + error
    merged = AutoConfig.from_pretrained(tmp_path / "merged")
    assert merged.max_position_embeddings == 256
    assert merged.rope_parameters["original_max_position_embeddings"] == 64
    assert merged.rope_parameters["rope_type"] == "yarn"
    code, shown, error = script("export.py", run, "--out", tmp_path / "alone", "--adapter-only")
    assert code == 0, shown + error
    card = (tmp_path / "alone" / "README.md").read_text()
    assert "'max_position_embeddings': 256" in card
    (command,) = [line for line in card.splitlines() if line.startswith("vllm serve")]
    options = shlex.split(command)
    overrides = json.loads(options[options.index("--hf-overrides") + 1])
    assert overrides["max_position_embeddings"] == 256


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # vLLM's own
def test_both_engines_scale_alike(short: Path, tmp_path: Path, script: Call) -> None:
    """The canary compares them, and ends the run if they differ."""
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    _, shown = run_of(short, tmp_path, script, "--sample.engine", "vllm")
    assert "YaRN scales them by 4" in shown


def test_a_plan_without_torch(short: Path) -> None:
    found = outline(ModelSection(path=str(short), context_tokens=256))
    assert found is not None and found.context_tokens == 256


def test_other_positions_are_refused(tmp_path: Path) -> None:
    section = ModelSection(path=families.make(tmp_path, "gpt2"), context_tokens=100_000)
    with pytest.raises(ModelError, match=r"context_tokens=100000 exceeds the model's .* not plain"):
        context_limit(section)
