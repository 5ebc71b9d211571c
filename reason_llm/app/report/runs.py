"""Contents of a run's folder for its report: config, records, summary and environment; the rollouts
are read by ``rollouts``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reason_llm.config import Config
from reason_llm.errors import DataError, one_line
from reason_llm.files import read_object
from reason_llm.run import Record
from reason_llm.run.store import archive, folder as run_folder, metrics


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Contents of a run's folder."""

    label: str
    """Unique name of the run in a report."""
    folder: Path
    config: Config
    records: list[Record]
    summary: dict[str, Any] | None
    """None until the run is finished."""
    starts: list[dict[str, Any]]
    """Machine and versions of each start and resume, from ``environment.json``; may be empty."""
    notices: list[str]
    """Files that could not be read and were skipped."""

    @property
    def archives(self) -> list[Path]:
        """Archived rollouts by step."""
        return sorted((self.folder / "buffers").glob(archive.FILES))

    @property
    def num_held_out(self) -> int | None:
        """Number of problems that ``eval/accuracy`` is the mean of; None if unknown."""
        try:
            return int(self.starts[-1]["data"]["held_out"][0]["prompts"])
        except (LookupError, TypeError, ValueError):  # none, or somebody edited the file
            return None


def is_evaluated(record: Record) -> bool:
    """Whether the step of this record has an evaluation."""
    return any(key.startswith("eval/") for key in record)


def read_runs(folders: list[Path]) -> list[RunRecord]:
    """The runs, each with a unique label."""
    real = [folder.resolve() for folder in folders]
    for folder in folders:
        if real.count(folder.resolve()) > 1:
            raise DataError(f"{folder} is named twice; name each run once")
    names = [folder.name for folder in real]
    return [
        read_run(folder, path.name if names.count(path.name) == 1 else str(folder))
        for folder, path in zip(folders, real, strict=True)
    ]


def read_run(folder: Path, label: str) -> RunRecord:
    """The run in ``folder``; raises as ``read_runs``."""
    if not folder.is_dir():
        raise DataError(run_folder.no_run(folder))
    for name in ("metrics.jsonl", "resolved_config.yaml"):
        if not (folder / name).is_file():
            raise DataError(
                f"{folder} is not a training run: it has no {name}; name a run's folder, "
                "such as runs/quickstart"
            )
    config = run_folder.read_config(folder)
    try:
        records = metrics.read(folder)
    except OSError as error:
        raise DataError(f"{folder}/metrics.jsonl cannot be read ({error.strerror})") from error
    notices: list[str] = []
    summary = _object(folder / "summary.json", notices)
    if summary is not None and (not records or summary.get("steps") != records[-1]["step"]):
        summary = None  # of an earlier end; the run was resumed since
    environment = _object(folder / "environment.json", notices)
    starts = [] if environment is None else environment.get("starts")
    if not isinstance(starts, list) or not all(
        isinstance(start, dict) and start.keys() >= _OF_A_START for start in starts
    ):
        starts = []
        notices.append("environment.json is damaged at starts and was passed over")
    return RunRecord(label, folder, config, records, summary, starts, notices)


_OF_A_START = {"step", "time", "reason_llm", "packages", "machine", "data", "plan"}
"""Keys of a start that the page shows."""


def _object(path: Path, notices: list[str]) -> dict[str, Any] | None:
    """The JSON object in ``path``; None, with a notice unless it is not there."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notices.append(f"{path.name} cannot be read and was passed over: {one_line(error)}")
        return None
