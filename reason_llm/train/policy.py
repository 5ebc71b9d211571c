"""The policy's log-probs on a micro-batch, and values of completions laid out over it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reason_llm.model.base import Model
from reason_llm.train.logprobs import token_logprobs


def policy_logprobs(
    model: Model,
    ids_BT: Tensor,
    mask_BT: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (B, T) of the masked tokens under the model as it is now."""
    hidden_BTD = model.hidden_states(ids_BT)
    return token_logprobs(
        hidden_BTD,
        ids_BT,
        mask_BT,
        model.head.weight,
        model.head.bias,
        temperature,
        softcap=model.softcap,
        entropy_gradient=entropy_gradient,
    )


def spread(rows: Sequence[Tensor | None], mask_BT: Tensor, otherwise: Tensor) -> Tensor:
    """Rows of completion values laid out as (B, T) where the mask is True, 0 elsewhere;
    ``otherwise`` if none."""
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return otherwise
    values = torch.cat(known).float()
    return torch.zeros(mask_BT.shape, dtype=values.dtype, device=mask_BT.device).masked_scatter(
        mask_BT, values
    )
