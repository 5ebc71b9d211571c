"""Where in a text does the final answer stand? Finding it, not judging it.

Rewards use one strict finder each (the box, the tags): a model is not paid for an answer that it
did not mark as asked. ``extract_answer`` is the lenient one, for grading outputs of models that
were asked in other ways.
"""

import re

from reason_llm.data import BOX, last_boxed

_ANSWER_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASH = re.compile(r"####[ \t]*(\S[^\n]*)")
_HASH_NUMBER = re.compile(r"[+-]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_PHRASE = re.compile(
    r"\banswer(?:[ \t]+is\b[ \t]*[:=]?|[ \t]*(?:\*\*)?[:=])(?:\*\*)?\s*(?=\S)", re.IGNORECASE
)
_LATEX_SPAN = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SENTENCE_END = re.compile(r"\.(?=\s|$|\*\*)|\s+I hope it is correct")
_SPECIAL_TOKEN = re.compile(r"<\|[a-z_]+\|>|</?s>|<(?:eos|pad|bos)>", re.IGNORECASE)


def last_answer_tags(text: str) -> str | None:
    """The text between the last ``<answer>`` and ``</answer>``; None if there is no such pair."""
    answers = _ANSWER_TAGS.findall(text)
    return answers[-1].strip() if answers else None


def extract_answer(text: str) -> str | None:
    """The final answer of a whole model output, however it was marked; None if it was not.

    Tried in this order, the last of each kind: ``\\boxed{}``, ``<answer>`` tags, GSM8K's
    ``#### 42``, ``the answer is 42`` or ``Answer: 42``. Where the output closes its thinking with
    ``</think>``, only what follows counts. A box that is not closed is no answer.

    For evaluation; a training reward that took all of these would pay for ignoring the format.
    """
    text = _SPECIAL_TOKEN.sub("", text.rpartition("</think>")[2])
    if BOX.search(text):
        return last_boxed(text)
    tagged = last_answer_tags(text)
    if tagged is not None:
        return tagged
    if hashed := _HASH.findall(text):
        return _hash_answer(hashed[-1])
    if phrases := list(_PHRASE.finditer(text)):
        return _phrase_answer(text[phrases[-1].end() :].partition("\n")[0])
    return None


def _hash_answer(line: str) -> str:
    """``1,234`` of ``#### 1,234``; the last number where a sentence follows instead."""
    numbers = _HASH_NUMBER.findall(line)
    is_sentence = re.search(r"[A-Za-z]{2,} +[A-Za-z]{2,} ", line) is not None
    return str(numbers[-1]).replace("$", "") if is_sentence and numbers else line.strip()


def _phrase_answer(rest: str) -> str:
    """The answer in what follows ``answer is``: the LaTeX that it starts with, else up to the
    sentence's end."""
    rest = rest.strip().removeprefix("**").strip()
    latex = _LATEX_SPAN.match(rest)
    if latex:
        return next(group for group in latex.groups() if group).strip()
    return _SENTENCE_END.split(rest, maxsplit=1)[0].strip()
