"""Runs programs of models on tests, and checkers of other packages, in a sandbox. Stands alone: of
the rest of the package it imports ``errors``, ``files`` and ``workers``."""

from reason_llm.score.code.cases import (
    EXTRA_COLUMNS,
    answer_of_row,
    check_runs,
    column_of_tests,
    private_tests,
)
from reason_llm.score.code.checkers import (
    CHECK_SECONDS,
    CheckerError,
    Checkers,
    Subject,
    checker_faults,
    checkers_of,
    finite,
)
from reason_llm.score.code.code_tests import TIMEOUT_SECONDS, CodeTests, Outcome, last_code_block
from reason_llm.score.code.sandbox import Mode, Sandbox
