"""Tests of a programming problem: read from a data row, and compared with a program's results.

A row's tests travel as a JSON string in ``Prompt.answer``. Outputs are compared line by line,
trailing white space and trailing empty lines ignored. With ``tolerance``, words that are numbers
may differ by it, relative or absolute, but a whole number does not stand for another whole one.
Returned values are compared as JSON has them
(``jail.values.as_json``): a tuple is a list, a key of a dict is text.
"""

import ast
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reason_llm.files import check_nesting
from reason_llm.score.code.always_true import always_true, is_mark
from reason_llm.score.code.sandbox import PACKAGES

FLOAT_TOLERANCE, NEAR_ZERO = 1e-9, 1e-12
"""Returned floats may differ by this, relative or absolute, where the row asks for nothing else:
the order of a sum is nobody's mistake. More in absolute terms would make small results nought."""

MAX_RELATIVE = 0.01
"""A tolerance above it is absolute only: relative to itself, any large number is near."""


@dataclass(frozen=True, slots=True)
class ProgramTests:
    """Whole programs that read standard input; one output for each input."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tolerance: float | None = None
    ignore_case: bool = False


@dataclass(frozen=True, slots=True)
class CallTests:
    """Calls of a function, or of a method of ``class Solution``, with positional arguments."""

    function: str
    inputs: tuple[tuple[Any, ...], ...]
    outputs: tuple[Any, ...]
    tolerance: float | None = None
    may_be_lists: bool = field(default=False, compare=False)
    """Whether each output stood in a list of one. Such a list may be PRIME's form, or the result
    itself; the program is judged by that reading of all outputs by which more of them are right."""


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Python source whose assertions hold."""

    source: str
    entry_point: str | None = None
    """The name to pass to ``check(candidate)`` if the source defines it without calling it."""


Tests = ProgramTests | CallTests | AssertTests
_FAILING = ("assert", "expect", "raises", "fail", "exit", "quit", "unittest", "doctest")
"""Parts of the names by which tests fail without ``assert`` and ``raise``."""


def read_tests(text: str) -> Tests:
    """Tests in a JSON string: a form of ``tests_of_row`` or a row; raises as there."""
    value = _from_json(text, "the tests are")
    if isinstance(value, dict) and not _TEST_KEYS & value.keys():
        return tests_of_row(value)
    return tests_of_row({"test_cases": value})


# In a tests object; any other object is taken for a row.
_TEST_KEYS = {"inputs", "outputs", "assert_code"}
_COLUMNS = ("test_cases", "tests", "input_output", "test", "test_list", "assert_code",
            "verification_info", "reward_model", "ground_truth", "public_test_cases")  # fmt: skip
EXTRA_COLUMNS = (
    "entry_point", "atol", "tolerance", "checker", "fn_name", "test_setup_code", "test_imports",
)  # fmt: skip
"""Columns that change the meaning of a row's tests."""


def answer_of_row(row: Mapping[str, Any]) -> str:
    """``Prompt.answer`` of a row with tests: the row's test columns as JSON; ValueError as
    ``tests_of_row``, so that a run stops before it starts."""
    tests_of_row(row)
    named = {name: row[name] for name in (column_of_tests(row), *EXTRA_COLUMNS) if name in row}
    return json.dumps(named | _livecodebench_columns(row))


def private_tests(row: Mapping[str, Any]) -> list[Any]:
    """LiveCodeBench's private tests, where they are JSON; its own rows have them as a pickle."""
    column = row.get("private_test_cases")
    if column_of_tests(row) != "public_test_cases":
        return []
    tests = _parsed(column, "private_test_cases")
    return tests if isinstance(tests, list) else []


def _livecodebench_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """LiveCodeBench's function, from ``metadata``, and all tests, if the private ones are JSON."""
    columns: dict[str, Any] = {}
    if more := private_tests(row):
        public = _parsed(row["public_test_cases"], "public_test_cases")
        columns["public_test_cases"] = [*public, *more] if isinstance(public, list) else public
    metadata = row.get("metadata")
    if isinstance(metadata, str) and "func_name" in metadata:
        metadata = _from_json(metadata, "'metadata' is")
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    return columns if name is None else {**columns, "fn_name": name}


def column_of_tests(row: Mapping[str, Any]) -> str:
    """The column of a row's tests, or empty. Next to an ``entry_point``, ``test`` is Python source
    and comes first, since LeetCode's rows also have texts of arguments in ``input_output``."""
    if row.get("entry_point") and isinstance(row.get("test"), str):
        return "test"
    return next((name for name in _COLUMNS if row.get(name) not in (None, "")), "")


def tests_of_row(row: Mapping[str, Any]) -> Tests:
    """The tests of a data row.

    They are the first of these columns that the row has: test_cases, tests, input_output (objects,
    or JSON strings of such), test, test_list, assert_code (source, or a list of sources),
    verification_info, reward_model, ground_truth (objects that hold one of the above). Beside it
    may stand entry_point, atol or tolerance, and checker (case-insensitive …).

    Objects are ``{"inputs", "outputs"}`` with ``fn_name`` or without, ``{"assert_code"}``, or a
    list of ``{"input", "output"}``. An input or output of a program is text or a list of lines.

    Raises:
        ValueError: in one line, the problem.
    """
    column = column_of_tests(row)
    if not column:
        empty = "".join(f", {name!r} is empty" for name in _COLUMNS if row.get(name) == "")
        raise ValueError(
            f"the row lacks tests{empty}; it needs any of the columns {', '.join(_COLUMNS)}"
        )
    row = {**row, **_livecodebench_columns(row)}
    value = _parsed(row[column], column)
    language = value.get("language") if isinstance(value, dict) else None
    if isinstance(language, str) and not language.casefold().startswith(("py", "cpython")):
        raise ValueError(
            f"{column!r} names the language {language[:20]!r}, and only Python is run; leave such "
            "rows out by data.preprocess"
        )
    if isinstance(value, dict) and value.keys() == {"input", "output"}:  # CodeContests
        value = {f"{name}s": cases for name, cases in value.items()}
    if isinstance(value, dict) and not _TEST_KEYS & value.keys() and set(_COLUMNS) & value.keys():
        others = {name: row[name] for name in row if name not in _COLUMNS}
        return tests_of_row({**others, **value})
    options = {**row, **value} if isinstance(value, dict) else dict(row)
    if isinstance(value, str):
        return _assert_tests(value, options, column)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return _assert_tests("\n".join(value), options, column)
    if isinstance(value, list):
        calls = [isinstance(c, dict) and c.get("testtype") == "functional" for c in value]
        value = _from_list(value, column)
        options |= value
        if any(calls) and not (all(calls) and options.get("fn_name")):
            raise ValueError(
                f"{column!r} has functional tests, and no single function that they call; give its "
                "name as fn_name, or as func_name in metadata"
            )
    if not isinstance(value, dict):
        raise ValueError(f"{column!r} is {_shown(value)}; expected an object with inputs, outputs")
    if "assert_code" in value:
        return _assert_tests(value["assert_code"], options, "assert_code")
    return _inputs_and_outputs(value, options, column)


def _parsed(value: Any, column: str) -> Any:
    """Content of a string: an object or list if it is JSON, else source."""
    is_json = isinstance(value, str) and value.lstrip()[:1] in ("{", "[")
    return _from_json(value, f"{column!r} is") if is_json else value


def _from_json(text: str, what: str) -> Any:
    try:
        value = json.loads(text)
        check_nesting(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} no valid JSON ({error})") from error
    return value


def _assert_tests(source: Any, options: Mapping[str, Any], column: str) -> AssertTests:
    entry_point = options.get("entry_point")
    for name in ("test_imports", "test_setup_code"):  # MBPP's
        before = options.get(name) or ""
        lines = before if isinstance(before, list) else [before]
        if not all(isinstance(line, str) for line in lines):
            raise ValueError(f"{name!r} is {_shown(before)}; expected Python source")
        if any(line.strip() for line in lines) and isinstance(source, str):
            source = "\n".join([*lines, source])
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{column!r} is {_shown(source)}; expected Python source with assertions")
    if not isinstance(entry_point, str | None):
        raise ValueError(f"'entry_point' is {_shown(entry_point)}; expected a name")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{column!r} is not valid Python ({error})") from error
    if not any(_can_fail(node) and not is_mark(node) for node in ast.walk(tree)):
        raise ValueError(
            f"{column!r} asserts nothing, so that every program would pass: {_shown(source)}; "
            "write assert before what must hold"
        )
    if (fault := always_true(tree)) is not None:
        node, problem = fault
        written = _shorten(ast.get_source_segment(source, node) or "assert")
        raise ValueError(
            f"{column!r}, line {node.lineno}: {written} {problem}; write what must hold of the "
            "program's result, as in assert f(2) == 4"
        )
    return AssertTests(source, entry_point)


def check_runs(answer: str) -> None:
    """Check that tests, given as ``Prompt.answer``, can pass at all; else raise ValueError."""
    tests = read_tests(answer)
    if not isinstance(tests, AssertTests):
        return
    tree = ast.parse(tests.source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    is_called = tests.entry_point is not None or "check" in used
    for name in _imported(tree) - {*sys.stdlib_module_names, *PACKAGES, "pytest", "solution"}:
        raise ValueError(
            f"the tests import {name!r}, which the sandbox does not have, so that no program would "
            "pass; import the program from 'solution', or drop such rows in data.preprocess"
        )
    # The harness runs functions test_… and check: tests in any other form would pass no program.
    for node in tree.body:
        problem = ""
        if isinstance(node, ast.ClassDef):
            of_unittest = any(ast.unparse(base).endswith("TestCase") for base in node.bases)
            names = [method.name for method in node.body if isinstance(method, ast.FunctionDef)]
            has_tests = node.name not in used and any(name.startswith("test") for name in names)
            problem = "is a class of tests" if of_unittest or has_tests else ""
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = "".join(map(ast.unparse, node.decorator_list))
            is_given = node.name in used or "parametrize" in marks
            if len(node.args.args) > len(node.args.defaults) and not is_given:
                problem = "asks for fixtures"
        elif isinstance(node, ast.FunctionDef) and node.name == "check" and not is_called:
            raise ValueError(
                "'check' in the tests is not called, and the row has no 'entry_point', the name of "
                "the function to call it with; add that column"
            )
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and problem:
            raise ValueError(
                f"{node.name!r} in the tests {problem}, which is not run, so that no program would "
                "pass; write assertions, or functions test_… without arguments"
            )


def _imported(tree: ast.Module) -> set[str]:
    """The top-level packages that the tests import in any case."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or ".")
    return {name.partition(".")[0] for name in names}


def _can_fail(node: ast.AST) -> bool:
    """Whether this is an assertion, or something by whose name it could be one."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return any(word in name.lower() for word in _FAILING)
    return isinstance(node, ast.Assert | ast.Raise)


def _from_list(cases: Sequence[Any], column: str) -> dict[str, Any]:
    for number, case in enumerate(cases, start=1):
        if not isinstance(case, dict) or not {"input", "output"} <= case.keys():
            raise ValueError(
                f"{column!r}, case {number}: {_shown(case)}; expected an object with input, output"
            )
    metadata_of_cases = [
        case["metadata"] if isinstance(case.get("metadata"), dict) else {} for case in cases
    ]
    of_rllm = [metadata.get("func_name") for metadata in metadata_of_cases]
    functions = [case.get("fn_name") or other for case, other in zip(cases, of_rllm, strict=True)]
    names = sorted({str(name) for name in functions if name})
    if len(names) > 1:
        raise ValueError(f"{column!r} names more than one function: {', '.join(names)}")
    fields = {
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
    }
    return {**fields, "fn_name": names[0]} if names else fields


def _inputs_and_outputs(
    value: Mapping[str, Any], options: Mapping[str, Any], column: str
) -> ProgramTests | CallTests:
    for name in ("inputs", "outputs"):
        if not isinstance(value.get(name), list):
            raise ValueError(f"{column!r}: {name!r} is {_shown(value.get(name))}; expected a list")
    inputs, outputs = value["inputs"], value["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"{column!r} has {len(inputs)} inputs and {len(outputs)} outputs; expected as many, "
            "and at least one"
        )
    tolerance = options.get("tolerance", options.get("atol")) or None
    if tolerance is not None and not (_is_number(tolerance) and 0 < tolerance < 1e6):
        raise ValueError(f"the tolerance is {_shown(tolerance)}; expected a number above 0")
    function = options.get("fn_name")
    if function is not None:
        if not isinstance(function, str) or not function.isidentifier():
            raise ValueError(f"{column!r}: 'fn_name' is {_shown(function)}; expected a name")
        return _call_tests(function, inputs, outputs, tolerance, column)
    stdins, stdouts = (_texts(value[n], f"{column!r}: {n!r}") for n in ("inputs", "outputs"))
    ignore_case = str(options.get("checker", "")).startswith("case-insensitive")
    return ProgramTests(stdins, stdouts, tolerance, ignore_case)


def _texts(cases: list[Any], where: str) -> tuple[str, ...]:
    texts = []
    for number, case in enumerate(cases, start=1):
        is_lines = isinstance(case, list) and all(isinstance(line, str) for line in case)
        text = "\n".join(case) if is_lines else case
        if not isinstance(text, str):
            raise ValueError(
                f"{where}, case {number} is {_shown(case)}; expected text, or set fn_name"
            )
        texts.append(text)
    return tuple(texts)


def _call_tests(
    function: str, inputs: list[Any], outputs: list[Any], tolerance: float | None, column: str
) -> CallTests:
    """Text holds one JSON argument a line (LiveCodeBench's form). Outputs that are all lists of
    one may be wrapped (PRIME's form): the result is then what they hold."""
    arguments: list[tuple[Any, ...]] = []
    results: list[Any] = []
    for number, (case_input, case_output) in enumerate(zip(inputs, outputs, strict=True), start=1):
        is_text = isinstance(case_input, str)
        try:
            values = map(json.loads, case_input.splitlines()) if is_text else case_input
            arguments.append((*values,))
            is_json = is_text and isinstance(case_output, str)
            results.append(json.loads(case_output) if is_json else case_output)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{column!r}, case {number}: {_shown(case_input)} -> {_shown(case_output)}; "
                f"expected a list of arguments, or one JSON argument a line ({error})"
            ) from error
    may_be_lists = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    if may_be_lists:
        results = [output[0] for output in outputs]
    return CallTests(function, tuple(arguments), tuple(results), tolerance, may_be_lists)


def _shown(value: Any) -> str:
    return _shorten(repr(value))


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def same_output(
    expected: str, actual: str, tolerance: float | None = None, ignore_case: bool = False
) -> bool:
    """Whether a program printed what was expected."""
    if ignore_case:
        expected, actual = expected.casefold(), actual.casefold()
    expected_lines, actual_lines = (
        [line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, actual)
    )
    if tolerance is None or expected_lines == actual_lines:
        return expected_lines == actual_lines
    lines = [[line.split() for line in text] for text in (expected_lines, actual_lines)]
    pairs = [pair for words in zip(*lines, strict=False) for pair in zip(*words, strict=False)]
    return [*map(len, lines[0])] == [*map(len, lines[1])] and all(
        a == b or _within(_number(a), _number(b), tolerance) for a, b in pairs
    )


def _number(word: str) -> float:
    """The number that a word spells, whole ones as int; NaN for none."""
    if "_" in word or not word.isascii():  # which Python alone reads as one
        return math.nan
    for kind in (int, float):
        try:
            value = kind(word)
        except ValueError:  # also an integer of more than 4,300 digits
            continue
        return math.nan if math.isinf(value) and word[-1].isdigit() else value
    return math.nan


def _within(expected: float, actual: float, tolerance: float) -> bool:
    """Whether a number is near enough. An expected integer is a count: no other integer equals it,
    and no whole float does below a tolerance of 1, since a relative one would forgive 1 in a
    million."""
    is_count = isinstance(expected, int)
    if is_count and (isinstance(actual, int) or (actual.is_integer() and tolerance < 1)):
        return expected == actual
    return _close(expected, actual, tolerance)


def _close(a: float, b: float, tolerance: float, absolute: float | None = None) -> bool:
    absolute = tolerance if absolute is None else absolute
    try:
        return math.isclose(a, b, rel_tol=min(tolerance, MAX_RELATIVE), abs_tol=absolute)
    except OverflowError:  # an integer too large for a float
        return False


def same_value(expected: Any, actual: Any, tolerance: float | None = None) -> bool:
    """Whether a function returned what was expected, both as JSON has them."""
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(
            same_value(a, b, tolerance) for a, b in zip(expected, actual, strict=True)
        )
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(
            same_value(expected[key], actual[key], tolerance) for key in expected
        )
    if not isinstance(expected, float) and not isinstance(actual, float):
        return bool(expected == actual)
    if not (_is_number(expected) and _is_number(actual)):
        return False
    if expected != expected and actual != actual:  # not a number
        return True
    if tolerance is not None:
        return _within(expected, actual, tolerance)
    if isinstance(expected, int) and not (math.isfinite(actual) and round(actual) == expected):
        return False  # an integer above 2**53 must not equal a neighbouring float
    return _close(expected, actual, FLOAT_TOLERANCE, NEAR_ZERO)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
