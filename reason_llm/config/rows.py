"""Row of a table, and the config section that names a row and changes its columns: both are built
from one class, whose annotations bound the values and whose docstrings are the help texts."""

from collections.abc import Collection
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform, get_type_hints

from pydantic import ConfigDict, Field, create_model, field_validator, model_validator
from pydantic.dataclasses import dataclass

from reason_llm.config.types import Section
from reason_llm.config.wrong_values import none_of

Row = TypeVar("Row")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def row_of_table(row: type[Row]) -> type[Row]:
    """Make a frozen dataclass with values validated by pydantic."""
    settings = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    made: Any = dataclass(frozen=True, kw_only=True, config=settings)(row)
    return made  # type: ignore[no-any-return]


@row_of_table
class Described:
    """Description of a row."""

    idea: str
    """Short description."""
    source: str
    """Paper and equation."""


class ChosenRow(Section):
    """Section that names a row of a table and changes some of its columns."""

    TABLE: ClassVar[dict[str, Any]]
    OTHERS: ClassVar[set[str]] = {"name"}
    """Options of the section that are not columns of the row."""
    name: str

    @field_validator("name")
    @classmethod
    def _is_a_row(cls, name: str) -> str:
        if name not in cls.TABLE:
            raise ValueError(none_of(name, cls.TABLE))
        return name

    @property
    def changes(self) -> dict[str, Any]:
        """Columns that this section sets."""
        return self.model_dump(exclude=self.OTHERS, exclude_none=True)

    def row(self) -> Any:
        """Return the row with this section's changes; raise ValueError if one would be ignored."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _row_uses_every_change(self) -> Self:
        self.row()
        return self


Chosen = TypeVar("Chosen", bound=ChosenRow)


def with_columns(
    name: str, section: type[Chosen], row: Any, fixed: Collection[str]
) -> type[Chosen]:
    """Return the section with an option for each column that may be changed; null keeps the row's
    value."""
    types = get_type_hints(row, include_extras=True)
    helps = {  # pydantic reads a docstring in the class that has the column, and not in a subclass
        column: option.description
        for table in reversed(row.__mro__[:-1])
        for column, option in table.__pydantic_fields__.items()
        if option.description
    }
    options: dict[str, Any] = {
        column: (types[column] | None, Field(None, description=helps.get(column)))
        for column in row.__pydantic_fields__
        if column not in fixed
    }
    made = create_model(name, __base__=section, __module__=section.__module__, **options)
    made.__doc__ = section.__doc__
    return made
