"""Each rule of comparison with its twins: an answer that counts and a wrong one near it.

A spelling that no rule knows would be refused, so ``right`` fails without its rule; ``wrong`` fails
where a rule takes too much.
"""

import time

import pytest

from reason_llm.score.math.answer_text import MAX_CHARACTERS, decide
from reason_llm.score.math.boxed_math import equivalent, majority

RULES = [
    # numbers with separators
    ("1234567", "1,234,567", "1,234,568"),
    ("1234567", "1{,}234{,}567", "1{,}234"),
    ("12345", "12\\,345", "12\\,346"),
    ("12345", "12 345", "12 34"),
    ("1234.5", "1,234.5", "1,234.6"),
    ("11111", "11,\\! 111", "11,\\! 112"),
    ("x=1234", "x = 1,234", "x = 1,235"),
    ("1000", "1,000 \\text{ dollars}", "1,100 \\text{ dollars}"),
    ("1000+x", "1{,}000 + x", "1{,}001 + x"),
    ("(1,234)", "(1, 234)", "(1234)"),
    ("2, 2, 3", "2, 3, 2", "2, 3, 3"),
    ("x, x, x+1", "x, 1+x, x", "x, x+1, x+1"),
    ("\\{1,234\\}", "\\{234, 1\\}", "\\{1234\\}"),
    ("3", "003", "030"),
    ("2.5", "2.50", "2.05"),
    ("0.5", ".5", ".05"),
    ("(0.5, 1)", "(.5, 1)", "(.05, 1)"),
    ("7", "+7", "-7"),
    ("0", "-0", "-1"),
    ("1500", "1.5e3", "1.5e4"),
    ("0.0015", "1.5 \\times 10^{-3}", "1.5 \\times 10^{-2}"),
    ("10^{-9}", "0.000000001", "0.000000002"),
    ("5000000", "5 million", "5 billion"),
    ("5000000", "5 \\text{ million}", "5"),
    ("204_5", "204_{5}", "204_6"),
    ("\\frac{1}{6}", "0.1\\overline{6}", "0.\\overline{16}"),
    # fractions, roots, powers
    ("\\frac{1}{2}", "\\dfrac12", "\\dfrac21"),
    ("\\frac{1}{2}", "1/2", "2/1"),
    ("\\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt3}2", "\\frac{\\sqrt2}3"),
    ("\\frac{\\pi}{2}", "\\dfrac\\pi2", "\\dfrac2\\pi"),
    ("\\frac{12}{5525}", "\\frac{12}{5,\\!525}", "\\frac{12}{5,\\!552}"),
    ("\\frac{3}{2}", "1 1/2", "11/2"),
    ("-\\frac{3}{2}", "-1 1/2", "-\\frac{1}{2}"),
    ("\\frac{71}{6}", "11 5/6", "11 6/5"),
    ("2^{1/3}", "\\sqrt[3]2", "\\sqrt[2]3"),
    ("4.123106", "\\sqrt 17", "\\sqrt 71"),
    ("1024", "2^10", "2^11"),
    ("\\frac{1}{x}", "x^-1", "x^-2"),
    ("x^2", "x**2", "x*2"),
    ("2\\sqrt{3}", "2*sqrt(3)", "3*sqrt(2)"),
    ("2\\pi", "2pi", "2\\pi^2"),
    ("a^x \\ln a", "ln(a)*a^x", "ln(x)*a^x"),
    ("\\frac{1}{2004!}", "\\frac{1}{2004!}", "\\frac{1}{2006!}"),
    # characters that stand for LaTeX
    ("2\\pi", "2π", "3π"),
    ("2\\sqrt{3}", "2√3", "3√2"),
    ("x^{12}", "x¹²", "x¹³"),
    ("x_1+1", "x₁ + 1", "x₂ + 1"),
    ("(-3, 4)", "(−3, 4)", "(3, 4)"),
    # percent, currency, degrees
    ("50\\%", "50 percent", "5 percent"),
    ("50\\%", "0.5", "0.05"),
    ("12.5%", "12.5", "1.25"),
    ("32348", "\\$32,\\!348", "\\$32,\\!384"),
    ("5", "$5", "$6"),
    ("5", "€5", "€6"),
    ("30^\\circ", "30°", "60°"),
    ("30", "30^{\\circ}", "90^{\\circ}"),
    ("30", "30 degrees", "31 degrees"),
    ("30", "30\\degree", "31\\degree"),
    ("30^\\circ \\text{C}", "30^\\circ \\text{C}", "30^\\circ \\text{F}"),
    # units
    ("5", "5 \\text{ cm}", "6 \\text{ cm}"),
    ("5 \\text{ cm}", "5\\mathrm{~cm}", "5 \\text{ m}"),
    ("5 \\text{ cm}^2", "5 \\text{ square cm}", "5 \\text{ cm}^3"),
    ("10 \\text{ m/s}", "10\\,\\mathrm{m}/\\mathrm{s}", "10 \\text{ km/h}"),
    ("120 \\text{ km}", "120 kilometers", "120 miles"),
    ("5", "5 m", "5 + m"),
    ("5", "5cm", "5cd"),
    ("42 \\text{ apples}", "42 apples", "42 pears"),
    ("36", "36 square inches", "6 square inches"),
    ("9:30 \\text{ a.m.}", "9:30 a.m.", "9:30 \\text{ p.m.}"),
    ("2.5", "2.5\\ \\Omega", "2.4\\ \\Omega"),
    ("2n \\text{ (n even)}", "2n \\text{ (n even)}", "2n \\text{ (n odd)}"),
    ("2n", "n \\cdot 2", "2"),
    ("2 n", "2n", "2"),
    ("2xy", "2yx", "2 xy z"),
    ("5t", "t \\cdot 5", "5"),
    # intervals, sets, tuples, matrices, equations
    ("[0,1)", "\\left[0, 1\\right)", "[0,1]"),
    ("(-\\infty, 3]", "(-inf, 3]", "(-\\infty, 3)"),
    ("(2,\\infty)", "x > 2", "x \\geq 2"),
    ("(-\\infty,1) \\cup (2,\\infty)", "(2,∞)∪(-∞,1)", "(2,∞)∪(-∞,1]"),
    ("\\frac12", "\\frac12 \\text{ (or } 0.5)", "\\frac12 \\text{ (or } 0.6)"),
    ("\\frac12", "\\frac12 (= 0.5)", "\\frac12 (= 0.5"),
    ("101_2", "101 \\text{ in base } 2", "101 \\text{ in base } 3"),
    ("1, 2", "2 \\text{ and } 1", "2 \\text{ and } 3"),
    ("1, 2", "x = 1 or x = 2", "x = 1 or x = 3"),
    ("19, 46, 82", "19, 46, and 82", "19, 64, and 82"),
    ("\\{1,2,3\\}", "\\{3,1,2\\}", "\\{3,1\\}"),
    ("(1,2)", "(1, 2)", "(2, 1)"),
    ("(1,2)", "\\langle 1, 2 \\rangle", "\\langle 2, 1 \\rangle"),
    ("(1,\\frac{9}{2})", "(1,4.5)", "(1,4.4)"),
    ("1,2,\\ldots,n", "1, 2, \\dots, n", "1, 3, \\dots, n"),
    ("1,2,\\ldots", "1,2,...", "1,2"),
    (
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}",
        "\\begin{bmatrix} 1 & 2 \\\\ 4 & 3 \\end{bmatrix}",
    ),
    (
        "\\begin{pmatrix} 3 \\\\ 5 \\end{pmatrix}",
        "2\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} + \\begin{pmatrix} 1 \\\\ 1 \\end{pmatrix}",
        "2\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} - \\begin{pmatrix} 1 \\\\ 1 \\end{pmatrix}",
    ),
    ("y=2x+1", "2x - y + 1 = 0", "2x - y - 1 = 0"),
    ("x=1, y=2", "y=2, x=1", "x=2, y=1"),
    ("1-\\frac{1}{\\mathrm{e}}", "1-e^{-1}", "1+\\frac{1}{\\mathrm{e}}"),
    ("\\frac{1}{2}", "\\frac{\\text{1}}{2}", "\\frac{\\text{1}}{3}"),
    # text
    ("Evelyn", "\\text{evelyn}", "\\text{Evelin}"),
    ("even function", "\\text{Even} \\text{function}", "odd function"),
    ("C", "(C)", "(D)"),
    ("\\text{(C)}", "c", "d"),
    ("C", "(C) 12", "(A) or (C)"),
    ("\\text{(C)}", "\\textbf{(C)}\\ 12", "\\text{(C)+1}"),
    ("\\text{October 30}", "october 30", "November 30"),
    # wrappings
    ("5", "`5`", "`6`"),
    ("5", "**5**", "**6**"),
    ("4/7", "4/7**", "7/4**"),
    ("5", "\\(5\\).", "\\(6\\)."),
    ("5", "\\[5\\]", "\\[6\\]"),
    ("5", "$$5$$", "$$6$$"),
    ("5", "\\mathbf{5}", "\\mathbf{6}"),
    ("\\frac{3}{4}", "\\\\dfrac{3}{4}", "\\\\dfrac{4}{3}"),
    ("5", "\\boxed{4} or rather \\boxed{5}", "\\boxed{5} or rather \\boxed{4}"),
    ("5", "#### 5", "#### 5 6"),
    ("\\boxed{5}", "5", "6"),
    ("5", "Therefore, 5", "Therefore, 6"),
    ("5", "The total is $5", "The total is $6"),
    ("(x+1)^2", "The area is $x^2+2x+1$.", "The area is $x^2+1$."),
]


@pytest.mark.parametrize(("gold", "right", "wrong"), RULES)
def test_the_right_spelling_counts_and_the_wrong_twin_does_not(
    gold: str, right: str, wrong: str
) -> None:
    assert equivalent(gold, right)
    assert not equivalent(gold, wrong)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", ""),
        ("", "5"),
        ("", ""),
        ("5", "\\boxed{}"),
        ("5", "((((("),
        ("5", "5/0"),
        ("5", "{1, 2, 3}^{2}"),
        ("5", "2\\%5\\_{\\"),
        ("12:00", "1:00"),
        ("y = 2x - 13", "y = 2x - 13\\%"),
        ("100, 200", "100"),
    ],
)
def test_no_answer_and_nonsense_are_refused(gold: str, answer: str) -> None:
    assert not equivalent(gold, answer)


def test_numerals_and_words_are_decided_without_mathematics() -> None:
    assert decide("1" * 6000, "1" * 6000) is True
    assert decide("1" * 6000, "1" * 5999 + "2") is False
    assert decide("0.10", "0.1") is True
    assert decide("listen", "silent") is False
    assert decide("x" * MAX_CHARACTERS + "+1", "1+" + "x" * MAX_CHARACTERS) is False


@pytest.mark.parametrize(
    "unit", ["\\ ", "\\,", " ,", "\\left", "1 ", "ab ", "\\text{a}", "a=", "{"]
)
def test_rules_stay_fast_on_repetitive_text(unit: str) -> None:
    start = time.process_time()
    decide("5", unit * (MAX_CHARACTERS // len(unit)) + "x")
    assert time.process_time() - start < 30


def test_majority_counts_classes_not_spellings() -> None:
    assert majority(["\\frac{1}{2}", "3", "0.5", "3", "1/2"]) == "\\frac{1}{2}"
    assert majority(["3", "0.5", "3", "3.0", "1/2"]) == "3"
    assert majority(["1/2", "0.5", "7", "7", "7"]) == "7"


def test_majority_takes_the_first_of_equals_and_skips_the_missing() -> None:
    assert majority(["4", "x+1", "1+x", "8/2"]) == "4"
    assert majority(["x+1", "4", "8/2", "1+x"]) == "x+1"
    assert majority([None, None, "", "7"]) == "7"
    assert majority([None, ""]) is None
    assert majority([]) is None
