"""Memory plan: bytes of each phase, before a weight is read. What needs PyTorch is imported on its
first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reason_llm.model.plan import bound
from reason_llm.model.plan.bound import OutsideModel
from reason_llm.model.plan.machine import GIB, Machine
from reason_llm.model.plan.memory import READ_TOKENS, STEPPED_AT_ONCE, UPDATE_BYTES, Plan
from reason_llm.model.plan.shape import Shape
from reason_llm.model.plan.team_sizes import TeamSizes
from reason_llm.model.plan.unread import (
    context_limit,
    naming_section,
    outside_models,
    plan_only,
)

if TYPE_CHECKING:
    from reason_llm.model.plan.meter import Meter, peak_rss_mib
    from reason_llm.model.plan.subject import Subject, look_at, with_start

_HOMES = {
    **dict.fromkeys(("Meter", "peak_rss_mib"), "meter"),
    **dict.fromkeys(("Subject", "look_at", "with_start"), "subject"),
}


def __getattr__(name: str) -> Any:
    """A name of another module, on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return globals()[name]
