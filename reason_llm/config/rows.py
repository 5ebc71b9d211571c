"""A table's row, and the config section that names a row and changes columns of it: both are made
from one class, whose annotations bound the values and whose docstrings are the options' help."""

from collections.abc import Collection
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from pydantic import ConfigDict, Field, create_model
from pydantic.dataclasses import dataclass

from reason_llm.config.types import Section

T = TypeVar("T", bound=Section)
Row = TypeVar("Row")


@dataclass_transform(frozen_default=True)
def row_of_table(row: type[Row]) -> type[Row]:
    """Make a frozen dataclass, whose values pydantic checks."""
    settings = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    made: Any = dataclass(frozen=True, config=settings)(row)
    return made  # type: ignore[no-any-return]


def changeable(row: Any, fixed: Collection[str]) -> list[str]:
    """The names of the row's columns but for the fixed ones."""
    return [name for name in row.__pydantic_fields__ if name not in fixed]


def with_columns(name: str, section: type[T], row: Any, fixed: Collection[str]) -> type[T]:
    """The section with an option for each column that may be changed; null is the row's own."""
    types = get_type_hints(row, include_extras=True)
    options: dict[str, Any] = {
        column: (types[column] | None, Field(None, description=option.description))
        for column, option in row.__pydantic_fields__.items()
        if column not in fixed
    }
    made = create_model(name, __base__=section, __module__=section.__module__, **options)
    made.__doc__ = section.__doc__
    return made
