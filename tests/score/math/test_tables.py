"""The tables of the reader and of both ways to a value, each against a text or numbers by hand."""

import cmath

import pytest
import sympy

from reason_llm.score.math import math_worker, numeric
from reason_llm.score.math.answer_text import reading_of
from reason_llm.score.math.latex_tokens import to_latex, tokenize
from reason_llm.score.math.units import canonical


def test_characters_stand_for_latex() -> None:
    shown = (
        "πθαβγλμφωσ∞×·⋅÷∕⁄−–﹣±≤≥≠≈∪∩∈∅ℝ°…’′½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒Ω\u2126√\u00a0\u2009\u202f€£¥₹２（"
    )
    assert to_latex(shown) == (
        "\\pi \\theta \\alpha \\beta \\gamma \\lambda \\mu \\phi \\omega \\sigma \\infty \\times "
        "\\cdot \\cdot ///---\\pm \\leq \\geq \\neq \\approx \\cup \\cap \\in \\emptyset "
        "\\mathbb{R}^{\\circ}\\ldots '' 1/2 1/4 3/4 1/3 2/3 1/5 2/5 3/5 4/5 1/6 5/6 1/8 3/8 5/8 7/8"
        " 1/7 1/9 1/10\\Omega \\Omega \\sqrt    \\euro \\pounds \\yen \\rupee 2("
    )
    assert to_latex("x⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉...!=a.m.p.m.,\\!") == (
        "x^{0123456789+-n}_{0123456789}\\ldots \\neq ampm{,}"
    )


def test_commands_have_one_name() -> None:
    commands = (
        "dfrac tfrac cfrac dbinom tbinom le leqslant ge geqslant ne lt gt dots cdots dotsc dotsb "
        "lbrace rbrace lbrack rbrack land varnothing thickapprox lvert rvert vert fbox ast imath "
        "infin varphi varepsilon vartheta"
    )
    found = tokenize("".join(f"\\{name} " for name in commands.split()))
    assert " ".join(map(str, found)) == (
        "\\frac \\frac \\frac \\binom \\binom \\leq \\leq \\geq \\geq \\neq < > \\ldots \\ldots "
        "\\ldots \\ldots \\{ \\} [ ] \\wedge \\emptyset \\approx | | | \\boxed * i \\infty \\phi "
        "\\epsilon \\theta"
    )


def test_units_have_one_spelling() -> None:
    words = (
        "millimeters centimetre metres kilometer inches foot feet yards miles milligram gm grams "
        "kilograms pounds lb ounces milliliter litres gallons sec seconds mins hr hours days weeks "
        "months years dollars cents euros mi/h kmh kph hertz newtons joules watts volts pascals "
        "celsius fahrenheit a.m p.m degrees radians ohms kelvin amperes amp dogs"
    )
    assert " ".join(map(canonical, words.split())) == (
        "mm cm m km in ft ft yd mi mg g g kg lb lb oz ml l gal s s min h h d week month yr usd "
        "cent eur mph km/h km/h hz n j w v pa c f am pm deg rad ohm k a a dog"
    )


VALUES = {
    "sin": 0.29552020666133955, "cos": 0.955336489125606, "tan": 0.30933624960962325,
    "cot": 3.2327281437658275, "sec": 1.0467516015380856, "csc": 3.383863361824123,
    "sinh": 0.3045202934471426, "cosh": 1.0453385141288605, "tanh": 0.2913126124515909,
    "arcsin": 0.3046926540153975, "arccos": 1.266103672779499, "arctan": 0.2914567944778671,
    "log": -1.2039728043259361, "ln": -1.2039728043259361, "exp": 1.3498588075760032,
    "floor": 0, "ceil": 1, "abs": 0.3, "factorial": 0.8974706963062772,
}  # fmt: skip
OF_WORKER = {
    "coth": 3.4327384303217, "arccot": 1.27933953231703, "arcsec": 1.87382024 * 1j,
    "arccsc": 1.5707963 - 1.87382024 * 1j, "sgn": 1, "Re": 0.3, "Im": 0, "norm": 0.3, "arg": 0,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), (VALUES | OF_WORKER).items())
def test_functions_have_their_values_in_both_ways(name: str, value: complex) -> None:
    tree = ["call", name, ["num", "0.3"]]
    assert complex(sympy.N(math_worker.value(tree))) == pytest.approx(value)
    if name in VALUES:
        found = numeric.value_of(tree)
        assert not isinstance(found, tuple)
        assert found is not None
        assert cmath.isclose(found, value, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("tree", "value"),
    [
        (["call", "gcd", ["tuple", ["num", "12"], ["num", "18"]]], 6),
        (["call", "lcm", ["tuple", ["num", "4"], ["num", "6"]]], 12),
        (["call", "max", ["set", ["num", "4"], ["num", "6"]]], 6),
        (["call", "min", ["list", ["num", "4"], ["num", "6"]]], 4),
        (["call", "binom", ["num", "5"], ["num", "2"]], 10),
        (["call", "log", ["num", "8"], ["num", "2"]], 3),
        (["call", "sin", ["deg", ["num", "30"]]], 0.5),
        (["root", ["neg", ["num", "8"]], ["num", "3"]], -2),
        (["pct", ["num", "50"]], 0.5),
        (["call", "tr", ["matrix", [["num", "1"], ["num", "2"]], [["num", "3"], ["num", "4"]]]], 5),
        (["call", "rank", ["matrix", [["num", "1"], ["num", "2"]]]], 1),
        (["call", "det", ["matrix", [["num", "1"], ["num", "2"]], [["num", "3"], ["num", "4"]]]],
         -2),
        (["mixed", "2", "1", "4"], 2.25),
        (["rep", "0", "1", "6"], 1 / 6),
    ],
)  # fmt: skip
def test_a_tree_has_its_value(tree: list, value: float) -> None:
    assert complex(sympy.N(math_worker.value(tree))) == pytest.approx(value)


@pytest.mark.parametrize(
    ("words", "digits"),
    [
        ("two three four five six seven eight nine ten twelve sixteen", "2 3 4 5 6 7 8 9 10 12 16"),
        ("one", "one"),
    ],
)
def test_bases_may_be_words(words: str, digits: str) -> None:
    for word, digit in zip(words.split(), digits.split(), strict=True):
        reading = reading_of(f"101_{{\\text{{{word}}}}}", letters_are_units=False)
        assert reading is not None
        assert reading.tree == ["based", "101", digit]


def test_multipliers_are_powers_of_ten() -> None:
    words = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
    for word, exponent in words.items():
        reading = reading_of(f"5 {word}", letters_are_units=True)
        assert reading is not None
        assert reading.tree == ["mul", ["num", "5"], ["pow", ["num", "10"], ["num", str(exponent)]]]


def test_constants_and_sets_of_the_worker() -> None:
    values = {name: math_worker.value(["const", name]) for name in ("pi", "e", "i", "oo")}
    assert values == {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}
    numbers = [sympy.Integer(2), sympy.Integer(-2), sympy.Rational(1, 2), sympy.sqrt(2), sympy.I]
    for name, num_held in {"N": 1, "Z": 2, "Q": 3, "R": 4, "C": 5}.items():
        held = math_worker.as_set(["const", f"set {name}"])
        assert [number in held for number in numbers] == [True] * num_held + [False] * (
            5 - num_held
        )
    assert math_worker.as_set(["const", "empty"]) == sympy.S.EmptySet
