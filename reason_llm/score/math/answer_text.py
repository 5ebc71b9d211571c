"""Comparison of two answers by their text alone; the rest is a question for mathematics."""

import functools
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from reason_llm.score.math import constraints, phrases
from reason_llm.score.math.answer_form import form_of, is_plain
from reason_llm.score.math.answer_tree import (
    BASES,
    FUNCTIONS,
    LABELS,
    MAX_CHARACTERS,
    Reading,
    Tree,
    UnreadableError,
    read,
    subtrees,
    variables,
)
from reason_llm.score.math.latex_tokens import Token, tokenize, whole_numerals
from reason_llm.score.math.naming import as_asked
from reason_llm.score.math.numeric import are_far_apart
from reason_llm.score.math.question import read_question, words_of
from reason_llm.score.math.units import conversion_factor, is_unit, word_set

LEAD_WORDS = word_set(
    """
    the a final correct our answer answers result value values solution solutions option choice
    total sum product difference quotient remainder number area volume perimeter circumference
    length width height depth radius diameter distance probability minimum maximum smallest
    largest least greatest highest lowest possible required desired expected slope intercept
    angle measure average mean median mode range cost price speed rate time age ratio percentage
    root roots degree coefficient sequence function equation expression simplified form interval
    domain matrix vector point coordinates therefore thus so hence then finally we have get find
    obtain fraction decimal person people it that this there which is are be was equals equal to
    gives of x y z n only just exactly
    """
)
"""Words that may stand before an answer and say nothing of its value."""
_ARTICLES = word_set("a an the")
ORDINALS = frozenset(["st", "nd", "rd", "th"])
_MONTH_NAMES = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)  # fmt: skip
_MONTHS = frozenset(_MONTH_NAMES)
_TIMES = word_set("clock when")
_TIMES_OF_DAY = (
    ("in the morning", "am"), ("in the afternoon", "pm"), ("in the evening", "pm"),
    ("at night", "pm"), ("12:00 noon", "12 pm"), ("12 noon", "12 pm"), ("12 midnight", "12 am"),
    (" o'clock", ":00"),
)  # fmt: skip
_LONGEST_DATE = 40
_DAYS = ("the day before", "the previous day", "the next day")
_DATE = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})", re.ASCII)
_DATE_IN_NUMBERS = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2([12]\d{3})", re.ASCII)
_TIME = re.compile(r"(\d{1,2})(?::(\d\d)(?::(\d\d))?+(am|pm)?+|(am|pm))", re.ASCII)
_FORMS_OF_DATES = word_set("iso format yyyy mm dd")
DIRECTIONS = tuple(
    (one, other)
    for up, down in [
        (
            word_set("rise rises rose risen increase increases increased grow grew gain gained"),
            word_set("fall falls fell fallen decrease decreases decreased drop dropped lose lost"),
        ),
        (
            word_set("maximum largest greatest highest most biggest"),
            word_set("minimum smallest least lowest fewest"),
        ),
    ]
    for one, other in ((up, down), (down, up))
)
"""Words that say the opposite of one another."""
_LEADS = word_set(
    """
    is are be was equals equal to gives have get find obtain therefore thus so hence then
    finally answer option choice only just exactly
    """
)
"""Words that an answer may follow."""
_MAX_LEAD_TOKENS = 40
"""Tokens that are looked at for them: each asks for all before it."""
_APART = str.maketrans("-,.", "   ")
_CHOICES = frozenset("ABCDEFGHIJ")
_CHOICE_MARKS = (")", ".", ":")
_FIRST_FOREIGN, _FIRST_SYMBOL = 0x400, 0x1D400
"""Letters from Cyrillic on, up to those of mathematics, are no variables but words."""
_WITH_UNIT = re.compile(
    r"(-?+\d[\d.,]*+(?:/\d++)?+(π|[ ]?+\\pi(?![A-Za-z]))?+"
    r"(?:[ ]?+\\times[ ]?+10\^\{?+-?+\d++\}?+)?+)(?:[ ~]|\\[ ,;])++"
    r"([A-Za-z]++(?:/[A-Za-z]++)?+)((?:\^\{?+\d\}?+|[²³])?+)"
)
"""A number, a unit and its exponent."""
_END = re.compile(r"[.,?!]?+(?:\s|\Z)")
_SIZED = word_set("s min h d week month yr cent usd")
"""Units of which a question's value is given without a name."""
_EULER = re.compile(r"(?<![A-Za-z\\])e(?![A-Za-z]|[+-]?+\d)")
_EXPONENT = re.compile(r"(?<=\d)e(?=[+-]?+\d)")
_LONGEST_NUMERAL = 100
_BASES = tuple(
    (base, re.compile(rf"\b(?:in|into|to|as)(?: an?)? (?:{words})\b", re.IGNORECASE))
    for base, words in (("16", "hexadecimal|base 16|base sixteen"), ("2", "binary|base 2|base two"),
                        ("8", "octal|base 8|base eight"))
)  # fmt: skip
_PREFIXES = {"0x": "16", "0b": "2", "0o": "8"}
_OF_NUMERALS = re.compile(r"\\(?:text(?:bf|tt)?|math(?:rm|bf|tt)|[,;! ])|[{}()$\s]")
_NUMERAL_OF_BASE = re.compile(r"(0[xbo])?([0-9A-F]++)(?:_(\w++))?+", re.IGNORECASE)
_LONGEST_LIST = 400
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})++")
_THREES = re.compile(r"[1-9]\d\d(?:,[1-9]\d\d)++")
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_BECAUSE = word_set("because since as it they")
_COLLECTIONS = ("set", "list", "tuple", "interval")
_IMPLICATIONS = word_set("Rightarrow implies Longrightarrow therefore Leftrightarrow iff")
"""Signs behind which the answer stands."""
_IDENTITIES = ("f", "g", "h", "P")
_LONGEST_PRODUCT = 3
"""Letters that may be a product of variables; around a hyphen, longer ones are words."""


@dataclass(frozen=True, slots=True)
class Question:
    """Question that the text leaves open: do these two trees have the same value?"""

    gold: Tree
    answer: Tree


def decide(gold: str, answer: str, question: str = "") -> bool | Question:
    """Whether two answers are the same, where their text tells; else the question for mathematics.

    Text tells of equal strings, numerals, words, letters of a choice, units that differ, of equal
    normal forms, and of answers that nobody can read to their end.

    Args:
        question: what was asked, for its units, its words and its options; empty: not known.
    """
    gold, answer = unwrapped(gold), unwrapped(answer)
    if not gold or not answer:
        return False
    if (verdict := _same_moment(gold, answer, question)) is not None:
        return verdict
    if (pair := _numerals_of_base(gold, answer, question)) is not None:
        return pair[0] == pair[1]
    numerals = _numeral(gold), _numeral(answer)
    if None not in numerals:
        return numerals[0] == numerals[1]
    # Cheap and certain readings came first; beyond this length the others would take too long.
    if max(len(gold), len(answer)) > MAX_CHARACTERS:
        return gold == answer
    gold_tokens, tokens = tokens_of(gold), tokens_of(answer)
    if not gold_tokens or not tokens:
        return False
    if spelling(gold_tokens) in (spelling(tokens), spelling(tokens[_answer_start(tokens) or 0 :])):
        return True
    if (verdict := _same_words(gold_tokens, tokens, question)) is not None:
        return verdict
    readings = read_both(gold, answer)
    if readings is None or not constraints.units_fit(*readings, question):
        return False
    if _is_less_exact(*readings, question):
        return False
    trees = trees_as_asked(gold, answer, question)
    if trees is None or are_far_apart(*trees):
        return False
    if not constraints.ratio_fits(*trees, question):
        return False
    trees = constraints.as_ordered(*trees, question)
    first, second = map(form_of, trees)
    if first.value == second.value and trees[0][0] == trees[1][0]:
        return True
    if first.is_too_large or second.is_too_large:
        return first.value == second.value
    return Question(*trees)


def is_bare_word(gold: str) -> bool:
    """Whether a gold answer is one word that is written in any case: ``Yes``, ``No``, ``Bob``."""
    tokens = tokens_of(unwrapped(gold))
    return bool(tokens) and _is_short_word(tokens)


def is_choice(gold: str) -> bool:
    """Whether a gold answer is the letter of a choice."""
    return bool(_choice_letter(tokens_of(unwrapped(gold))))


def converted(gold: str, answer: str, question: str) -> tuple[str, str] | None:
    """The gold answer, and the answer in its unit, ``90`` for ``1 hour 30 minutes``; None for other
    quantities, and if the question names a unit."""
    measures = _measures(answer) if question else []
    if not measures:
        return None
    if len(golds := _measures(gold)) > 1:
        first_total, total = (_in_unit(each, golds[0].unit[0]) for each in (golds, measures))
        return (first_total, total) if first_total and total else None
    if (reading := reading_of(gold, letters_are_units=False)) is None or variables(reading.tree):
        return None
    asked, named = words_of(question), constraints.asked_units(question).named
    units, first = reading.unit, measures[0].unit[0]
    if not units and len(measures) > 1:
        units = (first,)
    elif not units:  # 120 minutes for 2, where hours are spoken of
        spoken = [(unit, "1") for unit in asked & _SIZED]
        units = tuple(unit for unit in spoken if conversion_factor(first, unit))
    if len(units) != 1 or not (reading.unit or units[0][0] in asked):
        return None
    if named and not (len(measures) > 1 and named == {units[0]} == {first}):
        return None
    total = _in_unit(measures, units[0])
    return (gold, total) if total else None


def _measures(text: str) -> list[Reading]:
    """The two parts of ``1 hour 30 minutes``; empty unless all are a number and a unit."""
    parts: list[list[Token]] = [[]]
    for token in tokens_of(text):
        for word in token.text.split() if token.kind == "text" else [token.text]:
            last = parts[-1]
            is_behind = last and (last[-1].text in (",", "and") or is_unit(last[-1].text))
            if token.kind == "number" and is_behind:
                while last and last[-1].text in (",", "and"):
                    last.pop()
                parts.append([])
            parts[-1].append(Token(token.kind, word, token.is_spaced))
    try:
        readings = [read(part, letters_are_units=True) for part in parts]
    except UnreadableError:
        return []
    values = [each.tree[-1] if each.tree[0] == "rel" else each.tree for each in readings]
    is_measured = all(map(is_plain, values)) and all(len(each.unit) == 1 for each in readings)
    pairs = zip(readings, values, strict=True)
    return [replace(each, tree=value) for each, value in pairs] if is_measured else []


def _in_unit(measures: list[Reading], unit: tuple[str, str]) -> str | None:
    """The sum of measures in a unit; None where one measures another quantity."""
    scales = [conversion_factor(measure.unit[0], unit) for measure in measures]
    numbers = [dict(form_of(measure.tree).value).get((), Fraction(0)) for measure in measures]
    if None in scales:
        return None
    total = sum(number * (scale or 0) for number, scale in zip(numbers, scales, strict=True))
    above, below = Fraction(total).as_integer_ratio()
    return f"\\frac{{{above}}}{{{below}}}" if below > 1 else str(above)


def is_embellished(gold: str, answer: str) -> bool:
    """Whether an equal answer has additions: brackets, braces, a remark, an integral, ``or``."""
    tokens, gold_tokens = tokens_of(answer), tokens_of(gold)
    added = {str(token) for token in tokens} - {str(token) for token in gold_tokens}
    has_more = (
        added & {"or", "\\{", "\\int", "\\begin"} or phrases.without_remark(tokens) is not tokens
    )
    return bool(has_more) or has_brackets(answer) > has_brackets(gold)


def as_lists(gold: str, answer: str) -> tuple[str, str] | None:
    """Write spaces behind commas, if an answer may be several numbers of three digits, ``121,484``,
    or brackets around the answer, if the gold one is a list of three or more in square brackets;
    None for others."""
    gold_list, answer_list = unwrapped(gold), unwrapped(answer)
    is_list = "," in answer_list and not has_brackets(answer_list)
    if is_list and gold_list[:1] == "[" and gold_list.count(",") > 1:
        return gold, f"[{answer_list}]"
    if "," not in gold or not any(_THREES.fullmatch(unwrapped(text)) for text in (gold, answer)):
        return None
    return gold.replace(",", ", "), answer.replace(",", ", ")


def words_decide(gold: str, answer: str, question: str = "") -> bool:
    """Whether words, letters of a choice or a date decide about the answer."""
    gold, answer = unwrapped(gold), unwrapped(answer)
    if _same_moment(gold, answer, question) is not None:
        return True
    if _numerals_of_base(gold, answer, question) is not None:
        return True
    is_long = max(len(gold), len(answer)) > MAX_CHARACTERS
    return is_long or _same_words(tokens_of(gold), tokens_of(answer), question) is not None


def is_only_text(gold: str) -> bool:
    """Whether a gold answer with digits is neither mathematics nor a date: only its words match."""
    if not any(map(str.isdecimal, gold)) or _moment(gold) is not None:
        return False
    if any(letter.isalpha() and ord(letter) >= _FIRST_FOREIGN for letter in gold):
        return ord(max(filter(str.isalpha, gold))) < _FIRST_SYMBOL  # 12只, but not 𝜋
    return reading_of(gold, letters_are_units=False) is None


def read_both(gold: str, answer: str) -> tuple[Reading, Reading] | None:
    """Read both answers to their end; None if one cannot be read."""
    if _has_euler(gold) != _has_euler(answer):
        gold, answer = (_EXPONENT.sub(" e", text) for text in (gold, answer))
    if (gold_reading := reading_of(gold, letters_are_units=False)) is None:
        return None
    reading = reading_of(answer, letters_are_units=not variables(gold_reading.tree))
    return None if reading is None else (gold_reading, reading)


@functools.lru_cache(maxsize=4096)
def _has_euler(text: str) -> bool:
    """Whether the number e stands in it, so that ``3e-2`` next to it is no power of ten."""
    return "e" in text and _EULER.search(text) is not None


@functools.lru_cache(maxsize=4096)
def trees_as_asked(gold: str, answer: str, question: str) -> tuple[Tree, Tree] | None:
    """Read both answers and remove their names; None if they cannot be equal."""
    readings = read_both(gold, answer)
    return None if readings is None else as_asked(readings[0].tree, readings[1].tree, question)


@functools.lru_cache(maxsize=4096)
def reading_of(answer: str, letters_are_units: bool) -> Reading | None:
    """The answer read to its end, what leads to it left out; None if it cannot be."""
    tokens = phrases.without_remark(tokens_of(answer))
    if phrases.means_empty_set(tokens):
        return Reading(["const", "empty"], ())
    tokens, modulus = phrases.without_modulus(tokens)
    if not modulus and tokens and tokens[0].text in _IDENTITIES:  # f(x) \\equiv 0
        equals = Token("sign", "=", False)
        tokens = [equals if str(token) == "\\equiv" else token for token in tokens]
    tokens = phrases.as_numerals(_without_left_sides(tokens))
    try:
        reading = read(phrases.with_sets(tokens[_answer_start(tokens) or 0 :]), letters_are_units)
    except UnreadableError:
        return None
    return replace(reading, tree=["mod", reading.tree, ["num", modulus]]) if modulus else reading


@functools.lru_cache(maxsize=1024)
def tokens_of(answer: str) -> list[Token]:
    """The tokens of an answer, a full stop behind it left out; not to be changed."""
    tokens = tokenize(unwrapped(answer)[:MAX_CHARACTERS])
    while tokens and str(tokens[-1]) in (".", ",", ";") and str(tokens[-2:][0]) != ".":
        tokens.pop()
    for place in range(len(tokens) - 1, -1, -1):
        if tokens[place].kind == "command" and tokens[place].text in _IMPLICATIONS:
            tokens = tokens[place + 1 :]
            break
    groups = _groups_around(tokens)
    return tokens[groups : len(tokens) - groups]


def has_brackets(answer: str) -> bool:
    """Whether the answer begins and ends with a bracket."""
    names = [str(token) for token in tokens_of(answer)]
    return len(names) > 1 and names[0] in ("(", "[") and names[-1] in (")", "]")


def _groups_around(tokens: list[Token]) -> int:
    """Number of pairs of braces around all of it, in linear time."""
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
    """Strip spaces, Markdown's marks, a box and dollar signs around a text; write a set in Python's
    braces, ``{1, 2}``, with LaTeX's."""
    return text.strip() if len(text) > MAX_CHARACTERS else _unwrapped(text)


@functools.lru_cache(maxsize=4096)
def _unwrapped(text: str) -> str:
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
    text = text.replace("{}^", "^").replace("\\mathcal{O}(", "O(").replace("\\mathrm{O}(", "O(")
    inner = text[1:-1]
    is_set = text[:1] == "{" and text[-1:] == "}" and _is_closed(inner)
    if is_set and _has_comma(inner) and not _GROUPED.fullmatch(inner):
        return f"\\{{{inner}\\}}"
    return text


def _has_comma(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            return True
    return False


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
    return "\x00".join(map(str, tokens))


def normalise(answer: str) -> str:
    """One string for all the layouts of an answer."""
    text = unwrapped(answer)
    return text if len(text) > MAX_CHARACTERS else _normalised(text)


@functools.lru_cache(maxsize=4096)
def _normalised(answer: str) -> str:
    return spelling(tokens_of(answer))


def _answer_start(tokens: list[Token]) -> int | None:
    """Start of the answer behind words that lead to it; None without such words."""
    start, has_word = None, False
    if sum(token.text.casefold().rstrip(" :=") in LABELS for token in tokens) > 1:
        return None
    names = [str(token) for token in tokens[:_MAX_LEAD_TOKENS]]
    if (sign := _first_equals(names)) and phrases.is_left_side(tokens[:sign]):
        return sign + 1
    for index, token in enumerate(tokens[:_MAX_LEAD_TOKENS]):
        words = token.text.lower().replace(":", " : ").replace(",", " , ").split()
        if token.kind not in ("letters", "text") and token.text not in (",", ":"):
            break
        if not all(word in LEAD_WORDS or word in ",:" for word in words):
            break
        has_word |= len(token.text.rstrip(": ")) > _LONGEST_PRODUCT
        is_behind = words[-1] in _LEADS or (words[-1] == ":" and has_word)
        if is_behind or (words[-1] == "," and start == index):
            start = index + 1
    return start


def _without_left_sides(tokens: list[Token]) -> list[Token]:
    """``2xy, x^2`` of ``\\frac{dz}{dx} = 2xy, \\frac{dz}{dy} = x^2``."""
    if [token.text for token in tokens].count("=") < 2 or len(tokens) > _LONGEST_LIST:
        return tokens
    shortened: list[Token] = []
    start = depth = 0
    for place, token in enumerate([*tokens, Token("sign", ",", False)]):
        name = str(token)
        depth += (name in ("{", "(", "[")) - (name in ("}", ")", "]"))
        if depth == 0 and (name == "," or name.casefold() == "and"):
            part = tokens[start:place]
            sign = _first_equals([*map(str, part)])
            shortened += part[sign + 1 :] if sign and phrases.is_left_side(part[:sign]) else part
            shortened += tokens[place : place + 1]
            start = place + 1
    return shortened


def _first_equals(names: list[str]) -> int:
    """The place of the first sign of equality outside of brackets; 0 for none."""
    depth = 0
    for place, name in enumerate(names):
        depth += (name in ("{", "(", "[")) - (name in ("}", ")", "]"))
        if name == "=" and not depth:
            return place
    return 0


def _numerals_of_base(gold: str, answer: str, question: str) -> tuple[str, str] | None:
    """Digits of two numerals of one base, ``FF`` and ``FF_{16}`` or ``0xFF``; None for others."""
    if max(len(gold), len(answer)) > _LONGEST_NUMERAL:
        return None
    plain = (_OF_NUMERALS.sub("", text.rpartition("=")[2]) for text in (gold, answer))
    first, second = map(_NUMERAL_OF_BASE.fullmatch, plain)
    if first is None or second is None or not any((*first.group(1, 3), *second.group(1, 3))):
        return None
    if not any(second.group(1, 3)) and first[2].isdigit():  # as mathematics, 101 and 101_2
        return None
    asked_base = next((base for base, words in _BASES if words.search(question)), "")
    bases = {
        _PREFIXES.get(str(match[1]).lower()) or BASES.get(match[3], match[3]) or asked_base
        for match in (first, second)
    }
    is_one_base = len(bases) == 1 and bases.pop().isdigit()
    return (first[2].upper(), second[2].upper()) if is_one_base else None


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


def _same_words(gold: list[Token], answer: list[Token], question: str) -> bool | None:
    """Whether words, or letters of a choice, are the same; None where one is no words."""
    if len(gold) > 1 and gold[0].text.casefold() in LEAD_WORDS:  # The answer is C
        gold = gold[_answer_start(gold) or 0 :] or gold
    letters = [_chosen_letters(tokens, question) for tokens in (gold, answer)]
    if all(letters):
        return letters[0] == letters[1]
    if choice := _choice_letter(gold):
        chosen = _chosen_letter(answer, question)
        if chosen is not None:
            return chosen == choice
        others = _options(question).keys() - {choice}
        if others & {word.strip(",.;()") for token in answer for word in token.text.split()}:
            return False
    if phrases.means_empty_set(gold) and phrases.means_empty_set(answer):
        return True
    if "".join(map(str, gold)) == "0" and constraints.demands_of(question).number:
        rest = answer[len(gold) :] if answer[: len(gold)] == gold else answer
        if phrases.means_empty_set(rest):  # 0 (no solutions)
            return True
    if phrases.with_sets(gold) is not gold:
        return None
    if (verdict := _yes_or_no(gold, answer)) is not None:
        return verdict
    first = _plain_words_without_article(gold)
    if not first:
        return None
    second, led = map(_plain_words_without_article, (answer, answer[_answer_start(answer) or 0 :]))
    if not second and not led:
        return None
    if _may_be_variables(gold) and not _is_short_word(gold):
        return None
    return first in (second, led) or (None if _may_be_variables(gold) else False)


def _plain_words_without_article(tokens: list[Token]) -> list[str] | None:
    """The words of an answer of words alone, without a leading article, the month first."""
    words = _month_first(_plain_words(tokens))
    return words[1:] if words and len(words) > 1 and words[0] in _ARTICLES else words


def _yes_or_no(gold: list[Token], answer: list[Token]) -> bool | None:
    """Whether ``No, 91 is not prime`` means ``No``; None if either answer has no such word."""
    expected = gold[0].text.casefold().strip() if len(gold) == 1 else ""
    if expected not in _OPPOSITES:
        return None
    if len(answer) == 1 == len(answer[0].text.split()):
        return None
    text = " ".join(token.text.casefold() for token in answer)
    first, _, rest = text.replace(" ,", ",").replace(" .", ".").partition(" ")
    words = {word.strip(".,;:!?()-") for word in rest.split()}
    stated, is_alone = first.strip(".,;:!"), first[-1:] in ".,;:!" or bool(words & _BECAUSE)
    if stated not in _OPPOSITES or not is_alone:
        return None
    is_positive = stated in ("yes", "true")
    contrary = {"no", "false"} if is_positive else {"yes", *(() if "not" in words else ("true",))}
    return stated == expected and not words & (contrary | {"or", "maybe", "perhaps", "but", "wait"})


def _month_first(words: list[str] | None) -> list[str] | None:
    """The words of a date with its month first: ``the 4th of April`` as ``april 4``."""
    month = next((word for word in words or () if word in _MONTHS), None)
    if words is None or month is None:
        return words
    return [month, *(word for word in words if word not in (month, "the", "of", "on"))]


def _same_moment(gold: str, answer: str, question: str) -> bool | None:
    """Whether two dates or times are the same, ``13:15`` and ``1:15 PM``; None where the gold
    answer is neither, or both are words. ``2:15`` is a time if the question asks for one."""
    first, second = _moment(gold), _moment(answer)
    is_asked = bool(_TIMES & words_of(question)) or "what time" in question.lower()
    if first is None or (first.kind == "time" and not (first.is_marked or is_asked)):
        return None
    if second is None:
        return None if first.kind == "named" else False
    match first.kind, second.kind:
        case "time", "time":
            is_open = second.half in ("", first.half)
            is_open |= not first.half and second.half in words_of(question)
            is_same = first.numbers == second.numbers and is_open
            return is_same or first.on_24_hours() == second.on_24_hours()
        case "date", "named":
            return first.numbers == second.numbers and not _FORMS_OF_DATES & words_of(question)
        case "numbers", "named":  # if only one of its numbers can be the month
            one, other, year = first.numbers
            orders = [[year, *pair] for pair in ((one, other), (other, one)) if pair[0] <= 12]
            return orders == [second.numbers]
        case "named", kind if kind != "date":
            return None
    return first.numbers == second.numbers


@dataclass(frozen=True, slots=True)
class _Moment:
    """A date, ``2024-03-05``, one with the name of its month, one in numbers whose order is open,
    ``02/11/1987``, or a time."""

    kind: Literal["date", "named", "numbers", "time"]
    numbers: list[int]
    """Year, month and day, the numbers as they are written, or hour, minute and second."""
    half: str = ""
    is_marked: bool = True
    """It is no ratio."""

    def on_24_hours(self) -> list[int]:
        hour, *rest = self.numbers
        if self.half and hour <= 12:
            hour = hour % 12 + 12 * (self.half == "pm")
        return [hour, *rest]


@functools.lru_cache(maxsize=1024)
def _moment(text: str) -> _Moment | None:
    """The date or the time that a text is; None of another text."""
    if len(text) > _LONGEST_DATE or text.isdecimal():
        return None
    for time, shown in _TIMES_OF_DAY:
        text = text.replace(time, shown)
    shown, _, remark = text.partition("(")
    if shown.strip() and remark:  # (the day before), (4:05 PM)
        remark = remark.rstrip("} ").removesuffix(")")
        stated, other = _moment(shown), _moment(remark)
        is_same = stated and other and stated.on_24_hours() == other.on_24_hours()
        return stated if is_same or remark in _DAYS else None
    plain = "".join(map(str, tokens_of(text))).casefold().replace(" ", "").strip("{}")
    if match := _DATE_IN_NUMBERS.fullmatch(plain):
        numbers = [int(match[place]) for place in (1, 3, 4)]
        is_date = 1 <= min(numbers[:2]) <= 12 and max(numbers[:2]) <= 31
        return _Moment("numbers", numbers) if is_date else None
    if match := _DATE.fullmatch(plain):
        return _Moment("date", [int(number) for number in match.groups()])
    if match := _TIME.fullmatch(plain.replace(".", "")):
        numbers = [int(number or 0) for number in match.groups()[:3]]
        half = match[4] or match[5] or ""
        is_marked = bool(half or match[3]) or "0" in (match[1][0], match[2][0])
        return _Moment("time", numbers, half, is_marked)
    month, *words = _month_first(_plain_words(tokens_of(text))) or [""]
    if month not in _MONTHS or len(words) != 2 or not all(map(str.isdecimal, words)):
        return None
    day, year = sorted(words, key=len)
    numbers = [int(year), _MONTH_NAMES.index(month) + 1, int(day)]
    return _Moment("named", numbers) if len(year) == 4 else None


def _may_be_variables(tokens: list[Token]) -> bool:
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
        if token.text in ORDINALS and words and words[-1].isdigit():
            continue
        if token.kind in ("letters", "text"):
            words.extend(token.text.casefold().translate(_APART).split())
        elif token.kind == "number" and (
            words or any(t.text.casefold() in _MONTHS for t in tokens)
        ):
            words.append(token.text)
        elif token.text in ("'", "-"):
            around = [neighbor.text for neighbor in tokens[max(0, index - 1) : index + 2]]
            if len(around) < 3 or not all(text.isalpha() for text in (around[0], around[2])):
                return None
            if max(map(len, around)) <= _LONGEST_PRODUCT:
                return None
        elif token.text not in (",", ".", "{", "}") and not (
            token.text == "^" and ORDINALS & {t.text for t in tokens[index + 1 : index + 3]}
        ):
            return None
    words = [word for word in words if word != "and"] if len(words) > 1 else words
    # Single letters are variables, unless they are capitals of choices or come from ``\\text{}``.
    if any(len(word) > 1 for word in words) or len(words) == 1:
        return words
    is_choices = all(token.text.isupper() or token.text in (",", "and") for token in tokens)
    is_text = any(token.kind == "text" for token in tokens)
    return words if is_choices or is_text else None


def _choice_letter(tokens: list[Token]) -> str:
    """The letter of ``C``, ``(C)``, ``C.``, ``Option C``; empty if it is none."""
    is_led = len(tokens) > 1 and tokens[0].text.casefold() in ("option", "choice")
    tokens = tokens[is_led:]
    text = "".join(token.text for token in tokens).strip()
    if len(tokens) == 1 and tokens[0].kind == "text":
        *lead, text = text.split() or [""]
        if not all(word.lower().strip(":") in LEAD_WORDS for word in lead):
            return ""
    letter = text.removeprefix("(").removesuffix(".").removesuffix(")")
    return letter if len(text) <= len("(C).") and letter in _CHOICES else ""


def _chosen_letter(tokens: list[Token], question: str) -> str | None:
    """The one letter that an answer chooses; empty for several or a wrong text; None for none."""
    tokens = _with_plain_letters(tokens)
    tokens = tokens[_answer_start(tokens) or 0 :]
    if alone := _choice_letter([Token(t.kind, t.text.upper(), t.is_spaced) for t in tokens]):
        is_variable = alone.lower() in "".join(t.text for t in tokens) and question
        return "" if is_variable and read_question(question).has_variable(alone.lower()) else alone
    if not _choice_marks(tokens):
        letter = tokens[0].text if tokens else ""
        is_known = letter in _options(question)
        return letter if is_known and _is_option_text(letter, tokens[1:], question) else None
    letter, text = _marked(tokens, question)
    return letter if letter and _is_option_text(letter, text, question) else ""


def _marked(tokens: list[Token], question: str) -> tuple[str, list[Token]]:
    """The one letter before a text, or behind an option's, ``12 (B)``, and the text; or nothing."""
    (letter, start, end), *others = _choice_marks(tokens) or [("", 0, 0)]
    if letter and not others and start == 0:
        return letter, tokens[end:]
    is_behind = not others and end == len(tokens) and _options(question)
    return (letter, tokens[:start]) if is_behind else ("", [])


def _chosen_letters(tokens: list[Token], question: str) -> set[str]:
    """Several letters of the question's options, each perhaps with its own text behind it:
    ``A and C``, ``AC``, ``A (2) and C (4)``; empty for anything else."""
    if not (options := _options(question)) or len(tokens) > _MAX_LEAD_TOKENS:
        return set()
    tokens = [
        inner
        for token in _without_braces_of_letters(tokens)
        for inner in (tokenize(token.text) if token.kind == "text" else [token])
    ]
    chosen: dict[str, list[Token]] = {}
    for token in tokens:
        name = token.text
        if len(name) > 1 and not chosen and name.casefold().rstrip("s") in LEAD_WORDS:
            continue
        is_letters = name.isupper() and set(name) <= options.keys()
        if is_letters and not (chosen.keys() & set(name)):
            chosen |= {letter: [] for letter in name}
        elif name not in (",", ";", ".", ")", "(", "and", "\\{", "\\}", "{", "}"):
            if not chosen:
                return set()
            list(chosen.values())[-1].append(token)
    # A letter next to another option's text contradicts itself.
    is_right = all(
        not text or _is_option_text(letter, text, question) for letter, text in chosen.items()
    )
    return set(chosen) if len(chosen) > 1 and is_right else set()


def as_option(gold: str, question: str) -> tuple[str, ...] | None:
    """The letter and the text of a gold answer that is one of the question's options, ``(D) 9``;
    the letter alone where the text is one letter, too; None for any other."""
    if len(gold) > MAX_CHARACTERS or not (options := _options(question)):
        return None
    letter, rest = _marked(_with_plain_letters(tokens_of(unwrapped(gold))), question)
    if letter not in options or not _is_option_text(letter, rest, question):
        return None
    text = " ".join(map(str, whole_numerals(rest)))
    return (letter,) if len(text) == 1 and text.isalpha() else (letter, text)


def _with_plain_letters(tokens: list[Token]) -> list[Token]:
    """``(B) 9`` of ``\\text{(B) 9}`` and ``(\\text{B}) 9``."""
    tokens = _without_braces_of_letters(tokens)
    is_text = tokens[:1] and tokens[0].kind == "text"
    return [*tokenize(tokens[0].text), *tokens[1:]] if is_text else tokens


def _without_braces_of_letters(tokens: list[Token]) -> list[Token]:
    """``(\\text{B})`` as ``(B)``."""
    names = [str(token) for token in tokens]
    braces = {
        end
        for place, name in enumerate(names)
        if name in _CHOICES
        and names[place - 1 : place] + names[place + 1 : place + 2] == ["{", "}"]
        for end in (place - 1, place + 1)
    }
    return [token for place, token in enumerate(tokens) if place not in braces]


def without_formulas(gold: str, answer: str) -> str:
    """Drop a formula before a number: ``h = \\frac12 gt^2 = 44.1`` becomes ``h = 44.1``."""
    reading = reading_of(gold, letters_are_units=False) if answer.count("=") > 1 else None
    if reading is None or variables(reading.tree) or len(answer) > MAX_CHARACTERS:
        return answer
    first, *between, last = answer.split("=")
    if len(first.strip(" $")) > 1:
        return answer
    has_letter = [any(token.kind == "letters" for token in tokenize(part)) for part in between]
    return f"{first}={last}" if all(has_letter) else answer


def with_text_unit(gold: str, question: str) -> str:
    """``44.1\\text{ m}`` of ``44.1 m``, where the letter is no variable of the question, and
    ``12\\text{ men}`` of ``12 men``, where the question has the word."""
    match = _WITH_UNIT.fullmatch(unwrapped(gold))
    if match is None:
        return gold
    parts = match[3].split("/")
    letters = "".join(part for part in parts if len(part) == 1)
    is_word = len(match[3]) > 2 and f" {match[3]} " in _END.sub(" ", question)
    is_open = bool(letters or match[2]) or match[3].lower() in FUNCTIONS  # 45 sec
    if not is_word and not (is_open and all(map(is_unit, parts))):
        return gold
    if letters and re.search(rf"(?<![^\W_])(?<!\d )(?<!/)[{letters}](?![\w/²³^])", question):
        return gold
    return f"{match[1]}\\text{{ {match[3]}}}{match[4]}"


def _is_option_text(letter: str, tokens: list[Token], question: str) -> bool:
    """Whether tokens can be the text of an option; a number, if the question has no options."""
    options, tokens = _options(question), whole_numerals(_without_brackets(tokens))
    if letter in options:
        shown = spelling(tokens).rstrip(".")
        if not shown:
            return False
        return options[letter].startswith(shown) or _is_read_alike(options[letter], tokens)
    try:
        tree = read(list(tokens), letters_are_units=False).tree
    except UnreadableError:
        return False
    is_number = not variables(tree) and tree[0] not in ("neg", "rel", "list", "either", "pm")
    return is_number and (not tokens or tokens[0].text not in ("+", "-", "="))


def _without_brackets(tokens: list[Token]) -> list[Token]:
    """``15`` of ``(15)``."""
    names = [str(token) for token in tokens]
    is_one = (names[:1], names[-1:]) == (["("], [")"]) and names.count("(") == 1
    return tokens[1:-1] if is_one and "," not in names else tokens


def _is_read_alike(option: str, tokens: list[Token]) -> bool:
    """Whether an option's text, up to the next one, and another are one formula."""
    option_tokens = tokenize(option.replace("\x00", " "))
    marks = _choice_marks(option_tokens, anywhere=True)
    try:
        trees = [
            read(formula, letters_are_units=False).tree
            for formula in (option_tokens[: marks[0][1]] if marks else option_tokens, list(tokens))
        ]
    except UnreadableError:
        return False
    return form_of(trees[0]).is_same(form_of(trees[1]))


@functools.lru_cache(maxsize=1024)
def _options(question: str) -> dict[str, str]:
    """The text of each of the question's options, ``(A) …`` or ``A) … B) …``, by letter."""
    if not any(f"A{mark}" in question for mark in _CHOICE_MARKS):
        return {}
    tokens = _without_braces_of_letters(tokenize(question[-MAX_CHARACTERS:]))
    marks = _choice_marks(tokens, anywhere=True)
    if not any(letter == "A" for letter, *_ in marks):
        return {}
    stops = [*(start for _, start, _ in marks[1:]), len(tokens)]
    return {
        letter: spelling([*whole_numerals(tokens[end:stop]), *tokens[stop:]])
        for (letter, _, end), stop in zip(marks, stops, strict=True)
    }


def _choice_marks(tokens: list[Token], anywhere: bool = False) -> list[tuple[str, int, int]]:
    """Places of letters marked as choices: ``(C)``, or at the start ``C)``, ``C.``, ``C:``."""
    marks: list[tuple[str, int, int]] = []
    for index, token in enumerate(tokens):
        after = tokens[index + 1].text if index + 1 < len(tokens) else ""
        before = tokens[index - 1].text if index else ""
        if token.text in _CHOICES and before == "(" and after == ")":
            marks.append((token.text, index - 1, index + 2))
        elif token.text in _CHOICES and (anywhere or index == 0) and after in _CHOICE_MARKS:
            marks.append((token.text, index, index + 2))
    return marks


def _is_less_exact(gold: Reading, answer: Reading, question: str) -> bool:
    """Whether the answer is about a number, or a list with it, where the gold one is the number."""
    is_exact = not constraints.demands_of(question).rounded
    is_exact &= not gold.is_rounded and not variables(gold.tree)
    is_exact &= not any(part[0] == "num" and "." in part[1] for part in subtrees(gold.tree))
    return (answer.is_rounded and is_exact) or (
        answer.is_listed and not gold.is_listed and gold.tree[0] not in ("matrix", *_COLLECTIONS)
    )
