"""A chat with the base or its adapter, with the run's template and sampling, token by token, in a
terminal.

What a model says is data: whatever a terminal would act on is spelled out, character by character,
so that nothing can hide in the seam of two pieces. Not here: vLLM."""

import difflib
import os
import random
import sys
from collections.abc import Collection, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field, ValidationError

from reason_llm.config import (
    Config,
    Count,
    ModelSection,
    Section,
    file as config_file,
    yaml_text,
)
from reason_llm.data import Messages, Renderer, chat_template, system_prompt
from reason_llm.errors import (
    ConfigError,
    DataError,
    ReasonError,
    printable,
    secrets,
    without_secrets,
)
from reason_llm.model import Model, adapters, base, decode, quiet_libraries
from reason_llm.run.store import checkpoint, folder as run_folder
from reason_llm.sample import SamplingParams, stop_strings, stream


class Options(Section):
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
class Subject:
    """The model of a chat and how it is asked."""

    model: ModelSection
    adapter: Path | None
    template: str = "auto"
    system_prompt: str = "none"
    prompting_reward: str = ""
    """The reward that ``system_prompt: auto`` follows; empty for none."""
    options: dict[str, Any] = field(default_factory=dict)
    """The run's sampling options, unchecked; ``Options`` checks them."""
    template_arguments: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    plays: bool = False
    """Whether the run's rollouts are in ``sample.environment``, which a chat is not."""
    date: str | None = None
    """The date that the template reads; None: today's."""


def find_subject(target: str, adapter: Path | None, which: run_folder.Which = "last") -> Subject:
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
        return Subject(ModelSection(path=adapters.base_of(path)), adapter or path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is neither a run (resolved_config.yaml) nor a model (config.json) nor an "
            "adapter (adapter_config.json); name one of these, or a config file"
        )
    return Subject(ModelSection(path=target), adapter)


def _of_run(config: Config, adapter: Path | None) -> Subject:
    run_folder.check_writes(config, "chat")
    sample = config.sample.model_dump()
    options = {name: sample[name] for name in Options.model_fields if name in sample}
    data, model = config.data, config.model
    if adapter is not None and not run_folder.is_adapter(adapter):  # a whole model
        model, adapter = model.with_options({"path": str(adapter)}), None
    return Subject(
        model, adapter, data.template, data.system_prompt, config.prompting_reward, options,
        data.template_arguments, tuple(config.sample.stop),
        config.samples and config.sample.environment is not None, data.date,
    )  # fmt: skip


class Chat:
    """A conversation; raises a ReasonError if the model, the adapter or the template cannot be
    used."""

    def __init__(self, subject: Subject, options: Options) -> None:
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
                "of context, which leaves none for an answer; begin a new one with /new"
            )
        options = self.options
        params = SamplingParams(
            1, min(options.max_new_tokens, room), temperature=options.temperature,
            top_k=options.top_k, top_p=options.top_p, min_p=options.min_p, stop=self.stop,
        )  # fmt: skip
        seed = None if options.seed is None else f"{options.seed}/chat/{len(messages)}"
        draws = random.Random(seed).getrandbits(63)
        spelled = Detokenizer(self.renderer.tokenizer, self.model.end_token_ids)
        try:
            with self.model.using("policy" if self.uses_adapter else "reference"):
                for token in stream(self.model, prompt, params, draws):
                    if piece := spelled.add(token):
                        yield piece
            if piece := spelled.rest():
                yield piece
        finally:
            content = self.renderer.content_of(spelled.text)
            self.messages = [*messages, {"role": "assistant", "content": content}]

    def begins_thinking(self) -> bool:
        """Whether the template opens the thinking part before the model writes anything."""
        prompt = self.renderer.prompt("a test", [{"role": "user", "content": "1"}], answer="")
        return prompt.text.rstrip().endswith("<think>")


class Detokenizer:
    """Text of tokens as they arrive: a piece ends where a character ends, and all pieces together
    are the text of all tokens, except for a byte that spoils those before it (``text`` has it).

    Source: the two offsets of ``detokenize_incrementally`` in vLLM."""

    LONGEST = 16
    """A character has at most this many tokens; longer incomplete bytes are shown as they are."""

    def __init__(self, tokenizer: Any, end_token_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = end_token_ids
        self.token_ids: list[int] = []
        self._before, self._shown = 0, 0
        """Decoding restarts at token ``_before``; the text up to ``_shown`` was returned."""

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return self._spell(self.token_ids)

    def add(self, token: int) -> str:
        """Text that is complete after this token."""
        self.token_ids.append(token)
        return self._piece(last=len(self.token_ids) - self._shown > self.LONGEST)

    def rest(self) -> str:
        """The text that was held back until the end."""
        return self._piece(last=True)

    def _piece(self, last: bool) -> str:
        old = self._spell(self.token_ids[self._before : self._shown])
        new = self._spell(self.token_ids[self._before :])
        if len(new) <= len(old) or (new.endswith("\ufffd") and not last):
            return ""
        self._before, self._shown = self._shown, len(self.token_ids)
        return new[len(old) :]

    def _spell(self, token_ids: list[int]) -> str:
        return decode(self.tokenizer, [token_ids], self.end_token_ids)[0]


def options_of(subject: Subject, given: Mapping[str, str | None]) -> Options:
    """The run's options with those on the command line in their place."""
    options = Options.model_validate(subject.options)
    for name in Options.model_fields:
        if (value := given.get(name)) is not None:
            options = parse_option(options, name, value)
    return options


def parse_option(options: Options, name: str, value: str) -> Options:
    """``options`` with one of them set from text; ``null`` unsets it. Raises a ConfigError."""
    try:
        given = yaml_text.parse(value)
    except ValueError:
        given = value
    try:
        return Options.model_validate({**options.model_dump(), name: given})
    except ValidationError as error:
        field = Options.model_fields[name]
        problem = error.errors()[0]["msg"]
        raise ConfigError(
            f"{name}={value!r:.60}: {problem[0].lower() + problem[1:]}; it is "
            f"{config_file.shown_type(field)}: {config_file.docstring(field)}"
        ) from error


KEPT = "\n\t\u00a0\u202f\u3000\u200d"
"""Characters that are harmless and that Python calls unprintable, such as joiners in emoji."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

COMMANDS = ("base", "adapter", "again", "new", "system", "settings", "help", "quit")
HELP = """\
/base, /adapter        who answers next; the conversation goes on
/again                 the last message once more
/new                   forget the conversation
/system TEXT           another system prompt (none: without)
/temperature 0.7       likewise /top_p /top_k /min_p /max_new_tokens /seed
/settings              all of these
/help, /quit           this, and the end (or Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one; so does
all between two lines of three quotes. What is pasted is one message. A message
that begins with / needs a space before it."""


class AnswerWriter:
    """Writes an answer's pieces without the environment's secrets; the thinking part, in which the
    answer may begin, is dim on a terminal that is ``styled``."""

    def __init__(self, out: TextIO, styled: bool, thinking: bool) -> None:
        self._out = out
        self._styled = styled
        self._thinking = thinking
        self._held = ""
        self._secrets = secrets()
        if thinking:
            self._style(DIM)

    def write(self, piece: str) -> None:
        """Show a piece, except an end that may become a tag or a secret."""
        text = without_secrets(self._held + piece, self._secrets)
        while (at := text.find(self._tag)) >= 0:
            end = at + len(self._tag)
            if self._thinking:
                self._show(text[:end])
                self._style(PLAIN)
            else:
                self._show(text[:at])
                self._style(DIM)
                self._show(text[at:end])
            self._thinking, text = not self._thinking, text[end:]
        keep = max(_begun(text, each) for each in (self._tag, *self._secrets))
        self._held = text[len(text) - keep :]
        self._show(text[: len(text) - keep])
        self._out.flush()

    def end(self) -> None:
        """Show the text that was held back, and restore the terminal's style."""
        self._show(self._held)
        self._style(PLAIN)
        self._out.flush()

    @property
    def _tag(self) -> str:
        return "</think>" if self._thinking else "<think>"

    def _show(self, text: str) -> None:
        self._out.write(printable(text, keep=KEPT))

    def _style(self, style: str) -> None:
        if self._styled:
            self._out.write(style)


def _begun(text: str, word: str) -> int:
    """Number of characters at the end of the text that may begin a word."""
    longest = min(len(word) - 1, len(text))
    return next(n for n in range(longest, -1, -1) if text.endswith(word[:n]))


class ChatTerminal:
    """Loop of messages and answers over standard input and output."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._out = sys.stdout
        self._thinking = chat.begins_thinking()
        is_dumb = os.environ.get("TERM", "dumb") == "dumb" or "NO_COLOR" in os.environ
        self._styled = self._out.isatty() and not is_dumb

    def talk(self) -> None:
        """Answer messages until Ctrl-D or ``/quit``."""
        import readline  # line editing and history, for input()

        # Which Python turns off for its own prompt: pasted lines are one message.
        readline.parse_and_bind("set enable-bracketed-paste on")
        chat = self.chat
        adapter = f" with the adapter {chat.adapter}" if chat.adapter else ", without an adapter"
        self._say(f"{chat.model.path}{adapter}. /help tells the commands; Ctrl-D leaves.")
        while True:
            try:
                message = read_message("adapter> " if chat.uses_adapter else "base> ")
                if message.startswith("/"):
                    name, _, rest = message[1:].strip().partition(" ")
                    if name in ("quit", "exit"):
                        return
                    self._command(name, rest.strip())
                elif message.strip():
                    self.answer(message.strip(), stops_quietly=True)
            except KeyboardInterrupt:
                self._say("")
            except EOFError:
                self._say("")
                return
            except ReasonError as error:
                self._say(str(error))

    def _say(self, text: str) -> None:
        self._out.write(f"{without_secrets(printable(text, keep=KEPT))}\n")
        self._out.flush()

    def answer(self, message: str, stops_quietly: bool = False) -> None:
        """Answer one message; if ``stops_quietly``, Ctrl-C ends the answer alone."""
        writer = AnswerWriter(self._out, self._styled, self._thinking)
        with closing(self.chat.answer(message)) as answer:
            try:
                for piece in answer:
                    writer.write(piece)
            except KeyboardInterrupt:
                if not stops_quietly:
                    raise
                writer.write(" (stopped)")
            finally:
                writer.end()
                self._say("")

    def _command(self, name: str, rest: str) -> None:
        chat = self.chat
        values = {k: "null" if v is None else v for k, v in chat.options.model_dump().items()}
        match name:
            case "base":
                chat.uses_adapter = False
            case "adapter":
                chat.uses_adapter = chat.adapter is not None
                if chat.adapter is None:
                    self._say("there is no adapter; start the chat with a run, or --adapter FOLDER")
            case "again":
                self._again()
            case "new":
                chat.messages = []
            case "system":
                if rest:
                    chat.renderer = replace(chat.renderer, system_prompt=system_prompt(rest, ""))
                self._say(chat.renderer.system_prompt or "there is no system prompt")
            case "settings":
                self._say("\n".join(f"{key} {value}" for key, value in values.items()))
            case "help":
                self._say(HELP)
            case _ if name in values and rest:
                chat.options = parse_option(chat.options, name, rest)
            case _ if name in values:
                self._say(f"{name} {values[name]}")
            case _:
                near = difflib.get_close_matches(name, [*COMMANDS, *values], n=1)
                hint = f"did you mean /{near[0]}?" if near else "/help tells them all"
                self._say(f"/{name} is no command; {hint}")

    def _again(self) -> None:
        before = self.chat.messages
        if not before:
            self._say("nothing was asked yet")
            return
        self.chat.messages = before[:-2]
        try:
            self.answer(before[-2]["content"], stops_quietly=True)
        except ReasonError:
            self.chat.messages = before
            raise


def read_message(prompt: str) -> str:
    """One message from the terminal: one line, or several by backslashes or between quotes."""
    line = input(prompt)
    if line.strip() == '"""':
        lines: list[str] = []
        while (line := input("... ")).strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input('... ')}"
    return line
