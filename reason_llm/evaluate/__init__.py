"""Accuracy with intervals on problems that are not trained on."""

from reason_llm.evaluate.evaluation import run_evaluation
from reason_llm.evaluate.request import RUN_ADAPTERS, make_request
