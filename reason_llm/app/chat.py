"""A chat with a policy or its base in a terminal, with the run's template and sampling.

A model's text is data: what a terminal would act on is spelled out. Not here: vLLM."""

import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from reason_llm.config import Config, Count, ModelSection, Section, file as config_file, yaml_text
from reason_llm.data import Messages, Renderer, chat_template, system_prompt
from reason_llm.errors import ConfigError, DataError, ReasonError, printable, without_secrets
from reason_llm.model import Model, adapters, base, decode, quiet_libraries
from reason_llm.run.store import checkpoint, folder as run_folder
from reason_llm.sample import SamplingParams, stop_strings, stream

KEPT = "\n\t\u00a0\u202f\u3000\u200d"
"""Characters that are harmless and that Python calls unprintable, such as joiners in emoji."""
HELP = """\
/base, /adapter        who answers next; the conversation stays
/reset                 forget the conversation
/system TEXT           another system prompt (none: without)
/temperature 0.7       likewise /top_p /top_k /min_p /max_new_tokens /seed
/help, /quit           this, and the end (or Ctrl-D); Ctrl-C stops an answer
A message that begins with / needs a space before it."""


class ChatOptions(Section):
    """Sampling options of a chat."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0: greedy, always the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens with at least this probability. 1: all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest tokens. 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens with at least this fraction of the likeliest token's probability. 0: all."""
    max_new_tokens: Count = 512
    """Longest answer, in tokens."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the random draws. null: a new one each time."""


@dataclass(frozen=True, slots=True)
class ChatSubject:
    """The model of a chat and how it is asked."""

    model: ModelSection
    adapter: Path | None
    template: str = "auto"
    system_prompt: str = "none"
    prompting_reward: str = ""
    """The reward that ``system_prompt: auto`` follows; empty for none."""
    options: dict[str, Any] = field(default_factory=dict)
    """The run's sampling options, unchecked; ``ChatOptions`` checks them."""
    template_arguments: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    plays: bool = False
    """Whether the run's rollouts are in ``sample.environment``, which a chat is not."""
    date: str | None = None
    """The date that the template reads; None: today's."""


def find_subject(
    target: str, adapter: Path | None, which: run_folder.Which = "last"
) -> ChatSubject:
    """The model that ``target`` names: a run's folder, a config, an adapter's folder, or a model's
    folder or Hub id; ``adapter`` is in the place of the run's own, ``which`` of its own.

    Raises:
        ReasonError: it is none of these, or a run without an adapter so far.
    """
    path = Path(target)
    if adapter is not None and which != "last":
        raise ConfigError(f"--which {which} contradicts --adapter {adapter}; leave one of them out")
    if adapter is not None and not run_folder.is_adapter(adapter):
        raise ConfigError(
            f"--adapter {adapter} holds no adapter_config.json; name an adapter's folder, such as "
            "runs/quickstart/adapter"
        )
    for each in (path, adapter or path):
        run_folder.refuse_reward_model(each)
    if run_folder.is_run(path):
        own = None if adapter else run_folder.find_adapter(path, which)
        return _of_run(run_folder.read_config(path), adapter or own)
    if path.suffix in (".yaml", ".yml"):
        config = config_file.load(path)
        run = config.run.directory / str(config.run.name)
        run_folder.refuse_reward_model(run)
        is_own = run_folder.is_run(run) and not adapter
        own = run_folder.find_adapter(run, which) if is_own else None
        if is_own and config.data.date is None:
            config = config.with_options({"data.date": checkpoint.date_of(run)})
        return _of_run(config, adapter or own)
    run_folder.refuse_which(which, target)
    if run_folder.is_adapter(path):
        return ChatSubject(ModelSection(path=adapters.base_of(path)), adapter or path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is neither a run (resolved_config.yaml) nor a model (config.json) nor an "
            "adapter (adapter_config.json); name one of these, or a config file"
        )
    return ChatSubject(ModelSection(path=target), adapter)


def _of_run(config: Config, adapter: Path | None) -> ChatSubject:
    run_folder.check_writes(config, "chat")
    sample = config.sample.model_dump()
    options = {name: sample[name] for name in ChatOptions.model_fields if name in sample}
    data, model = config.data, config.model
    if adapter is not None and not run_folder.is_adapter(adapter):  # a whole model
        model, adapter = model.with_options({"path": str(adapter)}), None
    return ChatSubject(
        model, adapter, data.template, data.system_prompt, config.prompting_reward, options,
        data.template_arguments, tuple(config.sample.stop),
        config.samples and config.sample.environment is not None, data.date,
    )  # fmt: skip


class Chat:
    """A conversation; raises a ReasonError if the model, the adapter or the template cannot be
    used."""

    def __init__(self, subject: ChatSubject, options: ChatOptions) -> None:
        quiet_libraries()
        section, self.adapter = subject.model, subject.adapter
        tokenizer = base.load_tokenizer(section.path, section.trust_remote_code)
        has_one, arguments = tokenizer.chat_template is not None, subject.template_arguments
        self.renderer = Renderer(
            tokenizer,
            chat_template(subject.template, section.path, has_one, arguments, subject.date),
            system_prompt(subject.system_prompt, subject.prompting_reward),
        )
        if self.adapter is not None:
            section = section.with_options({"adapter": adapters.section_of(self.adapter)})
        base.check_model(section)
        self.context_tokens = base.context_limit(section)
        self.model = Model(section, tokenizer, seed=0, checkpointing=False)
        self.model.policy.eval()
        if self.adapter is not None:
            adapters.load_as_is(self.model.policy, self.adapter, section.path)
        self.options = options
        self.stop = subject.stop
        stop_strings(tokenizer, self.stop)
        self.uses_adapter = self.adapter is not None
        self.messages: Messages = []
        """The messages, without the system prompt."""

    def answer(self, text: str) -> Generator[str, None, None]:
        """The answer to the next message, in pieces as they are sampled. Closed early, it leaves
        what was answered so far in the conversation.

        Raises a DataError, when its first piece is asked for, if the template cannot take the
        conversation, or the context has no room for it; the conversation is as it was."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.renderer.prompt("this conversation", messages, answer="")
        room = self.context_tokens - len(prompt.token_ids)
        if room < 1:
            raise DataError(
                f"this conversation takes {len(prompt.token_ids)} of {self.context_tokens} tokens "
                "of context, which leaves none for an answer; forget it with /reset"
            )
        sampling = self.options.model_dump(exclude={"seed", "max_new_tokens"})
        limit = min(self.options.max_new_tokens, room)
        params = SamplingParams(1, limit, **sampling, stop=self.stop)
        seed = self.options.seed
        draws = random.Random(None if seed is None else f"{seed}/chat/{len(messages)}")
        token_ids: list[int] = []

        def sampled() -> Generator[int, None, None]:
            for token in stream(self.model, prompt, params, draws.getrandbits(63)):
                token_ids.append(token)
                yield token

        try:
            with self.model.using("policy" if self.uses_adapter else "reference"):
                yield from text_pieces(sampled(), self._spell)
        finally:
            content = self.renderer.content_of(self._spell(token_ids))
            self.messages = [*messages, {"role": "assistant", "content": content}]

    def _spell(self, token_ids: list[int]) -> str:
        return decode(self.renderer.tokenizer, [token_ids], self.model.end_token_ids)[0]


def text_pieces(
    tokens: Iterable[int], spell: Callable[[list[int]], str]
) -> Generator[str, None, None]:
    """The text of tokens as they arrive, in pieces that end where a character ends.

    Source: the two offsets of ``detokenize_incrementally`` in vLLM."""
    token_ids: list[int] = []
    before = shown = 0  # decoding restarts at token before; the text up to token shown is out
    for token in tokens:
        token_ids.append(token)
        old, new = spell(token_ids[before:shown]), spell(token_ids[before:])
        if len(new) > len(old) and not new.endswith("\ufffd"):
            before, shown = shown, len(token_ids)
            yield new[len(old) :]
    if rest := spell(token_ids[before:])[len(spell(token_ids[before:shown])) :]:
        yield rest


def options_of(subject: ChatSubject, given: Mapping[str, str | None]) -> ChatOptions:
    """The run's options with those on the command line in their place."""
    options = ChatOptions.model_validate(subject.options)
    for name in ChatOptions.model_fields:
        if (value := given.get(name)) is not None:
            options = parse_option(options, name, value)
    return options


def parse_option(options: ChatOptions, name: str, value: str) -> ChatOptions:
    """``options`` with one of them set from text; ``null`` unsets it. Raises a ConfigError."""
    try:
        given = yaml_text.parse(value)
    except ValueError:
        given = value
    try:
        return ChatOptions.model_validate({**options.model_dump(), name: given})
    except ValidationError as error:
        field = ChatOptions.model_fields[name]
        problem = error.errors()[0]["msg"]
        raise ConfigError(
            f"{name}={value!r:.60}: {problem[0].lower() + problem[1:]}; it is "
            f"{config_file.shown_type(field)}: {config_file.docstring(field)}"
        ) from error


def talk(chat: Chat) -> None:
    """Answer messages from the terminal until Ctrl-D or ``/quit``."""
    import readline  # line editing and history, for input()

    # Python turns it off for its own prompt; with it pasted lines are one message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    adapter = f" with the adapter {chat.adapter}" if chat.adapter else ", without an adapter"
    say(f"{chat.model.path}{adapter}. /help lists the commands; Ctrl-D leaves.\n")
    while True:
        try:
            message = input("adapter> " if chat.uses_adapter else "base> ")
            if message.strip() in ("/quit", "/exit"):
                return
            if message.startswith("/"):
                say(_obey(chat, *message[1:].strip().partition(" ")[::2]))
            elif message.strip():
                with _stoppable():
                    print_answer(chat, message.strip())
        except KeyboardInterrupt:  # at the prompt, whose line stays
            say("\n")
        except EOFError:
            say("\n")
            return
        except ReasonError as error:
            say(f"{error}\n")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Context that Ctrl-C ends, with a word."""
    try:
        yield
    except KeyboardInterrupt:
        say(" (stopped)\n")


def print_answer(chat: Chat, message: str) -> None:
    """Write an answer to standard output as it is sampled."""
    with closing(chat.answer(message)) as answer:
        for piece in answer:
            say(piece)
    say("\n")


def say(text: str) -> None:
    """Write text to standard output, without what a terminal acts on."""
    sys.stdout.write(without_secrets(printable(text, keep=KEPT)))
    sys.stdout.flush()


def _obey(chat: Chat, name: str, rest: str) -> str:
    """Carry out a command, and return what to say."""
    if name in ChatOptions.model_fields:
        if rest.strip():
            chat.options = parse_option(chat.options, name, rest.strip())
        value = getattr(chat.options, name)
        return f"{name} {'null' if value is None else value}\n"
    match name:
        case "base":
            chat.uses_adapter = False
        case "adapter" if chat.adapter is None:
            return "there is no adapter; start the chat with a run, or --adapter FOLDER\n"
        case "adapter":
            chat.uses_adapter = True
        case "reset":
            chat.messages = []
        case "system":
            if rest.strip():
                prompt = system_prompt(rest.strip(), "")
                chat.renderer = replace(chat.renderer, system_prompt=prompt)
            return f"{chat.renderer.system_prompt or 'there is no system prompt'}\n"
        case "help":
            return f"{HELP}\n"
        case _:
            return f"/{name} is no command; /help lists them\n"
    return ""
