"""Regular expressions from a config or an adapter, matched with a time limit."""

from collections.abc import Sequence

import regex

MATCHING_SECONDS = 5.0


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that fully match a regular expression.

    Raises:
        ValueError: the expression is invalid, or the search takes longer than
            ``MATCHING_SECONDS``, as with nested repetitions.
    """
    try:
        compiled = regex.compile(pattern)
        return [name for name in names if compiled.fullmatch(name, timeout=MATCHING_SECONDS)]
    except TimeoutError as error:
        raise ValueError(f"the search takes longer than {MATCHING_SECONDS:g} s") from error
    except (regex.error, RecursionError) as error:
        raise ValueError(str(error)) from error
