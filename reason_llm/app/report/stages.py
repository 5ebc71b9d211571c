"""Stages of a pipeline, noted in its folder for its page: <pipeline>/pipeline.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
from pydantic import TypeAdapter

from reason_llm.errors import DataError
from reason_llm.files import MIB, read_bounded, write_atomically

FILE = "pipeline.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, whether its run has begun or not; ``needs`` are the stages that it reads."""

    name: str
    kind: str
    needs: Sequence[str]


_STAGES = TypeAdapter(list[Stage])


def write(folder: Path, stages: Sequence[Stage]) -> None:
    """Note the stages in their order."""
    write_atomically(folder / FILE, orjson.dumps([asdict(each) for each in stages]))


def read(folder: Path, page: Path) -> dict[str, Any] | None:
    """For the page: the stages of the pipeline in ``folder``, whether each has begun, and its
    report where that is below the page's folder; None if it is no pipeline's."""
    if not (folder / FILE).exists():
        return None
    try:
        stages = _STAGES.validate_json(read_bounded(folder / FILE, MIB))
        if any(each.name in ("", "..") or "/" in each.name for each in stages):
            raise ValueError("a stage is named by a path")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / FILE} is damaged; run the pipeline again") from error
    is_below, shown = page.parent.resolve() == folder.resolve(), []
    for each in stages:
        has_report, has_begun = (
            all((folder / each.name / name).is_file() for name in names)
            for names in (["report.html"], ["metrics.jsonl", "resolved_config.yaml"])
        )
        report = f"{quote(each.name)}/report.html" if is_below and has_report else None
        shown.append({**asdict(each), "begun": has_begun, "report": report})
    return {"name": folder.resolve().name, "stages": shown}
