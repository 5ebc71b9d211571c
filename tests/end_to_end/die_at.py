"""Run scripts/train.py and kill -9 itself at a chosen call: ``die_at.py PLACE COUNT ARGS...``; or
another script: ``die_at.py PLACE COUNT SCRIPT.py ARGS...``.

With DIE_OF in the environment it is that signal in SIGKILL's place.

PLACE is ``module:name`` or ``module:Class.name``; the process ends just before the COUNT-th call of
it. Everything before that is the real program.
"""

import functools
import importlib
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().parents[2] / "scripts" / "train.py"


def install(place: str, count: int) -> None:
    """Replace the function at ``place`` by itself, ended at its ``count``-th call."""
    module_name, _, path = place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.Signals[os.environ.get("DIE_OF", "SIGKILL")])
        return original(*args, **kwargs)

    setattr(owner, name, dying)


if __name__ == "__main__":
    place, count, *arguments = sys.argv[1:]
    install(place, int(count))
    script = arguments.pop(0) if arguments[:1] and arguments[0].endswith(".py") else str(TRAIN)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
