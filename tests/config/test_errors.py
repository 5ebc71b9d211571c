"""Every mistake in options is one line that names the option and its cause or fix.

``errors.jsonl`` has a row for each mistake: a ``config`` file, ``arguments`` of the command line,
``options`` over a config that has nothing but data, or ``options`` of a row of the ``algorithm``
table; and what must be ``told``. With ``fix``, options that make it right; with ``all``, every
mistake has a line of its own.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.config.algorithms import resolve
from reason_llm.config.command_line import read_command_line
from reason_llm.config.file import build, load
from reason_llm.errors import ConfigError, ReasonError

TABLE = Path(__file__).with_name("errors.jsonl").read_text().splitlines()
ROWS: list[dict[str, Any]] = [json.loads(line) for line in TABLE]
OURS = r"\n|[Ii]nput should|pydantic|Section|Spec|valid dict|instance"
"""Words of the libraries and of the code, which no message has."""


def made(row: dict[str, Any], folder: Path) -> Any:
    """What a row's mistake is made of."""
    if "config" in row:
        path = folder / "my_run.yaml"
        path.write_text(row["config"])
        return load(path)
    if "arguments" in row:
        what = ("CONFIG.yaml", "")
        return read_command_line("train.py", "", what, row["arguments"], {}).config()
    if "algorithm" in row:
        return resolve(row["algorithm"], row["options"])
    return build({"data": {"train": "x"}}, Path("my.yaml"), row["options"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["told"][0])
def test_a_mistake_is_one_line(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError)) as caught:
        made(row, tmp_path)
    lines = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    if "all" in row:
        assert len(lines) == len(row["told"]), "\n".join(lines)
        assert all(sum(part in line for line in lines) == 1 for part in row["told"])
    elif "fix" in row:
        assert len(lines) == 1, lines
    assert [part for part in row["told"] if not any(part in line for line in lines)] == []
    if "algorithm" not in row:  # whose caller says the line
        assert not any(re.search(OURS, line) for line in lines), lines
    if "fix" in row:
        made({"options": row["options"] | row["fix"]}, tmp_path)


@pytest.mark.parametrize("row", [row for row in ROWS if "all" in row], ids=lambda r: r["told"][0])
def test_a_command_goes_on_with_what_is_left(row: dict[str, Any], tmp_path: Path) -> None:
    """It tells the mistakes of the data, too, beside those of the config."""
    path, mistakes = tmp_path / "my_run.yaml", list[ReasonError]()
    path.write_text(row["config"])
    with suppress(ConfigError):  # where nothing is left
        left: Config = load(path, {}, mistakes)
        assert len(mistakes) == len(row["told"])
        assert left.data.train == "x" and left.run.steps == 100
