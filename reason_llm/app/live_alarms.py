"""Alarms during a run: the report's checks on the records so far."""

from reason_llm.app.report import raised
from reason_llm.app.report.alarms import judge
from reason_llm.app.report.evidence import Finding
from reason_llm.app.report.payload import evidence
from reason_llm.app.report.raised import Raised
from reason_llm.app.report.runs import RunRecord, is_evaluated
from reason_llm.run import Record

MOST_RECORDS = 500
"""Number of newest records that the checks of each step read, in addition to those with an
    evaluation."""


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

    def take(self, record: Record) -> list[tuple[str, Finding]]:
        """Titles and findings of the alarms that this record newly raises."""
        if self._raised is None:  # alarms of before the interruption that still hold
            lasting = judge(evidence(self._run, []), "alarm") if self._history else {}
            self._raised = {each.title for each in self._history} & {*lasting}
        records = [*self._run.records, record]
        if len(records) > 2 * MOST_RECORDS:
            old = records[:-MOST_RECORDS]
            records = [*filter(is_evaluated, old), *records[-MOST_RECORDS:]]
        self._run.records[:] = records
        findings = judge(evidence(self._run, []), "alarm")
        new = [(title, each) for title, each in findings.items() if title not in self._raised]
        self._raised = {*findings}
        step = int(record["step"])
        self._history += [
            Raised(step, title, each.text, each.advice, each.charts, each.steps)
            for title, each in new
        ]
        if new or not self._is_written:
            raised.write(self._run.folder, self._history)
            self._is_written = True
        return new
