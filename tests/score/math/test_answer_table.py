"""Answers that earn the reward and answers that do not, by class, under the default rule.

Each pair is (gold, answer) or (gold, answer, question); right answers stand in odd dress, wrong
ones are near misses, work left undone, or text that no one can read to its end.
"""

import pytest

from reason_llm.score.math.boxed_math import equivalent, matches

RIGHT = {
    "a plain number": [
        ("82", "82"), ("82", "+82"), ("82", "082"), ("82", "82.0"), ("82", "82."), ("82", "$82$"),
        ("82", "\\boxed{82}"), ("82", "\\text{82}"), ("82", "\\mathbf{82}"), ("82", "(82)"),
        ("82", "\\underline{82}"), ("82", "\\color{red}{82}"), ("82", "\\textcolor{blue}{82}"),
        ("82", "８２"), ("-3", "－3"), ("-3", "−3"), ("-3", "- 3"), ("1234", "1,234"),
        ("1234567", "1{,}234{,}567"), ("12345", "12 345"), ("1200", "1.2 \\times 10^3"),
        ("1000", "10^3"), ("0.0015", "1.5e-3"), ("3.5", "3\\frac{1}{2}"), ("3.5", "7/2"),
        ("0.25", "25\\%"), ("2500000", "2.5 million"), ("82", "\\left(82\\right)"),
    ],
    "a fraction": [
        ("\\frac{2}{3}", "⅔"), ("\\frac{2}{3}", "2⁄3"), ("\\frac{2}{3}", "2/3"),
        ("\\frac{2}{3}", "\\tfrac23"), ("\\frac{2}{3}", "\\frac{4}{6}"), ("\\frac{3}{4}", "0.75"),
        ("\\frac{5}{3}", "1 2/3"), ("\\frac{5}{3}", "1⅔"), ("-\\frac{1}{2}", "\\frac{-1}{2}"),
        ("-\\frac{1}{2}", "-0.5"), ("\\frac{1}{6}", "0.1\\overline{6}"), ("\\frac{1}{2}", "50\\%"),
    ],
    "its name before it": [
        ("5", "f(2) = 5"), ("5", "x_1 = 5"), ("33", "m+n = 33", "Find $m+n$."),
        ("0.5", "P(A) = 0.5"),
        ("-3", "The minimum is -3"), ("-3", "\\text{The minimum is } -3"), ("7", "|AB| = 7"),
        ("\\frac{3}{2}", "I_{\\max} = \\frac{3}{2}"), ("4", "\\log_2 x = 4"), ("12", "AB = 12"),
        ("60", "\\angle ABC = 60^\\circ"), ("9", "a^2+b^2 = 9", "What is $a^2+b^2$?"),
        ("5", "x=5"), ("x=5", "5"),
        ("3", "\\text{Area} = 3"), ("2x+1", "f(x) = 2x+1"), ("[0,1]", "x \\in [0,1]"),
        ("3", "So the answer is 3"),
        ("\\frac{\\sqrt{3}}{3}", "\\frac{\\sqrt{3}}{3} \\approx 0.577"),
        ("8", "n = 8", "Find n such that n + 1 = 9."),
    ],
    "several": [
        ("1,2", "x = 1, x = 2"), ("1,2", "2, 1"), ("1,2", "x=1 \\text{ or } x=2"),
        ("1,2", "1 and 2"), ("1,2", "\\{1,2\\}"), ("3 \\pm \\sqrt{2}", "3+\\sqrt2, 3-\\sqrt2"),
        ("1,2,3", "1, 2, and 3"), ("(1,2)", "(1.0, 2)"), ("(2,1)", "x=2, y=1"),
        ("(2,1)", "y=1, x=2"), ("(x,y) = (2,1)", "(2,1)"), ("(2,1)", "(x,y)=(2,1)"),
        ("x=2, y=1", "y=1, x=2"), ("\\{1,2\\}", "\\{2,1\\}"), ("1:4", "1:4"),
    ],
    "a unit": [
        ("12", "12\\text{ cm}"), ("12\\text{ cm}", "12"), ("12\\text{ cm}", "12 centimeters"),
        ("6\\text{ dogs}", "6\\text{ dogs}"), ("6\\text{ dogs}", "6 dogs"),
        ("6", "6 dogs", "How many dogs?"),
        ("5 \\text{ cm}^2", "5 \\text{ square cm}"), ("50", "50^\\circ"), ("42", "\\$42"),
        ("10 \\text{ m/s}", "10\\ \\mathrm{m}/\\mathrm{s}"), ("9:30 \\text{ a.m.}", "9:30 a.m."),
        ("5", "5 cm"), ("2", "2\\ \\Omega"), ("100", "100\\text{ square units}"),
    ],
    "roots and constants": [
        ("2\\sqrt{3}", "2√3"),
        ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"),
        ("7-2\\pi", "-2\\pi+7"), ("2\\pi", "2π"), ("2\\pi", "6.283185307"),
        ("1+\\sqrt{2}", "\\sqrt2+1"),
        ("\\sqrt[3]{2}", "2^{1/3}"), ("3+4i", "4i+3"), ("\\frac{\\pi}{2}", "\\pi/2"),
        ("\\infty", "∞"), ("e^2", "e^{2}"), ("10^{-9}", "0.000000001"),
    ],
    "expressions": [
        ("(x+1)^2", "x^2+2x+1"), ("32x+80", "16(2x+5)"),
        ("\\frac{x+2}{7}", "\\frac{x}{7}+\\frac{2}{7}"),
        ("x^2+4y^2", "x^{2} + 4 y^{2}"), ("3 x^{2}", "3x^2"), ("\\frac{1}{x}", "x^{-1}"),
        ("2\\sin x\\cos x", "2 \\cos x \\sin x"), ("a^2", "a**2"), ("2xy", "2yx"),
        ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"),
        ("y=2x+1", "y = 1+2x"), ("x^2+y^2=1", "1 = y^2 + x^2"),
        ("x^2+1=0", "x^2 = -1"), ("\\binom{n}{2}", "\\frac{n!}{2!(n-2)!}"), ("e^x", "\\exp(x)"),
    ],
    "sets and matrices": [
        ("[0,1)", "\\left[0, 1\\right)"), ("(-\\infty,1)\\cup(2,\\infty)", "(2,∞)∪(-∞,1)"),
        ("(2,\\infty)", "x > 2"), ("\\emptyset", "∅"), ("(1,2)", "1 < x < 2"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
        ("\\begin{pmatrix}\\frac15\\\\2\\end{pmatrix}",
        "\\frac15\\begin{pmatrix}1\\\\10\\end{pmatrix}"),
        ("(6,0)", "(6,0)", "What is the distance from $(6,0)$?"),
    ],
    "words": [
        ("C", "(C)"), ("C", "\\textbf{(C)}"), ("C", "(C) 12"), ("C", "C."), ("\\text{(C)}", "c"),
        ("Evelyn", "\\text{evelyn}"), ("\\text{even function}", "Even function"), ("yes", "Yes."),
        ("204_5", "204_{5}"), ("\\text{Monday}", "The answer is Monday"),
    ],
    "second reading": [
        ("101_2", "101_{\\text{two}}"), ("3:4", "\\frac{3}{4}"), ("10", "10\\text{ m s}^{-1}"),
        ("e^{-1}", "\\frac{1}{e}"),
        ("B", "Option B"), ("\\mathbb{R}", "(-\\infty,\\infty)"), ("\\emptyset", "\\{\\}"),
        ("x^{1/2}", "\\sqrt{x}"),
        ("\\tan x", "\\frac{\\sin x}{\\cos x}"), ("a,b,c,d", "d, c, b, a"),
        ("az^3 + d", "a z^3 + d"), ("5", "Therefore, 5"),
        ("No", "The answer is no"), ("\\text{A,B}", "A, B"), ("p-q", "\\mathbf{p - q}"),
        ("xy", "yx"), ("yes", "Yes"),
        ("50", "50\\%", "How many percent of them?"),
        ("I \\otimes I", "\\color{blue}{I \\otimes I}"), ("1", "\\phantom{-1}1"),
        ("2^{-3}", "\\frac{1}{8}"), ("q(p-r)", "\\mathbf{q(p - r)}"), ("5", "\\hspace{1cm}5"),
        ("50\\%", "50 percent"), ("3.14", "x \\approx 3.14"), ("\\approx 5", "5"),
        ("\\approx 5", "\\approx 5"), ("[5]", "5"), ("[5]", "[5]"), ("[1,2]", "[1,2]"),
        ("\\frac{1}{3}", "\\frac{1}{3} \\approx 0.33"), ("2(x+1)", "2[x+1]"),
    ],
}  # fmt: skip

WRONG = {
    "numbers side by side": [
        ("82", "37 45"), ("82", "37(45)"), ("82", "{37}{45}"), ("82", "(37)(45)"), ("10", "5 3 2"),
        ("82", "37\\ 45"), ("82", "37~45"), ("82", "37\\,45"), ("82", "37\\text{ }45"),
        ("1665", "37 45"), ("1665", "(37)(45)"), ("146", "58 88"), ("82", "\\{37\\}45"),
        ("5", "2\\frac{6}{2}"), ("5", "$2$ $3$"), ("82", "037 45"),
    ],
    "work left undone": [
        ("82", "164/2"), ("12", "\\sqrt{144}"), ("6", "\\gcd(12,18)"), ("3", "\\lfloor3.7\\rfloor"),
        ("2", "17\\mod5"), ("6", "3!"), ("10", "\\binom{5}{2}"), ("82", "37+45"),
        ("82", "37+45=82"),
        ("82", "x = 37+45 = 82"), ("82", "x=37+45"), ("9025", "95^2"), ("25", "(\\sqrt{5})^4"),
        ("128", "16^{7/4}"), ("\\frac12", "\\frac13+\\frac16"), ("12\\text{ cm}", "4=12"),
        ("12", "4=12"), ("-2", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}"),
        ("\\frac12", "\\cos 60^\\circ"),
        ("8\\sqrt{2}", "\\sqrt{50}+\\sqrt{18}"), ("\\frac{3}{2}", "\\frac{1}{\\frac{2}{3}}"),
        ("2", "\\log_2 4"),
        ("\\frac{11}{2}", "\\frac{3}{\\frac{6}{11}}"), ("\\frac{5}{2}", "\\log_4 32"),
        ("-3", "-(1+2)"),
        ("t^7", "t^3\\cdot t^4", "Simplify $t^3\\cdot t^4$."), ("5", "x - x + 5"),
        ("6", "\\prod_{k=1}^3 k"),
        ("-1-7z", "(2-3z) - (3+4z)"), ("\\frac{3}{4}", "\\frac{1.5}{2}"), ("12", "|{-12}|"),
        ("\\begin{pmatrix}4\\\\6\\end{pmatrix}",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}+\\begin{pmatrix}3\\\\4\\end{pmatrix}"),
        ("6", "\\int_0^6 1 dx"), ("12", "\\max(3,12)"), ("(3, 5)", "(1+2, 5)"), ("3, 5", "1+2, 5"),
        ("2i", "i+i"), ("\\frac{1}{2}", "2^{-1}"),
    ],
    "copied from the question": [
        ("32x+80", "16(2x+5)", "Expand $16(2x+5)$."),
        ("12\\sqrt{2}", "\\sqrt{288}", "Simplify $\\sqrt{288}$."),
        ("\\frac{14}{11}", "1.\\overline{27}", "Write $1.\\overline{27}$ as a fraction."),
        ("1", "y = 1", "The line $y = 1$ meets it."),
        ("\\frac12", "\\frac{2}{4}", "Reduce $\\dfrac{2}{4}$."),
        ("(2,4)", "5x - 1 < (x + 1)^2 < 7x - 3", "Solve $5x - 1 < (x + 1)^2 < 7x - 3.$"),
        ("3x^2-12", "(x+2)(3x-6)", "Expand $(x+2)(3x-6)$."),
        ("0.5", "50\\%", "Write $50\\%$ as a decimal."),
        ("[-6,\\infty)", "x + 6 \\ge 0", "Solve $x+6 \\geq 0$."),
        ("3", "x = 3", "Let $x = 3$. What is x?"),
    ],
    "not read to the end": [
        ("4", "4\\sqrt(2)"), ("4", "4 \\approx 7"), ("4", "4_7"), ("4", "4 \\foo{7}"),
        ("7", "4 ? 5 ? 7"),
        ("12", "\\neq 12"), ("12", "\\not= 12"), ("5", "5\\text{ or 4}"), ("5", "5 \\text{ or } 4"),
        ("6\\text{ dogs}", "6\\text{ cats}"), ("6 \\text{ dogs}", "6 cats"), ("C", "(A)(B)(C)"),
        ("C", "A, B or C"), ("5", "4 #### 5"), ("5", "\\boxed{4}, \\boxed{5}"), ("5", "not 5"),
        ("5", "5 or more"), ("5", "less than 5"), ("5", "5, maybe 6"), ("5", "5 ("), ("5", "5}"),
        ("5", "5 hundred"), ("5", "5 squared"), ("5", "It is not 5"), ("5", "5?"),
        ("5", "5 \\ldots 9"),
        ("5", "x > 5"), ("5", "x \\leq 5"), ("5", "5 = 6"), ("6", "5 = 6"), ("5", "<5>4"),
        ("C", "C or D"),
        ("C", "not C"), ("yes", "yes and no"), ("5", "5 \\pm 1"), ("5", "5;6"), ("5", "5,6"),
        ("5", "\\text{either 5 or } 6"), ("5", "five or 5"), ("5", "4 or 5"), ("5", "5/"),
        ("5", "5^"),
    ],
    "a last term is no unit": [
        ("3", "3 x^{2}"), ("3 x^{2}", "3 y^{2}"), ("3 x^{2}", "3"), ("5", "5t"), ("x+3", "x + 3 y"),
        ("5t", "5"),
        ("5 \\text{ cm}", "5 \\text{ m}"), ("5 \\text{ cm}^2", "5 \\text{ cm}^3"),
        ("5 km", "5 miles"),
    ],
    "tiny numbers and unsolvable equations": [
        ("\\frac{1}{2^{98}}", "0"), ("\\frac{1}{2^{98}}", "0x"),
        ("1-\\frac{1}{2^{100}}", "1-\\frac{1}{3^{99}}"),
        ("x^2+1=0", "1=2"), ("10^{-9}", "0"), ("10^{-9}", "10^{-10}"),
        ("1-\\frac{1}{2^{100}}", "1"),
        ("0.000000001", "0.000000002"), ("x^2+1=0", "y^2+1=0"), ("2^{-98}", "3^{-62}"),
        ("x=5", "y=5"),
        ("\\frac{1}{3}", "0.3333"), ("\\frac{1}{4}", "0.2500001"), ("x=1, y=2", "x=2, y=1"),
    ],
    "another value": [
        ("82", "-82"), ("82", "28"), ("(1,2)", "x=2, y=1"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"),
        ("1,2", "1"), ("1,2", "1,2,3"), ("\\frac{2}{3}", "\\frac{3}{2}"), ("x^2", "x^3"),
        ("2\\pi", "2"),
        ("50\\%", "5"), ("[0,1)", "[0,1]"), ("x>5", "x<5"), ("204_5", "204_6"), ("12:00", "1:00"),
        ("Evelyn", "Evelin"), ("C", "D"), ("2n", "2m"), ("x<3", "y<3"), ("listen", "silent"),
        ("5", ""),
        ("1,2,\\ldots,n", "1,3,\\ldots,n"), ("-2f'(0)", "0"), ("\\sqrt{17}", "4.1"),
        ("\\infty", "-\\infty"),
    ],
    "second reading": [
        ("B", "-B"), ("nM", "-nM"), ("ab", "AB"), ("AB'", "AB"), ("pq-rs", "pq rs"),
        ("3", "3\\mathbf{x}"), ("3", "3\\text{xy}"),
        ("xy^2", "x^2y^2"), ("D", "A, B, C, D"), ("D", "The answer is A, D"), ("d", "a,b,c,d"),
        ("c", "a:b:c"), ("5", "x, y, 5"),
        ("(6,1)", "[6,1)"), ("(6,1)", "(6,1]"),
        ("(-\\infty,5)\\cup(5,\\infty)", "(-\\infty,5)\\cup(5,\\infty]"),
        ("f(0)", "f(0)1"), ("50", "50\\%", "How many dogs?"), ("1, 2", "1, 2\\%"),
        ("270^\\circ", "270^\\circ\\%"),
        ("\\$5", "5 cents"), ("30^\\circ", "30\\text{ rad}"), ("5", "5 \\text{ cm} {-1}"),
        ("\\emptyset", "(5,1)"),
        ("45", "\\color{white}{4}5"), ("57", "5\\phantom{7}"), ("12", "1\u200b2"), ("5", "4 % 5"),
        ("3:4", "3:4:5"),
        ("28", "28/100"), ("\\text{A,B}", "A, C"), ("-2", "2\\text{-}"),
        ("2\\mathbf{v}", "2\\mathbf{w}"),
    ],
}  # fmt: skip


def pairs(table: dict[str, list[tuple[str, ...]]]) -> list[tuple[str, str, str]]:
    return [
        (each[0], each[1], "".join(each[2:])) for of_class in table.values() for each in of_class
    ]


@pytest.mark.parametrize(("gold", "answer", "question"), pairs(RIGHT))
def test_a_right_answer_in_odd_dress_is_paid(gold: str, answer: str, question: str) -> None:
    assert matches(gold, answer, 5.0, question) == 1


@pytest.mark.parametrize(("gold", "answer", "question"), pairs(WRONG))
def test_a_wrong_answer_is_not_paid(gold: str, answer: str, question: str) -> None:
    assert matches(gold, answer, 5.0, question) == 0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1665", "(37)(45)"), ("1665", "37(45)"), ("82", "164/2"), ("12", "\\sqrt{144}"),
        ("10", "\\binom{5}{2}"),
        ("82", "37+45=82"), ("\\frac12", "\\frac13+\\frac16"), ("2", "\\log_2 4"),
        ("12", "3 \\cdot 4"),
    ],
)  # fmt: skip
def test_equality_of_values_pays_what_is_not_worked_out(gold: str, answer: str) -> None:
    assert matches(gold, answer, 5.0, equality="value") == 1
    assert matches(gold, answer, 5.0) == 0
    assert equivalent(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("82", "37 45"), ("82", "(37)(45)"), ("82", "{37}{45}"), ("12", "4=12"), ("4", "4 \\approx 7"),
     ("5", "5\\text{ or 4}"), ("3", "3 x^{2}"), ("7", "4 ? 5 ? 7"), ("\\frac{1}{2^{98}}", "0x")],
)  # fmt: skip
def test_equality_of_values_pays_no_other_value(gold: str, answer: str) -> None:
    assert matches(gold, answer, 5.0, equality="value") == 0


def test_the_table_is_large_and_balanced() -> None:
    right, wrong = pairs(RIGHT), pairs(WRONG)
    assert len(right) >= 100
    assert len(wrong) >= 100
    assert len(set(right)) == len(right)
    assert len(set(wrong)) == len(wrong)
