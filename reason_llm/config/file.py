"""Config files: reading, overrides, writing and comparison; every mistake is one line."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from reason_llm.config import installation, other_names, yaml_text
from reason_llm.config.algorithms import ALGORITHMS
from reason_llm.config.sections import CHANGES, Config
from reason_llm.config.wrong_values import literals, nearest, wrong
from reason_llm.errors import ConfigError, ReasonError, one_line, raise_all
from reason_llm.files import read_bounded

Mistakes = list[ReasonError]
MOST_CONFIG_BYTES = 1 << 18
COMMAND_LINE = "command line"
"""Source of an option in messages, in place of a file name."""
OWN_NAME = "my_run"
"""Name of a run without a config file that is not the quick start."""
QUICK_START = Path("configs/quickstart.yaml")
MOST_SHOWN_CHARACTERS = 200


def load(
    path: Path | None,
    overrides: dict[str, Any] | None = None,
    mistakes: Mistakes | None = None,
    rows: str | None = None,
    overrides_name: str = COMMAND_LINE,
) -> Config:
    """Load a YAML file, from the working folder or else from the package, with dotted ``overrides``
    such as ``{"train.learning_rate": 1e-4}``.

    Args:
        path: None for the quick start or, if the overrides name a model or a training set, for a
            config of defaults.
        mistakes: list that collects the errors; the config then has all other options.
        rows: ``data.train`` where neither the file nor the overrides name one.
        overrides_name: source of the overrides in errors.

    Raises:
        ConfigError: one line with the key, the value and the fix; further mistakes are its notes.
    """
    overrides = options_of(overrides or {})
    tree: dict[str, Any] = {"run": {"name": OWN_NAME}}
    place = Path(overrides_name)
    if path is not None or not overrides.keys() & {"model.path", "data.train"}:
        place = path or QUICK_START
        tree = read_yaml(place)
    if rows is not None and isinstance(tree.get("data") or {}, dict):
        tree["data"] = {"train": rows, **(tree.get("data") or {})}
    return build(tree, place, overrides, mistakes, overrides_name)


def build(
    tree: dict[str, Any],
    path: Path,
    overrides: dict[str, Any],
    mistakes: Mistakes | None = None,
    overrides_name: str = COMMAND_LINE,
) -> Config:
    """Build the config from ``tree`` and dotted ``overrides``; the other arguments are those of
    ``load``, and the stem of ``path`` is the default name of the run. Wrong options are removed and
    the rest is validated again, so that all mistakes are found."""
    for section in Config.model_fields:
        if section in tree and tree[section] is None:
            tree[section] = {}  # an empty section is one of defaults
    tree.setdefault("data", {})
    overrides = options_of(overrides)
    if "run.steps" in overrides and "run.epochs" not in overrides:
        overrides = {**overrides, "run.epochs": None}  # of the file, which would win
    for key, value in overrides.items():
        _place(tree, key, value)
    if isinstance(tree.setdefault("run", {}), dict) and tree["run"].get("name") is None:
        tree["run"]["name"] = path.stem
    errors, gone, left = list[ReasonError](), set[str](), tree
    while True:
        try:
            config = Config.model_validate(left)
            break
        except ValidationError as error:
            problems = list(_problems(error, str(path), overrides, overrides_name))
            errors += [
                ConfigError(line) for line, keys in problems if line and not _overlap(keys, gone)
            ]
            gone |= {key for _, keys in problems for key in keys}
            before, left = left, without(tree, gone - {"data.train"})
            if left == before:
                raise_all([*(mistakes or ()), *errors])
    if mistakes is None:
        raise_all(errors)
    else:
        mistakes += errors
    return config


def to_yaml(config: Config) -> str:
    """Return the config, including defaults, as YAML that ``load`` reads back to an equal one."""
    tree = config.model_dump(mode="json")
    return str(yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True))


def schema() -> str:
    """JSON schema of a config file, for editors: the text of ``configs/schema.json``."""
    return f"{json.dumps(Config.model_json_schema(), indent=1)}\n"


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences between two dumped configs, such as ``["train.learning_rate: 0.001 -> 0.002",
    ...]``."""

    refused: list[str]
    """Changes that would make it another run."""
    warned: list[str]
    """Allowed changes that affect the result."""
    free: list[str]
    """Allowed changes that do not affect the adapter."""


CONTENT = {
    "data.prompts_sha256": "the training rows, or how they are rendered, have changed",
    "model.weights_sha256": "the model's weights have changed",
}
"""What a change of a digest means, in place of its values."""


def changes(old: dict[str, Any], new: dict[str, Any]) -> Changes:
    """Return the differences by the table ``CHANGES``.

    ``run.steps`` is among the warned if the schedule depends on it.
    """
    before, after = dict(flatten(old)), dict(flatten(new))
    found: dict[str, list[str]] = {"never": [], "warn": [], "free": []}
    for key in sorted(before | after):
        if before.get(key) == after.get(key):
            continue
        rule = next((rule for prefix, rule in CHANGES.items() if key.startswith(prefix)), "never")
        if key == "run.steps" and after.get("train.schedule") != "constant":
            rule = "warn"
        values = f"{_shown(before.get(key))} -> {_shown(after.get(key))}"
        found[rule].append(f"{key:.200}: {CONTENT.get(key, values)}")
    return Changes(found["never"], found["warn"], found["free"])


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the sections of a YAML file. Paths in a file of the package are relative to its
    folder."""
    place = installation.file(str(path))
    try:
        tree = parse(read_bounded(place, MOST_CONFIG_BYTES).decode(), f"config file {path}")
        return tree if place == path else installation.in_home(tree)
    except FileNotFoundError as error:
        near = difflib.get_close_matches(
            path.stem, [p.stem for p in path.parent.glob("*.yaml")], n=1, cutoff=0.3
        )
        hint = f"; did you mean {path.parent / near[0]}.yaml?" if near else "; name a YAML file"
        raise ConfigError(f"config file {path} does not exist{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file {path} cannot be read: {one_line(error)}; name a YAML text file"
        ) from error


def parse(text: str, what: str) -> dict[str, Any]:
    """Parse the sections of a YAML text, called ``what`` in errors."""
    try:
        tree = yaml_text.parse(text)
    except ValueError as error:
        raise ConfigError(f"{what} is not valid YAML: {one_line(error)}; fix that line") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{what} holds {type(tree).__name__}, not sections; start with 'data:'")
    return tree


def _place(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{key} cannot be set: {name} is {_shown(tree)} in the config file; make it a "
                "section"
            )
    tree[leaf] = value


def options_of(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides with the options in a section's mapping, each by its dotted name:
    ``{"data.columns": {"prompt": "q"}}`` becomes ``{"data.columns.prompt": "q"}``."""
    found: dict[str, Any] = {}
    for key, value in overrides.items():
        if isinstance(value, Mapping) and key in sections():
            found |= options_of({f"{key}.{name}": each for name, each in value.items()})
        else:
            found[key] = value
    return found


def sections() -> set[str]:
    """Return the dotted names of all sections: ``data``, ``data.columns``."""
    names = [name.split(".") for name, _ in leaves(Config)]
    return {".".join(parts[:end]) for parts in names for end in range(1, len(parts))}


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield ``("train.learning_rate", its field)`` for every option."""
    for name, option in section.model_fields.items():
        if isinstance(option.annotation, type) and issubclass(option.annotation, BaseModel):
            yield from leaves(option.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", option


def docstring(option: FieldInfo) -> str:
    """Return an option's docstring as one line."""
    return " ".join((option.description or "").split())


def shown_type(option: FieldInfo) -> str:
    """Return an option's type as text: ``none|k1|k2|k3``, ``INT|null``, ``PATH``."""

    def show(annotation: Any) -> str:
        origin, args = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return show(args[0])
        if origin is Literal:
            return "|".join(map(str, args))
        if origin in (Union, UnionType):
            return "|".join(map(show, args))
        if origin is list or annotation is type(None):
            return "LIST" if origin is list else "null"
        if origin is dict:
            return "MAPPING"
        return {Path: "PATH", str: "TEXT"}.get(annotation) or str(annotation.__name__).upper()

    return show(option.annotation)


def option_choices() -> dict[str, list[str]]:
    """Return the values of each option that takes a name of a fixed set, true or false."""
    parts = {
        key: shown_type(option).replace("BOOL", "true|false").split("|")
        for key, option in leaves(Config)
    }
    names = {key: [each for each in of if not each.isupper()] for key, of in parts.items()}
    names["algorithm.name"] = list(ALGORITHMS)
    return {key: of for key, of in names.items() if set(of) - {"null"}}


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("train.learning_rate", 1e-5)`` for every value of a dumped config."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _problems(
    error: ValidationError, path: str, overrides: dict[str, Any], overrides_name: str
) -> Iterator[tuple[str, set[str]]]:
    """Yield each problem of a failed validation as a line, with the options in it."""
    by_key: dict[str, list[Any]] = {}
    for each in sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden"):
        by_key.setdefault(_key(each["loc"]), []).append(each)
    before = ""
    for key, same in by_key.items():
        if same[0]["type"] == "missing" and f"did you mean {key}?" in before:
            yield "", {key}  # it is misspelt
            continue
        if same[0]["type"] == "extra_forbidden" and (lines := _answers(key, same[0]["input"])):
            yield from ((f"{path}: {line}", {key}) for line in lines)
            continue
        for problem in _problem(key, same[0], same).split("\n"):
            named = {key, *_OPTION.findall(problem)} - {""}
            line = _line(
                same[0], key, problem, overrides_name if _overlap(overrides, named) else path
            )
            before += line
            is_of_options = same[0]["type"] == "value_error" and key in ("", *Config.model_fields)
            yield line, named - {key} if is_of_options else {key}


def _answers(key: str, section: Any) -> list[str]:
    """Return the answer to each value in an unknown section that has other trainers' options, as
    verl's ``trainer: {save_freq: 20}``; empty for any other value."""
    if not isinstance(section, dict) or other_names.equivalent(key, "", ()):
        return []
    values = list(flatten(section, f"{key}."))
    if not any(other_names.equivalent(name, "", ()) for name, _ in values):
        return []
    return [unknown_key(name, f"unknown key {name!r}", value=value) for name, value in values]


def _overlap(keys: Iterable[str], others: Collection[str]) -> bool:
    """Whether one of the keys is, or contains, one of the others."""
    return any(f"{other}.".startswith(f"{key}.") for key in keys for other in others)


def without(tree: Any, keys: Collection[str]) -> Any:
    """Return a copy of the sections without these options and list items."""
    if isinstance(tree, list):
        named = [(str(number), value) for number, value in enumerate(tree)]
        return [without(value, _inner(name, keys)) for name, value in named if name not in keys]
    if not isinstance(tree, dict):
        return tree
    # A name or a function may stand for a list of one item.
    return {
        name: without(value, inner)
        for name, value in tree.items()
        if name not in keys
        and not ("0" in (inner := _inner(str(name), keys)) and not isinstance(value, list | dict))
    }


def _inner(name: str, keys: Collection[str]) -> set[str]:
    """Return the keys inside this one, without its prefix."""
    return {key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")}


def _line(first: Mapping[str, Any], key: str, problem: str, path: str) -> str:
    """Return the message: file, key, value, fix."""
    # For a key inside an option's value, such as score.rewards.0.name, name the option.
    options = dict(leaves(Config))
    option = next((name for name in options if f"{key}.".startswith(f"{name}.")), None)
    hint = (
        f"; {option} takes {shown_type(options[option])}: {docstring(options[option])}"
        if option
        else ""
    )
    if first["type"] == "extra_forbidden":
        problem = f"{path}: unknown key {key!r}"
        return f"{problem}{hint}" if option else unknown_key(key, problem, value=first["input"])
    if first["type"] == "missing" and key == option:
        if path == COMMAND_LINE:
            return (
                f"{path}: --{key} is missing; give it, or a config file. (The quick start runs "
                "without a file, --model.path and --data.train.)"
            )
        return f"{path}: {key} is missing; set it, e.g. {key}: data/arithmetic_train.jsonl"
    if first["type"] == "missing":
        return f"{path}: {key} is missing{hint}"
    if not first["loc"] or (key != option and first["type"] == "value_error"):
        return f"{path}: {problem}"  # a check of a whole section, which names its keys itself
    if "did you mean" in problem or other_names.equivalent_value(key, first["input"]):
        hint = ""
    return f"{path}: {key}={_shown(first['input'])} {problem}{hint}"


_LIMITS = {"less_than", "less_than_equal", "greater_than", "greater_than_equal"}


def _problem(key: str, first: Mapping[str, Any], same: Sequence[Mapping[str, Any]]) -> str:
    """Describe a wrong value, by all its problems: a union has one for each type."""
    if ours := other_names.equivalent_value(key, first["input"]):
        return f"is a value of another trainer; set it to {ours}{other_names.note(key)}"
    if len(same) == 1 or first["type"] in ("value_error", "extra_forbidden"):
        return wrong(first)
    if (limit := next((each for each in same if each["type"] in _LIMITS), None)) is not None:
        return wrong(limit)  # a number that only its size makes wrong
    near = nearest(first["input"], [name for each in same for name in literals(each)])
    return "is not what the option takes" + (f"; did you mean {near}?" if near else "")


def _key(places: tuple[int | str, ...]) -> str:
    """Return the dotted key, such as ``score.rewards.0.name``. Parts such as "constrained-int" and
    "str" name a branch of a union, not a key."""
    return ".".join(
        str(part)
        for part in places
        if isinstance(part, int) or (part.isidentifier() and part not in _BRANCHES)
    )


_BRANCHES = {"str", "int", "float", "bool", "list"}
_OPTION = re.compile(r"[a-z_]+(?:\.[a-z_]+)+|\bstage(?==)|(?<=the )[a-z]+(?= section)")
"""Option or section in our messages."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN_CHARACTERS else f"{text[:MOST_SHOWN_CHARACTERS]}…"


def unknown_key(
    key: str, problem: str, dashes: str = "", others: Iterable[str] = (), value: Any = None
) -> str:
    """Return ``problem`` with the option, or one of the ``others``, closest to ``key``, and with
    ours for a ``value`` of another trainer's option."""
    keys = [*others, *(name for name, _ in leaves(Config))]
    if same := other_names.equivalent(key, dashes, keys, value):
        return f"{problem}; {same}"
    inside = [name for name in keys if name.startswith(f"{key}.")]
    if dashes and inside:
        return f"{problem}: it is a section; name an option in it, such as {dashes}{inside[0]}"
    if not dashes and "." not in key:
        keys = [*Config.model_fields, *keys]
    # By the last part alone; of equal ones, that in the key's own section.
    section = key.partition(".")[0]
    by_name = {name.rpartition(".")[2]: name for name in reversed(keys)}
    by_name |= {n.rpartition(".")[2]: n for n in reversed(keys) if n.startswith(f"{section}.")}
    asked = key.rpartition(".")[2].replace("-", "_")
    close = difflib.get_close_matches(asked, by_name, n=1, cutoff=0.7)
    near = [name for name in keys if key.startswith(f"{name}.")] or [by_name[n] for n in close]
    if near:
        return f"{problem}; did you mean {dashes}{near[0]}?"
    where = f" {section}" if section in Config.model_fields else ""
    return f"{problem}; see --help{where} for the options"
