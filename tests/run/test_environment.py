"""environment.json is for reading: no damage to it keeps a run from going on."""

from pathlib import Path

import orjson
import pytest

from conftest import TINY
from reason_llm.config import Config
from reason_llm.data import Data
from reason_llm.files import MIB
from reason_llm.model.plan import plan_only
from reason_llm.run.store import environment


@pytest.mark.parametrize(
    "content",
    [
        b'{"starts": [{}]}',
        b'{"starts": [{"step": "x"}]}',
        b'{"starts": [1]}',
        b"\xff",
        b" " * (17 * MIB),
    ],
    ids=["no step", "no number", "no start", "no text", "too large"],
)
def test_a_damaged_one_is_begun_anew(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    path.write_bytes(content)
    plan = plan_only(Config.model_validate({"data": {"train": "x"}, "model": {"path": str(TINY)}}))
    environment.record_start(tmp_path, 2, Data([], [], []), plan)
    assert [start["step"] for start in orjson.loads(path.read_bytes())["starts"]] == [2]
