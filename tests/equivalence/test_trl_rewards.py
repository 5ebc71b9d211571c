"""Reward functions written for TRL give here what ``GRPOTrainer._calculate_rewards`` gives them.

The functions of ``TRL_DOCS`` are of the forms of TRL's documentation and are not changed here. They
go into a file, are named as ``custom``, and score the rows that the trainer's own method gets.
"""

import asyncio
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
from transformers import AutoTokenizer

with warnings.catch_warnings():  # of the version of vLLM
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer

from conftest import TINY
from json_groups import group_from_json
from reason_llm.config import Config, resolve
from reason_llm.data import load_data, load_function
from reason_llm.errors import ConfigError, RewardError
from reason_llm.rollout import Completion, Group
from reason_llm.run.collect import is_kept
from reason_llm.run.store.metrics import describe
from reason_llm.score import Scorer
from reason_llm.score.selection import rewards_of
from reason_llm.train import with_advantages

TRL_DOCS = '''
import re


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def reward_ids(completion_ids, **kwargs):
    """Assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]


def format_reward_func(completions, **kwargs):
    """Checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def reward_func(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]


def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            rewards.append(1.0 if "4" in completion else -1.0)
        else:
            rewards.append(None)
    return rewards


def coding_reward_func(prompts, completions, task, **kwargs):
    return [float(len(c) % 3) if t == "coding" else None for c, t in zip(completions, task)]


async def async_reward(prompts, completions, level=None, trainer_state=None, **kwargs):
    return [len(p) + len(c) + (l or 0) for p, c, l in zip(prompts, completions, level)]


def of_columns(prompts, completions, **kwargs):
    assert "prompt" not in kwargs and len(kwargs["level"]) == len(prompts)
    return [hash(str(sorted((k, v[i]) for k, v in kwargs.items() if k in ("level", "task"))))
            % 7 for i in range(len(prompts))]
'''
ROWS = [
    {"prompt": "What is 2+2?", "ground_truth": "4", "task": "math", "level": 3},
    {"prompt": "Print it.", "ground_truth": "print", "task": "coding", "level": 5},
    {"prompt": "What is love?", "ground_truth": "42", "task": "none", "level": 0},
]
TEXTS = ["\\boxed{4}", "print", "<think>x</think><answer>42</answer>", "no"]


@pytest.fixture
def rewards_file(tmp_path: Path) -> Path:
    path = tmp_path / "trl_rewards.py"
    path.write_text(TRL_DOCS)
    return path


def groups_of(rows: list[dict[str, Any]], folder: Path, config: Config) -> list[Group]:
    """Four completions of each row's prompt, read as a run reads them and kept by the buffer."""
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    section = config.data.model_copy(update={"train": str(path), "form": "prompts"})
    config = config.model_copy(update={"data": section})
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with Scorer(config.score, 512) as scorer:
        data = load_data(config, tokenizer, 4000, extra_columns=scorer.columns)
    made = tuple(Completion((1,) * (len(t) + 1), t, (0.0,) * (len(t) + 1), "stop") for t in TEXTS)
    groups = [Group(prompt, made) for prompt in data.prompts]
    return [group_from_json(orjson.loads(orjson.dumps(g))) for g in groups]


@pytest.fixture
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def of_trl(
    functions: Sequence[Any], rows: list[dict[str, Any]], loop: asyncio.AbstractEventLoop
) -> torch.Tensor:
    """(rows * 4, functions) from the trainer's own method."""
    inputs = [row for row in rows for _ in TEXTS]
    is_talk = isinstance(rows[0]["prompt"], list)
    completions = [
        [{"role": "assistant", "content": text}] if is_talk else text
        for _ in rows
        for text in TEXTS
    ]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=False),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[function.__name__ for function in functions],
        state=SimpleNamespace(global_step=0), environments=None, async_loop=loop,
        args=SimpleNamespace(report_to=[]),
        _log_completion_extra=None, _log_metric=None, chat_template_kwargs={},
    )  # fmt: skip
    calculate = GRPOTrainer._calculate_rewards.__wrapped__
    prompts = [row["prompt"] for row in inputs]
    ids = [[1] * (len(text) + 1) for _ in rows for text in TEXTS]
    found: torch.Tensor = calculate(trainer, inputs, prompts, completions, ids)
    return found


def as_talk(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (ROWS, ["reward_len", "reward_ids", "reward_func", "async_reward", "of_columns"]),
        (ROWS, ["math_reward_func", "coding_reward_func"]),
        ([*map(as_talk, ROWS)], ["format_reward_func", "reward_ids", "coding_reward_func"]),
    ],
    ids=["plain", "none", "talk"],
)
def test_a_function_unchanged_gives_the_same_rewards(
    rows: list[dict[str, Any]],
    names: list[str],
    rewards_file: Path,
    small_run: Any,
    event_loop: asyncio.AbstractEventLoop,
) -> None:
    specs = [{"custom": f"{rewards_file}:{name}"} for name in names]
    config = small_run(score__rewards=specs)
    groups = groups_of(rows, rewards_file.parent, config)
    with Scorer(config.score, 512) as scorer:
        scored = scorer.score(groups)
    functions = [load_function(spec["custom"], "custom") for spec in specs]
    expected = of_trl(functions, rows, event_loop)
    found = torch.tensor([[c.rewards[n] for n in names] for g in scored for c in g.completions])
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(-99), expected.nan_to_num(-99))
    assert len(set(found.nan_to_num(-99).flatten().tolist())) > 2

    # TRL's sum and baseline of _generate_and_score_completions; scale_rewards "none".
    none_N = expected.isnan().all(dim=1)
    total_N = expected.nansum(dim=1).masked_fill(none_N, math.nan)
    mean_N = total_N.view(len(rows), -1).nanmean(dim=1).repeat_interleave(len(TEXTS))
    advantages = with_advantages(scored, resolve("grpo", {"scale": "none"}))
    for group in (scored, advantages):  # and what the buffer keeps
        kept = [group_from_json(orjson.loads(orjson.dumps(g))) for g in group]
        assert str(kept) == str(group)
    flat = [c for g in advantages for c in g.completions]
    assert [c.has_reward for c in flat] == (~none_N).tolist()
    wanted = (total_N - mean_N).nan_to_num(0.0)
    assert [c.advantage for c in flat] == pytest.approx(wanted.tolist())


def test_none_counts_in_no_mean_and_no_choice(rewards_file: Path, small_run: Any) -> None:
    specs = [{"custom": f"{rewards_file}:{n}"} for n in ("math_reward_func", "coding_reward_func")]
    config = small_run(score__rewards=specs)
    with Scorer(config.score, 512) as scorer:
        scored = scorer.score(groups_of(ROWS, rewards_file.parent, config))
        (judged,) = scorer.score(scored[2:], only_first=True)
    record = describe(scored)
    assert record["score/math_reward_func"] == 0.0  # 1, -1, 1, -1; 12 completions have none
    assert record["score/coding_reward_func"] == 1.5  # 0, 2, 2, 2
    assert record["score/reward"] == 0.75
    assert record["score/groups_without_signal_fraction"] == pytest.approx(1 / 3)
    assert [c.reward for c in judged.completions] == [0.0] * 4
    assert rewards_of(scored[2]) == {}
    assert set(rewards_of(scored[1], "coding_reward_func")) == {0, 1, 2, 3}
    dapo = resolve("dapo", {})
    assert [is_kept(group, dapo, scorer.weights) for group in scored] == [True, True, False]


def test_a_failing_function_shows_its_own_file_and_line(tmp_path: Path, small_run: Any) -> None:
    (tmp_path / "broken.py").write_text(
        "import json\n\ndef deep(text):\n    return json.loads(text)\n\n\n"
        "def broken(completions, **kwargs):\n    return [deep(c) for c in completions]\n"
    )
    config = small_run(score__rewards=[{"custom": f"{tmp_path}/broken.py:broken"}])
    groups = groups_of(ROWS[:1], tmp_path, config)
    with (
        Scorer(config.score, 512) as scorer,
        pytest.raises(
            RewardError, match=r"JSONDecodeError: .* at .*/broken\.py:4\); fix it"
        ) as why,
    ):
        scorer.score(groups)
    assert "\n" not in str(why.value)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("completions, trainer_state, **kwargs", "takes trainer_state, which .* give it a default"),
        ("completion, **kwargs", "takes completion, which .*name prompts, completions"),
        ("prompts, completions, prompt", "takes prompt, which"),
        ("*completions, **kwargs", "positional parameters"),
    ],
)
def test_a_function_of_neither_form_is_refused(
    signature: str, message: str, tmp_path: Path, small_run: Any
) -> None:
    (tmp_path / "mine.py").write_text(f"def f({signature}):\n    return [1]\n")
    with pytest.raises(ConfigError, match=message):
        Scorer(small_run(score__rewards=[{"custom": f"{tmp_path}/mine.py:f"}]).score, 512)


def test_a_column_that_is_named_must_be_there(rewards_file: Path, small_run: Any) -> None:
    config = small_run(score__rewards=[{"custom": f"{rewards_file}:reward_func"}])
    with pytest.raises(ValueError, match="lacks column 'ground_truth'"):
        groups_of([{"prompt": "x"}], rewards_file.parent, config)
