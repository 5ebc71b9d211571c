"""Console lines of a run, made from its records and its summary."""

from pathlib import Path
from typing import Any

from reason_llm.run import Record, metrics


def of_step(record: Record, last_step: int) -> str:
    """``step 1/60  reward 0.238  sampling 0.3 s (17,933 tokens/s)  learning 0.4 s``."""
    parts = [f"step {record['step']:.0f}/{last_step}", f"reward {record['score/reward']:.3f}"]
    if "eval/accuracy" in record:
        parts.append(accuracy(record))
    if "sample/tokens_per_second" in record:
        seconds, speed = record["time/sampling_seconds"], record["sample/tokens_per_second"]
        parts.append(f"sampling {seconds:.1f} s ({speed:,.0f} tokens/s)")
    else:
        parts.append("sampled before")
    parts.append(f"learning {record['time/learning_seconds']:.1f} s")
    return "  ".join(parts)


def accuracy(record: Record) -> str:
    """Held-out accuracy, and that of each named set."""
    named = ", ".join(f"{name} {value:.1%}" for name, value in metrics.accuracies(record).items())
    return f"held-out accuracy {record['eval/accuracy']:.1%}" + (f" ({named})" if named else "")


def of_summary(summary: dict[str, Any]) -> list[str]:
    """Result of a run: accuracy, memory beside its plan, seconds."""
    found = []
    if summary["accuracy_before"] is not None:
        found.append(
            f"held-out accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}"
        )
    for name, (before, after) in summary["accuracy_of_sets"].items():
        found.append(f"  {name} {before:.1%} -> {after:.1%}")
    found.append(
        f"memory: sampling {summary['sampling_peak_gib']} GiB "
        f"({summary['sampling_planned_gib']} planned), learning {summary['learning_peak_gib']} GiB "
        f"({summary['learning_planned_gib']} planned)"
    )
    found.append(
        f"{summary['steps']} steps in {summary['total_seconds']:.0f} s: "
        f"{summary['sampling_seconds']:.0f} s sampling, {summary['learning_seconds']:.0f} s "
        f"learning, {summary['buffer_seconds'] + summary['saving_seconds']:.1f} s saving; adapter "
        f"in {summary['adapter']}, curves in {Path(summary['adapter']).with_name('curves.png')}"
    )
    return found
