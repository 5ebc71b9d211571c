"""YAML of unknown origin as plain values: no objects, no duplicate keys, no aliases, nothing that
JSON cannot hold."""

from collections.abc import Iterator
from typing import Any

import yaml

from reason_llm.files import MOST_NESTING, check_nesting

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
        loader = _PlainValues(text)
    except yaml.YAMLError as error:  # control characters
        raise ValueError(str(error)) from error
    try:
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError(f"nested more than {MOST_NESTING} levels deep") from error
    except _BAD_SCALAR as error:
        raise ValueError(f"a value does not fit its kind ({error}); quote it") from error
    finally:
        loader.dispose()
    check_nesting(value)
    for each in _leaves(value):
        _check(each)
    return value


class _PlainValues(yaml.SafeLoader):
    """Safe YAML loader that refuses aliases and duplicate keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As SafeLoader's, without aliases: a few can unfold to any size, or hold themselves."""
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.YAMLError(
                f"line {alias.start_mark.line + 1}: the alias *{alias.anchor:.40} is not taken; "
                "write its value out"
            )
        return super().compose_node(parent, index)

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


_PlainValues.add_constructor("tag:yaml.org,2002:int", _PlainValues.construct_yaml_int)
_PlainValues.add_constructor("tag:yaml.org,2002:float", _PlainValues.construct_yaml_float)


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
