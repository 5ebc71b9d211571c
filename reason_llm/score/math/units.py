"""The unit or remark that follows an answer, and whether two of them differ."""

from collections.abc import Collection, Sequence
from fractions import Fraction


def word_set(text: str) -> frozenset[str]:
    """The set of the words in a text, to write tables of words."""
    return frozenset(text.split())


_SPELLINGS = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre",
    "m": "m meter metre", "km": "km kilometer kilometre", "in": "in inch inche",
    "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile", "mg": "mg milligram",
    "ms": "ms millisecond", "dm": "dm decimeter decimetre", "cl": "cl centiliter centilitre",
    "mol": "mol mole", "mmol": "mmol millimole", "wh": "wh", "cup": "cup",
    "tbsp": "tbsp tablespoon", "tsp": "tsp teaspoon",
    "ha": "ha hectare", "acre": "acre", "ton": "ton tonne", "qt": "qt quart", "pt": "pt pint",
    "kw": "kw kilowatt", "kj": "kj kilojoule", "kpa": "kpa kilopascal", "kwh": "kwh",
    "g": "g gm gram", "kg": "kg kilogram", "lb": "lb pound", "oz": "oz ounce",
    "ml": "ml milliliter millilitre", "l": "l liter litre", "gal": "gal gallon",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "d": "day", "week": "week",
    "month": "month", "yr": "yr year", "usd": "dollar usd buck", "cent": "cent penny pennie",
    "eur": "euro eur", "gbp": "gbp sterling", "jpy": "jpy yen", "cny": "cny yuan rmb",
    "inr": "inr rupee rs",
    "mph": "mph mi/h", "km/h": "km/h kmh kph", "m/s": "m/s", "hz": "hz hertz", "n": "n newton",
    "j": "j joule", "w": "w watt", "v": "v volt", "pa": "pa pascal", "c": "c celsius",
    "f": "f fahrenheit", "am": "am a.m", "pm": "pm p.m", "deg": "degree deg circ",
    "rad": "rad radian", "unit": "unit", "ohm": "ohm", "k": "k kelvin", "a": "ampere amp",
    "mi/gal": "mpg mi/gal",
}  # fmt: skip
_CANONICAL = {spelling: unit for unit, known in _SPELLINGS.items() for spelling in known.split()}
_LETTERS = frozenset("mgslhLNJWVCFK")
"""Units of one letter, which are variables if the gold answer has variables."""
CURRENCIES = word_set("usd cent eur gbp jpy cny inr")
_DERIVED = {
    ("kg", "1", "m/s", "2"): "n", ("n", "1", "m", "1"): "j", ("j/s", "1"): "w", ("n/m", "2"): "pa",
    ("kg", "1", "m", "2", "s", "-2"): "j", ("1/s", "1"): "hz", ("s", "-1"): "hz",
}  # fmt: skip
"""Units with names of their own for others: ``kg m/s^2`` is a newton."""
AREAS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_RAISED = {"squared": "2", "cubed": "3"}
LENGTHS, SPEEDS = word_set("mm cm dm m km in ft yd mi unit"), word_set("mph km/h m/s")
KINDS = (
    LENGTHS - {"unit"},
    word_set("mg g kg lb oz"),
    word_set("ml l gal qt pt cup tbsp tsp"),
    word_set("s min h d week month yr"),
    CURRENCIES,
    word_set("deg rad"),
    word_set("c f k"),
    SPEEDS,
)
"""Units of one quantity, of which each says another value."""
_SIZES = {
    unit: (system, Fraction(size))
    for system, units in [
        ("metric length", {"mm": 1, "cm": 10, "dm": 100, "m": 1000, "km": 10**6}),
        ("length", {"in": 1, "ft": 12, "yd": 36, "mi": 63360}),
        ("metric mass", {"mg": 1, "g": 1000, "kg": 10**6}),
        ("mass", {"oz": 1, "lb": 16}),
        ("volume", {"ml": 1, "l": 1000}),
        ("cups", {"tsp": 1, "tbsp": 3, "cup": 48}),
        ("amount", {"mmol": 1, "mol": 1000}),
        *((f"{unit}s", {unit: 1, f"k{unit}": 1000}) for unit in ("j", "w", "pa", "wh")),
        ("time", {"s": 1, "min": 60, "h": 3600, "d": 86400, "week": 604800}),
        ("months", {"month": 1, "yr": 12}),
        ("money", {"cent": 1, "usd": 100}),
    ]
    for unit, size in units.items()
}
"""The sizes of units that can be converted exactly into one another."""
_ALSO = {"gbp": "lb", "lb": "gbp", "jpy": "cny", "cny": "jpy"}
"""Units that share a word or a sign."""
_NEED_SUPPORT = word_set("n j w v pa c f k a am pm")
"""Units that are ambiguous unless the question mentions them."""
_NEUTRAL = frozenset(["unit", "per"])
_SPEAKING = word_set(
    """
    or nor not no never but maybe either neither except than less least most about around
    roughly approximately almost nearly plus minus divided over modulo mod factorial half
    halves third thirds quarter quarters fourth fourths fifth fifths tenth tenths hundredth
    hundredths negative hundred hundreds dozen dozens score pair pairs squared cubed below if
    unless instead rather wrong incorrect false versus vs to is are was equals equal probably
    perhaps possibly alternatively also otherwise correction actually isn aren doesn don zero
    one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
    thousand million billion trillion thousands millions
    """
)
"""Words behind a number that change the number or deny it."""
_MAX_WORDS = 8


def unit_words(text: str) -> list[tuple[str, str]] | None:
    """The words of a unit or a remark, each in one spelling and with its exponent; None where they
    may say another answer.

    Example: ``"square cm" -> [("cm", "2")]``
    """
    words: list[tuple[str, str]] = []
    exponent, is_per = "1", False
    for word in _slashed(text.lower()).split():
        if word == "per" and words:
            is_per = True
        elif is_per:
            words[-1] = (canonical(f"{words[-1][0]}/{canonical(word)}"), "1")
            is_per = False
        elif word.removeprefix("-").isdigit() or word in _RAISED:
            if not words:
                return None
            sign = words[-1][1].removesuffix("1")
            words[-1] = (words[-1][0], sign + _RAISED.get(word, word))
        elif word.startswith("/") and words:
            words.append((canonical(word[1:]), "-1"))
        elif word in _SPEAKING:
            return None
        elif word in AREAS:
            exponent = AREAS[word]
        else:
            words.append((canonical(word), exponent))
            exponent = "1"
    if name := _DERIVED.get(tuple(part for word in words for part in word)):
        return [(name, "1")]
    if len(words) > 1 and words[-1][1].startswith("-"):  # m s^{-1}
        (below, power), (above, _) = words.pop(), words.pop()
        words.append((canonical(f"{above}/{below}"), power.removeprefix("-")))
    if name := _DERIVED.get(tuple(part for word in words for part in word)):
        return [(name, "1")]
    return words if 0 < len(words) <= _MAX_WORDS else None


def _slashed(text: str) -> str:
    """Write ``m / s`` as one word, and remove brackets and points."""
    for mark in "{}()^:,~":
        text = text.replace(mark, " ")
    text = text.replace("a.m.", "am").replace("p.m.", "pm").replace(".", " ")
    first, *rest = (part.strip() for part in text.replace("- ", "-").split("/"))
    joined = first
    for part in rest:  # m^2/s^2
        joined += f" /{part}" if joined[-1:].isdigit() else f"/{part}"
    return {"a m": "am", "p m": "pm"}.get(joined.strip(), joined)


def canonical(word: str) -> str:
    """One spelling of a word: ``feet`` is ``ft``, ``dogs`` is ``dog``."""
    singular = word.removesuffix("s") if len(word) > 2 and word != "has" else word
    if "/" in word and word not in _CANONICAL:  # km/hr
        word = singular = "/".join(map(canonical, word.split("/")))
    return _CANONICAL.get(word, _CANONICAL.get(singular, singular))


def leave_value_unchanged(
    units: Sequence[tuple[str, str]],
    asked: Collection[str],
    allowed: Collection[tuple[str, str]] = (),
) -> bool:
    """Whether units and remarks do not change a number, if the gold answer has none. ``asked`` are
    words of the question (empty: unknown), ``allowed`` units of the quantity that it asks for."""
    return all(_fits(word, asked, (word, power) in allowed) for word, power in units)


def _fits(word: str, asked: Collection[str], is_allowed: bool) -> bool:
    if word in asked or word in _NEUTRAL or _ALSO.get(word) in asked:
        return True
    if not is_known(word) and all(part in asked for part in word.split("/")):  # pages per year
        return True
    if not is_allowed and (not is_known(word) or word in _NEED_SUPPORT):
        return False
    parts = {"mph": "mi/h"}.get(word, word).split("/")
    if asked and not is_allowed and word != "deg":  # no quantity that has units is asked for
        return all(part in asked for part in parts)
    return not any(
        part in kind and part not in asked and kind & set(asked)
        for kind in KINDS
        for part in (word, *parts)
    )


def conversion_factor(unit: tuple[str, str], other: tuple[str, str]) -> Fraction | None:
    """The size of a unit in another, 1000 of kilometers in meters; None for other quantities."""
    sizes = [_size(*measure) for measure in (unit, other)]
    if None in sizes or sizes[0][0] != sizes[1][0]:  # type: ignore[index]
        return None
    return sizes[0][1] / sizes[1][1]  # type: ignore[index]


def _size(unit: str, power: str) -> tuple[list[tuple[str, str]], Fraction] | None:
    above, _, below = {"mph": "mi/h"}.get(unit, unit).partition("/")
    if not {above, below or above} <= _SIZES.keys() or power not in ("1", "2", "3"):
        return None
    (measured, size), divisor = _SIZES[above], _SIZES.get(below)
    if divisor is None:
        return [(measured, power)], size ** int(power)
    return [(measured, "1"), (divisor[0], power)], size / divisor[1] ** int(power)


def is_known(word: str) -> bool:
    """Whether a word in its one spelling is a unit, or two with a slash between them."""
    return all(part in _SPELLINGS for part in word.split("/")) and word not in _NEUTRAL


def is_unit(word: str) -> bool:
    """Whether it is a known unit; a single letter in the case that it is written in."""
    if len(word) == 1:
        return word in _LETTERS or word == "d"
    return all(canonical(part) in _SPELLINGS for part in word.lower().split("/"))
