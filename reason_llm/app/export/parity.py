"""Parity check of an exported model: its log-probs of rollouts, and those of base plus adapter.

Transformers and PEFT load both, not the code that merged. In float32 any difference is rounding. In
bfloat16 an update smaller than half a unit in a weight's last place is lost, so a second measure is
how far the export lies on the way back from the policy to the base."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reason_llm.errors import ModelError, one_line
from reason_llm.files import Panic, without_panics
from reason_llm.model import Datum, adapters, base as base_model, default_device, share_of_base

LARGEST = {torch.float32: 1e-4, torch.bfloat16: 2.0}
MEAN = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Largest and mean difference of a log-prob, in nats, that rounding explains. Measured on a random
model of 200 M: 2e-5 and 3e-6 in float32, 0.15 and 0.03 in bfloat16. What is learned is often less
than that, so there ``MAX_LOST_FRACTION`` is the sharper test."""
LARGEST_OF_SCORES = {torch.float32: 1e-3, torch.bfloat16: 0.3}
MEAN_OF_SCORES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest and mean difference of a score that rounding explains, in deviations of the scores.
Measured on model/tiny: 2e-6 in float32 and 0.03 in bfloat16."""
MAX_LOST_FRACTION = 0.5
"""Largest part of the learned change that an export may lose, or exaggerate."""
MAX_STRAYED_NATS = 0.5
"""Largest mean fall of a rollout token's log-prob since it was sampled, in nats; the steps since
then change it by hundredths, a wrong base by whole nats."""
MAX_ROLLOUTS, MAX_TOKENS = 32, 16384


@dataclass(frozen=True, slots=True)
class Gap:
    """Difference of two models' log-probs on the same tokens, in nats."""

    tokens: int
    largest: float
    mean: float

    @classmethod
    def between(cls, ours_N: Tensor, theirs_N: Tensor) -> "Gap":
        """Gap between two vectors of log-probs."""
        difference_N = (ours_N - theirs_N).abs()
        return cls(len(ours_N), float(difference_N.max()), float(difference_N.mean()))

    def __str__(self) -> str:
        return f"max {self.largest:.2g}, mean {self.mean:.2g} nats over {self.tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class Parity:
    """Result of the check."""

    gap: Gap
    """Between the export and the base with its adapter."""
    learned: Gap
    """Between the base with its adapter and the base alone: the learned change."""
    lost: float
    """Part of what was learned that the export lacks: 0 for none, 1 for the base itself, 2 for an
    adapter of the wrong sign, -1 for one of twice the scale."""
    lost_error: float
    """Standard error of ``lost``; infinite where nothing was learned."""
    strayed: float | None
    """Mean fall of a rollout token's log-prob since it was sampled, in nats: an estimate of the KL
    from the sampling policy. None where log-probs were not recorded."""

    @property
    def tells_a_wrong_merge(self) -> bool:
        """Whether ``check`` would refuse an export without the adapter by ``lost``."""
        return 1 - 4 * self.lost_error > MAX_LOST_FRACTION

    def check(self, dtype: torch.dtype) -> None:
        """Raises a ModelError if rounding to ``dtype`` does not explain the gap."""
        if self.strayed is not None and not self.strayed <= MAX_STRAYED_NATS:
            raise ModelError(
                f"the rollouts' tokens are {self.strayed:.2g} nats less likely under the export "
                f"than when they were sampled (at most {MAX_STRAYED_NATS:g}); nothing was written; "
                "check that --base is what the adapter was trained on"
            )
        if not (self.gap.largest <= LARGEST[dtype] and self.gap.mean <= MEAN[dtype]):
            raise ModelError(
                f"the export is not base plus adapter: {self.gap} (at most "
                f"{LARGEST[dtype]:g} and {MEAN[dtype]:g} is rounding); nothing was written; check "
                "that --base is what the adapter was trained on"
            )
        if abs(self.lost) - 4 * self.lost_error > MAX_LOST_FRACTION:
            raise ModelError(
                f"the export has lost {self.lost:.0%} of what was learned (+- "
                f"{self.lost_error:.0%}; its updates may be too small for {str(dtype)[6:]}, or the "
                "merge is wrong); nothing was written; take --dtype float32 or --adapter-only"
            )


@dataclass(frozen=True, slots=True)
class ScoreParity:
    """Result of the check of scores: their differences, and their standard deviation."""

    rows: int
    largest: float
    mean: float
    spread: float

    @property
    def gap(self) -> str:
        """The numbers in words."""
        return (
            f"max {self.largest:.2g}, mean {self.mean:.2g} over {self.rows} rows, whose scores "
            f"have a deviation of {self.spread:.3g}"
        )

    def check(self, dtype: torch.dtype) -> None:
        """Raises a ModelError if rounding to ``dtype`` does not explain the difference."""
        largest, mean = LARGEST_OF_SCORES[dtype], MEAN_OF_SCORES[dtype]
        unit = max(self.spread, 1e-3)
        if not (self.largest <= largest * unit and self.mean <= mean * unit):
            raise ModelError(
                f"the export does not score as base, adapter and head do: {self.gap} (at most "
                f"{largest:g} and {mean:g} deviations are rounding); nothing was "
                "written; check that --base is what it was trained on, or take --dtype float32"
            )


@contextmanager
def fitting() -> Iterator[None]:
    """Turn out of memory on the GPU into a ModelError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "the parity check does not fit on the GPU; set CUDA_VISIBLE_DEVICES='' to check on the "
            "CPU"
        ) from error


@fitting()
def check_parity(
    base: Path,
    adapter: Path,
    exported: Path,
    rollouts: Sequence[Datum],
    dtype: torch.dtype,
    temperature: float,
) -> Parity:
    """Gaps between base, base plus adapter, and export on rollouts sampled at this temperature.
    Raises a ModelError if a model cannot be loaded or does not fit; it does not check the gaps."""
    model = load(base, dtype)
    base_N = logprobs(model, rollouts, temperature)
    policy = policy_over(model, adapter, dtype)
    policy_N = logprobs(policy, rollouts, temperature)
    del policy, model  # one model at a time
    exported_N = logprobs(load(exported, dtype), rollouts, temperature)
    lost, error = share_of_base(policy_N, base_N, exported_N)
    key = "sampler_logprobs"
    recorded = [rollout.on_trained(key) for rollout in rollouts if key in rollout.columns]
    recorded_N = torch.cat(recorded) if recorded else torch.empty(0)
    return Parity(
        gap=Gap.between(exported_N, policy_N),
        learned=Gap.between(policy_N, base_N),
        lost=lost if math.isfinite(error) else 0.0,
        lost_error=error,
        strayed=float((recorded_N - exported_N).mean()) if len(recorded_N) else None,
    )


def policy_over(model: Any, adapter: Path, dtype: torch.dtype) -> Any:
    """The base with the adapter, or the whole model that is in its folder."""
    if (adapter / adapters.CONFIG).is_file():
        return adapters.over(model, adapter)
    return load(adapter, dtype)


def load(path: Path, dtype: torch.dtype, kind: Any = None) -> Any:
    """A model loaded by Transformers' class ``kind``, by default the one that loads all of it."""
    try:
        loader, devices = kind or base_model.auto_class(str(path)), {"": default_device()}
        safety = {"use_safetensors": True, "trust_remote_code": False}
        return loader.from_pretrained(path, dtype=dtype, device_map=devices, **safety).eval()
    except torch.OutOfMemoryError:
        raise  # a RuntimeError, too
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be loaded ({one_line(error)[:300]}); fix it") from error


@torch.no_grad()
def logprobs(model: Any, rollouts: Sequence[Datum], temperature: float) -> Tensor:
    """Log-probs (N,) in nats of all completions' tokens, float32, on the CPU."""
    logprobs_of_rows = []
    for rollout in rollouts:
        ids_T = torch.tensor(rollout.ids, device=model.device)
        trained_T = torch.tensor(rollout.trained, device=model.device)
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1][trained_T[1:]]
        logprobs_TV = (logits_TV.float() / temperature).log_softmax(-1)
        logprobs_of_rows.append(logprobs_TV.gather(-1, ids_T[trained_T][:, None])[:, 0].cpu())
    return torch.cat(logprobs_of_rows)


def chosen(rollouts: Sequence[Datum], vocabulary: int) -> list[Datum]:
    """An even sample of the rollouts, within the limits of the check."""
    step = max(1, len(rollouts) // MAX_ROLLOUTS)
    selected: list[Datum] = []
    tokens = 0
    for rollout in rollouts[::step][:MAX_ROLLOUTS]:
        tokens += rollout.num_tokens
        if selected and tokens > MAX_TOKENS:
            break
        selected.append(rollout)
    highest = max(int(rollout.ids.max()) for rollout in selected)
    if highest >= vocabulary:
        raise ModelError(
            f"the rollouts hold token {highest} and the model knows {vocabulary}: check that "
            "--base is what the adapter was trained on"
        )
    return selected


@torch.no_grad()
@fitting()
def sampled(base: Path, adapter: Path, tokenizer: Any, dtype: torch.dtype) -> list[Datum]:
    """Rollouts for a run that kept none: continuations sampled from base plus adapter."""
    model = policy_over(load(base, dtype), adapter, dtype)
    torch.manual_seed(0)
    rollouts = []
    for text in ("What is 3 + 4?", "Let us think step by step.", "The answer is", "def add(a, b):"):
        try:
            with without_panics():
                ids = tokenizer.encode(text, add_special_tokens=False)
        except Panic as error:
            raise ModelError(f"{base}: its tokenizer fails on {text!r} ({error})") from error
        drawn = model.generate(
            input_ids=torch.tensor([ids], device=model.device),
            do_sample=True,
            max_new_tokens=32,
            num_return_sequences=4,
            pad_token_id=tokenizer.eos_token_id,
            top_k=0,
            top_p=1.0,
        )
        rollouts += [Datum.of(ids, row[len(ids) :], text) for row in drawn.tolist()]
    return rollouts
