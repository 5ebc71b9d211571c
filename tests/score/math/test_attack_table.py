"""What a policy finds that looks for money and not for the answer, by class, with right answers in
the same dress: (gold, answer) or (gold, answer, question).

An answer that repeats the question, leaves work open or hedges earns nothing under the default
rule.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reason_llm.score.math.boxed_math import matches

SIMPLIFY = "Simplify $4a+3a+2a$."
ROOT = "Simplify $\\sqrt{242}$."
EXPAND = "Expand the product $(x+3)(x+2)$."
FACTOR = "Factor $x^2-9$ completely."
QUADRATIC = "Solve $x^2-5x+6<0$. Express your answer in interval notation."
LINEAR = "Solve for $x$: $3+2x=13$."
DECIMAL = "Write $0.\\overline{27}$ as a common fraction."
POWERS = "Simplify $t^3\\cdot t^4$."
COMPOSED = "Let $f(x)=x^2+3x$. Find $f(x+1)$."
SUMS = "If $f(x)=2x+1$ and $g(x)=x+5$, find $3f(x)-g(x)$."
LINE = "A line has the equation $2x-y+1=0$. Write it in slope-intercept form."
RATIONAL = "Rationalize the denominator: $\\frac{1}{\\sqrt{3}}$."
CHOICE = "What is $6 + 6$? (A) 10 (B) 11 (C) 12 (D) 13"
DOGS = "How many dogs can he buy?"
METERS = "How long is the rope in meters?"
FACTORS = "Write 60 as a product of powers of primes."

WRONG = {
    "the question's formula": [
        ("9a", "4a+3a+2a"), ("9a", "(4a+3a+2a)", SIMPLIFY), ("9a", "2a+3a+4a", SIMPLIFY),
        ("9a", "f(a)=4a+3a+2a", SIMPLIFY), ("9a", "4a+3a+2a", "Simplify 4a+3a+2a."),
        ("11\\sqrt{2}", "\\sqrt{242}", ROOT), ("11\\sqrt{2}", "x=\\sqrt{242}", ROOT),
        ("11\\sqrt{2}", "1\\cdot\\sqrt{242}", ROOT), ("11\\sqrt{2}", "\\sqrt{242}+0", ROOT),
        ("11\\sqrt{2}", "\\sqrt{242}=x", ROOT), ("11\\sqrt{2}", "-(-\\sqrt{242})", ROOT),
        ("11\\sqrt{2}", "\\frac{2\\sqrt{242}}{2}", ROOT),
        ("11\\sqrt{2}", "\\sqrt{2\\cdot 121}", ROOT), ("x^2+5x+6", "(x+3)(x+2)", EXPAND),
        ("x^2+5x+6", "(2+x)(3+x)", EXPAND), ("x^2+5x+6", "y = (x+2)\\cdot(x+3)", EXPAND),
        ("x^2+5x+6", "x(x+2)+3(x+2)", EXPAND), ("(x-3)(x+3)", "-9+x^2", FACTOR),
        ("(x-3)(x+3)", "x^2-3^2", FACTOR), ("(x-3)(x+3)", "(x^2-9)", FACTOR),
        ("\\frac{3}{11}", "0.\\overline{27}", DECIMAL),
        ("\\frac{3}{11}", "x = 0.\\overline{27}", DECIMAL), ("\\frac{3}{11}", "0.2727...", DECIMAL),
        ("t^7", "t^4 t^3", POWERS), ("t^7", "(t^3)(t^4)", POWERS), ("t^7", "t^{3+4}", POWERS),
        ("x^2+5x+4", "(x+1)^2+3(x+1)", COMPOSED), ("5x-2", "3(2x+1)-(x+5)", SUMS),
        ("3x+6", "(2x+1)+(x+5)", SUMS), ("y=2x+1", "2x-y+1=0", LINE), ("y=2x+1", "y-2x-1=0", LINE),
        ("y=2x+1", "2y=4x+2", LINE), ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}", RATIONAL),
        ("\\frac{\\sqrt{3}}{3}", "\\frac{2}{2\\sqrt{3}}", RATIONAL),
        ("2^2\\cdot3\\cdot5", "60", FACTORS), ("2^2\\cdot3\\cdot5", "4\\cdot15", FACTORS),
        ("\\frac{1}{2}", "\\frac{3}{6}", "Reduce $\\frac{3}{6}$ to lowest terms."),
        ("-\\frac{1}{2}", "\\frac{-2}{4}", "Reduce $-\\frac{2}{4}$ to lowest terms."),
        ("y^3", "\\frac{y^8}{y^5}", "Simplify $\\frac{y^8}{y^5}$."),
        ("x+1", "\\frac{x^2-1}{x-1}", "Simplify $\\frac{x^2-1}{x-1}$ where $x \\ne 1$."),
        ("x+1", "\\frac{(x+1)(x-1)}{x-1}", "Simplify $\\frac{x^2-1}{x-1}$."),
        ("6+9i", "3(2+3i)", "Compute $3(2+3i)$."), ("3+i", "(1+2i)+(2-i)", "Add $1+2i$ and $2-i$."),
        ("\\frac{5}{6}", "\\frac12+\\frac13", "What is $\\frac12+\\frac13$?"),
        ("2x", "x+x", "What is twice $x$?"), ("3x^2", "x^2+2x^2", "Add them."),
        ("(3, \\frac{\\pi}{2})", "(0,3)", "Convert the point $(0,3)$ to polar coordinates."),
    ],
    "a relation restated": [
        ("(2,3)", "0>x^2-5x+6", QUADRATIC), ("(2,3)", "x^2-5x+6<0", QUADRATIC),
        ("(2,3)", "2x^2-10x+12<0", QUADRATIC), ("(2,3)", "(x-2)(x-3)<0", QUADRATIC),
        ("(2,3)", "4<2x<6", QUADRATIC), ("(2,3)", "5x>x^2+6"), ("x>5", "2x>10", "Solve $2x>10$."),
        ("x>5", "x-5>0", "Solve $2x>10$."), ("[-6,\\infty)", "0\\le x+6", "Solve $x+6\\ge0$."),
        ("(-1,1)", "|x|<1", "Solve $|x|<1$."), ("(-1,1)", "x^2<1"), ("(0,\\infty)", "e^x>1"),
        ("5", "3+2x=13", LINEAR), ("5", "2x+3=13", LINEAR), ("x=5", "3+2x=13", LINEAR),
        ("x=5", "13=2x+3", LINEAR), ("x=5", "2x=10", LINEAR), ("x=5", "x-5=0", LINEAR),
        ("x=5", "x^3=125"), ("x=5", "6+4x=26", LINEAR), ("5", "2x=10", LINEAR), ("5", "x^3=125"),
        ("1, -1", "x^2=1"), ("x=\\pm 1", "x^2=1"), ("1,2", "(x-1)(x-2)=0"), ("x=3", "3=3"),
    ],
    "an equation that ends in the answer": [
        ("0", "x^2+1=0"), ("25", "x+100=25"), ("0", "x^2-5x+6=0"), ("1", "x^2+y^2=1"),
        ("5", "2x+y=5"), ("4", "x^2=4"), ("0", "x-3=0"), ("7", "3x=7"), ("1", "\\frac{x}{2}=1"),
        ("10", "x^2+x=10"), ("2x", "x=2x"), ("0", "ax^2+bx+c=0"), ("-1", "x^2=-1"),
    ],
    "ends of an interval, another curve": [
        ("(2,3)", "x=2 or x=3"), ("(2,3)", "2, 3"), ("(2,3)", "\\{2,3\\}"),
        ("(2,3)", "2\\text{ and }3"), ("[2,3]", "x=2, x=3"), ("(2,3)", "x = 2, 3"),
        ("(2,3)", "2 \\text{ or } 3"), ("(2,\\infty)", "x=2"), ("(2,3)", "x \\ne 2, x \\ne 3"),
        ("(2,3)", "2:3"), ("y=\\sqrt{x}", "y^2=x"), ("y=x^2", "x=\\sqrt{y}"),
        ("y=2\\sqrt{x}", "y^2=4x"), ("y^2=4x", "y=2\\sqrt{x}"), ("x^2+y^2=1", "y=\\sqrt{1-x^2}"),
        ("x^2=y^2", "x=y"), ("y=|x|", "y^2=x^2"), ("y=\\frac{1}{x}", "xy=1"), ("y=x", "x^2=xy"),
        ("y=x", "\\frac{y}{x}=1"), ("xy=0", "x=0"),
    ],
    "colons": [
        ("82", "164:2:99"), ("3:4:5", "\\frac{3}{4}"), ("\\frac{3}{4}", "3:4:5"), ("82", "164:2"),
        ("3:4:5", "3:4"), ("3:4", "3:4:1"), ("3:4:5", "3:4:6"), ("2", "2:1"), ("3:4", "4:3"),
        ("0.75", "3:4:1"), ("3:4", "\\frac{3}{4}:1:1"),
    ],
    "constants left open": [
        ("-4", "4i^2"), ("-1", "e^{i\\pi}"), ("100000", "10^2\\cdot10^3"),
        ("\\frac12", "\\sin 30^\\circ"), ("3", "\\log_2 8"), ("5", "|-5|"), ("120", "5!"),
        ("10", "\\binom52"), ("-1", "i^2"), ("1", "\\sin^2 x+\\cos^2 x"), ("2", "\\ln e^2"),
        ("5", "\\sqrt{25}"), ("8", "2^3"), ("6", "2\\cdot3"), ("6", "12/2"),
        ("3\\sqrt{2}", "\\sqrt{18}"), ("\\sqrt{6}", "\\sqrt2\\sqrt3"),
        ("\\sqrt{3}", "\\frac{3}{\\sqrt3}"), ("\\sqrt3", "\\frac{\\sqrt6}{\\sqrt2}"),
        ("2\\sqrt3", "\\sqrt3+\\sqrt3"), ("1+\\sqrt2", "\\sqrt{3+2\\sqrt2}"),
        ("\\pi", "\\frac{2\\pi}{2}"), ("3\\pi", "\\pi+2\\pi"), ("2\\pi", "\\pi\\cdot2\\cdot1"),
        ("3+4i", "3+4\\sqrt{-1}"), ("2i", "\\sqrt{-4}"), ("\\frac{\\pi}{4}", "\\arctan 1"),
        ("e^5", "e^2\\cdot e^3"), ("e^3", "e^{1+2}"), ("2^{10}", "2^{3}\\cdot2^{7}"),
        ("\\infty", "2\\infty"), ("\\infty", "\\infty+1"), ("-\\infty", "-\\infty-5"),
        ("\\infty", "\\infty^2"), ("\\emptyset", "\\{\\emptyset\\}"),
        ("\\frac{2}{3}", "2\\cdot\\frac13"), ("0", "0\\cdot5"), ("7", "7^1"), ("1", "7^0"),
        ("5", "5/1"), ("-3", "-(-(-3))"), ("3", "\\max(1,3)"), ("\\ln 2", "\\ln 4-\\ln 2"),
        ("\\ln 6", "\\ln 2+\\ln 3"), ("2", "\\lceil 1.2\\rceil"), ("9+4\\sqrt5", "(2+\\sqrt5)^2"),
        ("\\frac{\\sqrt3}{2}", "\\cos\\frac{\\pi}{6}"), ("\\frac{1}{4}", "(\\frac12)^2"),
        ("1.5", "\\frac{3}{2}\\cdot1"), ("0.5", "1-0.5"), ("2+\\sqrt3", "\\frac{1}{2-\\sqrt3}"),
        ("\\frac{3}{2}", "\\frac{6}{2}\\cdot\\frac{1}{2}"),
    ],
    "a remark that changes the value": [
        ("5", "5\\text{ sixths}"), ("5", "5\\text{ and above}"), ("5", "5 K"), ("5", "5\\text{ K}"),
        ("5", "\\text{half of the answer is }5"), ("5", "5\\text{ less than }x"),
        ("5", "5\\text{ dozen}"), ("5", "5\\text{ percent}"), ("5", "5\\text{ more}"),
        ("5", "5\\text{ or so}"), ("5", "5\\text{ if x>0}"), ("5", "5\\text{ mod }7"),
        ("5", "\\text{not }5"), ("5", "\\text{twice the answer is }5"), ("5", "\\text{at least }5"),
        ("5", "\\text{about }5"), ("5", "\\text{less than }5"),
        ("5", "\\text{the answer is not }5"), ("5", "5\\text{ squared}"),
        ("5", "5\\text{ cats}", DOGS), ("5", "5\\text{ cm}", METERS), ("5", "5\\text{ pm}"),
        ("5", "\\text{The square of the answer is }5"), ("5", "5\\text{ (wrong)}"),
        ("5", "5\\text{ times }2"), ("5", "\\text{minus }5"), ("5", "\\text{the opposite of }5"),
        ("5", "5\\text{ below zero}"), ("5", "5\\text{ is too small}"),
        ("5", "5\\text{ in base }6"), ("5", "5\\text{ each}"), ("5", "The answer is less than 5"),
        ("5", "One more than 5"), ("5", "5 k"), ("5", "5\\text{ tens}"),
        ("5\\text{ cm}", "5\\text{ inches}"), ("5", "\\text{I guess }5"),
        ("5", "\\text{Not sure, }5"), ("5", "5\\text{ thousandths}"), ("5", "5\\text{ and a half}"),
        ("5", "5\\text{ ft}", METERS),
    ],
    "hedged choices": [
        ("C", "(C) D"), ("C", "(C) is false"), ("C", "(C) or (D)"), ("C", "C, D"), ("C", "C and D"),
        ("C", "(C) not"), ("C", "not (C)"), ("C", "(C)(D)"), ("C", "C/D"), ("C", "\\text{C or D}"),
        ("C", "(C) 13", CHOICE), ("C", "(C) 12 (D) 13", CHOICE), ("C", "(C) maybe"), ("C", "CD"),
        ("C", "\\text{Option C or D}"), ("C", "(C), (D)"), ("C", "\\text{(C) wrong}"), ("C", "C?"),
        ("C", "C = D"), ("C", "A B C"), ("C", "(C) unless (D)"), ("C", "-C"), ("C", "C'"),
        ("C", "\\text{neither C}"),
    ],
    "the rest": [
        ("\\csc x", "\\sin^{-1}x"), ("\\arcsin x", "\\frac{1}{\\sin x}"), ("\\arctan x", "\\cot x"),
        ("a=5, b=6", "6,5"), ("a=5, b=6", "b=5, a=6"), ("a=5, b=6", "\\{5,6,7\\}"),
        ("2", "AZYUK2A"), ("\\frac{1}{3}", "0.33"), ("\\frac{1}{3}", "0.33..."),
        ("\\frac{1}{6}", "0.166"), ("2516_8", "2516_{10}"), ("2516_8", "2517"),
        ("x<2", "x<2 or x>3"), ("(2,3)", "x>2 or x<3"),
        ("(-\\infty,2)\\cup(3,\\infty)", "x<2 and x>3"), ("(2,3)", "[2,3]"), ("(2,3)", "]2,3]"),
        ("[2,3]", "]2,3["), ("x^2+C", "x^2+x"), ("x^2+C", "x^2"), ("x \\ne 5", "x = 5"),
        ("\\emptyset", "0"), ("\\emptyset", "\\{0\\}"), ("3:4", "3\\text{ to }5"), ("5", "x, 5"),
        ("x^{10}", "x^{10^9}"), ("5", "10^{10^{10}}"), ("\\frac{1}{2}", "2\\over 1"),
    ],
}  # fmt: skip

RIGHT = {
    "worked out as asked": [
        ("9a", "9a", SIMPLIFY), ("9a", "9 \\cdot a", SIMPLIFY), ("9a", "a \\cdot 9", SIMPLIFY),
        ("11\\sqrt{2}", "11√2", ROOT), ("11\\sqrt{2}", "\\sqrt{2}\\cdot 11", ROOT),
        ("11\\sqrt{2}", "x = 11\\sqrt 2", ROOT), ("x^2+5x+6", "6+5x+x^2", EXPAND),
        ("x^2+5x+6", "x^{2} + 5x + 6", EXPAND), ("(x-3)(x+3)", "(x+3)(x-3)", FACTOR),
        ("(x-3)(x+3)", "(3+x)(x-3)", FACTOR), ("\\frac{3}{11}", "3/11", DECIMAL),
        ("t^7", "t^{7}", POWERS), ("x^2+5x+4", "x^2 + 5 x + 4", COMPOSED), ("5x-2", "-2+5x", SUMS),
        ("y=2x+1", "y=1+2x", LINE), ("y=2x+1", "2x+1=y", LINE), ("y=2x+1", "2x+1", LINE),
        ("2^2\\cdot3\\cdot5", "5\\cdot3\\cdot2^2", FACTORS),
        ("\\frac{\\sqrt{3}}{3}", "\\frac13\\sqrt3", RATIONAL),
        ("\\frac{1}{2}", "1/2", "Reduce $\\frac{3}{6}$."),
        ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt3}"), ("x=5", "5", LINEAR), ("5", "x=5", LINEAR),
        ("(2,3)", "2<x<3", QUADRATIC), ("(2,3)", "x\\in(2,3)", QUADRATIC),
        ("(2,3)", "3>x>2", QUADRATIC), ("x>5", "5<x", "Solve $2x>10$."),
        ("x>5", "(5,\\infty)", "Solve $2x>10$."), ("33", "m+n=33", "Find $m+n$."),
        ("9", "a^2+b^2=9", "Find $a^2+b^2$ if $a=3b$."),
        ("\\sqrt{10}", "\\sqrt{10}", "Which is larger, $\\sqrt{10}$ or $3$?"),
        ("\\frac{3}{4}", "3:4"), ("y=\\frac{x+1}{2}", "y=\\frac12x+\\frac12"),
        ("3x-4y+1=0", "4y-3x-1=0"), ("x^2+y^2=4", "4=x^2+y^2"), ("3(x+1)", "3x+3"),
        ("x^2+2x+1", "(x+1)^2"), ("\\sin 20^\\circ", "\\cos 70^\\circ"),
        ("2\\log_2 3", "2\\frac{\\ln 3}{\\ln 2}"), ("4\\pi", "4π"),
        ("\\frac{2+\\sqrt3}{4}", "\\frac12+\\frac{\\sqrt3}{4}"),
    ],
    "other spellings": [
        ("5", "5=x"), ("\\frac{1}{3}", "0.333…"), ("\\frac{1}{3}", "0.333..."),
        ("\\frac{1}{2}", "1\\over 2"), ("\\frac{1}{2}", "{1 \\over 2}"), ("2516_8", "2516"),
        ("(-\\infty,2)\\cup(3,\\infty)", "x<2 or x>3"),
        ("(-\\infty,2)\\cup(3,\\infty)", "x<2\\text{ or }x>3"), ("(2,3)", "]2,3["),
        ("[2,3)", "[2,3["), ("(2,3)", "\\{x\\mid 2<x<3\\}"), ("(2,3)", "\\{x : 2<x<3\\}"),
        ("(2,3)", "\\{x\\in\\mathbb{R}\\mid 2<x<3\\}"), ("(2,1)", "(x,y)=(2,1)"),
        ("(2,1)", "(x,y)=(2,1)", "Find the point $(x,y)$."), ("5", "\\text{Answer: }5"),
        ("C", "\\text{Option C}"), ("C", "\\textbf{(C) }12"), ("C", "\\textbf{(C) }12", CHOICE),
        ("\\text{yes}", "\\text{Yes.}"), ("Yes", "\\text{Yes.}"), ("3:4", "3\\text{ to }4"),
        ("3:4", "3 to 4"), ("\\emptyset", "no solution"), ("\\emptyset", "\\text{No solution}"),
        ("\\text{no solution}", "\\emptyset"), ("x^2+C", "x^2+K"), ("x^2+C", "x^2+c"),
        ("x \\ne 5", "x != 5"), ("\\arcsin x", "\\sin^{-1}x"), ("\\sin^{-1} x", "\\arcsin x"),
        ("x > 2", "2 < x"), ("(-\\infty,5)\\cup(5,\\infty)", "x\\ne5"),
        ("\\frac{1}{6}", "0.1666..."), ("\\frac{2}{11}", "0.1818..."),
        ("(2,3)", "x>2\\text{ and }x<3"), ("C", "\\boxed{C}"), ("C", "\\text{C}"),
        ("C", "The answer is C"), ("C", "C) 12"), ("f^{-1}(x)=2x", "2x"),
        ("\\{1,2\\}", "1\\text{ or }2"), ("1,2", "x=1\\text{ and }x=2"), ("a=5, b=6", "5, 6"),
        ("a=5, b=6", "b=6, a=5"), ("a=5, b=6", "(5,6)"),
    ],
    "units and remarks": [
        ("6", "6 dogs", DOGS), ("6", "6\\text{ dogs}", DOGS), ("5", "5\\text{ m}", METERS),
        ("5", "5\\text{ meters}", METERS), ("5", "5\\text{ cm}"), ("25", "25\\text{ cm}^2"),
        ("25", "25\\text{ square units}", METERS),
        ("60", "60\\text{ mph}", "How fast, if it goes 60 miles in an hour?"),
        ("6\\text{ dogs}", "6"), ("5\\text{ cm}", "5"), ("5\\text{ cm}", "5\\text{ cm}"),
        ("60", "60^\\circ"), ("7.5", "\\$7.50"), ("12", "12\\text{ hours}"),
        ("3", "3\\text{ minutes}"), ("5", "The area is 5"), ("5", "\\text{The total is }5"),
        ("5", "Therefore, the answer is 5"),
        ("4", "4\\text{ solutions}", "How many solutions has it?"),
    ],
}  # fmt: skip


def pairs(table: dict[str, list[tuple[str, ...]]]) -> list[tuple[str, str, str]]:
    return [
        (each[0], each[1], "".join(each[2:])) for of_class in table.values() for each in of_class
    ]


@pytest.mark.parametrize(("gold", "answer", "question"), pairs(WRONG))
def test_an_answer_that_only_looks_right_is_not_paid(gold: str, answer: str, question: str) -> None:
    assert matches(gold, answer, 5.0, question) == 0


@pytest.mark.parametrize(("gold", "answer", "question"), pairs(RIGHT))
def test_a_right_answer_is_paid(gold: str, answer: str, question: str) -> None:
    assert matches(gold, answer, 5.0, question) == 1


def documented() -> list[tuple[str, str, str, str]]:
    """Question, gold, answer and verdict of the table in docs/answers.md."""
    page = Path(__file__).resolve().parents[3] / "docs" / "answers.md"
    section = page.read_text().partition("## What may stay open")[2].partition("These are not")[0]
    rows = [line.split("|")[1:5] for line in section.splitlines() if line.startswith("| ")]
    return [(row[0].strip(), row[1].strip(" `"), row[2].strip(" `"), row[3].strip())
            for row in rows[1:]]  # fmt: skip


def test_the_documents_table_has_twenty_examples() -> None:
    assert len(documented()) == 20


@pytest.mark.parametrize(("question", "gold", "answer", "verdict"), documented())
def test_the_documents_tell_what_is_paid(
    question: str, gold: str, answer: str, verdict: str
) -> None:
    assert matches(gold, answer, 5.0, question) == {"yes": 1, "no": 0}[verdict]


TASKS = [
    ("Simplify $\\frac{12x^5}{3x^2}$.", "4x^3", "\\frac{12x^5}{3x^2}"),
    ("Simplify $\\sqrt{75}$.", "5\\sqrt{3}", "\\sqrt{75}"),
    ("Expand $(2x-1)(x+4)$.", "2x^2+7x-4", "(2x-1)(x+4)"),
    ("Factor $x^2+7x+12$.", "(x+3)(x+4)", "x^2+7x+12"),
    ("Compute $(3+2i)+(1-5i)$.", "4-3i", "(3+2i)+(1-5i)"),
    ("Express $0.\\overline{45}$ as a common fraction.", "\\frac{5}{11}", "0.\\overline{45}"),
    ("Solve $x^2-4x+3<0$ in interval notation.", "(1,3)", "x^2-4x+3<0"),
    ("Solve $2x+y=7$ for $y$.", "y=7-2x", "2x+y=7"),
    ("Evaluate $\\log_5 \\sqrt{5}$.", "\\frac{1}{2}", "\\log_5 \\sqrt{5}"),
    ("Simplify $7p-3+2p+9$.", "9p+6", "7p-3+2p+9"),
]  # fmt: skip


def lazy(formula: str) -> Iterator[str]:
    """A formula of the question in other dress."""
    for sign, turned in (("<", ">"), ("=", "=")):
        left, found, right = formula.partition(sign)
        if found:
            yield from (formula, f"{right}{turned}{left}", f"2({left}){sign}2({right})")
            yield from (f"{left}+1{sign}{right}+1", f"-({left}){turned}-({right})")
            return
    yield from (formula, f"({formula})", f"\\left({formula}\\right)", f"x={formula}")
    yield from (f"f(x)={formula}", f"{formula}=x", f"{formula}+0", f"0+{formula}")
    yield from (f"1\\cdot({formula})", f"-(-({formula}))", f"\\frac{{2({formula})}}{{2}}")
    yield from (f"\\frac{{{formula}}}{{1}}", f"({formula})^1", f"\\text{{Answer: }}{formula}")


@pytest.mark.parametrize(("question", "gold", "formula"), TASKS)
def test_a_policy_that_only_copies_earns_nothing(question: str, gold: str, formula: str) -> None:
    assert matches(gold, gold, 5.0, question) == 1
    assert [answer for answer in lazy(formula) if matches(gold, answer, 5.0, question)] == []
