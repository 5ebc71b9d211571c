"""Answers as tokens: characters brought to LaTeX's, layout dropped. Linear in the length.

All patterns are atomic, so that none of them backtracks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from reason_llm.score.math.units import is_unit, word_set

Kind = Literal["number", "letters", "command", "text", "sign", "currency"]

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_FULL_WIDTH = {0xFF01 + i: 0x21 + i for i in range(94)}
_DIGITS = {i: str(int(chr(i))) for i in range(0x660, 0xABFA) if chr(i).isdecimal()}
"""Digits of other scripts."""
_SYMBOLS = _FULL_WIDTH | _DIGITS | str.maketrans(
    {
        "π": "\\pi ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ",
        "λ": "\\lambda ", "μ": "\\mu ", "φ": "\\phi ", "ω": "\\omega ", "σ": "\\sigma ",
        "∞": "\\infty ", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "∕": "/",
        "⁄": "/", "−": "-", "–": "-", "﹣": "-", "±": "\\pm ", "≤": "\\leq ", "≥": "\\geq ",
        "≠": "\\neq ", "≈": "\\approx ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
        "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "°": "^{\\circ}", "…": "\\ldots ", "’": "'",
        "′": "'", "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "⅕": " 1/5",
        "⅖": " 2/5", "⅗": " 3/5", "⅘": " 4/5", "⅙": " 1/6", "⅚": " 5/6", "⅛": " 1/8",
        "⅜": " 3/8", "⅝": " 5/8", "⅞": " 7/8", "⅐": " 1/7", "⅑": " 1/9", "⅒": " 1/10",
        "Ω": "\\Omega ", "\u2126": "\\Omega ", "√": "\\sqrt ", "\u00a0": " ", "\u2009": " ",
        "\u202f": " ", "€": "\\euro ", "£": "\\pounds ", "¥": "\\yen ", "₹": "\\rupee ",
        "¢": "\\cent ", "∖": "\\setminus ", "‰": "\u2030", "٫": ".", "٬": ",",
        "ρ": "\\rho ", "δ": "\\delta ", "ε": "\\epsilon ", "ψ": "\\psi ", "τ": "\\tau ",
        "η": "\\eta ", "κ": "\\kappa ", "ξ": "\\xi ", "χ": "\\chi ", "Δ": "\\Delta ",
        "∠": "\\angle ", "△": "\\triangle ", "≡": "\\equiv ", "→": "\\to ", "∣": "\\mid ",
        "⇒": "\\Rightarrow ", "⟹": "\\implies ", "∴": "\\therefore ", "∶": ":", "∗": "*",
        "⟨": "\\langle ", "⟩": "\\rangle ", "⋯": "\\ldots ", "⩽": "\\leq ", "⩾": "\\geq ",
        "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
        "∛": "\\sqrt[3] ", "∜": "\\sqrt[4] ", "\u2011": "-", "\u2010": "-",
    }
)  # fmt: skip
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]++")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]++")
_INCHES = re.compile("(?<=[0-9}])(?:[\"”]|'')\\Z")
_MARK = r"\s*+(?:\\(?:prime|star|ast)(?![A-Za-z])|['*+])"
_PRIME = re.compile(rf"\^(?:{_MARK}|\s*+\{{{_MARK}\s*+\}})")
"""A superscript that is part of a name and not a power: ``f^{\\prime}``, ``x^*``."""

_TOKEN = re.compile(
    r"(?P<number>[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+|\.[0-9]++)"
    r"|(?P<letters>[^\W\d_]++)|\\(?P<command>[A-Za-z]++|.)|(?P<space>\s++)|(?P<sign>.)",
    re.DOTALL,
)
_TEXT = word_set("text textbf textit textrm textnormal textsf texttt mbox hbox")
_ALPHABETS = word_set("operatorname mathrm mathbf mathit mathsf")
_UNSEEN = word_set("color phantom hphantom vphantom hspace vspace")
_IN_BRACES = re.compile(r" *+\{((?:[^{}\\]|\\[ ,;:!])*+)\}")
_LAYOUT = word_set(
    """
    left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle
    textstyle scriptstyle limits nolimits mathstrut strut underline uline boldsymbol bm quad
    qquad , ; : ! > ( ) [ ] hfill nonumber bf rm it mathbin mathrel mathord
    """
)
_SPACES = frozenset([",", ";", ":", ">", " ", "quad", "qquad", "~", "\n", "\t"])
_SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "le": "leq", "leqslant": "leq", "ge": "geq", "geqslant": "geq", "ne": "neq", "lt": "<",
    "gt": ">", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "dotsb": "ldots",
    "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "land": "wedge", "lor": "vee",
    "varnothing": "emptyset", "thickapprox": "approx", "lvert": "|", "rvert": "|", "vert": "|",
    "fbox": "boxed", "textcolor": "color", "ast": "*", "imath": "i", "deg": "degree",
    "infin": "infty", "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta",
    "colon": ":", "Bbb": "mathbb", "bigcup": "cup", "bigcap": "cap", "smallsetminus": "setminus",
}  # fmt: skip
_IS_WORDS = re.compile(r"\(?+[^\W\d_][^\d_{}$^\\\\<>=+]*+")
_IS_A_NAME = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s./])*+")
_PLAIN = (
    ("...", "\\ldots "),
    ("!=", "\\neq "),
    ("a.m.", "am"),
    ("p.m.", "pm"),
    (",\\!", "{,}"),
    ("{:}", ":"),
)
_PERCENT = frozenset(["percent", "percentage", "pct"])
_BRACKETS = frozenset(["(", ")", "[", "]", "\\{", "\\}"])
_CURRENCIES = {
    "$": "usd", "textdollar": "usd", "mathdollar": "usd", "euro": "eur", "texteuro": "eur",
    "pounds": "gbp", "pound": "gbp", "textsterling": "gbp", "yen": "jpy", "textyen": "jpy",
    "rupee": "inr", "cent": "cent", "textcent": "cent",
}  # fmt: skip
"""Commands that show the sign of a currency."""
_CURRENCY_IN_TEXT = re.compile(r" *+\{\s*+(?:US)?+\s*+\\(\$|euro|pounds|yen|rupee|cent)\s*+\}")
_TEXT_DEGREES = re.compile(r"\\(?:text|mathrm|mbox|textrm)\{\s*+(?:°|\^\\circ\s*+)([CFK])\}")
_ROW_SPACE = re.compile(r"\\\\ ?\[ ?-?[0-9.]{1,6}+ ?(?:pt|em|ex|mm|cm)\]")
"""The end of a row and the space under it."""
_UNIT_FRACTION = re.compile(
    r"\\[dt]?+frac *+\{\\(?:text|mathrm) *+\{([^{}\\$]++)\}\} *+"
    r"\{\\(?:text|mathrm) *+\{([^{}\\$]++)\}(\^\d|\^\{\d\})?+\}"
)
_NUMBER_SET = re.compile(
    r"(\\in(?![A-Za-z])[ ]?+(?:\\math(?:bf|rm)[ ]?+)?+|\\mathbb[ ]?+)"
    r"(?:\{([CNQRZ])\}|([CNQRZ])(?![A-Za-z_(]))"
)
"""``\\mathbb Z``, ``\\in Z`` and ``\\in\\mathbf{Z}``."""
_LONE_DOLLAR = re.compile(r"(?<!\\)\$(?=[ ]?[0-9.])")
_BARE = word_set("< > | [ ] * i :")
"""Synonyms that are no commands."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token; ``text`` is a command without its backslash, or the content of ``\\text{}``."""

    kind: Kind
    text: str
    is_spaced: bool
    """Space stands before it."""

    def __str__(self) -> str:
        return f"\\{self.text}" if self.kind in ("command", "currency") else self.text


def to_latex(text: str) -> str:
    """The text with Unicode characters written as LaTeX commands."""
    text = _RAISED.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
    for before, after in _PLAIN:
        text = text.replace(before, after)
    return _INCHES.sub("\\\\text{ in}", text.translate(_SYMBOLS))


def tokenize(text: str) -> list[Token]:
    """The tokens of a text without layout, dollar signs and colors.

    Example: ``"\\\\left( x,\\\\, 2 \\\\right)" -> ( x , 2 )``
    """
    text = to_latex(_TEXT_DEGREES.sub(r"^{\\circ}\\mathrm{\1}", text))
    if "frac{\\" in text:
        text = _UNIT_FRACTION.sub(_as_unit, text)
    if "\\in" in text or "\\mathbb" in text:
        text = _NUMBER_SET.sub(_as_set, text)
    if "\\begin" not in text:
        text = text.replace("\\\\", "\\")  # escaped once too often
    text = _PRIME.sub("'", _ROW_SPACE.sub("\\\\\\\\", text))
    if (text.count("$") - text.count("\\$")) % 2:  # no pair of marks of mathematics
        text = _LONE_DOLLAR.sub(r"\\$", text, count=1)
    return whole_numerals(_without_colors(list(_raw_tokens(text))))


def _as_unit(fraction: re.Match[str]) -> str:
    """``\\text{m/s}^2`` for ``\\frac{\\text{m}}{\\text{s}^2}``."""
    above, below = fraction[1].strip(), fraction[2].strip()
    if not (is_unit(above) and is_unit(below)):
        return fraction[0]
    return f"\\text{{ {above}/{below}}}{fraction[3] or ''}"


def _as_set(match: re.Match[str]) -> str:
    sign = "\\in" if match[1].startswith("\\in") else ""
    return f"{sign}\\mathbb{{{match[2] or match[3]}}}"


def _raw_tokens(text: str) -> Iterator[Token]:
    position, is_spaced = 0, False
    while match := _TOKEN.match(text, position):
        position = match.end()
        kind, value = str(match.lastgroup), match[str(match.lastgroup)]
        if kind == "space" or value == "~" or (kind == "command" and value in _SPACES):
            is_spaced = True
            continue
        if kind == "sign" and value in "$`":
            continue
        if kind == "command":
            if value in _LAYOUT:
                is_spaced = True
                if value in ("left", "right") and text.startswith(".", position):
                    position += 1
                continue
            is_text = value in _TEXT or value in _ALPHABETS
            if is_text and (shown := _CURRENCY_IN_TEXT.match(text, position)):
                position, value = shown.end(), shown[1]
            if value in _CURRENCIES:
                yield Token("currency", _CURRENCIES[value], is_spaced)
                is_spaced = False
                continue
            # Words become one token; other content, as in ``\mathrm{x^2}``, is mathematics.
            if is_text:
                content = _IN_BRACES.match(text, position)
                words = content and _of_text(content[1], value in _ALPHABETS, is_spaced)
                if content and words:
                    position = content.end()
                    yield from words
                    is_spaced = False
                continue
            value = _SYNONYMS.get(value, value)
            kind = ("letters" if value == "i" else "sign") if value in _BARE else kind
            if value == "%":
                kind = "sign"
        yield _token(kind, value, is_spaced)
        is_spaced = False


def _token(kind: str, value: str, is_spaced: bool) -> Token:
    if value.lower() in _PERCENT:
        return Token("sign", "%", is_spaced)
    return Token(kind, value, is_spaced)  # type: ignore[arg-type]


def _of_text(content: str, is_alphabet: bool, is_spaced: bool) -> list[Token] | None:
    """The words in the braces of ``\\text{}`` as one token, or a choice; None: mathematics."""
    words = content.replace("~", " ").replace("\\ ", " ").strip()
    if len(words) == 3 and words.startswith("(") and words.endswith(")"):
        return [_token("letters" if word.isalpha() else "sign", word, is_spaced) for word in words]
    before = [Token("sign", ",", is_spaced)] if words.startswith(",") else []
    words = words.lstrip(", ")
    pattern = _IS_A_NAME if is_alphabet else _IS_WORDS
    if not pattern.fullmatch(words) or (len(words) == 1 and not is_unit(words)) or words == "d":
        return None
    return [*before, _token("text", words, is_spaced)]


def _without_colors(tokens: list[Token]) -> list[Token]:
    """``\\color{red}`` is dropped, ``\\color{red}{3}`` is ``{3}``; so is what shows nothing."""
    shown: list[Token] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token.kind == "command" and token.text in _UNSEEN:
            index = _behind_argument(tokens, index)
        else:
            shown.append(token)
    return shown


def _behind_argument(tokens: list[Token], index: int) -> int:
    """The position behind a group in braces or one token."""
    depth = 0
    while index < len(tokens):
        depth += {"{": 1, "}": -1}.get(str(tokens[index]), 0)
        index += 1
        if depth <= 0:
            break
    return index


def whole_numerals(tokens: list[Token]) -> list[Token]:
    """Numerals grouped in threes as one: by ``{,}`` anywhere; by commas or spaces where the answer
    has no other number and no brackets, since ``(1,234)`` is a pair."""
    # Exponents and subscripts are not counted: ``x_1 + 1,000`` still has one grouped numeral.
    numbers = [
        i
        for i, token in enumerate(tokens)
        if token.kind == "number" and not (i and tokens[i - 1].text in "^_")
    ]
    first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
    between = tokens[first:last]
    is_alone = not any(str(token) in _BRACKETS for token in tokens) and all(
        token.kind == "number" or str(token) in ("{", ",", "}") for token in between
    )
    merged: list[Token] = []
    index = 0
    while index < len(tokens):
        length = _separator(tokens, index, is_alone)
        if length is not None and _continues(merged, tokens, index + length):
            number = tokens[index + length].text
            merged[-1] = Token("number", merged[-1].text + number, merged[-1].is_spaced)
            index += length + 1
        else:
            merged.append(tokens[index])
            index += 1
    return merged


def _separator(tokens: list[Token], index: int, is_alone: bool) -> int | None:
    """Number of tokens that separate two groups of digits here; None: this is no separator."""
    if [str(token) for token in tokens[index : index + 3]] == ["{", ",", "}"]:
        return 3
    if not is_alone:
        return None
    if str(tokens[index]) == ",":
        is_tight = index + 1 < len(tokens) and not tokens[index + 1].is_spaced
        return 1 if is_tight else None
    return 0 if tokens[index].kind == "number" and tokens[index].is_spaced else None


def _continues(before: list[Token], tokens: list[Token], index: int) -> bool:
    """Whether three digits continue a whole number."""
    if not before or index >= len(tokens) or before[-1].kind != "number":
        return False
    whole, _, fraction = tokens[index].text.partition(".")
    return (
        before[-1].text.isdigit()
        and before[-1].text[0] != "0"
        and tokens[index].kind == "number"
        and len(whole) == 3
        and (fraction.isdigit() or not fraction)
    )
