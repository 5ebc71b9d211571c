"""reason_llm: a single-GPU, memory-frugal, serialized RL fine-tuner for language models.

    summary = reason_llm.train("configs/quickstart.yaml")

Importing this package, or ``reason_llm.config``, loads neither torch nor transformers.
"""

import importlib
import logging
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reason_llm.app import api
    from reason_llm.config import Config
    from reason_llm.rollout import Completion, Group, Prompt
    from reason_llm.run import Silent, Watch

    Summary = api.Summary
    evaluate, export, load_config, train = api.evaluate, api.export, api.load_config, api.train

# Read when torch is loaded. OpenMP's threads wait for each other spinning; by GNU's default so long
# that a step on the CPU takes many times as long where anything else uses the cores.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# It names a faster kernel for some CPUs, as a warning, whenever it is imported there.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Config",
    "Group",
    "Prompt",
    "Silent",
    "Summary",
    "Watch",
    "evaluate",
    "export",
    "load_config",
    "train",
]
_HOMES = {
    "app.api": {"Summary", "evaluate", "export", "load_config", "train"},
    "config": {"Config"},
    "rollout": {"Completion", "Group", "Prompt"},
    "run": {"Silent", "Watch"},
}


def __getattr__(name: str) -> Any:
    """A public name, on its first use."""
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(f"reason_llm.{home}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package, in which the functions ``train`` and ``evaluate`` win over the folders of the
    same names, which importing them would set as attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
