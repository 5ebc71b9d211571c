"""A training run with console, trackers, curves and report."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from reason_llm.app import lines, trackers
from reason_llm.app.report import curves, raised
from reason_llm.app.report.alarms import judge
from reason_llm.app.report.page import write_report
from reason_llm.app.report.payload import evidence
from reason_llm.app.report.raised import Raised
from reason_llm.app.report.runs import RunRecord, is_evaluated, read_run
from reason_llm.app.trackers import Trackers
from reason_llm.config import Config
from reason_llm.errors import Stopped, one_line
from reason_llm.files import write_atomically
from reason_llm.loop import train
from reason_llm.rollout import Group
from reason_llm.run import Begun, Progress, Record, Watch
from reason_llm.run.store import metrics

logger = logging.getLogger(__name__)
MOST_RECORDS = 500
"""Number of newest records that the checks of each step read, with all those of evaluations."""


def run_training(config: Config, shown: Watch) -> dict[str, Any]:
    """Run ``loop.train`` as the command line does, shown by a console, and return its summary."""
    trackers.check_installed(config.log.trackers)
    trackers.check_login(config.log.trackers)
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
        new: list[Raised] = []
        try:
            if self._alarms is not None:
                new = self._alarms.take(record)
        except Exception as error:  # noqa: BLE001  (nothing wrong with an alarm may fail the run)
            logger.warning("no more alarms: %s: %s", type(error).__name__, one_line(error))
            self._alarms = None
        for each in new:
            told = f"{each.text} {each.advice}"
            logger.warning("alarm at step %d: %s. %s", each.step, each.title, told)
            self._followers.alert(each.step, each.title, told)


def write_report_of(folder: Path, shown: Watch) -> None:
    """Write the report.html of a run. Nothing wrong with it may fail the run."""
    try:
        alarms = "; ".join(write_report([folder], folder / "report.html"))
    except Exception as error:  # noqa: BLE001
        logger.warning("no report was written: %s: %s", type(error).__name__, one_line(error))
    else:
        shown.line(f"report in {folder / 'report.html'}, {alarms}")


class LiveAlarms:
    """Alarms that were raised so far in a run, as its folder was when it began or went on;
    ``alarms.jsonl`` keeps them beyond their end."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        step = run.records[-1]["step"] if run.records else -1
        before = raised.read(run.folder)
        self._history = [each for each in before if each.step <= step]
        self._is_written = self._history == before
        self._raised: set[str] | None = None

    def take(self, record: Record) -> list[Raised]:
        """The alarms that this record newly raises."""
        if self._raised is None:  # alarms of before the interruption that still hold
            lasting = judge(evidence(self._run, []), "alarm") if self._history else {}
            self._raised = {each.title for each in self._history} & {*lasting}
        records = [*self._run.records, record]
        if len(records) > 2 * MOST_RECORDS:
            old = records[:-MOST_RECORDS]
            records = [*filter(is_evaluated, old), *records[-MOST_RECORDS:]]
        self._run.records[:] = records
        findings = judge(evidence(self._run, []), "alarm")
        new = [
            Raised(int(record["step"]), title, each.text, each.advice, each.charts, each.steps)
            for title, each in findings.items()
            if title not in self._raised
        ]
        self._raised = {*findings}
        self._history += new
        if new or not self._is_written:
            raised.write(self._run.folder, self._history)
            self._is_written = True
        return new
