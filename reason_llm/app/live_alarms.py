"""Alarms of a run while it runs: the report's checks, on the records so far."""

from reason_llm.app.report import raised
from reason_llm.app.report.alarms import judge
from reason_llm.app.report.evidence import Finding
from reason_llm.app.report.payload import evidence
from reason_llm.app.report.raised import Raised
from reason_llm.app.report.runs import Run
from reason_llm.run import Record

MOST_RECORDS = 500
"""Looked at in each step, beside those with an evaluation."""


class LiveAlarms:
    """Alarms that were raised so far; ``alarms.jsonl`` keeps them beyond their end.

    Args:
        run: as its folder was when it began or went on.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._raised: set[str] = set()
        step = run.records[-1]["step"] if run.records else -1
        before = raised.read(run.folder)
        self._history = [each for each in before if each.step <= step]
        self._is_written = self._history == before

    def take(self, record: Record) -> list[tuple[str, Finding]]:
        """Titles and findings of the alarms that this record raises, without those that were raised
        before and did not end."""
        records = [*self._run.records, record]
        if len(records) > 2 * MOST_RECORDS:
            old = records[:-MOST_RECORDS]
            records = [each for each in old if "eval/accuracy" in each] + records[-MOST_RECORDS:]
        self._run.records[:] = records
        findings = judge(evidence(self._run, []))
        now = {title for title, each in findings.items() if each.state == "alarm"}
        new = [(title, findings[title]) for title in findings if title in now - self._raised]
        self._raised = now
        step = int(record["step"])
        self._history += [
            Raised(step, title, each.text, each.advice, each.charts, each.steps)
            for title, each in new
        ]
        if new or not self._is_written:
            raised.write(self._run.folder, self._history)
            self._is_written = True
        return new
