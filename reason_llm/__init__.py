"""reason_llm: a single-GPU, memory-frugal, serialized RL fine-tuner for language models.

    summary = reason_llm.train("configs/quickstart.yaml")

Importing this package, or ``reason_llm.config``, loads neither torch nor transformers: the public
names are looked up when they are used.
"""

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


def __getattr__(name: str) -> Any:
    """A public name, on its first use."""
    if name in ("Summary", "evaluate", "export", "load_config", "train"):
        from reason_llm.app import api

        home: ModuleType = api
    elif name == "Config":
        from reason_llm import config

        home = config
    elif name in ("Completion", "Group", "Prompt"):
        from reason_llm import rollout

        home = rollout
    elif name in ("Silent", "Watch"):
        from reason_llm import run

        home = run
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package, in which the functions ``train`` and ``evaluate`` win over the folders of the
    same names: importing a folder sets it as an attribute of its package. ``from reason_llm.train
    import ...`` finds the folder as ever."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
