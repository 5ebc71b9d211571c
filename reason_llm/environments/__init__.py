"""Rollouts of several turns: classes that reply, tools, programs that ask for the turns themselves,
MCP servers and verifiers' tasks. Imported where ``sample.environment`` asks for one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reason_llm.environments.data_side import DataSide as data_side
from reason_llm.environments.task_rows import rows

if TYPE_CHECKING:
    from reason_llm.environments.turns import open_environments

__all__ = ["data_side", "open_environments", "rows"]


def __getattr__(name: str) -> Any:
    """``open_environments``, whose module imports PyTorch, on its first use."""
    if name != "open_environments":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.turns").open_environments
