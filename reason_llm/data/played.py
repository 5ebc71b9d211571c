"""Access to the data side of ``sample.environment``. Its folder, ``reason_llm/environments``, is
imported when a config or a source of rows asks for it."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from reason_llm.config import installation

Named = str | Mapping[str, str]
"""A value of ``sample.environment``."""


class Played(Protocol):
    """Interface of ``sample.environment`` for data, prompts and digests."""

    @property
    def needs_prompt(self) -> bool:
        """Whether each row must have a prompt, since no ``reset`` can give it."""

    @property
    def needs_tools(self) -> bool:
        """Whether the chat template must write tools."""

    @property
    def tools(self) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """JSON schemas of the tools, by the name in a row; a single one has the empty name."""

    @property
    def columns(self) -> Mapping[str, Collection[str]]:
        """Columns without which ``reset`` cannot be called, by the name in a row."""

    def columns_of(self, row: Mapping[str, Any]) -> set[str]:
        """Columns of this row that are read."""

    def name(self, where: str, row: Mapping[str, Any]) -> str:
        """The name of the one that plays a row; DataError if there is none."""

    def sources(self, data: Iterable[str]) -> dict[str, str]:
        """Digests of the user's own code in it, and in these sources of rows."""


def played_by(named: Named) -> Played:
    """The data side of this ``sample.environment``."""
    made: Played = installation.slice_for("environments", f"sample.environment={named}").data_side(
        named
    )
    return made


def is_played(source: str) -> bool:
    """Whether the rows of a source are made by the slice: ``environment?size=64``, whose prompts
    ``reset`` gives, or the tasks ``verifiers:NAME``."""
    return source.partition("?")[0] == "environment" or source.startswith("verifiers:")


def played_rows(source: str) -> Iterator[dict[str, Any]]:
    """Rows of such a source."""
    found: Iterator[dict[str, Any]] = installation.slice_for("environments", source).rows(source)
    return found
