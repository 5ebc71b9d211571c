"""``--plan`` through the front door: what it prints, and that a start agrees.

1. An adapter that no run writes is refused by the plan as by the start; one that a run has yet to
   write is planned.
2. The line on the disk has the most that is there at once.
3. Layers with a window take no more than it of the cache, in the count and in the time.
4. Too little host memory of this machine is no error of another one's plan.
5. Errors: one for one cause; a budget with a unit; what vLLM cannot sample. What is scaled, or is
   not counted, is said.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ROOT, TINY
from reason_llm.app.cli import call
from reason_llm.config import load
from reason_llm.model.plan import plan_only

Command = Callable[..., str]
CONFIGS = ROOT / "configs"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """What ``train.py --plan`` prints for a config and options; the working folder is empty."""

    def printed(config: Path | str, *options: str, code: int = 0, plan: bool = True) -> str:
        path = config if isinstance(config, Path) else CONFIGS / config
        given = [str(path), *options, *(["--plan"] if plan else [])]
        assert call("train", "train.py", given) == code
        shown = capsys.readouterr()
        return shown.out + shown.err

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return printed


def ppo(folder: Path, reward_model: str) -> Path:
    """The config of the recipe's last run, without its earlier ones, with this reward model."""
    text = (CONFIGS / "rlhf_ppo_qwen2.5-7b_24gb.yaml").read_text()
    text = text.replace("  start: runs/rlhf_sft_qwen2.5-7b_24gb/adapter\n", "")
    critic = "critic:\n  start: runs/rlhf_rm_qwen2.5-7b_24gb/adapter\n  warmup_steps: 10\n"
    assert critic in text
    text = text.replace(critic, "").replace("runs/rlhf_rm_qwen2.5-7b_24gb/adapter", reward_model)
    (folder / "ppo.yaml").write_text(text)
    return folder / "ppo.yaml"


def test_a_reward_model_of_the_hub_is_no_adapter_to_come(plan: Command, tmp_path: Path) -> None:
    said = plan(ppo(tmp_path, "Qwen/Qwen3-8B"), code=2)
    assert "path of the reward reward_model=Qwen/Qwen3-8B is not a folder" in said
    assert "hf download Qwen/Qwen3-8B --local-dir model/Qwen3-8B" in said
    assert "fits:" not in said
    said = plan(ppo(tmp_path, "runs/earlier/adapter"))
    assert "runs/earlier/adapter does not exist yet: planned like the policy's adapter" in said


@pytest.mark.parametrize("option", ["--model.start", "--teacher.adapter"])
def test_an_adapter_that_no_run_writes_is_refused(option: str, plan: Command) -> None:
    name = "gsm8k_qwen2.5-7b_24gb.yaml"
    options = [
        option,
        "Qwen/Qwen3-8B",
        "--algorithm.name",
        "opd",
        "--teacher.prompt",
        '"{prompt}!"',
    ]
    said = plan(name, *options, code=2)
    assert f"{option[2:]}=Qwen/Qwen3-8B is not a folder; name the adapter/ of a run" in said
    options = ["--run.name", "refused_start", "--model.start", "Qwen/Qwen3-8B"]
    started = plan("quickstart.yaml", *options, code=2, plan=False)
    assert "model.start=Qwen/Qwen3-8B is not a folder; name the adapter/ of a run" in started


def test_the_most_on_disk_is_three_checkpoints_and_the_best_model(plan: Command) -> None:
    """Of 60 steps of full_tiny.yaml the files of weights took 43.0 MB at most: a checkpoint has the
    weights, two moments and the best weights in float32."""
    num_bytes = (TINY / "model.safetensors").stat().st_size
    said = re.search(r"keeps 2; at most ([\d.]+) MiB at once \(one being", plan("full_tiny.yaml"))
    assert said is not None
    weights = (3 * 4 + 1) * num_bytes / 2**20
    assert weights < float(said[1]) < 1.02 * weights
    assert float(said[1]) > 43.0e6 / 2**20
    said = re.search(
        r"at most ([\d.]+) GiB at once \(.*, what is downloaded\), and rollouts of up to 4 GiB",
        plan("full_qwen2.5-3b_24gb.yaml"),
    )
    assert said is not None and float(said[1]) > 3 * 17.36 + 5.7 + 6.2e9 / 2**30


def test_the_host_memory_of_another_machine_is_not_this_ones(
    plan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two moments in float32 of 3.1 B parameters are 23 GiB."""
    page = os.sysconf("SC_PAGE_SIZE")
    values = {"SC_PAGE_SIZE": page, "SC_PHYS_PAGES": 16 * 2**30 // page}
    monkeypatch.setattr(os, "sysconf", values.__getitem__)
    options = ["--memory.budget_gib", "48", "--train.optimizer", "adamw"]
    said = plan("full_qwen2.5-3b_24gb.yaml", *options)
    assert re.search(
        r"host memory: needs \d\d\.\d of 16\.0 GiB; that is this machine's: name the planned one's "
        "as memory.host_gib",
        said,
    )
    assert "fits: " in said
    said = plan("full_qwen2.5-3b_24gb.yaml", *options, "--memory.host_gib", "20", code=2)
    assert "memory.host_gib=20.0 is less than the " in said


def test_layers_with_a_window_keep_only_that(plan: Command) -> None:
    """Of 48 layers 8 keep 10,240 x 512 elements of keys and 40 keep 1,024 x 2,048: 0.47 GiB with
    values. vLLM's ``get_max_concurrency_for_kv_cache_config`` and its blocks say 40.05 sequences in
    18.97 GiB. One alone needs 1,024 + 2 x 2,048 tokens there as vLLM starts."""
    options = ["--model.context_tokens", "10240", "--sample.max_new_tokens", "8192"]
    said = plan("math_gemma-4-12b_48gb.yaml", *options)
    assert (
        ", 40 sequences at once of full length, 128 shorter ones, KV cache 59,209 tokens in" in said
    )
    small = {"model.context_tokens": 10240, "sample.prompts_per_step": 1}
    small |= {"sample.completions_per_prompt": 2}
    found = plan_only(load(CONFIGS / "math_gemma-4-12b_48gb.yaml", small))
    one = 4 * (8 * 512 * 10240 + 40 * 2048 * (1024 + 2 * 2048))
    assert found.engine is not None
    assert one < found.engine.kv_cache_bytes < 1.06 * one


def test_an_answer_longer_than_the_context_is_one_error(plan: Command) -> None:
    """The reward soft_overlong would not fit into the default of the option that is left out."""
    said = plan("dapo_qwen2.5-7b_24gb.yaml", "--sample.max_new_tokens", "16384", code=2)
    assert "no prompt would fit; lower it, or raise model.context_tokens" in said
    assert said.count("error:") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("24GB", "'24GB' is not what the option takes; memory.budget_gib takes auto|FLOAT: GPU m"),
        ("0.9", "it is in GiB, not a fraction, 24 for a card of 24 GB"),
    ],
)
def test_a_budget_is_a_number_of_gib(given: str, said: str, plan: Command) -> None:
    assert said in plan("dapo_qwen2.5-7b_24gb.yaml", "--memory.budget_gib", given, code=2)


def test_positions_that_are_scaled_are_said(
    plan: Command, caplog: pytest.LogCaptureFixture
) -> None:
    plan("dapo_qwen2.5-7b_24gb.yaml", "--model.context_tokens", "40000")
    assert (
        "model.context_tokens=40000 exceeds the 32768 positions of Qwen/Qwen2.5-7B-Instruct: YaRN "
        "scales them by 1.221"
    ) in caplog.text


def test_what_vllm_cannot_sample_is_not_planned_with_it(plan: Command) -> None:
    options = ["--model.adapter.targets", "all-linear"]
    said = plan("math_gemma-4-12b_48gb.yaml", *options, code=2)
    assert "attention_k_eq_v=true in config.json" in said
    assert "contradicts sample.engine=vllm" in said


def test_the_line_says_what_it_leaves_out(plan: Command) -> None:
    said = plan("dapo_qwen2.5-7b_24gb.yaml", "--run.replicas", "auto")
    assert "run.replicas=auto: planned for 1 GPU; name a number to plan several" in said
    assert "; not counted: starts, saves, dropped groups, and the unpacking of NF4 while" in said


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (
            "sft_qwen2.5-7b_24gb.yaml",
            ["--data.max_tokens", "16000"],
            "data.max_tokens=16000 is not from 2 to 2048, the tokens of the context",
        ),
        (
            "gsm8k_qwen2.5-7b_24gb.yaml",
            ["--data.max_prompt_tokens", "4000"],
            "data.max_prompt_tokens=4000 is more than the 1024 that the context leaves",
        ),
        (
            "sft_qwen2.5-7b_24gb.yaml",
            ["--model.context_tokens", "null", "--data.max_tokens", "32769"],
            "data.max_tokens=32769 is not from 2 to 32768",
        ),
    ],
)
def test_lengths_that_a_run_refuses_are_not_planned(
    config: str, options: list[str], told: str, plan: Command
) -> None:
    said = plan(config, *options, code=2)
    assert told in said and said.count("error:") == 1 and "fits:" not in said


def seconds(said: str) -> float:
    found = re.search(r"a step of full length takes at least ([\d.]+) s", said)
    assert found is not None
    return float(found[1])


def test_the_time_is_of_rows_as_long_as_the_data_allows(plan: Command) -> None:
    """A quarter of the tokens take at most a quarter of the time: attention even less."""
    name = "sft_qwen2.5-7b_24gb.yaml"
    said = plan(name, "--data.max_tokens", "512")
    assert 0.2 * seconds(plan(name)) < seconds(said) <= 0.26 * seconds(plan(name))
    assert "context 2,048 tokens (rows of at most 512 by data.max_tokens; memory is" in said
    evaluated = ", 123 sequences at once of full length"  # whose prompts it does not limit
    assert evaluated in said and evaluated in plan(name)
    name = "gsm8k_qwen2.5-7b_24gb.yaml"
    long, short = plan(name), plan(name, "--data.max_prompt_tokens", "256")
    assert seconds(short) < seconds(long)
    assert "(rollouts of at most 1,280 by data.max_prompt_tokens; memory is" in short
    assert "of at most" not in long
    at_once = [
        re.search(r", ([\d,]+) sequences at once of full length", said) for said in (long, short)
    ]
    assert at_once[0] and at_once[1] and int(at_once[0][1]) < int(at_once[1][1])


@pytest.mark.parametrize(
    ("config", "options", "advised"),
    [
        (
            "full_qwen2.5-3b_24gb.yaml",
            ["--train.optimizer", "adamw", "--memory.host_gib", "64"],
            ("train.optimizer", "adamw_8bit"),
        ),
        (
            "full_qwen2.5-3b_24gb.yaml",
            ["--model.dtype", "float32", "--memory.host_gib", "64"],
            ("model.dtype", "bfloat16"),
        ),
    ],
)
def test_a_smaller_form_is_advised_where_it_is_enough(
    config: str, options: list[str], advised: tuple[str, str], plan: Command
) -> None:
    name, value = advised
    said = plan(config, *options, code=2)
    assert f"set {name} to {value}, or" in said
    assert "fits: " in plan(config, *options, f"--{name}", value)
    said = plan(config, *options, "--memory.budget_gib", "3", code=2)
    assert name not in said


def test_a_budget_that_is_enough_in_nf4_is_named_too(plan: Command) -> None:
    name = "math_gemma-4-12b_48gb.yaml"
    said = plan(name, "--memory.budget_gib", "12", code=2)
    found = re.search(
        r"memory\.budget_gib to ([\d.]+) or more \(([\d.]+) with model\.quantize=nf4\), if", said
    )
    assert found is not None and float(found[2]) < 17 < float(found[1])
    assert "fits: " in plan(name, "--model.quantize", "nf4", "--memory.budget_gib", found[2])
    assert "fits: " in plan(name, "--memory.budget_gib", found[1])
