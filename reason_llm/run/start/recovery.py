"""State from which a run starts or resumes: its newest checkpoint, the one that ``run.resume``
names, or none."""

from pathlib import Path

from reason_llm.errors import CheckpointError
from reason_llm.run.start.resolve import ResolvedRun
from reason_llm.run.start.saved_rollouts import check_fits
from reason_llm.run.store import buffer, checkpoint
from reason_llm.run.store.checkpoint import RunState


def state_of(run: ResolvedRun) -> RunState:
    """State from which the run continues, by ``run.resume``, its checkpoints and its buffer."""
    state = _begun_from(run)
    if run.config.samples and run.config.run.resume != "never":
        path = run.config.run.buffer_path
        found = buffer.check(path, state.run)
        own = [*run.processes.later_steps(run.folder, state.run)]
        if found is not None and found.run.id == state.run.id:
            own.append((path, found))
        for place, document in own:
            check_fits(place, document, run.subject.context_tokens, run.subject.vocabulary)
    return state


def _begun_from(run: ResolvedRun) -> RunState:
    folder, identity = run.folder, run.identity
    name, resume = str(run.config.run.name), run.config.run.resume
    if resume == "never":
        return checkpoint.fresh(name, identity)
    if resume == "auto":
        return checkpoint.find(folder, name, identity)
    try:
        begun = checkpoint.begin_from(Path(resume), name, identity)
    except CheckpointError as error:
        if run.checkpoints:
            way_on = f"or leave --run.resume out to resume the run in {folder}"
            raise CheckpointError(f"{error}; {way_on}") from error
        raise
    if not run.checkpoints and not (folder / "summary.json").exists():
        return begun
    state = checkpoint.find(folder, name, identity)
    if state.run.id != begun.run.id:
        raise CheckpointError(
            f"{folder} holds a run that did not begin from run.resume={resume}; give this run "
            "another --run.name, or leave --run.resume out to resume that run"
        )
    return state
