"""This project and TRL's trainers do the same work on a CPU, in turn, in one run.

Each side is a process of its own, which takes one optimizer step when it is its turn: ours, TRL,
ours, TRL, and so on, so that other load falls on both. The first step of each is a warm-up. Numbers
are medians over the others; a ratio of times is the median of the ratios of the steps taken side by
side. A step is what an optimizer step needs: sampling, rewards, (here) the buffer on disk,
learning; TRL's loading of data and logging between steps are left out. Peak memory is the process's
largest resident memory from start to end, and once more without what its libraries took before it
began. vLLM is hidden from both: neither uses it here, and TRL would import it.

Not here: what the sides do (``cpu_ours``, ``cpu_trl``; ``cpu_rows_ours``, ``cpu_rows_trl``) and on
what (``cpu_workloads``, ``cpu_rows``).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import orjson
from transformers.utils.logging import disable_progress_bar

from benchmarks import cpu_rows, cpu_workloads
from benchmarks.cpu_limit import matmul_peak, useful
from benchmarks.cpu_rows import RowsWorkload
from benchmarks.cpu_workloads import ROOT, SMOOTHED, TARGET, Workload
from reason_llm.files import read_text

MIB = 2**20
START = "import sys; sys.modules['vllm'] = None; from benchmarks.{module} import main; main()"
TITLES = {
    "ours": "reason_llm",
    "trl": "TRL",
    "trl_small": "TRL, least memory",
    "trl_chunked": "TRL, chunked log-probs",
    "trl_bfloat16": "TRL, bfloat16",
    "trl_best": "TRL, chunked log-probs, bfloat16",
    "ours_bfloat16": "reason_llm, bfloat16",
}
OURS = ("ours", "ours_bfloat16")


@dataclass(frozen=True, slots=True)
class Result:
    """One side's numbers on one workload."""

    side: str
    rows: int | None
    """Rows of a forward pass of TRL."""
    steps: list[dict[str, float]]
    """sampling, learning, total (seconds) and tokens of each step but the warm-up; of some the
    held-out accuracy after it."""
    warm_up: float
    """Seconds of the first step."""
    peak_bytes: int
    before_bytes: int
    """Resident with the libraries imported and nothing loaded."""

    def seconds(self, part: str) -> float:
        """The median over the steps."""
        return median(step[part] for step in self.steps)

    @property
    def to_target(self) -> tuple[float, int] | None:
        """Seconds and number of steps, the first among them, until the mean of the last
        evaluations reached the target; None if it did not, or nothing was evaluated."""
        seconds, seen = self.warm_up, []
        for number, step in enumerate(self.steps, 2):
            seconds += step["total"]
            if "accuracy" in step:
                seen.append(step["accuracy"])
            if len(seen) >= SMOOTHED and sum(seen[-SMOOTHED:]) >= TARGET * SMOOTHED:
                return seconds, number
        return None


class Side:
    """A process that takes turns.

    Raises (on ``ask``):
        RuntimeError: it died; with the end of what it wrote.
    """

    def __init__(self, module: str, arguments: list[str], folder: Path, threads: int) -> None:
        folder.mkdir(parents=True)
        self._log = folder / "stderr.txt"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", START.format(module=module), *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._process.kill()
        self._process.communicate()

    def ask(self) -> dict[str, Any]:
        """Give it its turn and wait for the end of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it died: then its answer is empty
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a side of the benchmark died:\n{read_text(self._log, 64 * MIB)[-3000:]}"
            )
        answer: dict[str, Any] = orjson.loads(line)
        return answer


def run(
    names: list[str],
    repeats: int,
    small: bool,
    threads: int,
    trl_rows: int | None,
    extras: Collection[str],
) -> dict[str, Any]:
    """Measure the workloads called ``names``; everything as JSON-ready values.

    Args:
        repeats: optimizer steps that count.
        small: the smallest form, which shows that all of it runs and nothing else.
        trl_rows: rows of TRL's passes, in place of those found best.
        extras: of ``TITLES``, the settings to measure beside TRL's main one, where the workload has
            them.
    """
    disable_progress_bar()
    found: dict[str, Any] = {
        "threads": threads,
        "repeats": repeats,
        "matmul_flops": matmul_peak(threads),
        "workloads": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            place = Path(folder) / name
            make = cpu_rows.make if name in cpu_rows.STAGES else cpu_workloads.make
            workload: Workload | RowsWorkload = make(name, 1 + repeats, small, place / "model")
            if trl_rows is not None:
                workload = replace(workload, trl_rows=trl_rows)
            results = _measure(workload, place, threads, extras)
            found["workloads"].append(
                {
                    "name": name,
                    "title": workload.title,
                    "sides": [_summary(r, results[0]) for r in results],
                    "is_judged": isinstance(workload, Workload) and bool(workload.held_out),
                    "limit": _limit(workload, results[0], found["matmul_flops"]),
                }
            )
        if "c" in names:
            size = ["128", "4096"] if small else ["8192", "150000"]
            with Side("cpu_logprobs", size, Path(folder) / "logprobs", threads) as side:
                found["logprobs"] = side.ask()
    found["load_average"] = os.getloadavg()
    return found


def _limit(workload: Workload | RowsWorkload, ours: Result, peak: float) -> dict[str, float] | None:
    """Useful operations of our phases as fractions of matmul's peak; None where lengths are not
    given."""
    if not isinstance(workload, Workload) or workload.lengths is None:
        return None
    work = useful(workload)
    learning = work.learning / ours.seconds("learning") / peak
    if workload.learner_only:
        return {"learning": learning}
    return {"sampling": work.sampling / ours.seconds("sampling") / peak, "learning": learning}


def _measure(
    workload: Workload | RowsWorkload, place: Path, threads: int, extras: Collection[str]
) -> list[Result]:
    """All sides, a step each in turn."""
    variants: dict[str, tuple[Workload | RowsWorkload, list[str]]] = {
        "ours": (workload, []),
        "trl": (workload, []),
    }
    if workload.trl_rows_small is not None:
        fewer = replace(workload, trl_rows=workload.trl_rows_small)
        more: dict[str, tuple[Workload | RowsWorkload, list[str]]] = {
            "trl_small": (fewer, []),
            "trl_chunked": (workload, ["chunked"]),
            "trl_bfloat16": (workload, ["bfloat16"]),
            "trl_best": (workload, ["chunked", "bfloat16"]),
            "ours_bfloat16": (workload, ["bfloat16"]),
        }
        variants |= {name: variant for name, variant in more.items() if name in extras}
    place.mkdir(parents=True, exist_ok=True)
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    results = []
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, (variant, options) in variants.items():
            file = place / f"{name}.json"
            file.write_bytes(orjson.dumps(variant.to_json()))
            module = workload.modules[name not in OURS]
            arguments = [str(file), str(place / name), *options]
            sides[name] = stack.enter_context(Side(module, arguments, place / name, threads))
        for _ in workload.steps:
            for name, side in sides.items():
                steps[name].append(side.ask())
        for name, side in sides.items():
            rows = None if name in OURS else variants[name][0].trl_rows
            first, *others = steps[name]
            results.append(Result(name, rows, others, first["total"], **side.ask()))
    return results


def _summary(result: Result, ours: Result) -> dict[str, Any]:
    """One side's medians, and what of it this project takes."""
    pairs = list(zip(ours.steps, result.steps, strict=True))
    return {
        "side": TITLES[result.side],
        "rows": result.rows,
        "sampling_seconds": result.seconds("sampling"),
        "learning_seconds": result.seconds("learning"),
        "step_seconds": result.seconds("total"),
        "tokens": result.seconds("tokens"),
        "peak_mib": result.peak_bytes / MIB,
        "own_mib": (result.peak_bytes - result.before_bytes) / MIB,
        "speed_ratio": median(theirs["total"] / mine["total"] for mine, theirs in pairs),
        "peak_ratio": ours.peak_bytes / result.peak_bytes,
        "own_ratio": (ours.peak_bytes - ours.before_bytes)
        / (result.peak_bytes - result.before_bytes),
        "to_target": result.to_target,
        "steps": result.steps,
    }


def _to_target(sides: list[dict[str, Any]]) -> str:
    """Seconds of each side, and how many times as long as ours they are."""
    ours = sides[0]["to_target"]
    told = []
    for side in sides:
        if side["to_target"] is None:
            told.append(f"{side['side']} did not come there")
            continue
        seconds, steps = side["to_target"]
        times = "" if side is sides[0] or ours is None else f", {seconds / ours[0]:.2f} times ours"
        told.append(f"{side['side']} {seconds:.1f} s in {steps} steps{times}")
    return "; ".join(told)


def table(found: dict[str, Any]) -> str:
    """The results as a Markdown table. Speed: their seconds over ours; memory: ours over theirs."""
    lines = [
        "| workload | side | tokens | sampling s | learning s | step s | peak MiB | without "
        "libraries | we are faster | our peak / theirs | without libraries |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for workload in found["workloads"]:
        for side in workload["sides"]:
            rows = "" if side["rows"] is None else f", {side['rows']} rows a pass"
            ratios = (
                "| | |"
                if side["side"] == TITLES["ours"]
                else f"{side['speed_ratio']:.2f}x | {side['peak_ratio']:.2f} | "
                f"{side['own_ratio']:.2f} |"
            )
            lines.append(
                f"| {workload['title']} | {side['side']}{rows} | {side['tokens']:.0f} | "
                f"{side['sampling_seconds']:.2f} | {side['learning_seconds']:.2f} | "
                f"{side['step_seconds']:.2f} | {side['peak_mib']:.0f} | {side['own_mib']:.0f} | "
                f"{ratios}"
            )
    for workload in found["workloads"]:
        if workload["limit"] is not None:
            parts = ", ".join(f"{k} {v:.0%}" for k, v in workload["limit"].items())
            lines += ["", f"Useful work of ours, {workload['title']}: {parts} of matmul's peak, "
                      f"{found['matmul_flops'] / 1e9:.0f} GFLOP/s."]  # fmt: skip
        if workload["is_judged"]:
            lines += ["", f"To {TARGET:.0%}: {_to_target(workload['sides'])}."]
    if "logprobs" in found:
        logprobs = found["logprobs"]
        lines += [
            "",
            f"Log-probs of one long row, forward and backward: {logprobs['extra_bytes'] / MIB:.0f} "
            f"MiB more, {logprobs['extra_bytes'] / logprobs['logits_bytes']:.3f} of its logits' "
            f"{logprobs['logits_bytes'] / MIB:,.0f} MiB, in {logprobs['seconds']:.1f} s.",
        ]
    load = ", ".join(f"{value:.1f}" for value in found["load_average"])
    lines += [
        "",
        f"Medians of {found['repeats']} steps in turn, {found['threads']} thread(s), load average "
        f"{load}.",
    ]
    return "\n".join(lines)
