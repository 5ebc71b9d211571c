"""Values that do not fit their kind in YAML."""

import pytest

from reason_llm.config.yaml_text import parse


@pytest.mark.parametrize("text", ["!!int ''", "!!bool x", "!!float ''"])
def test_a_value_that_does_not_fit_its_tag(text: str) -> None:
    with pytest.raises(ValueError, match="does not fit its kind"):
        parse(f"a: {text}")


def test_half_a_character_is_told() -> None:
    """As a command line of other bytes than UTF-8 has them."""
    with pytest.raises(ValueError, match=r"^it holds an incomplete character; remove it$"):
        parse("a: b\udc80")


@pytest.mark.parametrize(
    "text", ["010", "-010", "+0_7", "1:30", "190:20:30", "1:30.5", "-1:30", "0b1:1", "00"]
)
def test_octal_and_base_60_of_yaml_1_1_are_refused(text: str) -> None:
    """A learning rate of 010 would be 8, and 1:30 would be 90."""
    if text == "0b1:1":
        assert parse(f"a: {text}") == {"a": text}  # text, in YAML 1.1 too
        return
    with pytest.raises(ValueError, match=r"^line 1: '.*' would be read in base (8 or )?60; write"):
        parse(f"a: {text}")
    assert parse(f"a: '{text}'") == {"a": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-0", 0), ("10", 10), ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("0.5", 0.5),
     ("1.5e+3", 1500.0), ("08", "08"), ("1e-5", "1e-5"), (".5", 0.5)],
)  # fmt: skip
def test_other_numbers_are_what_they_were(text: str, value: object) -> None:
    assert parse(f"a: {text}") == {"a": value}


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "a: {b: 1, c: 2, b: 1}"])
def test_a_key_stands_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"'[ab]' occurs twice"):
        parse(text)


@pytest.mark.parametrize("text", ["a: &x [1]\nb: *x", "a: &x {b: 1}\nc: {<<: *x}", "- &x [\n*x]"])
def test_an_alias_is_refused_and_an_anchor_alone_is_not(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^line 2: the alias \*x is not supported; write its value"
    ):
        parse(text)
    assert parse("a: &x [1]") == {"a": [1]}


@pytest.mark.parametrize("text", ["2026-11-27", "2001-99-99", "2026-11-27 10:20:30"])
def test_a_date_is_text(text: str) -> None:
    """As JSON has it, so that ``--data.date 2026-11-27`` needs no quotes within quotes."""
    assert parse(text) == text
    assert parse(f"a: {text}") == {"a": text}
    with pytest.raises(ValueError, match="read as timestamp; quote it"):
        parse(f"!!timestamp {text}")
