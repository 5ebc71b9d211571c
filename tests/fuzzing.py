"""What the fuzz tests share: broken text, bytes and trees, and what is asked of every reader.

A reader either succeeds or raises a ReasonError of one line, soon. In the suite each target gets
a few examples, the same every time; with FUZZ_SECONDS set (``make fuzz``) each gets its share of
that time, with other examples in every round.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings, strategies as st

from reason_llm.errors import ReasonError, shown

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
NUM_TARGETS = 14
"""``fuzz`` is called so often in the suite; a test counts."""
LONGEST_SECONDS = 10.0
"""Of one example."""

QUIET = settings(
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)


def fuzz(strategy: st.SearchStrategy, read: Callable[[Any], object], examples: int) -> None:
    """Give ``read`` many values; any end but success and a ReasonError of one line fails."""
    count = accepted = refused = 0

    def check(value: Any) -> None:
        nonlocal count, accepted, refused
        count += 1
        started = time.monotonic()
        try:
            read(value)
            accepted += 1
        except ReasonError as error:
            line = shown(error)
            assert line.strip()
            assert line.isprintable(), line
            assert len(line) <= 2100
            refused += 1
        assert time.monotonic() - started < LONGEST_SECONDS

    started = time.monotonic()
    if not SECONDS:
        settings(QUIET, max_examples=examples, derandomize=True)(given(strategy)(check))()
        assert accepted, "no example was good"
        assert refused, "no example was bad"
        return
    number = 0
    while time.monotonic() - started < SECONDS / NUM_TARGETS:
        number += 1
        run = settings(QUIET, max_examples=400)(given(strategy)(check))
        seed(time.time_ns())(run)()
    seconds = time.monotonic() - started
    print(f"\n{count:,} examples in {seconds:.0f} s, {accepted:,} read, {refused:,} refused")


ODD_TEXT = st.sampled_from(
    ["", " ", "\n", "\r\n", "\0", "\ufeff", "\u2028", "\u202e", "\x1b[2J", "\x9b", "\\ud800", "é́",
     "../../x", "/etc/passwd", "C:\\x", "~", "-", "null", "true", "NaN", "1e999", "0x", "1_000",
     "{{", "%s", "&a", "*a", "<<", "!!python/object:os.system", "!!set", "---", "\t", "[", "]",
     "{", "}", ":", ": ", ",", "#", "'", '"', "####", "\\boxed{", "2001-99-99", "9" * 30]
)  # fmt: skip
TEXT = st.one_of(ODD_TEXT, st.text(max_size=20), st.text("abc \n", max_size=40))
NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(), st.floats(),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 1e308, 1e-320]),
)  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)


def deep(value: Any, levels: int) -> Any:
    """``value`` in lists in lists, or in mappings in mappings."""
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@st.composite
def broken_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """``whole`` cut short, with bytes changed, put in, left out or doubled; sometimes unharmed."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["cut", "change", "put", "leave", "double", "odd"])):
            case "cut":
                del content[start:]
            case "change":
                content[start:end] = draw(st.binary(min_size=end - start, max_size=end - start))
            case "put":
                content[start:start] = draw(st.binary(max_size=20))
            case "leave":
                del content[start:end]
            case "double":
                content[start:start] = content[start:end] * draw(st.integers(1, 50))
            case "odd":
                content[start:end] = draw(TEXT).encode(errors="surrogatepass")
    return bytes(content)


@st.composite
def broken_tree(draw: st.DrawFn, whole: Any) -> Any:
    """``whole``, made of dicts and lists, with members replaced, removed, renamed or added."""
    tree = _copy(whole)
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(tree))
        parent, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(["replace", "remove", "add", "swap", "wrap", "deepen"])):
            case "replace":
                parent[key] = draw(JSON)
            case "remove":
                del parent[key]
            case "add" if isinstance(parent, dict):
                parent[draw(TEXT)] = draw(JSON)
            case "add":
                parent.insert(key, draw(JSON))
            case "swap":
                other, place = places[draw(st.integers(0, len(places) - 1))]
                parent[key] = _copy(other[place]) if _has(other, place) else None
            case "wrap":
                parent[key] = [parent[key]]
            case "deepen":
                parent[key] = deep(parent[key], draw(st.sampled_from([5, 70, 300])))
        if not tree:
            break
    return tree


def _places(tree: Any) -> Any:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _has(parent: Any, key: Any) -> bool:
    return key in parent if isinstance(parent, dict) else key < len(parent)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
