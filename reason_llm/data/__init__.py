"""Prompts and rows to learn from, out of data files and Hub sets."""

from reason_llm.data.conditioning import Conditioning, read as read_conditioning
from reason_llm.data.forms import Messages
from reason_llm.data.load import load_data, load_evaluation, renderer_of
from reason_llm.data.own_code import load_function, place_of
from reason_llm.data.render import Renderer, order
from reason_llm.data.sets import Data, DataSet
from reason_llm.data.templates import chat_template, system_prompt
from reason_llm.data.time_limit import within
from reason_llm.data.token_rows import check_ends, prompt_tokens, tokenizer_digest

__all__ = [
    "Conditioning",
    "Data",
    "DataSet",
    "Messages",
    "Renderer",
    "chat_template",
    "check_ends",
    "load_data",
    "load_evaluation",
    "load_function",
    "order",
    "place_of",
    "prompt_tokens",
    "read_conditioning",
    "renderer_of",
    "system_prompt",
    "tokenizer_digest",
    "within",
]
