"""Every option of a run: one section a file, the file they are read from, the command line."""

from reason_llm.config.algorithms import (
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
    CONSOLE_SCRIPT,
    CommandLine,
    Parser,
    Value,
    command,
    parse_command_line,
    read_command_line,
)
from reason_llm.config.data import ColumnsSection, DataSection, PassRateSection
from reason_llm.config.file import MOST_CONFIG_BYTES, changes, load
from reason_llm.config.matching import matching
from reason_llm.config.score import RewardSpec, ScoreSection
from reason_llm.config.sections import AdapterSection, Config, ModelSection, TrainSection
from reason_llm.config.types import Count, Section

__all__ = [
    "CONSOLE_SCRIPT",
    "MOST_CONFIG_BYTES",
    "AdapterSection",
    "Aggregation",
    "Algorithm",
    "Baseline",
    "ColumnsSection",
    "CommandLine",
    "Config",
    "Correction",
    "Count",
    "DataSection",
    "KLEstimator",
    "ModelSection",
    "Parser",
    "PassRateSection",
    "Ratio",
    "RewardSpec",
    "Scale",
    "ScoreSection",
    "Section",
    "Surrogate",
    "TrainSection",
    "Value",
    "changes",
    "command",
    "load",
    "matching",
    "parse_command_line",
    "read_command_line",
    "resolve",
]
