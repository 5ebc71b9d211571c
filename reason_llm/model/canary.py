"""Two checks before learning: packed rows have the log-probs of padded rows, and the sampler's
log-probs are the policy's."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reason_llm.errors import ModelError, TrainingError
from reason_llm.model.base import Model
from reason_llm.model.datum import Datum, to_data
from reason_llm.model.layout import collate, lay_out, placed
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.rollout import Group

LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in nats between padded and packed rows."""


@torch.no_grad()
def prove_packing(model: Model) -> None:
    """Compare log-probs of rows end to end with padded ones: three rows, two of one prompt. Raises
    ModelError: they differ."""
    ids = [3 + i % (model.head.weight.shape[0] - 3) for i in range(0, 47 * 61, 61)]
    pairs = (ids[:16], ids[16:19]), (ids[:16], ids[19:31]), (ids[31:36], ids[36:])
    rows = [Datum.of(prompt, completion) for prompt, completion in pairs]
    model.policy.eval()
    ids_BT, mask_BT = collate(rows, model.device)
    padded_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0)
    layout = lay_out(rows, model.device)
    packed_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0, layout=layout)
    difference = float((packed_BT - padded_BT)[mask_BT].abs().mean())
    if not difference <= LARGEST_DIFFERENCE[model.head.weight.dtype]:
        raise ModelError(
            f"model.path={model.path}: rows end to end give other log-probs than padded ones (by "
            f"{difference:.3g} nats in the mean); set train.packing to padded and report this"
        )


CANARY_TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.1, 2.0)}
"""Mean and largest difference of a log-prob, in nats, that rounding explains."""


def prove_logprobs(model: Model, sampled: Sequence[Group]) -> dict[str, float]:
    """Compare the log-probs that the sampler reported with the learner's, and, where there is an
    adapter, their distances to the policy's and to the base's: a sampler without the adapter is
    detected even while that changes less than rounding does. Where the adapter is folded into the
    base weights, that policy is the rounded one, and the differences are still the exact one's.

    Args:
        sampled: a few tokens, drawn at a temperature of 1.

    Returns:
        ``sample/canary_difference`` and ``sample/canary_difference_max``, in nats.

    Raises:
        TrainingError: one is beyond ``CANARY_TOLERANCE``, or the sampler samples from the base.
    """
    data = to_data(sampled)
    ids_BT, mask_BT = collate(data, model.device)

    def read() -> Tensor:
        return policy_logprobs(model, ids_BT, mask_BT, temperature=1.0)[0][mask_BT].cpu()

    # Tolerance alone cannot see a missing adapter that changes less than rounding does, so the
    # report's distances to the policy and to the base are compared, too.
    with torch.no_grad(), model.attached(placed(data, None), ids_BT.shape[1]):
        with model.as_sampled():
            sampled_N = policy_N = base_N = read()
        with model.unfolded():
            if model.folding is not None:
                policy_N = read()
            if not model.is_full:
                with model.using("reference"):
                    base_N = read()
    reported_N = torch.cat([datum.on_trained("sampler_logprobs") for datum in data])
    difference_N = (policy_N - reported_N).abs()
    worst, mean = int(difference_N.argmax()), float(difference_N.mean())
    max_mean, max_difference = CANARY_TOLERANCE[model.head.weight.dtype]
    fold = "" if model.folding is None else " with sample.fold=true, which rounds; false does not"
    if not (mean <= max_mean and difference_N[worst] <= max_difference):
        raise TrainingError(
            f"the sampler is not the policy: it reports a log-prob of {reported_N[worst]:.5f} "
            f"where the learner computes {policy_N[worst]:.5f}, and they differ by {mean:.2g} in "
            f"the mean (at most {max_difference:g} and {max_mean:g} is rounding){fold}; set "
            "sample.engine to transformers and report this"
        )
    share, error = share_of_base(sampled_N, base_N, reported_N)
    if is_base(share, error):
        raise TrainingError(
            "the sampler is not the policy: its log-probs are those of the base without the "
            f"adapter ({share:.2f} +- {error:.2f} of the way from the policy's to the base's)"
            f"{fold}; set sample.engine to transformers and report this"
        )
    return {
        "sample/canary_difference": mean,
        "sample/canary_difference_max": float(difference_N[worst]),
    }


LARGEST_ERROR = 1 / 4
"""Largest standard error of ``share_of_base`` with which it decides. Beyond it the adapter changes
less than rounding does, which may put the sampler anywhere on the line."""


def share_of_base(policy_N: Tensor, base_N: Tensor, reported_N: Tensor) -> tuple[float, float]:
    """Position of the reported log-probs on the line from the policy's (0) to the base's (1), by
    least squares, with its standard error; (0, inf) while the two are the same."""
    way_N, moved_N = base_N - policy_N, reported_N - policy_N
    length = float(way_N.norm())
    if length == 0 or len(way_N) < 2:
        return 0.0, math.inf
    share = float(moved_N @ way_N) / length**2
    residual_N = moved_N - share * way_N
    return share, float(residual_N.norm()) / math.sqrt(len(way_N) - 1) / length


def is_base(share: float, error: float) -> bool:
    """Whether a ``share_of_base`` with this standard error shows a sampler without the adapter;
    False if the error is too large to decide."""
    return error < LARGEST_ERROR and share - 4 * error > 0.5
