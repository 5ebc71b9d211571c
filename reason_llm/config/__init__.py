"""Every option of a run: one section a file, the file they are read from, the command line."""

from reason_llm.config.algorithms import (
    SURROGATES,
    Aggregation,
    Algorithm,
    Baseline,
    Correction,
    KLEstimator,
    Ratio,
    Scale,
    Surrogate,
    resolve,
)
from reason_llm.config.command_line import (
    CommandLine,
    Parser,
    Value,
    command,
    parse_command_line,
    read_command_line,
)
from reason_llm.config.data import ColumnsSection, DataSection, PassRateSection, Rows
from reason_llm.config.file import MOST_CONFIG_BYTES, changes, docstring, load, load_quick_start
from reason_llm.config.functions import PYTHON
from reason_llm.config.matching import matching
from reason_llm.config.pairs import PAIR_FORMS, PairForm, PairsSection
from reason_llm.config.pipeline import (
    Pipeline,
    PipelineStage,
    RowsOfRollouts,
    load_pipeline,
    parse_training_line,
)
from reason_llm.config.preferences import PreferenceRow
from reason_llm.config.score import (
    REWARD_MODEL,
    RIGHTNESS,
    RewardModelOptions,
    RewardSpec,
    ScoreSection,
)
from reason_llm.config.sections import (
    AdapterSection,
    Config,
    ModelSection,
    TrainSection,
)
from reason_llm.config.stages import STAGES, CriticSection, Stage, StageName, SupervisedSection
from reason_llm.config.types import Count, Section
from reason_llm.config.wrong_values import nearest, wrong

__all__ = [
    "MOST_CONFIG_BYTES",
    "PAIR_FORMS",
    "PYTHON",
    "REWARD_MODEL",
    "RIGHTNESS",
    "STAGES",
    "SURROGATES",
    "AdapterSection",
    "Aggregation",
    "Algorithm",
    "Baseline",
    "ColumnsSection",
    "CommandLine",
    "Config",
    "Correction",
    "Count",
    "CriticSection",
    "DataSection",
    "KLEstimator",
    "ModelSection",
    "PairForm",
    "PairsSection",
    "Parser",
    "PassRateSection",
    "Pipeline",
    "PipelineStage",
    "PreferenceRow",
    "Ratio",
    "RewardModelOptions",
    "RewardSpec",
    "Rows",
    "RowsOfRollouts",
    "Scale",
    "ScoreSection",
    "Section",
    "Stage",
    "StageName",
    "SupervisedSection",
    "Surrogate",
    "TrainSection",
    "Value",
    "changes",
    "command",
    "docstring",
    "load",
    "load_pipeline",
    "load_quick_start",
    "matching",
    "nearest",
    "parse_command_line",
    "parse_training_line",
    "read_command_line",
    "resolve",
    "wrong",
]
