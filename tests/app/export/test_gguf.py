"""Ollama's Modelfile writes chats as the model's own template, or leaves the template out."""

import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from conftest import TINY
from reason_llm.app.export import gguf

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
LAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
PARTS = re.compile(
    r'\{\{ range \$i, \$m := \.Messages \}\}\{\{ if eq \$m\.Role "system" \}\}(.*)'
    r'\{\{ else if eq \$m\.Role "assistant" \}\}(.*)\{\{ else if \$i \}\}(.*)\{\{ else \}\}(.*)'
    r"\{\{ end \}\}\{\{ \$m\.Content \}\}\{\{ end \}\}(.*)",
    re.DOTALL,
)


def as_go(template: str, messages: list[dict[str, str]]) -> str:
    """What Go's rules make of it: no dash in its actions, so all text stays."""
    parts = PARTS.fullmatch(template)
    assert parts is not None
    system, answer, later, first, end = parts.groups()
    text = ""
    for number, each in enumerate(messages):
        own = {"system": system, "assistant": answer, "user": later if number else first}
        text += own[each["role"]] + each["content"]
    return text + end


def talk(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} says {n}."} for n, role in enumerate(roles)]


@pytest.mark.parametrize("jinja", [None, CHATML, DEFAULT + CHATML.removeprefix("{{ bos_token }}")])
def test_the_template_is_the_model_s_own(jinja: str | None) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template, tokenizer.bos_token = jinja or tokenizer.chat_template, "<|endoftext|>"
    template = gguf.go_template(tokenizer)
    assert template is not None
    for messages in (
        talk("user"), talk("system", "user"), talk("user", "assistant", "user"),
        talk("system", "user", "assistant", "user", "assistant", "user"),
    ):  # fmt: skip
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert as_go(template, messages) == text.removeprefix("<|endoftext|>")


def test_a_template_of_another_kind_is_left_out() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = LAMA2
    assert gguf.go_template(tokenizer) is None
    ends = [tokenizer.eos_token_id]
    assert gguf.modelfile("x.gguf", tokenizer, ends, "Be brief.", 0.7) == (
        f'FROM ./x.gguf\nSYSTEM """Be brief."""\nPARAMETER stop "{tokenizer.eos_token}"\n'
        "PARAMETER temperature 0.7\n"
    )
