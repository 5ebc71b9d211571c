"""Rollouts of several turns: classes that reply, tools, programs that ask for the turns themselves,
MCP servers and verifiers' tasks. ``reason_llm/data/played.py`` names the modules that others
import, when a config, a source of rows or a record asks for one."""
