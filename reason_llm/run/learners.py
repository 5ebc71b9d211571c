"""The roles over the base in a run, and their learners."""

from collections.abc import Callable, Sequence
from pathlib import Path

from reason_llm.config import Config
from reason_llm.model import Model
from reason_llm.model.plan import Plan
from reason_llm.readers import Reader, reference
from reason_llm.run.store.checkpoint import RunState
from reason_llm.train import (
    OBJECTIVES,
    Learner,
    Learners,
    LearningSettings,
)


def make(
    config: Config,
    folder: Path,
    state: RunState,
    plan: Plan,
    model: Model,
    readers: Sequence[Reader],
    learner: Callable[[Model, LearningSettings], Learner] = Learner,
) -> Learners:
    """Add the roles of the run to the model and make their learners.

    Args:
        folder: the run's.
        learner: makes a learner.
    """
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
        readers=tuple(each for each in columns if each is not None),
    )
    policy = learner(model, settings)
    for reader in readers:
        if (own := reader.learning(config, settings)) is not None:
            return Learners(policy, learner(model, own), config.first_policy_step)
    return Learners(policy)
