"""The user's own reward: ``custom: path/to/file.py:function``.

The function takes by name what it wants of

    completion, prompt, answer, token_ids           one completion: text, text, text, list of ids
    completions, prompt, answer, all_token_ids      its whole group: lists

and any extra column of the data, and gives a number, or for a group a list of them. It may be
``async``. It runs in this process: it is the user's own code, not a model's.
"""

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reason_llm.data import within
from reason_llm.errors import ConfigError, one_line
from reason_llm.rollout import Completion, Group, Prompt

LARGEST = 1e9
"""Beyond it, sums and squares of rewards would leave what float32 holds."""
OF_ONE = {"completion", "token_ids"}
OF_GROUP = {"completions", "all_token_ids"}
OF_BOTH = {"prompt", "answer"}


class CustomReward:
    """A function from a file.

    Args:
        where: ``path/to/file.py:function``.
        timeout_seconds: of one call.

    Raises:
        ConfigError: there is no such file or function, or it cannot be called so.
    """

    def __init__(self, where: str, timeout_seconds: float) -> None:
        self.where = where
        self.timeout_seconds = timeout_seconds
        self._function = _load(where)
        parameters = inspect.signature(self._function).parameters.values()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
            raise ConfigError(
                f"score.rewards: {where} takes *, ** or positional parameters; name what it wants "
                f"of {', '.join(sorted(OF_ONE | OF_GROUP | OF_BOTH))} and the data's columns"
            )
        self._names = [p.name for p in parameters]
        self.takes_group = bool(OF_GROUP & set(self._names))
        if self.takes_group == bool(OF_ONE & set(self._names)):
            raise ConfigError(
                f"score.rewards: {where} must take either completion or token_ids, or completions "
                f"or all_token_ids; it takes {', '.join(self._names) or 'nothing'}"
            )
        self.columns = tuple(n for n in self._names if n not in OF_ONE | OF_GROUP | OF_BOTH)
        """Extra columns of the data that it asks for."""

    def one(self, prompt: Prompt, completion: Completion) -> float:
        """The reward of one completion.

        Raises:
            ValueError: it gave no finite number. TimeoutError: it took too long. And what it
                raises itself.
        """
        values = {"completion": completion.text, "token_ids": list(completion.token_ids)}
        return _number(self._call(prompt, values), self.where)

    def group(self, group: Group) -> list[float]:
        """The rewards of a group's completions; raises as ``one``."""
        values = {
            "completions": [c.text for c in group.completions],
            "all_token_ids": [list(c.token_ids) for c in group.completions],
        }
        found = self._call(group.prompt, values)
        if not isinstance(found, Sequence) or len(found) != len(group.completions):
            raise ValueError(
                f"{self.where} gave {str(found)[:60]!r} for {len(group.completions)} completions; "
                "it must give a list of as many numbers"
            )
        return [_number(value, self.where) for value in found]

    def _call(self, prompt: Prompt, values: dict[str, Any]) -> Any:
        values |= {"prompt": prompt.text, "answer": prompt.answer}
        missing = [name for name in self.columns if name not in prompt.extra]
        if missing:
            raise ValueError(f"{self.where} asks for {missing[0]!r}, which {prompt.id} lacks")
        arguments = {n: prompt.extra[n] if n in self.columns else values[n] for n in self._names}
        return within(self.timeout_seconds, self.where, lambda: self._result(arguments))

    def _result(self, arguments: dict[str, Any]) -> Any:
        try:
            result = self._function(**arguments)
            return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        except SystemExit as error:  # which would end the run without a word
            raise RuntimeError(f"{self.where} ended with sys.exit({error.code!r})") from error
        except (KeyboardInterrupt, GeneratorExit) as error:
            # Its own: Ctrl-C comes to the main thread, and this is another one.
            raise RuntimeError(f"{self.where} raised {type(error).__name__}") from error


async def _awaited(result: Any) -> Any:
    return await result


def _load(where: str) -> Callable[..., Any]:
    name, colon, function = where.rpartition(":")
    path = Path(name)
    if not colon or path.suffix != ".py" or not function.isidentifier():
        raise ConfigError(
            f"score.rewards: custom={where!r} must be path/to/file.py:function; write it so"
        )
    if not path.is_file():
        raise ConfigError(f"score.rewards: custom={where}: {path} does not exist; check the path")
    spec = importlib.util.spec_from_file_location(f"reason_llm_custom_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit, GeneratorExit) as error:
        raise ConfigError(
            f"score.rewards: custom={where}: {path} cannot be imported "
            f"({type(error).__name__}: {one_line(error)}); fix it"
        ) from error
    found: Callable[..., Any] | None = vars(module).get(function)
    if not callable(found):
        known = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise ConfigError(
            f"score.rewards: custom={where}: {path} has no function {function!r}; it has "
            f"{', '.join(known) or 'none'}"
        )
    return found


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool | int | float) and abs(value) <= LARGEST:  # nan is not
        return float(value)
    raise ValueError(
        f"{where} gave {str(value)[:60]!r}; it must give a number from {-LARGEST:g} to {LARGEST:g}"
    )
