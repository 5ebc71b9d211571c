"""Is the form right? Rewards for the think/answer tags, whatever stands between them."""

import re

from reason_llm.rollout import Completion, Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
_WHOLE = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*", re.DOTALL)


def think_answer_format(prompt: Prompt, completion: Completion) -> float:
    """1 if the whole text is ``<think>…</think><answer>…</answer>``, each tag once, in this order;
    else 0."""
    return float(_WHOLE.fullmatch(completion.text) is not None)


def tag_count(prompt: Prompt, completion: Completion) -> float:
    """A quarter for each of the four tags that stands exactly once: a gentler slope towards
    ``format``."""
    return sum(completion.text.count(tag) == 1 for tag in TAGS) / len(TAGS)
