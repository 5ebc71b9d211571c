"""The plan of replicas: the cards share a step, but each reads all weights while it samples."""

import re
from collections.abc import Callable

import pytest

Call = Callable[..., tuple[int, str, str]]


def test_cards_share_a_step(script: Call) -> None:
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


def test_the_host_memory_of_all_processes_on_a_machine_is_added_up(script: Call) -> None:
    """5 GiB each, and in the first one the learner's state before a step: an adapter of 0.30 GiB
    and its moments of 0.60 GiB."""
    options = ["--model.path", "qwen2.5-7b-instruct", "--memory.budget_gib", "24"]
    options += ["--plan", "--memory.host_gib"]
    team = ["--run.replicas", "2", "--run.samplers", "1"]
    code, shown, error = script("train.py", *options, "64", *team)
    assert code == 0 and "host memory: 3 processes on one machine need 15.9 of 64.0 GiB" in shown, (
        shown + error
    )
    code, shown, error = script("train.py", *options, "64")
    assert code == 0 and "host memory: needs 5.0 of 64.0 GiB" in shown
    code, shown, error = script("train.py", *options, "64", "--run.replicas", "auto")
    assert code == 0 and "host memory: each replica needs 5.9 of 64.0 GiB" in shown, shown + error
    code, shown, error = script("train.py", *options, "12", *team)
    assert code == 2 and error == (
        "error: memory.host_gib=12.0 is less than the 15.9 GiB of host memory that 3 processes on "
        "one machine need; raise it, or lower run.replicas or run.samplers\n"
    )
    code, shown, _ = script("train.py", *options, "12", *team, "--run.ray", "10.0.0.1:6379")
    assert code == 0 and "3 processes on one machine need 15.9 of 12.0 GiB" in shown


def test_without_a_gpu_the_table_is_of_one_replica_and_a_line_of_all(script: Call) -> None:
    _, shown, error = script("train.py", "--plan", "--run.replicas", "2")
    (whole,) = re.findall(r"memory on a CPU of ([\d.]+) GiB", script("train.py", "--plan")[1])
    (part,) = re.findall(r"memory on a CPU of ([\d.]+) GiB", shown)
    assert float(part) == pytest.approx(float(whole) / 8, abs=0.1), error
    totals = re.findall(r"total +([\d.]+) GiB +([\d.]+) GiB", shown)[0]
    (need, there) = re.findall(r"2 processes on one machine need ([\d.]+) of ([\d.]+) GiB", shown)[
        0
    ]
    assert float(need) == pytest.approx(2 * max(map(float, totals)), abs=0.06)
    assert there == whole
