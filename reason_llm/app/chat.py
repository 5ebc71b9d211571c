"""A chat with the base or its adapter, with the run's template and sampling, token by token.

One copy of the base: without its adapter it is the base, with it the policy. Not here: the terminal
(``chat_terminal``), and vLLM.
"""

import random
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from reason_llm.config import Config, Count, ModelSection, Section, file as config_file
from reason_llm.data import Messages, Renderer, chat_template, system_prompt
from reason_llm.errors import ConfigError, DataError, one_line
from reason_llm.model import Model, adapters, base, decode, quiet_libraries
from reason_llm.run.store import folder as run_folder
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
    """Of the draws. null: another one each time."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model of a chat and how it is asked."""

    model: ModelSection
    adapter: Path | None
    template: str
    """As ``data.template``."""
    system_prompt: str
    """As ``data.system_prompt``."""
    prompting_reward: str
    """Which decides what ``system_prompt: auto`` is; empty for none."""
    options: dict[str, Any]
    """The run's own; ``Options`` checks them."""
    template_arguments: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """As ``data.template_arguments``."""
    stop: tuple[str, ...] = ()
    """As ``sample.stop``."""


def find_subject(target: str, adapter: Path | None, which: run_folder.Which = "last") -> Subject:
    """The model that ``target`` names: a run's folder, a config, an adapter's folder, or a model's
    folder or Hub id.

    Args:
        adapter: in the place of the run's own.
        which: of the run's own.

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
        return _of_run(config, adapter or own)
    run_folder.refuse_which(which, target)
    if run_folder.is_adapter(path):
        section = ModelSection(path=adapters.base_of(path))
        return Subject(section, adapter or path, "auto", "none", "", {})
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is neither a run (resolved_config.yaml) nor a model (config.json) nor an "
            "adapter (adapter_config.json); name one of these, or a config file"
        )
    return Subject(ModelSection(path=target), adapter, "auto", "none", "", {})


def _of_run(config: Config, adapter: Path | None) -> Subject:
    run_folder.check_writes(config, "chat")
    sample = config.sample.model_dump()
    options = {name: sample[name] for name in Options.model_fields if name in sample}
    data = config.data
    return Subject(
        config.model, adapter, data.template, data.system_prompt, config.prompting_reward, options,
        data.template_arguments, tuple(config.sample.stop),
    )  # fmt: skip


class Chat:
    """A conversation.

    Args:
        adapter: its folder; None to talk to the base alone.

    Raises:
        ReasonError: the model, the adapter or the template cannot be used.
    """

    def __init__(self, subject: Subject, options: Options) -> None:
        quiet_libraries()
        section, self.adapter = subject.model, subject.adapter
        tokenizer = base.load_tokenizer(section.path, section.trust_remote_code)
        self.renderer = Renderer(
            tokenizer,
            chat_template(
                subject.template,
                section.path,
                tokenizer.chat_template is not None,
                subject.template_arguments,
            ),
            system_prompt(subject.system_prompt, subject.prompting_reward),
        )
        if self.adapter is not None:
            adapter_section = adapters.section_of(self.adapter)
            section = section.with_options({"adapter": adapter_section})
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
        self.conditioning = (
            None if self.adapter is None else run_folder.conditioning_of(self.adapter)
        )
        """The adapter is asked for the best, where scores were in its prompts."""
        self.messages: Messages = []
        """Without the system prompt."""
        self._answering: Generator[str, None, None] | None = None

    @property
    def who(self) -> str:
        """Name of the model that answers: ``adapter`` or ``base``."""
        return "adapter" if self.uses_adapter else "base"

    def answer(self, text: str) -> Generator[str, None, None]:
        """The answer to the next message, in pieces as they are sampled.

        Closed early, it leaves what was answered so far in the conversation. One answer is given at
        a time: the next message closes it.

        Raises (when its first piece is asked for):
            DataError: the template cannot take the conversation, or the context has no room for it;
                the conversation is as it was.
        """
        if self._answering is not None:
            self._answering.close()
        self._answering = self._answer(text)
        return self._answering

    def _answer(self, text: str) -> Generator[str, None, None]:
        messages = [*self.messages, {"role": "user", "content": text}]
        asked = messages
        if self.conditioning is not None and self.uses_adapter:
            asked = self.conditioning.asking("this conversation", messages)
        prompt = self.renderer.prompt("this conversation", asked, answer="")
        room = self.context_tokens - len(prompt.token_ids)
        if room < 1:
            raise DataError(
                f"this conversation takes {len(prompt.token_ids)} of {self.context_tokens} tokens "
                "of context, which leaves none for an answer; begin a new one with /new"
            )
        options = self.options
        params = SamplingParams(
            num_completions=1,
            max_new_tokens=min(options.max_new_tokens, room),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            stop=self.stop,
        )
        draws = random.Random(
            None if options.seed is None else f"{options.seed}/chat/{len(messages)}"
        )
        spelled = Detokenizer(self.renderer.tokenizer)
        try:
            with self.model.using("policy" if self.uses_adapter else "reference"):
                for token in stream(self.model, prompt, params, draws.getrandbits(63)):
                    if piece := spelled.add(token):
                        yield piece
            if piece := spelled.rest():
                yield piece
        finally:
            self.messages = [*messages, {"role": "assistant", "content": spelled.text}]

    def begins_thinking(self) -> bool:
        """Whether the template opens the thinking part before the model writes anything."""
        prompt = self.renderer.prompt("a test", [{"role": "user", "content": "1"}], answer="")
        return prompt.text.rstrip().endswith("<think>")


class Detokenizer:
    """Text of tokens as they arrive: a piece ends where a character ends, and all pieces together
    are the text of all tokens. A byte that spoils the bytes before it, as SentencePiece's decoders
    read them, comes too late for the pieces; ``text`` has it.

    Source: the two offsets of ``detokenize_incrementally`` in vLLM, since a tokenizer may spell a
    token by those before it.
    """

    LONGEST = 16
    """Tokens that a character may take; bytes that are none by then are shown as such."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self._before, self._shown = 0, 0
        """Tokens from ``_before`` are spelled anew; those up to ``_shown`` were given."""

    @property
    def text(self) -> str:
        """Text of all tokens."""
        return self._spell(self.token_ids)

    def add(self, token: int) -> str:
        """Text that is complete after this token."""
        self.token_ids.append(token)
        return self._piece(last=len(self.token_ids) - self._shown > self.LONGEST)

    def rest(self) -> str:
        """Text that is left at the end."""
        return self._piece(last=True)

    def _piece(self, last: bool) -> str:
        old = self._spell(self.token_ids[self._before : self._shown])
        new = self._spell(self.token_ids[self._before :])
        if len(new) <= len(old) or (new.endswith("\ufffd") and not last):
            return ""
        self._before, self._shown = self._shown, len(self.token_ids)
        return new[len(old) :]

    def _spell(self, token_ids: list[int]) -> str:
        (text,) = decode(self.tokenizer, [token_ids])
        return text


def options_of(subject: Subject, given: Mapping[str, str | None]) -> Options:
    """The run's options, overridden by those that were given.

    Raises:
        ConfigError: a value is none for its option.
    """
    options = Options.model_validate(subject.options)
    for name in Options.model_fields:
        if (value := given.get(name)) is not None:
            options = parse_option(options, name, value)
    return options


def parse_option(options: Options, name: str, value: str) -> Options:
    """``options`` with one of them set from text; ``null`` unsets it.

    Raises:
        ConfigError: the value is none for it.
    """
    given = None if value == "null" else value
    try:
        number = int(value) if re.fullmatch(r"-?[0-9]{1,20}", value) else given
        return Options.model_validate({**options.model_dump(), name: number})
    except ValidationError as error:
        field = Options.model_fields[name]
        problem = one_line(ValueError(error.errors()[0]["msg"]))
        raise ConfigError(
            f"{name}={value!r:.60}: {problem[0].lower() + problem[1:]}; it is "
            f"{config_file.shown_type(field)}: {config_file.docstring(field)}"
        ) from error
