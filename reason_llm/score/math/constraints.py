"""The unit, currency, order and form that a question demands of its answer.

Each rule reads the words of the question and the gold answer. A form or an order is asked for only
where the gold answer has it too; where the question fixes nothing, the value counts.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from reason_llm.score.math.answer_form import FREE, form_of, is_scientific, unsigned
from reason_llm.score.math.answer_tree import Reading, Tree, holds, subtrees
from reason_llm.score.math.numeric import value_of
from reason_llm.score.math.question import MAX_CHARACTERS, words_of
from reason_llm.score.math.units import (
    AREAS,
    CURRENCIES,
    LENGTHS,
    SPEEDS,
    canonical,
    is_known,
    leave_value_unchanged,
    word_set,
)

Unit = tuple[str, str]
"""A unit in one spelling, and its exponent."""

_TEX = re.compile(r"\\(?:text|mathrm|textbf|mathbf)(?![A-Za-z])|[${}]|\\[,; ]")
_SENTENCE = re.compile(r"([.?!](?=\s|\Z)|\n\n|:(?=\s))")
_WORD = re.compile(r"\\?[^\W\d_]++(?:\^[23]|[²³])?|\d[\d.,]*+|[?/$%]")
_ASKING = word_set(
    """
    what how find determine compute calculate express convert give evaluate write state enter
    answer estimate approximate
    """
)
_BEFORE_UNIT = word_set("in into to of many much answer")
_SKIPPED = word_set("more total full whole extra additional fewer less us all other the")
"""Words that may stand between ``how many`` and the counted noun."""
_SPANS = word_set("d week month yr")
_MAX_UNIT_WORDS = 8
_RAISED = {"squared": "2", "cubed": "3", "^2": "2", "^3": "3", "²": "2", "³": "3"}

_LENGTH, _AREA, _VOLUME = ({(unit, power) for unit in LENGTHS} for power in "123")
_TIME = {(unit, "1") for unit in word_set("s min h d week month yr am pm")}
_UNITS_OF_NOUNS = (
    "force n, energy j, power w, voltage v, pressure pa, frequency hz, resistance ohm, current a"
)
_QUANTITIES = {
    word: frozenset(units)
    for words, units in [
        ("area", _AREA),
        (
            "volume capacity",
            _VOLUME | {(unit, "1") for unit in word_set("ml l gal qt pt cup tbsp tsp")},
        ),
        (
            "length width height depth perimeter circumference radius diameter distance side "
            "altitude hypotenuse diagonal far tall wide deep high",
            _LENGTH,
        ),
        ("weight mass heavy weigh", {(unit, "1") for unit in word_set("mg g kg lb oz")}),
        ("time duration age old", _TIME),
        ("long", _LENGTH | _TIME),
        ("speed velocity fast", {(unit, "1") for unit in SPEEDS}),
        ("acceleration", {("m/s", "2"), ("ft/s", "2")}),
        (
            "cost price profit money revenue income salary earn earned earnings pay paid spend "
            "spent owe worth",
            {(unit, "1") for unit in CURRENCIES},
        ),
        ("angle \\angle argument", {("deg", "1"), ("rad", "1")}),
        *((noun, {(unit, "1")}) for noun, unit in map(str.split, _UNITS_OF_NOUNS.split(", "))),
        ("temperature", {(unit, "1") for unit in word_set("deg c f k")}),
        ("probability ratio fraction", set[Unit]()),
    ]
    for word in words.split()
}
"""Units that an answer may have, by the first of these words in the asking sentence."""
_MONEY = word_set(
    """
    cost price pay paid earn money profit spend spent worth salary revenue bill fee income sell
    sold buy bought capital cheap tip tax discount budget debt saving save deposit interest invest
    investment wage charge owe expensive value expense allowance loan fare
    """
)
_COUNTED = word_set(
    """
    way value solution number integer possibility time item outcome combination arrangement choice
    element digit term point total people person animal object thing item piece member individual
    """
)
"""Nouns that may follow a number of things."""
_PERCENTAGES = word_set("percent percentage percents percentages %")
_RATIOS = word_set("ratio odd scale proportion proportional rate")

_ORDER = re.compile(
    r"(?:increasing|decreasing|ascending|descending|numerical|alphabetical|that|this|the following)"
    r" order\b|\bin order (?:from|of)\b|\bin order[.,;]|\brespectively\b"
    r"|\b(?:least|smallest|lowest|shortest) to (?:greatest|largest|highest|biggest|longest)\b"
    r"|\b(?:greatest|largest|highest|biggest|longest) to (?:least|smallest|lowest|shortest)\b"
    r"|\b(?:largest|smallest|greatest|least|highest|lowest|larger|smaller|greater|longer|shorter) "
    r"(?:\w{1,12} )?first\b"
    r"|\bquotient and (?:the )?remainder\b"
    r"|\b(?:give|list|state|write|enter|put)\b(?:(?!\bfirst\b)[^.?!]){0,60}+\bfirst(?=[.,;]|\Z)"
)
_MATRICES = word_set("matrix matrice row column")
_LISTING = word_set("give state enter write list express find determine answer")
_DECIMAL = re.compile(
    r"\b(?:as|to|into) (?:an? )?(?:\w{1,12} )?decimals?\b|\bexact decimal\b"
    r"|\bdecimal (?:form|places?|value"
    r"|representation|approximation|number|equivalent|expansion|notation|answer)\b|\bin decimals?\b"
    r"|\bnearest (?:ten|hundred|thousand|ten-thousand)th\b"
)
_SCIENTIFIC = re.compile(r"\bscientific (?:notation|form)\b")
_MIXED = re.compile(r"\bmixed (?:number|fraction|numeral|form)s?+\b(?!\s*+[\d$\\])")
_LOWEST = re.compile(
    r"\b(?:lowest|simplest|reduced) (?:terms?|form|fraction|possible terms)\b|\birreducible\b"
    r"|\b(?:reduced|simplified|fully reduced|fully simplified) (?:common )?fraction\b"
    r"|\bsimplify the fraction\b"
)
_FRACTION = re.compile(
    r"\bas (?:a|an) (?:\w{1,12} )?fraction\b|\bcommon fraction\b|\bfraction form\b"
)
_IMPROPER = re.compile(r"\bimproper fractions?+\b(?!\s*+[\d$\\])")
_POWER = re.compile(r"\b(?:single|as an?|as one) power\b|\b(?:exponential|index) form\b")
_POSITIVE = re.compile(r"\bpositive (?:exponents?|powers?)\b|\bnegative exponents?\b")
_INTERVAL = re.compile(r"\b(?:in|using) interval notation\b")
_ROUNDED = ("nearest", "round", "approximat", "estimat", "decimal place", "significant")
_REMAINDERS = ("remainder", "mod", "residue", "congruen", "digit")
_MODULUS = re.compile(r"(?:mod|by)[^\d\n]{0,12}+(\d++)")
_OF_SEQUENCES = word_set("sequence term formula series positive natural nonnegative")
_OF_SOLUTIONS = word_set("all every each solve solution solutions")
_LARGER = ("larger", "greater", "bigger", "largest", "greatest", "biggest", "higher")
_WHICH = re.compile(
    rf"\bwhich\b[^.?!]{{0,40}}?\b({'|'.join(_LARGER)}|smaller|less|smallest|least|lower)\b",
    re.IGNORECASE,
)
_CURVES = word_set("equation line circle parabola ellipse hyperbola plane curve tangent locus")
_FORMS_OF_CURVES = word_set("form solve term express rewrite isolate subject")
_SIMPLEST = (
    "simplif", "simplest", "rationaliz", "rationalis", "lowest term", "reduced", "radical form",
    "the form", "expand", "factor ",
)  # fmt: skip
"""Words that ask for one way to write a number or an expression."""


@dataclass(frozen=True, slots=True)
class AskedUnits:
    """The units that a question allows in an answer; None allows any."""

    named: frozenset[Unit]
    """Units that it asks for by name: ``in feet``, ``how many square inches``."""
    allowed: frozenset[Unit] | None


def units_fit(gold: Reading, answer: Reading, question: str) -> bool:
    """Whether the unit or remark behind an answer is the gold one's, or the one that is asked for,
    or changes no value: a unit that the question does not contradict, a word of the question."""
    wanted, units = _units_of(gold), _units_of(answer)
    if not units or (wanted and sorted(wanted) == sorted(units)):
        return True
    if wanted == [("gbp", "1")] and units == [("lb", "1")]:  # 24 pounds for £24
        return True
    if wanted == [("deg", "1")] and units == [("rad", "1")]:  # \\pi/4 radians for 45^\\circ
        is_open = not {"deg", "rad"} & words_of(question)
        return is_open and ["const", "pi"] in subtrees(answer.tree)
    if wanted == [("deg", "1")] and len(units) == 1:  # 8^\circ for 8^\circ F
        return units[0][0] in ("c", "f") and units[0][0] in words_of(question)
    if wanted:
        return False
    if not question:
        return leave_value_unchanged(units, ())
    words, asked = words_of(question), asked_units(question)
    units = _without_rate(units, words)
    known = [(unit, power) for unit, power in units if is_known(unit) or power != "1"]
    allowed = asked.named or asked.allowed
    if allowed is not None and ("deg", "1") in allowed:  # it fell by 17 degrees, 17°C
        allowed |= {(unit, "1") for unit in ("c", "f") if unit in words}
    if allowed is not None and not set(known) <= allowed:
        return False
    of_things = _COUNTED if allowed == frozenset() else frozenset()
    units = [unit for unit in units if unit not in asked.named and unit[0] not in of_things]
    has_money = words & CURRENCIES or words & _MONEY
    if any(unit[0] in CURRENCIES for unit in units) and not has_money:
        return False
    return leave_value_unchanged(units, words, allowed or ())


def _without_rate(units: list[Unit], words: frozenset[str]) -> list[Unit]:
    """Drop the question's rate: ``\\$18`` of ``\\$18 per day``, ``m`` of ``m per week``."""
    names = [unit for unit, _ in units]
    if len(names) == 3 and names[0] in CURRENCIES and names[1] == "per" and names[2] in words:
        return units[:1]
    above, _, below = names[0].partition("/")
    is_rate = (above in CURRENCIES or below in _SPANS) and below in words and len(units) == 1
    return [(above, "1")] if is_rate else units


def _units_of(reading: Reading) -> list[Unit]:
    """The unit behind an answer, or before it; a sign of degrees is one."""
    tree = reading.tree[-1] if reading.tree[0] == "rel" else reading.tree
    tree = tree[1] if tree[0] == "neg" else tree
    units = list(reading.unit)
    if tree[0] == "deg" and not any(unit in ("c", "f", "deg") for unit, _ in units):
        units.append(("deg", "1"))
    if any(unit in ("c", "f") for unit, _ in units):
        units = [unit for unit in units if unit[0] != "deg"]
    return units


@functools.lru_cache(maxsize=1024)
def asked_units(question: str) -> AskedUnits:
    """The units that a question asks for, in the sentences that ask."""
    named = set[Unit]()
    allowed: frozenset[Unit] | None = None
    for words in asking_sentences(question):
        for place, word in enumerate(words):
            if word in _BEFORE_UNIT:
                named |= _units_at(words, place + 1, is_counted=word == "many")
        is_about_form = words[0] not in ("what", "how") and "answer" in words[:4]
        units = None if is_about_form else _quantity_units(words)
        allowed = units if units is not None else allowed
    return AskedUnits(frozenset(named), allowed)


def asking_sentences(question: str) -> Iterator[list[str]]:
    """Words of the sentences that ask, from the asking word on; of several questions, the last."""
    *parts, end = _SENTENCE.split(_TEX.sub(" ", question[-MAX_CHARACTERS:]).lower())
    sentences, marks = [*parts[::2], end], parts[1::2]
    first = max((place for place, mark in enumerate(marks) if mark == "?"), default=0)
    for sentence in sentences[first:]:
        words = _WORD.findall(sentence)
        start = next((i for i, word in enumerate(words) if word in _ASKING), None)
        if start is not None:
            yield words[start:]


def _units_at(words: list[str], place: int, is_counted: bool) -> set[Unit]:
    """The unit that begins at a word, ``square feet``, ``miles per hour``, ``degrees Celsius``."""
    while is_counted and place < len(words) and words[place] in _SKIPPED:
        place += 1
    units, exponent = set[Unit](), "1"
    end = min(len(words), place + _MAX_UNIT_WORDS)
    while place < end:
        word = words[place]
        word, power = _without_power(word)
        unit = canonical(word)
        is_rate = words[place + 1 : place + 2] == ["/"]
        # The exponent comes before the unit in ``square feet`` and behind it in ``feet squared``.
        if word in AREAS:
            exponent = AREAS[word]
        elif word in ("per", "/") and units and place + 1 < end:
            above, _ = units.pop()
            place += 1
            below, power = _without_power(words[place])
            rate = canonical(f"{above}/{canonical(below)}")
            units |= {
                (rate, power or "1"),
                *([(above, "1")] if is_counted and rate not in SPEEDS else []),
            }
        elif word in _RAISED and units:
            units = {(unit, _RAISED[word]) for unit, _ in units}
        elif unit == "unit":
            units |= {(unit, exponent) for unit in LENGTHS}
        elif is_known(unit) and word != "in" and (len(word) > 1 or power or is_rate):
            units.add((unit, power or exponent))
            exponent = "1"
        else:
            break
        place += 1
    return units


def _without_power(word: str) -> tuple[str, str]:
    """``s²`` as ``s`` and 2."""
    power = next((ending for ending in (word[-2:], word[-1:]) if ending in _RAISED), "")
    return word.removesuffix(power), _RAISED.get(power, "")


def _quantity_units(words: list[str]) -> frozenset[Unit] | None:
    """Units of the first word that names a quantity; empty for a number of things without a unit;
    None if no word names a quantity."""
    for place, word in enumerate(words):
        if words[place : place + 2] in (["how", "many"], ["number", "of"]):
            return frozenset(_units_at(words, place + 2, is_counted=True))
        units = _QUANTITIES.get(word, _QUANTITIES.get(word.removesuffix("s")))
        if units is not None:
            is_time = words[place + 1 : place + 3] == ["of", "time"]
            return _QUANTITIES["time"] if is_time else units
    return None


def ratio_fits(gold: Tree, answer: Tree, question: str) -> bool:
    """Whether ``1:2`` may answer one half: if the question speaks of a ratio, or is not known."""
    if answer[0] != "ratio" or gold[0] == "ratio":
        return True
    return bool(words_of(question) & _RATIOS) if question else answer[-1] != ["num", "1"]


# order


def as_ordered(gold: Tree, answer: Tree, question: str) -> tuple[Tree, Tree]:
    """Turn both lists into tuples, whose order counts, if the question asks for an order."""
    factors = gold[1:] + answer[1:]
    if gold[0] == answer[0] == "mul" and all(factor[0] == "num" for factor in factors):
        is_size = bool(words_of(question) & _MATRICES) or demands_of(question).order  # 2 \times 3
        return (["tuple", *gold[1:]], ["tuple", *answer[1:]]) if is_size else (gold, answer)
    if gold[0] not in ("list", "set") or len(gold) < 3 or not demands_of(question).order:
        return gold, answer
    if answer[0] == "rel" and set(answer[1].split()) in ({"<"}, {">"}):  # 1 < 2 < 3
        answer = ["list", *answer[2:]]
    if answer[0] not in ("list", "set", "tuple"):
        return gold, answer
    return ["tuple", *gold[1:]], ["tuple", *answer[1:]]


# form


def has_asked_form(gold: Tree, answer: Tree, question: str) -> bool:
    """Whether an answer has the form that the question asks for and the gold answer has."""
    forms = _asked_forms(question)
    if not forms:
        return True
    members = answer[1:] if answer[0] in ("chain", "approx") else [answer]
    gold = gold[-1] if gold[0] in ("chain", "approx") else gold
    return all(
        any(has_form(gold, member) for member in members)
        for has_form in forms
        if has_form(gold, gold)
    )


@functools.lru_cache(maxsize=1024)
def _asked_forms(question: str) -> tuple[Callable[[Tree, Tree], bool], ...]:
    text = _plain(question)
    forms = [
        has_form
        for words, pattern, has_form in _FORMS
        if any(word in text for word in words) and pattern.search(text)
    ]
    return (*forms, *([_is_percent] if demands_of(question).percent else []))


@dataclass(frozen=True, slots=True)
class Demands:
    """What a question asks for."""

    percent: bool
    """A percentage: ``what percent``, but not ``What is 20 percent of``."""
    number: bool
    """A number of things."""
    rounded: bool
    """An approximate value: ``to the nearest percent``."""
    simplest: bool
    """One way to write the value: ``in simplest radical form``."""
    fraction: bool
    """A simplified expression, in factors or multiplied out."""
    solutions: bool
    """All solutions."""
    curve: bool
    """The equation of a line or a curve, in no certain form."""
    order: bool
    larger: str
    """The sign behind the larger or the smaller of two; empty if neither is asked for."""


@functools.lru_cache(maxsize=1024)
def demands_of(question: str) -> Demands:
    """What the words of a question ask for."""
    text, words = _plain(question), words_of(question)
    sentences = list(asking_sentences(question))
    listed = [set(sentence) for sentence in sentences if sentence[0] in _LISTING]
    pairs = [pair for sentence in sentences for pair in pairwise(["", *sentence])]
    which = _WHICH.search(text)
    return Demands(
        percent=("percent" in text or "%" in text)
        and any(
            (word in _PERCENTAGES and not before[-1:].isdigit()) or word in ("rate", "interest")
            for before, word in pairs
        ),
        number=any(pair in (("how", "many"), ("number", "of")) for pair in pairs),
        rounded=any(part in text for part in _ROUNDED),
        simplest=any(part in text for part in _SIMPLEST),
        fraction="simplif" in text and not any(part in text for part in ("factor", "expand")),
        solutions=bool(words & _OF_SOLUTIONS) and not words & _OF_SEQUENCES,
        curve=bool(words & _CURVES) and not words & _FORMS_OF_CURVES,
        order=_ORDER.search(text) is not None
        or any(
            ("then" in part and "if" not in part) or part >= {"first", "second"} for part in listed
        ),
        larger="" if which is None else ">" if which[1] in _LARGER else "<",
    )


@functools.lru_cache(maxsize=1024)
def asks_for_remainder(question: str, modulus: str = "") -> bool:
    """Whether the question asks for a remainder, by ``modulus`` if given."""
    text = question.lower()
    moduli = _MODULUS.findall(text)
    if "digit" in text and not moduli:
        return modulus.rstrip("0") in ("", "1")
    is_known = not modulus or not moduli or modulus in moduli
    return is_known and any(word in text for word in _REMAINDERS)


def _is_decimal(gold: Tree, answer: Tree) -> bool:
    if not any(
        part[0] == "rep" or (part[0] == "num" and "." in part[1]) for part in subtrees(gold)
    ):
        return False
    others = ("frac", "root", "mixed", "pow", "call", "const", "pct")
    return not any(holds(answer, kind) and not holds(gold, kind) for kind in others)


def _is_percent(gold: Tree, answer: Tree) -> bool:
    if gold[0] != "pct":
        return False
    return answer[0] == "pct" or value_of(answer) == value_of(gold[1])


def _is_scientific(gold: Tree, answer: Tree) -> bool:
    answer = answer[1] if answer[0] == "neg" else answer
    if not is_scientific(answer):
        return False
    value = value_of(answer[1])
    return value is not None and not isinstance(value, tuple) and 1 <= abs(value) < 10


def _is_in_lowest_terms(gold: Tree, answer: Tree) -> bool:
    answer = unsigned(answer)
    if answer[0] == "mixed":
        return gcd(int(answer[2]), int(answer[3])) == 1
    return _is_fraction(gold, answer) and "reducible" not in form_of(answer).steps


def _is_fraction(gold: Tree, answer: Tree) -> bool:
    return holds(gold, "frac") and not (
        form_of(answer).steps & (FREE - {"reducible", "mixed number"})
    )


def _has_positive_powers(gold: Tree, answer: Tree) -> bool:
    return not any(part[0] == "pow" and part[2][0] == "neg" for part in subtrees(answer))


def _is_interval(gold: Tree, answer: Tree) -> bool:
    return gold[0] in ("interval", "tuple", "cup") and not (
        answer[0] == "rel" and set(answer[1].split()) <= {"<", "<=", ">", ">="}
    )


_FORMS = (
    (("decimal", "nearest"), _DECIMAL, _is_decimal),
    (("scientific",), _SCIENTIFIC, _is_scientific),
    (("mixed",), _MIXED, lambda gold, answer: unsigned(answer)[0] == "mixed"),
    (("term", "form", "fraction", "irreducible"), _LOWEST, _is_in_lowest_terms),
    (("fraction",), _FRACTION, _is_fraction),
    (("improper",), _IMPROPER, lambda g, a: _is_fraction(g, a) and not holds(a, "mixed")),
    (("interval",), _INTERVAL, _is_interval),
    (("power", "form"), _POWER, lambda gold, answer: gold[0] == answer[0] == "pow"),
    (("positive", "negative"), _POSITIVE, _has_positive_powers),
)
"""For each form: words of which the question has one, for speed; its pattern; and its check."""


def _plain(question: str) -> str:
    """The question in lower case with single spaces."""
    return " ".join(question[-MAX_CHARACTERS:].lower().split())
