"""A training run with console, trackers, curves and report."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from reason_llm.app import lines, trackers
from reason_llm.app.live_alarms import LiveAlarms
from reason_llm.app.report import curves
from reason_llm.app.report.evidence import Finding
from reason_llm.app.report.page import write_report
from reason_llm.app.report.runs import read_run
from reason_llm.app.trackers import Trackers
from reason_llm.config import Config
from reason_llm.errors import Stopped, one_line
from reason_llm.files import write_atomically
from reason_llm.loop import train
from reason_llm.rollout import Group
from reason_llm.run import Begun, Progress, Record, Watch
from reason_llm.run.store import metrics

logger = logging.getLogger(__name__)


def run_training(config: Config, shown: Watch) -> dict[str, Any]:
    """Run ``loop.train`` as the command line does, and return its summary; ``shown`` is the
    console, or what takes its place."""
    trackers.check_installed(config.log.trackers)
    with Trackers(config.log.trackers) as followers:
        watch = _WatchAndTrackers(shown, followers, config.log.rollouts)
        folder = config.run.directory / str(config.run.name)
        try:
            summary = train(config, watch)
        except Stopped:
            if line := lines.of_stopped(folder):
                shown.line(line)
            raise
        pages = [folder / "curves.png", folder / "report.html"]
        if watch.has_begun or not all(page.exists() for page in pages):
            sources = " + ".join(source.source for source in config.data.sources)
            title = f"{config.run.name}: {config.method.name} on {sources}"
            records = metrics.read(folder)
            picture = curves.draw_curves(records, title, config.score.judged_by)
            write_atomically(folder / "curves.png", picture)
            for line in lines.of_summary(summary):
                shown.line(line)
            write_report_of(folder, shown)
    return summary


class _WatchAndTrackers(Watch):
    """A watch and the trackers as one watch."""

    def __init__(self, shown: Watch, followers: Trackers, with_rollouts: bool) -> None:
        self._shown = shown
        self._followers = followers
        self._with_rollouts = with_rollouts
        self.has_begun = False
        self._alarms: LiveAlarms | None = None

    def line(self, text: str) -> None:
        self._shown.line(text)

    @contextmanager
    def run(self, begun: Begun) -> Iterator[None]:
        self.has_begun = True
        self._followers.start(begun)
        self._alarms = LiveAlarms(read_run(begun.folder, begun.name))
        with self._shown.run(begun):
            yield

    def phase(self, name: str, total: int) -> AbstractContextManager[Progress]:
        return self._shown.phase(name, total)

    def step(self, record: Record, group: Group | None) -> None:
        self._shown.step(record, group)
        self._followers.write(record, group if self._with_rollouts else None)
        raised: list[tuple[str, Finding]] = []
        try:
            if self._alarms is not None:
                raised = self._alarms.take(record)
        except Exception as error:  # noqa: BLE001  (nothing wrong with an alarm may fail the run)
            logger.warning("no more alarms: %s: %s", type(error).__name__, one_line(error))
            self._alarms = None
        for title, finding in raised:
            told = (record["step"], title, finding.text, finding.advice)
            logger.warning("alarm at step %d: %s. %s %s", *told)
            self._followers.alert(int(record["step"]), title, f"{finding.text} {finding.advice}")


def write_report_of(folder: Path, shown: Watch) -> None:
    """Write the report.html of a run. Nothing wrong with it may fail the run."""
    try:
        alarms = "; ".join(write_report([folder], folder / "report.html"))
    except Exception as error:  # noqa: BLE001
        logger.warning("no report was written: %s: %s", type(error).__name__, one_line(error))
    else:
        shown.line(f"report in {folder / 'report.html'}, {alarms}")
