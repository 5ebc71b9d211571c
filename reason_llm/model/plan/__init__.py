"""Memory plan: bytes of each phase, before a weight is read."""

from reason_llm.model.plan.machine import GIB, Machine
from reason_llm.model.plan.memory import Plan
from reason_llm.model.plan.meter import Meter, peak_rss_mib
from reason_llm.model.plan.shape import Shape

__all__ = [
    "GIB",
    "Machine",
    "Meter",
    "Plan",
    "Shape",
    "peak_rss_mib",
]
