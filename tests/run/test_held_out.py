"""The canary's arithmetic: how much of the base is in what a sampler reports."""

import pytest
import torch

from reason_llm.model.canary import is_base, share_of_base


@pytest.mark.parametrize("truth", [0.0, 0.3, 1.0])
def test_the_share_is_found_within_its_error(truth: float) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, way, noise = (torch.randn(128, generator=generator) for _ in range(3))
    reported = policy + truth * 0.01 * way + 0.005 * noise
    share, error = share_of_base(policy, policy + 0.01 * way, reported)
    assert abs(share - truth) < 3 * error
    assert 0.02 < error < 0.1  # sigma of the noise over that of the way, over the root of 128


def test_a_policy_that_is_the_base_says_nothing() -> None:
    policy = torch.randn(10)
    share, error = share_of_base(policy, policy, policy + 0.1)
    assert not is_base(share, error)


@pytest.mark.parametrize(
    ("share", "error", "found"),
    [
        (1.0, 0.1, True),
        (1.14, 0.13, True),
        (0.8, 0.07, True),
        (0.2, 0.07, False),
        (2.25, 0.43, False),
        (1.0, 0.2, False),
    ],
)
def test_a_place_is_told_only_beyond_its_errors_and_those_of_rounding(
    share: float, error: float, found: bool
) -> None:
    """Rounding alone put a sampler with the adapter at 2.25 +- 0.43, in bfloat16 on a CPU."""
    assert is_base(share, error) == found
