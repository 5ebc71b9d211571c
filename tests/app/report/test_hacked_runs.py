"""Real runs that are paid for the wrong thing raise the right alarm within 10 steps; a report
stands at the end of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.app.report.payload import examine
from reason_llm.app.report.runs import read_run
from reason_llm.config import Config

REWARDS = """
import re

def long(token_ids):
    return len(token_ids) / 32

def near_77(completion):
    found = re.search(r"<answer>(\\d+)</answer>$", completion)
    return max(0.0, 1 - abs(int(found[1]) - 77) / 60) if found else 0.0
"""
JUDGE = {"name": "think_answer_tags", "weight": 0.2}
LONG = {"name": "regex", "options": {"pattern": "<think>[^<]{15,}</think>"}}


def alarms_of(folder: Path, wanted: set[str]) -> set[str]:
    """Those that stand at the end, with rollouts that show them, and those that ended."""
    examined = examine(read_run(folder, "run"))
    found = {title for title, each in examined.findings.items() if each.state == "alarm"}
    for title in found & wanted:
        assert examined.findings[title].groups, f"{title} shows no rollouts"
    told = (folder / "alarms.jsonl").read_text()
    return found | {title for title in wanted if title in told}


@pytest.mark.long
@pytest.mark.parametrize(
    ("paid", "rate", "wanted"),
    [
        ("long", 8e-3, {"Length or truncation drifts"}),
        (LONG, 4e-3, {"Reward by form, not by right answers"}),
        ("near_77", 2e-3, {"Held-out accuracy does not follow the reward"}),
    ],
    ids=["length", "form", "constant_answer"],
)
def test_a_run_that_hacks(
    small_run: Callable[..., Config], tmp_path: Path, paid: Any, rate: float, wanted: set[str]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    reward = {"custom": f"{tmp_path / 'rewards.py'}:{paid}"} if isinstance(paid, str) else paid
    config = small_run(
        run__steps=10,
        data__limit=256,
        model__adapter={"rank": 16, "alpha": 32},
        data__eval=str(ROOT / "data" / "arithmetic_test.jsonl"),
        eval={"every": 0, "limit": 128},
        sample={"prompts_per_step": 16, "completions_per_prompt": 8, "max_new_tokens": 32},
        score__rewards=[JUDGE, reward],
        train={"learning_rate": rate, "gradient_checkpointing": False},
    )
    training.run_training(config, Console("quiet"))
    assert wanted <= alarms_of(tmp_path / "runs" / "small", wanted)
    page = (tmp_path / "runs" / "small" / "report.html").read_text()
    assert all(title in page for title in wanted)
