"""The one table: a row for each measure, a column for each side, medians over all steps."""

from collections.abc import Sequence
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
    "learning_seconds": ("learning, s", ".2f"),
    "step_seconds": ("a step, s", ".2f"),
}
"""Measures of a step with their names and formats."""
RATIOS = {
    "step_seconds": ("a step, times the first one's", "", ".2f"),
    "sampling_tokens_per_second": ("sampling, of vLLM alone", "vllm", ".3f"),
}
"""Measures relative to a named side or else the first one: the median ratio over the steps."""


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
        values = [cells.get(side) or "-" for side in self.sides]
        self.lines.append(_line([f"{block}: {name}", *values]))

    def note(self, text: str) -> str:
        """A mark for what stands below the table."""
        if text not in self.notes:
            self.notes.append(text)
        return f" ({self.notes.index(text) + 1})"


def markdown(blocks: Sequence[Block], heading: str) -> str:
    """The table, with the heading and the blocks' titles above it, and what failed below it."""
    named = titles(blocks)
    table = _Table(list(named))
    for block in blocks:
        for measure, (name, digits) in ROWS.items():
            cells = {
                side: _step_cell(outcome, measure, digits, table)
                for side, outcome in block.sides.items()
            }
            table.add(block.name, name, cells)
        for measure, (name, other, digits) in RATIOS.items():
            base = block.sides.get(other or next(iter(block.sides), ""), Outcome())
            ratios = {s: _ratios(outcome, base, measure) for s, outcome in block.sides.items()}
            cells = {s: format(median(values), digits) for s, values in ratios.items() if values}
            table.add(block.name, name, cells)
        _add_memory(block, table)
    head = ["", *named.values()]
    notes = [f"({number}) {note}  " for number, note in enumerate(table.notes, start=1)]
    above = [heading, "", *(f"- {block.title}" for block in blocks), ""]
    lines = [*above, _line(head), _line(["---"] * len(head)), *table.lines, "", *notes]
    return "\n".join(lines).rstrip() + "\n"


def show(blocks: Sequence[Block], heading: str, path: Path | None) -> None:
    """Print the table, and save it."""
    print(markdown(blocks, heading), end="")
    save(blocks, heading, path)


def save(blocks: Sequence[Block], heading: str, path: Path | None) -> None:
    """Write the table to ``path``, if set, and all numbers next to it as JSON."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(blocks, heading), encoding="utf-8")
    option = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    content = orjson.dumps({"said": heading, "blocks": blocks}, option=option)
    path.with_suffix(".json").write_bytes(content)


def _step_cell(outcome: Outcome, measure: str, digits: str, table: _Table) -> str:
    values = outcome.values(measure)
    text = format(median(values), digits) if values else ""
    if measure != "step_seconds":
        return text
    if outcome.error is not None:
        return f"{text}, then failed".removeprefix(", then ") + table.note(outcome.error)
    return text + "".join(table.note(note) for note in outcome.notes) if text else ""


def _ratios(outcome: Outcome, base: Outcome, measure: str) -> list[float]:
    """Return the ratios of equal steps; an intermediate table lacks some."""
    pairs = zip(outcome.values(measure), base.values(measure), strict=False)
    return [value / other for value, other in pairs]


def _add_memory(block: Block, table: _Table) -> None:
    """Peak memory of the sides that did not fail, and ours relative to theirs."""
    done = {side: o for side, o in block.sides.items() if o.largest_gib and o.error is None}
    for name, before in (("largest use of memory", False), ("the same without libraries", True)):
        used = {s: o.largest_gib - (o.before_gib if before else 0.0) for s, o in done.items()}
        ours = used.get("reason_llm")
        table.add(block.name, f"{name}, GiB", {side: f"{gib:.2f}" for side, gib in used.items()})
        if ours is not None:
            parts = {side: f"{ours / gib:.2f}" for side, gib in used.items() if gib}
            table.add(block.name, f"{name}, ours / theirs", parts)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
