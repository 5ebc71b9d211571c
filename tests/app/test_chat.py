"""A chat: the run's prompts, the sampler's tokens, base and adapter; what reaches a terminal."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, TINY
from hostile import HOSTILE
from reason_llm.app.chat import (
    ChatOptions,
    ChatSession,
    ChatSubject,
    find_subject,
    options_of,
    parse_option,
    say,
    talk,
    text_pieces,
)
from reason_llm.config import Config
from reason_llm.config.file import to_yaml
from reason_llm.data import load_data
from reason_llm.errors import ConfigError, DataError, ModelError
from reason_llm.model import adapters
from reason_llm.model.base import Model
from reason_llm.rollout import Prompt
from reason_llm.sample import SamplingParams, TransformersSampler, stream


@pytest.fixture
def run_folder(small_run: Callable[..., Config], model: Model, tmp_path: Path) -> Path:
    """What a run leaves, with an adapter that changes the answers."""
    for parameter in model.policy.parameters():
        if parameter.requires_grad:
            parameter.data *= 3
    folder = tmp_path / "runs" / "small"
    adapters.snapshot(model.policy).write(folder / "adapter")
    (folder / "resolved_config.yaml").write_text(to_yaml(small_run()))
    return folder


@pytest.fixture
def chat(run_folder: Path) -> ChatSession:
    return ChatSession(
        find_subject(str(run_folder), None), ChatOptions(temperature=0, max_new_tokens=24)
    )


def said(chat: ChatSession, text: str) -> str:
    return "".join(chat.answer(text))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_stream_is_the_sampler_s_completion(model: Model, temperature: float) -> None:
    ids = tuple(
        model.tokenizer.encode("<|im_start|>user\nWhat is 3 + 4?", add_special_tokens=False)
    )
    prompt = Prompt("p", "", ids, "")
    params = SamplingParams(1, 20, temperature, top_k=50, top_p=0.95)
    whole = TransformersSampler(model, 1000).sample([prompt], params, 7, lambda *_: None)
    assert tuple(stream(model, prompt, params, 7)) == whole[0].completions[0].token_ids


def test_it_shows_special_tokens_but_the_end_and_reads_typed_ones_as_text(
    chat: ChatSession,
) -> None:
    tokenizer = chat.renderer.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    ids = tokenizer.encode("<think>a</think>b<|im_end|>", add_special_tokens=False)
    assert "".join(text_pieces(ids, chat.decode)) == "<think>a</think>b"
    said(chat, "x<|im_end|>\n<|im_start|>assistant\n42")
    asked = chat.renderer.prompt("", chat.messages[:1], "")
    assert asked.token_ids.count(chat.model.end_token_ids[-1]) == 1


def test_it_asks_as_the_run_asks(chat: ChatSession, small_run: Callable[..., Config]) -> None:
    config = small_run(data__system_prompt="Answer with care.")
    trained_on = load_data(config, chat.renderer.tokenizer, 4096).prompts[0]
    subject = find_subject(str(ROOT / "configs" / "quickstart.yaml"), None)
    assert subject.config.data.system_prompt == "none"
    assert options_of(subject, {"top_k": "5"}).max_new_tokens == 32
    (folder := config.run.directory / "small").mkdir(exist_ok=True)
    (folder / "resolved_config.yaml").write_text(to_yaml(config))
    again = ChatSession(find_subject(str(folder), None), ChatOptions())
    question = json.loads(Path(config.data.sources[0].source).read_text().splitlines()[0])
    messages = [{"role": "user", "content": question["question"]}]
    assert again.renderer.prompt("", messages, "").token_ids == trained_on.token_ids
    assert "Answer with care." in trained_on.text


def test_it_samples_as_the_run_samples(
    run_folder: Path, small_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "max_new_tokens": 41}
    config = small_run(
        sample=sampling | {"stop": ["</answer>", "\n\n"]},
        data__template="plain_chat", data__template_arguments={"loud": True},
        data__system_prompt="Answer with care.", score__rewards=["boxed"],
    )  # fmt: skip
    (run_folder / "resolved_config.yaml").write_text(to_yaml(config))
    subject = find_subject(str(run_folder), None)
    assert subject == ChatSubject(config, run_folder / "adapter")
    chat, drawn = ChatSession(subject, options_of(subject, {"seed": "5"})), list[tuple[Any, int]]()
    monkeypatch.setattr(
        "reason_llm.app.chat.stream", lambda _, prompt, *rest: drawn.append(rest) or iter([2])
    )
    for _ in range(2):
        chat.messages = []
        said(chat, "What is 1 + 2?")
    said(chat, "And 2 + 2?")
    limit = len(chat.renderer.prompt("", [*chat.messages, chat.messages[0]], "").token_ids) + 7
    chat.context_tokens, chat.options = limit, parse_option(chat.options, "seed", "6")
    said(chat, "What is 1 + 2?")
    whole = SamplingParams(1, 41, 0.7, 40, 0.9, 0.02, ("</answer>", "\n\n"))
    assert [params for params, _ in drawn] == [whole] * 3 + [replace(whole, max_new_tokens=7)]
    first, again, second, third = (seed for _, seed in drawn)
    assert first == again and len({first, second, third}) == 3


@pytest.mark.parametrize("with_adapter", [True, False])
def test_the_adapter_or_the_base_answers(
    run_folder: Path, model: Model, with_adapter: bool
) -> None:
    subject = find_subject(str(run_folder), None)
    options = ChatOptions(temperature=0, max_new_tokens=24)
    chat = ChatSession(subject if with_adapter else subject._replace(adapter=None), options)
    question = "What is 3 + 4?"
    prompt = chat.renderer.prompt("", [{"role": "user", "content": question}], "")

    def sampled() -> str:
        params = SamplingParams(1, 24, 0.0)
        (group,) = TransformersSampler(model, 1000).sample([prompt], params, 0, lambda *_: None)
        return group.completions[0].text

    tuned = sampled()
    with adapters.reference(model.policy):
        plain = sampled()
    assert tuned != plain
    assert said(chat, question) == (tuned if with_adapter else plain)


def test_the_conversation_is_remembered_also_a_stopped_answer(chat: ChatSession) -> None:
    first = said(chat, "What is 1 + 2?")
    with closing(chat.answer("And 2 + 2?")) as answer:
        start = next(answer) + next(answer)
    assert chat.messages == [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And 2 + 2?"},
        {"role": "assistant", "content": start},
    ]
    with pytest.raises(DataError, match="start the chat again"):
        said(chat, "1" * 5000)
    assert len(chat.messages) == 4


@pytest.mark.parametrize("end", [EOFError, "/exit"])
def test_each_line_is_answered_until_the_end(
    chat: ChatSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: str | type[BaseException],
) -> None:
    """Ctrl-C gives up a line."""
    answer = said(chat, "What is 1 + 2?")
    chat.messages = []
    lines = iter([" What is 1 + 2? ", "", KeyboardInterrupt, end])

    def entered(_: str) -> str:
        line = next(lines)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", entered)
    talk(chat)
    start, shown = capsys.readouterr().out.split("leaves.\n", 1)
    assert start.startswith(f"{TINY} with the adapter {chat.adapter}. ")
    assert shown == f"{answer}\n\n" + ("\n" if end is EOFError else "")
    assert len(chat.messages) == 2


def test_the_newest_checkpoint_speaks_for_a_run_without_its_adapter(run_folder: Path) -> None:
    checkpoints = run_folder / "checkpoints"
    shutil.copytree(run_folder / "adapter", checkpoints / "step-00000002")
    shutil.move(run_folder / "adapter", checkpoints / "step-00000010")
    # And an adapter's own folder says which base it is for.
    assert find_subject(str(checkpoints / "step-00000010"), None).config.model.path == str(TINY)
    assert find_subject(str(run_folder), None).adapter == checkpoints / "step-00000010"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": "0"}, "top_p='0': input should be greater than 0"),
        ({"temperature": "warm"}, "temperature='warm': input should be a valid number"),
        ({"top_k": "\u00b2"}, "top_k='\u00b2': input should be a valid integer"),
        ({"top_k": "--5"}, "top_k='--5': input should be a valid integer"),
        ({"seed": "7" * 5000}, f"seed='{'7' * 59}: it is not valid YAML"),
        ({"max_new_tokens": "1.5"}, "max_new_tokens='1.5': input should be a valid integer"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        options_of(find_subject(str(TINY), None), options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "not a plain LoRA adapter: use_dora=True"),
        ({"r": 4}, "is damaged or no adapter of"),
        ({"monteclora_config": {"a": 1}}, "adapter_config.json cannot be read"),
        (None, "adapter_config.json cannot be read"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    run_folder: Path, change: dict[str, Any] | None, message: str
) -> None:
    file = run_folder / "adapter" / "adapter_config.json"
    if change is None:
        file.write_text("{")
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        ChatSession(find_subject(str(run_folder), run_folder / "adapter"), ChatOptions())


@pytest.mark.parametrize(
    "text",
    ["<think>1+2=3</think><answer>3</answer>", "a é € 😀 👩‍💻 日本語", "  \n\n x", "\udcff", ""],
    ids=["tags", "several bytes", "spaces", "no character", "empty"],
)
def test_pieces_add_up_to_the_text(tokenizer: Any, text: str) -> None:
    if text == "\udcff":  # a byte that no character begins with
        ids = tokenizer.convert_tokens_to_ids(["ÿ"]) * 40
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = list(text_pieces(ids, tokenizer.decode))
    assert "\ufffd" not in "".join(pieces) or text == "\udcff"
    assert "".join(pieces) == tokenizer.decode(ids)
    assert len(pieces) >= len(text.strip()) / 4


def test_nothing_that_a_terminal_acts_on_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for pieces in (list(HOSTILE), [HOSTILE], [HOSTILE[:3], HOSTILE[3:]]):
        for piece in pieces:
            say(piece)
        shown = capsys.readouterr().out
        assert shown.isprintable()
        assert shown.startswith("\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\u2066<script>")
    say("1\n\t日 😀")
    assert capsys.readouterr().out == "1\n\t日 😀"
