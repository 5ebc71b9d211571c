"""Damages to the files of several runs that read each other, between their end and the same command
of the run that reads them, of PPO with one more step: each is told in a line, or does nothing."""

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from conftest import ROOT, TINY
from reason_llm.app.cli import main

DATA = ROOT / "data"
REWARD = "def even(completion):\n    return len(completion) % 2\n"
pytestmark = pytest.mark.faults


STAGES = ["sft", "drawn", "again", "rm", "ppo"]


def config(folder: Path, name: str, steps: int = 1) -> dict[str, Any]:
    """One of SFT, rollouts, SFT on the best of them, a reward model, and PPO of so many steps."""
    home = folder / "runs" / "mine"
    prompts = {"train": str(DATA / "arithmetic_train.jsonl"), "limit": 24}
    sampling = {
        "sample": {"prompts_per_step": 8, "completions_per_prompt": 2, "max_new_tokens": 32},
        "score": {"rewards": [{"name": "think_answer_tags"}]},
    }
    from_sft = {"start": str(home / "sft" / "adapter")}
    own: dict[str, dict[str, Any]] = {
        "sft": {
            "stage": "sft",
            "model": {"adapter": {"rank": 4, "alpha": 8}},
            "data": {"train": str(DATA / "arithmetic_demonstrations.jsonl"), "limit": 12,
                     "contamination": "ignore"},
            "eval": {"rows": str(DATA / "arithmetic_demonstrations.jsonl"), "limit": 4},
        },
        "drawn": {"stage": "sample", "model": from_sft, "run": {"steps": 3}, "data": prompts,
                  **sampling},
        "again": {"stage": "sft", "model": from_sft, "data": {"train": str(home / "again.jsonl")}},
        "rm": {
            "stage": "reward",
            "model": from_sft,
            "data": {"train": str(DATA / "arithmetic_preferences.jsonl"), "limit": 12},
            "eval": {"rows": str(DATA / "arithmetic_preferences_test.jsonl"), "limit": 8},
        },
        "ppo": {
            **sampling,
            "model": {"start": str(home / "again" / "adapter")},
            "run": {"steps": steps, "buffer": str(home / "ppo" / "buffer.json")},
            "data": prompts,
            "score": {"rewards": [
                {"name": "think_answer_tags", "weight": 0},
                {"custom": str(folder / "mine.py") + ":even", "weight": 0},
                {"name": "reward_model", "options": {"path": str(home / "rm" / "adapter")}},
            ]},
            "algorithm": {"name": "ppo"},
            "critic": {"warmup_steps": 0},
        },
    }  # fmt: skip
    learning = {"learning_rate": 1e-3, "gradient_checkpointing": False}
    rows = {"rows_per_step": 4} if name in ("sft", "again", "rm") else {}
    shared: dict[str, dict[str, Any]] = {
        "run": {"directory": str(home), "name": name, "steps": 1},
        "model": {"path": str(folder / "base"), "dtype": "float32"},
        "data": {"system_prompt": "none"},
        "train": learning | rows if name != "drawn" else {},
        "log": {"console": "plain"},
    }
    both = {key: values | own[name].get(key, {}) for key, values in shared.items()}
    return own[name] | both


def call(folder: Path, steps: int, name: str) -> int:
    """Exit code of a run's command; of SFT on the rollouts, with that of its rows before."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config(folder, name, steps), sort_keys=False))
    home = folder / "runs" / "mine"
    pairs = ["pairs", home / "drawn" / "buffers", "--out", home / "again.jsonl",
             "--as", "demonstrations", "--per-prompt", "1"]  # fmt: skip
    code = main(list(map(str, pairs))) if name == "again" else 0
    return code or main(["train", str(path)])


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs; their place is ``now`` beside them."""
    now = tmp_path_factory.mktemp("damages") / "now"
    now.mkdir()
    shutil.copytree(TINY, now / "base")
    (now / "mine.py").write_text(REWARD)
    assert [call(now, 1, name) for name in STAGES] == [0] * len(STAGES)
    shutil.copytree(now, now.parent / "ended")
    return now.parent / "ended"


def place(ended: Path) -> Path:
    now = ended.parent / "now"
    shutil.rmtree(now)
    shutil.copytree(ended, now)
    return now


def outcome(now: Path) -> dict[str, bytes]:
    """What later stages and commands read, without what tells of time or of the machine."""
    home = now / "runs" / "mine"
    kept = [*home.rglob("*.safetensors"), *home.rglob("reward.json"), *home.rglob("best.json"),
            *home.rglob("adapter_config.json"), *home.glob("*.jsonl"),
            *home.rglob("resolved_config.yaml")]  # fmt: skip
    return {str(path.relative_to(home)): path.read_bytes() for path in kept}


@pytest.fixture(scope="module")
def expected(ended: Path) -> dict[bool, dict[str, bytes]]:
    """Without damage, and whether PPO went on."""
    now = place(ended)
    before = outcome(now)
    assert call(now, 2, "ppo") == 0
    return {False: before, True: outcome(now)}


# --- damages ----------------------------------------------------------------------------------


def flip(path: Path, at: float = 0.9) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def number(pattern: str, by: str) -> Callable[[Path], None]:
    """A number after a name is another one."""

    def change(path: Path) -> None:
        old = path.read_text()
        new = re.sub(rf"({pattern}\"?: ?)[-+.\de]+", rf"\g<1>{by}", old)
        assert new != old
        path.write_text(new)

    return change


def by_neighbour(other: str) -> Callable[[Path], None]:
    """Another file or folder of the runs in its place."""

    def change(path: Path) -> None:
        source = path.parents[0]
        while source.name != "mine":
            source = source.parent
        gone(path)
        copy = shutil.copytree if (source / other).is_dir() else shutil.copyfile
        copy(source / other, path)

    return change


def scale(path: Path) -> None:
    tensors = load_file(path)
    save_file({k: v * 1.02 for k, v in tensors.items()}, str(path), metadata={"format": "pt"})


def line_gone(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))


def another_reward(path: Path) -> None:
    path.write_text(REWARD.replace("% 2", "% 3"))


@dataclass(frozen=True)
class Damage:
    file: str
    """In the folder of the runs; or ../../ of it."""
    change: Callable[[Path], None]
    then: str = ""
    """Stage that reads it, or report; empty: its own stage."""

    @property
    def reader(self) -> str:
        return self.then or self.file.partition("/")[0].partition(".")[0]


W, CONFIG = "adapter_model.safetensors", "adapter_config.json"
STEP = "checkpoints/step-00000001"
DAMAGES = {
    "a bit of sft's adapter": Damage(f"sft/adapter/{W}", flip),
    "the first bit of sft's adapter": Damage(f"sft/adapter/{W}", lambda p: flip(p, 0.5)),
    "sft's adapter is cut": Damage(f"sft/adapter/{W}", cut),
    "sft's adapter is gone": Damage(f"sft/adapter/{W}", gone),
    "sft's adapter folder is gone": Damage("sft/adapter", gone),
    "another stage's adapter in sft's place": Damage("sft/adapter", by_neighbour("again/adapter")),
    "another stage's weights in sft's place": Damage(
        f"sft/adapter/{W}", by_neighbour(f"again/adapter/{W}")
    ),
    "alpha of sft's adapter": Damage(f"sft/adapter/{CONFIG}", number("lora_alpha", "16")),
    "the digests of sft's adapter": Damage("sft/adapter/digests.json", lambda p: flip(p, 0.5)),
    "no digests of sft's adapter": Damage("sft/adapter/digests.json", gone),
    "a bit of sft's best adapter": Damage(f"sft/adapter_best/{W}", flip),
    "the step of sft's best adapter": Damage("sft/adapter_best/best.json", number("step", "0")),
    "sft's best adapter is gone": Damage("sft/adapter_best", gone),
    "the steps of sft's summary": Damage("sft/summary.json", number("steps", "7")),
    "a number of sft's summary": Damage("sft/summary.json", number("peak_rss_mib", "7.0")),
    "sft's summary is cut": Damage("sft/summary.json", cut),
    "a bit of sft's newest checkpoint": Damage(f"sft/{STEP}/{W}", flip),
    "a bit of the average in sft's checkpoint": Damage(f"sft/{STEP}/optimizer.safetensors", flip),
    "the step in sft's newest state": Damage(f"sft/{STEP}/state.json", number("step", "0")),
    "a number of sft's metrics": Damage(
        "sft/metrics.jsonl", number("train/loss", "0.25"), "report"
    ),
    "a line of sft's metrics is cut": Damage(
        "sft/metrics.jsonl", lambda p: flip(p, 0.01), "report"
    ),
    "the memory in sft's environment": Damage(
        "sft/environment.json", number("host_gib", "1.0"), "report"
    ),
    "the learning rate in sft's config": Damage(
        "sft/resolved_config.yaml", number("learning_rate", "0.5"), "report"
    ),
    "a bit of an archive": Damage("drawn/buffers/step-00000001.json.gz", flip, "again"),
    "the first archive is gone": Damage("drawn/buffers/step-00000000.json.gz", gone, "again"),
    "the last archive is gone": Damage("drawn/buffers/step-00000002.json.gz", gone, "again"),
    "an archive is cut": Damage("drawn/buffers/step-00000002.json.gz", cut, "again"),
    "one archive in another's place": Damage(
        "drawn/buffers/step-00000002.json.gz",
        by_neighbour("drawn/buffers/step-00000001.json.gz"),
        "again",
    ),
    "a bit of the rows": Damage("again.jsonl", flip),
    "the rows are cut": Damage("again.jsonl", cut),
    "a bit of the copy that again began from": Damage(f"again/start/{W}", flip),
    "a bit of the reward model's adapter": Damage(f"rm/adapter/{W}", flip, "ppo"),
    "a bit of the reward model's head": Damage("rm/adapter/score.safetensors", flip, "ppo"),
    "the reward model's mean": Damage("rm/adapter/reward.json", number("mean", "0.125"), "ppo"),
    "the reward model's deviation": Damage("rm/adapter/reward.json", number("std", "0.5"), "ppo"),
    "the reward model's numbers are gone": Damage("rm/adapter/reward.json", gone, "ppo"),
    "the reward model's metrics, and its adapter": Damage(
        "rm/metrics.jsonl",
        lambda p: (number("eval/reward_mean", "0.5")(p), gone(p.parent / "adapter"))[0],
    ),
    "the adapter that ppo began from": Damage(f"ppo/start/{W}", flip),
    "a bit of ppo's checkpoint": Damage(f"ppo/{STEP}/{W}", flip),
    "a bit of ppo's critic": Damage(f"ppo/{STEP}/critic.score.safetensors", flip),
    "no digests of ppo's checkpoint": Damage(f"ppo/{STEP}/digests.json", gone),
    "a number of ppo's metrics": Damage("ppo/metrics.jsonl", number("sample/tokens", "3")),
    "the first line of ppo's metrics is gone": Damage(
        "ppo/metrics.jsonl", lambda p: line_gone(p, 0)
    ),
    "the last line of ppo's metrics is gone": Damage(
        "ppo/metrics.jsonl", lambda p: line_gone(p, 1)
    ),
    "ppo's metrics are gone": Damage("ppo/metrics.jsonl", gone),
    "another stage's metrics in ppo's place": Damage(
        "ppo/metrics.jsonl", by_neighbour("sft/metrics.jsonl")
    ),
    "a bit of ppo's archive": Damage("ppo/buffers/step-00000000.json.gz", flip, "report"),
    "the base's weights are scaled": Damage("../../base/model.safetensors", scale, "ppo"),
    "a bit of the base's weights": Damage("../../base/model.safetensors", flip, "ppo"),
    "another reward function": Damage("../../mine.py", another_reward, "ppo"),
}


WORDS = ("not what was written", "damaged", "cannot be read", "missing", "lacks", "holds step",
         "another experiment", "another config", "no mean and std", "other rows",
         "weights_sha256")  # fmt: skip
"""One of them is in the line that tells of a damage, beside the file or its folder."""


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[int, str]]:
    """What a command ends with, and the warnings and errors that it shows."""

    def shown_by(command: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            code = command()
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err
        return code, shown.out + shown.err + caplog.text

    return shown_by


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_is_silent(
    name: str,
    ended: Path,
    expected: dict[bool, dict[str, bytes]],
    told: Callable[..., tuple[int, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage, now = DAMAGES[name], place(ended)
    file = now / "runs" / "mine" / damage.file
    damage.change(file)
    if damage.reader == "report":
        stage = now / "runs" / "mine" / damage.file.split("/")[0]
        code, shown = told(
            lambda: main(["report", str(stage), "--out", str(now / "page.html")]), capsys
        )
        page = (now / "page.html").read_text() if code == 0 else ""
        words = ("not what was written", "damaged", f"{file.name} cannot be read")
        assert any(word in shown + page for word in words)
        return
    goes_on = damage.reader == "ppo"
    code, shown = told(lambda: call(now, 2 if goes_on else 1, damage.reader), capsys)
    files = (file.name, file.parent.name, "weights_sha256", "custom_sha256")
    lines = [line for line in shown.splitlines() if "WARNING" in line or line.startswith("error: ")]
    is_told = any(
        name in line and word in line for line in lines for name in files for word in WORDS
    )
    print(f"{name}: exit {code}; " + "; ".join(lines)[:500])
    if code:
        assert code == 2 and is_told, shown
        return
    found, whole = outcome(now), expected[goes_on]
    differs = [key for key in whole if found.get(key) != whole[key]]
    if not is_told:
        assert differs == [], f"silent: {differs}\n{shown}"
