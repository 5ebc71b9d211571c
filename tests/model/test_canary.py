"""The check that the sampler's log-probs are the policy's, on log-probs that are given."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reason_llm.errors import TrainingError
from reason_llm.model import canary
from reason_llm.rollout import Completion, Group, Prompt

COUNT = 40
REPORTED = [-1.0 - n / COUNT for n in range(COUNT)]


def proven(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, policy: Any, base: Any = None
) -> dict[str, float]:
    """What is told of a sampler off by ``policy`` nats; without ``base`` there is no adapter."""
    passes = iter([policy, *([] if base is None else [base])])

    def logprobs(model: Any, ids: Any, mask: torch.Tensor, temperature: float) -> Any:
        assert temperature == 1
        found = torch.zeros(mask.shape)
        found[mask] = torch.tensor(REPORTED) + torch.tensor(next(passes))
        return found, None

    monkeypatch.setattr(canary, "policy_logprobs", logprobs)
    model: Any = SimpleNamespace(
        device=torch.device("cpu"), is_full=base is None, using=nullcontext,
        head=SimpleNamespace(weight=torch.zeros(1, dtype=dtype)),
    )  # fmt: skip
    completion = Completion((5,) * COUNT, "", tuple(REPORTED), "stop")
    return canary.prove_logprobs(model, [Group(Prompt("p", "", (1, 2), ""), (completion,))])


@pytest.mark.parametrize(
    ("dtype", "mean", "most"), [(torch.float32, 1e-4, 1e-3), (torch.bfloat16, 0.1, 2.0)]
)
def test_rounding_passes_and_no_more(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, mean: float, most: float
) -> None:
    def one(size: float) -> list[float]:
        return [0.0] * (COUNT - 1) + [size]

    told = proven(monkeypatch, dtype, one(-0.98 * most))
    assert told["sample/canary_difference"] == pytest.approx(0.98 * most / COUNT, rel=1e-2)
    assert told["sample/canary_difference_max"] == pytest.approx(0.98 * most, rel=1e-2)
    proven(monkeypatch, dtype, [0.98 * mean] * COUNT)
    for off in (one(1.02 * most), [-1.02 * mean] * COUNT, one(float("nan"))):
        with pytest.raises(TrainingError, match="it reports a log-prob of -1"):
            proven(monkeypatch, dtype, off)


def test_a_sampler_from_the_base_is_told_within_rounding_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = [1e-4 * (-1) ** n for n in range(COUNT)]
    none, half = [0.0] * COUNT, [each / 2 for each in way]
    proven(monkeypatch, torch.float32, none, way)  # it is the policy
    with pytest.raises(TrainingError, match="those of the base without the adapter"):
        proven(monkeypatch, torch.float32, half, none)
