"""Rollouts of several turns: classes that reply, tools, programs that ask for the turns themselves,
MCP servers and verifiers' tasks. Imported where ``sample.environment`` asks for one."""

from reason_llm.environments.data_side import DataSide as data_side
from reason_llm.environments.task_rows import rows
from reason_llm.environments.turns import open_environments

__all__ = ["data_side", "open_environments", "rows"]
