"""Routers of a mixture of experts: which experts they choose, how evenly, and choices that are
replayed. Source of the replay: arXiv:2510.11370 (R3), section 4.

Shapes: N tokens in the order in which a pass has them, L routers, K chosen experts of a token, E
experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from reason_llm.errors import RolloutBufferError
from reason_llm.model.datum import Datum
from reason_llm.model.layout import Layout

FAMILIES = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")
"""Families whose routers give logits, weights and chosen experts."""


def routers(policy: nn.Module) -> list[Any]:
    """The routers of a model, in the order of its layers."""
    return [m for m in policy.modules() if type(m).__name__.endswith("TopKRouter")]


def layers(policy: nn.Module) -> list[int]:
    """Numbers of the layers that have a router."""
    names = [n for n, m in policy.named_modules() if type(m).__name__.endswith("TopKRouter")]
    return [int(name.partition(".layers.")[2].partition(".")[0]) for name in names]


class Routing:
    """The routers of a model, seen within ``hooked``."""

    def __init__(self, policy: nn.Module) -> None:
        self._routers = routers(policy)
        self._logits: list[Tensor] = [torch.empty(0)] * len(self._routers)
        """Of the last pass, (N, E) of each router."""
        self.experts = list(self._logits)
        """Chosen in the last pass, (N, K) of each router."""
        self._times_N = torch.empty(0)
        self._given_NLK: Tensor | None = None
        self._log: list[Tensor] | None = None

    def begin(
        self, data: Sequence[Datum], layout: Layout | None, ids_BT: Tensor, replays: bool
    ) -> None:
        """Take the rows of the pass that comes next, and of its recomputation.

        Args:
            replays: the routers take the experts in ``Datum.routes``, with weights of their own.

        Raises:
            RolloutBufferError: a row has no such routes.
        """
        self._times_N = _times(data, layout, ids_BT)
        self._given_NLK = None
        if replays:
            size = len(self._routers), self._routers[0].top_k
            most = size[0] * size[1], self._routers[0].num_experts
            self._given_NLK = _given(data, layout, *most).to(ids_BT.device).unflatten(-1, size)

    @contextmanager
    def hooked(self, log: list[Tensor] | None = None) -> Iterator[None]:
        """Context in which every pass through the routers is seen; ``log`` gets the experts (N, LK)
        of each."""
        self._log = log
        hooks = [m.register_forward_hook(self._hook(i)) for i, m in enumerate(self._routers)]
        try:
            yield
        finally:
            for place, hook in enumerate(hooks):
                hook.remove()
                self._logits[place] = torch.empty(0)
            self._given_NLK = None

    def _hook(self, place: int) -> Any:
        def hook(router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits_NE, weights_NK, experts_NK = output
            self._logits[place], self.experts[place] = logits_NE, experts_NK
            if self._log is not None and place == len(self.experts) - 1:
                self._log.append(torch.cat(self.experts, dim=-1).to("cpu", torch.uint8))
            if self._given_NLK is None:
                return None
            given_NK = self._given_NLK[:, place]
            chosen_NK = torch.where(given_NK < 0, experts_NK, given_NK)
            probs_NK = logits_NE.float().softmax(-1).gather(-1, chosen_NK)
            if getattr(router, "norm_topk_prob", True):  # Mixtral and gpt-oss always do
                probs_NK = probs_NK / probs_NK.sum(-1, keepdim=True)
            return logits_NE, probs_NK.to(weights_NK.dtype), chosen_NK

        return hook

    def replayed(self) -> Tensor | None:
        """1 for each token and router that would have chosen the experts that it was given in the
        last pass, 0 for others; None without replay."""
        if (given_NLK := self._given_NLK) is None:
            return None
        of_router = enumerate(self.experts)
        same_LN = torch.stack([agreement(e_NK, given_NLK[:, i]) for i, e_NK in of_router])
        return same_LN[:, given_NLK[:, 0, 0] >= 0].flatten()

    def balance(self) -> Tensor:
        """The load-balancing loss of the last pass: E * sum_e f_e P_e, where f_e is the share of
        tokens that choose an expert and P_e its mean probability, over all tokens of the rows and
        all routers. Padding counts nothing, a prompt that rows share counts for each of them.

        Source: arXiv:2101.03961 eq. 4 to 6, as Transformers' ``load_balancing_loss_func``.
        """
        top_k, experts = self._routers[0].top_k, self._logits[0].shape[-1]
        weights_1N = self._times_N.float()[None] / (self._times_N.sum() * len(self._logits))
        chosen_E = weights_1N.new_zeros(experts)
        mean_E = weights_1N.new_zeros(experts)
        for logits_NE in self._logits:
            probs_NE = logits_NE.float().softmax(-1)
            index_NK = probs_NE.topk(top_k, dim=-1).indices
            is_chosen_NE = torch.zeros_like(probs_NE).scatter_(-1, index_NK, 1.0)
            chosen_E = chosen_E + (weights_1N @ is_chosen_NE)[0]
            mean_E = mean_E + (weights_1N @ probs_NE)[0]
        return experts * (chosen_E * mean_E).sum()


def _given(data: Sequence[Datum], layout: Layout | None, choices: int, num_experts: int) -> Tensor:
    """The rows' routes in the order of the pass, (N, choices); -1 where there is none."""
    rows = []
    for datum in data:
        routes = datum.routes
        if routes is None or routes.shape[1] != choices or int(routes.max()) >= num_experts:
            whose = "no" if routes is None else "another model's"
            raise RolloutBufferError(
                f"{datum.name} has {whose} routes, which train.router_replay=true needs; set it to "
                "false, or take rollouts that this model sampled with it"
            )
        rows.append(torch.nn.functional.pad(routes, (0, 0, 0, 1), value=-1))
    if layout is None:
        padded_BTC = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        return padded_BTC.flatten(0, 1)
    return torch.cat([row[skip:] for row, skip in zip(rows, layout.skipped, strict=True)])


def agreement(ours_NK: Tensor, theirs_NK: Tensor) -> Tensor:
    """1 for each token (N,) that goes to the same experts, 0 for others."""
    same_NK = ours_NK.sort(-1).values == theirs_NK.to(ours_NK).sort(-1).values
    return same_NK.all(-1).float()


def _times(data: Sequence[Datum], layout: Layout | None, ids_BT: Tensor) -> Tensor:
    """How many rows each token of a micro-batch belongs to, (N,): 0 for padding, more than 1 in a
    prompt that packed rows share."""
    if layout is None:
        lengths_B1 = torch.tensor([[row.num_tokens] for row in data], device=ids_BT.device)
        return (torch.arange(ids_BT.shape[1], device=ids_BT.device) < lengths_B1).flatten()
    if (keys := layout.segments.keys) is None:
        return torch.ones_like(layout.ids_1N[0])
    return keys.index_M.bincount(minlength=layout.ids_1N.shape[1])
