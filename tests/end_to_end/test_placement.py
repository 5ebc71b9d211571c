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
from typing import Any

import orjson
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import AutoConfig, AutoModelForSequenceClassification

from conftest import ROOT, TINY
from reason_llm.loop import train
from reward_runs import by_form, reward_config
from slices import installed
from stage_runs import write_rows

pytestmark = pytest.mark.long
SCRIPT = ROOT / "tests" / "fixtures" / "pretended_card.py"
FOUND, ENDED = 9, "end of a command on a pretended card"
"""The script's exit code when an operation was refused, and its line after each command."""

PPO = "--algorithm.name ppo --critic.warmup_steps 1"
GRPO = (
    "--train.gradient_checkpointing true --train.epochs 2 --train.optimizer_steps 2"
    " --train.micro_batch_tokens 256 --algorithm.kl k3 --model.adapter.dropout 0.1"
)
ROLLOUTS: dict[str, str] = {
    "grpo": f"{GRPO} --run.steps 1",
    "grpo_resumed": f"{GRPO} --run.name grpo --run.buffer {{folder}}/grpo.json",
    "ppo_8bit": f"{PPO} --train.optimizer adamw_8bit --model.adapter.rank 64",
    "paid_padded": f"{PPO} --critic.start {{made}}/runs/reward/adapter"
    " --score.rewards {rewards} --train.packing padded --train.gradient_checkpointing true",
    "nf4_taught_by_nf4": "--model.quantize nf4 --train.optimizer adamw_8bit"
    " --model.adapter.dropout 0.1 --train.gradient_checkpointing offload"
    " --algorithm.name opd --teacher.model model/tiny --teacher.quantize nf4",
    "shards_taught_by_an_adapter": "--run.shards 2 --run.max_staleness 1"
    " --algorithm.name opd --teacher.adapter {made}/runs/reward/adapter",
    "float32_deterministic": "--model.dtype float32 --train.optimizer_steps 2"
    " --sample.top_k 50 --sample.top_p 0.9 --train.gradient_checkpointing true"
    " --model.deterministic true --sample.stop </answer>",
}
"""Options of runs that follow one another in one process; a run resumes without a critic, with
which the moments are moved to the card once more."""
if not installed("replicas"):
    del ROLLOUTS["shards_taught_by_an_adapter"]
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


def refused(folder: Path, runs: dict[str, list[str]], fault: str = "") -> dict[str, list[str]]:
    """What was refused in each run of a process, by its name: 2 steps unless told otherwise."""
    words = [fault] if fault else []
    for name, (config, *more) in runs.items():
        options = {
            "run.steps": "2", "run.directory": str(folder / "runs"), "run.name": name,
            "run.buffer": str(folder / f"{name}.json"), "eval.limit": "4", "eval.every": "0",
        }  # fmt: skip
        given = [part for option, value in options.items() for part in (f"--{option}", value)]
        words += ["train", config, *given, *more, "THEN"]
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), *words[:-1]], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    *parts, _ = shown.stderr.split(f"{ENDED}\n")
    lines = [
        [x for x in each.splitlines() if x.startswith("refused on a card: ")] for each in parts
    ]
    assert shown.returncode == (FOUND if any(lines) else 0), shown.stderr[-3000:]
    return dict(zip(runs, lines, strict=True))


def quick_start(options: str, **paths: Any) -> list[str]:
    """The quick start with few rollouts."""
    few = "--sample.engine transformers --sample.prompts_per_step 4"
    parts = (part.format(**paths) for part in options.split())
    return ["configs/quickstart.yaml", *few.split(), *parts]


@pytest.fixture(scope="module")
def rollouts(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("rollouts")
    models = [
        {"name": "reward_model", "label": label, "options": {"path": str(path), "normalize": kind}}
        for label, path, kind in (
            ("over_base", made / "runs" / "reward" / "adapter", "fixed"),
            ("own", made / "classifier", "none"),
        )
    ]
    rewards = orjson.dumps([{"name": "think_answer_tags"}, *models]).decode()
    paths = {"made": made, "folder": folder, "rewards": rewards}
    found = refused(folder, {k: quick_start(each, **paths) for k, each in ROLLOUTS.items()})
    assert len((folder / "runs" / "grpo" / "metrics.jsonl").read_bytes().splitlines()) > 2
    return found


@pytest.fixture(scope="module")
def rows(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    runs = {}
    for name, rows in ROWS.items():
        options = {
            "data.train": f"{made}/{rows}.jsonl",
            "eval.rows": f"{made}/held_out_{rows}.jsonl",
            "train.rows_per_step": "8",
            **({} if name == "reward" else {"sample.engine": "transformers"}),
            **({"preference.name": "kto"} if name == "kto" else {}),
        }
        config = f"configs/{'preference' if name == 'kto' else name}_tiny.yaml"
        runs[name] = [config, *(x for key, value in options.items() for x in (f"--{key}", value))]
    return refused(tmp_path_factory.mktemp("rows"), runs)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_rollouts_stay_on_one_device(name: str, rollouts: dict[str, list[str]]) -> None:
    assert rollouts[name] == []


@pytest.mark.parametrize("name", ROWS)
def test_rows_stay_on_one_device(name: str, rows: dict[str, list[str]]) -> None:
    assert rows[name] == []


FAULTS = {
    "column_on_host": "aten.mul.Tensor of cuda",
    "numpy_of_card": "numpy of a tensor on the card at train/learner.py",
    "moments_left_on_host": "aten._fused_adamw_.default of cuda",
}
"""Faults of one run, and what is said of each."""


@pytest.fixture(scope="module")
def of_faults(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run = {"run": quick_start(PPO)}
    return refused(tmp_path_factory.mktemp("faults"), run, fault=",".join(FAULTS))["run"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, of_faults: list[str]) -> None:
    line = f"refused on a card: {FAULTS[fault]}"
    assert any(each.startswith(line) for each in of_faults), of_faults


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
