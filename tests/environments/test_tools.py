"""The tools: what they return, what Python remembers and cannot do."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from reason_llm.data import load_function
from reason_llm.environments.data_side import tool_methods, tool_schemas

PATH = ROOT / "examples" / "tools.py"


@pytest.fixture(scope="module")
def tools() -> Any:
    spec = importlib.util.spec_from_file_location("tools", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module.sandbox().close()


@pytest.fixture
def kind(tools: Any) -> Any:
    return tools.Python


def test_programs_of_a_rollout_share_their_names(kind: Any) -> None:
    one, other = kind(), kind()
    for each in (one, other):
        each.reset(question="?")
    assert one.python("x = 20\nprint('hi')") == "hi\n"
    assert one.python("x + 1") == "21\n"
    assert one.python("1 / 0") == "ZeroDivisionError: division by zero"
    assert one.python("def f(): return x\nf() * 2") == "40\n"
    assert other.python("x") == "NameError: name 'x' is not defined"
    assert one.python("None") == "(nothing was printed)"
    assert one.python("this is no program").startswith("SyntaxError")


@pytest.mark.long
def test_a_program_without_end_costs_its_own_call_alone(kind: Any) -> None:
    tool = kind()
    tool.reset()
    assert tool.python("x = 20") == "(nothing was printed)"
    assert tool.python("x = 1\nwhile True: pass").startswith("stopped: too much")
    assert tool.python("x + 1") == "21\n"


def test_it_is_walled_in(kind: Any) -> None:
    tool = kind()
    tool.reset()
    assert "Error" in tool.python(f"open({str(PATH)!r}).read()")
    assert "Error" in tool.python("import socket; socket.create_connection(('127.0.0.1', 9))")
    assert len(tool.python("print('a' * 10**6)")) == 4000
    assert tool.python("raise SystemExit(3)") == "(nothing was printed)"


def test_the_model_is_told_of_it(kind: Any) -> None:
    assert list(tool_methods(kind)) == ["python"]
    (schema,) = tool_schemas(f"{PATH}:Python")
    assert schema["function"]["parameters"]["required"] == ["code"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(7 // 2) ** 2", "-9"),
        ("1 / 3", "0.333333333333"),
        ("2 ** 10", "1024"),
    ],
)
def test_the_calculator(tools: Any, expression: str, value: str) -> None:
    tool = tools.Calculator()
    tool.reset()
    assert tool.calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["9 ** 9 ** 9", "1 / 0", "x", "'a' * 9", "__import__('os')", "1 if 1 else 2", "1" * 2000],
)
def test_the_calculator_refuses(tools: Any, expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        tools.Calculator().calculate(expression)


def test_search_and_several_tools_in_one_class(tools: Any, tmp_path: Path) -> None:
    texts = [
        "The cat sat.",
        "A dog ran far; the dog barked.",
        "Cats and dogs: the cat won.",
        "Rain.",
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    mine = type("Mine", (tools.Calculator, tools.Search), {"file": str(path), "most": 2})
    assert sorted(tool_methods(mine)) == ["calculate", "search"]
    tool = mine()
    tool.reset(question="?")
    assert tool.search("cat").split("\n\n") == [texts[0], texts[2]]
    assert tool.search("the dog?").split("\n\n") == [texts[1], texts[0]]
    assert tool.search("snow") == tool.search("") == "nothing was found"
    schema = tool_schemas(f"{PATH}:Search")
    assert schema[0]["function"]["parameters"]["required"] == ["query"]


def test_they_are_found_in_any_folder_and_classes_made_of_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path) != ROOT])
    assert load_function("examples/tools.py:Python", "sample.environment").__name__ == "Python"
    (tmp_path / "mine.py").write_text(
        "from examples.tools import Calculator, Search\n\n\nclass Mine(Calculator, Search): ...\n"
    )
    assert [s["function"]["name"] for s in tool_schemas("mine.py:Mine")] == ["calculate", "search"]
