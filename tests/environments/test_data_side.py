"""What makes a class an environment, what ``reset`` asks for, and which files are digested."""

import re
from pathlib import Path

import pytest

from reason_llm.data import own_sources
from reason_llm.environments.data_side import (
    DataSide,
    environment_class,
    environment_name,
    environments_by_name,
    reset_parameters,
    tool_methods,
    tool_schemas,
)
from reason_llm.errors import ConfigError, DataError

SOURCE = """
class Game:
    def reset(self, level, seed=0, *rest, color, **row): ...
    def step(self, text): ...
    def shown(self): ...
class Tools:
    reset = type
    def add(self): ...
    def close(self): ...
    def _hidden(self): ...
class Mute:
    def reset(self): ...
class Still:
    reset = None
    def step(self, text): ...
def function(): ...
"""


def test_a_class_is_an_environment_by_its_methods(tmp_path: Path) -> None:
    (path := tmp_path / "its.py").write_text(SOURCE)
    for name, told in (
        ("function", "is not a class; name one"),
        ("Mute", "needs a method reset(**row), which gives a text or None, and step(text)"),
        ("Still", "needs a method reset(**row), which gives a text or None, and step(text)"),
    ):
        with pytest.raises(
            ConfigError, match=re.escape(f"sample.environment={path}:{name} {told}")
        ):
            environment_class(f"{path}:{name}")
    for name, methods, columns in (("Game", [], ["level", "color"]), ("Tools", ["add"], [])):
        assert list(tool_methods(environment_class(f"{path}:{name}"))) == methods
        assert list(DataSide(f"{path}:{name}").needed_columns("")) == columns
    for where in ("agent:a.py:f", "mcp:server", "verifiers", "verifiers?a=1"):
        assert (reset_parameters(where), tool_schemas(where)) == ([], ())


def test_a_row_names_its_environment() -> None:
    given = {"sums": "a.py:A", "words": "b.py:B"}
    assert environments_by_name(given) == given
    assert (environments_by_name("a.py:A"), environments_by_name(None)) == ({"": "a.py:A"}, {})
    assert environment_name("a.py:A", "x:1", {"environment": "sums"}) == ""
    assert environment_name(given, "x:1", {"environment": "sums"}) == "sums"
    for row in ({}, {"environment": "sum"}):
        with pytest.raises(DataError, match=r"x:1: column environment=.* has sums, words; write"):
            environment_name(given, "x:1", row)


@pytest.mark.parametrize(
    ("parameters", "taken"),
    [("self, **row", {"id", "url"}), ("self, url=None", {"url"}), ("self", set())],
)
def test_columns_that_reset_takes_are_read(
    parameters: str, taken: set[str], tmp_path: Path
) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        f"class Mine:\n    def reset({parameters}): return 'go'\n"
        "    def step(self, text): return ''\n"
        "async def agent(endpoint, row): return 1.0\n"
    )
    row = {"id": 1, "url": "u"}
    assert DataSide(f"{code}:Mine").columns_of(row) & row.keys() == taken
    assert DataSide(f"agent:{code}:agent").columns_of(row) >= row.keys()


def test_files_in_the_command_of_an_mcp_server_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text("import tool\n")
    (tmp_path / "tool.py").write_text("")
    (tmp_path / "table.csv").write_text("1")
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").write_text("")
    (tmp_path / "kit" / "serve.py").write_text("from . import parts\n")
    (tmp_path / "kit" / "parts.py").write_text("")
    command = "mcp:python server.py --table=table.csv --none gone.csv"
    found = own_sources([], DataSide({"": command}))
    key = "sample.environment"
    assert {*found} == {
        f"{key} runs server.py", f"{key} runs server.py imports tool",
        f"{key} runs --table=table.csv",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="No closing quotation; quote it"):
        own_sources([], DataSide({"": "mcp:python 'server.py"}))
    modules = own_sources([], DataSide({"a": "mcp:python -m kit.serve"}))
    assert {*modules} == {
        f"{key}.a runs kit.serve", f"{key}.a runs kit.serve imports kit.parts",
        f"{key}.a runs kit.serve imports kit",
    }  # fmt: skip
    for name in ("server.py", "tool.py", "table.csv"):
        with (tmp_path / name).open("a") as file:
            file.write("# 2\n")
        after = own_sources([], DataSide({"": command}))
        (changed,) = [key for key in found if found[key] != after[key]]
        assert changed.endswith(name.removesuffix(".py") if name == "tool.py" else name)
        found = after


def test_installed_packages_and_unreadable_imports_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for text in ("import torch, os.path\nfrom reason_llm import train\nimport gone.away\n",
                 "from ... import up\n", "def (\n", "\0"):  # fmt: skip
        file.write_text(text)
        assert {*own_sources([], DataSide({"": f"{file}:Asks"}))} == {"sample.environment"}
