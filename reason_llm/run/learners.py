"""What a run learns with: its objective, the roles over the base, and their learners."""

from pathlib import Path

from reason_llm.config import Config
from reason_llm.model import Model, score_head
from reason_llm.model.plan import Plan
from reason_llm.run import reward_models
from reason_llm.run.start import saved_rollouts
from reason_llm.run.start.prepare import START
from reason_llm.run.store.checkpoint import RunState
from reason_llm.train import (
    Labels,
    Learner,
    Learners,
    LearningSettings,
    Objective,
    PairLoss,
    PolicyGradient,
    RewardModel,
    Supervised,
    Values,
)


def objective_of(config: Config) -> Objective:
    """The objective of a config's stage."""
    match config.stage:
        case "rl" | "sample":
            return PolicyGradient(
                config.learned_row,
                config.sample.max_new_tokens,
                saved_rollouts.rounding_nats(config),
                config.critic,
                config.teacher.coefficient,
            )
        case "reward":
            return RewardModel(centering=config.reward.centering, uses_margins=config.reward.margin)
        case "preference":
            row = config.preference.row()
            return PairLoss(row=row) if row.needs_pairs else Labels(row=row)
        case _:
            return Supervised(aggregation=config.sft.aggregation)


def make(config: Config, folder: Path, state: RunState, plan: Plan, model: Model) -> Learners:
    """Add the roles of the run to the model and make their learners.

    Args:
        folder: the run's.
    """
    model.add_role(
        "policy",
        folder / START if config.model.start is not None else None,
        head="score" if config.stage == "reward" else "none",
    )
    if config.compares_with_start:
        model.add_role("start", folder / START)
    for role, path in config.reward_adapters.items():
        model.add_role(role, path, head="score")
    train, row = config.train, config.algorithm.row()
    halved = state.micro_batch_tokens or plan.micro_batch_tokens
    settings = LearningSettings(
        objective=objective_of(config),
        train=train,
        temperature=config.sample.temperature if config.samples else 1.0,
        micro_batch_tokens=min(halved, plan.micro_batch_tokens),  # which may be lower by now
        seed=config.run.seed,
        total_optimizer_steps=config.policy_optimizer_steps,
        first_step=config.first_policy_step,
        chunk_tokens=plan.chunk_tokens,
        reference="start" if config.compares_with_start else "reference",
    )
    if config.stage != "rl":
        return Learners(Learner(model, settings))
    if row.teacher:
        if config.teacher.adapter is not None:
            model.add_role("teacher", config.teacher.adapter)
        else:
            settings = settings.with_teacher("reference")
    policy = Learner(model, settings)
    if not row.critic:
        return Learners(policy)
    critic = config.critic
    model.add_role("critic", critic.start, head="value")
    if critic.start is not None:
        score_head.scale(model.heads["critic"], *reward_models.paid_by(config, critic.start))
    of_critic = train.model_copy(
        update={"learning_rate": critic.learning_rate, "epochs": critic.updates}
        | {"optimizer_steps": 1, "warmup_steps": 0}
    )
    total = config.run.steps * critic.updates
    values = Values(clip=critic.value_clip, leaves_out_truncated=row.truncated == "leave_out")
    return Learners(
        policy, Learner(model, settings.for_critic(values, of_critic, total)), critic.warmup_steps
    )
