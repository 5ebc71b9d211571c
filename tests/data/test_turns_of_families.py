"""Families of ``renderers``: they are taken where they are proven, and for what they are proven."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import orjson
import pytest

from chat_templates import SHIPPED, of_family, renderer
from reason_llm.data import Messages, Renderer
from reason_llm.data.families import Family
from reason_llm.data.render import _family

FAMILIES = {
    "qwen3": "qwen3", "qwen3_training": "qwen3", "qwen3_instruct_2507": "qwen3",
    "qwen3_5_think": "qwen3.5", "qwen3_5_nothink": "qwen3.5", "qwen3_6": "qwen3.5",
    "qwen3_8": "qwen3.8", "glm4moe": "glm-4.5", "gemma4": "gemma4",
    "nemotron_3_nano": "nemotron-3",
}  # fmt: skip
NONE = ["qwen2_5", "llama3_1", "gemma3", "phi3", "deepseekv3", "lfm2"]
NUMBER, TEXT = {"type": "integer", "description": "a"}, {"type": "string", "description": "b"}
TOOLS = [
    {"type": "function", "function": {
        "name": name, "description": "It.", "parameters": {
            "type": "object", "properties": {"first": NUMBER, "second": TEXT},
            "required": ["first", "second"],
        },
    }}
    for name in ("times", "plus")
]  # fmt: skip
CALLS = [("plus", {"first": 6, "second": "seven"}), ("times", {"first": -2, "second": "a <b> c"})]
ASKED: Messages = [{"role": "user", "content": "What is it?"}]
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in CALLS
    ],
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    _family.cache_clear()


def writes(name: str, tokenizer: Any = None) -> Renderer:
    made = renderer(tokenizer or of_family(name), (SHIPPED / f"{name}.jinja").read_text())
    return replace(made, tools=tuple(TOOLS))


def family(made: Renderer) -> Family | None:
    return _family(made.tokenizer, made.template)


def ids(made: Renderer, talk: Messages, generation: bool = True) -> list[int]:
    return made.token_ids("", made.text("", talk, generation))


@pytest.mark.parametrize(("name", "known"), FAMILIES.items())
def test_turns_are_those_of_the_template(name: str, known: str) -> None:
    made = writes(name)
    found = family(made)
    assert found is not None and found.renderer.config.name == known
    talks: list[tuple[dict[str, Any], Messages]] = [
        ({"role": "assistant", "content": "It is 4."}, [{"role": "user", "content": "No.\nTry."}])
    ]
    for count in (1, 3):
        reply = [
            {"role": "tool", "name": "plus", "content": f"two\nlines {n}"} for n in range(count)
        ]
        talks.append((CALLED | {"tool_calls": CALLED["tool_calls"][:1] * count}, reply))
    for answer, reply in talks:
        (more,) = made.replies([reply], 100)
        assert ids(made, [*ASKED, answer, *reply])[-len(more) :] == more


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read(name: str) -> None:
    made = writes(name)
    asked, whole = made.text("", ASKED), made.text("", [*ASKED, CALLED], False)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
    said = whole[len(list(same)) :]
    assert made.calls("", made.token_ids("", said)) == CALLS
    assert made.calls("", made.token_ids("", "It is 4.")) == []


def test_an_answer_of_open_tags_is_not_searched() -> None:
    made = writes("qwen3")
    call = '<tool_call>\n{"name": "plus", "arguments": {"first": 1}}\n</tool_call>'
    for marks, calls in ((598, [("plus", {"first": 1})]), (599, [None])):
        assert made.calls("", made.token_ids("", "<" * marks + call)) == calls


def test_calls_that_no_one_makes() -> None:
    made = writes("qwen3")
    call = '<tool_call>\n{"name": "plus", "arguments": {"first": 1}}\n</tool_call>'
    thought = f"<think>\nPerhaps {call}\n</think>\n\n"
    broken, unknown = call.replace("}}", ""), call.replace("plus", "minus")
    for text, calls in (
        (f"{thought}No.", []),
        (thought + call, [("plus", {"first": 1})]),
        (call + broken, [("plus", {"first": 1}), None]),
        (call.replace("</tool_call>", ""), [None]),
        (unknown, [("minus", {"first": 1})]),
    ):
        assert made.calls("", made.token_ids("", text)) == calls, text


@pytest.mark.parametrize("name", NONE)
def test_other_templates_are_of_no_family(name: str) -> None:
    assert family(writes(name)) is None


def test_a_changed_template_is_of_no_family() -> None:
    """As a fine-tuned model may have."""
    made = writes("qwen3")
    jinja = made.template.jinja or ""
    for old, new, proven in (
        ("<tool_response>", "<result>", {"user"}),
        ('"arguments": ', '"given": ', {"user"}),
        ("assistant\\n", "model\\n", None),
    ):
        assert old in jinja
        changed = replace(made.template, jinja=jinja.replace(old, new))
        found = family(replace(made, template=changed))
        assert (found and set(found.turns)) == proven
        call = '{"name": "plus", "parameters": {}}'
        assert replace(made, template=changed).calls(call, []) == [("plus", {})]


def test_thinking_may_be_off() -> None:
    made = writes("qwen3")
    template = replace(made.template, arguments=(("enable_thinking", False),))
    off = replace(made, template=template)
    reply = [{"role": "user", "content": "No."}]
    assert family(off) is not None
    (more,) = off.replies([reply], 9)
    assert ids(off, [*ASKED, {"role": "assistant", "content": "It."}, *reply])[-len(more) :] == more
    assert off.tokenizer.decode(more).endswith("</think>\n\n")


def test_gpt_oss_goes_on_from_what_it_wrote() -> None:
    """Its thoughts and last token stay as sampled; a message has the content alone."""
    made = replace(writes("gptoss"), tools=())
    made.tokenizer.add_tokens(["<|message|>", "<|channel|>", "<|return|>"], special_tokens=True)
    final = "<|channel|>final<|message|>4"
    said = f"<|channel|>analysis<|message|>So.<|end|><|start|>assistant{final}"
    sampled = made.token_ids("", f"{said}<|return|>")
    asked = list(made.prompt("", ASKED, "").token_ids)
    reply = [{"role": "user", "content": "No. <|end|>"}]
    more = made.after([*asked, *sampled], reply, 99)
    talk = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "No."}]
    plain = made.after([*asked, *sampled], talk[-1:], 99)
    history = ids(made, talk)
    assert history == [*asked, *made.token_ids("", f"{final}<|end|>"), *plain]
    end = made.tokenizer.convert_tokens_to_ids("<|end|>")
    assert more.count(end) == plain.count(end) == 1
    for text, content in ((said, "4"), ("4", "4"), (said.partition("<|end|>")[0], "")):
        assert made.content_of(text) == content
    assert writes("qwen3").content_of("<think>a</think>b") == "<think>a</think>b"


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    assert family(writes("qwen3")) is None


@pytest.mark.parametrize("name", ["llama3_1", "qwen2_5", "qwen3_5_think", "glm4moe", "gemma4"])
def test_control_tokens_of_a_reply_are_text(name: str) -> None:
    made = writes(name)
    controls = [str(each) for each in made.tokenizer.added_tokens_decoder.values() if each.special]
    special = set(made.tokenizer.convert_tokens_to_ids(controls))
    text = "".join(f'\n"{control}" ' for control in controls)
    (plain,), (more,) = (
        made.replies([[{"role": "tool", "name": "plus", "content": each}]], 9999)
        for each in ("It is.", text)
    )
    assert [each for each in more if each in special] == [each for each in plain if each in special]
    said = made.tokenizer.decode(more)
    in_json = [orjson.dumps(control).decode()[1:-1] for control in controls]
    assert all(a in said or b in said for a, b in zip(controls, in_json, strict=True))
