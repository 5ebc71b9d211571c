"""Locks of a run, and the file of its buffer."""

import os
from pathlib import Path

from reason_llm.config import Config
from reason_llm.errors import BusyError
from reason_llm.files import FileLock
from reason_llm.run.store import buffer
from reason_llm.run.store.document import unfinished_run


def run_lock(config: Config) -> FileLock:
    """The lock of the run's folder."""
    run = config.run
    folder = run.directory / str(run.name)
    return FileLock(run.directory / f".{run.name}.lock", what=f"the run {folder}")


def check_unused(config: Config) -> None:
    """Raise a BusyError if another process has the run, or the buffer that it names."""
    run_lock(config).check_free()
    if config.run.buffer is not None and config.samples and config.run.from_buffer is None:
        buffer.lock(config.run.buffer).check_free()


def buffer_path(config: Config) -> Path:
    """Path of the run's buffer: if it is left out, data/buffer.json, or a file with the run's name
    while another process uses that one, or it holds rollouts of another unfinished run."""
    path, name = config.run.buffer_path, config.run.name
    if config.run.buffer is not None or not config.samples:
        return path
    own = path.with_name(f"{path.stem}.{name}{path.suffix}")
    try:
        buffer.lock(path).check_free()
    except BusyError:
        return own
    holder = unfinished_run(path)
    return own if holder != name and (holder is not None or os.path.lexists(own)) else path
