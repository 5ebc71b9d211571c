"""The report without JavaScript: alarms, a table of steps, and rollouts of the last archived step,
as HTML with untrusted text escaped."""

import gzip
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import orjson

from reason_llm.app.report.payload import Examined
from reason_llm.app.report.rollouts import StepRollouts, evenly

MAX_STEPS, MAX_GROUPS, MAX_CHARACTERS = 50, 4, 2000
"""Rows of the table, groups of rollouts, and characters of a text."""
SEPARATORS = {code: f"&#{code};" for code in (0x2028, 0x2029)}
COLUMNS = {
    "score/reward": "reward",
    "eval/accuracy": "held out",
    "eval/pair_accuracy": "held-out pairs",
    "train/loss": "loss",
    "sample/completion_tokens": "tokens",
    "sample/truncated_fraction": "truncated",
}
"""Titles by metric, if the run has it."""


def plain(examined: Sequence[Examined], value: Mapping[str, Any]) -> str:
    """Return what a reader without JavaScript sees of the runs in ``value``, the page's data."""
    parts = []
    for item, run in zip(examined, value["runs"], strict=True):
        parts.append(f"<h2>{escape(run['label'])}</h2>")
        alarms = [check for check in run["checks"] if check["state"] == "alarm"]
        parts += [f"<p>{escape(check['title'])}: {escape(check['text'])}</p>" for check in alarms]
        parts.append(_table(run))
        if item.rollouts.steps:
            parts += _rollouts(item.rollouts.steps[-1])
    return "\n".join(parts)


def _table(run: Mapping[str, Any]) -> str:
    columns = {
        title: run["columns"][key] for key, title in COLUMNS.items() if key in run["columns"]
    }
    head = "".join(f"<th>{title}</th>" for title in ("step", *columns))
    rows = [f"<tr>{head}</tr>"]
    for place in evenly(range(len(run["steps"])), MAX_STEPS):
        values = [column[place] for column in columns.values()]
        cells = [run["steps"][place], *("–" if v is None else f"{v:.4g}" for v in values)]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "\n".join(('<table class="plain">', *rows, "</table>"))


def _rollouts(step: StepRollouts) -> Iterator[str]:
    """Yield the completions of the highest and the lowest reward of a few groups."""
    content = gzip.decompress(step.blob)
    header = orjson.loads(content[4 : 4 + int.from_bytes(content[:4], "little")])
    yield f"<h3>Rollouts of step {step.step}</h3>"
    for facts, group in evenly(list(zip(step.groups, header["groups"], strict=True)), MAX_GROUPS):
        yield f"<h4>Prompt</h4>\n{_text(group['prompt'])}"
        if group["answer"]:
            yield f"<h4>Gold answer</h4>\n{_text(group['answer'])}"
        ranked = sorted(range(len(facts.rewards)), key=lambda i: facts.rewards[i])
        for place in dict.fromkeys((ranked[-1], ranked[0])):
            yield f"<h4>Reward {facts.rewards[place]:.4g}</h4>\n{_text(group['texts'][place])}"


def _text(text: str) -> str:
    cut = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
    return f'<div class="text-block">{escape(cut).translate(SEPARATORS)}</div>'
