"""Words with a mathematical meaning: the empty set, sets of numbers, remarks about constants."""

import re
from collections.abc import Sequence

from reason_llm.score.math.latex_tokens import Token, tokenize
from reason_llm.score.math.units import word_set

_MODULO = ("pmod", "bmod", "mod", "modulo")
_NONE = word_set("no none not doesn't without nothing")
_SOLUTIONS = word_set(
    """
    solution solutions root roots value values number numbers integer integers pair pairs triple
    triples x none nothing primes functions polynomials points triangles
    """
)
_ABOUT_SOLUTIONS = (
    _NONE
    | _SOLUTIONS
    | word_set(
        """
        there is are exist exists the this that equation equations system inequality has have real
        any of satisfy satisfies satisfying it does do doesn't for which a an possible given such
        in set reals we inconsistent positive natural prime ordered n m k y z p
        """
    )
)
_REASON = word_set("since because as")
_OPERATORS = word_set(
    r"\int \iint \oint \lim \sum \prod \sup \inf \limsup \max \min \angle \measuredangle \nabla"
)
_LEFT_SIDES = ("\\angle", "\\gcd", "\\det", "dy/dx")
_LEFT_STARTS = (
    "\\|", "\\lVert", "\\Vert", "||", "m\\angle", "\\frac{d}", "\\frac{d^",
    "\\frac{\\partial",
)  # fmt: skip
_VECTORS = word_set(r"\vec \mathbf \overrightarrow \boldsymbol \hat")
_LONGEST_OPERATOR = 6
_OF_SETS = word_set(r"\cap \cup \setminus \mathcal ( ) , ' | \mid \{ \} { } ^ c")
_NUMBER_FUNCTIONS = word_set("tau sigma phi varphi mu pi omega zeta")
_SETS = {
    name: latex
    for names, latex in [
        ("real numbers|reals|real number|real x|real values|real", "\\mathbb{R}"),
        ("integers|integer", "\\mathbb{Z}"),
        ("rational numbers|rationals", "\\mathbb{Q}"),
        ("complex numbers", "\\mathbb{C}"),
        ("positive integers|natural numbers", "\\mathbb{Z}^+"),
        ("nonnegative real numbers|non-negative real numbers|nonnegative reals", "x \\geq 0"),
        ("positive real numbers|positive reals", "x > 0"),
        ("negative real numbers|negative reals", "x < 0"),
        ("nonzero real numbers|non-zero real numbers|nonzero reals", "x \\neq 0"),
    ]
    for name in names.split("|")
}
_ALL = ("the set of all ", "set of all ", "the set of ", "all ", "every ", "any ", "the ", "")
_EXCEPT = ("except for", "except", "excluding", "other than", "but not", "besides", "not equal to")
_SUCH = ("such that", "x such that", "x where", "where", "for which", "with")
_MAX_WORDS = 12
_LEAD = r"(?:\n(?:,|\(?(?:where|with|\\?forall|for(?: (?:all|any|every|each|some))?+)|\()(?=\n))"
_DOMAIN = r"([a-z])\n\\in\n(\\mathbb(?:\n[{}A-Z^+])++)"
_ALL_INTEGERS = r"([a-z])\n=\n0\n,\n\\pm\n1\n,\n\\pm\n2(?:\n,\n\\pm\n3)?+\n,\n\\ldots"
_STATEMENTS = tuple(
    (re.compile(pattern, re.IGNORECASE), latex)
    for pattern, latex in [
        (rf"(?<=.){_LEAD}{{0,4}}+\n{_DOMAIN}(?:\n\))?+\Z", r", \1 \\in \2"),
        (rf"(?<=.){_LEAD}{{0,4}}+\n{_ALL_INTEGERS}(?:\n\))?+\Z", r", \1 \\in \\mathbb{Z}"),
        (rf"{_LEAD}{{1,4}}+\n([^\n]++\n\\neq(?:\n(?!\\neq|\)\Z)[^\n]++)++)(?:\n\))?+\Z", r", \1"),
    ]
)
"""Statements about a name behind an answer, one token a line, and how they are read as an item."""
_NUMERALS = tuple(
    (re.compile(pattern, re.IGNORECASE), latex)
    for pattern, latex in [
        (
            r"\A\n([\d.]++)(?:\n[{}])*+\n[ ,:]*+(?:(?:with )?remainder|r)[ ,:]*+(?:\n[{}])*+"
            r"\n([\d.]++)(?:\n})*+\Z",
            r"\\text{quotient}=\1, \\text{remainder}=\2",
        ),
        (
            r"(?<=\d)(?:\n[{}(])*+\n(?:in\n)?+\(?(?:in )?base(?:\n[{}])*+\n(\w++)(?:\n[)}])*+\Z",
            r"_{\1}",
        ),
    ]
)
"""``12 \\text{ remainder } 5`` and ``45 \\text{ (base 10)}``."""
_OTHER_FORM = (
    (
        re.compile(
            r"(?<=.)(?:\n[,;(](?=\n)){0,4}+\n\(?(?:i\n\.\ne\n\.|i\.e\.|that[\n ]is)"
            r"(?:\n(?:[,.]|the|ratio|is|value|answer|it)(?=\n))*+",
            re.IGNORECASE,
        ),
        r"\\text{or}",
    ),
    (re.compile(r"(?<=.)\n\(\n?or(?=\n.*+(?<=\n\)))", re.IGNORECASE | re.DOTALL), r"\\text{or}"),
    (re.compile(r"(?<=.)\n\((?=\n(?:=|\\approx)\n.*+(?<=\n\)))", re.DOTALL), ""),
)
"""``, i.e. the ratio is 1:3`` behind one third is another form, as behind ``or``; so is
``(or 0.625)``, and ``(= 0.625)`` without its brackets."""
_CONSTANT = word_set(
    """
    where with for with and is are a an the any some every all arbitrary constant constants of
    integration real number numbers integer integers being denotes represents c k n m j l t r s
    """
)
"""Words of a remark about a constant."""
_KINDS_OF_CONSTANT = word_set("constant constants integer integers real reals")
_INTEGERS = frozenset("knmjltrs")
_MARKS = frozenset("(),.{}_")


def is_left_side(tokens: list[Token]) -> bool:
    """Whether the tokens before ``=`` are what the answer works out: a limit, a sum, a derivative,
    an angle, an operation on vectors or sets, a function of numbers, a coefficient."""
    names = [str(token) for token in tokens]
    first, rest, shown = names[0], names[1:], "".join(names)
    if shown in _LEFT_SIDES or shown.startswith(_LEFT_STARTS):
        return True
    if shown.startswith("\\frac{d") and "}{d" in shown:
        return True
    if first in _OPERATORS:
        return bool(rest)
    if tokens[0].kind == "text":  # proj_b a
        is_call = rest[:1] in (["_"], ["("]) or (rest[:1] and rest[0].startswith("\\"))
        return bool(is_call) and len(first) <= _LONGEST_OPERATOR
    if not _VECTORS.isdisjoint(names) and not {"\\cdot", "\\times"}.isdisjoint(names):
        return not any(map(str.isdigit, names))
    if "\\circ" in names and "^" not in names and names[-1] == ")":  # (f \\circ g)(x)
        return True
    if first == "[":  # the area [ABC] of a triangle, the coefficient [x^3] of a polynomial
        return "]" in names
    if first[1:] in _NUMBER_FUNCTIONS and rest[-1:] == [")"]:
        return all(name.isdigit() or name in "_{}()," for name in rest)
    if [first, *rest[-1:]] == ["|", "|"]:  # the number of elements of a set
        inner = rest[:-1]
    elif first.isalpha() and [*rest[:1], *rest[-1:]] == ["(", ")"]:
        inner = [name for name in rest[1:-1] if not name.isdigit()]
        return len(rest) > 2 and all(map(_is_of_sets, inner))
    elif {"\\cap", "\\cup", "\\setminus", "^"}.isdisjoint(names):
        return False
    else:
        inner = names
    return bool(inner) and all(map(_is_of_sets, inner))


def _is_of_sets(name: str) -> bool:
    return name in _OF_SETS or (name.isalpha() and name.isupper())


def means_empty_set(tokens: Sequence[Token]) -> bool:
    """Whether words mean the empty set: ``no solution exists``, ``the empty set``."""
    if not tokens or not any(len(token.text) > 1 for token in tokens[:2]):
        return False
    words: list[str] = []
    for token in tokens:
        if words and token.text.casefold().split(" ")[0] in _REASON:
            break
        if token.kind in ("text", "letters"):
            words.extend(token.text.casefold().replace("’", "'").replace("-", " ").split())
        elif str(token) not in ("(", ")", ",", ".", "{", "}", "'", "\\emptyset"):
            return False
    words = [word.strip("().,;") for word in words]
    reason = next((place for place, word in enumerate(words) if word in _REASON), len(words))
    words = words[:reason]
    if words[-1:] == ["inconsistent"] and set(words) <= {"the", "system", "is", "inconsistent"}:
        return True
    if not words or len(words) > _MAX_WORDS:
        return False
    if "empty" in words:
        known = {"the", "empty", "set", "solution", "is", "a", "an"}
        return set(words) <= known and words[-1] in ("set", "empty")
    # Two denials, as in ``not without solutions``, say the opposite.
    num_denied = sum(word in _NONE for word in words)
    names_nothing = _SOLUTIONS & set(words) or ("such" in words and words[-1].startswith("exist"))
    return num_denied == 1 and set(words) <= _ABOUT_SOLUTIONS and bool(names_nothing)


def as_numerals(tokens: list[Token]) -> list[Token]:
    """``12 \\text{ remainder } 5`` as ``quotient = 12, remainder = 5``, and
    ``45 \\text{ (base 10)}`` as ``45_{10}``."""
    return _rewritten(tokens, _NUMERALS)


def _rewritten(tokens: list[Token], rules: Sequence[tuple[re.Pattern[str], str]]) -> list[Token]:
    """The tokens with what a rule matches in other words; themselves if none does."""
    shown = "".join(f"\n{token}" for token in tokens)
    for pattern, latex in rules:
        if match := pattern.search(shown):
            start, end = (shown.count("\n", 0, place) for place in match.span())
            rewritten = [*tokens[:start], *tokenize(match.expand(latex)), *tokens[end:]]
            brackets = [str(token) for token in rewritten if str(token) in ("(", ")")]
            if brackets[-1:] == [")"] and brackets.count(")") > brackets.count("("):
                rewritten.pop()
            return tokens if list(map(str, rewritten)) == list(map(str, tokens)) else rewritten
    return tokens


def without_modulus(tokens: list[Token]) -> tuple[list[Token], str]:
    """``1 \\pmod{5}`` and ``6 \\bmod 5 = 1`` as 1 and the modulus; empty without one."""
    names = [str(token) for token in tokens]
    names = ["\\bmod" if name == "\\mod" else name for name in names]
    if "\\bmod" in names and names.count("=") == 1 and names.index("=") > 2:
        equals = names.index("=")
        return tokens[equals + 1 :], without_modulus(tokens[:equals])[1]
    end = len(tokens) - sum(str(token) in ("}", ")") for token in tokens[-2:])
    before = end - 1
    while before > 0 and str(tokens[before - 1]) in ("{", "("):
        before -= 1
    words = tokens[before - 1].text.casefold().strip("( ") if before > 1 else ""
    if words not in _MODULO or tokens[end - 1].kind != "number":
        return tokens, ""
    place = before - 1
    while place and str(tokens[place - 1]) in ("{", "(", "\\pmod"):
        place -= 1
    return tokens[:place], tokens[end - 1].text


def with_sets(tokens: list[Token]) -> list[Token]:
    """Write a set in words at the start, ``all real numbers except 2``, as mathematics."""
    if not tokens or tokens[0].kind not in ("text", "letters"):
        return tokens
    words: list[str] = []
    end = 0
    while end < len(tokens) and tokens[end].kind in ("text", "letters") and len(words) < _MAX_WORDS:
        words.extend(tokens[end].text.casefold().split())
        end += 1
    text = " ".join(words)
    start = next((lead for lead in _ALL if text.startswith(lead)), "")
    named = [name for name in _SETS if f"{text[len(start) :]} ".startswith(f"{name} ")]
    if not named or (not start and len(named[-1].split()) < 2):
        return tokens
    # ``real`` also begins ``real numbers``, whose longer name leaves the right rest.
    name = max(named, key=len)
    rest = text[len(start) + len(name) :].strip().removeprefix("of x").strip(" ,")
    shown = tokenize(_SETS[name])
    ahead = str(tokens[end]) if end < len(tokens) else ""
    if (name == "real x" or rest == "x") and ahead in ("\\neq", "<", ">", "\\leq", "\\geq"):
        return [Token("letters", "x", False), *tokens[end:]]
    if not rest or rest == "x":
        return [*shown, *tokens[end:]]
    if rest.removesuffix(" x") in _SUCH and tokens[end - 1].text == "x" and ahead:
        return tokens[end - 1 :]
    if rest in _SUCH and _SETS[name] == "\\mathbb{R}":
        return tokens[end:]
    if rest.removesuffix(" x") not in _EXCEPT:
        return tokens
    points = [
        Token("sign", ",", False) if token.text in ("and", "or") else token
        for index, token in enumerate(tokens[end:], end)
        if not (token.text in ("x", "=") and "=" in [t.text for t in tokens[index : index + 2]])
    ]
    first, second = (Token("command", brace, False) for brace in ("{", "}"))
    return [*shown, Token("command", "setminus", True), first, *points, second]


def without_remark(tokens: list[Token]) -> list[Token]:
    """Remove ``, where C is a constant`` behind an answer, which does not change its value.
    ``(C \\in \\mathbb{R})`` becomes a further item."""
    tokens = _rewritten(tokens, _OTHER_FORM)
    names = [str(token) for token in tokens]
    if names[:1] == ["\\{"] and {":", "\\mid", "|"} & {*names[-8:]}:  # {2\pi n : n \in \mathbb{Z}}
        bar = max(names.index(name) for name in (":", "\\mid", "|") if name in names)
        if names[bar + 2 : bar + 4] == ["\\in", "\\mathbb"]:
            tokens = [*tokens[1:bar], Token("sign", ",", False), *tokens[bar + 1 : -1]]
    elif {"<", ">", "\\leq", "\\geq"}.isdisjoint(names):
        tokens = _rewritten(tokens, _STATEMENTS)
    for start, token in enumerate(tokens):
        first = token.text.casefold().strip("( ").partition(" ")[0]
        if start and token.kind in ("text", "letters") and first in ("where", "with", "for"):
            break
    else:
        return tokens
    # A remark with mathematics in it may restrict the answer, so only these words are dropped.
    words: set[str] = set()
    for place in range(start, len(tokens)):
        token = tokens[place]
        if token.kind in ("text", "letters"):
            words.update(token.text.casefold().replace("(", " ").replace(")", " ").split())
        elif str(token) not in _MARKS and str(tokens[place - 1]) != "_":
            return tokens
    if not words <= _CONSTANT or not words & _KINDS_OF_CONSTANT:
        return tokens
    while start and str(tokens[start - 1]) in (",", "(", ";"):
        start -= 1
    names = [word for word in words if len(word) == 1 and word in _INTEGERS]
    if words & {"integer", "integers"} and len(names) == 1:
        return [*tokens[:start], *tokenize(f", {names[0]} \\in \\mathbb{{Z}}")]
    if not words & {"constant", "constants"} and len(names) == 1:
        return [*tokens[:start], *tokenize(f", {names[0]} \\in \\mathbb{{R}}")]
    return tokens[:start]
