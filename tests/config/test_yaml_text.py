"""Values that do not fit their kind, in YAML and in what a buffer says of itself."""

import pytest

from reason_llm.config.yaml_text import parse
from reason_llm.run.buffer import count_from_json


@pytest.mark.parametrize("text", ["!!int ''", "!!bool x", "!!float ''", "!!timestamp x"])
def test_a_value_that_does_not_fit_its_tag(text: str) -> None:
    with pytest.raises(ValueError, match="does not fit its kind"):
        parse(f"a: {text}")


@pytest.mark.parametrize("value", [True, -1, 1.0, "1", None, 1 << 60])
def test_a_count_is_a_count(value: object) -> None:
    with pytest.raises(ValueError, match=r"step is .*, not a count"):
        count_from_json({"step": value}, "step")
