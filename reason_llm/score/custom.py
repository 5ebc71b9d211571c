"""The user's own reward: ``custom: path/to/file.py:function``, or a function given in Python.

The function takes by name what it wants of

    completion, prompt, answer, token_ids           one completion: text, text, text, list of ids
    completions, prompt, answer, all_token_ids      its whole group: lists

and any extra column of the data, and gives a number, or for a group a list of them. A parameter
with a default gets the column of its name where a row has it. One that takes ``**kwargs``,
``prompts``, ``completion_ids``, ``environments``, ``log_extra`` or ``log_metric`` is of the form of
TRL's rewards:

    prompts, completions, completion_ids, **kwargs  its whole group: lists, all of one length

where ``kwargs`` has a list for every column of the row, ``log_extra`` and ``log_metric``, and in an
environment ``environments``; prompts and completions are lists of messages if the row's prompt is
one. It gives a list of numbers.

None instead of a number is no reward. A function may be ``async``. It runs in this process: it
is the user's own code, not a model's.

Source: ``GRPOTrainer._calculate_rewards`` of trl 1.14.2.
Differs: it is called for one group, not for a batch of several; there is no trainer, so that
``trainer_state`` is not given; what ``log_extra`` gets is kept with each completion; an environment
is read from the rollout, as what it told at its end.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, SupportsFloat, TypeVar

from reason_llm.config import PYTHON
from reason_llm.data import load_function, rollout_sides
from reason_llm.errors import ConfigError
from reason_llm.rollout import ALL, MAY_LACK, ROW, Completion, Group, Prompt
from reason_llm.workers import within

T = TypeVar("T")
LARGEST = 1e9
"""Beyond it, sums and squares of rewards would leave what float32 holds."""
OF_ONE = {"completion", "token_ids"}
OF_GROUP = {"completions", "all_token_ids"}
OF_BOTH = {"prompt", "answer"}
OF_TRL = {"prompts", "completions", "completion_ids"}
OF_TRAINER = {"log_extra", "log_metric", *(side.ARGUMENT for side in rollout_sides())}
"""Arguments that TRL's trainer passes besides columns."""
NOT_OF_TRL = {*OF_ONE, "all_token_ids", "prompt", "trainer_state"}
"""Arguments that a function of TRL's form does not get here."""
VERL = (
    "; for verl's compute_score write a function that calls it: def score(completion, data_source, "
    "reward_model, extra_info): return compute_score(data_source, completion, "
    'reward_model["ground_truth"], extra_info)'
)
MAX_LOGGED, MAX_NAME_CHARACTERS = 64, 64
"""Metrics of one function, and characters of their names."""
MAX_COLUMNS, MAX_VALUE_CHARACTERS = 16, 1000
"""Columns of ``log_extra``, and characters of a value."""
log = logging.getLogger(__name__)


class CustomReward:
    """A function from a file, or one that was given in Python.

    Args:
        where: ``path/to/file.py:function``, or what to call the function.
        timeout_seconds: of one call.
        function: the function itself; None: it is loaded from ``where``.

    Raises:
        ConfigError: there is no such file or function, or it cannot be called so.
    """

    def __init__(
        self, where: str, timeout_seconds: float, function: Callable[..., Any] | None = None
    ) -> None:
        self.where = where
        self.timeout_seconds = timeout_seconds
        self._function = load_reward(where) if function is None else function
        parameters = list(inspect.signature(self._function).parameters.values())
        if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters):
            raise ConfigError(
                f"score.rewards: {where} takes * or positional parameters; name what it wants of "
                f"{', '.join(sorted(OF_ONE | OF_GROUP | OF_BOTH))} and the data's columns"
            )
        named = {p.name: p for p in parameters if p.kind != p.VAR_KEYWORD}
        self._names = list(named)
        self._takes_all = len(named) < len(parameters)
        self._logged: dict[str, list[float]] = {}
        self._lock = Lock()
        self._extra: dict[int, dict[str, list[Any]]] = {}
        # The parameters' names tell the form: these are in no function of this project's form.
        of_trl = {"prompts", "completion_ids", *OF_TRAINER}
        self.is_trl = self._takes_all or bool(of_trl & named.keys())
        """Whether it has the form of TRL's rewards."""
        self.takes_group = self.is_trl or bool(OF_GROUP & named.keys())
        self.columns: tuple[str, ...]
        """Extra data columns to pass; with ``?`` optional ones, and ``ALL`` for ``**kwargs``."""
        usual = OF_ONE | OF_GROUP | OF_BOTH
        self._optional = {n for n, p in named.items() if p.default is not p.empty} - usual
        if self.is_trl:
            needed = [n for n, p in named.items() if p.default is p.empty]
            needed = [n for n in needed if n not in OF_TRL | OF_TRAINER]
            may_lack = self._optional - OF_TRL - OF_TRAINER - NOT_OF_TRL
            others = (ALL,) if self._takes_all else (f"{n}{MAY_LACK}" for n in sorted(may_lack))
            self.columns = (ROW, *needed, *others)
            wrong = next((n for n in needed if n in NOT_OF_TRL), None)
            if wrong is not None:
                raise ConfigError(
                    f"score.rewards: {where} takes {wrong}, which a function of TRL's form (one "
                    "with **, prompts or completion_ids) is not given here; name prompts, "
                    "completions, completion_ids and the data's columns, or give it a default, as "
                    f"in {wrong}=None"
                )
        else:
            wanted = [n for n in self._names if n not in usual]
            self.columns = tuple(f"{n}{MAY_LACK}" if n in self._optional else n for n in wanted)
            if self.takes_group == bool(OF_ONE & named.keys()):
                raise ConfigError(
                    f"score.rewards: {where} must take either completion or token_ids, or "
                    f"completions or all_token_ids; it takes {', '.join(self._names) or 'nothing'}"
                    + (VERL if {"solution_str", "ground_truth"} <= named.keys() else "")
                )

    def one(self, prompt: Prompt, completion: Completion) -> float:
        """The reward of one completion; NaN for None.

        Raises:
            ValueError: it gave no finite number. TimeoutError: it took too long. And what it
                raises itself.
        """
        values = {"completion": completion.answer, "token_ids": list(completion.token_ids)}
        arguments = self._arguments(prompt, values)
        return _number(self._within_limit(lambda: self._result(arguments)), self.where)

    def group(self, group: Group) -> list[float]:
        """The rewards of a group's completions; raises as ``one``."""
        values = {
            "completions": [c.answer for c in group.completions],
            "all_token_ids": [list(c.token_ids) for c in group.completions],
        }
        count, extra = len(group.completions), dict[str, list[Any]]()
        if self.is_trl:
            arguments = self._trl_arguments(group, partial(self._log_extra, extra, count))
        else:
            arguments = self._arguments(group.prompt, values)

        def listed() -> list[Any]:
            """At most one value more than expected. A generator runs within the time limit here."""
            result = self._result(arguments)
            if isinstance(result, str | Mapping) or not isinstance(result, Iterable):
                what = "the number " if isinstance(result, SupportsFloat) else ""
                raise ValueError(
                    f"{self.where} gave {what}{str(result)[:60]} and no list; it must give a list "
                    "with one number for each completion, as TRL's reward functions do"
                )
            return list(islice(result, count + 1))

        rewards = [_number(value, self.where) for value in self._within_limit(listed)]
        if len(rewards) != count:
            returned = f"more than {count}" if len(rewards) > count else f"{len(rewards)}"
            raise ValueError(
                f"{self.where} gave {returned} rewards for {count} completions; it must give a "
                "list of as many numbers"
            )
        # Several groups are judged at the same time, so their columns are kept by group.
        if extra:
            with self._lock:
                self._extra[id(group)] = dict(extra)
        return rewards

    def _trl_arguments(self, group: Group, log_extra: Callable[[str, Any], None]) -> dict[str, Any]:
        """Arguments of a function of TRL's form."""
        row, count = group.prompt.extra.get(ROW), len(group.completions)
        if not isinstance(row, Mapping):
            raise ValueError(f"{self.where} asks for the row, which {group.prompt.id} lacks")
        prompt, texts = row["prompt"], [completion.answer for completion in group.completions]
        is_talk = not isinstance(prompt, str)
        values: dict[str, Any] = {
            name: [value] * count
            for name, value in row["columns"].items()
            if name not in ("prompt", "completion", "completion_ids")
        }
        values |= {
            "prompts": [prompt] * count,
            "completions": [[{"role": "assistant", "content": t}] if is_talk else t for t in texts],
            "completion_ids": [list(c.token_ids) for c in group.completions],
            "log_extra": log_extra,
            "log_metric": self._log_metric,
        }
        for side in rollout_sides():
            if (played := side.argument(group)) is not None:
                values[side.ARGUMENT] = played
        # Named here with the row, or Python's error would only show the function.
        missing = [n for n in self._names if n not in values and n not in self._optional]
        if missing:
            lacks = (s.ARGUMENT_LACKS for s in rollout_sides() if missing == [s.ARGUMENT])
            raise ValueError(
                f"{self.where} asks for {str(missing)[1:-1]}, which {group.prompt.id} lacks"
                + "".join(lacks)
            )
        return values if self._takes_all else {n: values[n] for n in self._names if n in values}

    def _arguments(self, prompt: Prompt, values: dict[str, Any]) -> dict[str, Any]:
        values |= {"prompt": prompt.text, "answer": prompt.answer}
        values = {**{n: prompt.extra[n] for n in self._names if n in prompt.extra}, **values}
        missing = [n for n in self._names if n not in values and n not in self._optional]
        if missing:
            raise ValueError(f"{self.where} asks for {str(missing)[1:-1]}, which {prompt.id} lacks")
        return {n: values[n] for n in self._names if n in values}

    def take_logged(self) -> dict[str, list[float]]:
        """Values by name that the function gave ``log_metric`` since the last call."""
        with self._lock:
            logged, self._logged = self._logged, {}
        return logged

    def _log_metric(self, name: str, value: float) -> None:
        """TRL's function of this name: a metric whose values are averaged over a step."""
        number = _number(value, f"log_metric({name!r:.40}) of {self.where}")
        with self._lock:
            values = self._logged.setdefault(str(name)[:MAX_NAME_CHARACTERS], [])
            if len(self._logged) > MAX_LOGGED:
                raise ValueError(f"{self.where} logs more than {MAX_LOGGED} metrics")
            values.append(number)

    def take_extra(self, group: Group) -> dict[str, list[Any]]:
        """Remove and return the columns that ``log_extra`` got for this very group."""
        with self._lock:
            return self._extra.pop(id(group), {})

    def _log_extra(self, extra: dict[str, list[Any]], count: int, column: str, values: Any) -> None:
        """TRL's function of this name: a column of its table of completions, a value of each."""
        listed = list(islice(values, count + 1))
        if len(listed) != count:
            raise ValueError(
                f"{self.where} gave log_extra({column!r:.40}) another number of values than the "
                f"{count} completions have; give one for each"
            )
        extra[str(column)[:MAX_NAME_CHARACTERS]] = [_loggable(value) for value in listed]
        if len(extra) > MAX_COLUMNS:
            raise ValueError(f"{self.where} gives log_extra more than {MAX_COLUMNS} columns")

    def _result(self, arguments: dict[str, Any]) -> Any:
        result = self._function(**arguments)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    def _within_limit(self, call: Callable[[], T]) -> T:
        def guarded() -> T:
            try:
                return call()
            except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
                # The function's own KeyboardInterrupt or SystemExit, outside of the main thread.
                raise RuntimeError(f"{self.where} raised {error!r}") from error

        return within(self.timeout_seconds, self.where, guarded)


def _loggable(value: Any) -> Any:
    """A value for JSON: a number, a truth value, or the beginning of any other value's text."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str) and isinstance(value, SupportsFloat):
        number = float(value)
        if math.isfinite(number):
            return int(number) if isinstance(value, int) and int(number) == value else number
    return str(value)[:MAX_VALUE_CHARACTERS].encode(errors="replace").decode()


async def _awaited(result: Any) -> Any:
    return await result


def load_reward(where: str) -> Callable[..., Any]:
    """The function that ``custom`` names; ConfigError if there is none."""
    if where.startswith(PYTHON):
        name = where.rpartition(".")[2]
        raise ConfigError(
            f"score.rewards: custom={where} was given in Python; give it again, as in "
            f"reason_llm.train(config, rewards=[{name}]), or put it into a file and name that: "
            f"path/to/file.py:{name}"
        )
    return load_function(where, "score.rewards: custom")


def _number(value: Any, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, SupportsFloat) and -LARGEST <= value <= LARGEST:  # type: ignore[operator]
        return float(value)  # nan is not within
    key = '; return one value of it, such as ["score"]' if isinstance(value, Mapping) else ""
    raise ValueError(
        f"{where} gave {str(value)[:60]!r}; it must give a number from {-LARGEST:g} to {LARGEST:g},"
        f" or None for no reward{key}"
    )
