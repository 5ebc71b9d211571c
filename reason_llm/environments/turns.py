"""Rollouts of several turns in an environment of the user's own, over any sampler.

    class Guess:                                  # sample.environment: path/to/file.py:Guess
        def reset(self, **row) -> str | list | None: ...    # ends the prompt
        def step(self, text: str) -> tuple[str, bool]: ...  # a turn -> the reply, is it over
        def get_reward(self) -> float: ...                  # optional: of the whole rollout
        notes: dict[str, Any]                               # optional: what it tells at the end
        def close(self) -> None: ...                        # optional: at the end of the run

``step`` may give a third value, the turn's reward, where gym has it second. The reward
``environment`` is the sum of these and of what ``get_reward`` gives.

Instead of ``step`` there may be other public methods, with types and docstrings: they are
tools that the model calls, and a turn without a call is the last one. That is the form of TRL's
``environment_factory``. Any method may be ``async``.

Sampled tokens are never encoded again: a reply's tokens are appended to the ids so far. An
environment that raises, or takes longer than ``sample.environment_seconds``, ends its rollout with
the reason ``error``, which teaches nothing; the model reads a tool's error.

Objects are created when a wave needs them and reused, the n-th one for the n-th rollout: ``reset``
must start over. One that failed is closed and not reused; the others are closed at the end.

Source: ``environment_factory`` of ``GRPOTrainer`` of trl 1.14.2. Differs: ``close`` is called;
``reset`` may give messages; ``get_reward`` gets the reason of the end if it takes ``ended``.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, SupportsFloat, cast

import numpy as np
import orjson

from reason_llm.config import Config
from reason_llm.data import Call, Messages, Renderer
from reason_llm.environments.batches import Wave, batch_of, common_prompt, turn_seed
from reason_llm.environments.data_side import (
    ENVIRONMENT,
    REPLY,
    environment_class,
    environment_name,
    environments_by_name,
    tool_methods,
)
from reason_llm.errors import ConfigError, DataError, one_line
from reason_llm.files import check_nesting
from reason_llm.model import decode, end_token_ids
from reason_llm.rollout import CHAT, ROW, Completion, FinishReason, Group, Prompt, Span
from reason_llm.workers import within

AT_A_TIME = 32
CALLS_PER_TURN = 4
"""Calls of tools that are made in a turn; each further call gets an error as its result."""
MAX_CHARACTERS = 1 << 16
"""Longest reply."""
MAX_MESSAGES = 64
"""Number of messages that ``reset`` may give."""
MAX_NOTES_BYTES = 1 << 16
ENDED = "ended"
"""A parameter of ``get_reward``: the rollout's finish reason."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One environment of ``sample.environment``."""

    name: str
    """Name in the rows; empty where none is named."""
    make: Callable[[], Any]
    tools: Mapping[str, Any]
    renderer: Renderer
    pays_turns: bool
    """Whether ``step`` must give each turn's reward, as there is no other."""
    pool: list[Any] = field(default_factory=list)
    """Objects to be used again, in the order of a wave's rollouts."""

    def reply(self, text: str, name: str = "tool") -> Messages:
        """An environment's or a tool's reply as messages."""
        if not self.tools:
            return [{"role": "user", "content": text}]
        return [{"role": "tool", "name": name, "content": text}]


class Environments:
    """Environments in which rollouts are played; a ConfigError if there is no such class,
    it lacks a method, or the model's chat template does not keep earlier answers."""

    def __init__(self, config: Config, renderer: Renderer, context_tokens: int) -> None:
        self.section = config.sample
        self.context_tokens = context_tokens
        self.end_token_ids = end_token_ids(config.model.path, renderer.tokenizer)
        pays = any(s.kind == ENVIRONMENT and not s.options for s in config.score.rewards)
        self.kinds: dict[str, _Kind] = {}
        for name, where in environments_by_name(self.section.environment).items():
            make = environment_class(where)
            tools = tool_methods(make)
            pays_turns = pays and not callable(getattr(make, "get_reward", None))
            if tools and pays_turns:
                raise ConfigError(
                    f"sample.environment={where} has no method get_reward, which the reward "
                    "environment asks; add it: get_reward() gives a number"
                )
            kind = self.kinds[name] = _Kind(name, make, tools, renderer.of(name), pays_turns)
            kind.renderer.replies([kind.reply(".")], self.section.reply_tokens, REPLY)

    def play(self, wave: Wave) -> list[Group]:
        """Play a wave; the same seed gives the same tokens where the environments do the same."""
        size = wave.params.num_completions
        rollouts = [_Rollout(self, prompt) for prompt in wave.prompts for _ in range(size)]
        groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        for kind in self.kinds.values():
            same_kind = [rollout for rollout in rollouts if rollout.kind is kind]
            for rollout, environment in zip(same_kind, kind.pool, strict=False):
                rollout.environment = environment
        with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="environment") as threads:
            try:
                list(threads.map(_Rollout.begin, rollouts))
                for group in groups:
                    self._open_prompts(group, wave.params.max_new_tokens)
                played = self._play(groups, threads, wave)
            except BaseException:  # Ctrl-C too
                threads.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                for kind in self.kinds.values():
                    used = [rollout.environment for rollout in rollouts if rollout.kind is kind]
                    used = [environment for environment in used if environment is not None]
                    kind.pool[: len(used)] = used
            failed = [rollout for rollout in rollouts if rollout.finish == "error"]
            list(threads.map(_Rollout.discard, failed))
        return played

    def close(self) -> None:
        """Close the environments, as far as they let themselves be closed."""
        with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="environment") as threads:
            for kind in self.kinds.values():
                list(threads.map(self._close, kind.pool))
                kind.pool.clear()

    def _close(self, environment: Any) -> None:
        def close() -> Any:
            function = getattr(environment, "close", None)
            return function() if callable(function) else None

        try:
            self.call("close", close, lambda value: None)
        except ValueError as error:
            log.warning("sample.environment: %.300s", error)

    def _open_prompts(self, group: "list[_Rollout]", new_tokens: int) -> None:
        """Append the result of ``reset`` to each rollout's prompt."""
        begun = [rollout for rollout in group if rollout.finish is None]
        prompts: dict[str, Prompt] = {}
        for rollout in begun:
            opening = str((rollout.text, rollout.opening))
            try:
                prompts[opening] = rollout.prompt = prompts.get(opening) or rollout.opened(
                    new_tokens
                )
            except DataError as error:  # too long, or messages that the template does not write
                rollout.fail(str(error))
        begun = [rollout for rollout in begun if rollout.finish is None]
        for rollout in group:
            if begun and rollout.finish is not None:
                rollout.prompt = begun[0].prompt

    def _play(
        self, groups: "list[list[_Rollout]]", threads: ThreadPoolExecutor, wave: Wave
    ) -> list[Group]:
        """Ask the model for a turn of each, have the environments answer, and ask for the next;
        a group is reported when all of its rollouts have ended."""
        _, params, seed, progress, sampler, report = wave
        max_tokens = params.max_new_tokens
        rollouts = [rollout for group in groups for rollout in group]
        ending = [list[Future[None]]() for _ in groups]
        played: dict[int, Group] = {}

        def take(wait_for_all: bool = False) -> None:
            for place, (group, ends) in enumerate(zip(groups, ending, strict=True)):
                if place in played or len(ends) < len(group):
                    continue
                if wait_for_all or all(end.done() for end in ends):
                    for end in ends:
                        end.result()
                    played[place] = _group(group)
                    report(place, played[place])

        asking, answering = list(range(len(rollouts))), dict[Future[Messages], int]()
        with batch_of(sampler, seed) as batch:
            until = FIRST_COMPLETED if batch.joins else ALL_COMPLETED
            while asking or batch.keys or answering:
                for number in asking:
                    rollout = rollouts[number]
                    room = max_tokens - len(rollout.ids)
                    tokens = min(room, self.section.turn_tokens or room)
                    prompt = replace(
                        rollout.prompt, token_ids=(*rollout.prompt.token_ids, *rollout.ids)
                    )
                    own = replace(params, num_completions=1, max_new_tokens=tokens)
                    batch.add(number, prompt, own, turn_seed(seed, number, rollout.notes["turns"]))
                for number, (completion,) in batch.step(lambda tokens, ended: progress(tokens, 0)):
                    rollouts[number].take(completion, max_tokens)
                    answering[threads.submit(rollouts[number].answer)] = number
                done, _ = wait(answering, 0 if batch.keys else None, until)
                # In the rollouts' order, whichever answered first: equal batches have equal bits.
                ordered = sorted(done, key=answering.__getitem__)
                answers = {answering.pop(future): future.result() for future in ordered}
                self._reply(
                    [(rollouts[n], messages) for n, messages in answers.items()], max_tokens
                )
                asking = [number for number in answers if rollouts[number].finish is None]
                for number in answers:
                    if rollouts[number].finish is not None:
                        end = threads.submit(rollouts[number].end)
                        ending[number // params.num_completions].append(end)
                progress(0, len(answers) - len(asking))
                take()
        take(wait_for_all=True)
        return [played[place] for place in range(len(groups))]

    def _reply(self, answered: "list[tuple[_Rollout, Messages]]", max_tokens: int) -> None:
        """Append the environments' answers to the rollouts that continue."""
        going = [(rollout, messages) for rollout, messages in answered if not rollout.finish]
        for rollout, _ in going:
            if rollout.notes["turns"] == self.section.turns:
                rollout.finish = "turns"
        for kind in self.kinds.values():
            continuing = [
                (rollout, m) for rollout, m in going if rollout.kind is kind and not rollout.finish
            ]
            if not continuing:
                continue
            replies = kind.renderer.replies(
                [m for _, m in continuing], self.section.reply_tokens, REPLY
            )
            for (rollout, _), ids in zip(continuing, replies, strict=True):
                rollout.reply(ids, max_tokens)

    def call(self, what: str, function: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        """Result of the user's code, converted by ``read``. Raises ValueError: one line if the code
        raised, took too long or returned a wrong value."""

        def guarded() -> Any:
            try:
                result = function()
                if inspect.isawaitable(result):
                    result = asyncio.run(asyncio.wait_for(result, None))
                return read(result)
            except _WrongError as error:
                raise ValueError(f"{what} gave {error}") from error
            except BaseException as error:  # SystemExit would end the run without a message
                problem = f"{type(error).__name__}: {one_line(error)}"
                raise ValueError(f"{what} raised {problem}") from error

        try:
            return within(self.section.environment_seconds, what, guarded)
        except TimeoutError as error:
            raise ValueError(str(error)) from error


@dataclass(slots=True)
class _Rollout:
    """One rollout under way."""

    environments: Environments
    prompt: Prompt
    kind: _Kind = field(init=False)
    environment: Any = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    """None for a turn that ``step`` gave no reward, or was not told of, as it was cut off."""
    text: str = ""
    """Text of ``reset``, then the model's last turn."""
    opening: Messages = field(default_factory=list)
    """Messages that ``reset`` gave."""
    calls: list[Call | None] = field(default_factory=list)
    notes: dict[str, Any] = field(init=False)
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        row = self.prompt.extra[ROW]["columns"]
        name = environment_name(self.environments.section.environment, self.prompt.id, row)
        self.kind = self.environments.kinds[name]
        self.notes = {"turns": 0} | ({"calls": 0} if self.kind.tools else {})

    def begin(self) -> None:
        """Reset the environment; create it if the pool had none."""
        row = deepcopy(self.prompt.extra[ROW]["columns"])
        hidden = ENVIRONMENT if self.kind.name else None

        def reset() -> Any:
            if self.environment is None:
                self.environment = self.kind.make()
            return self.environment.reset(**_accepted_columns(self.environment.reset, row, hidden))

        self.text, self.opening = self._call("reset", reset, _begin) or ("", [])
        has_prompt: Any = self.text or self.opening or self.prompt.extra[CHAT][-1]["content"]
        if self.finish is None and not has_prompt:
            self.fail("reset gave no prompt, and the row has none")

    def opened(self, new_tokens: int) -> Prompt:
        """The prompt with the result of ``reset``."""
        prompt = self.prompt
        if not self.text and not self.opening:
            return prompt
        messages = [dict(message) for message in prompt.extra[CHAT]]
        messages[-1]["content"] = f"{messages[-1]['content']}{self.text}"
        if not messages[-1]["content"] and self.opening:
            messages.pop()  # the prompt of a row that has none
        extended = self.kind.renderer.prompt(prompt.id, [*messages, *self.opening], prompt.answer)
        context = self.environments.context_tokens
        if len(extended.token_ids) + new_tokens > context:
            raise DataError(
                f"{prompt.id}: with what reset says the prompt has {len(extended.token_ids)} "
                f"tokens; the context of {context} leaves {context - new_tokens}"
            )
        return replace(extended, extra=prompt.extra)

    def take(self, completion: Completion, max_tokens: int) -> None:
        """Add a turn of the model, cut where the rollout has ``most`` tokens."""
        room = max_tokens - len(self.ids)
        self.ids += completion.token_ids[:room]
        self.logprobs += completion.logprobs[:room]
        self.text = completion.text
        if len(completion.token_ids) > room:
            tokenizer, ends = self.kind.renderer.tokenizer, self.environments.end_token_ids
            (self.text,) = decode(tokenizer, [completion.token_ids[:room]], ends)
        if self.kind.tools:
            self.calls = self.kind.renderer.calls(self.text, completion.token_ids[:room])
        self.notes["turns"] += 1
        self.turn_rewards.append(None)
        is_cut = completion.finish_reason == "length" or len(completion.token_ids) > room
        if self.finish is None and is_cut:
            self.finish = "length"

    def answer(self) -> Messages:
        """Replies of the environment, or of the called tools, to the last turn."""
        if self.finish is not None:
            return []
        return self._use_tools() if self.kind.tools else self._step()

    def _step(self) -> Messages:
        answer = self._call("step", lambda: self.environment.step(self.text), _reply)
        if answer is None:
            return []
        text, is_over, reward = answer
        if reward is None and self.kind.pays_turns:
            raise ConfigError(
                f"{self.prompt.id}: step of the environment gave no reward, and there is no method "
                "get_reward; give (text, whether it is over, reward), or add get_reward()"
            )
        self.turn_rewards[-1] = reward
        if is_over:
            self.finish = "environment"
        return self.kind.reply(text)

    def _use_tools(self) -> Messages:
        calls, limit = self.calls, CALLS_PER_TURN
        if not calls:
            self.finish = "stop"
        replies: Messages = []
        for number, call in enumerate(calls[: limit + 1]):
            name, arguments = call or ("unknown", {})
            self.notes["calls"] += 1
            try:
                if number == limit:
                    raise ValueError(f"only {limit} calls of a turn are made")
                if call is None:
                    raise ValueError("this call is not a JSON object with a name and arguments")
                if name not in self.kind.tools:
                    raise ValueError(f"Tool {name} not found.")
                text = self.environments.call(name, partial(self._use, name, arguments), _text)
            except ValueError as error:
                self.notes["failed_calls"] = self.notes.get("failed_calls", 0) + 1
                text = str({"error": str(error)})
            replies += self.kind.reply(text, name)
        return replies

    def _use(self, name: str, arguments: dict[str, Any]) -> Any:
        return getattr(self.environment, name)(**arguments)

    def reply(self, ids: list[int], max_tokens: int) -> None:
        """Add the environment's reply, where the model then has room for a token."""
        ids = self.kind.renderer.not_yet_in(self.ids, ids)
        if len(self.ids) + len(ids) >= max_tokens:
            self.finish = "length"
            return
        self.spans.append(Span(len(self.ids), len(self.ids) + len(ids)))
        self.ids += ids
        self.logprobs += [0.0] * len(ids)

    def end(self) -> None:
        """Ask for the rest of the reward and the notes."""
        if self.finish == "error":
            return
        environment, ended = self.environment, {ENDED: self.finish}

        def get_reward() -> Any:
            reward = getattr(environment, "get_reward", lambda: None)
            return reward(**_accepted_columns(reward, ended, None))

        value = self._call("get_reward", get_reward, _number)
        notes = self._call("notes", lambda: getattr(environment, "notes", {}), _json)
        if self.kind.pays_turns or any(reward is not None for reward in self.turn_rewards):
            paid = self.notes["turn_rewards"] = [reward or 0.0 for reward in self.turn_rewards]
            value = self._call("the sum of its turns", lambda: sum(paid, value or 0.0), _number)
        if "problem" in self.notes:
            return
        if value is not None:
            self.notes["reward"] = value
        if notes:
            self.notes["notes"] = notes

    def discard(self) -> None:
        """Close the environment, which failed, and use it never again."""
        if self.environment is not None:
            pool = self.kind.pool
            pool[:] = [environment for environment in pool if environment is not self.environment]
            self.environments._close(self.environment)

    def fail(self, problem: str) -> None:
        """End it by a fault of the environment."""
        self.finish, self.notes["problem"] = "error", _text(problem)[:1000]

    def _call(self, what: str, function: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        try:
            return self.environments.call(what, function, read)
        except ValueError as error:
            self.fail(str(error))
            return None

    def completion(self, common: int) -> Completion:
        """The whole of it, after the tokens that its group's prompts have in common."""
        assert self.finish is not None
        own = self.prompt.token_ids[common:]
        ids = (*own, *self.ids)
        spans = [Span(0, len(own))] if own else []
        spans += [Span(len(own) + span.start, len(own) + span.end) for span in self.spans]
        ends = self.environments.end_token_ids
        (text,) = decode(self.kind.renderer.tokenizer, [list(ids)], ends)
        return Completion(
            ids,
            text,
            (*[0.0] * len(own), *self.logprobs),
            self.finish,
            spans=tuple(spans),
            environment=self.notes,
            last_turn=self.text,
        )


def _group(group: list[_Rollout]) -> Group:
    """The completions of a prompt, each after its own beginning if ``reset`` returned different
    texts."""
    ids = [rollout.prompt.token_ids for rollout in group]
    tokenizer = group[0].kind.renderer.tokenizer
    prompt = common_prompt(group[0].prompt, ids, tokenizer, "let what reset says begin alike")
    common = len(prompt.token_ids)
    return Group(prompt, tuple(rollout.completion(common) for rollout in group))


def _accepted_columns(
    function: Callable[..., Any], row: Mapping[str, Any], hidden: str | None
) -> dict[str, Any]:
    """Columns of the row that a function takes, by name; the hidden one only if it names it."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    return {n: v for n, v in row.items() if n in parameters or (takes_all and n != hidden)}


class _WrongError(ValueError):
    """A value that the user's code returned, and the values that are allowed."""


def _text(value: Any) -> str:
    """Text of a value, within the limit and of characters that a tokenizer and JSON take."""
    return str(value)[:MAX_CHARACTERS].encode(errors="replace").decode()


def _begin(value: Any) -> tuple[str, Messages]:
    """A text for the end of the prompt's last message, and messages after it."""
    if not isinstance(value, list):
        value = [] if value is None else [value]
    text, messages = "", list[dict[str, Any]]()
    for part in value:
        match part:
            case str(said) | {"type": "text", "text": str(said)} if not messages:
                text += said
            case {"role": "system" | "user" | "assistant" as role, "content": str(content)}:
                messages.append({"role": role, "content": _text(content)})
            case _:
                raise _WrongError(
                    f"{part!r:.60}, and not a text, messages with role and content, parts of type "
                    "text, or None"
                )
    return _text(text), messages[:MAX_MESSAGES]


def _reply(value: Any) -> tuple[str, bool, float | None]:
    match value:
        case (str(text), bool() | np.bool() as is_over, *rewards) if len(rewards) < 2:
            return _text(text), bool(is_over), _number(*rewards or [None])
    raise _WrongError(f"{value!r:.60}, and not (text, whether it is over, perhaps a reward)")


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, SupportsFloat) or not math.isfinite(float(value)):
        raise _WrongError(f"{value!r:.60}, and not a finite number")
    return float(value)


def _json(value: Any) -> dict[str, Any]:
    text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    check_nesting([[orjson.loads(text)]])  # as deep as it stands in a completion
    if not isinstance(value, dict) or len(text) > MAX_NOTES_BYTES:
        raise _WrongError(f"{value!r:.60}, and not a dict of at most 64 KiB")
    return cast(dict[str, Any], orjson.loads(text))
