"""Is the final answer right? It is found in the text by ``extraction.py``, and compared with the
gold one by the text alone (``answer_text.py``) or by sympy (``judge.py``).

An answer in another form than the reward asks for (``####``, a sentence) earns nothing: the form is
part of the task. Not here: step-by-step marking, partial credit.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from reason_llm.score.math import answer_form, answer_text, constraints, naming, prose
from reason_llm.score.math.answer_text import Question, decide, normalise, read_both, unwrapped
from reason_llm.score.math.answer_tree import MAX_CHARACTERS, Tree, variables
from reason_llm.score.math.extraction import candidates
from reason_llm.score.math.judge import TIMEOUT_SECONDS, default_judge
from reason_llm.score.math.question import asks_yes_or_no, last_question, read_question, words_of

_INEQUALITY = re.compile(r"[<>≤≥]|\\[lg](?:eq?|t)(?:slant)?(?![A-Za-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}+")
_BETWEEN_ITEMS = re.compile(r" ?, ?(?:and )?| and ")
_IN_WORDS = frozenset("abcdefghijklmnopqrstuvwxyz ,-'")
_LONGEST_ITEM = 40
_ORDER = re.compile(
    r"\b(?:order|rank|arrang|sort|sequenc|chronolog|alphabet|first|respectiv|increas|decreas)"
    r"|\bfrom [^.?]{1,30} to "
)
_SAME_WORDS = {"true": "Yes", "false": "No", "yes": "True", "no": "False"}
_SEVERAL = ("list", "either", "cup", "cap")
_QUOTED_WORDS = 8
"""Number of consecutive words that an answer can only have copied from the question."""
Equality = Literal["form", "value"]


def matches(
    gold: str,
    answer: str | None,
    timeout_seconds: float,
    question: str = "",
    equality: Equality = "form",
) -> float:
    """1 if there is an answer, it is worked out and it equals the gold one, else 0.

    Args:
        question: what was asked, which fixes unit, currency, order and form; an answer copied from
            it is not worked out. Of a prompt with examples, or of a chat, the last question counts.
        equality: ``value`` pays a calculation that is not worked out, too.
    """
    if not answer:
        return 0.0
    question = last_question(question)
    if is_quoted(gold, answer, question) or are_joined_otherwise(gold, answer):
        return 0.0
    items = _items_of_words(gold)
    if items and items == _items_of_words(answer) and not _ORDER.search(question.casefold()):
        return 1.0
    is_percent = constraints.demands_of(question).percent
    # One reading must pass all checks: equal in one and worked out in another is not enough.
    for gold_reading, answer_reading in _readings(gold, answer, question):
        if equality == "form" and not is_worked_out(gold_reading, answer_reading, question):
            continue
        if not _equal_as_asked(gold_reading, answer_reading, question, is_percent, timeout_seconds):
            continue
        return float(equality == "value" or not is_copied(gold_reading, answer_reading, question))
    return 0.0


def _readings(gold: str, answer: str, question: str) -> Iterator[tuple[str, str]]:
    """Pairs of both answers, unchanged, as lists, as values of a sentence, and in the gold answer's
    unit. An option of the question as the gold answer, ``(D) 9``, is read as its letter and as its
    text; ``True`` also as ``Yes`` if the question asks for yes or no."""
    golds = answer_text.as_option(gold, question) or (answer_text.with_text_unit(gold, question),)
    if (word := same_word(gold, question)) is not None:
        golds = (gold, word)
    for wanted in golds:
        if prose.contradicts(answer, question):
            continue
        if not prose.has_labelled_order(wanted, answer, question):
            yield wanted, answer
        if (option := answer_text.as_option(answer, question)) and len(option) > 1:  # (B) 56 for 56
            yield wanted, option[1]
        if (lists := answer_text.as_lists(wanted, answer)) is not None:
            yield lists
        if (short := answer_text.without_formulas(wanted, answer)) != answer:
            yield wanted, short
        if (short := prose.without_words(answer, question)) != answer:
            yield wanted, short
        if (measure := answer_text.converted(wanted, answer, question)) is not None:
            yield measure
        yield from prose.readings(wanted, answer, question)


def are_joined_otherwise(gold: str, answer: str) -> bool:
    """Whether one answer joins its inequalities by ``and`` and the other by ``or``."""
    joins = [
        {word for word in ("and", "or") if word in re.split(r"[^A-Za-z]+", text)}
        if len(text) <= MAX_CHARACTERS and len(_INEQUALITY.findall(text)) > 1
        else set[str]()
        for text in (gold, answer)
    ]
    return len(joins[0]) == len(joins[1]) == 1 and joins[0] != joins[1]


@functools.lru_cache(maxsize=1024)
def _items_of_words(text: str) -> list[str]:
    """The items of a list of words, ``red, green and blue``, sorted; empty for another text, and
    where one is a letter or as long as a sentence."""
    shown = " ".join(map(str, answer_text.tokens_of(text))).casefold()
    plain = " ".join(shown.split()).strip("\\{} ")
    items = sorted(_BETWEEN_ITEMS.split(plain))
    is_list = len(text) <= MAX_CHARACTERS and len(items) > 1 and not set(plain) - _IN_WORDS
    return items if is_list and all(1 < len(item) < _LONGEST_ITEM for item in items) else []


@functools.lru_cache(maxsize=1024)
def same_word(gold: str, question: str) -> str | None:
    """Another spelling of a gold answer: ``Yes`` for ``True`` and back, if the question allows
    both; a number in words as a numeral; infinity for ``infinitely many``; None for others."""
    tokens = answer_text.tokens_of(gold) if len(gold) <= _LONGEST_ITEM else []
    words = " ".join(token.text for token in tokens).replace("-", " ").casefold().split()
    if (number := prose.as_number(words)) is not None:
        return number
    if len(words) == 2 and words[0].isdecimal() and words[1] in answer_text.ORDINALS:  # 12th
        return words[0]
    if words == ["infinitely", "many"]:
        return "\\infty" if constraints.demands_of(question).number else None
    word = _SAME_WORDS.get(words[0]) if len(words) == 1 else None
    is_yes_or_no = word in ("True", "False")
    is_asked = "true" in question.casefold() if is_yes_or_no else asks_yes_or_no(question)
    return word if is_asked else None


def equivalent(gold: str, answer: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Whether two answers have the same value; False if that cannot be found out within the time
    limit.

    Either may be a whole model output, with its answer in ``\\boxed{}``, behind ``####`` or at the
    end of a sentence. Any thread may ask. Not symmetric where the gold answer sets the form:
    ``x=5`` answers 5, but 5 does not answer ``2x+y=5``.
    """
    golds, gold_number = candidates(gold)
    wanted = next((one for one in golds if read_both(one, one)), gold_number or golds[0])
    answers, number = candidates(answer)
    if number and not read_both(wanted, answers[0]):
        answers.append(number)
    is_percent = _holds_percent(gold)
    return any(_equal_as_asked(wanted, other, "", is_percent, timeout_seconds) for other in answers)


def _equal_as_asked(
    gold: str, answer: str, question: str, is_percent: bool, seconds: float
) -> bool:
    """Whether the answers are equal; ``50`` is ``50\\%`` only if the question asks for percent."""
    gold, answer = gold.strip(), answer.strip()
    if _equal(gold, answer, question, seconds):
        return True
    is_bare = is_percent and not _holds_percent(gold) and _holds_percent(answer)
    return is_bare and _equal(f"{unwrapped(gold)}\\%", answer, question, seconds)


def _holds_percent(text: str) -> bool:
    return "%" in text or "percent" in text.lower()


def _equal(gold: str, answer: str, question: str, timeout_seconds: float) -> bool:
    verdict = decide(gold, answer, question)
    if isinstance(verdict, bool):
        return verdict
    return _compared(json.dumps([verdict.gold, verdict.answer]), timeout_seconds)


@functools.lru_cache(maxsize=65536)
def _compared(trees: str, timeout_seconds: float) -> bool:
    return default_judge().compare(Question(*json.loads(trees)), timeout_seconds)


def is_worked_out(gold: str, answer: str, question: str = "") -> bool:
    """Whether the answer is worked out as far as the gold one.

    1. It is no equation but one that gives a value its name; of ``37 + 45 = 82`` the last value
       counts, as long as all are equal.
    2. A relation is solved for what the gold one is solved for, unless the question asks for the
       equation of a curve, of which any arrangement will do.
    3. No step of normalising it, and no operation in it, is missing in the gold answer's form.
    4. It has the form that the question asks for, if the gold answer has it.
    """
    if (trees := _read(gold, answer, question)) is None:
        return True
    gold_tree, tree = trees
    compared = answer_text.trees_as_asked(unwrapped(gold), unwrapped(answer), question)
    if compared is None:
        return False
    are_curves = all(naming.is_equality(side) and len(variables(side)) > 1 for side in compared)
    # Before the names: ``2x + y = 5`` and ``y = 5 - 2x`` are solved for different variables.
    if are_curves and constraints.demands_of(question).curve:
        return answer_form.work_left(*compared) <= {"fraction", "signs"}
    may_have_root = not constraints.demands_of(question).simplest
    finals = _finals(*compared)
    if all(answer_form.work_left(compared[0], final, may_have_root) for final in finals):
        return False
    if not constraints.has_asked_form(*compared, question):
        return False
    if not compared[0][0] == compared[1][0] == "rel":
        return True
    gold_names, answer_names = naming.solved_for(gold_tree), naming.solved_for(tree)
    is_form_asked = are_curves and "form" in words_of(question)
    return gold_names == answer_names if is_form_asked else gold_names <= answer_names


def _finals(gold: Tree, answer: Tree) -> list[Tree]:
    """The last of several equal values, and a decimal near it if the gold answer is a decimal."""
    is_decimal = answer[0] == "approx" and gold[0] == "num" and "." in gold[1]
    if answer[0] in ("list", "tuple"):
        answer = [answer[0], *map(naming.last_value, answer[1:])]
    return [naming.last_value(answer), *([answer[2]] if is_decimal else [])]


def is_quoted(gold: str, answer: str, question: str) -> bool:
    """Whether an answer is a sentence, an equation or, for a number, a phrase of the question, word
    for word, and more than the gold answer and one of the options."""
    is_long = len(answer.split()) >= _QUOTED_WORDS
    if not prose.has_words(gold):  # 5 is no answer in the words "the five-digit number"
        is_long |= len(_WORD.findall(answer)) > (2 if answer[:1].isalpha() else 3)
    if not (is_long or "=" in answer or "\\equiv" in answer) or "".join(
        answer.split()
    ) not in "".join(question.split()):
        return False
    return normalise(answer) != normalise(gold) and answer_text.as_option(answer, question) is None


def is_copied(gold: str, answer: str, question: str) -> bool:
    """Whether an answer that is equal to the gold one is only what the question states.

    1. An equation of the question is no answer that is no equation.
    2. Where the question states the gold answer in another form, the form is what is asked for, and
       the answer has the gold one's.
    3. Where it states the gold answer itself, which is more than a number, no brackets and no other
       name than the one asked for are put around it.
    """
    if not question or (trees := _read(gold, answer, question)) is None:
        return False
    gold_tree, tree = trees
    if tree[0] in _SEVERAL and tree[1:] == [tree[1]] * len(tree[1:]):  # y \\in A or y \\in A
        tree = tree[1]
        compared = naming.as_asked(gold_tree, tree, question)
    else:
        compared = answer_text.trees_as_asked(unwrapped(gold), unwrapped(answer), question)
    if compared is None:
        return False
    gold_part, part = naming.last_value(compared[0]), _finals(*compared)[-1]
    is_named = tree[0] == "rel" != gold_tree[0]
    if is_named and read_question(question).states(tree):
        return True
    stated = read_question(question)
    if answer_form.form_of(gold_part).is_same(answer_form.form_of(part)):
        has_more = (
            is_named or tree[0] == "rel" != gold_tree[0] or answer_text.is_embellished(gold, answer)
        )
        if answer_form.is_plain(gold_part) or not has_more or not stated.states(gold_part):
            return False
        return not (is_named and stated.asks_for(tree[2]))
    if constraints.demands_of(question).fraction and answer_form.are_one_fraction(gold_part, part):
        return stated.states(part)
    is_one_kind = (gold_part[0] == "rel") == (part[0] == "rel")
    if answer_form.has_one_root(part) and not constraints.demands_of(question).simplest:
        return stated.states(part)
    return is_one_kind and stated.asks_for_form(gold_part, part)


def _read(gold: str, answer: str, question: str) -> tuple[Tree, Tree] | None:
    """Read both answers as trees; None if their text is the same, or words decide."""
    if normalise(gold) == normalise(answer) or answer_text.words_decide(gold, answer, question):
        return None
    readings = read_both(unwrapped(gold), unwrapped(answer))
    return None if readings is None else (readings[0].tree, readings[1].tree)


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer, for maj@k, in its first spelling; the earliest of several. Votes
    are counted by equivalence; None does not vote, and is the result without a vote."""
    stated = [answer for answer in answers if answer is not None and answer.strip()]
    spellings: dict[str, str] = {}
    for answer in stated:
        spellings.setdefault(normalise(answer), answer)
    votes = Counter(map(normalise, stated))
    classes: Counter[str] = Counter()
    for spelling, answer in spellings.items():
        equal = (old for old in classes if _equal(old.strip(), answer.strip(), "", TIMEOUT_SECONDS))
        classes[next(equal, answer)] += votes[spelling]
    return max(classes, key=classes.__getitem__, default=None)
