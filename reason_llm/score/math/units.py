"""The unit or remark that follows an answer: taken off, and compared where both have one."""

import re

_SPELLINGS = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre",
    "m": "m meter metre", "km": "km kilometer kilometre", "in": "in inch inche",
    "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile", "mg": "mg milligram",
    "g": "g gm gram", "kg": "kg kilogram", "lb": "lb pound", "oz": "oz ounce",
    "ml": "ml milliliter millilitre", "l": "l liter litre", "gal": "gal gallon",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "d": "day", "week": "week",
    "month": "month", "yr": "yr year", "usd": "dollar usd", "cent": "cent", "eur": "euro eur",
    "mph": "mph", "km/h": "km/h kmh kph", "m/s": "m/s", "hz": "hz hertz", "n": "n newton",
    "j": "j joule", "w": "w watt", "v": "v volt", "pa": "pa pascal", "c": "c celsius",
    "f": "f fahrenheit", "am": "am a.m a.m.", "pm": "pm p.m p.m.", "deg": "degree deg",
    "rad": "rad radian", "unit": "unit",
}  # fmt: skip
_CANONICAL = {spelling: unit for unit, words in _SPELLINGS.items() for spelling in words.split()}
_COMMAND = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|operatorname)\s*"
_RAISED = r"(?:\^\s*\{?\s*-?\d\s*\}?)?"
_IN_TEXT = re.compile(
    rf"(?<=[\w}})\]%])\s*((?:(?:{_COMMAND}\{{[^{{}}]*\}}|\\Omega)\s*{_RAISED}\s*[/.]?\s*)+)$"
)
_PLAIN = re.compile(
    r"(?P<number>(?:^|[^A-Za-z])[\d})]\s*)(?P<unit>(?:[A-Za-z]{2,}\.?\s+)*(?:[A-Za-z][A-Za-z./]*)"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?)$"
)
_AREA = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_LETTER = re.compile(r"[mgslhLNJWVCFK]")
_SHORTEST_REMARK = 4
"""Letters of a word that stands for itself; fewer may be a product of variables."""


def split_unit(answer: str, with_letters: bool) -> tuple[str, str]:
    """The answer and what follows it: ``\\text{...}`` after mathematics, or words after a number.

    Args:
        with_letters: a single letter that stands apart from its number is a unit, no variable.

    Example: ``"35 square cm" -> ("35", "square cm")``
    """
    if in_text := _IN_TEXT.search(answer):
        return answer[: in_text.start()].strip(), in_text[1]
    plain = _PLAIN.search(answer)
    if plain is None:
        return answer, ""
    unit, is_apart = plain["unit"], plain["number"][-1].isspace()
    if len(unit) == 1:
        is_unit = with_letters and is_apart and _LETTER.fullmatch(unit) is not None
    else:
        words = _canonical(unit)
        are_known = all(word in _SPELLINGS for word, _ in words)
        is_unit = are_known or (is_apart and len(unit) >= _SHORTEST_REMARK)
    return (answer[: plain.start("unit")].strip(), unit) if is_unit else (answer, "")


def units_clash(gold: str, gold_unit: str, unit: str) -> bool:
    """Whether both have a unit and these are known to differ; behind an expression with letters,
    any two different words do (``2n (n even)``, ``2n (n odd)``)."""
    if not gold_unit or not unit:
        return False
    first, second = _canonical(gold_unit), _canonical(unit)
    if re.search(r"[a-z]", gold):
        return first != second
    are_known = all(word in _SPELLINGS for word, _ in (*first, *second))
    return are_known and first != second


def _canonical(unit: str) -> list[tuple[str, str]]:
    """The unit's words, each in one spelling with its exponent."""
    words: list[tuple[str, str]] = []
    exponent = "1"
    plain = re.sub(r"[\s{}]*/[\s{}]*", "/", re.sub(_COMMAND, " ", unit.lower()))
    for word in re.findall(r"[a-z][a-z./]*|\d", plain):
        if word.isdigit():
            if words:
                words[-1] = (words[-1][0], word)
        elif word in _AREA:
            exponent = _AREA[word]
        else:
            words.append((_CANONICAL.get(word, _CANONICAL.get(_singular(word), word)), exponent))
            exponent = "1"
    return words


def _singular(word: str) -> str:
    return word.rstrip(".").removesuffix("s")
