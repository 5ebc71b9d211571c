"""Everything that is read from the record of a rollout in an environment: see ``RolloutSide`` in
``data``. Loads no heavy library."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from reason_llm.config import Section
from reason_llm.rollout import Completion, Group

WHO = "the environment"
REWARD = "environment"
ARGUMENT = "environments"
ARGUMENT_LACKS = " (there is no sample.environment)"

ALARM = "The environment fails"
ADVICE = (
    "Read some rollouts: each says its problem. Fix the environment or tell the model how its "
    "tools are called (docs/environments.md has the forms that are read); raise sample.turns "
    "where good rollouts are cut short."
)
PLAYED = "sample/turns"
FAILED = "sample/environment_error_fraction"
FAILED_TEXT = "The environment failed in all rollouts"
LIMITS = {
    FAILED: (0.1, "of the rollouts ended by a fault of the environment, and teach nothing"),
    "sample/failed_calls_fraction": (0.5, "of the calls of tools failed or could not be read"),
    "sample/no_calls_fraction": (0.95, "of the rollouts made no call of a tool that can be read"),
    "sample/out_of_turns_fraction": (0.8, "of the rollouts used up all their turns"),
}


class RewardOptions(Section):
    """An environment's values for its rollout."""

    note: str | None = None
    """Key of a number in the environment's ``notes``, used instead of its reward."""


def reward(options: RewardOptions, completion: Completion) -> float:
    """The environment's reward, or a number of its notes; NaN if there is none."""
    environment = completion.environment
    if options.note is None:
        return float(environment.get("reward", math.nan))
    note = environment.get("notes", {}).get(options.note)
    return float(note) if isinstance(note, int | float) else math.nan


def argument(group: Group) -> list[SimpleNamespace] | None:
    """An environment's values for each rollout, including its notes, as attributes."""
    environments = [completion.environment for completion in group.completions]
    if not any(environments):
        return None
    with_notes = [(environment, environment.get("notes", {})) for environment in environments]
    return [
        SimpleNamespace(**{**environment, **notes, "notes": notes})
        for environment, notes in with_notes
    ]


def problem(completion: Completion) -> str | None:
    """The problem of a rollout that failed."""
    return completion.environment.get("problem") or None


def metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Statistics of rollouts in an environment; empty if there are none."""
    played = [completion for completion in completions if completion.environment]
    if not played:
        return {}

    def part(reason: str) -> float:
        return sum(c.finish_reason == reason for c in played) / len(played)

    turns, calls, failed = (
        sum(c.environment.get(name, 0) for c in played)
        for name in ("turns", "calls", "failed_calls")
    )
    record = {
        PLAYED: turns / len(played),
        "sample/out_of_turns_fraction": part("turns"),
        FAILED: part("error"),
    }
    offered = [c.environment["calls"] for c in played if "calls" in c.environment]
    if offered:
        record["sample/no_calls_fraction"] = offered.count(0) / len(offered)
    return record | ({"sample/failed_calls_fraction": failed / calls} if calls else {})


def failed_steps(records: Sequence[Mapping[str, Any]]) -> int:
    """Number of the last steps in a row in which the environment failed in all rollouts."""
    parts = [record[FAILED] for record in records if PLAYED in record]
    return sum(1 for _ in takewhile(lambda part: part == 1, reversed(parts)))


def page_entry(completion: Completion) -> dict[str, Any] | None:
    """Return the entry of a rollout in the report's page, with its text."""
    if not completion.environment:
        return None
    return {
        "spans": [(span.start, span.end) for span in completion.spans],
        "end": completion.finish_reason,
        **completion.environment,
    }
