"""Learning of a new adapter from the buffer's rollouts or from rows: the phase and its maths."""

from reason_llm.train.learner import Learner, Learners, LearningSettings, Part, learning
from reason_llm.train.micro_batches import MicroBatches, ending_out_of_memory
from reason_llm.train.objectives import Output, PolicyGradient, Values
from reason_llm.train.preferences import kto_desirable_weights
from reason_llm.train.rewards import length_bias
from reason_llm.train.role_reader import BASE, RoleReader
from reason_llm.train.scored import with_advantages
from reason_llm.train.stages import OBJECTIVES
from reason_llm.train.step_metrics import Tally
