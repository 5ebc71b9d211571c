"""Process of one tracker: ``python -m reason_llm.app.tracker_process NAME RUN_FOLDER RUN_ID``.

It follows ``metrics.jsonl`` until its standard input ends, which is when the run does, and gives
each record to the tracker once, also when the run was killed and goes on: each tracker says itself
up to which step it has them. It prints how the tracker is opened, and why it cannot be used.
"""

import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import orjson
import yaml

from reason_llm.app.trackers import OPENS
from reason_llm.config import yaml_text
from reason_llm.errors import BusyError, one_line, printable, tree_without_secrets, without_secrets
from reason_llm.files import FileLock, open_regular, read_text
from reason_llm.run import metrics

POLL_SECONDS = 1.0
GRACE_SECONDS = 9.0
"""From the run's end to this process's, whatever hangs; less than the run waits for it."""
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
    """Event files in ``<run>/tensorboard``, written again from the records by each process.

    So they hold what metrics.jsonl holds. Wall times are the run's own seconds, and the first
    records of a process end now.
    """

    def __init__(self, run_folder: Path, run_id: str, config: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        folder = run_folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.opens = f"tensorboard --logdir {shlex.quote(str(folder))}"
        self.last_step = -1
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=5)
        self._now = time.time() - sum(
            float(record.get("time/total_seconds") or 0) for record in metrics.read_all(run_folder)
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

    Offline, one folder holds the whole run: it is written again from the records by each process.
    """

    def __init__(self, run_folder: Path, run_id: str, config: dict[str, Any]) -> None:
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
            id=run_id,
            name=run_folder.name,
            dir=str(run_folder),
            config=config,
            resume="allow",
            settings=settings,
        )
        self.last_step = int(self._run.step) - 1  # online, the server knows
        self.opens = str(self._run.url)
        if self._run.offline:
            synced = Path(self._run.settings.sync_dir)
            self.opens = f"wandb sync {shlex.quote(str(run_folder / 'wandb' / synced.name))}"
            self._remove_earlier(run_folder, run_id)

    def write(self, step: int, values: Values) -> None:
        """See ``Tracker.write``."""
        self._run.log(values, step=step, commit=True)  # not with the next one

    def close(self) -> None:
        """See ``Tracker.close``."""
        self._run.finish()

    def _remove_earlier(self, run_folder: Path, run_id: str) -> None:
        own = Path(self._run.settings.sync_dir).name
        for folder in run_folder.glob(f"wandb/offline-run-*-{run_id}"):
            if folder.name != own:
                shutil.rmtree(folder)


class Trackio:
    """trackio, in its own folder on this machine, or where its environment variables say."""

    def __init__(self, run_folder: Path, run_id: str, config: dict[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=project_of(config),
            name=f"{run_folder.name}-{run_id}",
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


TRACKERS: dict[str, Callable[[Path, str, dict[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def follow(tracker: Tracker, tail: "Tail", ended: threading.Event) -> None:
    """Give the tracker every record once, until the run and its file have ended."""
    while True:
        is_last = ended.is_set()  # asked first, so that nothing is written after the last look
        for record in tail.read():
            if (step := record.pop("step")) > tracker.last_step:
                tracker.write(step, tree_without_secrets(_numbers(record)))
                tracker.last_step = step
        if is_last:
            return
        ended.wait(POLL_SECONDS)


class Tail:
    """New records of a run, from the first that is kept, also when a full file gives way to the
    next."""

    def __init__(self, run_folder: Path) -> None:
        self._path, self._older = metrics.files(run_folder)
        self._file = open_regular(self._older if self._older.exists() else self._path)
        self._rest = b""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self) -> Iterator[dict[str, Any]]:
        """Records since the last call."""
        while True:
            # Asked first: a file that is the older one by now grows no more.
            is_older = self._is_older()
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            yield from map(orjson.loads, lines)
            if not is_older or not self._path.exists():
                return
            self._file.close()
            self._file, self._rest = open_regular(self._path), b""

    def _is_older(self) -> bool:
        """Whether the file is the older one, by its inode: False when another run has taken the
        folder."""
        try:
            return os.path.samestat(self._older.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _numbers(record: dict[str, Any]) -> Values:
    return {
        key: value
        for key, value in record.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def main() -> int:
    """Follow a run; 1 and a line on standard output if the tracker cannot be used."""
    name, folder, run_id = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    said = os.fdopen(os.dup(1), "w", errors="replace")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # the libraries' own words
    os.dup2(nothing, 2)
    os.nice(10)
    ended = threading.Event()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    try:
        # The tail first: now, and not another run's in the same place.
        with closing(Tail(folder)) as tail, _alone(folder / f".{name}.lock"):
            config = yaml_text.parse(read_text(folder / "resolved_config.yaml"))
            config = tree_without_secrets(config)
            tracker = TRACKERS[name](folder, run_id, config)
            with suppress(OSError):  # the run was killed meanwhile, and its records are there
                said.write(f"{OPENS}{one_line_of(tracker.opens)}\n")
                said.flush()
            follow(tracker, tail, ended)
            tracker.close()
    except Exception as error:  # noqa: BLE001  anything of a library's is one line to the run
        problem = f"{type(error).__name__}: {one_line(error)}"
        said.write(without_secrets(printable(problem))[:500])
        said.flush()
        return 1
    return 0


def one_line_of(text: str) -> str:
    """A text as one printable line without secrets."""
    return without_secrets(printable(text))[:500]


def _await_end(ended: threading.Event) -> None:
    sys.stdin.buffer.read()
    ended.set()
    time.sleep(GRACE_SECONDS)
    os._exit(3)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that the process of a killed run may still hold for a while."""
    deadline = time.monotonic() + 2 * GRACE_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(FileLock(path, what=str(path)))
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield


if __name__ == "__main__":
    sys.exit(main())
