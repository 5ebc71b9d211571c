"""Programs that a model wrote, run against tests in a sandbox. Stands alone: of the rest of the
package it imports ``errors`` and ``files``."""

from reason_llm.score.code.cases import BESIDE, answer_of_row, column_of_tests
from reason_llm.score.code.code_tests import (
    TIMEOUT_SECONDS,
    CodeTests,
    Outcome,
    last_code_block,
)
from reason_llm.score.code.sandbox import Sandbox

__all__ = [
    "BESIDE",
    "TIMEOUT_SECONDS",
    "CodeTests",
    "Outcome",
    "Sandbox",
    "answer_of_row",
    "column_of_tests",
    "last_code_block",
]
