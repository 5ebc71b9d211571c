"""Words that stand for mathematics: for the empty set, for all numbers of a kind, for remarks about
a constant."""

from collections.abc import Sequence

from reason_llm.score.math.latex_tokens import Token, tokenize
from reason_llm.score.math.units import word_set

_NONE = word_set("no none not doesn't without nothing")
_SOLUTIONS = word_set("solution solutions root roots value values number numbers x none nothing")
_ABOUT_SOLUTIONS = (
    _NONE
    | _SOLUTIONS
    | word_set(
        """
        there is are exist exists the this that equation equations system inequality has have real
        any of satisfy satisfies satisfying it does do doesn't for which a an possible given such
        integer in set reals we inconsistent
        """
    )
)
_REASON = word_set("since because as")
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
_OR = ("or", "(or")
_MAX_WORDS = 12
_LENGTH_OF_DOMAIN = 8
"""Tokens of ``(C \\in \\mathbb{R})``."""
_CONSTANT = word_set(
    """
    where with for with and is are a an the any some every all arbitrary constant constants of
    integration real number numbers integer integers being denotes represents c k n m
    """
)
"""Words of a remark about a constant."""


def says_empty(tokens: Sequence[Token]) -> bool:
    """Whether words say that there is nothing: ``no solution exists``, ``the empty set``."""
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
        return set(words) <= {"the", "empty", "set", "solution", "is", "a", "an"} and "set" in words
    num_denied = sum(word in _NONE for word in words)
    return num_denied == 1 and set(words) <= _ABOUT_SOLUTIONS and bool(_SOLUTIONS & set(words))


def with_sets(tokens: list[Token]) -> list[Token]:
    """With the words at the start that say a set, ``all real numbers except 2``, as mathematics;
    else the same list."""
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
    name = max(named, key=len)
    rest = text[len(start) + len(name) :].strip().removeprefix("of x").strip(" ,")
    shown = tokenize(_SETS[name])
    if name == "real x" and not rest:
        rest = "x"
    if (
        rest == "x"
        and end < len(tokens)
        and str(tokens[end]) in ("\\neq", "<", ">", "\\leq", "\\geq")
    ):
        return [Token("letters", "x", False), *tokens[end:]]
    if not rest or rest == "x":
        return [*shown, *tokens[end:]]
    if rest in _SUCH and _SETS[name] == "\\mathbb{R}":
        return tokens[end:]
    if rest.removesuffix(" x") not in _EXCEPT:
        return tokens
    points = [
        Token("sign", ",", False) if token.text in ("and", "or") else token
        for index, token in enumerate(tokens[end:], end)
        if not (token.text in ("x", "=") and "=" in [t.text for t in tokens[index : index + 2]])
    ]
    braces = (Token("command", each, False) for each in ("{", "}"))
    return [*shown, Token("command", "setminus", True), next(braces), *points, next(braces)]


def without_remark(tokens: list[Token]) -> list[Token]:
    """Without ``, where C is a constant`` behind an answer, which says nothing of its value; with
    ``(C \\in \\mathbb{R})`` as a further item."""
    if [str(each) for each in tokens[-1:-2:-1]] == [")"] and len(tokens) > _LENGTH_OF_DOMAIN:
        opening, name, *signs = tokens[-_LENGTH_OF_DOMAIN:]
        shown = [str(each) for each in signs]
        if (
            str(opening) == "("
            and name.kind == "letters"
            and shown[:3] == ["\\in", "\\mathbb", "{"]
        ):
            return [*tokens[:-_LENGTH_OF_DOMAIN], Token("sign", ",", False), name, *signs[:-1]]
    opening = next((i for i, token in enumerate(tokens) if token.text.casefold() in _OR), None)
    if opening and str(tokens[-1]) == ")":  # 5/8 (or 0.625)
        before = tokens[: opening - 1] if str(tokens[opening - 1]) == "(" else tokens[:opening]
        if len(before) < opening or tokens[opening].text[0] == "(":
            return [*before, Token("text", "or", True), *tokens[opening + 1 : -1]]
    for start, token in enumerate(tokens):
        first = token.text.casefold().strip("( ").partition(" ")[0]
        if start and token.kind in ("text", "letters") and first in ("where", "with", "for"):
            break
    else:
        return tokens
    words: list[str] = []
    for before, token in zip(["", *map(str, tokens[start:])], tokens[start:], strict=False):
        if token.kind in ("text", "letters"):
            words.extend(token.text.casefold().replace("(", " ").replace(")", " ").split())
        elif before != "_" and str(token) not in ("(", ")", ",", ".", "{", "}", "_"):
            return tokens
    if not set(words) <= _CONSTANT or not {"constant", "constants", "integer", "integers"} & set(
        words
    ):
        return tokens
    while start and str(tokens[start - 1]) in (",", "(", ";"):
        start -= 1
    return tokens[:start]
