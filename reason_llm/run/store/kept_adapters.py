"""The adapters that a run keeps in folders of its own, by the rows of ``store.folder.KEPT``.

The best one's weights are in every checkpoint (``best.adapter_model.safetensors``), so that a run
that goes on from any of them has its best again.
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
from reason_llm.model import Model, adapters, score_head
from reason_llm.run.store.best import Best
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.folder import BEST, BEST_RECORD, KEPT, KeptAdapter
from reason_llm.run.store.metrics import MetricsLog, Record
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.train import optim

SCALE = "reward.json"
"""File beside a reward model's adapter."""
END_TOKEN = "end_token"
"""Where our reward models are read."""
PREFIX = "best."
"""Of the best adapter's files in a checkpoint."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class KeptAdapters:
    """Writer of the kept adapters of one run."""

    config: Config
    run: Path
    """The run's folder."""
    conditioning: Conditioning | None
    """How scores are written into prompts."""
    digests: tuple[str, str]
    """Of the base's config and of how prompts are written."""
    model: Model
    optimizer: torch.optim.Optimizer
    """The policy's."""
    log: MetricsLog
    writer: BackgroundWriter
    best_files: dict[str, Mapping[str, Tensor] | Path] = field(default_factory=dict)
    """Of the best adapter in the next checkpoint: tensors until one holds them, then its files;
    none: it is not kept."""

    def restore_best(self, state: RunState) -> RunState:
        """Have in ``adapter_best/`` what the checkpoint says is the best adapter."""
        checkpoint = state.folder
        if state.best is None or checkpoint is None or not self.config.run.keep_best:
            return state
        self.best_files = {file.name: file for file in checkpoint.glob(f"{PREFIX}*")}
        if not self.best_files:
            logger.warning(
                "the adapter of the best evaluation so far (%s) was not kept: the best one from "
                "here on is", state.best,
            )  # fmt: skip
            return replace(state, best=None)
        try:
            _check_best(self.run, checkpoint, state.best)
        except (OSError, ValueError):
            self._submit_best(checkpoint, state.best)
        return state

    def take_best(self) -> None:
        """Take the adapter of this moment for the best one."""
        if self.config.run.keep_best:
            self.best_files = {PREFIX + adapters.WEIGHTS: self.model.adapter_of("policy")}
            if (head := self.model.heads.get("policy")) is not None:
                self.best_files[PREFIX + score_head.FILE] = score_head.state(head)

    def saved(self, state: RunState) -> None:
        """A checkpoint is on its way to disk: write ``adapter_best/`` after it, if it is another
        one."""
        assert state.folder is not None
        is_new = any(not isinstance(source, Path) for source in self.best_files.values())
        self.best_files = {name: state.folder / name for name in self.best_files}
        if is_new and state.best is not None:
            self._submit_best(state.folder, state.best)

    def finish(self, step: int, judge: Callable[[], Record]) -> None:
        """Write the last adapter, and the average where there is one.

        Args:
            judge: measures the model on the held-out rows.
        """
        for kept in KEPT.values():
            if kept.source == "policy":
                self._write(kept, step, self._records(step))
            elif kept.source == "average" and optim.averaged_steps(self.optimizer):
                told = f"An exponential moving average (train.ema={self.config.train.ema})."
                with optim.averaged(self.optimizer):
                    records = [judge()] if self.config.of_stage.scores else []
                    self._write(kept, step, records, told)

    def _write(
        self, kept: KeptAdapter, step: int, records: Sequence[Record], told: str = ""
    ) -> None:
        """Write the model's adapter of this moment."""
        with replacing_folder(self.run / kept.folder) as folder:
            adapters.save(self.model.policy, folder)
            if (head := self.model.heads.get("policy")) is not None:
                score_head.save(score_head.state(head), folder)
            self._describe(folder, step, records, told)

    def _submit_best(self, checkpoint: Path, best: Best) -> None:
        """Have ``adapter_best/`` written from a checkpoint, once that is on disk."""
        records = self._records(best.step)
        told = f"Its evaluation was the best: {best}."
        names = list(self.best_files)
        self.writer.submit(lambda: self.write_best(checkpoint, names, best, records, told))

    def write_best(
        self,
        checkpoint: Path,
        names: Sequence[str],
        best: Best,
        records: Sequence[Record],
        told: str,
    ) -> None:
        """Make ``adapter_best/`` from these files of a checkpoint, whole or not at all.

        Raises:
            WriteError: the disk is full or read-only; the old folder is as it was.
        """
        with replacing_folder(self.run / BEST) as folder:
            shutil.copyfile(regular(checkpoint / adapters.CONFIG), folder / adapters.CONFIG)
            for name in names:
                shutil.copyfile(regular(checkpoint / name), folder / name.removeprefix(PREFIX))
            self._describe(folder, best.step, records, told)
            record = orjson.dumps(_told(best), option=orjson.OPT_INDENT_2)
            (folder / BEST_RECORD).write_bytes(record)

    def _records(self, step: int) -> list[Record]:
        """The records up to this step, of which a reward model's scale is made."""
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


def check_written(run: Path, checkpoint: Path, best: Best | None) -> None:
    """Compare the adapters of a finished run with its newest checkpoint.

    Args:
        best: the best evaluation, where its adapter is to be kept.

    Raises:
        NotAsWritten: one is missing or is another. OSError: one cannot be read.
    """
    for kept in KEPT.values():
        folder = run / kept.folder
        if kept.source == "checkpoint" or (kept.source == "average" and not folder.is_dir()):
            continue
        noted = check_digests(folder)
        if adapters.WEIGHTS not in noted:
            raise NotAsWritten(f"{kept.folder}/ or its {MANIFEST} is missing")
        if kept.source == "policy":
            expected = check_digests(checkpoint)[adapters.WEIGHTS]
            compare(f"{kept.folder}/{adapters.WEIGHTS}", noted[adapters.WEIGHTS], expected)
    if best is not None and (checkpoint / f"{PREFIX}{adapters.WEIGHTS}").is_file():
        _check_best(run, checkpoint, best)


def _check_best(run: Path, checkpoint: Path, best: Best) -> None:
    noted = check_digests(run / BEST)
    for file, digest in check_digests(checkpoint).items():
        if file.startswith(PREFIX):
            own = file.removeprefix(PREFIX)
            compare(f"{BEST}/{own}", noted.get(own, "missing"), digest)
    record = read_object(run / BEST / BEST_RECORD, MIB)
    if record != _told(best):
        raise NotAsWritten(
            f"{BEST}/{BEST_RECORD} tells of {record!s:.200}, and not of {_told(best)}"
        )


def _told(best: Best) -> dict[str, Any]:
    """What ``best.json`` holds of it."""
    return {key: value for key, value in asdict(best).items() if key != "evaluations_since"}


def readme(config: Config, step: int, told: str = "") -> bytes:
    """README.md of the adapter after ``step`` steps: what it is and how it is loaded. The card of
    an exported model, with its evaluation, is made by export.

    Args:
        told: a sentence on why it was kept.
    """
    method, run, base = config.method, str(config.run.name), config.model.path
    kind = "reward model's adapter and head" if config.of_stage.scores else "LoRA adapter"
    load = (
        "    from peft import PeftModel\n"
        "    from transformers import AutoModelForCausalLM\n\n"
        f"    base = AutoModelForCausalLM.from_pretrained({base!r})\n"
        "    model = PeftModel.from_pretrained(base, THIS_FOLDER)\n"
    )
    text = (
        "---\nlibrary_name: peft\ntags: [reason_llm, lora]\n---\n\n"
        f"# {run}\n\n"
        f"A {kind} over `{base}`, made with reason_llm: {method.name} ({method.idea}), "
        f"after step {step} of {config.run.steps}."
        f"{' ' if told else ''}{told}\n\n"
        f"{load}\n"
        "It computes over the base as that was loaded in training. To have one model without an "
        "adapter, with a card that tells its data and its evaluation, export the run.\n"
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
    found: dict[str, Any] = {name: last[key] for key, name in names.items() if key in last}
    found |= {"read_at": END_TOKEN, "base": base, "template": template}
    return sealed(orjson.dumps(found, option=orjson.OPT_INDENT_2))
