"""The policy's log-probs on a micro-batch, and values of completions laid out over it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from reason_llm.errors import ModelError
from reason_llm.model import layout as packing
from reason_llm.model.base import Model
from reason_llm.model.layout import Layout, Rollout
from reason_llm.model.logprobs import target_logprobs

LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""In nats, in the mean, between padded rows and the same end to end."""


def policy_logprobs(
    model: Model,
    ids_BT: Tensor,
    mask_BT: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    layout: Layout | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (B, T) of the masked tokens under the model as it is now.

    Args:
        layout: of the same rollouts; with it the model sees them end to end in one row.
        chunk_tokens: as ``token_logprobs`` takes it.
    """
    if layout is None:
        hidden_ND = model.hidden_states(ids_BT)[:, :-1][mask_BT[:, 1:]]
    else:
        hidden_1ND = model.hidden_states(
            layout.ids_1N, position_ids=layout.positions_1N, segments=layout.segments
        )
        hidden_ND = hidden_1ND[0].index_select(0, layout.predictors_M)
    logprobs_N, entropies_N = target_logprobs(
        hidden_ND,
        ids_BT[mask_BT],
        model.head.weight,
        model.head.bias,
        temperature,
        chunk_tokens,
        softcap=model.softcap,
        entropy_gradient=entropy_gradient,
        adapter=model.head_adapter(hidden_ND),
    )
    zeros_BT = torch.zeros(ids_BT.shape, dtype=logprobs_N.dtype, device=ids_BT.device)
    return (
        zeros_BT.masked_scatter(mask_BT, logprobs_N),
        zeros_BT.masked_scatter(mask_BT, entropies_N),
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


@torch.no_grad()
def prove_packing(model: Model) -> None:
    """Rows end to end must give what padded ones do: a few tokens, two rows with one prompt.

    Raises:
        ModelError: they do not.
    """
    ids = [3 + i % (model.head.weight.shape[0] - 3) for i in range(0, 47 * 61, 61)]
    rows = [
        Rollout("", tuple(prompt), tuple(completion), (), 0.0)
        for prompt, completion in (
            (ids[:16], ids[16:19]), (ids[:16], ids[19:31]), (ids[31:36], ids[36:])
        )
    ]  # fmt: skip
    model.policy.eval()
    ids_BT, mask_BT = packing.collate(rows, model.device)
    padded_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0)
    layout = packing.lay_out(rows, model.device)
    packed_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0, layout=layout)
    difference = float((packed_BT - padded_BT)[mask_BT].abs().mean())
    if not difference <= LARGEST_DIFFERENCE[model.head.weight.dtype]:
        raise ModelError(
            f"model.path={model.path}: rows end to end give other log-probs than padded ones (by "
            f"{difference:.3g} nats in the mean); set train.packing to padded and report this"
        )
