"""Rollouts of several turns: classes that reply, tools, programs that ask for the turns themselves,
MCP servers and verifiers' tasks. Imported where ``sample.environment`` asks for one."""

from reason_llm.environments.turns import open_environments

__all__ = ["open_environments"]
