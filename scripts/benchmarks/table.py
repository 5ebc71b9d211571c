"""The one table: a row for each measure, a column for each system, medians over all rounds."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu import Results, Settings
from benchmarks.work import Kind, Outcome
from benchmarks.worker import SYSTEMS

ROWS = {
    "release_seconds": ("release the KV cache, s", 3),
    "wake_seconds": ("wake, s", 3),
    "sync_seconds": ("sync the adapter, s", 3),
    "switch_seconds": ("phase switch in all, s", 3),
    "sampling_planned_gib": ("sampling planned, GiB", 2),
    "sampling_gib": ("sampling measured, GiB", 2),
    "learning_planned_gib": ("learning planned, GiB", 2),
    "learning_gib": ("learning measured, GiB", 2),
    "largest_gib": ("largest use of the GPU, GiB", 2),
    "sampling_tokens_per_second": ("sampling, tokens/s", 0),
    "learning_tokens_per_second": ("learning, tokens/s", 0),
    "step_seconds": ("a step, s", 2),
}
"""Measures with their names and digits."""
TARGETS = {
    "phase switch in all, s": "< 3",
    "sampling measured, GiB": "planned ± 10 %",
    "learning measured, GiB": "planned ± 10 %",
    "of vLLM alone": ">= 0.95",
    "a step, s": "< TRL's",
    "context": "nf4 at 24: >= 8192; > TRL, Unsloth",
}
"""By the start or the end of a row's name."""


def markdown(settings: Settings, results: Results, machine: str) -> str:
    """The table with the reasons of what failed below it."""
    reasons: list[str] = []
    head = ["", *(SYSTEMS[system] for system in settings.systems), "target"]
    lines = [_line(head), _line(["---"] * len(head))]
    for kind in settings.kinds:
        for key, (name, digits) in ROWS.items():
            cells = [
                _cell(results.speeds.get((kind, system), []), key, digits, reasons)
                for system in settings.systems
            ]
            if any(cell != "-" for cell in cells):
                lines.append(_line([f"{kind}: {name}", *cells, _target(name)]))
        lines += _ratios(settings, results, kind)
    for cap in settings.caps_gib:
        for kind in settings.kinds:
            cells = []
            for system in settings.systems:
                found = results.contexts.get((kind, system, cap))
                if found is None:
                    cells.append("-")
                    continue
                note = _note(found.reason, reasons) if found.reason else ""
                cells.append(f"{found.tokens:,} at {found.used_gib:.1f} GiB{note}")
            row = f"{kind}: longest context under {cap:g} GiB"
            lines.append(_line([row, *cells, TARGETS["context"]]))
    work = settings.work
    said = (
        f"{machine}. {Path(work.model).name}, LoRA rank {work.rank}: {work.prompts} prompts of "
        f"{work.prompt_tokens} tokens, {work.completions} completions of {work.completion_tokens} "
        f"each; medians of {settings.rounds} rounds of {work.repeats} steps. Sampling of TRL and "
        "Unsloth holds their waking, syncing and going to sleep. A context is tried with one group "
        f"of {settings.group}."
    )
    numbered = [f"({number}) {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([said, "", *lines, "", *(f"{line}  " for line in numbered)]).rstrip() + "\n"


def save(settings: Settings, results: Results, machine: str, path: Path) -> None:
    """The table at ``path`` and everything behind it beside, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(settings, results, machine))
    speeds = [
        {"kind": kind, "system": system, "rounds": [asdict(outcome) for outcome in outcomes]}
        for (kind, system), outcomes in results.speeds.items()
    ]
    contexts = [
        {"kind": kind, "system": system, "cap_gib": cap, **asdict(found)}
        for (kind, system, cap), found in results.contexts.items()
    ]
    whole = {"machine": machine, "settings": asdict(settings), "speeds": speeds,
             "contexts": contexts}  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(whole, indent=2) + "\n")


def _cell(outcomes: Sequence[Outcome], key: str, digits: int, reasons: list[str]) -> str:
    values = [value for outcome in outcomes for value in outcome.values.get(key, [])]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    notes = [note for outcome in outcomes for note in outcome.notes]
    if errors and key == "largest_gib":  # how far a system came that failed is no measure
        return "-"
    if errors and key == "step_seconds":
        steps = f"{statistics.median(values):,.{digits}f}, then " if values else ""
        return f"{steps}failed" + _note(errors[0], reasons)
    if not values:
        return "-"
    marks = "".join(_note(note, reasons) for note in dict.fromkeys(notes))
    shown = f"{statistics.median(values):,.{digits}f}"
    return shown + marks if key == "step_seconds" else shown


def _ratios(settings: Settings, results: Results, kind: Kind) -> list[str]:
    """Sampling beside vLLM alone: the median over rounds of each round's ratio."""
    key = "sampling_tokens_per_second"
    if "vllm" not in settings.systems:
        return []
    cells = []
    for system in settings.systems:
        ratios = [
            statistics.median(theirs.values[key]) / statistics.median(alone.values[key])
            for theirs, alone in zip(
                results.speeds.get((kind, system), []),
                results.speeds.get((kind, "vllm"), []),
                strict=False,  # what is kept under way lacks some
            )
            if theirs.values.get(key) and alone.values.get(key)
        ]
        cells.append(f"{statistics.median(ratios):.3f}" if ratios else "-")
    return [_line([f"{kind}: sampling, of vLLM alone", *cells, TARGETS["of vLLM alone"]])]


def _target(name: str) -> str:
    return TARGETS.get(name, "")


def _note(reason: str, reasons: list[str]) -> str:
    """A mark for a reason that stands below the table, each once."""
    if reason not in reasons:
        reasons.append(reason)
    return f" ({reasons.index(reason) + 1})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
