"""Learning of a new adapter from the buffer's rollouts: the phase and its maths."""

from reason_llm.train.learner import Learner, LearningSettings, learning
from reason_llm.train.objectives import PolicyGradient
from reason_llm.train.scored import with_advantages, with_learner_logprobs, without_learner_logprobs

__all__ = [
    "Learner",
    "LearningSettings",
    "PolicyGradient",
    "learning",
    "with_advantages",
    "with_learner_logprobs",
    "without_learner_logprobs",
]
