"""Tasks of a taskset of verifiers, as rows: ``verifiers:NAME?skip=0&size=200&OPTION=VALUE``, where
NAME is an installed package or a module that exports a Taskset."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl

import orjson

from reason_llm.config import installation
from reason_llm.errors import DataError, one_line

TASKSET, TASKS = "verifiers:", 2000
"""What such a source begins with, and how many of its tasks are taken without ``size``."""


def parsed_source(source: str) -> tuple[str, slice, dict[str, Any]]:
    """The taskset's name, which of its tasks are meant, and its own options; ValueError if skip or
    size is no whole number from 0 on, or an option has no value."""
    name, _, asked = source.removeprefix(TASKSET).partition("?")
    options = options_of(asked)
    skip, size = (options.pop(key, usual) for key, usual in (("skip", 0), ("size", TASKS)))
    for key, value in (("skip", skip), ("size", size)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{key}={value} is no number of tasks; set it to 0 or more")
    return name, slice(skip, skip + size), options


def options_of(asked: str) -> dict[str, Any]:
    """Options after the ``?`` of a source: each is JSON, or else a text; ValueError for one without
    a value."""
    options: dict[str, Any] = dict(parse_qsl(asked, strict_parsing=True))
    for key, text in options.items():
        with suppress(orjson.JSONDecodeError):
            options[key] = orjson.loads(text)
    return options


@cache
def tasks_of(source: str) -> tuple[Any, ...]:
    """The tasks, by number from 0.

    Raises:
        DataError: there is no such taskset, or verifiers is not installed.
    """
    try:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
    except ImportError as error:
        raise DataError(
            f"{source} needs the package verifiers; install it with: "
            f"{installation.install('verifiers')}"
        ) from error
    try:
        name, part, options = parsed_source(source)
        config = taskset_config_type(name).model_validate({"id": name, **options})
        return tuple(islice(load_taskset(config), part.start, part.stop))
    except Exception as error:  # tasksets raise what they like
        raise DataError(
            f"{source}: verifiers loads no such taskset ({one_line(error)[:300]}); write "
            "verifiers:NAME?size=200&OPTION=VALUE with an installed taskset and its own options"
        ) from error


def rows_of_tasks(source: str) -> Iterator[dict[str, Any]]:
    """A row with the prompt of each task; the environment knows the task by the row's number."""
    tasks = tasks_of(source)
    from verifiers.v1.dialects.chat import message_to_wire

    for task in tasks:
        data = task.data
        talk = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            talk.append({"role": "user", "content": data.prompt})
        elif data.prompt:
            talk += [message_to_wire(message) for message in data.prompt]
        else:
            talk.append({"role": "user", "content": str(data.name or task.key)})  # its user opens
        yield {"prompt": talk}
