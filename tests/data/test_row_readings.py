"""What a row says besides its text is read, named as ignored, or refused."""

import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from reason_llm.app.data_check import check_data
from reason_llm.config import Config
from reason_llm.config.data import ColumnsSection
from reason_llm.data import Data, load_data
from reason_llm.data.choices import COUNTED
from reason_llm.data.forms import (
    TemplateExtras,
    read_demonstration,
    read_document,
    read_labelled,
    read_preference,
    read_problem,
)
from reason_llm.data.rows import READERS
from reason_llm.errors import DataError
from stages import OF_FORM

COLUMNS = ColumnsSection()
U, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
R, B = {"role": "user", "content": "R"}, {"role": "assistant", "content": "B"}
S = {"role": "system", "content": "S"}
TOOL = {
    "type": "function",
    "function": {"name": "tide", "parameters": {"properties": {"port": {}}}},
}
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}


def problem(row: dict[str, Any], **columns: Any) -> Any:
    return read_problem("x:1", row, ColumnsSection(**columns))


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# --- what joins the prompt


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"system": "S", "question": "Q"}, [S, U]),
        ({"system_prompt": "S", "messages": [U]}, [S, U]),
        ({"system": "S", "messages": [S, U]}, [S, U]),
        ({"system": None, "question": "Q"}, [U]),
        ({"system": " ", "question": "Q"}, [U]),
        ({"messages": [{"role": "system", "content": None}, U]}, [U]),
        ({"messages": [{"role": "system", "content": ""}, U]},
         [{"role": "system", "content": ""}, U]),
        ({"messages": [{"role": "developer", "content": "S"}, U]},
         [{"role": "developer", "content": "S"}, U]),
        ({"instruction": "Q", "input": "R"}, [asked("Q\n\nR")]),
        ({"instruction": "Q", "input": ""}, [U]),
        ({"question": "Q", "context": "R"}, [asked("Q\n\nR")]),
        ({"question": "Q holds R", "context": "R"}, [asked("Q holds R")]),
        ({"question": "Q", "passage": "R"}, [asked("R\n\nQ")]),
        ({"Question": "Q", "Body": "R"}, [asked("R\n\nQ")]),
        ({"question": "Q", "article": "R", "input": "S"}, [asked("R\n\nQ\n\nS")]),
        ({"prompt": "Q", "starter_code": "def f():\n"},
         [asked("Q\n\nStart from this code:\n\n```python\ndef f():\n```")]),
        ({"messages": json.dumps([S, U])}, [S, U]),
        ({"messages": {"role": ["system", "user"], "content": ["S", "Q"]}}, [S, U]),
        ({" Question ": "Q"}, [U]),
        ({"": 0, "question": "Q"}, [U]),
        ({"prompt": ["Q"]}, [U]),
        ({"prompt": '["Q"]'}, [U]),
        ({"prompt": json.dumps(json.dumps([S, U]))}, [S, U]),
        ({"question": "Q", "premise": "R"}, [asked("R\n\nQ")]),
        ({"instruction": "Q", "input": "<noinput>"}, [U]),
        ({"prompt": json.dumps([U])}, [U]),
        ({"prompt": '[1, 2] or {"a": 3}?'}, [asked('[1, 2] or {"a": 3}?')]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]}, [U]),
        ({"messages": [{**U, "name": "anna"}]}, [{**U, "name": "anna"}]),
        ({"messages": None, "question": "Q"}, [U]),
        ({"problem": "Q", "messages": [U, A]}, [U]),
        ({"conversations": [{"from": "human", "value": "Q"}]}, [U]),
        ({"question": "R", "prompt": [S, U]}, [S, U]),
        ({"question": "R", "prompt": json.dumps([S, U])}, [S, U]),
        ({"question": "Q", "prompt": [U, A]}, [U]),
        ({"question": "Q", "prompt": None}, [U]),
    ],
)  # fmt: skip
def test_a_prompt_with_all_that_belongs_to_it(row: dict, messages: list) -> None:
    assert problem({**row, "answer": "1"}).messages == messages


def test_a_second_prompt_that_is_not_read_is_named() -> None:
    """Of two texts, the question is asked; TRL would take the prompt."""
    row = {"question": "What is 2 + 3?", "prompt": "Use XML. What is 2 + 3?", "answer": "5"}
    assert "column 'prompt' is not read" in problem(row).doubt
    assert "set data.columns.prompt" in problem(row).doubt
    assert not problem({**row, "prompt": row["question"]}).doubt
    assert not problem({**row, "prompt": " "}).doubt
    for columns in (ColumnsSection(prompt="question"), ColumnsSection(ignore=["prompt"])):
        assert not read_problem("f:1", row, columns).doubt


def test_an_input_joins_the_prompt_of_every_form() -> None:
    pair = {"instruction": "Q", "input": "R", "system": "S"}
    for read, row in (
        (read_demonstration, {"output": "A"}),
        (read_preference, {"chosen": "A", "rejected": "B"}),
        (read_labelled, {"response": "A", "label": True}),
    ):
        assert read("x", pair | row, COLUMNS).messages == [S, asked("Q\n\nR")]


def test_a_conversation_with_a_rejected_answer() -> None:
    found = read_preference("x", {"messages": [S, U, A], "rejected_response": "B"}, COLUMNS)
    assert (found.messages, found.completions) == ([S, U], ([A], [B]))
    assert found.origin == (
        "chosen is the last message of column 'messages', rejected is column 'rejected_response', "
        "the prompt is column 'messages'"
    )


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [S, U, B, R, A], "label": False}, [S, U, B, R]),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
          "kto_tag": False}, [U]),
        ({"prompt": "Q", "completion": "A", "kto_tag": False}, [U]),
    ],
)  # fmt: skip
def test_the_last_answer_of_a_conversation_is_judged(row: dict, messages: list) -> None:
    found = read_labelled("x", row, COLUMNS)
    assert (found.messages, found.completions, found.value) == (messages, ([A],), -1.0)
    assert found.ignored == ()


def test_rows_with_another_label_are_not_sent_to_sft(
    tmp_path: Path, load: Callable[..., Data]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Q", "completion": "A", "is_good": False}))
    with pytest.raises(DataError, match=r"lacks any of the columns 'label', .*; make such col"):
        load(path, data__form="labels", **OF_FORM["labels"])


def test_a_column_that_is_ignored_on_purpose_is_not_named() -> None:
    row = {"q": "Q", "images": ["x"], "answer": "1"}
    found = problem(row, prompt="q", ignore=["Images"])
    assert (found.answer, found.ignored) == ("1", ())


# --- choices


PICK = (
    "Which is a metal?\n\nA. Wood\nB. Tin\nC. Wool\n\nAnswer with the letter of the right choice."
)
TEXTS = ["Wood", "Tin", "Wool"]


@pytest.mark.parametrize(
    "row",
    [
        {"choices": TEXTS, "answer": 1},
        {"choices": TEXTS, "answer": "1"},
        {"choices": TEXTS, "answer": "B"},
        {"choices": TEXTS, "answer": "(b)"},
        {"choices": TEXTS, "answer": "Tin"},
        {"choices": json.dumps(TEXTS), "answer": "B"},
        {"options": ["A) Wood", "B) Tin", "C) Wool"], "answer": "B"},
        {"options": {"A": "Wood", "B": "Tin", "C": "Wool"}, "answer": "B"},
        {"choices": {"text": TEXTS, "label": ["A", "B", "C"]}, "answerKey": "B"},
        {"choices": [{"label": a, "text": b} for a, b in zip("ABC", TEXTS, strict=True)],
         "answerKey": "B"},
        {"endings": TEXTS, "answer": "1"},
        {"A": "Wood", "B": "Tin", "C": "Wool", "answer": "B"},
        {"opa": "Wood", "opb": "Tin", "opc": "Wool", "answer": 1},
        {"option1": "Wood", "option2": "Tin", "option3": "Wool", "answer": "B"},
        {"option1": "Wood", "option2": "Tin", "option3": "Wool", "answer": "2"},
        {"option_1": "Wood", "option_2": "Tin", "option_3": "Wool", "answer": 2},
        {"Option A": "Wood", "Option B": "Tin", "Option C": "Wool", "answer": "b"},
        {"choice1": "Wood", "choice2": "Tin", "choice3": "Wool", "answer": 2},
        {"ending0": "Wood", "ending1": "Tin", "ending2": "Wool", "answer": 1},
        {"answerA": "Wood", "answerB": "Tin", "answerC": "Wool", "answer": "B"},
        {"options": ["(a) Wood", "(b) Tin", "(c) Wool"], "answer": "(b) tin"},
        {"options": TEXTS, "answer": "B. Tin"},
        {"options": TEXTS, "answer": 1.0},
        {"choice1": "Wood", "choice2": "Tin", "choice3": "Wool", "label": 1},
        {"sol1": "Wood", "sol2": "Tin", "sol3": "Wool", "label": 1},
        {"endings": TEXTS, "label": "1"},
    ],
)  # fmt: skip
def test_choices_are_written_and_the_gold_answer_is_a_letter(row: dict) -> None:
    found = problem({"question": "Which is a metal?", **row})
    assert (found.messages, found.answer, found.ignored) == ([asked(PICK)], "B", ())


def test_wrong_choices_alone_are_refused() -> None:
    row = {"question": "Q", "answer": "Tin", "distractor1": "Wood"}
    with pytest.raises(DataError, match="'distractor1' is 'Wood', a wrong choice, and no column"):
        problem(row)
    assert problem(row, ignore=["distractor1"]).answer == "Tin"


def test_labels_of_the_row_are_kept() -> None:
    choices = {"text": TEXTS, "label": ["1", "2", "3"]}
    found = problem({"question": "Q", "choices": choices, "answerKey": "2"})
    assert "2. Tin" in found.messages[0]["content"]
    assert "Answer with the number of the right choice." in found.messages[0]["content"]
    assert found.answer == "2"
    texts = [f"{number}. {text}" for number, text in enumerate(TEXTS, start=1)]
    found = problem({"question": "Q", "choices": texts, "answer": 2})
    assert found.messages[0]["content"].count("2") == 1
    assert (found.answer, found.doubt) == ("2", COUNTED.format(1))
    assert problem({"question": "Q", "choices": ["1.5", "2.5"], "answer": "B"}).answer == "B"


@pytest.mark.parametrize(
    ("choices", "times"),
    [
        ("(A) Wood (B) Tin (C) Wool", 1),
        ("\nA) Wood\nB) Tin\nC) Wool", 1),
        ("\n**A.** Wood\n**B.** Tin\n**C.** Wool", 1),
        ("Wood, Tin or Wool?", 2),
    ],
)
def test_choices_with_labels_in_the_question_are_not_written_again(
    choices: str, times: int
) -> None:
    question = f"Which is a metal? {choices}"
    found = problem({"question": question, "choices": TEXTS, "answer": 1})
    assert found.messages[0]["content"].count("Tin") == times


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"choices": TEXTS, "answer": 3}, "the gold answer 3 is not one of the choices A, B, C"),
        (
            {"option1": "Wood", "option2": "Tin", "answer": 0},
            "the gold answer 0 is neither the number of a choice, from 1 on",
        ),
        ({"choices": TEXTS, "answer": -1}, "the gold answer -1 is not one of the choices"),
        (
            {"choices": ["4", "2", "1", "3"], "answer": 2},
            "the gold answer 2 could be any of the choices B, C; write the letter into the row",
        ),
        ({"choices": "Wood or Tin", "answer": "B"}, "column 'choices' is 'Wood or Tin'; expected"),
        ({"choices": ["Wood"], "answer": 0}, r"column 'choices' is \['Wood'\]; expected a list"),
    ],
)
def test_choices_that_cannot_be_read(row: dict, named: str) -> None:
    with pytest.raises(DataError, match=rf"^x:1: {named}"):
        problem({"question": "Q", **row})


def test_choices_that_a_conversation_lacks_are_refused() -> None:
    with pytest.raises(DataError, match="the row has choices, which the conversation does not"):
        read_demonstration("x", {"messages": [U, A], "choices": TEXTS}, COLUMNS)
    written = [asked("Wood, Tin or Wool?"), A]
    assert read_demonstration("x", {"messages": written, "choices": TEXTS}, COLUMNS).ignored == ()


# --- tools and template arguments


def test_tools_that_are_no_json_are_refused() -> None:
    with pytest.raises(DataError, match=r"^x:1: column 'tools' is 'get_tide'; expected"):
        problem({"question": "Q", "answer": "1", "tools": "get_tide"})
    assert problem({"question": "Q", "answer": "1", "tools": "[]"}).extras.tools == ()
    assert problem({"question": "Q", "answer": "1", "tools": "null"}).extras.tools == ()


@pytest.mark.parametrize(
    "tools",
    [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]], TOOL,
     [{**TOOL, "function": {**TOOL["function"], "strict": None}}]],
)  # fmt: skip
def test_tools_reach_the_template(tools: Any) -> None:
    for found in (
        problem({"prompt": "Q", "answer": "1", "tools": tools}),
        read_demonstration("x", {"messages": [U, A], "tools": tools}, COLUMNS),
        read_preference("x", {"prompt": "Q", "chosen": "A", "rejected": "B", "tools": tools},
                        COLUMNS),
    ):  # fmt: skip
        assert found.extras == TemplateExtras((TOOL,))


def test_tools_that_the_system_message_lists_are_not_written_twice() -> None:
    listed = {"role": "system", "content": f"Tools: {json.dumps(TOOL)}"}
    row = {"messages": [listed, U, A], "tools": [TOOL]}
    assert read_demonstration("x", row, COLUMNS).extras == TemplateExtras()


def test_a_row_s_template_arguments() -> None:
    row = {"messages": [U, A], "chat_template_kwargs": {"enable_thinking": False, "x": None}}
    found = read_demonstration("x", row, COLUMNS)
    assert found.extras == TemplateExtras((), {"enable_thinking": False})
    with pytest.raises(DataError, match="expected an object of the chat template's arguments"):
        read_demonstration("x", row | {"chat_template_kwargs": {"tokenize": True}}, COLUMNS)


def test_a_template_argument_that_the_template_does_not_read_is_named(
    tmp_path: Path, load: Callable[..., Data]
) -> None:
    path, template = tmp_path / "rows.jsonl", tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking %}Think.{% endif %}{% if add_generation_prompt %}A:{% endif %}"
    )
    row = {"prompt": "Q", "answer": "1", "chat_template_kwargs": {"enable_thinkin": True}}
    path.write_text(json.dumps(row))
    (note,) = load(path, data__template=str(template)).notes()
    assert "the template argument enable_thinkin (1 row)" in note


@pytest.mark.parametrize(
    "calls",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": [{"function": {"name": "tide", "arguments": '{"port": "Brest"}'}}]},
        {"function_call": {"name": "tide", "arguments": '{"port": "Brest"}'}},
    ],
)  # fmt: skip
def test_a_turn_with_calls_is_learned(calls: dict) -> None:
    turn = {"role": "assistant", "content": None, **calls}
    reply = {"role": "tool", "content": "4.2"}
    found = read_demonstration("x", {"messages": [U, turn, reply, A], "tools": [TOOL]}, COLUMNS)
    written = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found.completions == ([written, reply, A],)


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        ("{{ m.content }}", ""),
        ("{{ m.content | tojson }}", ""),
        ("{% if m.role != 'tool' %}{{ m.content }}{% endif %}", "the message of the tool, '4.2 m"),
        ("{% if m.role != 'assistant' %}{{ m.content }}{% endif %}", "assistant's earlier turns"),
    ],
)
def test_a_template_that_leaves_out_a_turn(
    shown: str, says: str, tmp_path: Path, load: Callable[..., Data]
) -> None:
    path, template = tmp_path / "rows.jsonl", tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
        f"{shown}{{% endfor %}}{{% if add_generation_prompt %}}A:{{% endif %}}"
    )
    called = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    talk = [U, called, {"role": "tool", "content": '4.2 m\n"high"'}]
    path.write_text(json.dumps({"messages": talk, "answer": "1"}))
    if "tool" in says:
        with pytest.raises(DataError, match=says):
            load(path, data__template=str(template))
    else:
        assert [says in note for note in load(path, data__template=str(template)).notes()] == (
            [True] if says else []
        )


def test_a_call_has_its_own_arguments_alone(tmp_path: Path) -> None:
    calls = [
        {"function": {"name": name, "arguments": arguments}}
        for name, arguments in [("dim", {"room": {"name": "hall"}}), ("play", {"title": "Waltz"})]
    ]
    turns = [{"messages": [U, {"role": "assistant", "tool_calls": [call]}]} for call in calls]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(turns), path)
    for (_, row), call in zip(READERS[".parquet"](path), calls, strict=True):
        found = read_demonstration("x", row, COLUMNS)
        assert found.completions[0][0]["tool_calls"] == [{"type": "function", **call}]
        assert found.ignored == ("messages[].tool_calls[] arguments that are null",)
    text = [{"function": {"name": "dim", "arguments": '{"room": null}'}}]
    turn = {"role": "assistant", "tool_calls": text}
    found = read_demonstration("x", {"messages": [U, turn]}, COLUMNS)
    (call,) = found.completions[0][0]["tool_calls"]
    assert (call["function"]["arguments"], found.ignored) == ({"room": None}, ())


def test_sharegpt_s_calls_and_replies() -> None:
    talk = [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "4.2"},
        {"from": "tool", "value": "<tool_response>\n4.3\n</tool_response>"},
        {"from": "gpt", "value": "A"},
    ]
    (completion,) = read_demonstration("x", {"conversations": talk}, COLUMNS).completions
    assert [message["role"] for message in completion] == ["assistant", "tool", "tool", "assistant"]
    assert completion[0]["tool_calls"] == [CALL]
    assert [message["content"] for message in completion[1:]] == ["4.2", "4.3", "A"]


@pytest.mark.parametrize("calls", [[json.dumps(CALL)] * 2, [json.dumps([CALL, CALL])]])
def test_calls_of_ms_swift_are_one_turn(calls: list[str]) -> None:
    replies = [
        {"role": "tool_response", "content": "4.2"},
        {"role": "function", "name": "tide", "content": "4.3"},
    ]
    made = [{"role": "tool_call", "content": text} for text in calls]
    talk = [U, *made, *replies, A]
    (completion,) = read_demonstration("x", {"messages": talk}, COLUMNS).completions
    assert [message["role"] for message in completion] == ["assistant", "tool", "tool", "assistant"]
    assert completion[0]["tool_calls"] == [CALL, CALL]
    made[-1]["loss"] = False
    if len(made) > 1:
        with pytest.raises(DataError, match="message 3 and the call before it are one turn"):
            read_demonstration("x", {"messages": talk}, COLUMNS)


def test_a_completion_is_a_call_only_of_the_row_s_tools() -> None:
    text = json.dumps([CALL["function"]])
    row = {"query": "Q", "tools": [TOOL], "answers": text}
    ((turn,),) = read_demonstration("x", row, COLUMNS).completions
    assert turn == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for other in ("[1]", "[]", '[{"name": "moon", "arguments": {}}]', "Hello"):
        ((turn,),) = read_demonstration("x", {**row, "answers": other}, COLUMNS).completions
        assert turn == {"role": "assistant", "content": other}


# --- turns and thoughts


@pytest.mark.parametrize(
    "flag",
    [{"weight": 0}, {"train": False}, {"training": False}, {"loss": 0.0}, {"loss_mask": 0},
     {"train_on_turn": False}, {"mask": True}, {"masked": 1}, {"train": True, "mask": True}],
)  # fmt: skip
def test_a_flagged_turn_is_not_trained(flag: dict) -> None:
    found = read_demonstration("x", {"messages": [U, {**A, **flag}, R, B]}, COLUMNS)
    assert (found.completions, found.untrained) == (([A, R, B],), {0})
    with pytest.raises(DataError, match="every assistant turn is masked"):
        read_demonstration("x", {"messages": [U, {**A, **flag}]}, COLUMNS)
    pair = {"prompt": "Q", "chosen": [{**A, **flag}, R, B], "rejected": [B]}
    with pytest.raises(DataError, match="which preference stages do not support"):
        read_preference("x", pair, COLUMNS)


def test_flags_that_train_a_turn() -> None:
    turn = {**A, "weight": 1, "mask": False, "train_on_turn": True}
    found = read_demonstration("x", {"messages": [{**U, "mask": True}, turn]}, COLUMNS)
    assert (found.completions, found.untrained, found.ignored) == (([A],), frozenset(), ())
    found = read_demonstration("x", {"messages": [{**U, "train": True}, A]}, COLUMNS)
    assert found.ignored == ("messages[].train of a turn that is not the assistant's",)


def test_a_thought_has_the_names_that_templates_read() -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        found = read_demonstration("x", {"messages": [U, {**A, name: "hm"}]}, COLUMNS)
        ((message,),) = found.completions
        assert message == {**A, "reasoning_content": "hm", "thinking": "hm"}


# --- refused or named


@pytest.mark.parametrize(
    ("read", "row", "named"),
    [
        (read_problem, {"prompt": "Q", "answer": 1, "images": ["a.png"]}, "column 'images' is"),
        (read_document, {"text": "Q", "image": {"path": "a"}}, "column 'image' is"),
        (read_problem, {"Question": "Q", "Answer": 1, "Picture": "a.png"}, "'Picture' is"),
        (read_problem, {"prompt": "Q", "answer": 1, "image_path": "a.png"}, "'image_path' is"),
        (read_problem, {"prompt": "Q", "test_list": ["assert f(1) == 2"]},
         "tests in column 'test_list'; make code_tests the first reward"),
        (read_labelled, {"prompt": "Q", "completion": "A", "label": 1, "audio": "a"}, "'audio'"),
        (read_demonstration, {"messages": [U, A], "weight": 0.5}, "column 'weight' is 0.5"),
        (read_demonstration, {"messages": [U, A], "train": False}, "is False, so the row is not"),
        (read_demonstration, {"messages": [U, A], "masked": "true"}, "is 'true', so the row is"),
        (read_problem, {"messages": [U, {"role": "ai", "content": "A"}, R], "answer": 1},
         "has messages of the role 'ai', which is not known; rename"),
        (read_preference, {"prompt": "Q", "response1": "A", "response2": "B", "winner": 1},
         "lacks any of the columns 'chosen', .*; make such columns by data.preprocess"),
        (read_preference, {"prompt": "Q", "responses": ["A", "B"], "scores": [1, 2]},
         "lacks any of the columns 'chosen', .*; make such columns by data.preprocess"),
        (read_demonstration, {"messages": [U, {**A, "weight": 0.5}]}, "has weight=0.5; expected"),
        (read_demonstration, {"messages": [U, {**A, "loss_mask": [1]}]}, "has loss_mask=.1.; exp"),
        (read_demonstration, {"messages": [U, {**A, "loss_scale": 0.5}]}, "has 'loss_scale', wh"),
        (read_demonstration, {"messages": [{**U, "images": ["a"]}, A]}, "has 'images', which"),
        (read_demonstration,
         {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]},
         "has a part of type 'image_url', which is not supported"),
        (read_demonstration, {"conversations": [{"from": "judge", "value": "Q"}]},
         "is from 'judge', an unknown role; expected one of"),
        (read_demonstration, {"messages": str([U, A])}, "as Python prints it; write it as JSON"),
        (read_demonstration, {"prompt": str(U), "completion": "A"}, "as Python prints it; write"),
        (read_demonstration, {"prompt": f"array([{{'id': 1, {str(U)[1:]}])", "completion": "A"},
         "as Python prints it; write"),
        (read_demonstration, {"messages": json.dumps([U, A])[:-9]}, "as JSON text that cannot be"),
        (read_demonstration, {"prompt": json.dumps({"messages": [U]}), "completion": "A"},
         "is JSON text of an object with 'messages'"),
        (read_problem, {"system": "T", "messages": [S, U], "answer": 1}, "different system mess"),
        (read_problem, {"prompt": "Q", "answer": 1, "context": {"title": ["R"]}},
         "'context' is .*; expected text, which joins the prompt"),
        (read_problem, {"system": 3, "prompt": "Q", "answer": 1}, "'system' is 3; expected the"),
        (read_problem, {"prompt": "Q", "answer": 1, "tools": ["tide"]}, "'tools' is .*; expected"),
        (read_demonstration, {"prompt": "Q", "completion": "A", "history": [["R", "B"]]},
         "'history' is .*: the model would be asked without the earlier turns"),
        (read_problem, {"prompt": "Q", "messages": [S, U, A], "answer": 1},
         "the prompt may be column 'prompt', or the beginning of 'messages', which has the roles"),
    ],
)  # fmt: skip
def test_what_changes_the_task_is_refused(read: Callable, row: dict, named: str) -> None:
    with pytest.raises(DataError, match=rf"^rows\.jsonl:7: .*{named}") as caught:
        read("rows.jsonl:7", row, COLUMNS)
    assert str(caught.value).isprintable()


def test_all_other_columns_and_members_are_named() -> None:
    turn = {**U, "id": 7, "timestamp": "", "name": None}
    row = {"messages": [turn, A], "source": "web", "empty": None, "blank": " ", "none": []}
    assert read_demonstration("x", row, COLUMNS).ignored == ("source", "messages[].id")
    assert read_document("x", {"text": "Q", "url": "u"}, COLUMNS).ignored == ("url",)
    pair = {"prompt": "Q", "chosen": [U, A], "rejected": [U, B], "messages": [U, A]}
    assert read_preference("x", pair, COLUMNS).ignored == ("messages",)
    assert problem({"prompt": "Q", "answer": 1, "solution": "s"}).ignored == ("solution",)
    found = read_demonstration("x", {"messages": [U, A, R]}, COLUMNS)
    assert found.ignored == ("messages[] after the assistant's last message",)


def test_a_prompt_column_is_no_history() -> None:
    row = {"history": "Why is the dough sour?", "answer": "rye"}
    assert problem(row, prompt="history").messages == [asked("Why is the dough sour?")]


@pytest.mark.parametrize(
    ("values", "kind", "golds"),
    [
        ([0.1, 19.99], pyarrow.float32(), ["0.1", "19.99"]),
        ([0.1, 2.5], pyarrow.float16(), ["0.1", "2.5"]),
        ([[0.1], [19.99]], pyarrow.list_(pyarrow.float32()), ["0.1", "19.99"]),
        ([{"ground_truth": 0.1}], pyarrow.struct({"ground_truth": pyarrow.float32()}), ["0.1"]),
        ([Decimal("1.50"), Decimal("0.00")], pyarrow.decimal128(5, 2), ["1.50", "0.00"]),
        ([date(2024, 1, 5)], pyarrow.date32(), ["2024-01-05"]),
        (["4", "0x"], pyarrow.binary(), ["4", "0x"]),
    ],
)
def test_values_of_parquet_are_read_as_they_are_written(
    values: list, kind: Any, golds: list[str], tmp_path: Path
) -> None:
    table = pyarrow.table({"answer": pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = [row for _, row in READERS[".parquet"](tmp_path / "rows.parquet")]
    assert [problem({"question": "Q", **row}).answer for row in rows] == golds


def test_columns_that_hold_the_prompt_twice() -> None:
    sides = {"chosen": "\n\nHuman: Q\n\nAssistant: A", "rejected": "\n\nHuman: Q\n\nAssistant: B"}
    found = read_preference("x", {"prompt": "\n\nHuman: Q\n\nAssistant:", **sides}, COLUMNS)
    assert (found.messages, found.completions, found.ignored) == ([U], ([A], [B]), ())


REASONS_AT_THE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_reasoning_that_is_learned_is_not_named_as_ignored(
    tmp_path: Path, small_run: Callable[..., Config]
) -> None:
    """As Qwen3's template has it: a turn has its reasoning, and its context has none."""
    (tmp_path / "t.jinja").write_text(REASONS_AT_THE_END)
    path = tmp_path / "rows.jsonl"
    turns = [U, {**A, "reasoning_content": "hm"}, R, {**B, "reasoning_content": "so"}]
    path.write_text(json.dumps({"messages": turns}))
    options = {"data__train": str(path), "data__template": str(tmp_path / "t.jinja")}
    config = small_run(**options, **OF_FORM["demonstrations"], algorithm={})
    lines = check_data(config, []).lines
    assert lines[:2] == [
        f"train {path}: 1 rows, 1 taken as 2 rows of tokens",
        "  turns are trained as separate rows of tokens, because the chat template changes earlier "
        f"turns (Qwen3's drops their reasoning), in 1 row, the first is {path}:1",
    ]
    shown = "\n".join(lines)
    assert "<think>hm</think>A<|im_end|>" in shown
    assert "<think>so</think>B<|im_end|>" in shown
    turns[1]["weight"] = 0
    path.write_text(json.dumps({"messages": turns}))
    assert "  ignored columns: messages[].reasoning_content (1 row)" in check_data(config, []).lines


@pytest.mark.parametrize(
    ("form", "row", "says"),
    [
        ("demonstrations", {"prompt": "Is it A?", "completion": "Is it A? No."},
         "the answer begins with the whole prompt, which is learned, too,"),
        ("demonstrations", {"prompt": "\n\nHuman: Q\n\nAssistant:", "completion": "A"},
         "the prompt is a dialogue (Human:, Assistant:) and is read as one text"),
        ("demonstrations", {"prompt": "Q", "completion": "A", "label": False},
         "the row is labelled false, and its answer is learned"),
        ("demonstrations", {"prompt": "<|im_start|>user\nQ", "completion": "A"},
         "control tokens that the row spells (<|im_start|>) are read as text"),
        ("demonstrations", {"prompt": "[INST] Q [/INST]", "completion": "A"},
         "marks of other chat templates ([INST]) are read as text"),
        ("demonstrations", {"prompt": "Q", "completion": "Yes.\\nNo."},
         "a backslash and n are read as two characters, not as a line break"),
        ("texts", {"text": "CafÃ© is 5 â€“ 7"},
         "letters that a wrong encoding left (Ã©) are read as they stand"),
        ("problems", {"prompt": "Reduce $\\\\frac{6}{8}$.", "answer": "1"},
         "two backslashes before LaTeX commands (\\\\frac) are read as they stand"),
        ("problems", {"prompt": "Is a &lt; b?", "answer": "1"},
         "HTML entities (&lt;) are read as they stand"),
        ("problems", {"prompt": "Add {nums}.", "nums": "1, 2", "answer": "3"},
         "the prompt has the name of column 'nums' in braces, and not its text"),
        ("problems", {"prompt": '{"a": 1}', "answer": "3"},
         "the prompt is JSON text and is read as it stands"),
        ("problems", {"prompt": "Right?", "answer": "Y"},
         "the gold answer has the letter of a choice that the question does not list"),
        ("problems", {"prompt": "How much?", "answer": "{}"},
         "the gold answer itself is rejected when the model writes it"),
        ("problems", {"prompt": "How much?", "answer": "2k"},
         "the number of the gold answer alone is rejected"),
        ("problems", {"prompt": "How much?", "answer": "1_000"},
         "the number of the gold answer alone is rejected"),
        ("problems", {"prompt": "Which pet?", "answer": "cat"},
         "the letters of the gold answer are read as a product, so their order does not count"),
        ("problems", {"prompt": "Q <|im_end|>", "answer": "1"},
         "control tokens that the row spells (<|im_end|>) are read as text"),
        ("problems", {"prompt": "Which one?", "answer": "(C)"},
         "the gold answer has the letter of a choice that the question does not list"),
        ("problems", {"prompt": "Which point is it, B or C?", "answer": "C"}, ""),
        ("problems", {"prompt": "Which?", "choices": TEXTS, "answer": 1}, COUNTED.format(0)),
        ("problems", {"prompt": "How many?", "answer": 1.125}, ""),
        ("problems", {"prompt": "Which?", "answer": "{'a', 'b'}"},
         "several values are one gold answer: only all of them, as written, are accepted"),
        ("problems", {"prompt": "If x is 7, is it prime?", "answer": True},
         "Yes or No is accepted for the gold answer True or False"),
        ("problems", {"prompt": "What is printed?", "answer": "False"},
         "Yes or No is not accepted for the gold answer True or False"),
    ],
)  # fmt: skip
def test_a_row_that_may_mean_something_else_is_named(
    form: str, row: dict, says: str, tmp_path: Path, small_run: Callable[..., Config]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    options = OF_FORM[form] | {"algorithm": {}} if form in OF_FORM else {}
    lines = check_data(small_run(data__train=str(path), **options), []).lines
    line = f"  {says} in 1 row, the first is {path}:1"
    assert [each for each in lines if "the first is" in each] == [line] * bool(says)


def test_a_run_and_the_data_check_name_what_is_ignored(
    tmp_path: Path, load: Callable[..., Data], small_run: Callable[..., Config], tokenizer: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"{n}?", "answer": "1", "url": "u" if n else "", "id": n} for n in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(path, data__eval=str(path), data__contamination="ignore")
    line = f"{path}: ignored columns: id (3 rows), url (2 rows)"
    assert data.notes() == [line]
    config = small_run(data__train=str(path))
    found = load_data(config, tokenizer, 4000, extra_columns=["url"])
    assert found.notes() == [f"{path}: ignored columns: id (3 rows)"]
    report = check_data(config, [])
    assert "  ignored columns: id (3 rows), url (2 rows)" in report.lines


def test_labels_are_offered_a_reward_and_are_read_word_for_word_by_it(
    tmp_path: Path, load: Callable[..., Data]
) -> None:
    path, exact = tmp_path / "rows.jsonl", {"rewards": ["exact"]}
    golds = ["Billing & refunds", "#### bug", "billing & refunds", "#### bug"]

    def notes(golds: list[str], column: str = "answer", **sections: Any) -> list[str]:
        rows = [{"question": f"{n}?", column: gold} for n, gold in enumerate(golds)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [line.removeprefix(f"{path}: ") for line in load(path, **sections).notes()]

    says = (
        "set score.rewards=exact, which compares labels word for word: boxed compares the 2 "
        f"different labels as mathematics in 4 rows, the first is {path}:1"
    )
    assert says in notes(golds)
    assert notes(golds, score=exact) == notes(golds, "label", score=exact) == []
    assert [p.answer for p in load(path, score=exact).prompts] == golds
    for others in (["yes", "no"] * 2, ["north", "south", "east"], ["4", "5"] * 2, ["A", "B"] * 2):
        assert not any("=exact" in line for line in notes(others))
    same = '{"question": "Q", "answer": "Bug"}\n{"question": "Q", "answer": "bug "}\n'
    path.write_text(same)
    assert load(path, score=exact).notes() == []
    path.write_text(same.replace("Bug", "Billing"))
    assert load(path, score=exact).notes() == [
        f"{path}: 1 question has different gold answers: {path}:1 has 'Billing', {path}:2 has 'bug'"
        "; correct or remove the wrong one"
    ]


def test_contradicting_golds_are_named(tmp_path: Path, load: Callable[..., Data]) -> None:
    path = tmp_path / "rows.jsonl"
    golds = {"What is 1/2?": "0.5", "what is 1/2": "1/2", "Other": "3", "What is  1/2 ?": "2"}
    rows = [{"question": question, "answer": gold} for question, gold in golds.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(path).notes() == [
        f"{path}: 1 question has different gold answers: {path}:1 has '0.5', {path}:4 has '2'"
        "; correct or remove the wrong one"
    ]


def test_golds_that_are_no_value_are_bad_rows(tmp_path: Path, load: Callable[..., Data]) -> None:
    """But for words that answer which solutions there are, and for labels."""
    path = tmp_path / "rows.csv"
    golds = ["7", "n/a", "None", "no solution", "-", "undefined"]
    rows = [f"{n}?,{gold}" for n, gold in enumerate(golds)]
    path.write_text("\n".join(["question,answer", *rows, ""]))
    data = load(path, data__on_bad_row="skip")
    assert [prompt.answer for prompt in data.prompts] == ["7", "None", "no solution", "undefined"]
    assert data.notes()[:2] == [
        f"{path}: left out: 2 by data.on_bad_row",
        f"  {path}:3: the gold answer 'n/a' is a word for no value; write the answer",
    ]
    assert any("remove the row if it has no answer" in line for line in data.notes())
    labels = load(path, data__on_bad_row="skip", score={"rewards": [{"name": "exact"}]})
    assert len(load(path).prompts) == len(labels.prompts) == 6


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("completions, **kwargs",
         ["columns that only the reward functions get: id (3 rows), url (2 rows)"]),
        ("prompts, completions, url=None", ["ignored columns: id (3 rows)"]),
        ("completion, url=None", ["ignored columns: id (3 rows)"]),
        ("completion", ["ignored columns: id (3 rows), url (2 rows)"]),
    ],
)  # fmt: skip
def test_columns_that_a_reward_takes_are_not_called_ignored(
    parameters: str, told: list[str], tmp_path: Path, small_run: Callable[..., Config]
) -> None:
    path, code = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows = [
        {"question": f"{n}?", "answer": "1", "url": "u" if n else "", "id": n} for n in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code.write_text(f"def mine({parameters}): return 1.0\n")
    config = small_run(data__train=str(path), score__rewards=[{"custom": f"{code}:mine"}])
    lines = [line.strip() for line in check_data(config, []).lines]
    assert [line for line in lines if "ignored" in line or "functions get" in line] == told


def test_a_system_message_that_replaces_the_config_s_is_told(
    tmp_path: Path, load: Callable[..., Data]
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "Q", "answer": "1"}, {"question": "R", "answer": "1", "system": "S"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(path).notes() == []
    assert load(path, data__system_prompt="Be brief.").notes() == [
        f"{path}: the row's system message replaces data.system_prompt in 1 row, the first is "
        f"{path}:2"
    ]


# --- gold answers


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("#### 1,018", "1018"),
        ("#### 1,234,567.5", "1234567.5"),
        ("#### $1,018", "$1018"),
        ("#### (2, 3)", "(2, 3)"),
        ("#### \\{1,2\\}", "\\{1,2\\}"),
        ("#### 1,2", "1,2"),
        ("16 (apples)", "16 apples"),
        ("3 (mod 5)", "3 (mod 5)"),
        ("5 (five)", "5 (five)"),
        ("<answer> 3 </answer>", "3"),
        ("<think>\\boxed{5}?</think> <answer>\\boxed{4}</answer>", "4"),
        ("#### Step 1\n4 + 5 = 9\n#### Step 2\n3 * 9, so \\boxed{27}.", "27"),
        ("We add.\n#### 12\n", "12"),
        ("It is $\\boxed{3}$ and $\\boxed{-3}$.", "3, -3"),
        ("\\boxed{3}, or \\boxed{-3}.", "3, -3"),
        ("\\boxed{0.50} or \\boxed{0.5}", "0.5"),
        ("First \\boxed{1}. Then we get \\boxed{2}.", "2"),
        ('["18"]', "18"),
        (0.1 + 0.2, "0.3"),
        (1 / 3, "0.3333333333333333"),
        ({"ground_truth": '["18"]', "style": "rule"}, "18"),
        ('{"ground_truth": ["18"]}', "18"),
        ([{"ground_truth": '["18"]'}], "18"),
        ({"ground_truth": {"target": ["18"]}, "style": "rule"}, "18"),
        ("x&lt;4", "x<4"),
        ("\u2010120", "-120"),
        ("$x_1=1$ 或 $x_2=5$", "$x_1=1$ or $x_2=5$"),
        ("[3]", "[3]"),
        ("007", "007"),
        ("1e3", "1e3"),
        ("2024-01-05", "2024-01-05"),
    ],
)
def test_gold_answers_are_whole(answer: Any, gold: str) -> None:
    assert problem({"question": "Q", "answer": answer}).answer == gold


@pytest.mark.parametrize("value", [{"ground_truth": "54"}, '{"ground_truth": "54"}'])
def test_the_gold_answer_of_synthetic_1(value: Any) -> None:
    found = problem({"prompt": "Q", "verification_info": value})
    assert (found.answer, found.ignored) == ("54", ())


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("['18']", "a list as Python prints it; write the answer alone"),
        ('["1", "2"]', "'answer' holds 2 different answers, .*; expected one gold answer"),
        ({"text": ["1804", "in 1804"], "answer_start": [29, 26]}, "holds 2 different answers, "),
        ({"ground_truth": {"target": ["W", "Bush"]}}, "'answer' holds 2 different answers, "),
        ({"text": [], "answer_start": []}, "'answer' holds no answer; expected one gold answer"),
        ('{"inputs": ["1"], "outputs": ["2"]}', "the tests of a program or the arguments of a"),
        ('{"func_name": "validate_lowercase"}', "the tests of a program or the arguments of a"),
    ],
)
def test_golds_that_cannot_be_paid_are_refused(answer: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        problem({"question": "Q", "answer": answer})


def test_doubtful_golds_are_told(tmp_path: Path, load: Callable[..., Data]) -> None:
    path = tmp_path / "rows.jsonl"
    golds = [
        "7",
        "nan",
        "proof",
        "\\boxed{1} and \\boxed{2}",
        "It is\nseven.",
        "#### 7",
        "1.234,5",
        "3,50 €",
        "€ 3,50",
        "3,5",
        "1.234,50 €",
        "1 day, 2 hours and 30 minutes",
        "2 hours 30 minutes",
        "about 5 kg",
        "2024-03-05",
        "March 5, 2024",
        "H. Lorn",
        "16 (wrens)",
        "\\frac{1}{2}",
        "20 - 30",
        "12只",
        "\\textbf{(B) } 6",
        "π/6",
        "30 - 20",
        "Cairo|||Giza",
        "1.250",
        "1.250.000 €",
        "12,34,567",
        "1e3",
        "-",
        "12.3456",
        "0.125",
        "\text{north}",
    ]
    rows = [{"question": f"{n}?", "answer": gold} for n, gold in enumerate(golds)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load(path).notes() == [
        f"{path}: the gold answer is a word for no value in 3 rows, the first is {path}:2; write "
        "the answer, or leave such rows out with data.on_bad_row=skip",
        f"{path}: several boxes are read as one gold answer in 1 row, the first is {path}:4",
        f"{path}: a whole text of several lines is the gold answer in 1 row, the first is {path}:5",
        f"{path}: the gold answer can be read in two ways: commas and the word and separate "
        "values, a point is a decimal point, e is a power of ten, and a hyphen is a minus in 12 "
        f"rows, the first is {path}:7; write it without them, such as 6.5 for 6,5",
        f"{path}: the gold answer is not mathematics, so only the same words are accepted in 3 "
        f"rows, the first is {path}:13",
        f"{path}: the gold answer has the letter of a choice that the question does not list in 1 "
        f"row, the first is {path}:22",
        f"{path}: several values are one gold answer: only all of them, as written, are accepted "
        f"in 1 row, the first is {path}:25",
        f"{path}: control characters begin LaTeX commands in 1 row, the first is {path}:33; in "
        "JSON, write two backslashes for one",
    ]
