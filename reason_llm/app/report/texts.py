"""Texts of a run other than its rollouts: its answers to held-out problems, by evaluation, in
<run>/evaluations/step-00000012.jsonl.gz."""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from reason_llm.app.report.rollouts import StepRollouts, evenly, pack
from reason_llm.errors import one_line
from reason_llm.files import MIB, open_regular, too_large
from reason_llm.rollout import Completion, FinishReason, Group, Prompt

MAX_EVALUATIONS = 6
MAX_TEXTS, MAX_BLOB_BYTES = 1200, 2 * MIB
"""In a page, of each kind."""
MAX_BYTES = 64 * MIB
"""Max size of an unpacked file."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Groups of texts with one prompt; the labels are of the texts of each group."""

    labels: list[str]
    packed: StepRollouts


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of these files; ``set`` is a held-out set."""

    set: str
    id: str
    prompt: str
    completion: str
    answer: str = ""
    score: float | None = None
    finish_reason: FinishReason = "stop"


_LINE = TypeAdapter(TextLine)
_Column = dict[tuple[str, str], TextLine]


def read_texts(folder: Path, share: float, notices: list[str]) -> dict[str, Texts]:
    """The run's ``held_out`` texts if it has any, within a share of the bounds; ``notices``
    collects unreadable files."""
    answers: dict[str, _Column] = {}
    for path in evenly(sorted((folder / "evaluations").glob("step-*.jsonl.gz")), MAX_EVALUATIONS):
        step = path.name.removeprefix("step-").removesuffix(".jsonl.gz").lstrip("0")
        lines = _read(path, notices)
        label = f"after step {step}" if step else "before training"
        answers[label] = {(line.set, line.id): line for line in lines}
    texts = _texts(answers, share)
    return {} if texts is None else {"held_out": texts}


def _read(path: Path, notices: list[str]) -> list[TextLine]:
    """The lines; none, with a notice, of a damaged file."""
    try:
        with open_regular(path) as packed, gzip.open(packed) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise too_large(MAX_BYTES)
        return [_LINE.validate_json(line) for line in content.splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, EOFError, ValueError, zlib.error) as error:
        notices.append(f"{path.name} was passed over: {one_line(error):.200}")
        return []


def _texts(columns: dict[str, _Column], share: float) -> Texts | None:
    """Groups of the texts that all columns have; None without any."""
    columns = {label: column for label, column in columns.items() if column}
    *_, last = [{}, *columns.values()]
    groups = [
        _group([column[key] for column in columns.values()])
        for key in last
        if all(key in column for column in columns.values())
    ]
    max_texts, max_bytes = int(share * MAX_TEXTS), int(share * MAX_BLOB_BYTES)
    if not groups:
        return None
    return Texts(list(columns), pack(0, groups, None, max_texts, max_bytes))


def _group(lines: list[TextLine]) -> Group:
    """The texts of a prompt; their tokens are not known here."""
    first, completions = lines[0], []
    for line in lines:
        score, text, end = line.score or 0.0, line.completion, line.finish_reason
        completions.append(Completion((0,), text, (0.0,), end, {"score": score}, score))
    return Group(Prompt(first.id, first.prompt, (), first.answer), tuple(completions))
