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
import torch
from safetensors.torch import load_file

from conftest import ROOT, TINY
from families import changed
from reason_llm.config import Config, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model.base import Model, check_model, load_tokenizer
from reason_llm.model.folder import check_json, is_pickled, use_safetensors

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
    with pytest.raises(ModelError, match=r"model\.path=runs/quikstart does not exist; give"):
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


def pickled(folder: Path, content: Any = None) -> ModelSection:
    """model/tiny with its weights as a pickle, or with ``content`` in their place."""
    shutil.copytree(TINY, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights if content is None else content, folder / "pytorch_model.bin")
    return ModelSection(path=str(folder))


def test_pickled_weights_are_read_only_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = pickled(tmp_path / "pickled")
    with pytest.raises(
        ModelError, match=r"pickled weights only \(pytorch_model.bin\).*safetensors"
    ):
        check_model(section)
    allowed = section.model_copy(update={"allow_pickle": True})
    check_model(allowed)
    assert "model.allow_pickle is true: reading pickled weights" in caplog.text
    stored = load_file(TINY / "model.safetensors")
    with Model(allowed, load_tokenizer(section.path), seed=0) as model:
        found = dict(model.policy.get_base_model().named_parameters())
        names = {name.replace(".base_layer.", "."): name for name in found}
        assert set(stored) <= set(names)
        assert all(torch.equal(found[names[name]], stored[name]) for name in stored)


class Harm:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path(self.mark),))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    section = pickled(tmp_path / "pickled", {"lm_head.weight": Harm(mark)})
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is damaged"):
        check_model(section.model_copy(update={"allow_pickle": True}))
    assert not mark.exists()
    shapes = pickled(tmp_path / "other", {"model.norm.weight": torch.zeros(7)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is of shape \[7\]"):
        check_model(shapes.model_copy(update={"allow_pickle": True}))
    no_weights = pickled(tmp_path / "list", [torch.zeros(1)])
    with pytest.raises(ModelError, match=r"pytorch_model\.bin holds list, no weights"):
        check_model(no_weights.model_copy(update={"allow_pickle": True}))


def test_of_a_hub_id_pickles_are_read_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    assert use_safetensors(ModelSection(path="org/name")) is True
    assert use_safetensors(ModelSection(path="org/name", allow_pickle=True)) is None
    assert "allow_pickle is true: org/name may be read from pickled weights" in caplog.text


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
        (lambda f: os.mkfifo(f / "special_tokens_map.json"), "no regular file"),
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


@pytest.mark.parametrize(
    ("files", "pickled"),
    [
        (["a.safetensors", "pytest.bin"], False),
        (["pytorch_model.bin"], True),
        (["pytorch_model-1.bin", "a.safetensors"], False),
        (["training_args.bin"], False),
    ],
)
def test_pickled_are_weights_beside_which_are_no_others(
    tmp_path: Path, files: list[str], pickled: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert is_pickled(ModelSection(path=str(tmp_path))) == pickled


def test_the_defaults_trust_nothing() -> None:
    model = Config.model_validate({"data": {"train": "x"}}).model
    assert (model.trust_remote_code, model.allow_pickle) == (False, False)


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
