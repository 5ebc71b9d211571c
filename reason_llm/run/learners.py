"""The roles over the base in a run, and their learners."""

from dataclasses import replace
from pathlib import Path

from reason_llm.config import Config
from reason_llm.model import Model, score_head
from reason_llm.model.plan import Plan
from reason_llm.run.judges import reward_models
from reason_llm.run.start.resolve import START
from reason_llm.run.store.checkpoint import RunState
from reason_llm.train import (
    OBJECTIVES,
    Learner,
    Learners,
    LearningSettings,
    ShardedLearner,
    Shards,
    Values,
)


def make(config: Config, folder: Path, state: RunState, plan: Plan, model: Model) -> Learners:
    """Add the roles of the run to the model and make their learners.

    Args:
        folder: the run's.
    """
    model.add_role(
        "policy",
        folder / START if config.model.start is not None else None,
        head="score" if config.of_stage.scores else "none",
    )
    if config.compares_with_start:
        model.add_role("start", folder / START)
    for role, path in config.reward_adapters.items():
        model.add_role(role, path, head="score")
    train, row = config.train, config.algorithm.row()
    halved = state.micro_batch_tokens or plan.micro_batch_tokens
    settings = LearningSettings(
        objective=OBJECTIVES[config.stage](config),
        train=train,
        temperature=config.sample.temperature if config.samples else 1.0,
        micro_batch_tokens=min(halved, plan.micro_batch_tokens),  # it may be lower by now
        seed=config.run.seed,
        total_optimizer_steps=config.policy_optimizer_steps,
        first_step=config.first_policy_step,
        chunk_tokens=plan.chunk_tokens,
        reference="start" if config.compares_with_start else "reference",
    )
    if config.stage != "rl":
        return Learners(_learner(config, model, settings))
    if row.teacher:
        if config.teacher.adapter is not None:
            model.add_role("teacher", config.teacher.adapter)
        elif config.teacher_model is None:
            settings = replace(settings, teacher="reference")
    policy = _learner(config, model, settings)
    if not row.critic:
        return Learners(policy)
    critic = config.critic
    model.add_role("critic", critic.start, head="value")
    if critic.start is not None:
        score_head.scale(model.heads["critic"], *reward_models.paid_by(config, critic.start))
    of_critic = train.with_options(
        {"learning_rate": critic.learning_rate, "epochs": critic.updates}
        | {"optimizer_steps": 1, "warmup_steps": 0}
        | {"router_aux_loss_coef": 0.0}
    )
    settings = replace(
        settings,
        objective=Values(clip=critic.value_clip, leaves_out_truncated=row.truncated == "leave_out"),
        train=of_critic,
        total_optimizer_steps=config.run.steps * critic.updates,
        first_step=0,
        role="critic",
    )
    return Learners(policy, _learner(config, model, settings), critic.warmup_steps)


def _learner(config: Config, model: Model, settings: LearningSettings) -> Learner:
    shards = config.run.shards
    if shards == 1:
        return Learner(model, settings)
    return ShardedLearner(model, settings, Shards(shards))
