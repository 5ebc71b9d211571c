"""What a person sees and types."""

from reason_llm.app.chat import Chat, find_subject, options_of
from reason_llm.app.chat_terminal import ChatTerminal
from reason_llm.app.console import Console
from reason_llm.app.data_check import check_data
from reason_llm.app.training import run_training

__all__ = [
    "Chat",
    "ChatTerminal",
    "Console",
    "check_data",
    "find_subject",
    "options_of",
    "run_training",
]
