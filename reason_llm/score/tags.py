"""Is the form right? Rewards for the think/answer tags, whatever stands between them."""

from reason_llm.rollout import Completion, Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer_format(prompt: Prompt, completion: Completion) -> float:
    """1 if the whole text is ``<think>…</think><answer>…</answer>``, each tag once, in this order;
    else 0."""
    text = completion.text.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return 0.0
    between = text.partition("</think>")[2].partition("<answer>")
    is_whole = text.startswith("<think>") and text.endswith("</answer>")
    return float(is_whole and bool(between[1]) and not between[0].strip())


def tag_count(prompt: Prompt, completion: Completion) -> float:
    """A quarter for each of the four tags that stands exactly once: a gentler slope towards
    ``format``."""
    return sum(completion.text.count(tag) == 1 for tag in TAGS) / len(TAGS)
