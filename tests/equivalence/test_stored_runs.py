"""The numbers of small runs of every stage, against those that were stored once.

All that a run writes for others to read is compared: each record of metrics.jsonl, the summary,
which prompts it drew, what each completion was paid and its advantage, what was evaluated, and the
size of each adapter. Times and memory are left out. What changes them on purpose stores them anew:
``python tests/equivalence/test_stored_runs.py``.
"""

import gzip
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from safetensors.torch import load_file

from option_runs import (
    BINS,
    DPO,
    EVAL,
    FULL,
    KTO,
    OFF,
    OPD,
    PPO,
    RM,
    SFT,
    SMALL,
    TURNS,
    config_of_case,
    make_folder,
)
from reason_llm.loop import train
from reason_llm.run.store import metrics
from slices import installed

STORED = Path(__file__).with_name("stored_runs.json")
SLOW = {"train__learning_rate": 1e-3}
"""So small that rounding stays small."""
TWO_REWARDS = [
    {"custom": "{folder}/reward.py:spread", "label": "spread", "weight": 2.0},
    {"name": "length", "weight": -0.5},
]
RUNS: dict[str, dict[str, Any]] = {
    "grpo": OFF | EVAL | SLOW | {
        "run__steps": 3, "score__rewards": TWO_REWARDS,
        "algorithm": {"name": "grpo", "kl": "k3", "kl_coefficient": 0.05,
                      "entropy_coefficient": 0.01},
        "train__schedule": "linear", "train__warmup_steps": 3, "train__weight_decay": 0.1,
        "model__adapter": {"rank": 4, "alpha": 12, "dropout": 0.1},
        "eval__sets": {"again": "{folder}/sums.jsonl"}, "eval__limit": 3, "run__save_every": 2,
    },
    "dapo": EVAL | SLOW | {
        "run__steps": 3, "algorithm": {"name": "dapo", "success_range": [0.1, 0.9]},
        "eval__samples": 2, "eval__limit": 2, "run__shards": 2,
    },
    "stale": OFF | SLOW | {"run__steps": 4, "run__max_staleness": 1, "algorithm": {"name": "gspo"}},
    "ppo": PPO | SLOW | {
        "run__steps": 3, "critic__updates": 2, "critic__start": "{folder}/judge",
        "algorithm": {"name": "ppo", "kl": "k1"},
        "critic__lam": 0.9, "critic__gamma": 0.98,
    },
    "opd": OPD | SLOW | {"run__steps": 2},
    "full": FULL | {"run__steps": 2, "train__learning_rate": 1e-4},
    "turns": TURNS | SLOW | {
        "sample__environment": "{folder}/reward.py:Pays", "algorithm__credit": "turn",
        "run__steps": 2,
    },
    "sample": {k: v for k, v in SMALL.items() if not k.startswith("train__")} | {
        "stage": "sample", "run__steps": 2, "algorithm": {}, "train": {},
    },
    "sft": SFT | SLOW | {"run__steps": 3, "train__optimizer_steps": 2, "eval__every": 1},
    "bins": BINS | SLOW | {"run__steps": 2},
    "reward": RM | SLOW | {
        "run__steps": 3, "data__train": "{folder}/margins.jsonl", "eval__every": 1,
    },
    "dpo": DPO | SLOW | {"run__steps": 3, "model__start": "{folder}/start", "eval__every": 1},
    "kto": KTO | SLOW | {"run__steps": 3, "preference__desirable_weight": 1.5},
}  # fmt: skip
NEEDS = {"turns": "environments", "dapo": "replicas", "stale": "replicas"}
"""Folders of the package that runs need, which a copy may lack."""


def seen(run: Path) -> dict[str, Any]:
    """What the run's folder holds for others to read, by kind."""
    documents = [
        orjson.loads(gzip.decompress(file.read_bytes()))["groups"]
        for file in sorted(run.glob("buffers/step*"))
    ]
    summary = orjson.loads((run / "summary.json").read_bytes())
    return {
        "records": [_untimed(record) for record in metrics.read(run)],
        "summary": _untimed({k: v for k, v in summary.items() if k not in ("adapter", "kept")}),
        "prompts": [[group["prompt"]["id"].rpartition(":")[2] for group in d] for d in documents],
        "completions": [
            [len(c["token_ids"]), sum(c["logprobs"]), c["reward"], c["advantage"]]
            for document in documents
            for group in document
            for c in group["completions"]
        ],
        "evaluated": [
            [
                orjson.loads(line).get("score")
                for line in gzip.decompress(f.read_bytes()).splitlines()
            ]
            for f in sorted(run.glob("evaluations/*"))
        ],
        "norms": {
            re.sub("-[0-9a-f]{16}", "", str(file.relative_to(run))): math.sqrt(
                sum(
                    float(tensor.double().square().sum())
                    for name, tensor in load_file(file).items()
                    if name != "sha256"  # of bits, which depend on the processor
                )
            )
            for file in sorted(run.rglob("*.safetensors"))
        },
    }


def _untimed(record: dict[str, Any]) -> dict[str, Any]:
    no = ("time/", "memory/", "sha256", "held_out", "peak_rss")
    ends = ("_seconds", "per_second", "_gib")
    return {
        key: _untimed(value) if isinstance(value, dict) else value
        for key, value in record.items()
        if not key.startswith(no) and not key.endswith(ends)
    }


def differences(stored: Any, now: Any, where: str = "") -> Iterator[str]:
    """Where two trees differ by more than one part in 500."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in sorted(stored.keys() | now.keys()):
            yield from differences(stored.get(key), now.get(key), f"{where}/{key}")
    elif isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        for i, pair in enumerate(zip(stored, now, strict=True)):
            yield from differences(*pair, f"{where}/{i}")
    elif isinstance(stored, float) and isinstance(now, int | float):
        if not math.isclose(stored, now, rel_tol=2e-3, abs_tol=2e-5):
            yield f"{where}: {stored} was stored, now {now}"
    elif stored != now:
        yield f"{where}: {stored} was stored, now {now}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("stored"))


def run_of(name: str, folder: Path) -> dict[str, Any]:
    own = folder / name
    train(config_of_case(folder, RUNS[name] | {
        "run__directory": str(own), "run__buffer": str(own / "buffer.json"),
    }))  # fmt: skip
    found: dict[str, Any] = orjson.loads(orjson.dumps(seen(own / "small")))
    return found


@pytest.mark.parametrize("name", [n for n in RUNS if n not in NEEDS or installed(NEEDS[n])])
def test_a_run_gives_the_numbers_that_it_gave(name: str, folder: Path) -> None:
    stored = json.loads(STORED.read_text())[name]
    assert list(differences(stored, run_of(name, folder))) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        place = make_folder(Path(made))
        lines = [f"{json.dumps(name)}: {json.dumps(run_of(name, place))}" for name in RUNS]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"{STORED} was written\n")
