"""Prompts from data files and Hub sets."""

from reason_llm.data.box import BOX, has_box, last_boxed
from reason_llm.data.code_cases import (
    AssertTests,
    CallTests,
    ProgramTests,
    Tests,
    read_tests,
    same_output,
    same_value,
)
from reason_llm.data.forms import Messages
from reason_llm.data.load import Data, LoadedSet, load_data, load_evaluation
from reason_llm.data.render import Renderer, order
from reason_llm.data.templates import chat_template, system_prompt
from reason_llm.data.time_limit import within

__all__ = [
    "BOX",
    "AssertTests",
    "CallTests",
    "Data",
    "LoadedSet",
    "Messages",
    "ProgramTests",
    "Renderer",
    "Tests",
    "chat_template",
    "has_box",
    "last_boxed",
    "load_data",
    "load_evaluation",
    "order",
    "read_tests",
    "same_output",
    "same_value",
    "system_prompt",
    "within",
]
