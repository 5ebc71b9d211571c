"""An answer as text: its many spellings brought to one, and what the text alone decides.

The rules are those that math-verify lacks or has too broadly; the mathematics is left to it.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

from reason_llm.score.math.extraction import extract_answer
from reason_llm.score.math.units import split_unit, units_clash

MAX_CHARACTERS = 4000
"""Longer answers are compared as they stand."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SYMBOLS = str.maketrans(
    {
        "π": "\\pi ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ",
        "λ": "\\lambda ", "μ": "\\mu ", "φ": "\\phi ", "ω": "\\omega ", "σ": "\\sigma ",
        "∞": "\\infty ", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "∕": "/",
        "−": "-", "–": "-", "±": "\\pm ", "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq ",
        "≈": "\\approx ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
        "ℝ": "\\mathbb{R}", "°": "^{\\circ}", "％": "%", "，": ",", "（": "(", "）": ")",
        "…": "\\ldots ", "’": "'", "′": "'", "½": " 1/2", "¼": " 1/4", "¾": " 3/4",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    }
)  # fmt: skip
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_ROOT_SIGN = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[A-Za-z]))")

_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_WHOLE_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf)\s*\{([^{}]*)\}"
)
_CURRENCY = re.compile(r"\\\$|[€£¥₹]")
_LAYOUT = re.compile(
    r"(?<!\\)\\(?:[,;:!> ]|(?:left|right)(?![A-Za-z])\.?"
    r"|(?:quad|qquad|displaystyle|textstyle|[bB]igg?[lr]?)(?![A-Za-z]))|~"
)
_ANGLE = re.compile(r"\\([lr])angle(?![A-Za-z])")
_UPRIGHT = re.compile(r"\\(?:text|mathrm|mathit|mathbf)\s*\{\s*([eid]|[\d.]+)\s*\}")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*percent\s*\}|\b(?:percent|percentage|pct)\b)")
_SEPARATOR = r"(?:,|\{,\}|,\s?\\!\s?|\\,|\\ | )"
_GROUPED = re.compile(
    rf"((?:[^=(){{}}\[\],]*=)?\s*[+-]?\s*)([1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})+)"
    rf"(?=(?:\.\d+)?(?:[^\d,(\[=]*|\s*\\(?:text|mathrm)\{{[^{{}}]*\}}(?:\^\{{?\d\}}?)?)$)"
)
_BRACED_COMMA = re.compile(r"(?<=\d)(?:\{,\}|,\s?\\!)\s?(?=\d{3}(?!\d))")
_MULTIPLIERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLIER = re.compile(
    r"(?<=\d)\s*(?:\\text\s*\{)?\s*(thousand|million|billion|trillion)\b\s*\}?"
)

_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_ARGUMENT = r"(\{(?:[^{}]|\{[^{}]*\})*\}|\w|\\[A-Za-z]+)"
_FRACTION_OF_TOKENS = re.compile(rf"\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}")
_ROOT_OF_TOKEN = re.compile(r"\\sqrt\s*(\[[^\]]*\])?\s*(\d+|[A-Za-z])")
_LONG_EXPONENT = re.compile(r"(?:\^|\*\*)\s*(-?\d{2,}|-\w)")
_POWER_OR_TIMES = re.compile(r"\*\*|\*")
_MIXED = re.compile(r"([+-]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+))")
_PLAIN_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp)(?=\s*[(^]|\s+\w)"
)
_PLAIN_CONSTANT = re.compile(r"(?<![\\A-Za-z])(pi|infinity|infty|inf|oo)(?![A-Za-z])", re.I)
_REPEATING = re.compile(r"(?<![\d.])(\d+)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_E_NOTATION = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)")
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")

_WORD = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sqrt|a?rc\w+|sinh?|cosh?|tanh?|cot|sec|csc|log|ln|exp|pi|infinity|and|or)\b)"
    r"[A-Za-z]{2,}"
)
_LAST_MATHS = re.compile(r".*[\d\\]", re.DOTALL)
_NO_WORDS = re.compile(r"\\(?:text|mathrm|operatorname|begin|end|mbox)\s*\{[^{}]*\}")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
_BASED = re.compile(r"(-?\d\w*)_\s*\{?\s*(\w+)\s*\}?")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")
_CHOICE = re.compile(r"\(?([A-J])\)?\.?")
_CHOSEN = re.compile(r"\(([A-J])\)(?=[\s,.:}]|$)|([A-J])[).:]\s")
_ELLIPSIS = re.compile(r"\\[lc]?dots(?![A-Za-z])|\.\.\.")


@dataclass(frozen=True, slots=True)
class Question:
    """What the text leaves open: are these two the same? Each is LaTeX between ``$``, or prose that
    holds the answer somewhere."""

    gold: str
    answer: str


def decide(gold: str, answer: str) -> bool | Question:
    """Whether two answers are the same, where their text tells; else the question for mathematics.

    Text tells of equal strings, numerals, words, letters of a choice, units that differ, and dots
    that stand for what nobody computes.
    """
    gold, answer = normalise(gold), normalise(answer)
    if not gold or not answer:
        return False
    verdict = _words(gold, answer)
    if verdict is not None:
        return verdict
    gold, gold_unit = split_unit(gold, with_letters=False)
    has_variables = re.search(r"[A-Za-z]", gold) is not None
    answer, unit = split_unit(answer, with_letters=not has_variables)
    if units_clash(gold, gold_unit, unit):
        return False
    verdict = _numerals(gold, answer)
    if verdict is not None:
        return verdict
    if max(len(gold), len(answer)) > MAX_CHARACTERS:
        return False
    return Question(_as_source(gold), _as_source(answer))


def normalise(answer: str) -> str:
    """The answer without its wrapping, in the spelling that math-verify reads best."""
    answer = _unwrapped(_unicode_to_latex(_single_spaces(extract_answer(answer) or answer)))
    answer = _CURRENCY.sub("", answer)
    if answer.count("$") % 2:
        answer = answer.replace("$", "")
    if len(answer) > MAX_CHARACTERS or "$" in answer or _is_prose(answer):
        return answer
    answer = _BRACED_COMMA.sub("", answer)
    if grouped := _GROUPED.match(answer):
        answer = grouped[1] + re.sub(r"\D", "", grouped[2]) + answer[grouped.end() :]
    answer = _without_layout(answer)
    answer = _MULTIPLIER.sub(lambda m: f" \\times 10^{{{_MULTIPLIERS[m[1]]}}}", answer)
    answer = _PERCENT.sub(r"\\%", answer)
    return _unwrapped(_operators(answer))


def _unicode_to_latex(text: str) -> str:
    text = _RAISED.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
    text = _ROOT_SIGN.sub(lambda m: f"\\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    return text.translate(_SYMBOLS)


def _single_spaces(text: str) -> str:
    """Runs of spaces cost the patterns above quadratic time."""
    return re.sub(r"\s+", " ", text)


def _unwrapped(text: str) -> str:
    """Without what encloses it whole, Markdown's marks around it, a full stop after it and a plus
    before it."""
    before = None
    while text != before:
        before = text
        text = text.strip(" *`").removesuffix("\\,").removesuffix("\\;")
        if not text.endswith(".."):
            text = text.rstrip(".,;")
        for start, end in _WRAPPERS:
            inner = text[len(start) : -len(end)]
            if text.startswith(start) and text.endswith(end) and inner and start not in inner:
                text = inner
        if whole := _WHOLE_TEXT.fullmatch(text):
            text = whole[1]
    return text.removeprefix("+")


def _without_layout(text: str) -> str:
    text = _ANGLE.sub(lambda m: "(" if m[1] == "l" else ")", _LAYOUT.sub(" ", text))
    text = _single_spaces(text)
    return _UPRIGHT.sub(r"\1", _ELLIPSIS.sub(r"\\ldots ", text))


def _operators(text: str) -> str:
    """TeX's brace-less forms with braces; a calculator's or a programmer's spelling as LaTeX."""
    text = _FRACTION.sub(r"\\frac", text)
    text = _ROOT_OF_TOKEN.sub(lambda m: f"\\sqrt{m[1] or ''}{{{m[2]}}}", text)
    text = _FRACTION_OF_TOKENS.sub(lambda m: f"\\frac{_braced(m[1])}{_braced(m[2])}", text)
    text = _PLAIN_ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    text = _PLAIN_FUNCTION.sub(r"\\\1", text)
    text = _PLAIN_CONSTANT.sub(lambda m: "\\pi " if m[1].lower() == "pi" else "\\infty ", text)
    text = _LONG_EXPONENT.sub(r"^{\1}", text)
    text = _POWER_OR_TIMES.sub(lambda m: "^" if m[0] == "**" else " \\cdot ", text)
    text = _REPEATING.sub(_fraction_of_repeating, text)
    if mixed := _MIXED.fullmatch(text.strip()):
        text = _mixed(text, mixed)
    if number := _E_NOTATION.fullmatch(text.strip()):
        text = f"{number[1]} \\times 10^{{{number[2].lstrip('+')}}}"
    return text


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"


def _mixed(text: str, mixed: re.Match[str]) -> str:
    """``11 5/6`` as one fraction; an improper second part is left alone."""
    sign, whole, numerator, denominator = mixed.groups()
    if len(numerator) > len(denominator) or int(numerator) >= int(denominator):
        return text
    return f"{sign}\\frac{{{int(whole) * int(denominator) + int(numerator)}}}{{{denominator}}}"


def _fraction_of_repeating(decimal: re.Match[str]) -> str:
    """``0.1\\overline{6}`` as ``\\frac{15}{90}``."""
    whole, start, period = (digits[:50] for digits in decimal.groups())
    numerator = int(whole + start + period) - int(whole + start)
    return f"\\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(start)}}}"


def _numerals(gold: str, answer: str) -> bool | None:
    if _squeezed(gold) == _squeezed(answer):
        return True
    if _DECIMAL.fullmatch(gold) and _DECIMAL.fullmatch(answer):
        return Decimal(gold) == Decimal(answer)  # exact, and of any length
    gold_based, based = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if gold_based and based:
        return gold_based.groups() == based.groups()
    percentage = gold.removesuffix("\\%").strip()
    if percentage != gold and _DECIMAL.fullmatch(percentage) and percentage == answer:
        return True  # 12.5 answers for 12.5 %
    return None


def _words(gold: str, answer: str) -> bool | None:
    if _squeezed(gold) == _squeezed(answer):
        return True
    if choice := _CHOICE.fullmatch(gold):
        alone = _CHOICE.fullmatch(answer.upper())
        chosen = {alone[1]} if alone else {m[1] or m[2] for m in _CHOSEN.finditer(answer)}
        if chosen:
            return chosen == {choice[1]}
    gold, answer = (_WHOLE_TEXT.sub(r"\1", text).strip() for text in (gold, answer))
    if _WORDS.fullmatch(gold) and _WORDS.fullmatch(answer):
        return gold.casefold() == answer.casefold()  # not a product of variables
    if all(_is_prose(text) and not re.search(r"[$=]", text) for text in (gold, answer)):
        return _squeezed(gold).casefold() == _squeezed(answer).casefold()  # October 30
    if (_ELLIPSIS.search(gold) or _ELLIPSIS.search(answer)) and not _is_prose(answer):
        return False
    return None


def _squeezed(text: str) -> str:
    """Without its spaces, but for those between digits."""
    return _SPACE.sub("", text)


def _is_prose(text: str) -> bool:
    """Whether it is a sentence that leads to the answer, not the answer: words stand before
    mathematics."""
    before = _LAST_MATHS.match(_NO_WORDS.sub("", text))
    words = _WORD.findall(before[0]) if before else []
    return len(words) >= 3 or bool(words and len(words[0]) >= 4 and text.startswith(words[0]))


def _as_source(answer: str) -> str:
    return answer if "$" in answer or _is_prose(answer) else f"${answer}$"
