"""Parser of an answer into a tree of what is written. No value is computed.

A tree is a list ``[kind, member, ...]`` that can go to the comparison worker as JSON. Whatever the
reader does not know is refused: numbers side by side are no product, and words are no variables.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from reason_llm.score.math.latex_tokens import Token
from reason_llm.score.math.units import AREAS, CURRENCIES, canonical, is_unit, unit_words, word_set

Tree = list[Any]
MAX_CHARACTERS = 2000
"""Longer answers are compared as plain strings."""
_MAX_NESTING, _MAX_DEPTH = 30, 100
_MAX_EXPONENT = 400
"""Largest exponent of a number like ``1e400``."""

FUNCTIONS = word_set(
    """
    sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth log ln
    lg exp gcd lcm min max det dim ker arg Re Im tr rank sgn mod Pr cis
    """
)
_SHORT = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "arcosh": "arccosh", "lg": "log"}
_GREEK = word_set(
    """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar
    ell aleph mho nabla wp top bot star dagger prime odot infin square bigcirc
    """
)
_CONSTANTS = {"pi": "pi", "infty": "oo", "emptyset": "empty"}
_WORD_CONSTANTS = {"pi": "pi", "infinity": "oo", "infty": "oo", "inf": "oo", "oo": "oo"}
_DECORATIONS = word_set(
    """
    hat vec bar tilde dot ddot overline widehat widetilde overrightarrow mathcal mathfrak
    mathscr angle triangle mathring
    """
)
_FACTORS = (
    _CONSTANTS.keys() | _GREEK | FUNCTIONS | _DECORATIONS
    | word_set("frac sqrt binom begin mathbb langle lfloor lceil { boxed")
)  # fmt: skip
"""Commands that a factor may begin with."""
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "leq": "<=", "geq": ">=", "neq": "!=", "in": "in",
    "approx": "~", "equiv": "equiv", "cong": "cong", "subset": "subset", "sim": "sim",
    "subseteq": "subseteq", "to": "to", "rightarrow": "to", "mapsto": "to", "mid": "mid",
    "perp": "perp", "parallel": "parallel", "propto": "propto",
}  # fmt: skip
_TIMES = frozenset(["\\cdot", "\\times", "*", "/", "\\div", ":"])
_UNKNOWNS, _OF_ONE = word_set("p q r s u v w y"), (["(", "x", ")"], ["(", "t", ")"])
"""Letters that are a function where one variable in brackets follows: ``y(x)``, ``p(t)``."""
_LETTER_FUNCTIONS = word_set("f g h F G H P Q O T phi psi Gamma Theta zeta chi")
_CLOSING = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle", "\\lfloor": "\\rfloor",
            "\\lceil": "\\rceil", "|": "|", "\\|": "\\|"}  # fmt: skip
_ENDS = ("(", "[", "]", ")")
"""Brackets at the ends of an interval; ``]2, 3[`` excludes both ends."""
_AROUND = {"\\lfloor": "floor", "\\lceil": "ceil", "|": "abs", "\\|": "norm"}
_PERIOD = frozenset(["\\overline", "\\bar", "\\dot"])
_MATRICES = word_set("matrix pmatrix bmatrix vmatrix Vmatrix Bmatrix array smallmatrix")
_SYSTEMS = word_set("cases aligned align align* gathered gather split dcases rcases")
"""Environments around rows of equations."""
_IF = ("if", "when", "for", "where", "while")
_ELSE = ("otherwise", "else", "elsewhere")
_JOINS = frozenset(["and", "or"])
_PARTS_OF_UNITS = frozenset(["/", "^", "{", "}", ".", "-"])
_LONGEST_UNIT = 16
"""Most tokens of a unit in braces."""
_LONGEST_PRODUCT = 3
"""Letters that stand together and may be a product of variables; more are a word."""
_ARC = word_set("sin cos tan cot sec csc")
"""Functions whose power -1 is the inverse function."""
LABELS = word_set(
    "quotient remainder minimum maximum mean median mode length width height center centre radius"
)
"""Words that name an item of a list: ``quotient 4, remainder 3``."""
_INEQUALITIES = word_set("< > <= >= != in")
BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
          "eight": "8", "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
_LOGIC = {"\\vee": Token("text", "or", True), "\\wedge": Token("text", "and", True)}
"""Signs between relations."""
_SIGNS_OF_RELATIONS = frozenset(["=", "<", ">", "\\leq", "\\geq", "\\neq", "\\in"])
_MULTIPLIERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


class UnreadableError(ValueError):
    """The text is no answer that the reader knows."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A whole answer: its tree, and the unit or remark behind it (empty: none)."""

    tree: Tree
    unit: tuple[tuple[str, str], ...]
    is_rounded: bool = False
    """It shows no value but one behind a sign of approximation: ``x \\approx 5``."""
    is_listed: bool = False
    """Its one value stands in square brackets: ``[5]``."""


def read(tokens: list[Token], letters_are_units: bool) -> Reading:
    """All of the tokens as one answer.

    Args:
        letters_are_units: a single letter that stands apart from its number is a unit, no variable.

    Raises:
        UnreadableError: they are not one, or what follows it is no unit.
    """
    if any(str(token) in _SIGNS_OF_RELATIONS for token in tokens):
        tokens = [_LOGIC.get(str(token), token) for token in tokens]
    reader = _TreeReader(tokens, letters_are_units)
    tree = reader.answer()
    level, depth = [tree], 0
    while level:  # 1/1/1/... of a few thousand characters
        level = [member for inner in level for member in inner if isinstance(member, list)]
        depth += 1
        if depth > _MAX_DEPTH:
            raise UnreadableError("nested too deeply")
    value = tree[-1] if tree[0] == "rel" else tree
    is_near = tree[0] == "rel" and tree[1].split()[-1] == "~" and bool(variables(tree[-2]))
    units = tuple(dict.fromkeys(reader.units))
    return Reading(tree, units, reader.is_rounded or is_near, id(value) in reader.listed)


class _TreeReader:
    """A position in the tokens; each method reads one thing and leaves the position behind it."""

    def __init__(self, tokens: list[Token], letters_are_units: bool) -> None:
        self.tokens = tokens
        self.letters_are_units = letters_are_units
        self.index = 0
        self.nesting = 0
        self.bars = 0
        self.is_parenthesised = False
        self.is_rounded = False
        self.degree_end = -1
        """The position behind a sign of degrees."""
        self.listed: set[int] = set()
        """Ids of the trees that stand alone in square brackets."""
        self.units: list[tuple[str, str]] = []

    # position

    def token(self, ahead: int = 0) -> Token | None:
        place = self.index + ahead
        return self.tokens[place] if place < len(self.tokens) else None

    def name(self, ahead: int = 0) -> str:
        """The next token as text; empty at the end."""
        return str(self.token(ahead) or "")

    def kind(self, ahead: int = 0) -> str:
        token = self.token(ahead)
        return token.kind if token else ""

    def is_spaced(self) -> bool:
        token = self.token()
        return token is not None and token.is_spaced

    def take(self, *names: str) -> str:
        """Consume the next token if it is one of these, and return it; else return nothing."""
        name = self.name()
        if name and name in names and self.kind() != "text":
            self.index += 1
            return name
        return ""

    def expect(self, name: str) -> None:
        if not self.take(name):
            raise UnreadableError(f"{name} expected")

    def nested(self, read: Callable[[], Tree]) -> Tree:
        self.nesting += 1
        if self.nesting > _MAX_NESTING:
            raise UnreadableError("nested too deeply")
        tree = read()
        self.nesting -= 1
        return tree

    # lists and relations

    def answer(self) -> Tree:
        """The whole: one item, or several behind commas, semicolons, ``and``, ``or``; ``either`` of
        those that have ``or`` alone between them."""
        self.is_rounded = self.take("=", "\\approx", ":") == "\\approx"
        groups: list[list[Tree]] = [[self.item()]]
        joins: list[str] = []
        while self.index < len(self.tokens):
            joins.append(before := self.separator())
            item = self.item()
            if before == ";" or (before in _JOINS and _starts_a_group(groups[-1], item)):
                groups.append([item])
            else:
                groups[-1].append(item)
        groups[0] = _with_exclusions(groups[0])
        are_inequalities = all(
            member[0] == "rel" and set(member[1].split()) <= _INEQUALITIES for member in groups[0]
        )
        if len(groups) == 1 and joins and are_inequalities:
            return _joined(groups[0], joins)
        if len(groups) == 1 and set(joins) == {"or"}:
            return ["either", *groups[0]]
        return _listed([_listed(group) for group in groups])

    def separator(self) -> str:
        """Read ``,``, ``;``, ``and``, and ``or``, also behind a comma; empty for others."""
        separator = self.take(",", ";")
        if self.name().lower() in _JOINS and self.kind() in ("text", "letters"):
            separator = self.name().lower()
            self.index += 1
        return separator

    def item(self) -> Tree:
        label = self.name().lower().rstrip(" :=")
        is_named = self.kind(1) == "number" or self.name(1) in ("=", ":", "-", "(", "\\frac")
        if label in LABELS and self.kind() in ("text", "letters") and is_named:
            self.index += 1
            self.take("=", ":")
            tree = ["rel", "=", ["var", label], self.sum()]
            self.unit()
            return tree
        tree = self.relation()
        multiplier = _MULTIPLIERS.get(self.name().lower())
        if multiplier is not None and tree[0] == "num":
            self.index += 1
            tree = ["mul", tree, ["pow", ["num", "10"], ["num", str(multiplier)]]]
        self.unit()
        while self.units and (sign := self.relation_sign()):  # 2\\pi cm = 6.28 cm
            signs = f"{tree[1]} {sign}" if tree[0] == "rel" else sign
            members = tree[2:] if tree[0] == "rel" else [tree]
            tree = ["rel", signs, *members, self.sets()]
            self.unit()
        return tree

    def unit(self) -> None:
        """Read the unit or the remark between an item and the next one."""
        pieces: list[str] = []
        may_follow = True
        while self.index < len(self.tokens):
            name, kind = self.name(), self.kind()
            is_join = kind in ("text", "letters") and name.lower() in _JOINS
            if name in (",", ";") or (is_join and self.name(1)):
                break
            if pieces and name in ("=", "\\approx"):
                break
            is_part = kind in ("text", "letters", "currency") or name in _PARTS_OF_UNITS
            is_part |= name == "\\cdot" and bool(pieces) and is_unit(self.name(1))
            before = [self.name(-1), self.name(-2), self.name(-3)]
            while before and before[0] in ("-", "{"):
                del before[0]
            is_power = kind == "number" and before[:1] == ["^"]
            if not (is_part or is_power or name in ("\\Omega", "\\circ", "(", ")")):
                raise UnreadableError(f"{name} after an answer")
            longest = {"letters": _LONGEST_PRODUCT, "text": 2}.get(kind, 0)  # no product is longer
            is_word = is_unit(name) or len(name) > longest or name.lower() in (*AREAS, "per")
            may_follow &= is_word or bool(pieces)
            if kind == "currency":
                name = name.removeprefix("\\")
            pieces.append(
                {"\\Omega": "ohm", "\\circ": "deg", "^": "", ".": "", "\\cdot": ""}.get(name, name)
            )
            self.index += 1
        if pieces:
            words = unit_words(" ".join(pieces))
            if words is None or not may_follow:
                raise UnreadableError("no unit")
            self.units.extend(words)

    def relation(self) -> Tree:
        members, signs = [self.sets()], []
        while sign := self.relation_sign():
            signs.append(sign)
            members.append(self.sets())
        return ["rel", " ".join(signs), *members] if signs else members[0]

    def relation_sign(self) -> str:
        if self.kind() in ("text", "letters", ""):
            return ""
        sign = _RELATIONS.get(self.name().removeprefix("\\"), "")
        if not sign or (self.name() == "|" and self.bars):
            return ""
        self.index += 1
        if sign in "<>" and self.take("="):
            sign += "="
        return sign

    def sets(self) -> Tree:
        tree = self.sum()
        if sign := self.take("\\over", "\\choose"):
            tree = [*(["frac"] if sign == "\\over" else ["call", "binom"]), tree, self.sum()]
        while sign := self.take("\\cup", "\\cap", "\\setminus", "\\backslash", "\\wedge", "\\vee"):
            tree = [sign[1:], tree, self.sum()]
        return tree

    # arithmetic

    def sum(self) -> Tree:
        sign = self.take("-", "+", "\\pm", "\\mp")
        terms = [_signed(sign, self.product())]
        while sign := self.take("-", "+", "\\pm", "\\mp"):
            terms.append(_signed(sign, self.product()))
        if len(terms) == 2 and terms[0][:1] == ["const"] and terms[1][:1] == ["neg"]:
            whole, excluded = terms[0], terms[1][1]
            if str(whole[1]).startswith("set ") and excluded[0] == "set":  # \mathbb{R} - \{2\}
                return ["setminus", whole, excluded]
        return terms[0] if len(terms) == 1 else ["add", *terms]

    def product(self) -> Tree:
        tree = self.power()
        while True:
            is_parenthesised = self.is_parenthesised
            if sign := self.times():
                negative = self.take("-", "+", "\\pm")
                tree = _product(sign, tree, _signed(negative, self.power()))
            elif self.starts_a_factor():
                factor = self.power()
                tree = _juxtaposed(tree, factor, is_parenthesised or self.is_parenthesised)
            else:
                return tree
            self.is_parenthesised = False

    def times(self) -> str:
        if self.name() == "to" and self.kind(1) == "number" and self.name(-1)[-1:].isdigit():
            self.index += 1
            return ":"
        return self.take(*_TIMES)

    def starts_a_factor(self) -> bool:
        """Whether another factor starts here, without a sign before it."""
        name, kind, after = self.name(), self.kind(), self.name(1)
        if kind == "text":
            return name in FUNCTIONS and not is_unit(name)
        if kind == "letters":
            if self.index == self.degree_end and name in ("C", "F", "K"):
                return False
            is_unit_letter = self.letters_are_units and self.is_spaced() and is_unit(name)
            if name.lower() in (*_JOINS, "per") or (len(name) == 1 and is_unit_letter):
                return False
            if name in FUNCTIONS or name in _SHORT or name in ("pi", "sqrt"):
                return True
            is_alone = self.name(-1)[-1:].isdigit() or self.name(-1) in ("}", ")")
            if len(name) > 1 and is_alone and is_unit(name):
                return False
            return len(name) <= _LONGEST_PRODUCT or name.lower() in _WORD_CONSTANTS
        if kind == "command":
            is_ohm = name == "\\Omega" and after in ("", ",", ";")
            return name[1:] in _FACTORS and not is_ohm
        if name == "[" and after in ("", ",", ";", ")", "\\cup", "\\cap"):
            return False  # the end of ]2, 3[
        is_bar = name == "|" and not self.bars
        if name == "{" and (self.kind(1) == "currency" or self.starts_a_unit()):
            return False
        return kind == "number" or name in ("(", "[", "{") or is_bar

    def starts_a_unit(self) -> bool:
        """Whether the braces here hold a unit, as in ``\\mathrm{cm^2}``."""
        if self.kind(1) != "letters" or not (len(self.name(1)) > 1 or self.letters_are_units):
            return False
        depth = 1
        for ahead in range(1, _LONGEST_UNIT):
            name, kind = self.name(ahead), self.kind(ahead)
            depth += {"{": 1, "}": -1}.get(name, 0)
            if depth == 0:
                return True
            is_power = kind == "number" and self.name(ahead - 1) in ("^", "{", "-")
            is_sign = name in ("/", "^", "{", "}", "-", "\\cdot")
            if not (is_sign or is_power or (kind == "letters" and is_unit(name))):
                return False
        return False

    def power(self) -> Tree:
        starts_with_bracket, start = self.name() in _CLOSING, self.index
        tree = self.primary()
        end = self.index
        tree = self.postfixes(tree)
        self.is_parenthesised = starts_with_bracket and self.index == end > start
        return tree

    def postfixes(self, tree: Tree) -> Tree:
        """Read the postfixes of a factor: powers, factorials, percent signs, a base."""
        while True:
            if self.take("!"):
                tree = ["call", "factorial", tree]
            elif self.take("%"):
                tree = ["pct", tree]
            elif self.take("\\degree"):
                tree = ["deg", tree]
            elif self.name() == "^" or (self.name() == "*" and self.name(1) == "*"):
                self.index += 1 if self.name() == "^" else 2
                exponent = self.exponent()
                if exponent == ["circ"]:
                    tree, self.degree_end = ["deg", tree], self.index
                else:
                    tree = ["pow", tree, exponent]
            elif tree[0] == "var" and self.take("'"):  # of {x}'
                tree = ["var", f"{tree[1]}'"]
            elif tree[0] == "num" and self.take("_"):
                base = self.label()
                base = base.removeprefix("base").strip()
                tree = ["based", tree[1], BASES.get(base, base)]
            else:
                return tree

    def exponent(self) -> Tree:
        """Read an exponent: a group, or one token with its sign."""
        return _signed(self.take("-"), self.argument())

    def argument(self, of_fraction: bool = False) -> Tree:
        """A group in braces, or one token; a fraction takes one digit of a number."""
        if self.name() == "{":
            return self.nested(self.group)
        if of_fraction and self.kind() == "number" and len(self.name()) > 1:
            digit, rest = self.name()[0], self.name()[1:]
            if not self.name().isdigit():
                raise UnreadableError("a decimal without braces")
            self.tokens[self.index] = Token("number", rest, False)
            return ["num", digit]
        if self.take("\\circ", "\\degree"):
            return ["circ"]
        if self.kind() == "letters" and len(self.name()) > 1 and self.name() not in _WORD_CONSTANTS:
            letter, rest = self.name()[0], self.name()[1:]
            self.tokens[self.index] = Token("letters", rest, False)
            return ["var", letter]
        return self.nested(self.primary)

    def group(self) -> Tree:
        self.expect("{")
        if self.take("\\circ", "\\degree"):
            self.expect("}")
            return ["circ"]
        items = self.items(within_bars=False)
        self.expect("}")
        return _listed(items)

    def items(self, within_bars: bool) -> list[Tree]:
        bars, self.bars = self.bars, int(within_bars)
        items = [self.relation()]
        while self.take(",", ";"):
            items.append(self.relation())
        self.bars = bars
        return items

    # primaries

    def primary(self) -> Tree:
        name, kind = self.name(), self.kind()
        if not name:
            raise UnreadableError("it ends too soon")
        if name == "{" and kind == "sign":
            return self.nested(self.group)
        if (name in _CLOSING or name == "]") and kind != "text":
            return self.nested(self.bracketed)
        if self.take_currency():
            return _signed(self.take("-"), self.nested(self.primary))
        self.index += 1
        match kind:
            case "number":
                return self.number(name)
            case "letters":
                return self.letters(name)
            case "text":  # in mathematics: a function, or a name
                name = name.rstrip(".")
                return self.call(name) if name in FUNCTIONS else self.variable(name)
            case "command":
                return self.nested(lambda: self.command(name[1:]))
        raise UnreadableError(f"{name} not expected")

    def take_currency(self) -> bool:
        """Take the currency that stands before a number: ``\\$``, ``USD``, ``Rs.``"""
        if self.kind() == "letters" and self.name() == "US" and self.kind(1) == "currency":
            self.index += 1
        word = canonical(self.name().lower().strip(" \\."))
        is_word = self.kind() in ("letters", "text") and len(self.name()) > 1
        if word not in CURRENCIES or not (is_word or self.kind() == "currency"):
            return False
        ahead = 2 if is_word and self.name(1) == "." else 1
        if self.kind(ahead) != "number" and self.name(ahead) not in ("-", "\\frac", "("):
            return False
        self.index += ahead
        self.units.append((word, "1"))
        return True

    def number(self, text: str) -> Tree:
        mantissa, _, exponent = text.lower().partition("e")
        if exponent:
            if len(exponent) > len("+400") or abs(int(exponent)) > _MAX_EXPONENT:
                raise UnreadableError("too large")
            power: Tree = ["num", str(abs(int(exponent)))]
            power = ["neg", power] if exponent.startswith("-") else power
            return ["mul", ["num", mantissa], ["pow", ["num", "10"], power]]
        point = 0 if "." in text else 1  # 0.\overline{3} has its point in a separate token
        if (not point or self.name() == ".") and self.name(point) in _PERIOD:
            self.index += 1 + point
            period = self.argument()
            if period[0] != "num" or not period[1].isdigit():
                raise UnreadableError("no period")
            whole, _, start = text.partition(".")
            return ["rep", whole, start, period[1]]
        if not point and self.name() == "\\ldots" and (shown := _period(text)):
            self.index += 1
            return ["rep", *shown]
        parts = self.name(), self.name(2)  # 1 1/2; an improper second part is refused later
        ahead = [self.kind(), self.name(1), self.kind(2)]
        is_mixed = text.isdigit() and self.is_spaced() and ahead == ["number", "/", "number"]
        if is_mixed and _is_proper(*parts):
            self.index += 3
            return ["mixed", text, *parts]
        return ["num", text]

    def letters(self, name: str) -> Tree:
        if name == "sqrt":
            return self.root()
        if name in FUNCTIONS or name in _SHORT:
            return self.call(_SHORT.get(name, name))
        if len(name) > 1 and name.lower() in _WORD_CONSTANTS:
            return ["const", _WORD_CONSTANTS[name.lower()]]
        after = self.name()  # two runs of several letters are words
        is_known = after in FUNCTIONS or after in _SHORT or after.lower() in _WORD_CONSTANTS
        is_run = self.kind() == "letters" and len(after) > 1 and not is_known and not is_unit(after)
        if len(name) > 1 and (len(name) > _LONGEST_PRODUCT or name.lower() in _JOINS or is_run):
            raise UnreadableError(f"the word {name}")
        # an exponent in a product belongs to its letter
        self.tokens[self.index : self.index] = [Token("letters", x, False) for x in name[1:]]
        return self.variable(name[0])

    def variable(self, name: str) -> Tree:
        """A variable, with the subscripts and primes of its name."""
        is_plain = True
        while True:
            if self.take("_"):
                name += f"_{self.label()}"
            elif self.take("'"):
                name, is_plain = name + "'", False
            elif name in _LETTER_FUNCTIONS and [*map(self.name, range(6))] == [*"^{-1}("]:
                self.index += 5
                name, is_plain = name + "^-1", False
            else:
                break
        is_function = name.partition("_")[0] in _LETTER_FUNCTIONS or not is_plain
        is_function |= name in _UNKNOWNS and [*map(self.name, range(3))] in _OF_ONE
        is_number = self.kind(1) == "number" and [self.name(2), self.name(3)] == [")", "="]
        is_function |= name in _UNKNOWNS and self.name() == "(" and is_number  # p(2) = 9
        is_argument = self.kind(1) == "letters" and len(self.name(1)) == 1
        is_function |= is_argument and [*map(self.name, (0, 2, 3))] == ["(", ")", "="]  # a(n) =
        if self.name() == "(" and is_function:
            return ["call", f"?{name}", self.nested(self.primary)]
        if is_plain and name in ("e", "i"):
            return ["const", name]
        return ["var", name]

    def label(self) -> str:
        """Read a subscript or the argument of a decoration, which is part of a name, as text."""
        start, depth = self.index, 0
        while self.name():
            depth += {"{": 1, "}": -1}.get(self.name(), 0)
            self.index += 1
            if depth == 0:
                names = [str(token) for token in self.tokens[start : self.index]]
                return "".join(name for name in names if name not in "{}")
        raise UnreadableError("it ends too soon")

    def command(self, name: str) -> Tree:
        if name in ("frac", "binom"):
            upper, lower = (self.argument(of_fraction=True) for _ in range(2))
            return ["frac", upper, lower] if name == "frac" else ["call", "binom", upper, lower]
        if name == "sqrt":
            return self.root()
        if name == "boxed":
            return self.argument()
        if name == "begin":
            return self.matrix()
        if name == "ldots":
            return ["dots"]
        if name in FUNCTIONS:
            return self.call(name)
        if name in _CONSTANTS:
            return ["const", _CONSTANTS[name]]
        if name == "mathbb":
            return ["const", f"set {self.label()}{self.signs_of_set()}"]
        if name in _GREEK:
            return self.variable(name)
        if name in _DECORATIONS:
            return self.variable(f"{name} {self.label()}")
        raise UnreadableError(f"\\{name}")

    def signs_of_set(self) -> str:
        """The ``+`` of ``\\mathbb{Z}^+``, or nothing."""
        for shown in (["^", "+"], ["^", "{", "+", "}"], ["_", "+"], ["_", "{", "+", "}"]):
            if [self.name(ahead) for ahead in range(len(shown))] == shown:
                self.index += len(shown)
                return "+"
        return ""

    def root(self) -> Tree:
        index: Tree = ["num", "2"]
        if self.take("["):
            index = self.nested(self.relation)
            self.expect("]")
        return ["root", self.argument(), index]

    def call(self, name: str) -> Tree:
        """A named function: its base, its power (of ``\\sin^2 x``), its arguments."""
        base, power = None, None
        for _ in range(2):
            if self.take("_"):
                base = self.argument()
            elif self.take("^"):
                power = self.exponent()
        if self.name() in ("(", "{", "[", "\\{") and self.kind() != "text":
            argument = self.nested(self.primary)
        else:
            argument = self.nested(lambda: self.bare_argument(name in ("ln", "log")))
        if power == ["neg", ["num", "1"]] and name in _ARC:
            name, power = f"arc{name}", None
        tree = ["call", name, argument, *([base] if base else [])]
        return tree if power is None else ["pow", tree, power]

    def bare_argument(self, is_logarithm: bool) -> Tree:
        """``2x`` of ``\\sin 2x \\cos x``."""
        tree = _signed(self.take("-"), self.power())
        while self.starts_a_factor():
            if self.name().removeprefix("\\") in FUNCTIONS or self.name() in ("(", "["):
                break
            tree = _juxtaposed(tree, self.power(), self.is_parenthesised)
        after = self.name(1).removeprefix("\\")
        is_quotient = after in FUNCTIONS or after == "("  # \ln 6/\ln 3, \sin x/(1+x), \ln 5/2
        is_quotient |= is_logarithm and tree[0] == "num"
        if not is_quotient and self.take("/"):
            tree = ["frac", tree, self.power()]
        return tree

    def bracketed(self) -> Tree:
        opening = self.name()
        self.index += 1
        if opening == "\\{" and self.take("\\}"):
            return ["set"]
        if opening == "\\{" and (built := self.set_builder()):
            return built
        if opening == "\\{" and self.name() == "\\begin":  # a brace before rows, closed by \right.
            rows = self.primary()
            self.take("\\}")
            return rows
        items = self.items(within_bars=opening in ("|", "\\|"))
        closing = self.name()
        is_interval = len(items) == 2 and opening in _ENDS and closing in _ENDS[1:]
        if closing != _CLOSING.get(opening) and not is_interval:
            raise UnreadableError(f"{closing} for {opening}")
        self.index += 1
        if opening in _AROUND:
            if len(items) != 1:
                raise UnreadableError("several in bars")
            return ["call", _AROUND[opening], items[0]]
        if opening == "\\{":
            return ["set", *items]
        is_open = opening in "(]" and closing in ")["
        if opening != "\\langle" and len(items) == 1:
            if opening == "[":
                self.listed.add(id(items[0]))
            return items[0]
        if opening == "\\langle" or is_open or len(items) != 2:
            return ["tuple", *items]
        return ["interval", opening != "[", closing != "]", *items]

    def set_builder(self) -> Tree | None:
        """Read ``x \\in \\mathbb{Z} \\mid x > 2 \\}`` after a brace; None without a condition."""
        start = self.index
        if self.kind() != "letters" or len(self.name()) > 1:
            return None
        self.index += 1
        domain = self.power() if self.take("\\in") else ["const", "set R"]
        if not self.take("\\mid", "|", ":"):
            self.index = start
            return None
        relations, joins = [self.relation()], list[str]()
        while self.name() != "\\}":
            joins.append(self.separator())
            relations.append(self.relation())
        self.expect("\\}")
        relations = _with_exclusions(relations)
        condition = _joined(relations, joins) if joins else relations[0]
        return condition if domain == ["const", "set R"] else ["cap", condition, domain]

    def system(self, kind: str) -> Tree:
        """Rows of equations up to ``\\end{kind}``, as a list."""
        end = next(
            (i for i in range(self.index, len(self.tokens)) if str(self.tokens[i]) == "\\end"), -1
        )
        if end < 0:
            raise UnreadableError("no end")
        rows: list[list[Token]] = [[]]
        for token in self.tokens[self.index : end]:
            if str(token) == "\\\\":
                rows.append([])
            else:
                rows[-1].append(token)
        self.index = end
        self.end(kind)
        # Systems and functions by cases share environments; only their rows differ.
        if cases := self.cases(rows):
            return cases
        items: list[Tree] = []
        for row in rows:
            row = [token for token in row if str(token) != "&"]
            while row and str(row[-1]) in (",", ".", ";"):
                row.pop()
            if row:
                items.append(_TreeReader(row, self.letters_are_units).answer())
        if not items or any(item[0] != "rel" for item in items):
            raise UnreadableError("rows that are no equations")
        return _listed(items)

    def end(self, kind: str) -> None:
        """Take ``\\end{kind}``."""
        for name in ("\\end", "{", kind, "}"):
            self.expect(name)

    def cases(self, rows: list[list[Token]]) -> Tree | None:
        """Pairs of value and condition, ``x & \\text{if } x > 0``; None for other rows."""
        pairs: list[Tree] = []
        for row in filter(None, rows):
            names = [str(token).casefold().strip() for token in row]
            place = next((i for i, name in enumerate(names) if name in ("&", *_IF, *_ELSE)), 0)
            if not place:
                return None
            value, condition = row[:place], row[place:]
            while condition and str(condition[0]).casefold().strip() in ("&", ",", *_IF):
                del condition[0]
            for part in (value, condition):
                while part and str(part[-1]) in (",", ".", ";", "&"):
                    part.pop()
            if not condition or not value or str(condition[0]) in _SIGNS_OF_RELATIONS:
                return None
            if str(condition[0]).casefold().strip() in _ELSE:
                domain: Tree = ["const", "else"]
            else:
                domain = _TreeReader(condition, self.letters_are_units).answer()
            pairs.append(["case", _TreeReader(value, self.letters_are_units).answer(), domain])
        return ["cases", *pairs] if len(pairs) > 1 else None

    def matrix(self) -> Tree:
        """``\\begin{...}`` rows ``\\end{...}``."""
        self.expect("{")
        kind = self.name()
        self.index += 1
        self.expect("}")
        if kind in _SYSTEMS:
            return self.system(kind)
        if kind not in _MATRICES:
            raise UnreadableError(f"the environment {kind}")
        if kind == "array" and self.name() == "{":
            self.label()  # its columns, which say nothing
        rows: list[Tree] = [[]]
        while self.name() != "\\end":
            rows[-1].append(self.relation())
            if self.take("&"):
                continue
            if self.take("\\\\"):
                rows.append([])
            elif self.name() != "\\end":
                raise UnreadableError("no matrix")
        self.end(kind)
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) > 1:
            raise UnreadableError("ragged rows")
        if kind == "array" and len(rows[0]) == 1 and all(row[0][0] == "rel" for row in rows):
            return _listed([row[0] for row in rows])
        matrix = ["matrix", *rows]
        return ["call", "det", matrix] if kind == "vmatrix" else matrix


def subtrees(tree: Tree) -> Iterator[Tree]:
    """The tree and all trees in it."""
    yield tree
    for member in tree[1:]:
        if isinstance(member, list) and member and isinstance(member[0], (str, list)):
            for entry in [member] if isinstance(member[0], str) else member:  # a matrix's row
                yield from subtrees(entry)


def mapped(tree: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """The tree with a change made to each of its members that is a tree."""
    return [
        [change(entry) for entry in member]  # a matrix's row
        if isinstance(member, list) and member and isinstance(member[0], list)
        else change(member)
        if isinstance(member, list)
        else member
        for member in tree
    ]


def with_sign(tree: Tree, is_upper: bool) -> Tree:
    """The tree with the upper or the lower sign of each plus-minus."""
    if tree[0] not in ("pm", "mp"):
        return mapped(tree, lambda member: with_sign(member, is_upper))
    inner = with_sign(tree[1], is_upper)
    return inner if (tree[0] == "pm") == is_upper else ["neg", inner]


def literal(tree: Tree) -> Fraction | None:
    """The value of digits, a mixed number or a repeating decimal; None of other trees."""
    match tree:
        case ["num", digits]:
            return Fraction(digits)
        case ["mixed", *parts]:
            whole, numerator, denominator = map(int, parts)
            return whole + Fraction(numerator, denominator)
        case ["rep", whole, start, period]:
            numerator = int(whole + start + period) - int(whole + start or "0")
            return Fraction(numerator, int("9" * len(period) + "0" * len(start)))
    return None


def holds(tree: Tree, *kinds: str) -> bool:
    """Whether the tree or one in it is of one of these kinds."""
    return any(part[0] in kinds for part in subtrees(tree))


def variables(tree: Tree) -> set[str]:
    """The names of the variables and unknown functions in a tree."""
    return {
        str(part[1])
        for part in subtrees(tree)
        if part[0] == "var" or (part[0] == "call" and str(part[1]).startswith("?"))
    }


def _starts_a_group(group: list[Tree], item: Tree) -> bool:
    """Whether ``item`` names again what ``group`` has named: ``p=5, q=2 and p=7, q=2``."""
    names = [member[2] for member in (*group, item) if member[0] == "rel"]
    return len(group) > 1 and len(names) == len(group) + 1 and item[2] == names[0]


def _with_exclusions(items: list[Tree]) -> list[Tree]:
    """``x \\neq -2, 2`` as two relations."""
    first, *rest = items
    if first[:2] != ["rel", "!="] or not rest or variables(["list", *rest]):
        return items
    return [first, *(["rel", "!=", first[2], number] for number in rest)]


def _joined(relations: list[Tree], joins: list[str]) -> Tree:
    """Inequalities with ``or`` between them as a union, with ``and`` as an intersection, with
    commas as a list; but ``x > 2, x \\in \\mathbb{R}`` and ``x > 2, x \\neq 3`` are one set."""
    words = set(joins) - {","}
    signs = [relation[1] for relation in relations]
    if not words and len(set.union(*map(variables, relations))) == 1:
        is_excluding = signs.count("!=") >= max(1, len(signs) - 1)
        words = {"and"} if "in" in signs or is_excluding else words
    kind = {"or": "cup", "and": "cap"}.get(min(words, default=""))
    if kind is None or len(words) > 1:
        return ["list", *relations]
    return functools.reduce(lambda tree, relation: [kind, tree, relation], relations)


def _period(text: str) -> tuple[str, str, str] | None:
    """Whole part, start and period of ``0.1666...``; shown are two periods, of one digit three."""
    whole, _, decimals = text.partition(".")
    for length in range(1, 13):
        shown, period = 0, decimals[-length:]
        while decimals.endswith(period * (shown + 1)) and len(decimals) >= length * (shown + 1):
            shown += 1
        if shown >= (3 if length == 1 else 2):
            return whole, decimals[: len(decimals) - shown * length], period
    return None


def _listed(items: list[Tree]) -> Tree:
    return items[0] if len(items) == 1 else ["list", *items]


def _signed(sign: str, tree: Tree) -> Tree:
    if sign == "-":
        return ["neg", tree]
    return [sign[1:], tree] if sign in ("\\pm", "\\mp") else tree


def _product(sign: str, left: Tree, right: Tree) -> Tree:
    if left[0] == "ratio" and sign != ":":  # 1 : 2/3
        return [*left[:-1], _product(sign, left[-1], right)]
    if sign in ("/", "\\div"):
        return ["frac", left, right]
    if sign == ":":
        return ["ratio", *(left[1:] if left[0] == "ratio" else [left]), right]
    return ["mul", *(left[1:] if left[0] == "mul" else [left]), right]


def _juxtaposed(left: Tree, right: Tree, has_brackets: bool) -> Tree:
    """Two adjacent factors as a product or a mixed number; adjacent numbers are an error."""
    if left[0] == "ratio":
        return [*left[:-1], _juxtaposed(left[-1], right, has_brackets)]
    if right[0] in ("pct", "deg") and left[0] == "num" and right[1][0] == "frac":
        return [right[0], _juxtaposed(left, right[1], has_brackets)]  # 12\\frac12\\%
    if is_number(left) and is_number(right) and not has_brackets:
        if right[0] == "frac" and left[0] == "num" and left[1].isdigit():
            numerator, denominator = right[1][1], right[2][1]
            if _is_proper(numerator, denominator):
                return ["mixed", left[1], numerator, denominator]
        raise UnreadableError("numbers side by side")
    if not has_brackets and right[0] == "num" and left[-1] != "i":  # e^{i2\\pi}
        raise UnreadableError("a number behind its factor")
    return _product("*", left, right)


def is_number(tree: Tree) -> bool:
    """Whether a tree is a numeral or a fraction of two."""
    if tree[0] == "frac":
        return bool(tree[1][0] == "num" and tree[2][0] == "num")
    return tree[0] in ("num", "rep", "mixed")


def _is_proper(numerator: str, denominator: str) -> bool:
    """Whether a fraction of two numerals is between 0 and 1."""
    if not (numerator.isdigit() and denominator.isdigit()):
        return False
    first, second = numerator.lstrip("0"), denominator.lstrip("0")
    return bool(first) and (len(first), first) < (len(second), second)
