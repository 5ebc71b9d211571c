"""The plan of replicas: the cards share a step, but each reads all weights while it samples."""

import re
from collections.abc import Callable

import pytest


def test_cards_share_a_step(script: Callable[..., tuple[int, str, str]]) -> None:
    """The default step is decoded in one wave, so that two cards sample hardly faster than one."""
    name = ["--model.path", "qwen2.5-7b-instruct", "--memory.budget_gib", "24"]
    _, one, _ = script("train.py", *name, "--plan")
    code, two, error = script("train.py", *name, "--plan", "--run.replicas", "2")
    assert code == 0 and " s on 2 times an RTX 4090" in two, two + error

    def phases(text: str) -> tuple[float, float]:
        """Seconds of sampling and of learning."""
        found = re.search(r"at least ([\d.]+) s on .*?, learning (\d+)% of it", text)
        assert found is not None, text
        learning = float(found[1]) * int(found[2]) / 100
        return float(found[1]) - learning, learning

    (sampling, learning), (sampled, learned) = phases(one), phases(two)
    assert learning == pytest.approx(2 * learned, rel=0.05)
    assert 0.8 * sampling < sampled < sampling
