"""Runs whose environment hangs on a server: used again, closed, and ended where all rollouts fail.

The server of ``SEATS`` has room for as many clients as a step has rollouts, as OpenEnv's has, and
writes down who is connected.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from conftest import ROOT, small_config
from reason_llm.app.console import Console
from reason_llm.app.training import run_training
from reason_llm.config import Config
from reason_llm.errors import TrainingError
from reason_llm.loop import train
from reason_llm.run.store import metrics

SEATS = """
import pathlib
import threading

HERE = pathlib.Path(__file__).parent
LOCK = threading.Lock()


def changed(by):
    with LOCK:
        Seats.open += by
        (HERE / "open").write_text(str(Seats.open))


class Seats:
    room, open = 16, 0

    def __init__(self):
        if Seats.open == Seats.room:
            raise ConnectionError("Server at capacity")
        changed(1)

    def reset(self, **row):
        if (HERE / "down").exists():
            raise ConnectionError("the server is down")
        self.letters = set()

    def step(self, text):
        self.letters |= set(text)
        return "again", False

    def get_reward(self):
        return len(self.letters) / 10

    def close(self):
        changed(-1)
"""


def config_in(folder: Path, **options: Any) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / "seats.py").write_text(SEATS)
    return small_config(
        folder, score__rewards=["environment"], sample__max_new_tokens=60, sample__turns=2,
        sample__turn_tokens=16, sample__environment=f"{folder}/seats.py:Seats", **options,
    )  # fmt: skip


def environment_errors(config: Config) -> list[float]:
    records = metrics.read(config.run.directory / "small")
    return [r["sample/environment_error_fraction"] for r in records if "sample/turns" in r]


@pytest.mark.long
def test_a_server_s_room_is_enough_for_all_steps(tmp_path: Path) -> None:
    config = config_in(tmp_path, run__steps=5)
    run_training(config, Console("quiet"))
    assert environment_errors(config) == [0.0] * 5
    assert (tmp_path / "open").read_text() == "0"


@pytest.mark.long
def test_three_steps_that_fail_end_the_run_which_goes_on_when_it_is_mended(tmp_path: Path) -> None:
    config = config_in(tmp_path, run__steps=4, run__save_every=9)
    down = tmp_path / "down"
    down.touch()
    for _ in range(2):  # and again while nothing has changed
        with pytest.raises(TrainingError, match=r"last 3 steps: .*server is down; fix sample\.env"):
            run_training(config, Console("quiet"))
        assert environment_errors(config) == [1.0, 1.0]
        assert (tmp_path / "open").read_text() == "0"
    down.unlink()
    run_training(config, Console("quiet"))
    assert environment_errors(config) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.long
def test_killed_in_a_wave_it_has_the_same_bits(tmp_path: Path) -> None:
    """Though a run that goes on has new environments: ``reset`` begins anew."""

    def ended(folder: Path, *killed: str) -> tuple[bytes, Any] | None:
        config = config_in(folder)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        place = killed or ("reason_llm.loop:train", "0")
        command = [sys.executable, "tests/fixtures/die_at.py", *place, str(path)]
        command += ["--log.console", "plain"]
        env = os.environ | {"PROMPTS_AT_ONCE": "2"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
        assert done.returncode == (-9 if killed else 0), done.stderr
        if killed:
            return None
        weights = folder / "runs" / "small" / "adapter" / "adapter_model.safetensors"
        groups = orjson.loads((folder / "buffer.json").read_bytes())["groups"]
        return weights.read_bytes(), groups

    whole = ended(tmp_path / "whole")
    broken = tmp_path / "broken"
    ended(broken, "reason_llm.environments.turns:Environments._reply", "6")
    assert ended(broken) == whole


OWNS_PROMPTS = '''
class Sums:
    """Gives the prompt itself."""

    def reset(self, seed):
        self.total = 2 * seed
        return [{"role": "user", "content": f"{seed} + {seed} = ?"}]

    def step(self, text):
        return "", True, float(str(self.total) in text)
'''


def test_reset_gives_the_prompts_of_a_run_without_data(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(OWNS_PROMPTS)
    config = small_config(
        tmp_path, run__steps=1, score__rewards=["environment"], data__train="environment?size=6",
        data__eval="environment?size=2&skip=6", sample__max_new_tokens=12,
        sample__environment=f"{tmp_path}/sums.py:Sums",
    )  # fmt: skip
    train(config)
    groups = orjson.loads((tmp_path / "buffer.json").read_bytes())["groups"]
    asked = {group["prompt"]["id"]: group["prompt"]["text"] for group in groups}
    for where, text in asked.items():
        seed = int(where.rpartition(" ")[2]) - 1
        assert f"{seed} + {seed} = ?" in text
    assert environment_errors(config) == [0.0]
