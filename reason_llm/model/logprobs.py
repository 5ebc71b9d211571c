"""Log-probs of given tokens from hidden states, in chunks: the (T, V) logits never exist, forward
or backward. The shift is here, and in ``layout``: hidden state t - 1 predicts token t.

Shapes: B rows, T tokens, N trained tokens, V vocabulary, D hidden.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from reason_llm.model.base import Model, Role
from reason_llm.model.layout import Layout, places_of

CHUNK_ELEMENTS = 2**23
"""Logits of a chunk where nobody says how many tokens it has; 32 MiB in float32."""


def target_logprobs(
    hidden_ND: Tensor,
    targets_N: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    temperature: float,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
    entropy_gradient: bool = False,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs in nats of tokens under ``softmax(logits / temperature)``, and that distribution's
    entropy.

    Args:
        hidden_ND: the hidden states that predict the tokens; gradients flow into them.
        targets_N: the tokens.
        head_VD, bias_V: the head; gradients flow into one that is trained itself.
        chunk_tokens: tokens whose logits exist at once; None for ``CHUNK_ELEMENTS / V``.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first. Source: Gemma 2,
            arXiv:2408.00118. None: they do not.
        entropy_gradient: whether gradients flow through the entropy too, for a vector more a token.
        adapter: low_NR and up_VR of a LoRA adapter on the head, whose product is added to the
            logits; gradients flow into both.

    Returns:
        logprobs_N with gradient, and entropy_N, float32.
    """
    chunk = chunk_tokens or max(1, CHUNK_ELEMENTS // head_VD.shape[0])
    if adapter is None and not (torch.is_grad_enabled() and head_VD.requires_grad):
        logprobs_N, entropy_N = _ChunkedLogprobs.apply(
            hidden_ND, head_VD, bias_V, targets_N, temperature, chunk, softcap, entropy_gradient
        )
        return logprobs_N, entropy_N

    # The gradient in the head's weights is a sum over tokens weighted by the incoming gradient, so
    # it cannot be made in the forward pass: each chunk is computed once more.
    def of_chunk(hidden_CD: Tensor, low_CR: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return logprobs_C of the targets and entropy_C, in nats, float32 or wider."""
        linear = torch.nn.functional.linear
        logits_CV = linear(hidden_CD, head_VD, bias_V)
        if up_VR is not None:
            logits_CV = logits_CV + linear(low_CR, up_VR.to(low_CR.dtype))
        logits_CV = logits_CV.to(torch.promote_types(hidden_ND.dtype, torch.float32))
        if softcap is not None:
            logits_CV = torch.tanh(logits_CV / softcap) * softcap
        logprobs_CV = (logits_CV / temperature).log_softmax(-1)
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        return logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropy_C

    low_NR, up_VR = adapter if adapter is not None else (hidden_ND[:, :0], None)
    columns = (column.split(chunk) for column in (hidden_ND, low_NR, targets_N))
    chunks = [
        checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*columns, strict=True)
    ]
    logprobs_N, entropy_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target], whose gradient in h is (W[target] - p W) /
    temperature; and the entropy H, whose gradient is -p (log p + H) W / temperature. Each is one
    vector of D numbers for each token, made in the forward pass; the backward pass only scales it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        softcap: float | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wants_gradient = ctx.needs_input_grad[0]
        accumulate = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N = hidden_ND.new_empty(len(targets_N), dtype=accumulate)
        entropy_N = torch.empty_like(logprobs_N)
        wanted = (wants_gradient, wants_gradient and entropy_gradient)
        # Gradients are computed here, while a chunk's logits exist: backward needs none of them.
        gradients = [torch.empty_like(hidden_ND) if want else None for want in wanted]
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logprobs_N[part], entropy_N[part] = _chunk(
                torch.nn.functional.linear(hidden_ND[part], head_VD, bias_V).to(accumulate),
                targets_N[part],
                head_VD,
                temperature,
                softcap,
                *(None if gradient is None else gradient[part] for gradient in gradients),
            )
        ctx.save_for_backward(*gradients)
        if not wanted[1]:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor | None, ...]:
        of_logprobs_ND, of_entropy_ND = ctx.saved_tensors
        gradient = grad_logprobs_N[:, None].to(of_logprobs_ND.dtype) * of_logprobs_ND
        if of_entropy_ND is not None:
            gradient += grad_entropy_N[:, None].to(of_entropy_ND.dtype) * of_entropy_ND
        return gradient, *(None,) * 7


def _chunk(
    logits_CV: Tensor,
    targets_C: Tensor,
    head_VD: Tensor,
    temperature: float,
    softcap: float | None,
    logprob_gradient_CD: Tensor | None,
    entropy_gradient_CD: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (C,) of a chunk, whose logits are overwritten; their gradients in h
    are written to the last two. The softmax is the library's; its normaliser is found again from
    its largest probability and its sum, which is not quite 1."""
    targets_C1 = targets_C[:, None]
    slope_CV = None
    if softcap is not None:
        slope_CV = logits_CV.div_(softcap).tanh_()
        logits_CV = slope_CV * softcap
        slope_CV.square_().neg_().add_(1)  # of softcap * tanh(x / softcap)
    if temperature != 1:
        logits_CV.div_(temperature)
    probs_CV = torch.softmax(logits_CV, -1)
    sums_C1 = probs_CV.sum(-1, keepdim=True) / probs_CV.amax(-1, keepdim=True)
    normaliser_C1 = logits_CV.amax(-1, keepdim=True) + sums_C1.log_()
    logprobs_C1 = logits_CV.gather(-1, targets_C1) - normaliser_C1
    expected_C11 = torch.bmm(probs_CV[:, None, :], logits_CV[:, :, None])
    entropy_C1 = normaliser_C1 - expected_C11[:, 0]
    if entropy_gradient_CD is not None:
        weights_CV = logits_CV.sub_(normaliser_C1 - entropy_C1).mul_(probs_CV).neg_()
        if slope_CV is not None:
            weights_CV.mul_(slope_CV)
        entropy_gradient_CD.copy_(weights_CV.to(head_VD.dtype) @ head_VD / temperature)
    if logprob_gradient_CD is not None:
        weights_CV = probs_CV.scatter_add_(-1, targets_C1, -torch.ones_like(logprobs_C1))
        if slope_CV is not None:
            weights_CV.mul_(slope_CV)
        logprob_gradient_CD.copy_(weights_CV.to(head_VD.dtype) @ head_VD / -temperature)
    return logprobs_C1[:, 0], entropy_C1[:, 0]


def policy_logprobs(
    model: Model,
    ids_BT: Tensor,
    mask_BT: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    layout: Layout | None = None,
    chunk_tokens: int | None = None,
    places_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (B, T) of the masked tokens under the model as it is now.

    Args:
        layout: of the same rollouts; with it the model sees them end to end in one row.
        chunk_tokens: as ``target_logprobs`` takes it.
        places_M: of the masked tokens; None: they are found, for which a card is waited for.
    """
    places_M = places_of(mask_BT) if places_M is None else places_M
    hidden_ND = _predicting_hidden(model, ids_BT, places_M, layout)
    logprobs_N, entropies_N = target_logprobs(
        hidden_ND,
        ids_BT.flatten().index_select(0, places_M),
        model.head.weight,
        model.head.bias,
        temperature / model.logit_scale,  # a scale of the logits costs no pass of its own over them
        chunk_tokens,
        softcap=model.softcap,
        entropy_gradient=entropy_gradient,
        adapter=model.head_adapter(hidden_ND),
    )
    return _spread(logprobs_N, places_M, ids_BT), _spread(entropies_N, places_M, ids_BT)


def token_values(
    model: Model, role: Role, ids_BT: Tensor, places_M: Tensor, layout: Layout | None = None
) -> Tensor:
    """Values (B, T) of the tokens at these places by the role's head, float32, 0 elsewhere: entry t
    is the value of the state in which token t was chosen, read where its log-prob is."""
    hidden_ND = _predicting_hidden(model, ids_BT, places_M, layout)
    values_N = model.heads[role](hidden_ND.float())[:, 0]
    return _spread(values_N, places_M, ids_BT)


def row_scores(
    model: Model, role: Role, ids_BT: Tensor, mask_BT: Tensor, layout: Layout | None = None
) -> Tensor:
    """Score of each row by the role's head, read at its last trained token: (B, T) float32, at that
    token and 0 elsewhere."""
    places_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) * mask_BT
    last_B1 = places_BT.amax(dim=1, keepdim=True)
    if layout is None:
        hidden_BTD = model.hidden_states(ids_BT)
        hidden_BD = hidden_BTD.gather(1, last_B1[..., None].expand(-1, -1, hidden_BTD.shape[2]))
        hidden_BD = hidden_BD[:, 0]
    else:
        hidden_BD = _packed_hidden(model, layout).index_select(0, layout.ends_B)
    scores_B1 = model.heads[role](hidden_BD.float())
    zeros_BT = torch.zeros(ids_BT.shape, dtype=scores_B1.dtype, device=ids_BT.device)
    return zeros_BT.scatter(1, last_B1, scores_B1)


def _predicting_hidden(
    model: Model, ids_BT: Tensor, places_M: Tensor, layout: Layout | None
) -> Tensor:
    """Hidden states (N, D) that predict the tokens at these places, in order."""
    if layout is None:
        return model.hidden_states(ids_BT).flatten(0, 1).index_select(0, places_M - 1)
    return _packed_hidden(model, layout).index_select(0, layout.predictors_M)


def _spread(values_N: Tensor, places_M: Tensor, ids_BT: Tensor) -> Tensor:
    """Values at their places in (B, T), 0 elsewhere."""
    spread_N = values_N.new_zeros(ids_BT.numel()).index_copy(0, places_M, values_N)
    return spread_N.view(ids_BT.shape)


def _packed_hidden(model: Model, layout: Layout) -> Tensor:
    """Hidden states (N, D) of rows that lie end to end."""
    return model.hidden_states(
        layout.ids_1N, position_ids=layout.positions_1N, segments=layout.segments
    )[0]
