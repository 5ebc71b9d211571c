"""A run: its files, its phases, its checks, its resumption."""

from reason_llm.run.start.locks import check_unused
from reason_llm.run.start.saved_rollouts import (
    buffer_files,
    default_target,
    missing_steps,
    warn_of_another,
)
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store.best import Best
from reason_llm.run.store.buffer import RolloutBuffer, lock
from reason_llm.run.store.document import Document, RunIdentity, read_document, to_bytes
from reason_llm.run.store.folder import ANSWERS
from reason_llm.run.store.metrics import Record, accuracies
from reason_llm.run.watch import SILENT, Begun, Progress, Silent, Watch
