"""Saved rollouts to learn from without sampling (``run.from_buffer``). Their rewards are as they
stand there; advantages are computed anew, by this run's algorithm."""

import logging
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from reason_llm.config import command
from reason_llm.errors import RolloutBufferError
from reason_llm.run.store.archive import FILES
from reason_llm.run.store.document import Document, read_document
from reason_llm.run.store.folder import finished_steps, is_run

if TYPE_CHECKING:
    from reason_llm.model.plan import Subject  # with torch

logger = logging.getLogger(__name__)


def files(source: Path) -> list[Path]:
    """Buffers in ``source``, one for each step, in order: itself, or those in a run's folder
    ``buffers``. Raises a RolloutBufferError if one in the middle is missing: the step would learn
    from the next one's rollouts."""
    buffers = buffer_files(source, "run.from_buffer=")
    steps = [step for path in buffers if (step := _step_of(path)) is not None]
    if not steps:
        return buffers
    end = max(_num_steps(source), steps[-1] + 1)
    for before, step in pairwise([*steps, end]):
        if step > before + 1:
            raise RolloutBufferError(
                f"run.from_buffer={source} lacks step-{step - 1:08d}.json.gz: after step {before} "
                f"comes {'the end at ' if step == end else ''}{step}; restore it, or copy the "
                "others into a folder of their own, numbered without a gap"
            )
    return buffers


def buffer_files(source: Path, option: str = "") -> list[Path]:
    """``files``, with gaps; ``option`` stands before the path in an error."""
    if not os.path.lexists(source):
        buffers, holds = list[Path](), "does not exist"
    elif source.is_dir():
        buffers, holds = _steps(source) or _steps(source / "buffers"), f"holds no {FILES}"
    else:
        return [source]
    if not buffers:
        raise RolloutBufferError(
            f"{option}{source} {holds}; name a run's folder 'buffers', or a saved buffer"
        )
    return buffers


def missing_steps(source: Path, paths: Sequence[Path]) -> tuple[int, int]:
    """Number of a run's steps that no file of its archive is named after, and the first of them.
    The last steps are known where the run's summary tells them."""
    steps = {step for path in paths if (step := _step_of(path)) is not None}
    first = next(n for n in range(len(steps) + 1) if n not in steps)
    count = max(max(steps, default=-1) + 1, _num_steps(source))
    return count - len(steps), first


def _num_steps(source: Path) -> int:
    """Steps of the finished run whose folder, or folder of archives, ``source`` is; else 0."""
    runs = (run for run in (source, source.parent) if is_run(run))
    return max((finished_steps(run) or 0 for run in runs), default=0)


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(FILES) if _step_of(path) is not None)


def _step_of(path: Path) -> int | None:
    digits = path.name.removeprefix("step-").partition(".")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def read(path: Path, subject: "Subject") -> Document:
    """Rollouts in ``path``, checked for learning by this model under its config."""
    config, document = subject.config, read_document(path, "name another buffer")
    if not document.complete:
        raise RolloutBufferError(
            f"{path} was cut off while step {document.step} was sampled: its completions have no "
            "advantages; resume its run, or name another buffer"
        )
    sizes = {len(group.completions) for group in document.groups}
    if len(sizes) != 1:
        raise RolloutBufferError(
            f"{path} has groups of {sorted(sizes)} completions, and all must have as many; name "
            "another buffer"
        )
    for group in document.groups:
        for completion in group.completions:
            tokens = len(completion.token_ids)
            if tokens > config.sample.max_new_tokens:
                raise RolloutBufferError(
                    f"{path}: a completion of {group.prompt.id!r} has {tokens} tokens and "
                    f"sample.max_new_tokens={config.sample.max_new_tokens}; raise that to {tokens}"
                )
    check_fits(path, document, subject.context_tokens, subject.vocabulary)
    # Totals are stored, so other rewards may be named now, unless each of them is normalised.
    names = [reward.key for reward in config.score.rewards]
    there = list(document.groups[0].completions[0].rewards)
    if config.algorithm.row().normalization == "per_reward" and sorted(names) != sorted(there):
        raise RolloutBufferError(
            f"{path} has the rewards {', '.join(there)} and algorithm.normalization=per_reward "
            f"needs those of score.rewards, {', '.join(names)}; give it those by "
            f"{command('rescore')}"
        )
    return document


def warn_of_another(path: Path, document: Document, name: str | None) -> None:
    """Warn if the document is not of the step that its file is named after, or not of the run
    ``name``, whose rollouts come first; None: it is not known."""
    step, name = _step_of(path), name or document.run.name
    if (step in (None, document.step)) and document.run.name == name:
        return
    logger.warning(
        "%s holds step %d of the run %r: files of %r were renamed, swapped or mixed, and are "
        "read in the order of their names", path, document.step, document.run.name, name,
    )  # fmt: skip


def check_fits(path: Path, document: Document, context: int | None, vocabulary: int) -> None:
    """Raises RolloutBufferError where a prompt with its completion is longer than the context
    (None: there is no limit), or has token ids beyond the model's."""
    for group in document.groups:
        rows = [(*group.prompt.token_ids, *c.token_ids) for c in group.completions]
        rows += [(*o.prompt_ids, *o.token_ids) for c in group.completions for o in c.others]
        tokens, largest = max(map(len, rows)), max(map(max, rows))
        if context is not None and tokens > context:
            raise RolloutBufferError(
                f"{path}: a rollout of {group.prompt.id!r} has {tokens} tokens and the context is "
                f"{context}; raise model.context_tokens, or name another buffer"
            )
        if largest >= vocabulary:
            raise RolloutBufferError(
                f"{path}: {group.prompt.id!r} has the token id {largest} and the model "
                f"{vocabulary} tokens: it was sampled by another model; name that one"
            )


def default_target(source: Path) -> Path:
    """Output path of rescoring, such as ``x.rescored.json.gz`` for ``x.json.gz``."""
    suffix = ".json.gz" if source.name.endswith(".json.gz") else source.suffix
    return source.with_name(f"{source.name.removesuffix(suffix)}.rescored{suffix}")
