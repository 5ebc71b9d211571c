"""The critic of PPO: a role of the base with a head, whose values are the column ``old_values``. It
learns the returns of the same rollouts, so it has a separate learner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reason_llm.config import Config
from reason_llm.model import Model, adapters, score_head
from reason_llm.model.plan import Subject
from reason_llm.readers import reward_models
from reason_llm.readers.reader import Base, Reader
from reason_llm.train import LearningSettings, RoleReader, Values


@dataclass(frozen=True)
class Critic(Reader):
    """The critic's values before the step."""

    start: Path | None
    """Folder of the reward model that it begins from."""
    slope: float = 1.0
    offset: float = 0.0
    """Scale of its first values in the scores of that reward model."""

    def add_roles(self, model: Model, run: Path) -> None:
        """See ``Reader``."""
        model.add_role("critic", self.start, head="value")
        if self.start is not None:
            score_head.scale(model.heads["critic"], self.slope, self.offset)

    def column(self) -> RoleReader:
        """See ``Reader``."""
        return RoleReader("old_values", "critic", "values")

    def learning(self, config: Config, policy: LearningSettings) -> LearningSettings:
        """See ``Reader``."""
        critic, row = config.critic, config.algorithm.row()
        train = config.train.with_options(
            {"learning_rate": critic.learning_rate, "epochs": critic.updates}
            | {"optimizer_steps": 1, "warmup_steps": 0}
            | {"router_aux_loss_coef": 0.0}
        )
        leaves_out = row.truncated == "leave_out"
        return replace(
            policy,
            objective=Values(clip=critic.value_clip, leaves_out_truncated=leaves_out),
            train=train,
            total_optimizer_steps=config.run.steps * critic.updates,
            first_step=0,
            role="critic",
            readers=(),
        )


def opened(config: Config, subject: Subject, base: Base) -> Sequence[Critic]:
    """The critic of an algorithm that has one; raises ModelError."""
    if config.stage != "rl" or not config.algorithm.row().critic:
        return ()
    if (start := config.critic.start) is None:
        return (Critic(None),)
    adapters.check_over(subject.policy, start, config.model.path)
    width = subject.policy.get_base_model().get_output_embeddings().weight.shape[1]
    score_head.check(start, width)
    return (Critic(start, *reward_models.paid_by(config, start, "critic.start")),)
