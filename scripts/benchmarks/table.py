"""The one table: a row for each measure, a column for each side, medians over all rounds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import orjson

from benchmarks.measure import Block, titles
from benchmarks.sides import Outcome

ROWS = {
    "release_seconds": ("release the KV cache, s", ".3f"),
    "wake_seconds": ("wake, s", ".3f"),
    "sync_seconds": ("sync the adapter, s", ".3f"),
    "switch_seconds": ("phase switch in all, s", ".3f"),
    "sampling_planned_gib": ("sampling planned, GiB", ".2f"),
    "sampling_gib": ("sampling measured, GiB", ".2f"),
    "learning_planned_gib": ("learning planned, GiB", ".2f"),
    "learning_gib": ("learning measured, GiB", ".2f"),
    "longest_planned_tokens": ("longest rows planned, tokens", ",.0f"),
    "longest_tokens": ("longest rows learned, tokens", ",.0f"),
    "tokens": ("completion tokens of a step", ",.0f"),
    "sampling_tokens_per_second": ("sampling, tokens/s", ",.0f"),
    "learning_tokens_per_second": ("learning, tokens/s", ",.0f"),
    "sampling_seconds": ("sampling, s", ".2f"),
    "ahead_seconds": ("sampling ahead, s", ".2f"),
    "learning_seconds": ("learning, s", ".2f"),
    "hidden": ("hidden of the shorter phase", ".0%"),
    "step_seconds": ("a step, s", ".2f"),
}
"""Measures of a step with their names and formats."""
BESIDE = {
    "step_seconds": ("a step, times the first one's", "", ".2f"),
    "sampling_tokens_per_second": ("sampling, of vLLM alone", "vllm", ".3f"),
}
"""Measures relative to another side's (the first one's, where none is named): the median over the
steps of each one's ratio."""
TARGETS = {
    "phase switch in all, s": "< 3",
    "sampling measured, GiB": "planned ± 10 %",
    "learning measured, GiB": "planned ± 10 %",
    "sampling, of vLLM alone": ">= 0.95",
    "a step, s": "< TRL's",
    "longest rows learned": ">= 8,192",
}
"""By the start of a row's name."""


@dataclass(slots=True)
class _Table:
    """Lines of Markdown, and the reasons and notes that stand below them, each once."""

    sides: list[str]
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, block: str, name: str, cells: dict[str, str]) -> None:
        """A row, unless nobody has the measure."""
        if not any(cells.values()):
            return
        target = next((t for start, t in TARGETS.items() if name.startswith(start)), "")
        shown = [cells.get(side) or "-" for side in self.sides]
        self.lines.append(_line([f"{block}: {name}", *shown, target]))

    def note(self, text: str) -> str:
        """A mark for what stands below the table."""
        if text not in self.notes:
            self.notes.append(text)
        return f" ({self.notes.index(text) + 1})"


def markdown(blocks: Sequence[Block], said: str) -> str:
    """The table, with ``said`` and the blocks' titles above it, and what failed below it."""
    named = titles(blocks)
    table = _Table(list(named))
    for block in blocks:
        for measure, (name, digits) in ROWS.items():
            cells = {
                side: _step_cell(rounds, measure, digits, table)
                for side, rounds in block.sides.items()
            }
            table.add(block.name, name, cells)
        for measure, (name, other, digits) in BESIDE.items():
            alone = block.sides.get(other or next(iter(block.sides), ""), [])
            ratios = {side: list(_ratios(rounds, alone, measure))
                      for side, rounds in block.sides.items()}  # fmt: skip
            table.add(block.name, name, {
                side: format(median(each), digits) for side, each in ratios.items() if each
            })  # fmt: skip
        _add_memory(block, table)
    head = ["", *named.values(), "target"]
    notes = [f"({number}) {note}  " for number, note in enumerate(table.notes, start=1)]
    above = [said, "", *(f"- {block.title}" for block in blocks), ""]
    whole = [*above, _line(head), _line(["---"] * len(head)), *table.lines, "", *notes]
    return "\n".join(whole).rstrip() + "\n"


def show(blocks: Sequence[Block], said: str, path: Path | None) -> None:
    """Print the table, and save it."""
    print(markdown(blocks, said), end="")
    save(blocks, said, path)


def save(blocks: Sequence[Block], said: str, path: Path | None) -> None:
    """Write the table to ``path``, if set, and all numbers next to it as JSON."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(blocks, said), encoding="utf-8")
    option = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    whole = orjson.dumps({"said": said, "blocks": blocks}, option=option)
    path.with_suffix(".json").write_bytes(whole)


def _step_cell(rounds: Sequence[Outcome], measure: str, digits: str, table: _Table) -> str:
    values = [value for outcome in rounds for value in outcome.values(measure)]
    shown = format(median(values), digits) if values else ""
    if measure != "step_seconds":
        return shown
    if errors := [outcome.error for outcome in rounds if outcome.error is not None]:
        return f"{shown}, then failed".removeprefix(", then ") + table.note(errors[0])
    notes = dict.fromkeys(note for outcome in rounds for note in outcome.notes)
    return shown + "".join(table.note(note) for note in notes) if shown else ""


def _ratios(rounds: Sequence[Outcome], others: Sequence[Outcome], measure: str) -> Iterator[float]:
    """Yield the ratios of equal steps of the same round; an intermediate table lacks some."""
    for mine, theirs in zip(rounds, others, strict=False):
        for value, other in zip(mine.values(measure), theirs.values(measure), strict=False):
            yield value / other


def _add_memory(block: Block, table: _Table) -> None:
    """The largest use and, of that, ours as a part of theirs; of a side that failed it is no
    measure."""
    done = {
        side: rounds for side, rounds in block.sides.items()
        if rounds and all(outcome.error is None for outcome in rounds)
    }  # fmt: skip
    for name, before in (("largest use of memory", False), ("the same without libraries", True)):
        used = {
            side: median(o.largest_gib - (o.before_gib if before else 0.0) for o in rounds)
            for side, rounds in done.items()
        }
        ours = used.get("reason_llm")
        table.add(block.name, f"{name}, GiB", {side: f"{gib:.2f}" for side, gib in used.items()})
        if ours is not None:
            table.add(block.name, f"{name}, ours / theirs", {
                side: f"{ours / gib:.2f}" for side, gib in used.items() if gib
            })  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
