"""Trackers of a run: TensorBoard, Weights & Biases, trackio.

A tracker gets each record of metrics.jsonl once, also in a resumed run, and the alarms; with
``log.rollouts`` also a table of one group of each step. One that fails, or takes longer than
``LIMIT_SECONDS`` for a call, is dropped with a warning.
"""

import importlib.util
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple, Self, TypeVar

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
MAX_ROLLOUTS = 8
MAX_CHARACTERS = 4_000
"""Characters of a prompt and of a completion that are sent."""
COLUMNS = ["step", "prompt", "completion", "reward", "advantage"]
WANDB_SETTINGS = {"console": "off", "silent": True, "x_save_requirements": False} | dict.fromkeys(
    ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta"), True
)
"""Only the config, the records, the alarms and, with ``log.rollouts``, texts leave the machine."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


def check_installed(names: Sequence[str]) -> None:
    """Check that the package of each tracker is installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.trackers={name}: {name} is not installed; "
                f"{installation.install('trackers')}, or leave it out"
            )


def check_login(names: Sequence[str]) -> None:
    """Check, without the network, that wandb has a key; in a terminal, it asks for one."""
    if "wandb" in names:
        import wandb

        try:
            wandb.login(verify=False)
        except Exception as error:
            raise ConfigError(
                f"log.trackers=wandb: {_shown(error).rstrip('.')}; run wandb login, set "
                "WANDB_API_KEY or WANDB_MODE=offline (wandb sync sends the run), or leave it out"
            ) from error


class Tracker(NamedTuple):
    """An open tracker."""

    run: Any
    """It has ``alert`` and ``finish`` as in wandb and trackio."""
    log: Callable[..., object]
    table: Callable[[list[str], list[list[Any]]], object]
    next_step: int
    """First step that it does not have."""

    def write(self, step: int, values: dict[str, Any], rows: list[list[Any]]) -> None:
        """Give it the numbers of a step, and rows of rollouts as a table."""
        tables = {"rollouts": self.table(COLUMNS, rows)} if rows else {}
        self.log(values | tables, step=step)


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
            if (tracker := self._call(name, partial(_open, name, begun, config))) is not None:
                self._trackers[name] = tracker
        for record in begun.records:
            self.write(record)

    def write(self, record: Record, group: Group | None = None) -> None:
        """Give a record, and the rollouts of ``group``, to each tracker that does not have them."""
        step = int(record["step"])
        values: dict[str, Any] = {
            without_secrets(key): value
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        rows = [] if group is None else _rows(step, group)
        for name, tracker in list(self._trackers.items()):
            if step >= tracker.next_step:
                self._call(name, partial(tracker.write, step, values, rows))

    def alert(self, step: int, title: str, text: str) -> None:
        """Give an alarm to each tracker."""
        for name, tracker in list(self._trackers.items()):
            alert = partial(tracker.run.alert, title[:63], f"Step {step}: {without_secrets(text)}")
            with redirect_stdout(StringIO()):  # the console has it
                self._call(name, alert)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name, tracker in list(self._trackers.items()):
            self._call(name, tracker.run.finish)

    def _call(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the call's result; a tracker that fails or hangs is dropped."""
        try:
            return within(LIMIT_SECONDS, "a call", call)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever a library raises)
            self._trackers.pop(name, None)
            logger.warning(
                "the tracker %s stopped (%s: %s); the run continues, and metrics.jsonl has every "
                "record",
                *(name, type(error).__name__, _shown(error)),
            )
            return None


def _rows(step: int, group: Group) -> list[list[Any]]:
    prompt = without_secrets(group.prompt.text[-MAX_CHARACTERS:])
    return [
        [step, prompt, without_secrets(c.text[:MAX_CHARACTERS]), c.reward, c.advantage]
        for c in group.completions[:MAX_ROLLOUTS]
    ]


def _shown(error: BaseException) -> str:
    return without_secrets(printable(one_line(error)))[:500]


def _open(name: str, begun: Begun, config: dict[str, Any]) -> Tracker:
    if name == "tensorboard":
        board = TensorBoard(begun.folder / name)
        return Tracker(board, board.log, lambda columns, rows: rows, 0)
    project = os.environ.get("WANDB_PROJECT") or "reason_llm"
    common: dict[str, Any] = {"project": project, "config": config, "resume": "allow"}
    if name == "wandb":  # offline, the files of this start hold the whole run
        import wandb

        place: dict[str, Any] = {"id": begun.id, "dir": begun.folder, "settings": WANDB_SETTINGS}
        run: Any = wandb.init(name=begun.folder.name, **common, **place)
        opens = f"wandb sync {run.settings.sync_dir}" if run.offline else str(run.url)
        logger.info("wandb: %s", printable(opens))
        log = partial(run.log, commit=True)  # now, not with the next record
        return Tracker(run, log, wandb.Table, run.step)
    import trackio

    own: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(name=f"{begun.folder.name}-{begun.id}", **common, **own)
    return Tracker(run, run.log, trackio.Table, run._next_step)  # there is no public name for it


class TensorBoard:
    """Event files, written anew at each start."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        # purge_step: an open TensorBoard forgets the steps of the old files.
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self.finish = self._writer.close

    def log(self, values: dict[str, Any], step: int) -> None:
        """Write numbers and tables of a step."""
        for key, value in values.items():
            if isinstance(value, list):
                text = "\n\n".join("\n".join(map(str, row)) for row in value)
                self._writer.add_text(key, indent(text, "    "), step)  # as code in Markdown
            else:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def alert(self, title: str, text: str) -> None:
        """Write an alarm."""
        self._writer.add_text(title, text)
