"""Options of replicas and shards: what is filled in, what is refused, what may change."""

from pathlib import Path
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.config.file import build, changes
from reason_llm.errors import ConfigError


def made(**run: Any) -> Config:
    return build({"data": {"train": "rows.jsonl"}, "run": run}, Path("mine.yaml"), {})


@pytest.mark.parametrize(
    ("run", "shards"),
    [
        ({}, 1),
        ({"replicas": 1}, 1),
        ({"replicas": 2}, 8),
        ({"replicas": "auto"}, 8),
        ({"replicas": 2, "shards": 2}, 2),
        ({"shards": 8}, 8),
        ({"samplers": 1}, 8),
        ({"samplers": 2, "shards": 2}, 2),
        ({"max_staleness": 1}, 1),
    ],
)
def test_shards_follow_from_replicas(run: dict[str, Any], shards: int) -> None:
    assert made(**run).run.shards == shards


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"replicas": 3}, "run.replicas=3 must be a power of two, such as 2"),
        ({"shards": 6}, "run.shards=6 must be a power of two, such as 4"),
        ({"replicas": 16}, "set run.shards to 16 or more"),
        ({"replicas": 0}, "run.replicas=0"),
        ({"samplers": 9}, "run.samplers=9 contradicts run.shards=8"),
        ({"max_staleness": 5}, "run.max_staleness=5"),
        (
            {"max_staleness": 1, "from_buffer": "saved"},
            "run.max_staleness=1 or run.samplers=0 contradicts run.from_buffer, which samples no",
        ),
        ({"replicas": "many"}, "run.replicas='many'"),
        ({"ray": "auto"}, "run.ray=auto contradicts run.replicas=1"),
    ],
)
def test_what_cannot_be_is_one_line(run: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**run)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_number_of_replicas_is_the_same_run() -> None:
    def between(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
        found = changes(made(**old).model_dump(mode="json"), made(**new).model_dump(mode="json"))
        return found.refused, found.warned

    assert between({"shards": 8}, {"replicas": 4}) == ([], [])
    assert between({"replicas": 2, "ray": "auto"}, {"replicas": 4}) == ([], [])
    assert between({"shards": 8}, {"samplers": 2}) == ([], [])
    assert between({}, {"max_staleness": 1}) == (["run.max_staleness: 0 -> 1"], [])
    assert between({}, {"replicas": 2}) == ([], ["run.shards: 1 -> 8"])


def test_stale_rollouts_are_weighed() -> None:
    assert made().learned_row.correction == "none"
    assert made(max_staleness=1).learned_row.correction == "token_truncate"
