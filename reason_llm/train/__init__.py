"""The buffer's rollouts become a new adapter: the phase, and the maths it is made of."""

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
