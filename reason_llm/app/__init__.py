"""The user interface: console, report, chat, export. Nothing below imports it."""
