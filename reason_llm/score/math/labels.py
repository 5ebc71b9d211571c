"""Labels of a classification, compared word for word.

Upper and lower case, space around a label, and the kind and length of space in it do not count.
All else does, such as a full stop behind it.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from reason_llm.score.math.extraction import outside_thinking, texts_in_tags


def is_same_label(gold: str, label: str | None) -> bool:
    """Whether two labels are the same words; no words are no label."""
    return label is not None and _plain(gold) == _plain(label) != ""


def stated_label(text: str) -> str | None:
    """The text between ``<answer>`` and ``</answer>``, or where there is no such tag the whole
    text, both outside of the thinking; None where the tags are no pairs around one label."""
    labels = texts_in_tags(text)
    if not labels:
        return None if labels is None else outside_thinking(text).strip()
    return labels[-1] if len(set(map(_plain, labels))) == 1 else None


def most_frequent_label(labels: Sequence[str | None]) -> str | None:
    """The label that most of the samples state, in its first spelling; None does not vote."""
    stated = [label for label in labels if label is not None and label.strip()]
    votes = Counter(map(_plain, stated))
    return max(stated, key=lambda label: votes[_plain(label)], default=None)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())
