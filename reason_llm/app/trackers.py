"""Trackers of a run: TensorBoard, Weights & Biases, trackio.

A tracker gets each record of metrics.jsonl once, also in a resumed run: it knows its last step. It
also gets the alarms and, with ``log.rollouts``, the texts of one group of each step. One
that raises, or takes longer than ``LIMIT_SECONDS`` for a call, is dropped with one warning."""

import contextlib
import importlib.util
import io
import logging
import math
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple, Self, TypeVar

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
from reason_llm.rollout import Group
from reason_llm.run import Begun, Record
from reason_llm.workers import within

LIMIT_SECONDS = 60.0
"""Longest time that one call of a tracker may take."""
MAX_CHARACTERS = 500
MAX_ROLLOUTS = 8
MAX_TEXT_CHARACTERS = 4_000
"""Characters of a prompt and of a completion that are sent."""
COLUMNS = ["step", "prompt", "completion", "reward", "advantage"]
PROJECT = "reason_llm"
VERBATIM = "    "
"""Before each line of a code block in Markdown."""
Values = dict[str, float]
Rows = list[list[Any]]
logger = logging.getLogger(__name__)
T = TypeVar("T")


def check_installed(names: Sequence[str]) -> None:
    """Check that the package of each tracker is installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.trackers={name}: {name} is not installed; "
                f"{installation.install('trackers')}, or leave it out"
            )


def check_login(names: Sequence[str]) -> None:
    """Check, without the network, that wandb finds the key that it needs."""
    if "wandb" not in names:
        return
    import wandb

    try:
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        has_key = settings.mode in ("offline", "disabled") or wandb.login(
            prompt=False, verify=False
        )
        problem = "" if has_key else "no API key is found"
    except Exception as error:  # noqa: BLE001  (a key or a file that is not valid)
        problem = one_line(error).rstrip(".")
    if problem:
        raise ConfigError(
            f"log.trackers=wandb: {without_secrets(problem)}; run wandb login, set WANDB_API_KEY, "
            "set WANDB_MODE=offline to send the run later with wandb sync, or leave wandb out"
        )


class Tracker(NamedTuple):
    """A destination of records."""

    opens: str
    """Command or address that shows them."""
    last_step: int
    """Step of the last record that it has; -1 for none."""
    write: Callable[[int, Values, Rows], object]
    alert: Callable[[int, str, str], object]
    """Called with the step, the title and the text of an alarm."""
    close: Callable[[], object]


class Trackers:
    """The trackers of a run, from ``start`` to the end of the ``with`` block."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._trackers: dict[str, Tracker] = {}

    def start(self, begun: Begun) -> None:
        """Open the trackers and give them the earlier records."""
        text = read_text(begun.folder / "resolved_config.yaml")
        config = tree_without_secrets(yaml_text.parse(text))
        for name in self._names:
            tracker = self._call(name, partial(TRACKERS[name], begun, config))
            if tracker is not None:
                self._trackers[name] = tracker
                logger.info("%s: %s", name, _shown(tracker.opens))
        for record in begun.records:
            self.write(record)

    def write(self, record: Record, group: Group | None = None) -> None:
        """Give a record, and the rollouts of ``group``, to each tracker that does not have them."""
        step = int(record["step"])
        rows = [] if group is None else _rows(step, group)
        values = {
            without_secrets(key): value
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        for name, tracker in list(self._trackers.items()):
            if step > tracker.last_step:
                self._call(name, partial(tracker.write, step, values, rows))

    def alert(self, step: int, title: str, text: str) -> None:
        """Give an alarm to each tracker."""
        for name, tracker in list(self._trackers.items()):
            self._call(name, partial(tracker.alert, step, title, without_secrets(text)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name, tracker in list(self._trackers.items()):
            self._call(name, tracker.close)

    def _call(self, name: str, call: Callable[[], T]) -> T | None:
        """Result of the call; a tracker that fails or hangs is dropped."""
        try:
            return within(LIMIT_SECONDS, "a call", call)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever a library raises)
            self._trackers.pop(name, None)
            problem = _shown(f"{type(error).__name__}: {one_line(error)}")
            logger.warning(
                "the tracker %s stopped (%s); the run continues, and metrics.jsonl has every "
                "record",
                *(name, problem),
            )
            return None


def _rows(step: int, group: Group) -> Rows:
    prompt = without_secrets(group.prompt.text[-MAX_TEXT_CHARACTERS:])
    return [
        [step, prompt, without_secrets(c.text[:MAX_TEXT_CHARACTERS]), c.reward, c.advantage]
        for c in group.completions[:MAX_ROLLOUTS]
    ]


def _shown(text: str) -> str:
    return without_secrets(printable(text))[:MAX_CHARACTERS]


def _tensorboard(begun: Begun, config: dict[str, Any]) -> Tracker:
    """Event files in ``<run>/tensorboard``, rewritten from the records at each start."""
    from torch.utils.tensorboard import SummaryWriter

    folder = begun.folder / "tensorboard"
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    # purge_step: an open TensorBoard forgets the steps of the old files.
    writer = SummaryWriter(str(folder), purge_step=0, flush_secs=5)
    writer.add_text("config", indent(yaml.safe_dump(config, sort_keys=False), VERBATIM))

    def write(step: int, values: Values, rows: Rows) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)
        for place, row in enumerate(rows):
            lines = "\n".join(f"{name}: {value}" for name, value in zip(COLUMNS, row, strict=True))
            writer.add_text(f"rollouts/{place}", indent(lines, VERBATIM), step)
        writer.flush()

    def alert(step: int, title: str, text: str) -> None:
        writer.add_text("alarms", f"**{title}**\n\n{text}", step)

    opens = f"tensorboard --logdir {shlex.quote(str(folder))}"
    return Tracker(opens, -1, write, alert, writer.close)


WANDB_SETTINGS = {"console": "off", "silent": True, "init_timeout": 60, "x_service_wait": 60} | {
    **dict.fromkeys(("disable_git", "disable_code", "x_disable_stats", "x_disable_meta"), True),
    "x_save_requirements": False,
}
"""The config, the records, the alarms and, with ``log.rollouts``, texts leave the machine."""


def _wandb(begun: Begun, config: dict[str, Any]) -> Tracker:
    """Weights & Biases, online or, with ``WANDB_MODE=offline``, in ``<run>/wandb``."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=begun.folder.name,
        id=begun.id,
        dir=begun.folder,
        config=config,
        resume="allow",
        settings=WANDB_SETTINGS,
    )
    opens = str(run.url)
    if run.offline:
        # The folder holds the whole run, rewritten from the records at each start.
        folder = Path(run.settings.sync_dir)
        opens = f"wandb sync {shlex.quote(str(begun.folder / 'wandb' / folder.name))}"
        for old in begun.folder.glob(f"wandb/offline-run-*-{begun.id}"):
            if old.name != folder.name:  # the service of a killed run may still write there
                shutil.rmtree(old, ignore_errors=True)

    def alert(step: int, title: str, text: str) -> None:
        run.alert(title[:63], f"Step {step}: {text}", "WARN")

    log = partial(run.log, commit=True)  # now, not with the next record
    return Tracker(opens, run.step - 1, partial(_log, log, wandb.Table), alert, run.finish)


def _trackio(begun: Begun, config: dict[str, Any]) -> Tracker:
    import trackio

    project = os.environ.get("WANDB_PROJECT") or PROJECT
    run = trackio.init(
        project=project,
        name=f"{begun.folder.name}-{begun.id}",
        config=config,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )

    def alert(step: int, title: str, text: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints; the console has the alarm
            run.alert(title, text, step=step)

    last_step = int(run._next_step) - 1  # there is no public name for it
    opens = f"trackio show --project {shlex.quote(project)}"
    return Tracker(opens, last_step, partial(_log, run.log, trackio.Table), alert, run.finish)


def _log(log: Callable[..., object], table: Any, step: int, values: Values, rows: Rows) -> None:
    """Write a record with the form that wandb and trackio share."""
    tables = {"rollouts": table(columns=COLUMNS, data=rows)} if rows else {}
    log(values | tables, step=step)


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
