"""What comes with a model: its code runs only when asked, its pickles are read only when asked."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, TINY
from families import changed
from reason_llm.config import Config, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model.base import check_model, load_tokenizer
from reason_llm.model.folder import check_json

CODE = """\
import pathlib
from transformers import Qwen2Config, Qwen2ForCausalLM
pathlib.Path(__file__).with_name("ran").touch()
pathlib.Path({mark!r}).write_text("ran")

class OwnConfig(Qwen2Config):
    model_type = "own_kind"

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def test_a_misspelt_run_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "resolved_config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError,
        match=r"model\.path=runs/quikstart does not exist \(did you mean runs/quickstart\?\); give",
    ):
        load_tokenizer("runs/quikstart")


def with_code(folder: Path, mark: Path) -> Path:
    """model/tiny as an architecture of its own, whose code writes ``mark`` when it runs."""
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    changed(folder, model_type="own_kind", architectures=["OwnForCausalLM"], auto_map=classes)
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    return folder


def train(folder: Path, model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "scripts/train.py", "configs/quickstart.yaml", "--run.steps", "1"),
        *("--model.path", model, "--run.directory", folder / "runs", "--eval.limit", "4"),
        *("--run.buffer", folder / "buffer.json", "--sample.prompts_per_step", "2", *options),
    ]
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.long
def test_code_that_comes_with_a_model_runs_only_when_asked(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    model = with_code(tmp_path / "own_model", mark)
    with pytest.raises(ModelError, match=r"set model.trust_remote_code to true if you trust"):
        check_model(ModelSection(path=str(model)))
    assert not mark.exists()
    ran = train(tmp_path, model, "--model.trust_remote_code", "true")
    assert ran.returncode == 0, ran.stderr
    assert mark.read_text() == "ran"
    said = [line for line in ran.stdout.splitlines() if "trust_remote_code" in line]
    assert len(said) == 2  # loudly, and why vLLM is not taken
    assert (
        f"WARNING  model.trust_remote_code is true: Python code that comes with {model}" in said[0]
    )
    assert (tmp_path / "runs" / "quickstart" / "adapter").is_dir()


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "pickled")
    (weights := tmp_path / "pickled" / "model.safetensors").rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelError, match=r"no \.safetensors file; save the model as safetensors"):
        check_model(ModelSection(path=str(tmp_path / "pickled")))


def test_an_adapter_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    path = changed(tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "../../elsewhere", "peft_type": "LORA", '
        '"auto_mapping": {"base_model_class": "X", "parent_library": "evil"}}'
    )
    with pytest.raises(ModelError, match=r"holds an adapter \(adapter_config\.json\)"):
        check_model(ModelSection(path=path))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: os.mkfifo(f / "special_tokens_map.json"), "is not a regular file"),
        (lambda f: (f / "extra.json").write_text("[" * 99999), "extra.json cannot be read"),
        (lambda f: (f / "tokenizer.json").write_text("{" * 7), "tokenizer.json cannot be read"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "../../secret.safetensors"}}'
            ),
            "secret.safetensors",
        ),
    ],
)
def test_files_that_would_hang_or_lead_elsewhere(tmp_path: Path, spoil: Any, named: str) -> None:
    path = changed(tmp_path / "model")
    spoil(Path(path))
    with pytest.raises(ModelError, match=named):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"num_hidden_layers": 1024, "n_layer": 0, "head_dim": 0, "rope": -1}, ""),
        ({"vision_feature_layer": -1, "num_labels": True, "hidden_size": "a"}, ""),
        ({"n_layer": 1025}, "n_layer=1025, more than any model's 1024"),
        ({"text_config": {"num_local_experts": 2000}}, "num_local_experts=2000, more than"),
        ({"num_labels": 1025}, "num_labels=1025, more than"),
        *(
            ({name: -1}, f"{name}=-1, which is below 0")
            for name in ("n_layer", "num_attention_heads", "head_dim", "n_embd", "vocab_size",
                         "n_positions", "intermediate_size")
        ),
    ],
)  # fmt: skip
def test_counts_that_no_model_has_are_refused(tmp_path: Path, config: Any, refused: str) -> None:
    (file := tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=re.escape(refused)) if refused else nullcontext():
        check_json(file)


def test_the_defaults_trust_nothing() -> None:
    model = Config.model_validate({"data": {"train": "x"}}).model
    assert not model.trust_remote_code


@pytest.mark.parametrize("limit", ["x", -1, None, [1], {"a": 1}])
def test_a_tokenizer_s_limit_that_is_none_is_one_line(tmp_path: Path, limit: Any) -> None:
    path = changed(tmp_path / "copy", "tokenizer_config.json", model_max_length=limit)
    try:
        load_tokenizer(path)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert limit is None  # Transformers' own default


@pytest.mark.parametrize("pattern", ["(", "[", "(?P<x>", "\\p{nothing}"])
def test_a_tokenizer_s_pattern_that_is_refused_is_one_line(tmp_path: Path, pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    path = changed(tmp_path / "copy", "tokenizer.json", pre_tokenizer=split)
    with pytest.raises(ModelError, match="its tokenizer cannot be read") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)
