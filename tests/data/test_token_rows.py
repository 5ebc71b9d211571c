"""Rows of tokens: which are learned, that the prompt is the one that is sampled from, and that what
cannot be learned from is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers.normalizers import Replace

from chat_templates import (
    CHATML,
    DROPS_THINKING,
    END,
    ENDS_ONCE,
    NO_END,
    WITH_BOS,
    render,
    renderer,
    with_bos,
    with_spaces,
    without_template,
)
from conftest import TINY
from reason_llm.data import token_rows
from reason_llm.data.forms import (
    Completed,
    Learned,
    TemplateExtras,
    TextDocument,
)
from reason_llm.data.messages import Messages
from reason_llm.data.render import Renderer
from reason_llm.data.templates import shipped
from reason_llm.data.token_rows import prompt_tokens
from reason_llm.errors import DataError
from reason_llm.model.base import load_tokenizer
from reason_llm.rollout import TokenRow


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def demonstration(
    where: str, messages: Messages, completion: Messages, **options: Any
) -> Completed:
    return Completed(where, messages, (completion,), **options)


ASKED: Messages = [user("Q?")]
ONE = demonstration("x.jsonl:1", ASKED, [assistant("It is 4.")])
TWO = demonstration("x.jsonl:2", ASKED, [assistant("A."), user("R?"), assistant("B.")])
THOUGHT = "<think>\nhm\n</think>\n\nA."
TEXTS = demonstration("x.jsonl:3", [user("Wh")], [assistant("at")], is_text=True)


def one(example: Learned, by: Renderer, context: int = 400) -> TokenRow:
    (row,) = render(example, by, context, [END])
    assert len(row.ids) == len(row.trained)
    assert not row.trained[0]
    return row


def learned(row: TokenRow, by: Renderer) -> list[str]:
    """Texts of the parts that are learned."""
    parts: list[list[int]] = []
    for position, flag in enumerate(row.trained):
        if flag and not row.trained[position - 1]:
            parts.append([])
        if flag:
            parts[-1].append(row.ids[position])
    return [by.tokenizer.decode(part) for part in parts]


# --- what is learned


def test_each_text_is_tokenised_once_and_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    by = renderer(load_tokenizer(str(TINY)))
    kind, asked = type(by.tokenizer), list[list[str]]()
    call = kind.__call__

    def counted(self: Any, texts: list[str], **options: Any) -> Any:
        asked.append(texts)
        return call(self, texts, **options)

    talks = [[assistant(f"{n} " * 40), user("R?"), assistant(f"{n + 3} " * 40)] for n in range(3)]
    examples = [demonstration(f"x:{n}", ASKED, talk) for n, talk in enumerate(talks)]
    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", counted)
        rows = [rows for rows, _ in token_rows.render(examples, by, 4000, [END])]
    (texts,) = asked
    assert all(sum(f"{n} " * 40 in text for text in texts) == 1 for n in range(6))
    for talk, found in zip(talks, rows, strict=True):
        assert not isinstance(found, DataError)
        whole = by.text("x", [*ASKED, *talk], generation=False).rstrip("\n")
        assert [row.ids for row in found] == [tuple(by.tokenizer(whole)["input_ids"])]
        pairs = zip(found[0].ids, found[0].trained, strict=True)
        said = by.tokenizer.decode([id for id, is_learned in pairs if is_learned])
        assert said == f"{talk[0]['content']}<|im_end|>{talk[2]['content']}<|im_end|>"


def test_a_row_is_whole_whatever_the_tokenizer_was_set_to() -> None:
    by = renderer(load_tokenizer(str(TINY)))
    whole = one(ONE, by)
    by.tokenizer.backend_tokenizer.enable_truncation(4)
    by.tokenizer.backend_tokenizer.enable_padding(length=400)
    assert one(ONE, by).ids == whole.ids


def test_a_conversation_that_fails_leaves_the_others(tokenizer: Any) -> None:
    jinja = "{% if messages[0].content == 'No' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    by = renderer(tokenizer, jinja)
    spells = demonstration("x:2", [user("<|im_end|>?")], [assistant("A.")])
    fails = demonstration("x:3", [user("No")], [assistant("A.")])
    found = [rows for rows, _ in token_rows.render([ONE, spells, fails, TWO], by, 400, [END])]
    assert isinstance(found[2], DataError)
    assert not isinstance(found[1], DataError)
    assert [found[0], found[1], found[3]] == [render(e, by, 400, [END]) for e in (ONE, spells, TWO)]
    assert sum(row.ids.count(END) for row in found[1]) == 2  # not the one that the user spells


def test_a_completion_and_its_end_token(tokenizer: Any) -> None:
    by = renderer(tokenizer, None)
    row = one(ONE, by)
    prompt = by.prompt("x", ASKED, "")
    assert row.ids[: prompt_tokens(row)] == prompt.token_ids
    assert learned(row, by) == ["It is 4.<|im_end|>"]
    assert row.ids[-1] == END  # not the template's line break after it
    assert (row.name, row.group, row.value) == ("x.jsonl:1", 0, 0.0)


def test_ids_are_those_of_the_whole_text(tokenizer: Any) -> None:
    by = renderer(tokenizer)
    for example in (ONE, TWO):
        text = by.text("x", [*example.messages, *example.completions[0]], generation=False)
        # less the last line break
        assert list(one(example, by).ids) == by.token_ids("x", text)[:-1]


def test_each_turn_of_the_assistant_and_nothing_between(tokenizer: Any) -> None:
    by = renderer(tokenizer)
    assert learned(one(TWO, by), by) == ["A.<|im_end|>", "B.<|im_end|>"]


def test_turns_in_the_prompt_are_only_read(tokenizer: Any) -> None:
    by = renderer(tokenizer)
    prompt = [user("Q?"), assistant("A."), user("R?")]
    row = one(demonstration("x", prompt, [assistant("B.")]), by)
    assert learned(row, by) == ["B.<|im_end|>"]
    assert row.ids[: prompt_tokens(row)] == by.prompt("x", prompt, "").token_ids


def test_the_system_prompt_is_read_as_when_sampling(tokenizer: Any) -> None:
    by = renderer(tokenizer, system="Be brief.")
    row = one(TWO, by)
    assert row.ids[: prompt_tokens(row)] == by.prompt("x", ASKED, "").token_ids
    assert by.tokenizer.decode(row.ids).startswith("<|im_start|>system\nBe brief.")
    assert learned(row, by) == ["A.<|im_end|>", "B.<|im_end|>"]


def test_a_pair_has_one_prompt_and_one_group(tokenizer: Any) -> None:
    by = renderer(tokenizer)
    pair = Completed("x", ASKED, ([assistant("good one")], [assistant("bad")]), value=0.5)
    chosen, rejected = render(pair, by, 200, [END])
    prompt = by.prompt("x", ASKED, "").token_ids
    for row in (chosen, rejected):
        assert row.ids[: prompt_tokens(row)] == prompt
    assert learned(chosen, by) == ["good one<|im_end|>"]
    assert learned(rejected, by) == ["bad<|im_end|>"]
    assert [(row.group, row.value) for row in (chosen, rejected)] == [(0, 0.5), (0, 0.0)]


def test_a_label_and_a_score_are_the_value(tokenizer: Any) -> None:
    by = renderer(tokenizer)
    assert one(demonstration("x", ASKED, [assistant("A")], value=-1.0), by).value == -1.0
    assert one(demonstration("x", ASKED, [assistant("A")], value=2.5), by).value == 2.5


# --- templates


def test_a_first_token_is_never_learned(tokenizer: Any) -> None:
    asks_nothing = "{% for m in messages %}{{ m.content if m.role == 'assistant' }}{% endfor %}x"
    with pytest.raises(
        DataError, match="does not write"
    ):  # the text does not begin with its prompt
        one(ONE, renderer(tokenizer, asks_nothing))
    row = one(TextDocument("x", "abc"), renderer(tokenizer))
    assert row.trained == (False, True, True, True)
    deaf = without_template()
    deaf.backend_tokenizer.normalizer = Replace("Wh", "")
    row = one(
        demonstration("x", [user("Wh")], [assistant("abc")], is_text=True), renderer(deaf, None)
    )
    assert row.trained == (False, True, True, True)


def test_a_turn_ends_with_its_first_end_token(tokenizer: Any) -> None:
    """As Phi-3's: after the last turn stands the token that ends a text, too."""
    by = renderer(tokenizer, CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}")
    for example, expected in (
        (ONE, ["It is 4.<|im_end|>"]),
        (TWO, ["A.<|im_end|>", "B.<|im_end|>"]),
    ):
        (row,) = render(example, by, 400, [0, END])
        assert learned(row, by) == expected


def test_an_end_token_that_the_tokenizer_does_not_read(tokenizer: Any) -> None:
    by = renderer(
        tokenizer,
        "{% for m in messages %}{{ ':' if m.role == 'assistant' }}{{ m.content }}h{% endfor %}"
        "{{ ':' if add_generation_prompt }}",
    )
    end = tokenizer.convert_tokens_to_ids("h")
    (row,) = render(demonstration("x", ASKED, [assistant("Q")]), by, 400, [end])
    assert learned(row, by) == ["Qh"]
    with pytest.raises(DataError, match="x: the tokenizer does not read h as end tokens"):
        render(demonstration("x", ASKED, [assistant("W")]), by, 400, [end])  # Wh is one token


def test_one_token_begins_a_row() -> None:
    tokenizer = with_bos(adds_it=True)
    row = one(TWO, renderer(tokenizer, WITH_BOS))
    assert row.ids.count(0) == 1
    assert row.ids[0] == 0
    twice = renderer(tokenizer, "{{ bos_token }}" + WITH_BOS)
    with pytest.raises(DataError, match=r"^x\.jsonl:1: begins with two BOS tokens; remove"):
        one(ONE, twice)


def test_a_template_that_drops_earlier_thinking_makes_a_row_of_each_turn(tokenizer: Any) -> None:
    by = renderer(tokenizer, DROPS_THINKING)
    single = demonstration("x", ASKED, [assistant(THOUGHT)])
    assert learned(one(single, by), by) == [f"{THOUGHT}<|im_end|>"]
    turns = [assistant(THOUGHT), user("R?"), assistant("B.")]
    first, second = render(demonstration("x:9", ASKED, turns), by, 400, [END])
    assert learned(first, by) == [f"{THOUGHT}<|im_end|>"]
    assert learned(second, by) == ["B.<|im_end|>"]
    asked = by.prompt("x", [*ASKED, *turns[:2]], "")
    assert second.ids[: prompt_tokens(second)] == asked.token_ids
    assert "hm" not in by.tokenizer.decode(second.ids)
    assert [(row.name, row.group) for row in (first, second)] == [("x:9", 0), ("x:9", 1)]
    assert len(learned(one(TWO, by), by)) == 2  # nothing was thought, so nothing is dropped


def test_a_template_that_ends_the_last_turn_alone_makes_a_row_of_each_turn(tokenizer: Any) -> None:
    """As gpt-oss has it."""
    by = renderer(tokenizer, ENDS_ONCE)
    rows = render(TWO, by, 400, [END])
    assert [learned(row, by) for row in rows] == [["A.\n<|im_end|>"], ["B.\n<|im_end|>"]]


def test_a_turn_after_a_thought_that_its_template_leaves_out_behind_it(tokenizer: Any) -> None:
    """As gpt-oss has it: the thought of a tool call is in the prompt of the answer, and left out of
    the conversation that has the answer."""
    thought = "{% if m.thinking and (loop.last or messages[-1].role == 'user') %}"
    thought += "[{{ m.thinking }}]{% endif %}{{ m.content }}"
    by = renderer(tokenizer, CHATML.replace("{{ m.content }}", thought))
    first = {**assistant("A."), "reasoning_content": "hm", "thinking": "hm"}
    last = {**assistant("B."), "reasoning_content": "so", "thinking": "so"}
    rows = render(demonstration("x", ASKED, [first, user("R?"), last]), by, 400, [END])
    assert [learned(row, by) for row in rows] == [["[hm]A.<|im_end|>"], ["[so]B.<|im_end|>"]]
    asked = by.prompt("x", [*ASKED, first, user("R?")], "")
    assert rows[1].ids[: prompt_tokens(rows[1])] == asked.token_ids


def test_both_sides_of_a_pair_need_a_template_that_keeps_their_turns(tokenizer: Any) -> None:
    by = renderer(tokenizer, DROPS_THINKING)
    several = [assistant(THOUGHT), user("R?"), assistant("B.")]
    pair = Completed("x:9", ASKED, (several, [assistant("A.")]))
    with pytest.raises(DataError, match=r"^x:9, chosen: its template .* no training") as caught:
        render(pair, by, 400, [END])
    assert "\n" not in str(caught.value)


def test_a_turn_that_the_row_leaves_out_of_the_loss_is_read(tokenizer: Any) -> None:
    for template in (None, DROPS_THINKING):
        by = renderer(tokenizer, template)
        row = one(replace(TWO, untrained=frozenset([0])), by)
        assert learned(row, by) == ["B.<|im_end|>"]
        assert "A.<|im_end|>" in by.tokenizer.decode(row.ids)


OPENS = CHATML.replace("assistant\n", "assistant\n<think>\n")
assert OPENS != CHATML


def test_a_thought_that_the_prompt_opens_is_learned_from_its_inside(tokenizer: Any) -> None:
    """As DeepSeek-R1's distillates have it: the template leaves out the thought of every answer."""
    strips = OPENS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    by = renderer(tokenizer, strips)
    row = one(demonstration("x", ASKED, [assistant(THOUGHT)]), by)
    assert learned(row, by) == ["hm\n</think>\n\nA.<|im_end|>"]
    assert row.ids[: prompt_tokens(row)] == by.prompt("x", ASKED, "").token_ids
    apart = {**assistant("A."), "reasoning_content": "hm"}
    assert one(demonstration("x", ASKED, [apart]), by).ids == row.ids
    with pytest.raises(DataError, match=r"^x:2: its template opens a thought, <think>, .* none"):
        one(demonstration("x:2", ASKED, [assistant("A.")]), by)


def test_what_a_template_does_not_write_is_refused_or_noted(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
    calls = {**assistant(""), "tool_calls": [call]}
    tools = ({"type": "function", "function": {"name": "tide"}},)
    by = renderer(tokenizer)
    for example, named in (
        (demonstration("x:1", ASKED, [calls]), "does not write tool calls"),
        (demonstration("x:1", ASKED, [assistant("A.")], extras=TemplateExtras(tools)),
         "does not write tools, such as 'tide'"),
        (demonstration("x:1", [*ASKED, calls, user("R?")], [assistant("B.")]),
         "does not write tool calls of a message with an empty content and arguments"),
        (demonstration("x:1", ASKED, [{**assistant("A."), "reasoning_content": "hm"}]),
         "does not write the thought in 'reasoning_content'"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=rf"^x:1: its template {named}"):
            one(example, by)
    deaf = renderer(tokenizer, CHATML.replace("messages %}", "messages if m.role != 'system' %}"))
    asked = [{"role": "system", "content": "Be brief."}, *ASKED]
    with pytest.raises(DataError, match=r"leaves out or changes the message of the system, 'Be b"):
        one(demonstration("x:1", asked, [assistant("A.")]), deaf)
    silent = renderer(tokenizer, CHATML.replace("messages %}", "messages if m.role == 'user' %}"))
    with pytest.raises(DataError, match=r"leaves out the message of the assistant, 'It is 4\."):
        one(ONE, silent)
    noted: list[str] = []
    trims = renderer(tokenizer, CHATML.replace("m.content", "m.content | trim"))
    render(demonstration("x", ASKED, [assistant("  pass")]), trims, 400, [END], note=noted.append)
    assert noted == ["white space around a message of the assistant"]
    noted.clear()
    named = [{**user("Q?"), "name": "anna"}]
    render(demonstration("x", named, [assistant("A.")]), by, 400, [END], note=noted.append)
    assert noted == ["messages[].name"]


def test_trl_s_training_template_keeps_the_thinking_of_qwen3(tokenizer: Any) -> None:
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    by = renderer(tokenizer, template.read_text())
    several = demonstration("x", ASKED, [assistant(THOUGHT), user("R?"), assistant("B.")])
    row = one(several, by)
    assert learned(row, by) == [f"{THOUGHT}<|im_end|>", "<think>\n\n</think>\n\nB.<|im_end|>"]
    assert row.ids[: prompt_tokens(row)] == by.prompt("x", ASKED, "").token_ids
    # It would keep the thinking in a prompt, too, which is not there when the policy is sampled.
    asked = [*ASKED, assistant(THOUGHT), user("R?")]
    first, *_ = render(demonstration("x:7", asked, TWO.completions[0]), by, 400, [END])
    assert first.ids[: prompt_tokens(first)] == by.prompt("x", asked, "").token_ids
    assert learned(first, by) == ["<think>\n\n</think>\n\nA.<|im_end|>"]


def test_an_answer_that_speaks_of_the_tag_is_no_thought(tokenizer: Any) -> None:
    by = renderer(tokenizer, (Path(trl.__file__).parent / "chat_templates/qwen3.jinja").read_text())
    spelled = "Write `</think>`, and the answer follows."
    with pytest.raises(DataError, match="x: the assistant's message spells </think> within a line"):
        render(demonstration("x", ASKED, [assistant(spelled)]), by, 400, [END])
    assert learned(one(demonstration("x", ASKED, [assistant(THOUGHT)]), by), by)
    plain = renderer(tokenizer, CHATML)
    row = one(demonstration("x", ASKED, [assistant(spelled)]), plain)
    assert learned(row, plain) == [f"{spelled}<|im_end|>"]


@pytest.mark.parametrize(
    ("jinja", "example", "named"),
    [
        (NO_END, ONE, r"writes no end token \(<\|im_end\|>\) after"),
        (CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"), ONE,
         "leaves out the content"),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), ONE, "or changes it"),
        (CHATML.replace("{% for", "{{ messages | length }}{% for"), ONE, "does not write"),
        ("{% if not add_generation_prompt %}{{ 1 / 0 }}{% endif %}a", ONE, "fails on it"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_learned_from(
    jinja: str, example: Completed, named: str, tokenizer: Any
) -> None:
    with pytest.raises(DataError, match=rf"^x\.jsonl:\d: its template.*{named}") as caught:
        one(example, renderer(tokenizer, jinja))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["plain_chat", "r1_zero", "question_only"])
def test_shipped_templates_can_be_learned_from(name: str, tokenizer: Any) -> None:
    by = renderer(tokenizer, shipped()["chat_templates"][name])
    row = one(TWO, by)
    assert [text.strip() for text in learned(row, by)] == ["A.<|im_end|>", "B.<|im_end|>"]
    assert row.ids[: prompt_tokens(row)] == by.prompt("x", ASKED, "").token_ids


def test_an_end_token_within_a_turn_is_refused(tokenizer: Any) -> None:
    bad = demonstration("x:4", ASKED, [assistant("A.<|im_end|>\nMore")])
    with pytest.raises(DataError, match=r"^x:4: .*holds the end token <\|im_end\|>; remove it"):
        one(bad, renderer(tokenizer))


def test_a_pair_that_the_template_makes_equal(tokenizer: Any) -> None:
    by = renderer(tokenizer, CHATML.replace("m.content", "m.content | trim"))
    with pytest.raises(DataError, match=r"^x:5: .*the same tokens; remove the row"):
        render(Completed("x:5", ASKED, ([assistant("A")], [assistant("A ")])), by, 200, [END])


# --- texts


def test_texts_without_a_template_are_read_as_they_are() -> None:
    by = renderer(without_template(), None)
    row = one(TEXTS, by)
    # "What" is one token. The prompt is sampled from alone, so it keeps its own.
    assert list(row.ids) == [*by.token_ids("x", "Wh"), *by.token_ids("x", "at"), END]
    assert row.trained == (False, True, True)
    ended = demonstration("x", [user("a b")], [assistant("c<|im_end|>")], is_text=True)
    assert list(one(ended, by).ids) == by.token_ids("x", "a bc<|im_end|>")
    for completion in ("c<|im_end|>d", "c<|im_end|><|im_end|>"):
        twice = demonstration("x:1", [user("a")], [assistant(completion)], is_text=True)
        with pytest.raises(DataError, match="x:1: the completion holds an end token"):
            one(twice, by)
    with pytest.raises(DataError, match=r"^x\.jsonl:1: the row is a conversation .*data\.template"):
        one(ONE, by)


def test_texts_begin_as_the_tokenizer_begins_them() -> None:
    tokenizer = with_bos(adds_it=True)
    tokenizer.chat_template = None
    by = renderer(tokenizer, None)
    assert one(TEXTS, by).ids[0] == 0
    assert one(TEXTS, by).trained == (False, False, True, True)
    assert one(TextDocument("x", "abc"), by).ids == (0, *by.token_ids("x", "abc"), END)
    with pytest.raises(DataError, match="two BOS tokens"):
        one(TextDocument("x", "<|endoftext|>abc"), by)
    tokenizer = with_bos(adds_it=False)
    assert one(TextDocument("x", "abc"), renderer(tokenizer, None)).ids[0] != 0


def test_a_tokenizer_that_puts_a_space_before_a_text() -> None:
    by = renderer(with_spaces())
    row = one(TWO, by)
    text = by.text("x", [*TWO.messages, *TWO.completions[0]], generation=False)
    assert list(row.ids) == by.token_ids("x", text)[: len(row.ids)]
    assert learned(row, by) == ["A.<|im_end|>", "B.<|im_end|>"]


def test_documents_are_cut_into_rows_of_the_context(tokenizer: Any) -> None:
    by = renderer(tokenizer)
    text = "0123456789" * 5
    ids = [*by.token_ids("x", text), END]
    assert len(ids) == 51
    rows = render(TextDocument("x", text), by, 20, [END])
    assert [len(row.ids) for row in rows] == [20, 20, 11]
    assert [each for row in rows for each in row.ids] == ids
    assert all(row.trained == (False, *[True] * (len(row.ids) - 1)) for row in rows)
    assert [row.group for row in rows] == [0, 1, 2]
    assert (
        len(render(TextDocument("x", text), by, 25, [END])) == 2
    )  # one token alone teaches nothing
    assert len(render(TextDocument("x", text), by, 51, [END])) == 1
    assert one(TextDocument("x", "01<|im_end|>"), by).ids == (*by.token_ids("x", "01"), END)


# --- beside TRL


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "cohere"])
def test_what_is_learned_is_what_trl_learns(name: str) -> None:
    """TRL's templates mark the assistant's turns, with the line break after the end token and, in
    some, with the end of what the model is asked with: no policy is sampled to write either."""
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer = with_bos(adds_it=False)
    ends = {"cohere": "<|END_OF_TURN_TOKEN|>"}
    end = END
    if name in ends:
        tokenizer.add_special_tokens({"additional_special_tokens": [ends[name]]})
        end = tokenizer.convert_tokens_to_ids(ends[name])
    by = renderer(tokenizer, (folder / f"{name}.jinja").read_text())
    (row,) = render(TWO, by, 400, [end])
    theirs = tokenizer.apply_chat_template(
        [*TWO.messages, *TWO.completions[0]], return_dict=True, return_assistant_tokens_mask=True,
        chat_template=(folder / f"{name}_training.jinja").read_text(),
    )  # fmt: skip
    assert list(row.ids) == theirs["input_ids"][: len(row.ids)]
    flags = list(zip(row.ids, row.trained, theirs["assistant_masks"], strict=False))
    assert all(flag for _, ours, flag in flags if ours)
    more = [token for token, ours, flag in flags if flag and not ours]
    assert {tokenizer.decode([token]) for token in more} <= {"\n", "<think>"}
