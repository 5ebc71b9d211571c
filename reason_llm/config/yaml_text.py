"""Parser of untrusted YAML into plain values: no objects, no duplicate keys, no aliases, only what
JSON can hold."""

import re
from typing import Any

import yaml
from yaml.composer import Composer

from reason_llm.files import MAX_NESTING, check_nesting

MOST_INTEGER = 2**63 - 1
_KINDS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")
}

_FIX = "write a decimal number, or quote it as text"

# Errors of SafeLoader for a scalar that does not fit its tag, such as !!int "" or 2001-99-99.
_BAD_SCALAR = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


def parse(text: str) -> Any:
    """Return the value in ``text``: None, bool, 64-bit int, float, str, list, or a dict with string
    keys; raises ValueError, of one or more lines."""
    try:
        value = yaml.load(text, _PlainValues)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_NESTING} levels deep") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds an incomplete character; remove it") from error
    except _BAD_SCALAR as error:
        raise ValueError(f"a value does not fit its kind ({error}); quote it") from error
    check_nesting(value)
    return value


if not yaml.__with_libyaml__:
    raise ImportError(
        "PyYAML was installed without libyaml; pip install --only-binary :all: pyyaml"
    )


class _PlainValues(Composer, yaml.CSafeLoader):
    """libyaml's SafeLoader that refuses aliases, duplicate keys and numbers of other bases. A date
    is text, as in JSON."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own name
        first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, which can expand without limit or contain themselves."""
        if self.check_event(yaml.AliasEvent):
            alias: Any = self.peek_event()
            raise _problem(
                alias, f"the alias *{alias.anchor:.40} is not supported; write its value instead"
            )
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Refuse dates, bytes and sets."""
        if node.tag not in _KINDS:
            value = f"{node.value!r:.60}" if isinstance(node, yaml.ScalarNode) else "a value"
            raise _problem(node, f"{value} is read as {_kind(node)}; quote it")
        return super().construct_object(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        """Refuse NUL, which no path can contain."""
        value = super().construct_scalar(node)
        if "\0" in value:
            raise _problem(node, f"{value[:60]!r} holds a NUL; remove it")
        return value

    def construct_yaml_int(self, node: Any) -> int:
        """Refuse YAML 1.1's base 8 and base 60, such as 010 and 1:30."""
        if re.match(r"[+-]?0_*\d|.*:", node.value):
            raise _problem(node, f"{node.value!r:.60} would be read in base 8 or 60; {_FIX}")
        value = super().construct_yaml_int(node)
        if abs(value) > MOST_INTEGER:
            raise _problem(node, f"{node.value:.40} is beyond 64 bits; lower it")
        return value

    def construct_yaml_float(self, node: Any) -> float:
        """Refuse base 60, such as 1:30.5."""
        if ":" in node.value:
            raise _problem(node, f"{node.value!r:.60} would be read in base 60; {_FIX}")
        return super().construct_yaml_float(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Require string keys without duplicates."""
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _problem(key, f"the key {key.value!r:.60} is read as {_kind(key)}; quote it")
            if key.value in seen:
                raise _problem(key, f"{key.value!r:.60} occurs twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _kind(node: Any) -> str:
    return str(node.tag).removeprefix("tag:yaml.org,2002:")[:60]


def _problem(node: Any, text: str) -> yaml.YAMLError:
    return yaml.YAMLError(f"line {node.start_mark.line + 1}: {text}")


_PlainValues.add_constructor("tag:yaml.org,2002:int", _PlainValues.construct_yaml_int)
_PlainValues.add_constructor("tag:yaml.org,2002:float", _PlainValues.construct_yaml_float)
