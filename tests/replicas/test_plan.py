"""The plan of replicas: the cards share a step."""

import re
from collections.abc import Callable

import pytest


def test_cards_share_a_step(script: Callable[..., tuple[int, str, str]]) -> None:
    name = ["--model.path", "qwen2.5-7b-instruct", "--memory.budget_gib", "24"]
    _, one, _ = script("train.py", *name, "--plan")
    code, two, error = script("train.py", *name, "--plan", "--run.replicas", "2")
    assert code == 0 and " s on 2 times an RTX 4090" in two, two + error
    seconds = [float(re.search(r"at least ([\d.]+) s", each)[1]) for each in (one, two)]  # type: ignore[index]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.1)
