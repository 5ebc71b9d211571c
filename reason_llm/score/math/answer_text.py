"""What the text of two answers alone decides; the rest is a question for mathematics."""

import functools
from dataclasses import dataclass

from reason_llm.score.math.answer_form import as_asked
from reason_llm.score.math.answer_tree import (
    MAX_CHARACTERS,
    Reading,
    Tree,
    UnreadableError,
    read,
    subtrees,
    variables,
)
from reason_llm.score.math.latex_tokens import Token, tokenize

_LEADS = frozenset(
    [
        "is", "are", "equals", "equal", "be", "was", "therefore", "so", "hence", "thus", "answer",
        "option", "choice", "have", "get", "gives",
    ]
)  # fmt: skip
"""Words that an answer may follow."""
_HEDGES = frozenset(
    [
        "not", "no", "never", "neither", "nor", "either", "or", "isn", "aren", "doesn", "don",
        "wasn", "cannot", "can't", "but", "except", "unlike", "false", "wrong", "incorrect", "if",
        "unless", "maybe", "perhaps", "possibly", "probably", "instead", "than", "and",
    ]
)  # fmt: skip
_MAX_LEAD_TOKENS = 40
_RIVALS = (frozenset(["usd", "cent", "eur"]), frozenset(["deg", "rad"]))
_CHOICES = frozenset("ABCDEFGHIJ")
_COLLECTIONS = ("set", "list", "tuple", "interval")
_LONGEST_PRODUCT = 3
"""Letters that may be a product of variables; around a hyphen, longer ones are words."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the text leaves open: have these two trees the same value?"""

    gold: Tree
    answer: Tree


def decide(gold: str, answer: str) -> bool | Question:
    """Whether two answers are the same, where their text tells; else the question for mathematics.

    Text tells of equal strings, numerals, words, letters of a choice, units that differ, and of
    answers that nobody can read to their end.
    """
    gold, answer = unwrapped(gold), unwrapped(answer)
    if not gold or not answer:
        return False
    if (verdict := _numerals(gold, answer)) is not None:
        return verdict
    if max(len(gold), len(answer)) > MAX_CHARACTERS:
        return gold == answer
    gold_tokens, tokens = tokens_of(gold), tokens_of(answer)
    if not gold_tokens or not tokens:
        return False
    if spelling(gold_tokens) in (spelling(tokens), spelling(tokens[_lead(tokens) or 0 :])):
        return True
    if (verdict := _words(gold_tokens, tokens)) is not None:
        return verdict
    readings = read_both(gold, answer)
    if readings is None or _units_clash(*readings) or _rivals(gold, answer, *readings):
        return False
    if _says_less(*readings):
        return False
    trees = as_asked(readings[0].tree, readings[1].tree)
    if trees is None:
        return False
    return trees[0] == trees[1] or Question(*trees)


def are_words(gold: str, answer: str) -> bool:
    """Whether words or letters of a choice decide about the answer, and no mathematics."""
    gold, answer = unwrapped(gold), unwrapped(answer)
    if max(len(gold), len(answer)) > MAX_CHARACTERS:
        return True
    return _words(tokens_of(gold), tokens_of(answer)) is not None


def read_both(gold: str, answer: str) -> tuple[Reading, Reading] | None:
    """Both read to their end; None if one cannot be."""
    gold_reading = reading_of(gold, letters_are_units=False)
    if gold_reading is None:
        return None
    reading = reading_of(answer, letters_are_units=not variables(gold_reading.tree))
    return None if reading is None else (gold_reading, reading)


@functools.lru_cache(maxsize=4096)
def reading_of(answer: str, letters_are_units: bool) -> Reading | None:
    """The answer read to its end, what leads to it left out; None if it cannot be."""
    tokens = tokens_of(answer)
    try:
        return read(tokens[_lead(tokens) or 0 :], letters_are_units)
    except UnreadableError:
        return None


@functools.lru_cache(maxsize=1024)
def tokens_of(answer: str) -> list[Token]:
    """The tokens of an answer, a full stop behind it left out; not to be changed."""
    tokens = tokenize(unwrapped(answer)[:MAX_CHARACTERS])
    while tokens and str(tokens[-1]) in (".", ",", ";") and str(tokens[-2:][0]) != ".":
        tokens.pop()
    groups = _groups_around(tokens)
    return tokens[groups : len(tokens) - groups]


def _groups_around(tokens: list[Token]) -> int:
    """How many pairs of braces are around all of it, in time linear in its length."""
    opened: list[int] = []
    closed_at: dict[int, int] = {}
    for index, token in enumerate(tokens):
        if str(token) == "{":
            opened.append(index)
        elif str(token) == "}" and opened:
            closed_at[opened.pop()] = index
    groups = 0
    while closed_at.get(groups) == len(tokens) - 1 - groups:
        groups += 1
    return groups


def unwrapped(text: str) -> str:
    """Without spaces, Markdown's marks, a box or dollar signs around all of it."""
    if len(text) > MAX_CHARACTERS:
        return text.strip()
    for _ in range(8):
        before = text
        text = text.strip().strip("*`").strip()
        for start, end in (("\\boxed{", "}"), ("\\fbox{", "}"), ("$$", "$$"), ("$", "$")):
            inner = text[len(start) : -len(end)]
            if text.startswith(start) and text.endswith(end) and _is_closed(inner):
                text = inner
                break
        if text == before:
            break
    return text


def _is_closed(text: str) -> bool:
    """Whether the braces of a text are its own."""
    depth = 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0 or character == "$":
            return False
    return depth == 0


def spelling(tokens: list[Token]) -> str:
    """The tokens as one string, by which answers that differ in layout alone are equal."""
    return "\x00".join("{" if each.text == "{" and each.kind == "sign" else str(each)
                       for each in tokens)  # fmt: skip


def normalise(answer: str) -> str:
    """One string for all the layouts of an answer."""
    text = unwrapped(answer)
    return text if len(text) > MAX_CHARACTERS else spelling(tokens_of(text))


def _lead(tokens: list[Token]) -> int | None:
    """Where the answer begins behind words that lead to it; None without such words or with one
    that takes them back."""
    start = None
    words: list[str] = []
    num_before = 0
    for index, token in enumerate(tokens[:_MAX_LEAD_TOKENS]):
        if token.kind not in ("letters", "text") and token.text not in (",", ":", "'"):
            break
        if token.text in (",", ":"):
            has_word = max(map(len, words), default=0) > _LONGEST_PRODUCT
            is_lead = start == index or (token.text == ":" and has_word)
        else:
            words.extend(token.text.lower().split())
            is_lead = words[-1] in _LEADS if words else False
        if is_lead:
            start, num_before = index + 1, len(words)
    return None if _HEDGES & set(words[:num_before]) else start


def _numerals(gold: str, answer: str) -> bool | None:
    """Exact comparison of two plain numerals of any length."""
    first, second = _numeral(gold), _numeral(answer)
    return None if first is None or second is None else first == second


def is_numeral(answer: str) -> bool:
    """Whether it is digits with a sign and a point at most."""
    return _numeral(unwrapped(answer)) is not None


def _numeral(text: str) -> tuple[bool, str, str] | None:
    """Sign, whole part and decimals of a plain numeral."""
    text = text.rstrip(".") if not text.endswith("..") else text
    digits = text.lstrip("+-")
    whole, _, decimals = digits.partition(".")
    if len(text) - len(digits) > 1 or not (whole + decimals).isascii():
        return None
    if not (whole + decimals).isdigit():
        return None
    whole, decimals = whole.lstrip("0"), decimals.rstrip("0")
    return text.startswith("-") and bool(whole or decimals), whole, decimals


def _words(gold: list[Token], answer: list[Token]) -> bool | None:
    """Whether words, or letters of a choice, are the same; None where one is no words."""
    if choice := _choice(gold):
        chosen = _chosen(answer)
        if chosen is not None:
            return chosen == choice
    first, second = _plain_words(gold), _plain_words(answer)
    led = _plain_words(answer[_lead(answer) or 0 :])
    if not first or not (second or led):
        return None
    if _may_be_variables(gold) and not _is_short_word(gold):
        return None
    return first in (second, led) or (None if _may_be_variables(gold) else False)


def _may_be_variables(tokens: list[Token]) -> bool:
    """Whether it may be a product."""
    return all(len(token.text) <= 3 and token.kind != "text" for token in tokens)


def _is_short_word(tokens: list[Token]) -> bool:
    """Whether it is one word that is written in any case: ``yes``, ``No``, ``Bob``."""
    word = tokens[0].text
    has_vowel = any(letter in "aeiouy" for letter in word.lower())
    return len(tokens) == 1 and (word.lower() == "no" or (len(word) == 3 and has_vowel))


def _plain_words(tokens: list[Token]) -> list[str] | None:
    """The words of an answer that is nothing but words (of a date or a time, numerals, too)."""
    words: list[str] = []
    for index, token in enumerate(tokens):
        if token.kind in ("letters", "text"):
            words.extend(token.text.casefold().replace("-", " ").replace(",", " ").split())
        elif token.kind == "number" and words:
            words.append(token.text)
        elif token.text in ("'", "-"):
            around = [each.text for each in tokens[max(0, index - 1) : index + 2]]
            if len(around) < 3 or not all(each.isalpha() for each in (around[0], around[2])):
                return None
            if max(map(len, around)) <= _LONGEST_PRODUCT:
                return None
        elif token.text not in (",", ".", "{", "}"):
            return None
    if any(len(word) > 1 for word in words if word != "and") or len(words) == 1:
        return words
    is_choices = all(token.text.isupper() or token.text in (",", "and") for token in tokens)
    is_text = any(token.kind == "text" for token in tokens)
    return [word for word in words if word != "and"] if is_choices or is_text else None


def _choice(tokens: list[Token]) -> str:
    """The letter of ``C``, ``(C)``, ``C.``; empty if it is none."""
    text = "".join(token.text for token in tokens).strip()
    letter = text.removeprefix("(").removesuffix(")").removesuffix(".")
    return letter if len(text) <= len("(C).") and letter in _CHOICES else ""


def _chosen(tokens: list[Token]) -> str | None:
    """The one letter that an answer chooses, whatever it says of that choice behind it; empty for
    several; None for none."""
    if alone := _choice([Token(t.kind, t.text.upper(), t.is_spaced) for t in tokens]):
        return alone
    marks = _choice_marks(tokens)
    if not marks:
        return None
    (letter, start, end) = marks[0]
    is_told = end < len(tokens) and (tokens[end].is_spaced or tokens[end].text == ":")
    goes_on = end < len(tokens) and tokens[end].text in ("+", "-", "=", "or", "and", "not")
    return letter if len(marks) == 1 and start == 0 and is_told and not goes_on else ""


def _choice_marks(tokens: list[Token]) -> list[tuple[str, int, int]]:
    """Letters marked as choices: ``(C)``, or at the start ``C)``, ``C.``, ``C:``; with where each
    begins and ends."""
    marks: list[tuple[str, int, int]] = []
    for index, token in enumerate(tokens):
        after = tokens[index + 1].text if index + 1 < len(tokens) else ""
        before = tokens[index - 1].text if index else ""
        if token.text in _CHOICES and before == "(" and after == ")":
            marks.append((token.text, index - 1, index + 2))
        elif token.text in _CHOICES and index == 0 and after in (")", ".", ":"):
            marks.append((token.text, index, index + 2))
        elif (
            index == 0
            and token.kind == "text"
            and token.text[:1] in _CHOICES
            and (token.text[1:2] in (")", ".", ":"))
        ):
            marks.append((token.text[0], index, index + 1))
    return marks


def _rivals(gold: str, answer: str, *readings: Reading) -> bool:
    """Whether one is in dollars or degrees and the other in cents or radians."""
    found = []
    for text, reading in zip((gold, answer), readings, strict=True):
        units = {word for word, _ in reading.unit} | ({"usd"} if "\\$" in text else set())
        if any(each[0] == "deg" for each in subtrees(reading.tree)):
            units.add("deg")
        found.append(units)
    first, second = found
    return any(first & few and second & few and first & few != second & few for few in _RIVALS)


def _says_less(gold: Reading, answer: Reading) -> bool:
    """Whether the answer is about a number, or a list with it, where the gold one is the number."""
    is_exact = not gold.is_rounded and not variables(gold.tree) and not _has_decimals(gold.tree)
    return (answer.is_rounded and is_exact) or (
        answer.is_listed and not gold.is_listed and gold.tree[0] not in ("matrix", *_COLLECTIONS)
    )


def _has_decimals(tree: Tree) -> bool:
    return any(each[0] == "num" and "." in each[1] for each in subtrees(tree))


def _units_clash(gold: Reading, answer: Reading) -> bool:
    """Whether both have a unit or a remark, and not the same."""
    if not gold.unit or not answer.unit:
        return False
    return sorted(gold.unit) != sorted(answer.unit)
