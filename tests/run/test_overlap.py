"""Rewards overlap with sampling: a group is scored from when it ends, and no sample is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import orjson
import pytest

import reason_llm
from reason_llm.config import Config
from reason_llm.errors import RewardError
from reason_llm.run.watch import Progress, Watch

PROMPTS, EACH = 8, 2


class Follows(Watch):
    """Once a group must have ended, it holds up the sampler until a reward is called."""

    def __init__(self) -> None:
        self.called = Event()
        self.calls_while_sampling = 0

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Progress]:
        ended = 0

        def progress(tokens: int, items: int) -> None:
            nonlocal ended
            if PROMPTS * (EACH - 1) < ended < PROMPTS * EACH:
                assert self.called.wait(60), "no group is scored before the last one ends"
                self.calls_while_sampling += 1
            ended += items

        self.called.clear()  # it was called with made-up completions before
        yield progress if name == "sampling" else lambda tokens, items: None


@pytest.fixture
def config(small_run: Callable[..., Config]) -> Config:
    return small_run(
        run__steps=1, sample={"prompts_per_step": PROMPTS, "completions_per_prompt": EACH}
    )


def groups_of(config: Config) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = orjson.loads(config.run.buffer.read_bytes())["groups"]
    return groups


def test_a_group_is_scored_while_others_are_sampled(config: Config, tmp_path: Path) -> None:
    watch = Follows()

    def length(completion: str) -> float:
        watch.called.set()
        return len(completion) / 100

    reason_llm.train(config, rewards=[length], watch=watch)
    assert watch.calls_while_sampling > 0
    for group in groups_of(config):
        for each in group["completions"]:
            assert each["rewards"] == {"length": len(each["text"].removesuffix("<|im_end|>")) / 100}


def test_a_reward_that_fails_meanwhile_loses_no_sample(config: Config, tmp_path: Path) -> None:
    """The error is raised when the wave is saved, and names the first rollout on which it fails."""
    watch, is_fixed = Follows(), False

    def length(completion: str) -> float:
        watch.called.set()
        if not is_fixed and not completion.startswith(("This is", "<think>This is made up")):
            raise KeyError("unit")
        return len(completion) / 100

    with pytest.raises(RewardError) as failed:
        reason_llm.train(config, rewards=[length], watch=watch)
    assert watch.calls_while_sampling > 0
    sampled = groups_of(config)
    first = sampled[0]["prompt"]["id"]
    assert f"the reward length failed on {first}#0 (KeyError: 'unit'" in str(failed.value)
    assert len(sampled) == PROMPTS
    assert not any(each["rewards"] for group in sampled for each in group["completions"])
    is_fixed = True
    reason_llm.train(config, rewards=[length], watch=Watch())
    assert [[c["token_ids"] for c in g["completions"]] for g in groups_of(config)] == [
        [c["token_ids"] for c in g["completions"]] for g in sampled
    ]
