"""Data of the page: a JSON-ready value and the compressed rollouts."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from reason_llm.app import lines
from reason_llm.app.report import raised
from reason_llm.app.report.alarms import judge
from reason_llm.app.report.evidence import Evidence, Finding
from reason_llm.app.report.raised import Raised
from reason_llm.app.report.rollouts import (
    GroupFacts,
    Reader,
    Rollouts,
    evenly,
    read_rollouts,
    read_step,
)
from reason_llm.app.report.runs import RunRecord, is_evaluated
from reason_llm.app.report.texts import Texts, read_texts
from reason_llm.app.report.token_texts import TokenTexts
from reason_llm.config import MOST_CONFIG_BYTES, Config, file as config_file, yaml_text
from reason_llm.errors import ModelError, tree_without_secrets, with_texts
from reason_llm.files import read_bounded
from reason_llm.run import Record
from reason_llm.run.store import folder as run_folder
from reason_llm.score.statistics import wilson

RUN_SPECIFIC = ("run.name", "run.directory", "run.buffer")
"""Options that differ between runs anyway."""
MAX_OPTION_CHARACTERS = 200
"""Characters of an option's value in a comparison."""
MAX_RECORDS = 4000
"""Records of a run in a page, without those of evaluations, which are all kept."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A run with its rollouts and what the checks found."""

    run: RunRecord
    rollouts: Rollouts
    findings: dict[str, Finding]
    token_notice: str | None
    """Why tokens cannot be coloured; None if they can."""
    raised: list[Raised]
    """Every alarm that was raised during the run."""
    texts: dict[str, Texts]
    """Answers to held-out problems."""

    @property
    def alarms(self) -> list[str]:
        """Titles of the alarms that are raised now."""
        return [title for title, finding in self.findings.items() if finding.state == "alarm"]

    @property
    def ended(self) -> list[Raised]:
        """Alarms that were raised before and are not now."""
        return [alarm for alarm in self.raised if alarm.title not in self.alarms]


def examine(run: RunRecord, share: float = 1.0, read: Reader = read_step) -> Examined:
    """Read a run's rollouts, within a share of the page's bounds, and make the checks."""
    tokens, notice = None, None
    try:
        tokens = TokenTexts.load(run.config.model.path)
    except ModelError as error:
        notice = f"Tokens cannot be coloured one by one: {error}."
    rollouts = read_rollouts(run.archives, tokens, share, read)
    keys = {reward.key for reward in run.config.score.rewards}
    groups = [group for group in rollouts.groups if set(group.parts) >= keys]
    findings = judge(evidence(run, groups))
    split = sum(step.num_split for step in rollouts.steps)
    if notice is None and split < rollouts.num_rollouts:
        notice = (
            f"In {rollouts.num_rollouts - split:,} completions the tokens do not spell the text, "
            "so they cannot be coloured."
        )
    texts = read_texts(run.folder, share, rollouts.notices)
    return Examined(run, rollouts, findings, notice, raised.read(run.folder), texts)


def evidence(run: RunRecord, groups: Sequence[GroupFacts]) -> Evidence:
    """A run's records with groups of its rollouts, for the checks."""
    best_step = run_folder.best_step(run.folder)
    return Evidence(run.config, run.records, groups, run.num_held_out, best_step)


def to_value(examined: Sequence[Examined]) -> dict[str, Any]:
    """All data except the rollouts."""
    written = time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC"
    runs = [item.run for item in examined]
    value = {
        "live": False,
        "written": written,
        "runs": [_run(item) for item in examined],
        "differing": differing_options([run.config for run in runs]),
    }
    safe: dict[str, Any] = without_paths(tree_without_secrets(value), runs)
    return safe


def without_paths(value: Any, runs: Sequence[RunRecord]) -> Any:
    """The value without absolute paths: the last part of those of the runs, others relative to the
    working or the home folder."""
    cwd, home = f"{Path.cwd()}{os.sep}", f"{Path.home()}{os.sep}"
    short = {cwd: "", home: "~/"}
    for run in runs:
        values = [value for _, value in config_file.flatten(run.config.model_dump(mode="json"))]
        texts = [str(item) for v in values for item in (v if isinstance(v, list) else [v])]
        for path in (*texts, str(run.folder.resolve()), str(run.folder)):
            if path.startswith(os.sep) and len(path) > 1 and not path.startswith((cwd, home)):
                short[path] = f"…/{Path(path).name}"
    longest_first = sorted(short, key=len, reverse=True)

    def shortened(text: str) -> str:
        for path in longest_first:
            text = text.replace(path, short[path])
        return text

    return with_texts(value, shortened)


def differing_options(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Options that are not the same in all runs, each with its value in every run as text."""
    trees = [dict(config_file.flatten(config.model_dump(mode="json"))) for config in configs]
    differing = []
    for name in dict.fromkeys(name for tree in trees for name in tree):
        values = [tree.get(name) for tree in trees]
        if name not in RUN_SPECIFIC and any(value != values[0] for value in values):
            texts = ["null" if value is None else str(value) for value in values]
            differing.append({"option": name, "values": [t[:MAX_OPTION_CHARACTERS] for t in texts]})
    return differing


def blobs(examined: Sequence[Examined]) -> dict[tuple[int, int | str], bytes]:
    """Gzipped rollouts by run and step, and texts by run and name."""
    blobs_by_key: dict[tuple[int, int | str], bytes] = {}
    for index, item in enumerate(examined):
        blobs_by_key |= {(index, step.step): step.blob for step in item.rollouts.steps}
        blobs_by_key |= {(index, name): texts.packed.blob for name, texts in item.texts.items()}
    return blobs_by_key


def _run(examined: Examined) -> dict[str, Any]:
    run, rollouts, config = examined.run, examined.rollouts, examined.run.config
    records = run.records
    if len(records) > MAX_RECORDS:
        spread_ids = {id(record) for record in evenly(records, MAX_RECORDS)}
        records = [r for r in records if id(r) in spread_ids or is_evaluated(r)]
    places = {id(group): index for index, group in enumerate(rollouts.groups)}
    return {
        "label": run.label,
        "stage": config.stage,
        "judged_by": config.score.judged_by,
        "algorithm": config.method.name,
        "idea": config.method.idea,
        "source": config.method.source,
        "warmup_steps": config.first_policy_step,
        "pairs": _pairs(run.records),
        "model": config.model.path,
        "sources": [entry.source for entry in config.data.sources],
        "step": int(run.records[-1]["step"]) if run.records else 0,
        "planned_steps": config.run.steps,
        "finished": run.summary is not None,
        "left": lines.left(run.records, config.run.steps),
        "rewards": [{"name": r.key, "weight": r.weight} for r in config.score.rewards],
        "steps": [int(record["step"]) for record in records],
        # Six digits are more than a chart shows.
        "columns": {
            key: [None if (v := r.get(key)) is None else float(f"{v:.6g}") for r in records]
            for key in dict.fromkeys(key for record in records for key in record if key != "step")
        },
        "config": shown_config(run.folder / "resolved_config.yaml"),
        "starts": run.starts,
        "notices": [*run.notices, *rollouts.notices],
        "checks": [
            {"title": title, "groups": [places[id(group)] for group in finding.groups]}
            | {key: getattr(finding, key) for key in ("state", "text", "advice", "charts", "steps")}
            for title, finding in examined.findings.items()
        ],
        "ended": [asdict(alarm) for alarm in examined.ended],
        "rollouts": _rollouts(rollouts, config.score.rewards[0].key)
        | {"token_notice": examined.token_notice},
        "texts": {
            name: _rollouts(Rollouts([texts.packed], 1, []), "score") | {"labels": texts.labels}
            for name, texts in examined.texts.items()
        },
    }


def _pairs(records: Sequence[Record]) -> dict[str, float] | None:
    """95 % interval of the last accuracy on held-out pairs, with their number."""
    evaluated = [r for r in records if {"eval/pair_accuracy", "eval/pairs"} <= r.keys()]
    if not evaluated or evaluated[-1]["eval/pairs"] < 1:
        return None
    accuracy, count = evaluated[-1]["eval/pair_accuracy"], evaluated[-1]["eval/pairs"]
    interval = wilson(min(max(accuracy, 0.0), 1.0), count)
    return {"count": count, "low": interval.low, "high": interval.high}


def _rollouts(rollouts: Rollouts, first: str) -> dict[str, Any]:
    """Return the rollouts that the page lists; ``first`` is the scoring reward."""
    groups = rollouts.groups
    names = dict.fromkeys(name for group in groups for name in group.parts)
    rewards = [reward for group in groups for reward in group.rewards]

    def shorts(values: Sequence[float]) -> list[float]:  # four digits keep the page small
        return [float(f"{value:.4g}") for value in values]

    def of_reward(name: str) -> list[list[float]]:
        """Return the reward by group; zeros for a group without it."""
        return [shorts(group.parts.get(name, [0.0] * len(group.rewards))) for group in groups]

    return {
        "archives": rollouts.num_archives,
        "archived": sum(step.num_rollouts for step in rollouts.steps),
        "steps": len(rollouts.steps),
        "count": len(rewards),
        "least": min(rewards, default=0.0),
        "most": max(rewards, default=0.0),
        "groups": {
            "step": [group.step for group in groups],
            "prompt": [group.prompt_id for group in groups],
            "preview": [group.preview for group in groups],
            "similarity": [round(group.similarity, 3) for group in groups],
            "rewards": [shorts(group.rewards) for group in groups],
            "first": of_reward(first),
            "parts": {name: of_reward(name) for name in names},
            "advantages": [shorts(group.advantages) for group in groups],
            "lengths": [group.lengths for group in groups],
            "truncated": [[int(cut) for cut in group.are_truncated] for group in groups],
        },
    }


def shown_config(path: Path) -> str:
    """Text of the config; with a secret, dumped again, because YAML may break or escape it."""
    text = read_bounded(path, MOST_CONFIG_BYTES).decode(errors="replace")
    value = yaml_text.parse(text)
    if (safe := tree_without_secrets(value)) == value:
        return text
    return yaml.safe_dump(safe, sort_keys=False, allow_unicode=True, width=10**6)
