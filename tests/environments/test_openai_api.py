"""Requests in OpenAI's forms: what is honoured, what is refused, and that any is answered."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings, strategies as st
from test_sessions import END, TOKENIZER, call, ids_of, qwen
from test_token_server import ASKED, PROMPT, WHY, Direct, direct

from reason_llm.rollout import Span
from reason_llm.sample.openai_api import _HARMLESS, _ONLY

__all__ = ["direct"]
RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", "function": {"name": "times", "parameters": {}}}]


def test_an_answer_is_cut_at_a_stop_string(direct: Any) -> None:
    """What came before is learned; the piece of a token before the string is read, not learned."""
    own = direct()
    for stop in ("</code>", ["</code>", "never"]):
        _, content = own.ask({"messages": ASKED, "stop": stop}, "it is five</code> and more", False)
        (choice,) = content["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("it is five", "stop")
    branch = own.session.branches[0]
    sampled = [id for n, id in enumerate(branch.ids)
               if not any(span.start <= n < span.end for span in branch.spans)]  # fmt: skip
    assert "it is five</code> and more".startswith(TOKENIZER.decode(sampled))
    assert TOKENIZER.decode(branch.ids) == "it is five" and len(branch.ids) == len(branch.logprobs)
    assert content["usage"]["completion_tokens"] == len(sampled) == branch.sampled
    assert own.session.notes == {"turns": 2, "stops": 2} and own.session.why == "environment"
    own.ask({"messages": [*ASKED, choice["message"], WHY], "stop": []}, "so")
    assert TOKENIZER.decode(own.asked[-1]).endswith(
        "it is five<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert own.session.notes["stops"] == 2


def test_a_token_that_a_stop_string_divides_is_not_learned(direct: Any) -> None:
    token = max((t for t in TOKENIZER.get_vocab() if t.isascii() and t.isalpha()), key=len)
    assert len(token) > 1 and len(ids_of(token)) == 1
    own = direct()
    (choice,) = own.ask({"messages": ASKED, "stop": token[1:]}, "5 " + token)[1]["choices"]
    (branch,) = own.session.branches
    assert choice["message"]["content"] == "5 " + token[0] == TOKENIZER.decode(branch.ids)
    assert branch.spans == [Span(branch.sampled, len(branch.ids))]
    assert branch.sampled < len(ids_of("5 " + token))


def test_an_answer_of_which_nothing_is_left_is_not_learned(direct: Any) -> None:
    own = direct()
    (choice,) = own.ask({"messages": ASKED, "stop": "it"}, "it is")[1]["choices"]
    assert choice["message"]["content"] == "" and own.session.branches == []


def test_log_probs_are_those_of_what_was_sampled(direct: Any) -> None:
    own = direct()
    asked = {"messages": ASKED, "logprobs": True, "top_logprobs": 0, "seed": 3}
    (choice,) = own.ask(asked, "five")[1]["choices"]
    content = choice["logprobs"]["content"]
    assert [each["logprob"] for each in content] == own.session.branches[0].logprobs
    assert "".join(each["token"] for each in content).startswith("five")
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert own.ask({"messages": ASKED})[1]["choices"][0]["logprobs"] is None


def test_whether_tools_may_be_called(direct: Any) -> None:
    own, text = direct(made=qwen(), context=3000), call("times", "{}")
    for choice, reason in (("none", "stop"), ("auto", "tool_calls"), (None, "tool_calls")):
        asked = {"messages": ASKED, "tools": TOOLS, "tool_choice": choice}
        (answer,) = own.ask(asked, text)[1]["choices"]
        assert answer["finish_reason"] == reason
        assert (answer["message"]["content"] == text) == (choice == "none")
    assert len(set(own.asked)) == 1  # the prompt names the tools in each
    own.ask({"messages": [*ASKED, answer["message"], WHY]}, "a")
    assert len(own.session.branches) == 4  # other tools, another conversation


def test_a_stream_is_one_chunk(direct: Any) -> None:
    own = direct(made=qwen(), context=3000)
    asked = {"messages": ASKED, "tools": TOOLS, "stream": True}
    _, body = own.ask(asked | {"stream_options": {"include_usage": True}}, call("times", '{"a":1}'))
    *chunks, end = [line.removeprefix(b"data: ") for line in body.strip().split(b"\n\n")]
    first, last = map(orjson.loads, chunks)
    (made,) = first["choices"][0]["delta"]["tool_calls"]
    assert (made["index"], made["function"]) == (0, {"name": "times", "arguments": '{"a":1}'})
    assert first["choices"][0]["finish_reason"] == "tool_calls" and end == b"[DONE]"
    assert last["choices"] == [] and last["usage"]["total_tokens"] > 0
    assert len(own.ask(asked, "no")[1].strip().split(b"\n\n")) == 2


def test_a_conversation_of_responses_goes_on_from_the_ids_so_far(direct: Any) -> None:
    own = direct(made=qwen(), context=3000)
    tools = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]  # type: ignore[dict-item]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "2 + 3 = ?"}]}]
    asked = {"tools": tools, "include": [], "text": {"format": {"type": "text"}}, "store": True}
    _, content = own.ask(
        {"input": items, **asked}, "First. " + call("times", '{"a":6}'), path=RESPONSES
    )
    said, made = content["output"]
    assert (said["content"][0]["text"], made["arguments"]) == ("First.", '{"a":6}')
    assert content["status"] == "completed"
    items += [
        said,
        made,
        {"type": "function_call_output", "call_id": made["call_id"], "output": "42"},
    ]
    own.ask({"input": items, **asked}, "it is 42", path=RESPONSES)
    (branch,) = own.session.branches
    assert TOKENIZER.decode(branch.ids).count("<tool_response>\n42\n</tool_response>") == 1
    _, body = own.ask(
        {"input": "2 + 3 = ?", "stream": True, "instructions": "Be brief."}, "5", path=RESPONSES
    )
    kinds = [line.partition(b"\n")[0] for line in body.strip().split(b"\n\n")]
    assert (kinds[0], kinds[-1]) == (b"event: response.created", b"event: response.completed")
    assert b"output_text.delta" in body and "Be brief." in TOKENIZER.decode(own.asked[-1])
    _, cut = own.ask({"input": "a", "max_output_tokens": 3}, "x" * 60, path=RESPONSES)
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    for body, says in (
        ({"previous_response_id": "x"}, "send the whole conversation"),
        ({"text": {"format": {"type": "json_schema"}}}, "a mask over tokens is not part of what"),
        ({"tools": [{"type": "web_search"}]}, "give functions"),
        ({"reasoning": {"effort": "high"}}, "reasoning={'effort': 'high'} is not offered"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
    ):
        status, refused = own.ask({"input": "a", **body}, path=RESPONSES)
        assert status == 400 and says in refused["error"]["message"]


def test_a_filter_that_is_ignored_is_warned_of_once(
    direct: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reason_llm.sample.openai_api._WARNED", set())
    own = direct()
    for temperature in (1.0, 0.2, 0.3):
        assert own.ask({"messages": ASKED, "temperature": temperature}, "5")[0] == 200
    (record,) = caplog.records
    assert "temperature=0.2 of a request is ignored" in record.message
    assert "as sample.temperature=1 says" in record.message


MEMBERS = sorted(
    {*_HARMLESS, *_ONLY, "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "seed",
     "logprobs", "stream", "temperature", "top_p", "input", "instructions", "include",
     "max_output_tokens", "other"}
)  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(),
    st.text(max_size=20),
    st.sampled_from(["none", "auto", "required", "user", "\x00", "<|im_end|>", "{{ x }}"]),
)  # fmt: skip
WORDS = st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name",
                         "arguments", "parameters", "call_id", "output"])  # fmt: skip
ANY = st.recursive(
    ODD, lambda some: st.lists(some, max_size=3) | st.dictionaries(WORDS, some, max_size=4),
    max_leaves=8,
)  # fmt: skip
USUAL: dict[str, Any] = {
    "/v1/chat/completions": {"messages": ASKED, "tools": TOOLS},
    RESPONSES: {"input": "a"},
}


@pytest.mark.parametrize("path", USUAL)
def test_any_request_is_answered(path: str) -> None:
    """200 or 400, and the rollout lives: the next whole request is answered."""

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(MEMBERS), ANY, max_size=3), ANY)
    def ask(odd: dict[str, Any], deep: Any) -> None:
        own = Direct(made=qwen(), context=2000, turns=50)
        try:
            body = {**USUAL[path], **odd}
            if isinstance(deep, dict) and path.endswith("completions"):
                body["messages"] = [*ASKED, deep, {"role": "user", "content": "a"}]
            status, answer = own.ask(body, "5", path=path)
            assert status in (200, 400)
            assert status == 200 or answer["error"]["message"]
            assert own.most == [] or own.most[0] >= 1
            assert own.ask({"messages": ASKED}, "5")[0] == 200
        finally:
            own.server._loop.close()

    ask()


def test_requests_from_one_point_of_a_conversation_are_conversations(direct: Any) -> None:
    """As of ``asyncio.gather``: both are asked with the ids so far, and neither loses the other."""
    own = direct()
    talk = [*ASKED, own.chat(ASKED, "five"), WHY]
    branch = own.session.branches[0]
    begun = len(branch.ids)
    own.together([{"messages": talk}] * 2, ["one", "two"])
    first, second = own.session.branches
    assert first is branch and second.prompt == own.asked[1] == own.asked[2]
    assert second.ids == [*ids_of("two"), END] and first.ids[
        -len(ids_of("one")) - 1 : -1
    ] == ids_of("one")
    assert len(first.ids) > begun and first.prompt == PROMPT
    assert own.session.notes == {"turns": 3}
