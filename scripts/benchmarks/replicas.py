"""Comparison of replicas with one process, and of sampling ahead with alternating phases, as whole
runs.

Each run is a separate process with one thread in each replica, on a random model whose
completions nearly all reach their longest length. The runs of a pair take turns, so that other load
falls on both; the first steps of each are a warm-up. Sampling and learning ahead take passes over
the rollouts so that the two take about as long; the table has the part of the shorter phase that
is hidden while a sampler does the next step:
(sampling - waiting) / min(sampling, learning).
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import yaml

from benchmarks.measure import Block
from benchmarks.models import ROOT, make
from benchmarks.sides import Outcome
from reason_llm.files import read_text

WARM_UP = 2
"""Steps that do not count."""


def run(repeats: int, steps: int, replicas: int, is_small: bool, folder: Path) -> list[Block]:
    """Measure both pairs, ``repeats`` runs of each side and ``steps`` counted steps in a run."""
    make("tiny" if is_small else "25m", folder / "model")
    pairs: dict[str, dict[str, dict[str, Any]]] = {
        "replicas": {
            "one": {"shards": replicas},
            "replicas": {"shards": replicas, "replicas": replicas},
        },
        "ahead": {
            "in_turn": {"shards": 4, "max_staleness": 1},
            "ahead": {"shards": 4, "max_staleness": 1, "samplers": 1},
        },
    }
    # Phases of equal length can hide each other best, so a trial sets the learner's passes.
    trial = _run(folder, "tried", pairs["ahead"]["in_turn"], 1, is_small, epochs=1)
    passes = max(1, round(trial.median("sampling_seconds") / trial.median("learning_seconds")))
    blocks = []
    for pair, kinds in pairs.items():
        epochs = passes if pair == "ahead" else 1
        title = f"{pair}: {replicas} replicas" if pair == "replicas" else f"{pair}: {passes} passes"
        blocks.append(Block(pair, title, {kind: [] for kind in kinds}))
        for number in range(repeats):
            for kind, options in kinds.items():
                outcome = _run(folder, f"{kind}-{number}", options, steps, is_small, epochs)
                blocks[-1].sides[kind].append(outcome)
    return blocks


def _run(
    folder: Path, name: str, options: dict[str, Any], steps: int, is_small: bool, epochs: int
) -> Outcome:
    """The records of a run of ``scripts/train.py``, without the warm-up."""
    place = folder / name
    place.mkdir()
    tree = {
        "run": {"name": "run", "directory": str(place), "buffer": str(place / "buffer.json"),
                "steps": WARM_UP + steps, "save_every": 1000, **options},
        "model": {"path": str(folder / "model"), "dtype": "float32", "adapter": {"rank": 16}},
        "data": {"train": str(ROOT / "data" / "arithmetic_train.jsonl"), "system_prompt": "none"},
        "sample": {"engine": "transformers", "prompts_per_step": 8, "completions_per_prompt": 4,
                   "max_new_tokens": 16 if is_small else 64},
        "score": {"rewards": [{"name": "regex", "options": {"pattern": "[a-m]"}}]},
        "algorithm": {"name": "grpo", "kl": "none"},
        "train": {"learning_rate": 1e-5, "gradient_checkpointing": False, "epochs": epochs},
        "log": {"console": "plain"},
    }  # fmt: skip
    config = place / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    process = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), str(config)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(
            f"a run of the benchmark ended with:\n{process.stdout}{process.stderr}"[-3000:]
        )
    records = map(orjson.loads, read_text(place / "run" / "metrics.jsonl").splitlines())
    return Outcome(steps=[_measures(record) for record in list(records)[1 + WARM_UP :]])


def _measures(record: dict[str, float]) -> dict[str, float]:
    """Return the total time of a step, and its parts."""
    measures = {
        "step_seconds": record["time/total_seconds"],
        "sampling_seconds": record.get("time/sampling_seconds", 0.0),
        "learning_seconds": record["time/learning_seconds"],
    }
    ahead, waiting = (record.get(f"time/{key}_seconds") for key in ("ahead_sampling", "waiting"))
    if ahead is not None:
        shorter = min(ahead, measures["learning_seconds"])
        measures |= {"ahead_seconds": ahead, "hidden": (ahead - (waiting or 0.0)) / shorter}
    return measures
