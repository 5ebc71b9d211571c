"""Recovery of a run: at its newest checkpoint, at the one that ``run.resume`` names, or, without a
checkpoint in its folder, by data/buffer.json alone or with a checkpoint elsewhere.

Rollouts of step 0 were sampled by the base, so they need no checkpoint. Those of a later step were
sampled by the policy of a checkpoint, which the buffer names; ``run.resume`` may name a copy.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from reason_llm.config import command
from reason_llm.errors import CheckpointError
from reason_llm.run.start.resolve import ResolvedRun
from reason_llm.run.start.saved_rollouts import check_fits, default_target
from reason_llm.run.store import buffer, checkpoint
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.document import Document, RunIdentity, read_document

logger = logging.getLogger(__name__)


def state_of(run: ResolvedRun) -> RunState:
    """State from which the run continues, by ``run.resume``, its checkpoints and its buffer."""
    state = _begun_from(run)
    if run.config.samples and run.config.run.resume != "never":
        path = run.config.run.buffer_path
        found = buffer.check(path, state.run)
        if found is not None and found.run.id == state.run.id:
            check_fits(path, found, run.subject.context_tokens, run.subject.vocabulary)
    return state


def _begun_from(run: ResolvedRun) -> RunState:
    config, folder, identity = run.config, run.folder, run.identity
    name, resume, path = str(config.run.name), config.run.resume, config.run.buffer_path
    if resume == "never":
        return checkpoint.fresh(name, identity)
    if resume == "auto":
        state = checkpoint.find(folder, name, identity)
        if state.folder is None and config.samples:
            return _from_buffer(path, name, identity) or state
        return state
    try:
        begun = checkpoint.begin_from(Path(resume), name, identity)
    except CheckpointError as error:
        if run.checkpoints:
            way_on = f"or leave --run.resume out to resume the run in {folder}"
            raise CheckpointError(f"{error}; {way_on}") from error
        raise
    if not run.checkpoints and not (folder / "summary.json").exists():
        return (config.samples and _from_copy(begun, path)) or begun
    state = checkpoint.find(folder, name, identity)
    if state.run.id != begun.run.id and not _went_on_from(begun, state):
        raise CheckpointError(
            f"{folder} holds a run that did not begin from run.resume={resume}; give this run "
            "another --run.name, or leave --run.resume out to resume that run"
        )
    return state


def _from_buffer(path: Path, name: str, config: dict[str, Any]) -> RunState | None:
    """State of the unfinished run ``name`` by its buffer; None if that is of another run."""
    document = _unfinished(path, name)
    if document is None:
        return None
    checkpoint.warn_of_changes(document.run.config, config)  # those are told when it is checked
    run = RunIdentity(document.run.id, name, config)
    section = document.run.config.get("run")
    resume = section.get("resume") if isinstance(section, dict) else None
    if document.step == 0 and resume in (None, "auto", "never"):  # of no other run's checkpoint
        logger.warning("%s has no checkpoints; the run resumes from the rollouts in %s", name, path)
        return RunState(run, step=0, folder=None)
    named = _named_checkpoint(document)
    if isinstance(named, str):
        source, first = path, ""
        if not document.complete:
            source = default_target(path)
            first = f"{command('rescore')} {path} with this config and these options, then "
        raise CheckpointError(
            f"{path} holds step {document.step} of the unfinished run {name!r} "
            f"({document.run.id}) and its checkpoint is missing: {named}; restore it, name a copy "
            f"of it with --run.resume, or learn from these rollouts alone: {first}the same "
            f"command with --run.name {name}_replay --from-buffer {source}"
        )
    logger.warning("%s has no checkpoints; the run resumes from %s", name, document.checkpoint)
    return replace(named, run=run)


def _from_copy(begun: RunState, path: Path) -> RunState | None:
    """State of the run whose checkpoint is ``run.resume``, from which ``begun`` would begin, and
    whose rollouts are in ``path``; None if the two belong to different runs."""
    document = _unfinished(path, begun.run.name)
    if document is None or begun.folder is None:
        return None
    state = checkpoint.read(begun.folder)
    if not _is_of(state, document):
        return None
    checkpoint.warn_of_changes(document.run.config, begun.run.config)
    return replace(state, run=RunIdentity(document.run.id, begun.run.name, begun.run.config))


def _went_on_from(begun: RunState, found: RunState) -> bool:
    """Whether ``_from_copy`` took the run up that stands at ``found``, with the same run.resume."""
    if begun.folder is None or found.folder is None:
        return False
    own = checkpoint.read(found.folder).run
    is_named = own.config["run"].get("resume") == begun.run.config["run"]["resume"]
    return is_named and checkpoint.read(begun.folder).run.id == own.id


def _unfinished(path: Path, name: str) -> Document | None:
    """The document in ``path``, if it belongs to an unfinished run of this name."""
    if not os.path.lexists(path):
        return None
    document = read_document(
        path, "restore it, or start with --run.resume never, which moves it aside"
    )
    return document if document.run.name == name and not document.trained else None


def _named_checkpoint(document: Document) -> RunState | str:
    """The checkpoint that the document names, or the reason why the run cannot continue from it."""
    if document.checkpoint is None:
        return "the buffer names none"
    folder = Path(document.checkpoint)
    if "\0" in document.checkpoint or not os.path.lexists(folder):
        return f"{document.checkpoint} is not there"
    try:
        state = checkpoint.read(folder)
    except CheckpointError as error:
        return str(error)
    return state if _is_of(state, document) else f"{folder} is of another run or of a later step"


def _is_of(found: RunState, document: Document) -> bool:
    """Whether the run of ``document`` can continue from this checkpoint to the document's step."""
    return found.run.id == document.run.id and found.step <= document.step
