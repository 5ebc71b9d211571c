"""A run: its files, its phases, its checks, its resumption."""

from reason_llm.run.best import Best
from reason_llm.run.buffer import (
    Document,
    RolloutBuffer,
    RunIdentity,
    lock,
    read_document,
    to_bytes,
)
from reason_llm.run.folder import ANSWERS
from reason_llm.run.metrics import Record, accuracies
from reason_llm.run.saved_rollouts import buffer_files, default_target, missing_steps
from reason_llm.run.watch import SILENT, Begun, Progress, Silent, Watch

__all__ = [
    "ANSWERS",
    "SILENT",
    "Begun",
    "Best",
    "Document",
    "Progress",
    "Record",
    "RolloutBuffer",
    "RunIdentity",
    "Silent",
    "Watch",
    "accuracies",
    "buffer_files",
    "default_target",
    "lock",
    "missing_steps",
    "read_document",
    "to_bytes",
]
