"""What torch allocates on the CPU, byte by byte, from the profiler's own events."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocated(call: Callable[[], Any]) -> int:
    """The most bytes that existed at once during ``call``, beyond those before it."""
    gc.collect()  # what earlier tests left must not be freed, and counted, in the middle
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            call()
    finally:
        gc.enable()
    held = peak = 0
    results: Any = found.profiler.kineto_results  # type: ignore[union-attr]
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            peak = max(peak, held)
    return peak
