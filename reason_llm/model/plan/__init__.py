"""Memory plan: bytes of each phase, before a weight is read."""

from reason_llm.model.plan import bound
from reason_llm.model.plan.bound import OutsideModel
from reason_llm.model.plan.machine import GIB, Machine
from reason_llm.model.plan.memory import (
    READ_TOKENS,
    STEPPED_AT_ONCE,
    UPDATE_BYTES,
    Plan,
    element_bytes,
)
from reason_llm.model.plan.meter import Meter, peak_rss_mib
from reason_llm.model.plan.shape import Shape
from reason_llm.model.plan.subject import Subject, look_at, plan_only, with_start

__all__ = [
    "GIB",
    "READ_TOKENS",
    "STEPPED_AT_ONCE",
    "UPDATE_BYTES",
    "Machine",
    "Meter",
    "OutsideModel",
    "Plan",
    "Shape",
    "Subject",
    "bound",
    "element_bytes",
    "look_at",
    "peak_rss_mib",
    "plan_only",
    "with_start",
]
