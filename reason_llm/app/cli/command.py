"""What every command does around its own work: exit codes, errors as one line, closed output."""

import sys
from collections.abc import Callable


def run_command(body: Callable[[], int | None], when_stopped: str | None = None) -> int:
    """Exit code of a command: that of ``body`` (None: 0), 2 after a user's mistake, 130 after
    Ctrl-C.

    Args:
        body: does the work. What takes long to import is imported within.
        when_stopped: the last line after Ctrl-C, on standard error.
    """
    from reason_llm.errors import ReasonError, Stopped, shown

    try:
        from reason_llm.files import CLOSED_OUTPUT, discard_output, write_for_oneself

        write_for_oneself()
        try:
            code = _flushed(body)
        except BrokenPipeError:
            discard_output()
            return CLOSED_OUTPUT
    except ReasonError as error:
        print(f"error: {shown(error)}", file=sys.stderr)
        return 2
    except (RuntimeError, BlockingIOError) as error:
        if not _is_refused(error):
            raise
        print(f"error: {shown(error)}: {NO_MORE}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        if when_stopped is not None:
            print(when_stopped, file=sys.stderr)
        return stopped.exit_code if isinstance(stopped, Stopped) else 130
    return code


NO_MORE = (
    "the system starts no further thread or process for this user; end others, or raise the limit "
    "(ulimit -u, pids.max of the container, TasksMax of systemd), and call the same command again"
)


def _is_refused(error: Exception) -> bool:
    """Whether the system refused a thread (Python's own message) or a process."""
    is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    is_fork = isinstance(error, BlockingIOError) and error.filename is None
    return is_thread or is_fork


def _flushed(body: Callable[[], int | None]) -> int:
    """The exit code of ``body``, after all that it printed was written."""
    try:
        code = body() or 0
    except SystemExit as ended:  # --help prints and ends
        if ended.code not in (0, None):
            raise
        code = 0
    print(end="", flush=True)
    return code
