"""Replicas beside one process, and sampling ahead beside sampling in turn, as whole runs on a CPU.

Each run is a process of its own with one thread in each replica, on a random model whose
completions nearly all reach their longest length. The runs of a pair take turns, so that other load
falls on both; the first steps of each are a warm-up. A step is its record's whole time.

- ``speed``: a step by N replicas, as a part of a step by one process with the same shards.
- ``overlap``: of the shorter phase, the share that is hidden when a sampler does the next step
  while one is learned: (sampling - waiting) / min(sampling, learning), all of that run. Passes over
  the rollouts are chosen so that learning takes about as long as sampling. What the two cost each
  other on one machine is in the ratio of the steps, ahead to in turn.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import yaml

from benchmarks.cpu_workloads import MIDDLE, ROOT, SMALL, make_model
from reason_llm.files import read_text

WARM_UP = 2
"""Steps that do not count."""


def run(repeats: int, steps: int, replicas: int, small: bool) -> dict[str, Any]:
    """Measure both; everything as JSON-ready values.

    Args:
        repeats: pairs of runs of each kind.
        steps: of a run, the warm-up not counted.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sizes = SMALL if small else MIDDLE
        make_model(folder / "model", vocabulary=2_000 if small else 32_000, **sizes)
        kinds: dict[str, dict[str, Any]] = {
            "one": {"shards": replicas},
            "replicas": {"shards": replicas, "replicas": replicas},
            "in turn": {"shards": 4, "max_staleness": 1},
            "ahead": {"shards": 4, "max_staleness": 1, "samplers": 1},
        }
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        tried = _seconds(_run(folder / "tried", folder / "model", kinds["in turn"], 1, small, 1))
        passes = max(1, round(tried["sampling"] / tried["learning"]))
        for number in range(repeats):
            for kind, options in kinds.items():
                place = folder / f"{kind.replace(' ', '-')}-{number}"
                epochs = passes if "max_staleness" in options else 1
                records = _run(place, folder / "model", options, steps, small, epochs)
                found[kind].append(_seconds(records))
    speed = [
        several["step"] / one["step"]
        for one, several in zip(found["one"], found["replicas"], strict=True)
    ]
    hidden = [
        (each["ahead_sampling"] - each["waiting"]) / min(each["ahead_sampling"], each["learning"])
        for each in found["ahead"]
    ]
    ahead = [
        beside["step"] / turn["step"]
        for turn, beside in zip(found["in turn"], found["ahead"], strict=True)
    ]
    return {
        "replicas": replicas,
        "seconds": found,
        "speed": {"ratios": speed, "median": median(speed)},
        "overlap": {
            "hidden": hidden,
            "median": median(hidden),
            "ratios": ahead,
            "median_ratio": median(ahead),
            "passes": passes,
        },
    }


def _run(
    place: Path, model: Path, options: dict[str, Any], steps: int, small: bool, epochs: int
) -> list[dict[str, float]]:
    """The records of a run of ``scripts/train.py``, without the warm-up."""
    place.mkdir()
    tree = {
        "run": {"name": "run", "directory": str(place), "buffer": str(place / "buffer.json"),
                "steps": WARM_UP + steps, "save_every": 1000, **options},
        "model": {"path": str(model), "dtype": "float32", "adapter": {"rank": 16}},
        "data": {"train": str(ROOT / "data" / "arithmetic_train.jsonl"), "system_prompt": "none"},
        "sample": {"engine": "transformers", "prompts_per_step": 8, "completions_per_prompt": 4,
                   "max_new_tokens": 16 if small else 64},
        "score": {"rewards": [{"name": "regex", "options": {"pattern": "[a-m]"}}]},
        "algorithm": {"name": "grpo", "kl": "none"},
        "train": {"learning_rate": 1e-5, "gradient_checkpointing": False, "epochs": epochs},
        "log": {"console": "plain"},
    }  # fmt: skip
    config = place / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), str(config)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"a run of the benchmark ended with:\n{done.stdout}{done.stderr}"[-3000:]
        )
    lines = read_text(place / "run" / "metrics.jsonl").splitlines()
    return [orjson.loads(line) for line in lines][1 + WARM_UP :]


def _seconds(records: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the steps."""

    def of(key: str) -> float:
        return median(record.get(f"time/{key}_seconds", 0.0) for record in records)

    return {
        "step": of("total"),
        "sampling": of("sampling"),
        "learning": of("learning"),
        "ahead_sampling": of("ahead_sampling"),
        "waiting": of("waiting"),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """What was measured, for a person."""

    def of(kind: str, key: str) -> float:
        return float(median(each[key] for each in found["seconds"][kind]))

    told = [
        f"{kind}: {of(kind, 'step'):.2f} s a step "
        f"({of(kind, 'sampling') + of(kind, 'ahead_sampling'):.2f} s sampling, "
        f"{of(kind, 'ahead_sampling'):.2f} s of it ahead, {of(kind, 'learning'):.2f} s learning, "
        f"{of(kind, 'waiting'):.2f} s waiting)"
        for kind in found["seconds"]
    ]
    speed, hidden = found["speed"], found["overlap"]
    return [
        *told,
        f"{found['replicas']} replicas take {speed['median']:.2f} of the time of one process "
        f"({', '.join(f'{ratio:.2f}' for ratio in speed['ratios'])})",
        f"sampling ahead hides {hidden['median']:.0%} of the shorter phase "
        f"({', '.join(f'{share:.0%}' for share in hidden['hidden'])}), "
        f"with {hidden['passes']} passes of learning, and a step takes "
        f"{hidden['median_ratio']:.2f} of the time of one in turn",
    ]
