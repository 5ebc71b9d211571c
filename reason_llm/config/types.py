"""Base class and number types of the config's sections."""

from collections.abc import Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

Count = Annotated[int, Field(ge=1, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=True)]
ONE_IS_A_LIST = BeforeValidator(
    lambda value: [value] if isinstance(value, str | Mapping) or callable(value) else value
)


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys, with docstrings as descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """This section with other values of some options, by dotted names, which are not checked:
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
            raise ValueError("is a truth value; give what the option takes")
        return value
