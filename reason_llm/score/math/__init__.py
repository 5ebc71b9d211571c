"""Answers found in text and compared as mathematics. It imports nothing else of the package."""

from reason_llm.score.math.answer_text import is_only_text
from reason_llm.score.math.boxed_math import Equality, equivalent, majority, matches, same_word
from reason_llm.score.math.extraction import (
    extract_answer,
    final_boxed,
    gold_answer,
    has_box,
    hashed_answer,
    last_answer_tags,
    last_boxed,
    last_boxes,
    outside_thinking,
)
from reason_llm.score.math.judge import TIMEOUT_SECONDS, default_judge
from reason_llm.score.math.labels import is_same_label, most_frequent_label, stated_label
