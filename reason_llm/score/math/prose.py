"""Values of an answer in prose, to be compared with the values of the gold answer.

``\\text{There are } 20 \\text{ boys and } 16 \\text{ girls}`` says 20 and 16. Words around values
say nothing of them, except for those that change a value, deny it or doubt it: with one of these
an answer has no values here. Units stay with their numbers, and ``or`` stays between values.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise

from reason_llm.score.math.answer_text import (
    DIRECTIONS,
    LEAD_WORDS,
    is_bare_word,
    is_choice,
    reading_of,
    unwrapped,
)
from reason_llm.score.math.answer_tree import FUNCTIONS, MAX_CHARACTERS, Tree
from reason_llm.score.math.constraints import asking_sentences, demands_of
from reason_llm.score.math.question import AUXILIARIES, words_of
from reason_llm.score.math.units import AREAS, canonical, is_known, unit_words, word_set

_ITEM = re.compile(
    r"\\(?P<style>text(?:bf|it|rm|normal|sf|tt)?+|mathrm|mathbf|mathit|operatorname|mbox|hbox)"
    r"\*?+\s*+\{(?P<content>[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+)\}"
    r"|(?P<command>\\(?:[A-Za-z]++|.))"
    r"|(?P<word>[^\W\d_]{2,}+(?:['’/-][^\W\d_]++)*+|[^\W\d_](?:-[^\W\d_]{2,}+)*+)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
_ENGLISH = re.compile(r"\\(?:text|mbox|mathrm|operatorname)|(?<![\\A-Za-z])[^\W\d_]{3}")
"""Text without a match has no words."""
_EDGE = re.compile(r"(?:[\s,;:.~$]|\\[,;:!>() ]|\\q?quad(?![A-Za-z]))++")
_ENDS = re.compile(r"(?:[\s,;:.~$]|\\[,;:!>() ]|\\q?quad(?![A-Za-z]))\Z")
_PROSE = re.compile(r"\\(?:text|mathrm|mbox)|[^\W\d_]{4}")
_PROSE_IN_TEXT = re.compile(r"[^\W\d_]{2}|a |\\(?:text|mathrm|mbox)")
"""Start of prose in a bracket."""
_WORD = re.compile(r"[^\W\d_]++")
_BLANKS = re.compile(r"[\s{}]++")
_LATEX_TEXT = re.compile(r"\\(?:text\w{0,2}+|mathrm|mbox|[,;:! ])|[{}$~*]")
_OPENING = re.compile(r"\s*+(yes|no) *+[,.;:!–—-]")
_RATIO = re.compile(r"([^\W\d_]{2,}+) *+(?:to|:) *+(?=(?:the )?([^\W\d_]{2,}+))")
_PARTS_OF_LIST = re.compile(r",(?![^(]{0,60}+\))|;|\\text\{ *+and *+\}|\\q?quad|\\\\")
_CALL = re.compile(r"(?<=[A-Za-z}])\([^()]*+\)\s*+\Z")
_REASON = re.compile(
    r"(?<=[a-z}])[,.;]?+(?: ?\}| |\\[ ,;]){0,4}+(?:\((?![^)]{0,60}\b(?:not|or|but|no)\b)"
    r"|\b(?:by|since|because|due to)\b"
    r"|\bto(?=[ }$]*+[\d\\])).*+", re.DOTALL,
)  # fmt: skip
"""A reason or a remark behind the words of an answer."""
_SYMBOLS = {
    "m": word_set("slope gradient"), "b": word_set("intercept base"), "c": word_set("intercept"),
    "r": word_set("radius remainder ratio rate inradius"), "R": word_set("circumradius radius"),
    "sigma": word_set("deviation"), "mu": word_set("mean average"),
    "barx": word_set("mean average"), "T": word_set("period temperature time"),
    "C": word_set("center centre circumference"),
    "d": word_set("diameter distance difference"), "h": word_set("height"), "w": word_set("width"),
    "l": word_set("length"), "A": word_set("area amplitude"), "P": word_set("perimeter"),
    "V": word_set("volume vertex"), "q": word_set("quotient"), "a": word_set("amplitude"),
    "(h, k)": word_set("center centre vertex"), "(h,k)": word_set("center centre vertex"),
}  # fmt: skip
"""Names that stand for words of the question."""
_NAMED = re.compile(r"(\\?[A-Za-z]{1,5}+) ?= ?(?=[^=]++\Z)")
_UNIT_BEHIND = re.compile(r"\\text\{[^{}]*+\}\Z")
_PRICE = re.compile(r"-?\$\d")
_SIGN = re.compile(r"(?:=|:|\\approx|≈)(?!=)\s*+")
_ORDINAL_END = ("th", "st", "nd", "rd")
_SMALL = word_set(
    """
    the a an of in on at for by with from to that this these those there here it its he his she her
    they their them we our us you your i me my who which what is are was were be been being has have
    had do does did can could will would shall should might must and or as so then thus hence
    therefore now all each every both total exactly only just precisely equals equal gives give get
    gets answer result value values solution solutions final simply respectively such also namely
    """
)
"""Words that are no label."""
_NO_WORDS = frozenset[str]()
_VERBS = word_set("is are was were equals equal has have had be contains makes gives as by")
_BEHIND = word_set("left altogether away apart old cost costs earns earned spent sold saved")
_DENIALS = word_set(
    """
    not no never neither nor none nothing without isn't aren't wasn't doesn't don't didn't won't
    cannot can't couldn't
    """
)
_DOUBTS = word_set(
    """
    th st nd rd if unless maybe perhaps possibly probably guess unsure unknown wrong incorrect
    false but wait actually however instead rather except excluding otherwise versus vs whether
    cannot undefined rejected extraneous
    """
)
_CHANGES = word_set(
    """
    about around approximately approx roughly nearly almost circa over under above below twice
    thrice double triple quadruple half halves third thirds quarter quarters fourth fourths fifth
    fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth hundredths thousandth
    dozen dozens hundred thousand million billion trillion hundreds thousands
    millions less fewer more greater larger smaller than least most minus plus times divided
    multiplied squared cubed power root factorial negative opposite reciprocal inverse base mod
    modulo between up until before after percent percentage percents
    """
)
"""Words that may change a value, but not where the question has them and no value follows."""
_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBERS = {word: number for number, word in enumerate(_UNITS)}
_NUMBERS |= {word: 20 + 10 * number for number, word in enumerate(_TENS)}
_SHORT_WORDS = _SMALL | _DENIALS | _NUMBERS.keys()
"""Words of up to three letters that are no product of variables."""
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6,
    "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100,
}  # fmt: skip
_OF_UNITS = frozenset([*AREAS, *word_set("per percent squared cubed million billion")])
_CONCLUSIONS = word_set("so therefore thus hence")
_COMPARATIVES = word_set("more less fewer greater larger smaller than")
_COMPARISON = re.compile(r"\b(?:how (?:many|much|far|long)|which|who)\b[^.?,]*+")
_QUANTITIES = word_set(
    """
    total value values probability result answer ratio speed area length amount distance cost price
    age volume perimeter height width weight mass temperature rate angle measure score maximum
    minimum average mean set interval
    """
)
"""Words behind which ``of`` and the value stand."""
_NEAR = word_set("close next up similar adjacent add added near")
_PLACES = word_set(
    "near outside inside beyond past within than between below above until before after against"
)
_JOINS = word_set("and or")
_REASONS = word_set("since because")
_RELATIONS = (
    ("greater than or equal to", "\\geq "), ("less than or equal to", "\\leq "),
    ("at least", "\\geq "), ("at most", "\\leq "), ("greater than", ">"), ("less than", "<"),
    ("more than", ">"), ("not equal to", "\\neq "),
)  # fmt: skip
_RELATION_SIGNS = ("<", ">", "\\le", "\\ge", "\\ne", "\\in")
_SUBJECTS = word_set("all every any each real number numbers reals the set of that such are is x")
_INFINITIES = {"infinity": "\\infty", "positive infinity": "\\infty",
               "negative infinity": "-\\infty", "plus infinity": "\\infty",
               "minus infinity": "-\\infty"}  # fmt: skip
_TEXT_IN_FORMULA = re.compile(r"\\(?:text|mathrm)\{([A-Za-z ,.]*+)\}")
_CALCULATION = re.compile(
    r"(?=[^\d]*+\d)(?:[-\d.,\s+*/()=:{}×]|\\(?:times|cdot|div|left|right|[dt]?+frac|[,;! ]))++"
)
_REMARKS = word_set("root roots solution repeated multiplicity")
_NOUNS = word_set(
    "function number numbers series sequence triangle quadrant polygon limit day point"
)
_SUFFIXES = ("ent", "ence", "ing", "es", "ed", "e", "s")
_SHORTEST_STEM = 5
_MOST_WORDS = 14
_OPPOSITES = word_set("yes no true false")
_RIGHT = ("correct", "right", "the answer", "the correct answer", "the correct option",
          "the correct choice")  # fmt: skip
_ANTONYMS = {"diverg": "converg", "composite": "prime", "odd": "even", "even": "odd",
             "false": "true", "obtuse": "acute"}  # fmt: skip
_DENYING = ("non", "un", "in", "im", "ir", "dis")
_ROMAN = ("", "I", "II", "III", "IV")
_LONE_DIGIT = re.compile(r"(?<![\w^.\\])[1-4](?![\w^.])")
_QUADRANTS = {"first": "i", "second": "ii", "third": "iii", "fourth": "iv",
              "qi": "i", "qii": "ii", "qiii": "iii", "qiv": "iv"}  # fmt: skip
_SAYINGS = {"does not converge": "diverges", "not convergent": "divergent",
            "infinite": "infinitely many", "does not exist": "dne", "doesn't exist": "dne",
            "do not exist": "dne"}  # fmt: skip
_AT = word_set("at when attained occurring occurs achieved reached")
_ALL_OF = re.compile(r"[A-Za-z]|[A-Za-z] *+\\in.*+|[nkm] *+(?:\\geq?+|>) *+[01]")
_FOR_ALL = word_set("for all any every each real number numbers value values of")
_ABOUT = word_set("of than from in for out among per on modulo after during with at")
_ROUNDING = word_set("about around approximately approx roughly")


@dataclass(slots=True)
class Prose:
    """Values and the lower-case words around them: ``gaps[i]`` precedes value ``i``."""

    values: list[str] = field(default_factory=list)
    gaps: list[list[str]] = field(default_factory=lambda: [[]])

    def without(self, places: set[int]) -> "Prose":
        """Remove the values at these places; their words stay."""
        values, gaps = list[str](), [list(self.gaps[0])]
        for place, (value, gap) in enumerate(zip(self.values, self.gaps[1:], strict=True)):
            if place in places:
                gaps[-1].extend(gap)
            else:
                values.append(value)
                gaps.append(list(gap))
        return Prose(values, gaps)


class _Splitter:
    """Splits a text into words and mathematics."""

    def __init__(self, asked: frozenset[str]) -> None:
        self.asked = asked
        self.items: list[tuple[bool, str]] = []
        """Words (True) and pieces of mathematics."""
        self.depth = 0
        self.opened: list[bool] = []
        """For each open bracket, whether it is around prose."""

    def word(self, word: str) -> None:
        self.items.append((True, word))

    def mathematics(self, text: str) -> None:
        if self.items and not self.items[-1][0]:
            self.items[-1] = (False, self.items[-1][1] + text)
        elif text.strip():
            self.items.append((False, text))

    def split(self, text: str, is_text: bool) -> None:
        position = 0
        while match := _ITEM.match(text, position):
            position = match.end()
            kind = match.lastgroup if match.lastgroup != "content" else "style"
            if kind == "style":
                self.group(match)
            elif kind == "word" and self.is_word(match[0], text, position, is_text):
                self.word(match[0])
            elif match[0] in "()[]":
                self.bracket(match[0], text, position, is_text)
            elif is_text and match[0] in ".!?" and not text[position : position + 1].isdigit():
                self.items.append((True, "."))
            else:
                self.depth += {"{": 1, "}": -1}.get(match[0], 0)
                self.mathematics(match[0])

    def group(self, match: re.Match[str]) -> None:
        """The words in the braces of ``\\text{}``."""
        content = match["content"]
        plain = content.replace("~", " ").replace("\\ ", " ").replace("\\,", " ")
        letters = plain.strip(" .,:;()-")
        is_name = not match["style"].startswith(("text", "mbox", "hbox"))
        is_mathematics = is_name and (len(letters) < 2 or letters in FUNCTIONS or letters == "cis")
        unit = unit_words(plain) if any(map(str.isalpha, plain)) else None
        is_unit = unit is not None and all(is_known(word) for word, _ in unit) and len(letters) < 20
        is_unit = is_unit and (letters != "in" or match.end() == len(match.string))
        if is_unit and self.items and not self.items[-1][0]:
            self.mathematics(match[0])
            return
        if self.depth or is_mathematics:
            self.mathematics(match[0])
            return
        start = plain.lstrip()
        last = self.items[-1][1].rstrip() if self.items and not self.items[-1][0] else ""
        if start.startswith(("-", *_ORDINAL_END)) and last[-1:].isalpha():  # n\text{th}
            head, _, rest = start.replace(":", " ").partition(" ")
            if head.lstrip("-").isalpha():
                self.items[-1] = (False, last[:-1])
                self.word(last[-1] + head)
                plain = rest
        self.split(plain, True)

    def is_word(self, word: str, text: str, position: int, is_text: bool) -> bool:
        if text[position : position + 1].isdigit():  # step2 is a name
            return False
        if is_text and len(word) > 1:
            return True
        if self.depth or word in FUNCTIONS or word in ("sqrt", "pi", "infty"):
            return False
        small = word.lower()
        if len(word) == 1:
            return (
                word in "aAI"
                and text[position : position + 1] == " "
                and (is_text or text[position + 1 : position + 4].isalpha())
            )
        return len(word) > 3 or small in _SHORT_WORDS or small in self.asked

    def bracket(self, sign: str, text: str, position: int, is_text: bool) -> None:
        if sign in "([":
            rest = text[position : position + 40].lstrip()
            last = self.items[-1][1].rstrip() if self.items and not self.items[-1][0] else ""
            is_call = text[position - 2 : position - 1].isalpha() and last[-1:].isalpha()
            begins = _PROSE_IN_TEXT if is_text else _PROSE
            is_prose = not is_call and not self.depth and begins.match(rest) is not None
            is_prose &= sign == "("
            self.opened.append(is_prose)
            if is_prose:
                return
            self.depth += 1
        else:
            if not self.opened or self.opened.pop():
                return
            self.depth -= 1
        self.mathematics(sign)


def has_words(text: str) -> bool:
    """Whether a text may hold prose."""
    return _ENGLISH.search(text) is not None


@functools.lru_cache(maxsize=1024)
def prose_of(text: str, question: str) -> Prose | None:
    """Parse a text as prose; None if it has no word or no value."""
    if len(text) > MAX_CHARACTERS or not has_words(text):
        return None
    splitter = _Splitter(words_of(question))
    splitter.split(_plain(text), False)
    prose = Prose()
    items = _with_relations(_with_number_words(splitter.items))
    unit: list[str] = []
    for place, (is_word, item) in enumerate(items):
        is_last = place == len(items) - 1
        is_behind = bool(prose.values) and not prose.gaps[-1]
        if is_word and is_behind and _is_unit_word(item) and (item != "in" or is_last):
            unit.append(item)
            if not is_last:
                continue
        if unit:
            prose.values[-1] += f"\\text{{ {' '.join(unit)}}}"
        if is_word:
            prose.gaps[-1].extend([] if item == "." or unit[-1:] == [item] else [item.lower()])
            unit = []
            continue
        unit = []
        shown = _stripped(item)
        if prose.gaps[-1] and (sign := _SIGN.match(shown)):  # slope = 3
            shown = _stripped(shown[sign.end() :])
        name = _NAMED.match(shown)
        if name and not _SYMBOLS.get(name[1], _NO_WORDS).isdisjoint(prose.gaps[-1]):
            shown = shown[name.end() :]  # radius r = 3
        shown = _right_side(shown)
        if shown:
            prose.values.append(shown)
            prose.gaps.append([])
    return prose if prose.values else None


def _plain(text: str) -> str:
    for shown, plain in (("a.m.", "am"), ("p.m.", "pm"), ("per cent", "percent")):
        text = text.replace(shown, plain)
    return text


def _is_unit_word(word: str) -> bool:
    small = word.lower()
    unit = canonical(small)
    return len(word) > 1 and (is_known(unit) or unit == "unit" or small in _OF_UNITS)


def _stripped(text: str) -> str:
    if text.count("$") == 1 and _PRICE.match(text.strip()):
        text = text.replace("$", "\\$")
    start = _EDGE.match(text)
    text = text[start.end() :] if start else text
    while end := _ENDS.search(text[-8:]):
        text = text[: len(text) - len(text[-8:]) + end.start()]
    return text


def _right_side(text: str) -> str:
    """Right side of an equation whose left side has words: ``P(\\text{heads}) = 1/2``."""
    left, sign, right = text.rpartition("=")
    has_name = sign and any(style in left for style in ("\\text{", "\\mathrm{", "\\operatorname{"))
    is_closed = all(right.count(a) == right.count(b) for a, b in ("()", "{}"))
    return right.strip() if has_name and is_closed and right.strip() else text


def _with_number_words(items: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
    """Write ``twenty-one`` as 21 and ``one sixth`` as a fraction, if there is no other value."""
    if any(not is_word and _stripped(item) for is_word, item in items):
        return items
    text = " ".join(item.lower() for _, item in items if item != ".")
    for name, latex in _INFINITIES.items():
        if text.removeprefix("the limit is ").removeprefix("diverges to ") == name:
            return [(False, latex)]
    replaced = list[tuple[bool, str]]()
    words = [(part, item) for _, item in items for part in _parts_of_word(item)]
    place = 0
    while place < len(words):
        number, length = _number_at([word.lower() for word, _ in words[place:]])
        if length:
            replaced.append((False, number))
            place += length
        else:
            replaced.append((True, words[place][0]))
            place += 1
    return replaced


def _parts_of_word(word: str) -> list[str]:
    """``twenty`` and ``one`` of ``twenty-one``; ``five-digit`` is one word."""
    parts = word.replace("/", " ").split("-")
    return parts if as_number([part.lower() for part in parts]) is not None else [word]


def _with_relations(items: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
    """Write ``greater than 2`` and ``between 2 and 3`` as inequalities, ``3 out of 8`` as 3/8."""
    merged = list[tuple[bool, str]]()
    for is_word, item in items:
        words = list[str]()
        # A comparison needs the value behind it as its bound and the letter before it.
        while not is_word and len(words) < len(merged) and merged[-1 - len(words)][0]:
            words.insert(0, merged[-1 - len(words)][1].lower())
        text = f" {' '.join(words)}"
        before = merged[len(merged) - len(words) - 1][1] if len(words) < len(merged) else ""
        relation = next((pair for pair in _RELATIONS if text.endswith(f" {pair[0]}")), None)
        if relation is not None:
            rest = set(words[: -len(relation[0].split())])
            name = before.strip()
            if rest <= _SUBJECTS and (not name or (len(name) == 1 and name.isalpha())):
                del merged[len(merged) - len(words) - bool(name) :]
                item = f"{name or 'x'} {relation[1]} {item}"
        elif words == ["out", "of"] and before:
            merged[-3:] = []
            item = f"\\frac{{{_stripped(before)}}}{{{_stripped(item)}}}"
        elif words in (["and"], ["to"]) and len(merged) > 2 and merged[-3][0]:
            opening = merged[-3][1].lower()
            if (opening, words[0]) in (("between", "and"), ("from", "to")):
                merged[-3:] = []
                item = f"{_stripped(before)} < x < {_stripped(item)}"
        merged.append((is_word, item))
        if is_word and item.lower() in ("inclusive", "inclusively") and len(merged) > 1:
            chunk = merged[-2][1]
            if " < x < " in chunk:
                merged[-2:] = [(False, chunk.replace("<", "\\leq "))]
    return merged


def as_number(words: list[str]) -> str | None:
    """The numeral of a number in words in lower case; None of other words."""
    number, length = _number_at(words) if words else ("", 0)
    return number if length and length == len(words) else None


def _number_at(words: list[str]) -> tuple[str, int]:
    """The number that words begin with, and how many words it has; 0 for none."""
    total = part = place = 0
    sign = "-" if words[0] in ("negative", "minus") else ""
    start = len(sign)
    for place in range(start, len(words) + 1):
        word = words[place] if place < len(words) else ""
        if word in _NUMBERS:
            # ``twenty one`` is one number; ``one two`` and ``twenty thirty`` are two.
            if part % 100 and not (part % 10 == 0 and _NUMBERS[word] < 10 and part % 100 >= 20):
                break
            part += _NUMBERS[word]
        elif word in _SCALES and place > start:
            if word == "hundred":
                part *= 100
            else:
                total, part = total + part * _SCALES[word], 0
        elif word == "and" and place > start and words[place - 1] in _SCALES:
            if words[place + 1 : place + 2] and words[place + 1] not in _NUMBERS:
                break
        else:
            break
    if place == start:
        return "", 0
    if (divisor := _PARTS.get("".join(words[place : place + 1]).removesuffix("s"))) is not None:
        return f"{sign}\\frac{{{total + part}}}{{{divisor}}}", place + 1
    return f"{sign}{total + part}", place


def readings(gold: str, answer: str, question: str) -> Iterator[tuple[str, str]]:
    """Pairs of both answers as the values that prose states."""
    if not question or len(answer) > MAX_CHARACTERS:
        return
    if "quadrant" in question.lower():
        gold, answer = (
            _LONE_DIGIT.sub(lambda digit: _ROMAN[int(digit[0])], text) for text in (gold, answer)
        )
    if not (has_words(answer) or "=" in answer):
        return
    if is_choice(gold):
        before, _, rest = unwrapped(answer).removeprefix("\\text{").rpartition(" is ")
        if rest.strip(" .}") in _RIGHT:
            before, rest = "", before
        if (_DOUBTS | _DENIALS | {"or"}).isdisjoint(before.lower().split()):
            yield gold, rest.rstrip(" .}")
        return
    # A gold answer without values is compared by its words.
    wanted = prose_of(unwrapped(gold), question)
    if wanted is None or is_bare_word(gold):
        gold_words = [word for word in _words_of(unwrapped(gold), question) or () if word != "."]
        answer_words = _words_of(unwrapped(answer), question)
        short = _words_of(_without_reason(unwrapped(answer)), question)
        spoken = (answer_words, short) if gold_words else ()
        if any(_states_gold_words(gold_words, words, question) for words in spoken):
            yield gold, gold
            return
    stated = _named_values(unwrapped(answer), question)
    if stated is None:
        return
    reading = reading_of(unwrapped(gold), letters_are_units=False)
    gold_tree = reading.tree if reading else None
    is_rounded = demands_of(question).rounded
    for prose in _candidates(stated, question, bool(wanted)):
        if _alters_values(prose, question, is_rounded) or not prose.values:
            continue
        yield from _paired(gold, wanted, prose, gold_tree, question)


def _without_reason(text: str) -> str:
    """``Converges`` of ``Converges by the p-test``."""
    if (reason := _REASON.search(text)) is None:
        return text
    text = text[: reason.start()]
    return text + "}" * (text.count("{") - text.count("}"))


def contradicts(answer: str, question: str) -> bool:
    """Whether the words of an answer deny what the question asks for: ``the minimum is 4`` for a
    maximum, ``girls to boys`` for boys to girls, ``No, it converges``."""
    if not question or len(answer) > MAX_CHARACTERS or not has_words(answer):
        return False
    text, asked = _plain_text(answer), words_of(question)
    words = _WORD.findall(text)
    opposites = [(one, other) for one, other in DIRECTIONS if not one.isdisjoint(words)]
    if any(asked & other and not asked & one for one, other in opposites):
        return True
    if (opening := _OPENING.match(text)) and (is_so := _predicate(words[1:], question)) is not None:
        return is_so != (opening[1] == "yes")
    ratios = _RATIO.findall(text)
    question_ratios = _RATIO.findall(_plain_text(question)) if ratios else []
    return any((b, a) in question_ratios and (a, b) not in question_ratios for a, b in ratios)


def _plain_text(text: str) -> str:
    return _LATEX_TEXT.sub(" ", text).lower()


def has_labelled_order(gold: str, answer: str, question: str) -> bool:
    """Whether an answer names its values in words of the question, whose order is theirs: ``4 boys,
    3 girls``. A gold answer without names has them in this order."""
    if not question or len(answer) > MAX_CHARACTERS or "," not in gold:
        return False
    named = _named_values(unwrapped(answer), question)
    if named is not None and has_words(gold) and (wanted := prose_of(unwrapped(gold), question)):
        labels = _labels(wanted), _labels(named)
        return len(wanted.values) > 1 and _matching_places(*labels) is not None
    return (
        named is not None and _in_question_order(named.values, _labels(named), question) is not None
    )


def _named_values(text: str, question: str) -> Prose | None:
    """A text as prose, and ``m = 3, b = -5`` as a slope and an intercept."""
    return _symbols(text, question) or prose_of(text, question)


def _symbols(text: str, question: str) -> Prose | None:
    if text.count("=") < 2 or len(text) > MAX_CHARACTERS:
        return None
    words, prose = words_of(question), Prose()
    for part in _PARTS_OF_LIST.split(text):
        name, _, value = part.partition("=")
        name = _LATEX_TEXT.sub("", _CALL.sub("", name)).strip("\\ ,;")
        label = _SYMBOLS.get(name, frozenset([name] if len(name) > 1 else [])) & words
        if not label or not value:
            return None
        prose.gaps[-1].extend(sorted(label))
        prose.values.append(_stripped(value))
        prose.gaps.append([])
    return prose if len(prose.values) > 1 else None


def _words_of(text: str, question: str) -> list[str]:
    """The words of a text that has only words and formulas of the question; empty for others."""
    splitter = _Splitter(words_of(question))
    splitter.split(text, True)
    known = _BLANKS.sub("", question)
    formulas = [_BLANKS.sub("", _stripped(item)) for is_word, item in splitter.items if not is_word]
    if any(formula.partition("=")[0] not in known for formula in formulas):  # 221 = 13 \\cdot 17
        return []
    words = " ".join(item.lower() for is_word, item in splitter.items if is_word and item != ".")
    for saying, word in _SAYINGS.items():
        words = re.sub(rf"\b{saying}\b", word, words)
    if "quadrant" in question.lower():
        words = re.sub(r"quadrant\b", "", words) or words
        return [_QUADRANTS.get(word, word) for word in words.split()]
    if _stem("exists") in map(_stem, question.lower().split()):
        words = re.sub(r"\Athere (?:is|are|does|do)\b(?!.*exist)(.*)", r"\1 exist", words)
    return words.split()


def _states_gold_words(gold: list[str], words: list[str], question: str) -> bool:
    """Whether words are the gold answer's and the question's: ``It is an odd function``."""
    gold_stems = [_stem(word) for word in gold]
    stems = [_stem(word) for word in words]
    if gold_stems in (["yes"], ["no"]) and (is_so := _predicate(words, question)) is not None:
        return is_so == (gold_stems == ["yes"])
    place = next((i for i in range(len(words)) if stems[i : i + len(gold_stems)] == gold_stems), -1)
    rest = [*words[:place], *words[place + len(gold_stems) :]]
    if place < 0 or len(rest) > _MOST_WORDS:
        return False
    if _OPPOSITES & {*gold_stems}:
        return gold_stems[0] in ("true", "false") and set(rest) <= _SMALL | {"statement", "claim"}
    asked = [word.strip("$.?!:;()") for word in question.lower().replace(",", " , ").split()]
    ends = {"or"} if (",", "or") not in pairwise(asked) else {"or", ","}
    alternatives = {
        word
        for before, word, after in zip(["", *asked], asked, [*asked[1:], ""], strict=False)
        if {before, after} & ends and "or" in asked
    }
    alternatives = set() if gold_stems == ["neither"] else alternatives
    known = ({"nor"} if gold_stems == ["neither"] else set()) | (
        set(asked) | _SMALL | _NOUNS
    ) - alternatives - _DOUBTS - _CHANGES - {"and", "or"}
    names = {word.lower() for word in re.findall(r"(?<=[a-z,] )[A-Z][a-z]++", question)}
    is_compared = place == 0 and rest[:1] == ["is"] and "than" in rest  # Bob is taller than Ann
    known |= {"than"} if is_compared else set()
    known -= set() if is_compared else names - set(gold)
    return set(rest) <= known - (_DENIALS - ({"nor"} if gold_stems == ["neither"] else set()))


def _predicate(words: list[str], question: str) -> bool | None:
    """Whether ``It is not a function`` affirms ``Is the relation a function?``; None if unclear."""
    *_, last = re.split(r"[.!:]\s", question.strip().lower())
    plain = [word.strip("?.,") for word in last.split()]
    asked = [_stem(word) for word in plain if word.isalpha()]
    while asked and asked[-1] in _SMALL:
        asked.pop()
    words = [part for word in words for part in _without_denial(word, asked)]
    num_denials = sum(word in _DENIALS for word in words)
    stems = {_stem(word) for word in words if word not in _SMALL | _DENIALS}
    stems -= _NOUNS - {*asked}
    while len(asked) > 1 and asked[-1] in _NOUNS - stems:
        asked.pop()
    is_yes_or_no = bool(asked) and asked[0] in AUXILIARIES and not {*asked} & {"or", "not"}
    is_yes_or_no &= not (_OPPOSITES - {"no"}) & {*words}
    if not is_yes_or_no or num_denials > 1 or not stems <= {*asked} or asked[-1] not in stems:
        return None
    return not num_denials


def _without_denial(word: str, asked: list[str]) -> list[str]:
    """``not converge`` of ``diverges``, ``not rational`` of ``irrational``."""
    stem = _stem(word)
    if stem in asked:
        return [word]
    denied = _ANTONYMS.get(stem) or next(
        (stem.removeprefix(prefix) for prefix in _DENYING if stem.startswith(prefix)), ""
    )
    return ["not", denied] if denied in asked else [word]


def _stem(word: str) -> str:
    """``converg`` of ``converges`` and ``convergent``."""
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= _SHORTEST_STEM:
            return word.removesuffix(suffix)
    return word


def _candidates(prose: Prose, question: str, has_words: bool) -> Iterator[Prose]:
    """The answer without its reasons, and without the values that it is about."""
    for place, gap in enumerate(prose.gaps):
        reason = next((i for i, word in enumerate(gap) if word in _REASONS), -1)
        if place and reason >= 0:
            doubts = _DOUBTS - {"extraneous", "rejected", "undefined"}
            if doubts.isdisjoint(chain(*prose.gaps[place + 1 :])):
                prose = Prose(prose.values[:place], [*prose.gaps[:place], gap[:reason]])
            break
    for place in range(len(prose.values) - 1, 0, -1):  # what stands before "so" is a reason
        if not _CONCLUSIONS.isdisjoint(prose.gaps[place]):
            if (_DOUBTS | {"or"}).isdisjoint(chain(*prose.gaps[:place])):
                prose = Prose(prose.values[place:], prose.gaps[place:])
            break
    for place, gap in enumerate(prose.gaps):
        words = {*gap}
        if place and words & _REMARKS and words <= _REMARKS | _SMALL | {"double", "only"}:
            prose = Prose(prose.values[:place], [*prose.gaps[:place], []])
            break
    yield prose
    if len(prose.values) < 2:
        return
    text = _BLANKS.sub("", question)
    shown = [value.replace("\\text{", "").replace("}", "") for value in prose.values]
    is_stated = [_BLANKS.sub("", value).rstrip("=") in text for value in shown]
    gaps = enumerate(prose.gaps[:-1])
    verb = max((i for i, gap in gaps if not _VERBS.isdisjoint(gap)), default=0)
    about = {
        i
        for i, gap in enumerate(prose.gaps[:-1])
        if (is_stated[i] and (i < verb or (i and gap and gap[-1] in _ABOUT)))
        or _is_subject_of_next(prose.values, i)
    }
    *_, before, _ = prose.gaps  # 40 ordered pairs (a, b)
    has_letter = any(map(str.isalpha, shown[-1])) and "=" not in shown[-1]
    if is_stated[-1] and has_letter and before and _JOINS.isdisjoint(before):
        about.add(len(shown) - 1)
    if about:
        yield prose.without(about)
    is_at = before and (before[0] in _AT or before[-1] in _AT)
    is_for = before and before[0] == "for" and set(before) <= _FOR_ALL
    if not has_words and (is_at or (is_for and _ALL_OF.fullmatch(prose.values[-1]))):
        yield Prose(prose.values[:-1], [*prose.gaps[:-2], []])


def _is_subject_of_next(values: list[str], place: int) -> bool:
    """Whether the next value, a relation, is about this variable."""
    after = values[place + 1] if place + 1 < len(values) else ""
    is_letter = values[place].isalpha() and len(values[place]) == 1
    return is_letter and values[place] in after and any(sign in after for sign in _RELATION_SIGNS)


def _alters_values(prose: Prose, question: str, is_rounded: bool) -> bool:
    """Whether a word may change or deny one of the values."""
    asked = words_of(question)
    asked |= _DENIALS if asked & _DENIALS else frozenset()
    count = len(prose.values)
    if prose.gaps[-1] and not all(_are_known(gap, question) for gap in prose.gaps[1:]):
        return True
    # Words of the question are exempt: an answer repeats them without changing its value.
    for place, gap in enumerate(prose.gaps):
        words = [part for word in gap for part in (word, *word.split("-")[1:])]
        for word in words:
            if word in _ROUNDING and is_rounded:
                continue
            if word in _DOUBTS or ((word in _CHANGES or word in _DENIALS) and word not in asked):
                return True
            number = _NUMBERS.get(word, -1)
            if number >= 0 and word not in asked and number != count and word != "one":
                return True
        if place == count:
            compared = _COMPARISON.search(question.lower())
            is_compared = compared and not _COMPARATIVES.isdisjoint(compared[0].split())
            if not is_compared and not _COMPARATIVES.isdisjoint(words):
                return True
        elif _is_about_value(words, prose.values[place], place):
            return True
    return False


def _are_known(words: list[str], question: str) -> bool:
    """Whether words behind a value are the question's or say nothing of a value."""
    asked = words_of(question)
    known = asked | LEAD_WORDS | _SMALL | _VERBS | _BEHIND
    return all(
        word in known
        or canonical(word) in known
        or (len(word) < 9 and word in question)
        or word.removesuffix("ing") in asked
        for word in words
    )


def without_words(answer: str, question: str) -> str:
    """A calculation without the question's words in it: ``9 \\times 2 = \\$18`` of
    ``9 \\text{ eggs} \\times \\$2 = \\$18``; without a value, where all its words are one unit."""
    if len(answer) > MAX_CHARACTERS:
        return answer
    left, sign, right = answer.rpartition("=" if "=" in answer else "\\times")
    words = _TEXT_IN_FORMULA.findall(left)
    plain = _TEXT_IN_FORMULA.sub("", left).replace("\\$", "")
    if not words or not _CALCULATION.fullmatch(plain):
        return answer
    is_one_unit = len({*map(str.strip, words + _TEXT_IN_FORMULA.findall(right))}) == 1
    is_known = _are_known(" ".join(words).casefold().split(), question)
    return f"{plain}{sign}{right}" if (is_known if sign == "=" else is_one_unit) else answer


def _is_about_value(words: list[str], value: str, place: int) -> bool:
    """Whether words before a value make it a part of another: ``the square of 12``."""
    while words and words[-1] in ("the", "a"):
        words.pop()
    *_, before, last = ["", "", *words]
    if last == "of":
        return "=" not in value and before not in _QUANTITIES
    if last == "to":
        return before in _NEAR
    if last in ("at", "when", "where"):
        return "=" in value and not place
    return last in _PLACES or last in (_DENIALS | _CHANGES) - _ROUNDING


def _labels(prose: Prose) -> list[frozenset[str]]:
    contents = [
        frozenset(canonical(part) for word in gap for part in word.split("-") if part not in _SMALL)
        for gap in prose.gaps
    ]
    return contents[1:] if contents[-1] else contents[:-1]


def _paired(
    gold: str, wanted: Prose | None, prose: Prose, gold_tree: Tree | None, question: str
) -> Iterator[tuple[str, str]]:
    joined = prose.values[0]
    for value, gap in zip(prose.values[1:], prose.gaps[1:], strict=False):
        join = next((word for word in ("or", "and") if word in gap), "")
        is_join = join == "or" or (join and any(sign in value for sign in _RELATION_SIGNS))
        joined += (f" \\text{{ {join} }} " if is_join else ", ") + value
    values = prose.values
    labels = _labels(prose)
    kind = gold_tree[0] if gold_tree else ""
    of_chance = {"probability", "chance", "odds"} & words_of(question)
    if len(values) == 2 and prose.gaps[1] == ["in"] and of_chance:  # 1 in 6
        yield gold, f"\\frac{{{values[0]}}}{{{values[1]}}}"
        return
    if wanted is None or len(wanted.values) != len(values):
        ordered = _in_question_order(values, labels, question)
        is_open = any("or" in gap for gap in prose.gaps)
        if ordered is not None and is_open:
            return
        if ordered is not None:
            units = {match[0] for item in ordered for match in [_UNIT_BEHIND.search(item)] if match}
            unit = min(units) if len(units) == 1 else ""
            listed = ", ".join(item.removesuffix(unit) for item in ordered)
            yield (f"({gold})" if kind == "list" else gold), f"({listed}){unit}"
            return
        if kind in ("tuple", "interval") and len(values) > 1 and all(labels) and not is_open:
            yield gold, f"({', '.join(values)})"
        yield gold, joined
        return
    gold_labels = _labels(wanted)
    if (order := _matching_places(gold_labels, labels)) is not None:
        values = [values[place] for place in order]
    elif any(gold_labels) and any(labels):
        return
    if len(values) == 1:
        yield wanted.values[0], values[0]
    else:
        yield f"({', '.join(wanted.values)})", f"({', '.join(values)})"


def _matching_places(golds: list[frozenset[str]], labels: list[frozenset[str]]) -> list[int] | None:
    """The place of the one value with each of the gold answer's labels; None for another number."""
    order = [[i for i, label in enumerate(labels) if label & wanted] for wanted in golds]
    return [places[0] for places in order] if all(len(places) == 1 for places in order) else None


def _in_question_order(
    values: list[str], labels: list[frozenset[str]], question: str
) -> list[str] | None:
    """Values in the order in which the question names their labels; None where it does not."""
    if len(values) < 2 or not all(labels):
        return None
    asked = [canonical(word) for word in _WORD.findall(question.lower())]
    last = {word: place for place, word in enumerate(asked)}
    asked = [canonical(word) for words in asking_sentences(question) for word in words]
    first = {word: place for place, word in reversed([*enumerate(asked)])}
    distinct = [
        label - frozenset().union(*(other for other in labels if other is not label))
        for label in labels
    ]
    if all(label & first.keys() for label in distinct):
        places = [min(first[word] for word in label & first.keys()) for label in distinct]
    else:
        places = [
            max((last[word] for word in label & last.keys()), default=-1) for label in distinct
        ]
    if min(places) < 0 or len(set(places)) < len(places):
        return None
    return [value for _, value in sorted(zip(places, values, strict=True))]
