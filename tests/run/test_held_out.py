"""The canary's arithmetic: how much of the base is in what a sampler reports."""

import pytest
import torch

from reason_llm.model.canary import share_of_base


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
    assert share - 4 * error == -torch.inf
