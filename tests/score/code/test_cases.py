"""The program in an answer, the forms of its tests, and what counts as the same output."""

import json
import math
from typing import Any

import pytest

from reason_llm.score.code.cases import (
    AssertTests,
    CallTests,
    ProgramTests,
    answer_of_row,
    read_tests,
    same_output,
    same_value,
    tests_of_row as read_row,
)
from reason_llm.score.code.code_tests import last_code_block

ADD = {"inputs": ["1 2\n", "5 7\n", "10 -3\n"], "outputs": ["3\n", "12\n", "7\n"]}


# --- the block


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("a\n```python\nx = 1\n```\nb", "x = 1"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\nwhich prints\n```\n7\n```", "x = 1"),
        ("```python\nx = 1\n```\n```text\n7\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2"),
        ("```py\nx = 1\n```", "x = 1"),
        ("```Python3 \r\nx = 1\n```", "x = 1"),
        ('``` python title="a.py"\nx = 1\n```', "x = 1"),
        ("1. so\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = \n```python\nx = 2\n```", "x = 2"),
        ("```python\n```", ""),
        ("```cpp\nint x;\n```", None),
        ("x = 1", None),
        ("use `x = 1`", None),
        ("", None),
    ],
)
def test_the_last_python_block_counts(text: str, block: str | None) -> None:
    assert last_code_block(text) == block


def test_a_long_line_is_read_at_once() -> None:
    assert last_code_block("```" + " " * 10**6 + "`") is None


# --- reading tests


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        (
            {"test_cases": {"inputs": ["1"], "outputs": ["2"]}},
            ProgramTests(("1",), ("2",)),
        ),
        (
            {"test_cases": '{"inputs": ["1"], "outputs": ["2"]}', "checker": "exact"},
            ProgramTests(("1",), ("2",)),
        ),
        (
            {"test_cases": {"inputs": ["1"], "outputs": ["2"]}, "atol": 0.1,
             "checker": "case-insensitive yes/no"},
            ProgramTests(("1",), ("2",), 0.1, True),
        ),
        (
            {"input_output": '{"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}'},
            CallTests("f", ((1, 2),), (3,)),
        ),
        (
            {"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2, 2]]}},
            CallTests("f", ((1,), (2,)), ([1], [2, 2])),
        ),
        (
            {"tests": {"fn_name": "f", "inputs": ["[1]\n2"], "outputs": ["3"]}},
            CallTests("f", (([1], 2),), (3,)),
        ),
        (
            {"tests": [{"input": "1", "output": "2", "type": "stdin"}]},
            ProgramTests(("1",), ("2",)),
        ),
        (
            {"tests": {"inputs": ["1"], "outputs": ["2"]}, "atol": 0, "checker": "exact"},
            ProgramTests(("1",), ("2",)),
        ),
        (
            {"tests": [{"input": "1", "output": "3", "fn_name": "g", "metadata":
                        {"func_name": "f"}}]},
            CallTests("g", ((1,),), (3,)),
        ),
        (
            {"tests": [{"input": "1\n2", "output": "3", "metadata": {"func_name": "f"}}]},
            CallTests("f", ((1, 2),), (3,)),
        ),
        (
            {"verification_info": {"test_cases": [{"input": "1", "output": "2"}]}},
            ProgramTests(("1",), ("2",)),
        ),
        (
            {"reward_model": {"ground_truth": '{"inputs": [["1", "2"]], "outputs": ["3"]}'}},
            ProgramTests(("1\n2",), ("3",)),
        ),
        (
            {"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "tolerance": 0.5,
             "atol": 0.1, "test_list": ["assert f(1)"]},
            CallTests("f", ((1,),), (1,), 0.5),
        ),
        ({"test": "assert f(1)", "entry_point": "f"}, AssertTests("assert f(1)", "f")),
        ({"test_list": ["assert f(1)", "assert f(2)"]}, AssertTests("assert f(1)\nassert f(2)")),
        ({"test_cases": {"assert_code": "assert f(1)"}}, AssertTests("assert f(1)")),
        ({"assert_code": "assert f(1)"}, AssertTests("assert f(1)")),
        (
            {"atol": 0.1, "checker": "case-insensitive",
             "verification_info": {"test_cases": {"inputs": ["1"], "outputs": ["2"]}, "atol": 0.2}},
            ProgramTests(("1",), ("2",), 0.2, True),
        ),
    ],
)  # fmt: skip
def test_the_forms_of_tests(row: dict[str, Any], tests: Any) -> None:
    assert read_row(row) == tests
    assert read_tests(json.dumps(row)) == tests


@pytest.mark.parametrize(
    "source",
    [
        *("expect(f(1))", "with raises(E): f(1)", "t.fail()", "exit(f(1))", "quit()", "raise E"),
        *("unittest.main()", "doctest.testmod()", "same.assertEqual(f(1), 2)"),
    ],
)
def test_source_that_can_fail_is_taken(source: str) -> None:
    assert read_row({"test": source}) == AssertTests(source)


def test_the_first_of_a_row_s_columns_holds_its_tests() -> None:
    names = ("test_cases", "tests", "input_output", "test", "test_list", "assert_code",
             "verification_info", "reward_model", "ground_truth")  # fmt: skip
    row = {name: f"assert {name}" for name in reversed(names)}
    for name in names:
        assert read_row(row) == read_tests(answer_of_row(row)) == AssertTests(f"assert {name}")
        row[name] = None


def test_a_tests_object_stands_for_a_row_of_it() -> None:
    assert read_tests(json.dumps(ADD)) == read_row({"test_cases": ADD})
    assert read_tests(json.dumps([{"input": "1", "output": "2"}])) == ProgramTests(("1",), ("2",))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "x"}, ["lacks tests", "test_cases"]),
        ({"test_cases": "{"}, ["'test_cases'", "no valid JSON"]),
        ({"test_cases": 3}, ["'test_cases' is 3"]),
        ({"test_cases": []}, ["inputs", "at least one"]),
        ({"test_cases": {"inputs": ["1"]}}, ["'outputs' is None"]),
        ({"test_cases": {"inputs": [], "outputs": []}}, ["0 inputs"]),
        ({"test_cases": {"inputs": ["1"], "outputs": ["1", "2"]}}, ["1 inputs and 2 outputs"]),
        ({"test_cases": {"inputs": [1], "outputs": ["1"]}}, ["case 1 is 1", "fn_name"]),
        ({"test_cases": {"fn_name": "a b", "inputs": [[1]], "outputs": [1]}}, ["'a b'"]),
        ({"test_cases": {"fn_name": "f", "inputs": [1], "outputs": [1]}}, ["case 1: 1 -> 1"]),
        ({"test_cases": {"fn_name": "f", "inputs": ["x"], "outputs": [1]}}, ["case 1: 'x'"]),
        ({"test_cases": [{"input": "1"}]}, ["case 1", "output"]),
        ({"test_cases": {"assert_code": 3}}, ["'assert_code' is 3"]),
        ({"test": "assert f("}, ["'test' is no valid Python"]),
        ({"test": ""}, ["'test' is ''"]),
        ({"test": "print('ok' if f(2) == 4 else 'failed')"}, ["asserts nothing", "write assert"]),
        ({"test": "def check(f):\n    return f(2) == 4", "entry_point": "f"}, ["asserts nothing"]),
        ({"test": "assert f(1)", "entry_point": 3}, ["'entry_point' is 3"]),
        ({"test_cases": ADD, "atol": "x"}, ["the tolerance is 'x'"]),
        ({"test_cases": ADD, "atol": -1}, ["the tolerance is -1"]),
        ({"test_cases": ADD, "tolerance": 1e6}, ["the tolerance is 1000000.0"]),
        ({"test_cases": ADD, "tolerance": True}, ["the tolerance is True"]),
        ({"tests": [{"input": [n], "output": n, "fn_name": n} for n in "gf"]}, ["function: f, g"]),
    ],
)
def test_a_malformed_row_is_one_line(row: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        read_row(row)
    message = str(caught.value)
    assert "\n" not in message
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    "source",
    [
        *(
            "assert (f(2) == 4, 'm')",
            "assert f(2), 4",
            "assert f(2), [1, -2]",
            "assert [f(2) == 4]",
        ),
        *("assert {f(2)}", "assert {f(2): 4}", "assert (f(x) == 4 for x in (2, -2))"),
        *("assert [f(x) == 4 for x in (2, -2)]", "assert map(f, [2])", "assert lambda: f(2) == 4"),
        *("assert f(2) == 4 or 'text'", "assert f(2) == 4 or print", "assert not [] and 'f(2)'"),
        *("got = f(2)\nassert got.isupper", "s = f(2)\ns.done()\nassert s.done", "f(2)\nassert f"),
        *(
            "assert 4 == 4",
            "assert 1 < 2 <= 2",
            "assert 'a' in 'abc'",
            "got = f(2)\nassert got == got",
        ),
        *("assert len(f(2)) >= 0", "assert isinstance(f(2), object)", "assert f'{f(2)} == 4'"),
        *(
            "assert all(f(x) == 4 for x in [])",
            "assert any([f(2) == 4, True])",
            "assert (r := (4,))",
        ),
        "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate",
    ],
)
def test_an_assertion_that_says_nothing_of_the_program_is_refused_with_its_line(
    source: str,
) -> None:
    *_, last = source.split("\n")
    with pytest.raises(ValueError) as caught:
        read_row({"test_list": ["assert f(3) == 9", source]})
    line = 1 + len(source.split("\n"))
    assert f"'test_list', line {line}: {' '.join(last.split())[:20]}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        *("assert True, 'a mark'\nassert f(2) == 4", "assert f(2) == 4, 4", "assert f(7), True"),
        *("assert f(2)", "got = f(2)\nassert got.is_open", "assert [x for x in f(2) if x]"),
        *("assert f(2) or g(2)", "assert f(2) == f(2)", "assert isinstance(f(2), int), 3"),
        *(
            "assert len(f(2)) > 0",
            "make = f(2)\nassert make\nmake(3)",
            "assert isclose(f(2), 4), 4",
        ),
        *("assert (*f(2),)", "assert f(2)[0], f'{f(2)}'", "f([]).count(3)\nassert f(2).count"),
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    assert True",
    ],
)
def test_other_assertions_are_taken(source: str) -> None:
    assert read_row({"test": source}) == AssertTests(source)


def test_true_alone_asserts_nothing() -> None:
    with pytest.raises(ValueError, match="asserts nothing"):
        read_row({"test": "def check(f):\n    f(2)\n    assert True, 'done'"})


def test_a_row_becomes_an_answer_and_comes_back() -> None:
    row = {"question": "q", "solution": "x", "test_cases": ADD, "atol": 0.1, "other": object()}
    assert read_tests(answer_of_row(row)) == read_row(row)
    checked = {"test_cases": ADD, "checker": "case-insensitive", "tolerance": 0.2}
    called = {"tests": {"inputs": [[1]], "outputs": [[2]]}, "fn_name": "f"}
    for row in (checked, called, {"test": "assert f(1)", "entry_point": "f"}):
        assert read_tests(answer_of_row(row)) == read_row(row)
    with pytest.raises(ValueError, match="lacks tests"):
        answer_of_row({"question": "q"})


# --- comparing


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \n2", "1\r\n2 \n\n", True),
        ("1\n2", "1 2", False),
        ("1 2", "1  2", False),
        ("1\n2", "\n1\n2", False),
        ("a", "A", False),
        ("1.0", "1", False),
        ("", "\n", True),
    ],
)
def test_lines_are_compared_without_trailing_space(expected: str, actual: str, same: bool) -> None:
    assert same_output(expected, actual) == same


def test_numbers_may_differ_where_that_is_asked() -> None:
    assert same_output("x 1.0\n2", "x 1.0000001\n2", tolerance=1e-6)
    assert same_output("1000000", "1000000.5", tolerance=1e-6)
    assert not same_output("x 1.0", "x 1.1", tolerance=1e-6)
    assert not same_output("x 1.0", "y 1.0", tolerance=1e-6)
    assert not same_output("nan 1", "1 1", tolerance=1e-6)
    assert not same_output("1", "1 1", tolerance=1e-6)
    assert not same_output("1000000", "1000001", tolerance=1e-6)
    assert not same_output("100", "101.0", tolerance=0.01)
    assert not same_output("5", "6", tolerance=2)
    assert same_output("5", "5.0", tolerance=0.1) and same_output("5.0", "5.05", tolerance=0.1)
    assert not same_output("1" * 5000, "2" * 5000, tolerance=0.1)
    assert not same_value(1000000, 1000001.0, 1e-6)
    assert not same_output("1000.0", "1_000.0", tolerance=0.5)
    assert same_output("YES\nno", "yes\nNo", ignore_case=True)
    assert not same_output("YES 1.0", "yes 1.1", tolerance=0.2)
    assert same_output("YES 1.0", "yes 1.1", tolerance=0.2, ignore_case=True)
    assert same_value([1.0, {"a": 2}], [1.05, {"a": 2}], 0.1)
    assert not same_value(1.0, 1.05)
    assert not same_value(1.0, True)
    assert not same_value(10**400, float("inf"))
    assert not same_value(10**400, 1.5, 0.1)


@pytest.mark.parametrize(
    ("expected", "actual", "tolerance", "same"),
    [
        (1000, 600, 0.5, False),  # relative to itself, half of it would be near
        (1000, 1009.5, 0.5, True), (1000, 1011.0, 0.5, False), (1000, 1011.0, 20, True),
        (0.0, 0.5, 0.5, True), (0.0, 0.51, 0.5, False), (0.002, 0.0029, 0.001, True),
        (100, 100.05, 0.001, True), (100, 100.9, 0.001, False),
    ],
)  # fmt: skip
def test_a_tolerance_is_absolute_and_relative_up_to_a_hundredth(
    expected: float, actual: float, tolerance: float, same: bool
) -> None:
    assert same_value({"a": [expected]}, {"a": [actual]}, tolerance) == same
    assert same_output(f"a {expected}", f"a {actual}", tolerance) == same


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        (1.0, 1 + 5e-10, True), (1.0, 1 + 5e-9, False), (3, 3.0, True), (1.0, None, False),
        (1e-9, 2e-9, False), (0.0, 5e-13, True), (0.0, 5e-12, False),  # small ones are not nought
        (2**53 + 1, float(2**53), False), (math.nan, math.nan, True), (math.inf, -math.inf, False),
        ([1.0], [1.0, 2.0], False), ({"a": 1.0}, {"b": 1.0}, False), ([1], {"0": 1}, False),
    ],
)  # fmt: skip
def test_returned_values_without_a_tolerance(expected: Any, actual: Any, same: bool) -> None:
    assert same_value(expected, actual) == same
