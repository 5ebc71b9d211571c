"""Trackers of a run: TensorBoard, Weights & Biases, trackio.

A tracker gets each record of metrics.jsonl once, also when a killed run is resumed, because it
knows the last step that it has. One that raises, or takes longer than ``LIMIT_SECONDS`` for a call,
is dropped with one warning."""

import importlib.util
import logging
import math
import os
import shlex
import shutil
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
    """The command or address that shows them."""
    last_step: int
    """Step of the last record that it has; -1 for none."""
    write: Callable[[int, Values], object]
    close: Callable[[], object]


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


def _tensorboard(begun: Begun, config: dict[str, Any]) -> Tracker:
    """Event files in ``<run>/tensorboard``, written again from the records at each start."""
    from torch.utils.tensorboard import SummaryWriter

    folder = begun.folder / "tensorboard"
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    # purge_step: a TensorBoard that shows the old files forgets their steps.
    writer = SummaryWriter(str(folder), purge_step=0, flush_secs=5)
    text = "    " + yaml.safe_dump(config, sort_keys=False).replace("\n", "\n    ")
    writer.add_text("config", text)

    def write(step: int, values: Values) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return Tracker(f"tensorboard --logdir {shlex.quote(str(folder))}", -1, write, writer.close)


WANDB_SETTINGS = {
    "console": "off",
    "silent": True,
    "init_timeout": 60,
    "x_service_wait": 60,
    "disable_git": True,
    "disable_code": True,
    "x_save_requirements": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
}
"""Nothing but the config and the records leaves the machine."""


def _service(name: str, begun: Begun, config: dict[str, Any]) -> Tracker:
    """Weights & Biases, online or (``WANDB_MODE=offline``) in ``<run>/wandb``, or trackio, which
    share one form."""
    is_wandb, folder = name == "wandb", begun.folder
    project = (config.get("log") or {}).get("project")
    project = str(project or (is_wandb and os.environ.get("WANDB_PROJECT")) or PROJECT)
    own: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    if is_wandb:
        own = {"id": begun.id, "dir": str(folder), "settings": WANDB_SETTINGS}
    title = folder.name if is_wandb else f"{folder.name}-{begun.id}"
    if is_wandb:
        import wandb

        init: Any = wandb.init
    else:
        import trackio

        init = trackio.init
    run = init(project=project, name=title, config=config, resume="allow", **own)
    opens = str(run.url) if is_wandb else f"trackio show --project {shlex.quote(project)}"
    if is_wandb and run.offline:
        # The folder holds the whole run, written again from the records at each start.
        now = Path(run.settings.sync_dir).name
        opens = f"wandb sync {shlex.quote(str(folder / 'wandb' / now))}"
        for old in folder.glob(f"wandb/offline-run-*-{begun.id}"):
            if old.name != now:  # the service of a killed run may still write there
                shutil.rmtree(old, ignore_errors=True)
    next_step = run.step if is_wandb else run._next_step  # trackio has no public name for it
    commit = {"commit": True} if is_wandb else {}  # not with the next record

    def write(step: int, values: Values) -> None:
        run.log(values, step=step, **commit)

    return Tracker(opens, int(next_step) - 1, write, run.finish)


TRACKERS: dict[str, Callable[[Begun, dict[str, Any]], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": partial(_service, "wandb"),
    "trackio": partial(_service, "trackio"),
}
