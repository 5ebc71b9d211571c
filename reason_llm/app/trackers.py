"""Trackers beside a run (TensorBoard, Weights & Biases, trackio), each in a thread of its own.

metrics.jsonl is the truth: the run writes its records there as ever, and a tracker gets a copy of
each, once, also when a killed run goes on: it says itself up to which step it has them. A tracker
that raises, or hangs for longer than ``LIMIT_SECONDS``, is dropped with one warning.
"""

import importlib.util
import logging
import math
import os
import queue
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import yaml

from reason_llm.config import yaml_text
from reason_llm.errors import (
    ConfigError,
    one_line,
    printable,
    tree_without_secrets,
    without_secrets,
)
from reason_llm.files import read_text
from reason_llm.run import Begun, Record

LIMIT_SECONDS = 60.0
"""What one call of a tracker may take; and all trackers together after the run's end."""
POLL_SECONDS = 0.05
MOST_CHARACTERS = 500
"""Of a tracker's words that are shown."""
logger = logging.getLogger(__name__)
T = TypeVar("T")


def check_installed(names: Sequence[str]) -> None:
    """Check that the package of each tracker is installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.trackers={name}: {name} is not installed; pip install -e '.[trackers]', or "
                "leave it out"
            )


class Trackers:
    """The trackers of a run, from ``start`` to the end of the ``with`` block.

    Args:
        names: of ``log.trackers``.
        clock: seconds, by which a tracker that hangs is known.
    """

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._names, self._clock = names, clock
        self._threads: list[_Thread] = []

    def start(self, begun: Begun) -> None:
        """Open the trackers and give them the records of before."""
        for name in self._names:
            thread = _Thread(name, begun, self._clock)
            self._threads.append(thread)
            thread.start()

    def write(self, record: Record) -> None:
        """Hand a record to each tracker; nothing waits for it."""
        for thread in self._threads:
            thread.check()
            thread.records.put(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the trackers write the rest, all together within ``LIMIT_SECONDS``."""
        for thread in self._threads:
            thread.records.put(None)
        ended = self._clock()
        for thread in self._threads:
            while not thread.has_ended.wait(POLL_SECONDS):
                thread.check()
                if self._clock() - ended > LIMIT_SECONDS:
                    thread.drop(f"it was not done {LIMIT_SECONDS:g} s after the run")


class _Thread(threading.Thread):
    """One tracker: it is opened, written to and closed here, one call at a time. A daemon, so that
    the process ends whatever a call does."""

    def __init__(self, name: str, begun: Begun, clock: Callable[[], float]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        """None ends them."""
        self.has_ended = threading.Event()
        """Nobody waits for it any more."""
        self._tracker_name, self._begun, self._clock = name, begun, clock
        self._lock = threading.Lock()
        self._called: float | None = None
        for record in begun.records:
            self.records.put(record)

    def run(self) -> None:
        """Do the tracker's work; whatever a library raises ends this thread alone."""
        try:
            self._work()
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self.drop(f"{type(error).__name__}: {one_line(error)}")
        self.has_ended.set()

    def check(self) -> None:
        """Drop the tracker if its call has taken too long."""
        called = self._called
        if called is not None and self._clock() - called > LIMIT_SECONDS:
            self.drop(f"a call took longer than {LIMIT_SECONDS:g} s")

    def drop(self, problem: str) -> None:
        """Give the tracker up, with one warning."""
        with self._lock:
            if self.has_ended.is_set():
                return
            logger.warning(
                "the tracker %s stopped (%s); the run goes on, and metrics.jsonl has every record",
                *(self._tracker_name, _one_line_of(problem)),
            )
            self.has_ended.set()  # after the warning: whoever waited may end the process

    def _work(self) -> None:
        tracker = self._call(self._open)
        logger.info("%s: %s", self._tracker_name, _one_line_of(tracker.opens))
        while (record := self.records.get()) is not None and not self.has_ended.is_set():
            if (step := int(record["step"])) > tracker.last_step:
                values = tree_without_secrets(_numbers(record))
                self._call(lambda: tracker.write(step, values))  # noqa: B023  called at once
                tracker.last_step = step
        if not self.has_ended.is_set():
            self._call(tracker.close)

    def _open(self) -> "Tracker":
        text = read_text(self._begun.folder / "resolved_config.yaml")
        config = tree_without_secrets(yaml_text.parse(text))
        return TRACKERS[self._tracker_name](self._begun, config)

    def _call(self, function: Callable[[], T]) -> T:
        self._called = self._clock()
        try:
            return function()
        finally:
            self._called = None


def _one_line_of(text: str) -> str:
    return without_secrets(printable(text))[:MOST_CHARACTERS]


def _numbers(record: Record) -> "Values":
    return {
        key: value
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


PROJECT = "reason_llm"

Values = dict[str, float]


def project_of(config: dict[str, Any], otherwise: str | None = None) -> str:
    """``log.project`` of a run's config, or else ``otherwise``, or else reason_llm."""
    section = config.get("log")
    project = section.get("project") if isinstance(section, dict) else None
    return str(project) if project else otherwise or PROJECT


class Tracker(Protocol):
    """A destination of records."""

    opens: str
    """How the user looks at them: a command or an address."""

    last_step: int
    """Of the last record that is there already; -1 for none."""

    def write(self, step: int, values: Values) -> None:
        """Add a record."""
        ...

    def close(self) -> None:
        """Write what is buffered."""
        ...


class TensorBoard:
    """Event files in ``<run>/tensorboard``, written again from the records at each start.

    So they hold what metrics.jsonl holds. Wall times are the run's own seconds: the records of
    before end now.
    """

    def __init__(self, begun: Begun, config: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        folder = begun.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.opens = f"tensorboard --logdir {shlex.quote(str(folder))}"
        self.last_step = -1
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=5)
        self._now = time.time() - sum(
            float(record.get("time/total_seconds") or 0) for record in begun.records
        )
        # A TensorBoard that shows the old files forgets their steps.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=self._now, step=0, session_log=start))
        text = "    " + yaml.safe_dump(config, sort_keys=False).replace("\n", "\n    ")
        shown = Summary.Value(
            tag="config",
            tensor=make_tensor_proto([text]),
            metadata=create_summary_metadata(display_name="config", description=""),
        )
        summary = Summary(value=[shown])
        self._writer.add_event(Event(wall_time=self._now, step=0, summary=summary))

    def write(self, step: int, values: Values) -> None:
        """Write one event with all values, whole or not at all."""
        self._now += values.get("time/total_seconds", 0.0)
        scalars = [self._summary.Value(tag=key, simple_value=v) for key, v in values.items()]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(wall_time=self._now, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """See ``Tracker.close``."""
        self._writer.close()


class Wandb:
    """Weights & Biases, online or (``WANDB_MODE=offline``) in ``<run>/wandb``.

    Offline, one folder holds the whole run: it is written again from the records at each start.
    """

    def __init__(self, begun: Begun, config: dict[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=project_of(config, os.environ.get("WANDB_PROJECT")),
            id=begun.id,
            name=begun.folder.name,
            dir=str(begun.folder),
            config=config,
            resume="allow",
            settings=settings,
        )
        self.last_step = int(self._run.step) - 1  # online, the server knows
        self.opens = str(self._run.url)
        if self._run.offline:
            synced = Path(self._run.settings.sync_dir)
            self.opens = f"wandb sync {shlex.quote(str(begun.folder / 'wandb' / synced.name))}"
            self._remove_earlier(begun)

    def write(self, step: int, values: Values) -> None:
        """See ``Tracker.write``."""
        self._run.log(values, step=step, commit=True)  # not with the next one

    def close(self) -> None:
        """See ``Tracker.close``."""
        self._run.finish()

    def _remove_earlier(self, begun: Begun) -> None:
        own = Path(self._run.settings.sync_dir).name
        for folder in begun.folder.glob(f"wandb/offline-run-*-{begun.id}"):
            if folder.name != own:
                shutil.rmtree(folder)


class Trackio:
    """trackio, in its own folder on this machine, or where its environment variables say."""

    def __init__(self, begun: Begun, config: dict[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=project_of(config),
            name=f"{begun.folder.name}-{begun.id}",
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.opens = f"trackio show --project {shlex.quote(project_of(config))}"
        self.last_step = int(self._run._next_step) - 1  # there is no public way to ask for it

    def write(self, step: int, values: Values) -> None:
        """See ``Tracker.write``."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """See ``Tracker.close``."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Begun, dict[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
