"""Regular expressions of a config or an adapter, searched in a process that can be ended."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

MATCHING_SECONDS = 5.0
_MATCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
json.dump([name for name in names if re.fullmatch(pattern, name)], sys.stdout)
"""


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that match the whole of a regular expression.

    Raises:
        ValueError: it is no regular expression, or the search takes longer than
            ``MATCHING_SECONDS``, as with nested repetitions.
    """
    if re.fullmatch(r"[\w-]*", pattern, re.ASCII):
        return [name for name in names if name == pattern]
    return list(_matching(pattern, tuple(names)))


@cache
def _matching(pattern: str, names: tuple[str, ...]) -> tuple[str, ...]:
    asked = json.dumps([pattern, names])
    command = [sys.executable, "-I", "-S", "-c", _MATCH]
    try:
        ended = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=MATCHING_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"the search takes longer than {MATCHING_SECONDS:g} s") from error
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or ["the search failed"]
        raise ValueError(lines[-1].rpartition("re.error: ")[2].rpartition("PatternError: ")[2])
    return tuple(json.loads(ended.stdout))
