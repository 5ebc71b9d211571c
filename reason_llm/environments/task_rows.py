"""Rows that environments make: ``environment?size=64``, whose prompts ``reset`` gives, and tasks
of verifiers' tasksets, ``verifiers:NAME?skip=0&size=200&OPTION=VALUE``, where NAME is an installed
package or a module that exports a Taskset."""

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

from reason_llm.config import installation
from reason_llm.data import options_of
from reason_llm.errors import DataError, one_line

TASKSET, TASKS = "verifiers:", 2000
"""Prefix of a source of tasks, and the number of rows of either kind without ``size``."""


def rows(source: str) -> Iterator[dict[str, Any]]:
    """Rows of either kind."""
    return rows_of_tasks(source) if source.startswith(TASKSET) else _seeds(source)


def parsed_source(source: str) -> tuple[str, slice, dict[str, Any]]:
    """The name, which of its tasks or seeds are meant, and its own options; ValueError if skip or
    size is no whole number from 0 on, or an option has no value."""
    name, _, query = source.removeprefix(TASKSET).partition("?")
    options = options_of(query)
    skip, size = (options.pop(key, usual) for key, usual in (("skip", 0), ("size", TASKS)))
    for key, value in (("skip", skip), ("size", size)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{key}={value} is not a number of rows; set it to 0 or more")
    return name, slice(skip, skip + size), options


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


def _seeds(source: str) -> Iterator[dict[str, Any]]:
    """Rows with one seed each: ``size`` of them, after the first ``skip``."""
    try:
        _, part, options = parsed_source(source)
        if options:
            raise ValueError(f"{next(iter(options))} is neither size nor skip")
    except ValueError as error:
        raise DataError(
            f"{source}: {one_line(error)}; write environment?size=256&skip=0"
        ) from error
    return ({"seed": number} for number in range(part.start, part.stop))
