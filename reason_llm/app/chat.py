"""Chat in a terminal with a policy or its base, with the run's prompts and sampling options.

The model's text is untrusted: control characters are escaped. vLLM is not used."""

import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from reason_llm.config import Config, SampleSection, file as config_file, yaml_text
from reason_llm.data import Messages, Renderer, chat_template, system_prompt
from reason_llm.errors import ConfigError, DataError, ReasonError, printable, without_secrets
from reason_llm.model import Model, adapters, base, decode, load_tokenizer, quiet_libraries
from reason_llm.run.store import checkpoint, folder as run_folder
from reason_llm.sample import SamplingParams, stop_strings, stream

KEPT = "\n\t\u00a0\u202f\u3000\u200d"
"""Harmless characters that Python calls unprintable, such as joiners in emoji."""


class ChatOptions(SampleSection):
    """The run's sampling options, with a seed and greedy decoding."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Divisor of the logits. 0: greedy decoding."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the random draws. null: a new one each time."""

    def params(self, max_tokens: int, stop: Sequence[str] = ()) -> SamplingParams:
        """Sampling parameters of one answer of at most ``max_tokens``."""
        return SamplingParams(
            1, max_tokens, self.temperature, self.top_k, self.top_p, self.min_p, tuple(stop)
        )


class ChatSubject(NamedTuple):
    """The config for prompts and sampling, and the adapter, if any."""

    config: Config
    adapter: Path | None


def find_subject(
    target: str, adapter: Path | None, which: run_folder.Which = "last"
) -> ChatSubject:
    """The model that ``target`` names: a run's folder, a config, an adapter's folder, or a model's
    folder or Hub id. ``adapter`` replaces the run's own."""
    path = Path(target)
    if adapter is not None:
        run_folder.refuse_which(which, f"--adapter {adapter}")
        if not run_folder.is_adapter(adapter):
            raise ConfigError(
                f"--adapter {adapter} holds no adapter_config.json; name an adapter's folder, such "
                "as runs/quickstart/adapter"
            )
    run_folder.check_writes(adapter or path, "chat")
    is_config = path.suffix in (".yaml", ".yml")
    if is_config or run_folder.is_run(path):
        config = config_file.load(path) if is_config else run_folder.read_config(path)
        run = config.run.directory / str(config.run.name) if is_config else path
        run_folder.check_writes(config, "chat")
        if adapter is None and run_folder.is_run(run):
            adapter = run_folder.find_adapter(run, which)
            date = config.data.date or checkpoint.date_of(run)
            config = config.with_options({"data.date": date})
        if adapter is not None and not run_folder.is_adapter(adapter):  # a whole model
            return ChatSubject(config.with_options({"model.path": str(adapter)}), None)
        return ChatSubject(config, adapter)
    run_folder.refuse_which(which, target)
    if run_folder.is_adapter(path):
        target, adapter = adapters.base_of(path), adapter or path
    elif path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is neither a run (resolved_config.yaml) nor a model (config.json) nor an "
            "adapter (adapter_config.json); name one of these, or a config file"
        )
    data = {"train": "none", "system_prompt": "none"}
    tree = {"stage": "sft", "model": {"path": target}, "data": data}  # sft: without rewards
    return ChatSubject(Config.model_validate(tree), adapter)


class ChatSession:
    """A loaded model and the messages so far."""

    def __init__(self, subject: ChatSubject, options: ChatOptions) -> None:
        quiet_libraries()
        (config, self.adapter), self.options = subject, options
        section, data = config.model, config.data
        tokenizer = load_tokenizer(section.path, section.trust_remote_code)
        has_one, arguments = tokenizer.chat_template is not None, data.template_arguments
        template = chat_template(data.template, section.path, has_one, arguments, data.date)
        prompt = system_prompt(data.system_prompt, config.prompting_reward)
        self.renderer = Renderer(tokenizer, template, prompt)
        if self.adapter is not None:
            section = section.with_options({"adapter": adapters.section_of(self.adapter)})
        base.check_model(section)
        self.context_tokens = base.context_limit(section)
        self.model = Model(section, tokenizer, seed=0, checkpointing=False)
        self.model.policy.eval()
        if self.adapter is not None:
            adapters.load_as_is(self.model.policy, self.adapter, section.path)
        stop_strings(tokenizer, tuple(options.stop))
        self.messages: Messages = []
        """The messages, without the system prompt."""

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to the next message in pieces; if closed early, keep the part so far.
        Raises a DataError before the first piece if the context is full."""
        # The messages are replaced at the end, so that an error leaves the conversation as it was.
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.renderer.prompt("this conversation", messages, answer="")
        room = self.context_tokens - len(prompt.token_ids)
        if room < 1:
            raise DataError(
                f"this conversation takes {len(prompt.token_ids)} of {self.context_tokens} tokens "
                "of context, which leaves none for an answer; start the chat again"
            )
        options = self.options
        params = options.params(min(options.max_new_tokens, room), options.stop)
        seed = None if options.seed is None else f"{options.seed}/chat/{len(messages)}"
        draw = random.Random(seed).getrandbits(63)
        token_ids: list[int] = []

        def sampled() -> Generator[int, None, None]:
            for token in stream(self.model, prompt, params, draw):
                token_ids.append(token)
                yield token

        try:
            with self.model.using("reference" if self.adapter is None else "policy"):
                yield from text_pieces(sampled(), self.decode)
        finally:
            content = self.renderer.content_of(self.decode(token_ids))
            self.messages = [*messages, {"role": "assistant", "content": content}]

    def decode(self, token_ids: list[int]) -> str:
        """Text of an answer's tokens, without the end tokens."""
        return decode(self.renderer.tokenizer, [token_ids], self.model.end_token_ids)[0]


def text_pieces(
    tokens: Iterable[int], spell: Callable[[list[int]], str]
) -> Generator[str, None, None]:
    """Yield the text of tokens as they arrive, in pieces of whole characters.

    Source: the two offsets of ``detokenize_incrementally`` in vLLM."""
    token_ids: list[int] = []
    restart = end = 0  # yielded: the text before token end; decoding restarts at an earlier token
    for token in tokens:
        token_ids.append(token)
        old, new = spell(token_ids[restart:end]), spell(token_ids[restart:])
        if len(new) > len(old) and not new.endswith("\ufffd"):
            restart, end = end, len(token_ids)
            yield new[len(old) :]
    if tail := spell(token_ids[restart:])[len(spell(token_ids[restart:end])) :]:
        yield tail


def options_of(subject: ChatSubject, texts: Mapping[str, str | None]) -> ChatOptions:
    """The run's options, replaced by those on the command line."""
    options = ChatOptions.model_validate(subject.config.sample.model_dump())
    for name in ChatOptions.model_fields:
        if (value := texts.get(name)) is not None:
            options = parse_option(options, name, value)
    return options


def parse_option(options: ChatOptions, name: str, value: str) -> ChatOptions:
    """``options`` with one of them set from text; ``null`` unsets it. Raises a ConfigError."""
    try:
        return ChatOptions.model_validate(options.model_dump() | {name: yaml_text.parse(value)})
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfigError(f"{name}={value!r:.60}: {problem[0].lower()}{problem[1:]}") from error
    except ValueError as error:
        raise ConfigError(f"{name}={value!r:.60}: it is not valid YAML") from error


def talk(chat: ChatSession) -> None:
    """Answer messages from the terminal until Ctrl-D or ``/exit``."""
    import readline  # line editing and history, for input()

    # Python turns it off for its own prompt; with it pasted lines are one message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    adapter = f" with the adapter {chat.adapter}" if chat.adapter else ", without an adapter"
    say(f"{chat.model.path}{adapter}. Ctrl-C stops an answer; /exit or Ctrl-D leaves.\n")
    while True:
        try:
            message = input("> ").strip()
            if message == "/exit":
                return
            if message:
                print_answer(chat, message)
        except KeyboardInterrupt:
            say("\n")
        except EOFError:
            say("\n")
            return
        except ReasonError as error:
            say(f"{error}\n")


def print_answer(chat: ChatSession, message: str) -> None:
    """Write an answer to standard output as it is sampled."""
    with closing(chat.answer(message)) as answer:
        for piece in answer:
            say(piece)
    say("\n")


def say(text: str) -> None:
    """Write text to standard output with control characters escaped."""
    sys.stdout.write(without_secrets(printable(text, keep=KEPT)))
    sys.stdout.flush()
