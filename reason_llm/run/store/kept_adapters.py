"""The adapters, or whole models, that a run keeps in separate folders: the last one and that of the
best evaluation.

The best one's weights are in every checkpoint from then on (``best.adapter_model.safetensors``), so
that a run resumed from any of them has it again.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from reason_llm.config import Config
from reason_llm.errors import NotAsWritten
from reason_llm.files import (
    MANIFEST,
    MIB,
    check_digests,
    compare,
    read_object,
    regular,
    replacing_folder,
    sha256,
)
from reason_llm.model import Model, adapters, score_head, weights
from reason_llm.readers import description
from reason_llm.run.store.best import Best
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.folder import BEST_RECORD, KEPT, Which, kept_name
from reason_llm.run.store.metrics import MetricsLog, Record
from reason_llm.run.store.writer import BackgroundWriter

OF_BEST = "best."
"""First part of the names of the best adapter's files in a checkpoint."""

logger = logging.getLogger(__name__)


def _record_of(best: Best) -> dict[str, Any]:
    """Content of the record in the folder of the best adapter."""
    return {key: value for key, value in asdict(best).items() if key != "evaluations_since"}


@dataclass(slots=True)
class KeptAdapters:
    """Writer of the kept adapters of one run."""

    config: Config
    run: Path
    """The run's folder."""
    digests: tuple[str, str]
    """Digests of the base's config and of the prompts' form."""
    model: Model
    log: MetricsLog
    writer: BackgroundWriter
    files: dict[str, Mapping[str, Tensor] | Path] = field(default_factory=dict)
    """The best adapter in the next checkpoint, by file: tensors until one holds them, then its
    files."""

    def restore(self, state: RunState) -> RunState:
        """Bring the best adapter's folder to the state that the checkpoint names."""
        if (checkpoint := state.folder) is None or (best := self._best_of(state)) is None:
            return state
        self.files = {file.name: file for file in checkpoint.glob(f"{OF_BEST}*")}
        if not self.files:
            logger.warning(
                "%s/ of step %d was not kept: the next one is",
                self._folder_of("best").name,
                best.step,
            )
            return replace(state, best=None)
        notes = description(self.config, self._records(best.step), *self.digests)
        try:
            _check_best(self._folder_of("best"), checkpoint, best, notes)
        except (OSError, ValueError):
            self._submit(checkpoint, best)
        return state

    def take(self, state: RunState) -> None:
        """Take the best adapter if this moment's is."""
        best = self._best_of(state)
        if best is not None and best.step == state.step and self.config.learns:
            tensors = self.model.adapter_of("policy")
            self.files = {f"{OF_BEST}{self.model.weights_file}": tensors}
            if (head := self.model.heads.get("policy")) is not None:
                self.files[f"{OF_BEST}{score_head.FILE}"] = score_head.state(head)

    def saved(self, state: RunState) -> None:
        """Write the best adapter's folder after the checkpoint that is being saved."""
        assert state.folder is not None
        is_new = any(not isinstance(source, Path) for source in self.files.values())
        self.files = {name: state.folder / name for name in self.files}
        if is_new and (best := self._best_of(state)) is not None:
            self._submit(state.folder, best)

    def finish(self, step: int) -> None:
        """Write the last adapter."""
        with replacing_folder(self._folder_of("last")) as folder:
            self.model.snapshot().write(folder)
            if (head := self.model.heads.get("policy")) is not None:
                score_head.save(score_head.state(head), folder)
            self._describe(folder, step, self._records(step), "")

    def _best_of(self, state: RunState) -> Best | None:
        return state.best if self.config.run.keep_best else None

    def _folder_of(self, which: Which) -> Path:
        return self.run / kept_name(which, self.config.model.train)

    def _submit(self, checkpoint: Path, best: Best) -> None:
        """Write the best adapter's folder from a checkpoint, after that is on disk."""
        records, names = self._records(best.step), list(self.files)
        self.writer.submit(lambda: self.write(checkpoint, names, best, records))

    def write(
        self, checkpoint: Path, names: Sequence[str], best: Best, records: Sequence[Record]
    ) -> None:
        """Make the best adapter's folder from these files of a checkpoint, whole or not at all.

        Raises:
            WriteError: the disk is full or read-only; the old folder is as it was.
        """
        with replacing_folder(self._folder_of("best")) as folder:
            if self.model.is_full:
                weights.copy_tokenizer_files(str(checkpoint), folder)
            config = "config.json" if self.model.is_full else adapters.CONFIG
            shutil.copyfile(regular(checkpoint / config), folder / config)
            for name in names:
                shutil.copyfile(regular(checkpoint / name), folder / name.removeprefix(OF_BEST))
            self._describe(folder, best.step, records, f"Its evaluation was the best: {best}.")
            record = orjson.dumps(_record_of(best), option=orjson.OPT_INDENT_2)
            (folder / BEST_RECORD).write_bytes(record)

    def _records(self, step: int) -> list[Record]:
        """The records up to this step, for the description of a model that gives scores."""
        if not self.config.of_stage.scores:
            return []
        return [record for record in self.log.records() if record["step"] <= step]

    def _describe(self, folder: Path, step: int, records: Sequence[Record], reason: str) -> None:
        """Write the README, with the reason for keeping the adapter, and the description of the
        adapter for readers by the last of the records."""
        (folder / "README.md").write_bytes(readme(self.config, step, reason, self.model.loader))
        for name, content in description(self.config, records, *self.digests).items():
            (folder / name).write_bytes(content)


def written(run: Path, train: str) -> dict[str, str]:
    """SHA-256 of the ``digests.json`` of each kept folder, by its name: the last that an ended run
    notes, in its summary. Raises OSError."""
    names = [kept_name(which, train) for which in KEPT]
    return {
        name: sha256(run / name / MANIFEST, MIB)
        for name in names
        if (run / name / MANIFEST).is_file()
    }


def check_written(run: Path, config: Config, state: RunState, recorded: Mapping[str, Any]) -> None:
    """Compare the adapters of a finished run with its newest checkpoint, and every file of their
    folders with what the run noted when it ended.

    Args:
        recorded: result of ``written`` at that time.

    Raises:
        NotAsWritten: one is missing or is another. OSError: one cannot be read.
    """
    assert state.folder is not None
    file, train = weights.FILES[config.model.train], config.model.train
    last = kept_name("last", train)
    for name in (kept_name(which, train) for which in KEPT):
        if name not in (last, *recorded):  # only the last adapter is there in every run
            continue
        digests = check_digests(run / name)
        if file not in digests:
            raise NotAsWritten(f"{name}/ or its {MANIFEST} is missing")
        if name == last:
            compare(f"{name}/{file}", digests[file], check_digests(state.folder)[file])
        compare(f"{name}/{MANIFEST}", sha256(run / name / MANIFEST, MIB), str(recorded.get(name)))
    if (
        state.best is not None
        and config.run.keep_best
        and (state.folder / f"{OF_BEST}{file}").is_file()
    ):
        _check_best(run / kept_name("best", train), state.folder, state.best, {})


def _check_best(folder: Path, checkpoint: Path, best: Best, notes: Mapping[str, bytes]) -> None:
    """Compare the best adapter with a checkpoint, and other files of its folder with ``notes``."""
    digests = check_digests(folder)
    for name, content in notes.items():
        digest = hashlib.sha256(content).hexdigest()
        compare(f"{folder.name}/{name}", digests.get(name, "missing"), digest)
    for file, digest in check_digests(checkpoint).items():
        if file.startswith(OF_BEST) or file in (adapters.CONFIG, "config.json"):
            own = file.removeprefix(OF_BEST)
            compare(f"{folder.name}/{own}", digests.get(own, "missing"), digest)
    record = read_object(folder / BEST_RECORD, MIB)
    if record != _record_of(best):
        raise NotAsWritten(
            f"{folder.name}/{BEST_RECORD} tells of {record!s:.200}, and not of {_record_of(best)}"
        )


def readme(
    config: Config, step: int, reason: str = "", loader: str = "AutoModelForCausalLM"
) -> bytes:
    """README.md of the adapter after ``step`` steps: what it is and how it is loaded. The card of
    an exported model, with its evaluation, is made by export.

    Args:
        reason: a sentence on why it was kept.
        loader: Transformers' class that loads the base.
    """
    method, run, base = config.method, str(config.run.name), config.model.path
    kind = "LoRA adapter over"
    if config.of_stage.scores:
        kind = "reward model's adapter and head over"
    library, tag = "peft", "lora"
    load = (
        "    from peft import PeftModel\n"
        f"    from transformers import {loader}\n\n"
        f"    base = {loader}.from_pretrained({base!r})\n"
        "    model = PeftModel.from_pretrained(base, THIS_FOLDER)\n\n"
        "It computes over the base as that was loaded in training. To have one model without an "
        "adapter, with a card that tells its data and its evaluation, export the run.\n"
    )
    if config.model.train == "full":
        kind, library, tag = "model, all of it trained, from", "transformers", "full"
        load = "    model = AutoModelForCausalLM.from_pretrained(THIS_FOLDER)\n"
    return (
        f"---\nlibrary_name: {library}\ntags: [reason_llm, {tag}]\n---\n\n"
        f"# {run}\n\n"
        f"A {kind} `{base}`, made with reason_llm: {method.name} ({method.idea}), "
        f"after step {step} of {config.run.steps}."
        f"{' ' if reason else ''}{reason}\n\n{load}"
    ).encode()
