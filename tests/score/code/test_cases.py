"""The program in an answer, the forms of its tests, and what counts as the same output."""

import json
import math
from pathlib import Path
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
TABLE = Path(__file__).with_name("cases.jsonl").read_text().splitlines()


def of_table(*names: str) -> list[Any]:
    """The rows of ``cases.jsonl`` that have these keys, as parameters."""
    rows = [row for row in map(json.loads, TABLE) if row.keys() == {*names}]
    return [
        row[names[0]] if len(names) == 1 else tuple(row[name] for name in names) for row in rows
    ]


# --- the block


@pytest.mark.parametrize(("text", "block"), of_table("text", "block"))
def test_the_last_python_block_counts(text: str, block: str | None) -> None:
    assert last_code_block(text) == block


def test_a_long_line_is_read_at_once() -> None:
    assert last_code_block("```" + " " * 10**6 + "`") is None


# --- reading tests


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"test_cases": {"inputs": ["1"], "outputs": ["2"]}}, ProgramTests(("1",), ("2",))),
        ({"test_cases": '{"inputs": ["1"], "outputs": ["2"]}', "checker": "exact"},
         ProgramTests(("1",), ("2",))),
        ({"test_cases": {"inputs": ["1"], "outputs": ["2"]}, "atol": 0.1,
          "checker": "case-insensitive yes/no"}, ProgramTests(("1",), ("2",), 0.1, True)),
        ({"input_output": '{"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}'},
         CallTests("f", ((1, 2),), (3,))),
        ({"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2, 2]]}},
         CallTests("f", ((1,), (2,)), ([1], [2, 2]))),
        ({"tests": {"fn_name": "f", "inputs": ["[1]\n2"], "outputs": ["3"]}},
         CallTests("f", (([1], 2),), (3,))),
        ({"tests": [{"input": "1", "output": "2", "type": "stdin"}]},
         ProgramTests(("1",), ("2",))),
        ({"tests": {"inputs": ["1"], "outputs": ["2"]}, "atol": 0, "checker": "exact"},
         ProgramTests(("1",), ("2",))),
        ({"tests": [{"input": "1", "output": "3", "fn_name": "g", "metadata":
                     {"func_name": "f"}}]}, CallTests("g", ((1,),), (3,))),
        ({"tests": [{"input": "1\n2", "output": "3", "metadata": {"func_name": "f"}}]},
         CallTests("f", ((1, 2),), (3,))),
        ({"verification_info": {"test_cases": [{"input": "1", "output": "2"}]}},
         ProgramTests(("1",), ("2",))),
        ({"reward_model": {"ground_truth": '{"inputs": [["1", "2"]], "outputs": ["3"]}'}},
         ProgramTests(("1\n2",), ("3",))),
        ({"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "tolerance": 0.5,
          "atol": 0.1, "test_list": ["assert f(1)"]}, CallTests("f", ((1,),), (1,), 0.5)),
        ({"test": "assert f(1)", "entry_point": "f"}, AssertTests("assert f(1)", "f")),
        ({"test_list": ["assert f(1)", "assert f(2)"]}, AssertTests("assert f(1)\nassert f(2)")),
        ({"test_cases": {"assert_code": "assert f(1)"}}, AssertTests("assert f(1)")),
        ({"assert_code": "assert f(1)"}, AssertTests("assert f(1)")),
        ({"atol": 0.1, "checker": "case-insensitive",
          "verification_info": {"test_cases": {"inputs": ["1"], "outputs": ["2"]}, "atol": 0.2}},
         ProgramTests(("1",), ("2",), 0.2, True)),
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


@pytest.mark.parametrize(("row", "named"), of_table("row", "told"))
def test_a_malformed_row_is_one_line(row: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        read_row(row)
    message = str(caught.value)
    assert "\n" not in message
    for part in named:
        assert part in message


@pytest.mark.parametrize("source", of_table("refused"))
def test_an_assertion_that_says_nothing_of_the_program_is_refused_with_its_line(
    source: str,
) -> None:
    *_, last = source.split("\n")
    with pytest.raises(ValueError) as caught:
        read_row({"test_list": ["assert f(3) == 9", source]})
    line = 1 + len(source.split("\n"))
    assert f"'test_list', line {line}: {' '.join(last.split())[:20]}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", of_table("taken"))
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
