"""Every kind of learning in a process that takes itself for one with a card.

1. No operation meets tensors of two devices: in every stage, and after a run was resumed.
2. A fault that is put into the product is found at its line.
3. torch's FlashAttention takes and gives the shapes of Qwen2.5-7B, by its own account.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import AutoConfig, AutoModelForSequenceClassification

from conftest import ROOT, TINY
from reason_llm.loop import train
from reward_runs import by_form, reward_config
from stage_runs import write_rows

pytestmark = pytest.mark.long
SCRIPT = ROOT / "tests" / "fixtures" / "pretended_card.py"
FOUND = 9
"""Exit code of the script when an operation was refused."""

PPO = "--algorithm.name ppo --critic.warmup_steps 1"
ROLLOUTS: dict[str, str] = {
    "grpo": "--train.gradient_checkpointing true --train.epochs 2 --train.optimizer_steps 2"
    " --train.micro_batch_tokens 256 --algorithm.kl k3 --model.adapter.dropout 0.1",
    "padded": "--train.packing padded --train.gradient_checkpointing true"
    " --model.deterministic true --sample.stop </answer>",
    "float32": "--model.dtype float32 --train.optimizer_steps 2 --sample.top_k 50"
    " --sample.top_p 0.9",
    "ppo_8bit": f"{PPO} --train.optimizer adamw_8bit --train.ema 0.9 --model.adapter.rank 64",
    "nf4": "--model.quantize nf4 --train.optimizer adamw_8bit --model.adapter.dropout 0.1"
    " --train.gradient_checkpointing offload",
    "shards": "--run.shards 2 --run.max_staleness 1",
    "opd": "--algorithm.name opd --teacher.adapter {made}/runs/reward/adapter",
    "taught": "--algorithm.name opd --teacher.model model/tiny --teacher.quantize nf4",
    "paid": f"{PPO} --train.ema 0.9 --critic.start {{made}}/runs/reward/adapter"
    " --score.rewards {rewards}",
}
ROWS = {
    "sft": "demonstrations",
    "preference": "pairs",
    "kto": "labels",
    "reward": "pairs",
}
"""Stages that learn from a set of rows, and the set."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what runs begin from, made on the CPU: rows, a reward model over the base with
    its adapter, and one of its own."""
    folder = tmp_path_factory.mktemp("made")
    write_rows(folder)
    train(reward_config(folder, "reward", by_form, 1))
    shape = AutoConfig.from_pretrained(TINY, num_labels=1)
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(folder / "classifier")
    for file in [*TINY.glob("tokenizer*"), TINY / "chat_template.jinja"]:
        shutil.copy(file, folder / "classifier")
    return folder


def call(folder: Path, *arguments: str, fault: str = "") -> list[str]:
    """What was refused in a run in ``folder``, 2 steps unless told otherwise."""
    options = {
        "run.steps": "2", "run.directory": str(folder / "runs"), "run.name": "run",
        "run.buffer": str(folder / "buffer.json"), "eval.limit": "4", "eval.every": "0",
    }  # fmt: skip
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, str(SCRIPT), *([fault] if fault else []), "train"]
    shown = subprocess.run(
        [*command, *arguments[:1], *given, *arguments[1:]],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    refused = [line for line in shown.stderr.splitlines() if line.startswith("refused on a card: ")]
    assert shown.returncode == (FOUND if refused else 0), shown.stderr[-3000:]
    return refused


def rollouts(folder: Path, *arguments: str, fault: str = "") -> list[str]:
    """``call`` of the quick start with few rollouts."""
    few = ("--sample.engine", "transformers", "--sample.prompts_per_step", "4")
    return call(folder, "configs/quickstart.yaml", *few, *arguments, fault=fault)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_rollouts_stay_on_one_device(name: str, made: Path, tmp_path: Path) -> None:
    models = [
        {"name": "reward_model", "label": label, "options": {"path": str(path), "normalize": kind}}
        for label, path, kind in (
            ("over_base", made / "runs" / "reward" / "adapter", "fixed"),
            ("own", made / "classifier", "none"),
        )
    ]
    rewards = orjson.dumps([{"name": "think_answer_tags"}, *models]).decode()
    arguments = (part.format(made=made, rewards=rewards) for part in ROLLOUTS[name].split())
    assert rollouts(tmp_path, *arguments) == []


def test_a_resumed_run_stays_on_one_device(tmp_path: Path) -> None:
    """Without a critic, beside which the moments are moved to the card once more."""
    options = ("--train.ema", "0.9")
    assert rollouts(tmp_path, *options, "--run.steps", "1") == []
    assert rollouts(tmp_path, *options, "--run.steps", "2") == []
    assert len((tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes().splitlines()) > 2


@pytest.mark.parametrize("name", ROWS)
def test_rows_stay_on_one_device(name: str, made: Path, tmp_path: Path) -> None:
    is_reward = name == "reward"
    config = f"configs/{'preference' if name == 'kto' else name}_tiny.yaml"
    options = {
        "data.train": f"{made}/{ROWS[name]}.jsonl",
        "eval.rows": f"{made}/held_out_{ROWS[name]}.jsonl",
        "train.rows_per_step": "8",
        **({} if is_reward else {"sample.engine": "transformers"}),
        **({"preference.name": "kto"} if name == "kto" else {}),
    }
    given = (part for key, value in options.items() for part in (f"--{key}", value))
    assert call(tmp_path, config, *given) == []


@pytest.mark.parametrize(
    ("fault", "options", "line"),
    [
        ("column_on_host", "--run.steps 1", "aten.mul.Tensor of cuda"),
        ("numpy_of_card", "--run.steps 1", "numpy of a tensor on the card at train/learner.py"),
        ("moments_left_on_host", PPO, "aten._fused_adamw_.default of cuda"),
    ],
)
def test_a_fault_is_found(fault: str, options: str, line: str, tmp_path: Path) -> None:
    refused = rollouts(tmp_path, *options.split(), fault=fault)
    assert any(each.startswith(f"refused on a card: {line}") for each in refused), refused


@pytest.mark.parametrize("window", [None, 1024])
def test_flash_attention_has_the_shapes_of_qwen_7b(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake card, as ``model.attention`` calls it. Autograd needs torch's CUDA build there, so
    the operator of the backward pass is called here."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with FakeTensorMode():
        query_NHD, key_MKD, value_MKD = given = [
            torch.empty(heads, tokens, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
            for heads, tokens in ((28, 4096), (4, 6656), (4, 6656))
        ]
        ends = torch.empty(5, device="cuda", dtype=torch.int32)
        seen = (-1 if window is None else window - 1, 0)
        out_NHD, sums = varlen_attn(
            query_NHD, key_MKD, value_MKD, ends, ends, 2048, 3072,
            window_size=seen, enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        assert out_NHD.shape == (4096, 28, 128)
        assert (out_NHD.dtype, out_NHD.device.type) == (torch.bfloat16, "cuda")
        assert (sums.shape, sums.dtype) == ((28, 4096), torch.float32)
        state = torch.empty(2, device="cuda", dtype=torch.uint64)
        gradients = torch.ops.torch_attn._varlen_attn_backward(
            out_NHD,
            *given,
            out_NHD,
            sums,
            ends,
            ends,
            2048,
            3072,
            window is None,
            state,
            None,
            seen,
        )
        assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in given]
