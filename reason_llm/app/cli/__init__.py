"""``reason-llm COMMAND ...``: table of commands, their exit codes, and errors as one line. Each is
a module with a ``run`` function; heavy imports wait until the command is known."""

import difflib
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from reason_llm import __version__
from reason_llm.errors import ConfigError

COMMANDS = {
    "train": "fine-tune a model; without a config, the quick start",
    "plan": "print the memory plan of a training run",
    "evaluate": "measure the accuracy of runs and models",
    "chat": "chat with a run's adapter or a model",
    "serve": "serve a run or a model through OpenAI's API",
    "export": "merge a run's adapter into its base",
    "report": "write the HTML report of one or more runs",
    "rescore": "compute a config's rewards for saved rollouts",
    "pairs": "write training rows from saved rollouts",
}
"""Help text of each command."""
HELP = """\
usage: reason-llm COMMAND ...

Fine-tune language models by reinforcement learning on one GPU, or on a CPU.

{}

reason-llm COMMAND --help lists the options of a command. For completion by TAB:
source <(reason-llm --print-completion bash), or zsh"""
WHEN_STOPPED = {
    "train": "stopped; the same command resumes it",
    "evaluate": "stopped; the same command resumes it",
    "export": "stopped; nothing was exported",
}
"""Last line of an interrupted command."""
NO_MORE = (
    "the limit of threads or processes is reached; end others, or raise it (ulimit -u, pids.max of "
    "the container, TasksMax of systemd), and run the same command again"
)
"""Advice if the user's limit of threads or processes is reached."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, by default of the command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name, others = (words[0], words[1:]) if words else (None, [])
    if name in COMMANDS:
        return call(name, f"reason-llm {name}", others)
    return run_command(lambda: _without_command(name, *others[:1]))


def call(name: str, program: str, arguments: Sequence[str]) -> int:
    """Run a command, called ``program`` in its help; return the exit code."""

    def run() -> int | None:
        code: int | None = importlib.import_module(f"reason_llm.app.cli.{name}").run(
            program, arguments
        )
        return code

    return run_command(run, WHEN_STOPPED.get(name))


def run_command(body: Callable[[], int | None], when_stopped: str | None = None) -> int:
    """Run ``body`` and return the exit code: its result (None: 0), 2 after a user's mistake, or 130
    after Ctrl-C, which also prints ``when_stopped``. Slow imports belong in ``body``."""
    from reason_llm.errors import ReasonError, Stopped, shown

    try:
        from reason_llm.files import CLOSED_OUTPUT, discard_output, restrict_umask

        restrict_umask()
        try:
            code = _flushed(body)
        except BrokenPipeError:
            discard_output()
            return CLOSED_OUTPUT
    except ReasonError as error:
        for problem in (error, *getattr(error, "__notes__", ())):  # which add_note makes
            print(f"error: {shown(problem)}", file=sys.stderr)
        return 2
    except (RuntimeError, BlockingIOError) as error:
        if not _is_refused(error):
            raise
        print(f"error: {shown(error)}: {NO_MORE}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        _let_interrupts_end()
        if when_stopped is not None:
            print(when_stopped, file=sys.stderr)
        return stopped.exit_code if isinstance(stopped, Stopped) else 130
    finally:
        _let_interrupts_end()
    return code


def _let_interrupts_end() -> None:
    """Let a later Ctrl-C end the process at once: only Python's exit is left, which would print a
    traceback. Interactive sessions continue, so they keep their handler."""
    is_main = threading.current_thread() is threading.main_thread()
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_main and not is_ignored and not hasattr(sys, "ps1"):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _without_command(name: str | None, shell: str = "bash") -> None:
    """Print the help, the version or the completion of a shell, or refuse the command."""
    names = ", ".join(COMMANDS)
    if name in ("-h", "--help"):
        lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
        print(HELP.format("\n".join(lines)))
    elif name == "--version":
        print(f"reason-llm {__version__}")
    elif name == "--print-completion":
        from reason_llm.app.cli import completion

        print(completion.script(shell))
    elif name is None:
        raise ConfigError(f"no command; name one of {names}, or see reason-llm --help")
    else:
        near = difflib.get_close_matches(name[:100], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"name one of {names}"
        raise ConfigError(f"unknown command {name[:100]!r}; {hint}")


def _is_refused(error: Exception) -> bool:
    """Whether the system refused a thread (Python's own message) or a process."""
    is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    is_fork = isinstance(error, BlockingIOError) and error.filename is None
    return is_thread or is_fork


def _flushed(body: Callable[[], int | None]) -> int:
    """Return the exit code of ``body`` after flushing its output."""
    try:
        code = body() or 0
    except SystemExit as ended:  # --help prints and ends
        if ended.code not in (0, None):
            raise
        code = 0
    print(end="", flush=True)
    return code
