"""environment.json is for reading: no damage to it keeps a run from going on."""

from collections import Counter
from pathlib import Path

import orjson
import pytest

from conftest import TINY
from reason_llm.config import Config
from reason_llm.data import Data, DataSet
from reason_llm.files import MIB, read_object
from reason_llm.model.plan import plan_only
from reason_llm.run.store import environment

TREE = {"data": {"train": "x"}, "model": {"path": str(TINY)}}


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
    plan = plan_only(Config.model_validate(TREE))
    environment.record_start(tmp_path, 2, Data([], [], []), plan)
    assert [start["step"] for start in orjson.loads(path.read_bytes())["starts"]] == [2]


def test_a_start_that_differs_is_added_and_one_that_was_gone_back_behind_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_only(Config.model_validate(TREE))
    training = DataSet("a", "rows.jsonl", "prompts", True, num_rows=7, dropped=Counter(long=3))
    steps = []
    for step, packages in (
        (0, {}),
        (2, {}),
        (4, {"torch": "1"}),
        (6, {"torch": "2"}),
        (5, {}),
        (0, {}),
    ):
        monkeypatch.setattr(environment, "_packages", lambda packages=packages: packages)
        environment.record_start(tmp_path, step, Data([training], [2.0], []), plan)
        starts = read_object(tmp_path / "environment.json")["starts"]
        steps.append([(start["step"], start["packages"]) for start in starts])
    counts = {"name": "a", "source": "rows.jsonl", "rows": 7, "prompts": 0, "left_out": {"long": 3}}
    assert starts[0]["data"] == {
        "training": [counts | {"weight": 2.0}], "held_out": [], "in_both": 0,
    }  # fmt: skip
    first = (0, {})
    assert steps == [
        [first], [first], [first, (4, {"torch": "1"})],
        [first, (4, {"torch": "1"}), (6, {"torch": "2"})], [first, (4, {"torch": "1"}), (5, {})],
        [first],
    ]  # fmt: skip
