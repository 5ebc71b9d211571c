"""The Python tool: what it returns, what it remembers, what it cannot do."""

import importlib.util
from typing import Any

import pytest

from conftest import ROOT
from reason_llm.data import tool_methods
from reason_llm.data.tools import tool_schemas

PATH = ROOT / "examples" / "tools.py"


@pytest.fixture(scope="module")
def kind() -> Any:
    spec = importlib.util.spec_from_file_location("tools", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.Python
    module.sandbox().close()


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
