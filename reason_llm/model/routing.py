"""Routers of a mixture of experts: which experts they choose, and how evenly.

Shapes: N tokens in the order in which a pass has them, L routers, K chosen experts of a token, E
experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from reason_llm.model.datum import Datum
from reason_llm.model.layout import Layout, on_device

FAMILIES = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")
"""Families whose routers give logits, weights and chosen experts."""


def routers(policy: nn.Module) -> list[Any]:
    """The routers of a model, in the order of its layers."""
    return [m for m in policy.modules() if type(m).__name__.endswith("TopKRouter")]


class Routing:
    """The routers of a model, seen within ``hooked``."""

    def __init__(self, policy: nn.Module) -> None:
        self._routers = routers(policy)
        self._logits: list[Tensor] = [torch.empty(0)] * len(self._routers)
        """Logits of the last pass, (N, E) of each router."""
        self.experts = list(self._logits)
        """Experts chosen in the last pass, (N, K) of each router."""
        self._times_N = torch.empty(0)

    def begin(self, data: Sequence[Datum], layout: Layout | None, ids_BT: Tensor) -> None:
        """Take the rows of the pass that comes next, and of its recomputation."""
        self._times_N = _times(data, layout, ids_BT)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which every pass through the routers is seen."""
        hooks = [m.register_forward_hook(self._hook(i)) for i, m in enumerate(self._routers)]
        try:
            yield
        finally:
            for place, hook in enumerate(hooks):
                hook.remove()
                self._logits[place] = torch.empty(0)

    def _hook(self, place: int) -> Any:
        def hook(router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            outputs = output if output[0].is_floating_point() else output[::-1]  # Granite's
            self._logits[place], _, self.experts[place] = outputs

        return hook

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


def agreement(ours_NK: Tensor, theirs_NK: Tensor) -> Tensor:
    """1 for each token (N,) that goes to the same experts, 0 for others."""
    same_NK = ours_NK.sort(-1).values == theirs_NK.to(ours_NK).sort(-1).values
    return same_NK.all(-1).float()


def _times(data: Sequence[Datum], layout: Layout | None, ids_BT: Tensor) -> Tensor:
    """Number of rows that each token of a micro-batch belongs to, (N,): 0 for padding, more than 1
    in a prompt that packed rows share."""
    if layout is None:
        lengths_B1 = on_device(torch.tensor([[row.num_tokens] for row in data]), ids_BT.device)
        return (torch.arange(ids_BT.shape[1], device=ids_BT.device) < lengths_B1).flatten()
    if (index_M := layout.segments.index_M) is None:
        return torch.ones_like(layout.ids_1N[0])
    counts_N = torch.zeros_like(layout.ids_1N[0])
    return counts_N.index_add_(0, index_M, torch.ones_like(index_M))
