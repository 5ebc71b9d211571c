"""Trackers beside a run: TensorBoard, Weights & Biases, trackio.

A tracker gets a copy of each record of metrics.jsonl once, also when a killed run goes on, because
it knows up to which step it has them. A tracker that raises, or takes longer than ``LIMIT_SECONDS``
for one call, is dropped with one warning."""

import importlib.util
import logging
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from reason_llm.config import installation, yaml_text
from reason_llm.errors import (
    ConfigError,
    one_line,
    printable,
    tree_without_secrets,
    without_secrets,
)
from reason_llm.files import read_text
from reason_llm.run import Begun, Record
from reason_llm.workers import within

LIMIT_SECONDS = 60.0
"""Longest time that one call of a tracker may take."""
MOST_CHARACTERS = 500
"""Longest part of a tracker's message that is shown."""
PROJECT = "reason_llm"
Values = dict[str, float]
logger = logging.getLogger(__name__)
T = TypeVar("T")


def check_installed(names: Sequence[str]) -> None:
    """Check that the package of each tracker is installed; raises a ConfigError with the command
    that installs it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.trackers={name}: {name} is not installed; "
                f"{installation.install('trackers')}, or leave it out"
            )


@dataclass(slots=True)
class Tracker:
    """A destination of records."""

    opens: str
    """How the user looks at them: a command or an address."""
    last_step: int
    """Step of the last record that the tracker already has; -1 for none."""
    write: Callable[[int, Values], object]
    """Adds a record."""
    close: Callable[[], object]
    """Writes what is buffered."""


class Trackers:
    """The trackers of a run, by their names in ``log.trackers``, from ``start`` to the end of the
    ``with`` block."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._trackers: dict[str, Tracker] = {}

    def start(self, begun: Begun) -> None:
        """Open the trackers and give them the records of before."""
        text = read_text(begun.folder / "resolved_config.yaml")
        config = tree_without_secrets(yaml_text.parse(text))
        for name in self._names:
            tracker = self._call(name, partial(TRACKERS[name], begun, config))
            if tracker is not None:
                self._trackers[name] = tracker
                logger.info("%s: %s", name, _shown(tracker.opens))
        for record in begun.records:
            self.write(record)

    def write(self, record: Record) -> None:
        """Give a record to each tracker that does not have it yet."""
        step = int(record["step"])
        values = {
            without_secrets(key): value
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, tracker in list(self._trackers.items()):
            if step > tracker.last_step:
                self._call(name, partial(tracker.write, step, values))
                tracker.last_step = step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Let the trackers write what they still hold."""
        for name, tracker in list(self._trackers.items()):
            self._call(name, tracker.close)

    def _call(self, name: str, call: Callable[[], T]) -> T | None:
        """Result of the call; a tracker that fails or hangs is dropped."""
        try:
            return within(LIMIT_SECONDS, "a call", call)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever a library raises)
            self._trackers.pop(name, None)
            logger.warning(
                "the tracker %s stopped (%s); the run goes on, and metrics.jsonl has every record",
                *(name, _shown(f"{type(error).__name__}: {one_line(error)}")),
            )
            return None


def _shown(text: str) -> str:
    return without_secrets(printable(text))[:MOST_CHARACTERS]


def project_of(config: dict[str, Any], otherwise: str | None = None) -> str:
    """``log.project`` of a run's config, or else ``otherwise``, or else reason_llm."""
    return str((config.get("log") or {}).get("project") or otherwise or PROJECT)


def _tensorboard(begun: Begun, config: dict[str, Any]) -> Tracker:
    """Event files in ``<run>/tensorboard``, written again from the records at each start, so that
    they hold what metrics.jsonl holds. Wall times are the run's own seconds: the records of before
    end now."""
    from torch.utils.tensorboard import SummaryWriter

    folder = begun.folder / "tensorboard"
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    now = time.time() - sum(float(each.get("time/total_seconds") or 0) for each in begun.records)
    # A TensorBoard that shows the old files forgets their steps.
    writer = SummaryWriter(str(folder), purge_step=0, flush_secs=5)
    text = "    " + yaml.safe_dump(config, sort_keys=False).replace("\n", "\n    ")
    writer.add_text("config", text, walltime=now)

    def write(step: int, values: Values) -> None:
        nonlocal now
        now += values.get("time/total_seconds", 0.0)
        for key, value in values.items():
            writer.add_scalar(key, value, step, walltime=now)
        writer.flush()

    return Tracker(f"tensorboard --logdir {shlex.quote(str(folder))}", -1, write, writer.close)


def _wandb(begun: Begun, config: dict[str, Any]) -> Tracker:
    """Weights & Biases, online or (``WANDB_MODE=offline``) in ``<run>/wandb``. Offline, one folder
    holds the whole run: it is written again from the records at each start."""
    import wandb

    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_save_requirements=False,
        x_service_wait=LIMIT_SECONDS,
        init_timeout=LIMIT_SECONDS,
    )
    run = wandb.init(
        project=project_of(config, os.environ.get("WANDB_PROJECT")),
        id=begun.id,
        name=begun.folder.name,
        dir=str(begun.folder),
        config=config,
        resume="allow",
        settings=settings,
    )
    opens = str(run.url)
    if run.offline:
        synced = Path(run.settings.sync_dir)
        opens = f"wandb sync {shlex.quote(str(begun.folder / 'wandb' / synced.name))}"
        for folder in begun.folder.glob(f"wandb/offline-run-*-{begun.id}"):
            if folder.name != synced.name:
                # The service of a killed run may still write there.
                shutil.rmtree(folder, ignore_errors=True)

    def write(step: int, values: Values) -> None:
        run.log(values, step=step, commit=True)  # not with the next one

    return Tracker(opens, int(run.step) - 1, write, run.finish)  # online, the server knows


def _trackio(begun: Begun, config: dict[str, Any]) -> Tracker:
    """trackio, in its own folder on this machine, or where its environment variables say."""
    import trackio

    run = trackio.init(
        project=project_of(config),
        name=f"{begun.folder.name}-{begun.id}",
        config=config,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    opens = f"trackio show --project {shlex.quote(project_of(config))}"
    last_step = int(run._next_step) - 1  # there is no public way to ask for it
    return Tracker(opens, last_step, lambda step, values: run.log(values, step=step), run.finish)


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
