"""Base classes and number types of the config's sections, and the search of a user's pattern."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, get_args
from urllib.parse import urlsplit

import regex
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)

Count = Annotated[int, Field(ge=1, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Gib = Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)]
"""More would be a number of megabytes."""
Whole = Annotated[int, Field(ge=0, strict=True)]


class _OneIsAList(BeforeValidator):
    """Annotation of a list that may be given as its only item."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        found = handler(schema)
        return {"anyOf": [found["items"], found]}


ONE_IS_A_LIST = _OneIsAList(
    lambda value: [value] if isinstance(value, str | Mapping) or callable(value) else value
)


class Section(BaseModel):
    """Base class of all sections: frozen, no unknown keys, docstrings as descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the section with some options replaced, by dotted names and without validation:
        ``config.with_options({"model.adapter.rank": 8})``."""
        changed: dict[str, Any] = {}
        for key, value in options.items():
            name, _, rest = key.partition(".")
            section = changed.get(name, getattr(self, name))
            changed[name] = section.with_options({rest: value}) if rest else value
        return self.model_copy(update=changed)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation is not bool and bool not in get_args(annotation):
            raise ValueError("is a boolean; give a value of the option's type")
        return value


class MayBeText(Section):
    """Base of sections that may be given as one string."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


class ServiceSection(Section):
    """Options of a language model behind a URL."""

    timeout_seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 60.0
    """Time limit of a request, in seconds."""
    key_env: str | None = None
    """Environment variable with the API key. null: no key is sent."""

    @field_validator("url", check_fields=False)
    @classmethod
    def _is_a_plain_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and a host")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError(
                "holds a user, a password or a query; name the key's variable in key_env"
            )
        return url.rstrip("/")


MATCHING_SECONDS = 5.0


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that fully match a regular expression; raises ValueError if it is invalid,
    or takes longer than ``MATCHING_SECONDS``, as with nested repetitions."""
    try:
        compiled = regex.compile(pattern)
        return [name for name in names if compiled.fullmatch(name, timeout=MATCHING_SECONDS)]
    except TimeoutError as error:
        raise ValueError(f"the search takes longer than {MATCHING_SECONDS:g} s") from error
    except (regex.error, RecursionError) as error:
        raise ValueError(str(error)) from error
