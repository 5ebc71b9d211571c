"""Every option of a run: one section a file, the file they are read from, the command line."""

from reason_llm.config.algorithms import (
    Aggregation,
    Algorithm,
    Baseline,
    Correction,
    KLEstimator,
    Scale,
    resolve,
)
from reason_llm.config.command_line import (
    WITHOUT_CONFIG,
    CommandLine,
    Parser,
    Value,
    read_command_line,
)
from reason_llm.config.data import (
    CODE_SETS,
    EVALUATION_SETS,
    RESERVED_ARGUMENTS,
    ColumnsSection,
    DataSection,
    RowSequence,
    share_of,
)
from reason_llm.config.file import (
    MOST_CONFIG_BYTES,
    changes,
    docstring,
    load,
    option_choices,
    schema,
)
from reason_llm.config.functions import PYTHON
from reason_llm.config.installation import command
from reason_llm.config.pairs import PAIR_FORMS, PairForm, PairsSection
from reason_llm.config.preferences import PreferenceRow
from reason_llm.config.readers import READER_REWARDS, READERS, CriticSection, TeacherSection
from reason_llm.config.score import RIGHTNESS, RewardSpec, ScoreSection, is_right
from reason_llm.config.sections import (
    AdapterSection,
    Config,
    ModelSection,
    SampleSection,
    TrainSection,
)
from reason_llm.config.stages import STAGES, StageName
from reason_llm.config.surrogates import SURROGATES, Terms, masked_mean
from reason_llm.config.types import Count, Section, ServiceSection, matching
from reason_llm.config.wrong_values import nearest, wrong
