"""System prompts and chat templates by name, and what a wrong one is told."""

from pathlib import Path
from typing import Any

import pytest

from reason_llm.data.messages import Messages
from reason_llm.data.render import Renderer
from reason_llm.data.templates import ChatTemplate, chat_template, shipped, system_prompt
from reason_llm.errors import ConfigError, DataError, ModelError

ASKED: Messages = [{"role": "user", "content": "Q?"}]
TALK: Messages = [*ASKED, {"role": "assistant", "content": "A."}, {"role": "user", "content": "R?"}]


def test_named_system_prompts() -> None:
    assert "<answer>" in str(system_prompt("auto", "think_answer_tags"))
    assert "\\boxed{}" in str(system_prompt("auto", "boxed"))
    assert "```python" in str(system_prompt("auto", "code_tests"))
    assert system_prompt("auto", "a_reward_of_my_own") is None
    assert system_prompt("none", "boxed") is None
    assert system_prompt("Be brief.", "boxed") == "Be brief."
    with pytest.raises(ConfigError, match=r"data\.system_prompt='boxd' .* did you mean boxed\?"):
        system_prompt("boxd", "boxed")


def test_what_is_shipped_is_whole() -> None:
    templates = shipped()
    assert set(templates["system_prompt_of_reward"].values()) <= set(templates["system_prompts"])
    for text in templates["system_prompts"].values():
        assert text is None or text == " ".join(text.split())


def rendered(tokenizer: Any, name: str, messages: Messages, system: str | None = None) -> str:
    renderer = Renderer(tokenizer, chat_template(name, "m", False), system)
    return renderer.prompt("rows.jsonl:1", messages, "").text


def test_arguments_go_to_whichever_template() -> None:
    for name in ("auto", "plain_chat"):
        made = chat_template(name, "m", True, {"enable_thinking": False, "a": 1})
        assert made.arguments == (("a", 1), ("enable_thinking", False))


def test_plain_chat(tokenizer: Any) -> None:
    eos = tokenizer.eos_token
    assert rendered(tokenizer, "plain_chat", ASKED) == "User: Q?\n\nAssistant:"
    assert rendered(tokenizer, "plain_chat", TALK, "Be brief.") == (
        f"Be brief.\n\nUser: Q?\n\nAssistant: A.{eos}\n\nUser: R?\n\nAssistant:"
    )


def test_r1_zero_asks_for_the_form_that_the_system_prompt_names(tokenizer: Any) -> None:
    plain = rendered(tokenizer, "r1_zero", ASKED)
    assert plain.startswith("A user asks")
    assert plain.endswith("<answer> and </answer>.\n\nUser: Q?\n\nAssistant:")
    boxed = rendered(tokenizer, "r1_zero", ASKED, system_prompt("boxed", ""))
    assert boxed.endswith(
        "the answer. Reason step by step, and put your final answer within \\boxed{}."
        "\n\nUser: Q?\n\nAssistant:"
    )
    assert "<answer>" not in boxed


def test_question_only(tokenizer: Any) -> None:
    assert rendered(tokenizer, "question_only", ASKED, "Be brief.") == "Be brief.\n\nQ?\n\n"


def test_a_model_without_a_template_gets_one_only_when_asked() -> None:
    with pytest.raises(ModelError, match=r"no chat template; .* data\.template .*r1_zero"):
        chat_template("auto", "my_model", model_has_one=False)
    assert chat_template("auto", "my_model", model_has_one=True).jinja is None
    with pytest.raises(ConfigError, match=r"data\.template='r1zero' .* did you mean r1_zero\?"):
        chat_template("r1zero", "my_model", model_has_one=True)


def test_a_template_of_my_own(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert rendered(tokenizer, str(path), TALK) == "[Q?][A.][R?]"
    path.write_text("[\n{% for m in messages %}\n]")
    with pytest.raises(ConfigError, match=r"mine\.jinja, line 3: .*endfor.*; fix") as caught:
        rendered(tokenizer, str(path), ASKED)
    assert "\n" not in str(caught.value)
    for text, named in (
        ("{{ raise_exception('no\x1b[2J way') }}", "mine.jinja fails on it"),
        ("{{ messages.content.x }}", "mine.jinja fails on it"),
        ("{{ 1 + 'a' }}", "mine.jinja fails on it"),
        ("{{ 1 / 0 }}", "mine.jinja fails on it"),
        ("{# nothing #}", "writes no text for it"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{named}") as wrong:
            rendered(tokenizer, str(path), ASKED)
        assert "\n" not in str(wrong.value)
    path.write_text("{% if effort not in ['low'] %}{{ raise_exception('effort?') }}{% endif %}")
    fixes = "set data.template_arguments .*, or take another data.template .* system message"
    with pytest.raises(DataError, match=rf"fails on it \(effort\?\); fix the row, {fixes}"):
        rendered(tokenizer, str(path), ASKED)
    for content in (b"", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"mine\.jinja"):
            rendered(tokenizer, str(path), ASKED)
    with pytest.raises(ConfigError, match=r"none\.jinja cannot be read"):
        chat_template("none.jinja", "m", True)


def test_the_models_own_template_is_the_default(tokenizer: Any) -> None:
    own = Renderer(tokenizer, ChatTemplate("its own", None), None)
    assert own.prompt("x", ASKED, "").text.startswith("<|im_start|>user\nQ?")
