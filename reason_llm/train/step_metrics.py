"""Metrics of a step: sums over micro-batches, kept on the model's device until these end."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reason_llm.model import places_of

RATIO_QUANTILES = {"p01": 0.01, "p99": 0.99}


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches; ``merge`` adds whole tallies."""

    tokens: int = 0
    passed: int = 0
    """Number of tokens that went through the model, prompts and padding included."""
    padding: int = 0
    updates: int = 0
    left_out: int | Tensor = 0
    """Completions that off_policy_threshold took out."""
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    mismatch_max: float | Tensor = 0.0
    log_ratios: list[Tensor] = field(default_factory=list)
    unit_sums: dict[str, Tensor | float] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    """Number of rows or pairs in each of these sums."""
    rate: float = 0.0

    def add_micro_batch(
        self,
        loss: Tensor,
        mask_BT: Tensor,
        passed: int,
        padding: int,
        values: Mapping[str, Tensor],
        log_ratio_BT: Tensor | None,
        mismatch_BT: Tensor | None,
        of_units: Mapping[str, Tensor] | None = None,
        places_M: Tensor | None = None,
    ) -> None:
        """Add a micro-batch of ``passed`` tokens, ``padding`` included, with means over the masked
        tokens of ``values`` (B, T) and over rows or pairs of ``of_units`` (U,); the policy's
        log-probs less the old ones, if there are such, and less the sampler's, until the policy has
        moved; ``places_M`` of the masked tokens, as ``policy_logprobs`` takes them."""
        places_M = places_of(mask_BT) if places_M is None else places_M
        self.add("loss", loss.detach())
        self.tokens += len(places_M)
        self.passed += passed
        self.padding += padding
        for name, value_BT in values.items():
            self.add(name, (value_BT.detach().float() * mask_BT).sum())
        for name, value_U in (of_units or {}).items():
            if not len(value_U):  # for example, the good ones if all are bad
                continue
            self.unit_sums[name] = self.unit_sums.get(name, 0.0) + value_U.detach().float().sum()
            self.units[name] = self.units.get(name, 0) + value_U.numel()
        if log_ratio_BT is not None:
            self.log_ratios.append(log_ratio_BT.detach().flatten()[places_M].float())
        if mismatch_BT is not None:
            mismatch_N = mismatch_BT.detach().flatten()[places_M].float()
            if len(mismatch_N):
                self.mismatch_max = mismatch_N.abs().max().clamp(min=self.mismatch_max)
            # k3 of KL(sampler || learner), from tokens that the sampler drew
            self.add("sampler_kl", (torch.expm1(mismatch_N) - mismatch_N).sum())
            self.add("sampler_tokens", float(len(mismatch_N)))

    def to_host(self) -> None:
        """Move all to host memory; a card is waited for."""
        self.left_out, self.mismatch_max = int(self.left_out), float(self.mismatch_max)
        for sums in (self.sums, self.unit_sums):
            sums |= {name: torch.as_tensor(value).cpu() for name, value in sums.items()}
        self.log_ratios = [ratios.cpu() for ratios in self.log_ratios]

    def add_update(self, norm: float, rate: float) -> None:
        """Add an optimizer step."""
        self.add("grad_norm", norm)
        self.updates += 1
        self.rate = rate

    def merge(self, other: "Tally") -> None:
        """Add another tally."""
        self.tokens += other.tokens
        self.passed += other.passed
        self.padding += other.padding
        self.left_out += other.left_out
        self.mismatch_max = max(self.mismatch_max, other.mismatch_max)
        self.log_ratios += other.log_ratios
        for name, value in other.unit_sums.items():
            self.unit_sums[name] = self.unit_sums.get(name, 0.0) + value
            self.units[name] = self.units.get(name, 0) + other.units[name]
        for name, value in other.sums.items():
            self.add(name, value)

    @property
    def largest_log_ratio(self) -> float:
        """Largest log-ratio by absolute value; 0 if no token was passed."""
        return max((float(part.abs().max()) for part in self.log_ratios if len(part)), default=0.0)

    def of_rows(self) -> dict[str, float]:
        """The loss, means over tokens and means over rows or pairs, by their names alone."""
        sums = {name: float(value) for name, value in self.sums.items()}
        means = {"loss": sums.pop("loss", 0.0)}
        means |= {name: value / max(1, self.tokens) for name, value in sums.items()}
        return means | {name: float(v) / self.units[name] for name, v in self.unit_sums.items()}

    def metrics(self) -> dict[str, float]:
        """Means over tokens, or over optimizer steps for loss and gradient norm; what was measured
        of no token is omitted."""
        sums, updates = {name: float(value) for name, value in self.sums.items()}, self.updates
        sampler_kl, compared = sums.pop("sampler_kl", 0.0), sums.pop("sampler_tokens", 0.0)
        per_update = ["loss", "grad_norm", *(sums.keys() & {"router_aux_loss"})]
        means = {name: sums.pop(name, 0.0) / max(1, updates) for name in per_update}
        if compared:
            means["sampler_kl"] = sampler_kl / compared
            means["sampler_mismatch_max"] = float(self.mismatch_max)
        if self.tokens:
            means |= {name: value / self.tokens for name, value in sums.items()}
        means |= {name: float(value) / self.units[name] for name, value in self.unit_sums.items()}
        if self.tokens and self.log_ratios:
            ratios = torch.cat(self.log_ratios).exp()
            for name, quantile in RATIO_QUANTILES.items():
                # torch.quantile takes no more than 2^24 numbers.
                rank = 1 + round(quantile * (len(ratios) - 1))
                means[f"ratio_{name}"] = float(ratios.kthvalue(rank).values)
            means["ratio_max"] = float(ratios.max())
        return {f"train/{name}": value for name, value in means.items()} | {
            "train/learning_rate": self.rate,
            "train/tokens": float(self.tokens),
            "train/padding_fraction": self.padding / max(1, self.passed),
            "train/masked_out": float(self.left_out),
        }

    def add(self, name: str, value: Tensor | float) -> None:
        """Add a number to the sum of this name."""
        self.sums[name] = self.sums.get(name, 0.0) + value
