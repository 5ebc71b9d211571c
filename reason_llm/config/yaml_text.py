"""YAML of unknown origin as plain values: no objects, no duplicate keys, no alias that unfolds
beyond a config's size, nothing that JSON cannot hold."""

from collections.abc import Iterator
from typing import Any

import yaml

from reason_llm.files import MOST_NESTING

MOST_NODES = 20_000
"""Values and keys, each counted as often as it stands there once all aliases are unfolded."""
MOST_INTEGER = 2**63 - 1

# What SafeLoader raises on a scalar that does not fit its tag, such as !!int "" or 2001-99-99.
_BAD_SCALAR = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


def parse(text: str) -> Any:
    """The one value in ``text``: None, bool, int of 64 bits, float, str, list, or dict with text as
    keys.

    Raises:
        ValueError: one or more lines on what is wrong.
    """
    try:
        loader = _UniqueKeys(text)
    except yaml.YAMLError as error:  # control characters
        raise ValueError(str(error)) from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        value = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError(f"nested more than {MOST_NESTING} levels deep") from error
    except _BAD_SCALAR as error:
        raise ValueError(f"a value does not fit its kind ({error}); quote it") from error
    finally:
        loader.dispose()
    for each in _leaves(value):
        _check(each)
    return value


class _UniqueKeys(yaml.SafeLoader):
    """Safe YAML loader that refuses duplicate keys in a mapping."""

    def construct_yaml_int(self, node: Any) -> int:
        """As SafeLoader's, without YAML 1.1's base 8 and base 60, such as 010 and 1:30."""
        digits = node.value.lstrip("+-").replace("_", "")
        if ":" in digits or (len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()):
            kind = "base 60" if ":" in digits else "base 8"
            raise yaml.YAMLError(
                f"line {node.start_mark.line + 1}: {node.value!r:.60} would be read in {kind}; "
                "write a decimal number, or quote it as text"
            )
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: Any) -> float:
        """As SafeLoader's, without base 60, such as 1:30.5."""
        if ":" in node.value:
            raise yaml.YAMLError(
                f"line {node.start_mark.line + 1}: {node.value!r:.60} would be read in base 60; "
                "write a decimal number, or quote it as text"
            )
        return super().construct_yaml_float(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's, after the check for duplicate keys."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: {key.value!r} stands twice")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


_UniqueKeys.add_constructor("tag:yaml.org,2002:int", _UniqueKeys.construct_yaml_int)
_UniqueKeys.add_constructor("tag:yaml.org,2002:float", _UniqueKeys.construct_yaml_float)


def _count(node: yaml.Node, known: dict[int, int], depth: int = 0) -> int:
    """Nodes in ``node`` with all aliases unfolded.

    Args:
        known: counts of the nodes that were met before, by identity; 0 while one is being counted.
    """
    number = known.get(id(node))
    if number == 0:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: an alias that holds itself")
    if number is None:
        if depth > MOST_NESTING:
            raise RecursionError
        known[id(node)] = 0
        number = 1 + sum(_count(each, known, depth + 1) for each in _children(node))
        known[id(node)] = number
    if number > MOST_NODES:
        raise yaml.YAMLError(
            f"line {node.start_mark.line + 1}: more than {MOST_NODES:,} values, aliases unfolded"
        )
    return number


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"the key {key!r} is of type {type(key).__name__}, not text; quote it"
                )
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _check(value: Any) -> None:
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"{value[:60]!r} holds a NUL or half a character; remove it")
    elif isinstance(value, int):
        if abs(value) > MOST_INTEGER:
            raise ValueError(f"the integer {str(value)[:40]} is beyond 64 bits; lower it")
    elif not isinstance(value, float | None):
        raise ValueError(f"{str(value)[:60]!r} is read as a {type(value).__name__}; quote it")
