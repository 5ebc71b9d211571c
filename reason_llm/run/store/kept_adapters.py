"""The adapters, or whole models, that a run keeps in folders of its own, by the rows of
``store.folder.KEPT``.

The weights of one that is taken on the way, such as the best one, are in every checkpoint
(``best.adapter_model.safetensors``), so that a run that goes on from any of them has it again.
Another one is a row there, and here the moments at which it is taken.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from reason_llm.config import Config
from reason_llm.data import Conditioning
from reason_llm.errors import NotAsWritten
from reason_llm.files import (
    MANIFEST,
    MIB,
    check_digests,
    compare,
    read_object,
    regular,
    replacing_folder,
    sealed,
)
from reason_llm.model import Model, adapters, score_head, weights
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.folder import KEPT, KeptAdapter, Which
from reason_llm.run.store.metrics import MetricsLog, Record
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.train import optim

SCALE = "reward.json"
"""File beside a reward model's adapter."""
END_TOKEN = "end_token"
"""Where the score of our reward models is read: at the end token."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moment:
    """When an adapter was taken, and why."""

    step: int
    told: str
    """A sentence for its README."""
    record: dict[str, Any]
    """What the file beside it holds: its step and more."""


def _best(config: Config, state: RunState) -> Moment | None:
    if state.best is None or not config.run.keep_best:
        return None
    record = {key: value for key, value in asdict(state.best).items() if key != "evaluations_since"}
    return Moment(state.best.step, f"Its evaluation was the best: {state.best}.", record)


MOMENTS: dict[Which, Callable[[Config, RunState], Moment | None]] = {"best": _best}
"""When each adapter of the source checkpoint was last taken, by the run's state; None: never."""


def moments(config: Config, state: RunState) -> dict[Which, Moment]:
    """The kept adapters that the run has so far."""
    found = {which: moment(config, state) for which, moment in MOMENTS.items()}
    return {which: moment for which, moment in found.items() if moment is not None}


@dataclass(slots=True)
class KeptAdapters:
    """Writer of the kept adapters of one run."""

    config: Config
    run: Path
    """The run's folder."""
    conditioning: Conditioning | None
    """How scores are written into prompts."""
    digests: tuple[str, str]
    """Digests of the base's config and of the prompts' form."""
    model: Model
    optimizer: torch.optim.Optimizer
    """The policy's optimizer."""
    log: MetricsLog
    writer: BackgroundWriter
    files: dict[Which, dict[str, Mapping[str, Tensor] | Path]] = field(default_factory=dict)
    """Of each in the next checkpoint: tensors until one holds them, then its files; none: it is not
    kept."""

    @property
    def beside(self) -> dict[str, Mapping[str, Tensor] | Path]:
        """All files in the next checkpoint, by name."""
        return {name: source for files in self.files.values() for name, source in files.items()}

    def restore(self, state: RunState) -> RunState:
        """Bring the folders to the state that the checkpoint names."""
        if (checkpoint := state.folder) is None:
            return state
        for which, moment in moments(self.config, state).items():
            self.files[which] = {file.name: file for file in checkpoint.glob(f"{which}.*")}
            if not self.files[which]:
                logger.warning(
                    "%s/ of step %d was not kept (%s): the next one is",
                    self._folder_of(KEPT[which]).name, moment.step, moment.told,
                )  # fmt: skip
                state = replace(state, best=None) if which == "best" else state
                continue
            try:
                _check(self._folder_of(KEPT[which]), which, checkpoint, moment)
            except (OSError, ValueError):
                self._submit(which, checkpoint, moment)
        return state

    def take(self, state: RunState) -> None:
        """Take the adapters that are due at this moment."""
        for which, moment in moments(self.config, state).items():
            if moment.step == state.step and self.config.learns:
                tensors = self.model.adapter_of("policy")
                self.files[which] = {f"{which}.{self.model.weights_file}": tensors}
                if (head := self.model.heads.get("policy")) is not None:
                    self.files[which][f"{which}.{score_head.FILE}"] = score_head.state(head)

    def saved(self, state: RunState) -> None:
        """A checkpoint is on its way to disk: after it, write the folders of what is new in it."""
        assert state.folder is not None
        for which, moment in moments(self.config, state).items():
            files = self.files.get(which, {})
            self.files[which] = {name: state.folder / name for name in files}
            if any(not isinstance(source, Path) for source in files.values()):
                self._submit(which, state.folder, moment)

    def finish(self, step: int, judge: Callable[[], Record]) -> None:
        """Write the last adapter, and the average where there is one.

        Args:
            judge: measures the model on the held-out rows.
        """
        for kept in KEPT.values():
            if kept.source == "policy":
                self._write_end(kept, step, self._records(step))
            elif kept.source == "average" and optim.averaged_steps(self.optimizer):
                told = f"An exponential moving average (train.ema={self.config.train.ema})."
                with optim.averaged(self.optimizer):
                    records = [judge()] if self.config.of_stage.scores else []
                    self._write_end(kept, step, records, told)

    def _folder_of(self, kept: KeptAdapter) -> Path:
        return self.run / kept.name(self.config.model.train)

    def _write_end(
        self, kept: KeptAdapter, step: int, records: Sequence[Record], told: str = ""
    ) -> None:
        """Write the model's current adapter."""
        with replacing_folder(self._folder_of(kept)) as folder:
            self.model.snapshot().write(folder)
            if (head := self.model.heads.get("policy")) is not None:
                score_head.save(score_head.state(head), folder)
            self._describe(folder, step, records, told)

    def _submit(self, which: Which, checkpoint: Path, moment: Moment) -> None:
        """Write a folder from a checkpoint, after the checkpoint is on disk."""
        records, names = self._records(moment.step), list(self.files[which])
        self.writer.submit(lambda: self.write(which, checkpoint, names, moment, records))

    def write(
        self,
        which: Which,
        checkpoint: Path,
        names: Sequence[str],
        moment: Moment,
        records: Sequence[Record],
    ) -> None:
        """Make a folder from these files of a checkpoint, whole or not at all.

        Raises:
            WriteError: the disk is full or read-only; the old folder is as it was.
        """
        kept = KEPT[which]
        with replacing_folder(self._folder_of(kept)) as folder:
            if self.model.is_full:
                weights.copy_beside(str(checkpoint), folder)
            config = "config.json" if self.model.is_full else adapters.CONFIG
            shutil.copyfile(regular(checkpoint / config), folder / config)
            for name in names:
                shutil.copyfile(regular(checkpoint / name), folder / name.removeprefix(f"{which}."))
            self._describe(folder, moment.step, records, moment.told)
            record = orjson.dumps(moment.record, option=orjson.OPT_INDENT_2)
            (folder / str(kept.record)).write_bytes(record)

    def _records(self, step: int) -> list[Record]:
        """The records up to this step, for a reward model's scale."""
        if not self.config.of_stage.scores:
            return []
        return [record for record in self.log.records() if record["step"] <= step]

    def _describe(self, folder: Path, step: int, records: Sequence[Record], told: str) -> None:
        """Write a README that says ``told`` of the adapter, how scores are written into its
        prompts, and a reward model's scale by the last of the records."""
        (folder / "README.md").write_bytes(readme(self.config, step, told))
        if self.conditioning is not None:
            self.conditioning.write(folder)
        if self.config.of_stage.scores:
            (folder / SCALE).write_bytes(describe(records, *self.digests))


def check_written(run: Path, config: Config, state: RunState) -> None:
    """Compare the adapters of a finished run with its newest checkpoint.

    Raises:
        NotAsWritten: one is missing or is another. OSError: one cannot be read.
    """
    assert state.folder is not None
    file = weights.FILES[config.model.train]
    for kept in KEPT.values():
        folder = run / kept.name(config.model.train)
        if kept.source == "checkpoint" or (kept.source == "average" and not folder.is_dir()):
            continue
        noted = check_digests(folder)
        if file not in noted:
            raise NotAsWritten(f"{folder.name}/ or its {MANIFEST} is missing")
        if kept.source == "policy":
            compare(f"{folder.name}/{file}", noted[file], check_digests(state.folder)[file])
    for which, moment in moments(config, state).items():
        if (state.folder / f"{which}.{file}").is_file():
            _check(run / KEPT[which].name(config.model.train), which, state.folder, moment)


def _check(folder: Path, which: Which, checkpoint: Path, moment: Moment) -> None:
    noted, kept = check_digests(folder), KEPT[which]
    for file, digest in check_digests(checkpoint).items():
        if file.startswith(f"{which}."):
            own = file.removeprefix(f"{which}.")
            compare(f"{folder.name}/{own}", noted.get(own, "missing"), digest)
    record = read_object(folder / str(kept.record), MIB)
    if record != moment.record:
        raise NotAsWritten(
            f"{folder.name}/{kept.record} tells of {record!s:.200}, and not of {moment.record}"
        )


def readme(config: Config, step: int, told: str = "") -> bytes:
    """README.md of the adapter after ``step`` steps: what it is and how it is loaded. The card of
    an exported model, with its evaluation, is made by export.

    Args:
        told: a sentence on why it was kept.
    """
    method, run, base = config.method, str(config.run.name), config.model.path
    kind = "LoRA adapter over"
    if config.of_stage.scores:
        kind = "reward model's adapter and head over"
    library, tag = "peft", "lora"
    load = (
        "    from peft import PeftModel\n"
        "    from transformers import AutoModelForCausalLM\n\n"
        f"    base = AutoModelForCausalLM.from_pretrained({base!r})\n"
        "    model = PeftModel.from_pretrained(base, THIS_FOLDER)\n\n"
        "It computes over the base as that was loaded in training. To have one model without an "
        "adapter, with a card that tells its data and its evaluation, export the run.\n"
    )
    if config.model.train == "full":
        kind, library, tag = "model, all of it trained, from", "transformers", "full"
        load = "    model = AutoModelForCausalLM.from_pretrained(THIS_FOLDER)\n"
    text = (
        f"---\nlibrary_name: {library}\ntags: [reason_llm, {tag}]\n---\n\n"
        f"# {run}\n\n"
        f"A {kind} `{base}`, made with reason_llm: {method.name} ({method.idea}), "
        f"after step {step} of {config.run.steps}."
        f"{' ' if told else ''}{told}\n\n{load}"
    )
    return text.encode()


def describe(records: Sequence[Record], base: str, template: str) -> bytes:
    """``reward.json`` of a reward model: what was measured last on its held-out rows, where there
    were any, and digests of what it was trained over.

    Args:
        records: of the run.
        base, template: digests of the base's config and of how prompts are written.
    """
    measured = [record for record in records if "eval/reward_std" in record]
    last = measured[-1] if measured else {}
    names = {"eval/reward_mean": "mean", "eval/reward_std": "std"} | {
        f"eval/{name}": name for name in ("pair_accuracy", "pairs", "length_correlation")
    }
    values: dict[str, Any] = {name: last[key] for key, name in names.items() if key in last}
    values |= {"read_at": END_TOKEN, "base": base, "template": template}
    return sealed(orjson.dumps(values, option=orjson.OPT_INDENT_2))
