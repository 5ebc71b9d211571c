"""The resources of a run: locks, model, learners and other processes, opened in this order."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from reason_llm.config import Config
from reason_llm.errors import BusyError
from reason_llm.model import Model, default_device
from reason_llm.model.plan import GIB, Meter, Plan
from reason_llm.readers import Reader, reference
from reason_llm.run.run import Run
from reason_llm.run.start import saved_rollouts
from reason_llm.run.start.locks import run_lock
from reason_llm.run.start.prepare import Job
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store import checkpoint
from reason_llm.run.store.archive import Archive
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.document import Document, RunIdentity
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.run.team import Team
from reason_llm.run.watch import Begun, Watch
from reason_llm.train import OBJECTIVES, Learner, Learners, LearningSettings, with_advantages


@contextmanager
def open_run(job: Job, watch: Watch) -> Iterator["Run"]:
    """Lock the run, load the model, restore the newest checkpoint, evaluate a new policy."""
    started, config, plan = time.perf_counter(), job.config, job.plan
    for line in plan.table():
        watch.line(line)
    job.try_rewards()
    checkpointing = bool(config.train.gradient_checkpointing)
    tokenizer, attachments = job.run.subject.tokenizer, job.data.attachments
    meter = Meter(default_device())  # memory in use so far is not the run's
    with (
        job.scorer,
        closing(job.run.episodes),
        _locked(job) as (buffer, archive, writer),
        _team_of(job, watch) as team,
        Model(
            config.model, tokenizer, config.run.seed, plan.engine, checkpointing, attachments
        ) as model,
        StopSignal() as stop,
    ):
        log = job.begin(started)
        learners = make_learners(
            config, job.folder, job.state, plan, model, job.run.readers, team.learner
        )
        checkpoint.restore(job.state, model, learners.optimizers)
        team.begin(learners)
        run = Run(job, learners, team, buffer, archive, writer, log, watch, stop, meter)
        begun = Begun(
            job.folder,
            job.state.run.id,
            str(config.run.name),
            job.state.step,
            config.run.steps,
            log.records(),
            config.score.judged_by,
        )
        with watch.run(begun):
            if job.is_new:
                run.evaluate_untrained()
            stop.check()
            yield run


@contextmanager
def _locked(job: Job) -> Iterator[tuple[RolloutBuffer, Archive, BackgroundWriter]]:
    """The run's buffer, its archive, and the thread that writes into the run's folder. The run is
    locked against other processes, and so is the buffer where the run samples."""
    run, never = job.config.run, job.config.run.resume == "never"
    writer = BackgroundWriter()
    archive = Archive(job.folder, int(run.keep_buffers_gib * GIB))
    source = partial(_saved_rollouts, job) if job.run.saved_buffers else archive.read
    make_buffer = job.run.processes.buffer_class(job.folder)
    buffer = make_buffer(run.buffer_path, job.state.run, [source], writer, never)
    with buffer if job.config.samples else nullcontext(), run_lock(job.config), writer:
        # Another process may have gone on since ``prepare`` looked.
        if not never and checkpoint.listing(job.folder) != job.run.checkpoints:
            raise BusyError(f"another process has just gone on with {job.folder}; call again")
        yield buffer, archive, writer


def _saved_rollouts(job: Job, step: int, run: RunIdentity) -> Document:
    """The rollouts of ``run.from_buffer`` for this step, with this run's advantages."""
    path = job.run.saved_buffers[step]
    document = saved_rollouts.read(path, job.run.subject)
    saved_rollouts.warn_of_another(path, document, job.run.saved_run)
    weights = job.scorer.weights, job.config.turn_weight
    groups = with_advantages(document.groups, job.config.learned_row, *weights)
    return replace(document, step=step, groups=groups)


def _team_of(job: Job, watch: Watch) -> AbstractContextManager[Team]:
    """The run's team, whose other processes start in the background."""
    if job.run.processes.is_alone:
        return nullcontext(Team(job.config.learns))
    team: AbstractContextManager[Team] = job.config.run.several().start(job, watch)
    return team


def make_learners(
    config: Config,
    folder: Path,
    state: RunState,
    plan: Plan,
    model: Model,
    readers: Sequence[Reader],
    learner: Callable[[Model, LearningSettings], Learner] = Learner,
) -> Learners:
    """Add the roles of the run, whose folder this is, to the model and make their learners."""
    model.add_role(
        "policy",
        folder / reference.START if config.model.start is not None else None,
        head="score" if config.of_stage.scores else "none",
    )
    for reader in readers:
        reader.add_roles(model, folder)
    columns = [reader.column() for reader in readers]
    halved = state.micro_batch_tokens or plan.micro_batch_tokens
    settings = LearningSettings(
        objective=OBJECTIVES[config.stage](config),
        train=config.train,
        temperature=config.sample.temperature if config.samples else 1.0,
        micro_batch_tokens=min(halved, plan.micro_batch_tokens),  # it may be lower by now
        seed=config.run.seed,
        total_optimizer_steps=config.policy_optimizer_steps,
        first_step=config.first_policy_step,
        chunk_tokens=plan.chunk_tokens,
        skip_every=plan.skip_every,
        readers=tuple(column for column in columns if column is not None),
    )
    policy = learner(model, settings)
    for reader in readers:
        if (own := reader.learning(config, settings)) is not None:
            return Learners(policy, learner(model, own), config.first_policy_step)
    return Learners(policy)
