"""Answers that earn the reward and answers that do not, by class, under the default rule.

``answers.jsonl`` has a row for each. Right answers stand in odd dress; wrong ones are near misses,
work left undone, text that no one can read to its end, and what a policy finds that looks for pay:
it repeats the question, leaves work open or hedges.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from reason_llm.score.math import equivalent, matches

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("answers.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize("kind", dict.fromkeys(row["class"] for row in ROWS))
def test_right_answers_are_paid_and_no_others(kind: str) -> None:
    of_kind = [row for row in ROWS if row["class"] == kind]
    assert of_kind == [
        row | {"paid": matches(row["gold"], row["answer"], 5.0, row["question"])} for row in of_kind
    ]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1665", "(37)(45)"), ("1665", "37(45)"), ("82", "164/2"), ("12", "\\sqrt{144}"),
        ("10", "\\binom{5}{2}"),
        ("\\frac12", "\\frac13+\\frac16"), ("2", "\\log_2 4"),
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
    num_paid = sum(row["paid"] for row in ROWS)
    assert min(num_paid, len(ROWS) - num_paid) >= 200
    assert len({json.dumps(row) for row in ROWS}) == len(ROWS)


def documented() -> list[tuple[str, str, str, str]]:
    """Question, gold, answer and verdict of the tables in docs/answers.md."""
    lines = (ROOT / "docs" / "answers.md").read_text().splitlines()
    rows, is_table = list[tuple[str, str, str, str]](), False
    for line in lines:
        if line.startswith("| question | gold | answer | rewarded |"):
            is_table = True
        elif not line.startswith("|"):
            is_table = False
        elif is_table and not line.startswith("|---"):
            question, *answers, verdict = (cell.strip() for cell in line.split("|")[1:5])
            rows.append((question, answers[0].strip("`"), answers[1].strip("`"), verdict))
    return rows


def test_the_documents_tables_have_all_their_examples() -> None:
    verdicts = [verdict for *_, verdict in documented()]
    assert len(verdicts) >= 170
    assert set(verdicts) == {"yes", "no"}


@pytest.mark.parametrize(
    ("gold", "answer", "paid"),
    [("x=5", "2x=10", 0), ("x=5", "x=5", 1), ("2x+y=5", "y=5-2x", 1), ("y=5-2x", "2x+y=5", 0)],
)
def test_an_equation_is_solved_as_far_as_the_gold_one(gold: str, answer: str, paid: int) -> None:
    assert matches(gold, answer, 5.0, "Solve for the variable.") == paid


def test_the_equation_of_a_line_may_be_arranged_in_any_way() -> None:
    assert matches("y=5-2x", "2x+y=5", 5.0, "Find the line.") == 1
    assert matches("y=5-2x", "2x+y=5", 5.0, "Find the line in slope-intercept form.") == 0


@pytest.mark.parametrize(("question", "gold", "answer", "verdict"), documented())
def test_the_documents_tell_what_is_paid(
    question: str, gold: str, answer: str, verdict: str
) -> None:
    assert matches(gold, answer, 5.0, question) == {"yes": 1, "no": 0}[verdict]


@pytest.mark.parametrize(
    "kind",
    ["mm cm meters km inches feet yards miles", "mg grams kg pounds ounces", "ml liters gallons",
     "seconds minutes hours days weeks months years", "dollars cents euros", "degrees radians",
     "mph km/h m/s"],
)  # fmt: skip
def test_another_unit_than_the_one_asked_for_is_another_answer(kind: str) -> None:
    units = kind.split()
    for asked, said in zip(units, units[1:] + units[:1], strict=True):
        for unit in (asked, said):
            found = matches("5", f"5\\text{{ {unit}}}", 5.0, f"How much is it in {asked}?")
            assert found == (unit == asked), (asked, unit)


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


SOLVED = [
    f"Find $x$ if $x^2 + {a}x + {a + 1} = 0$ and $y = {a}x$, as a decimal." for a in range(40, 60)
]
"""Questions of examples, with more formulas than are read of one question."""


def chat(turn: str, *questions: str) -> str:
    """A rendered chat in which all but the last question are answered with 0.5."""
    return " 0.5\n\n".join(turn.format(question) for question in questions)


PROMPTS = {
    "labels": chat("Problem: {}\nSolution:", *SOLVED, "{}"),
    "no labels": chat("{}\n", *SOLVED, "{}"),
    "ChatML": chat("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", *SOLVED, "{}"),
    "Llama": chat("<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>", *SOLVED, "{}"),
    "Gemma": chat("<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model", *SOLVED, "{}"),
    "GPT-OSS": chat("<|start|>user<|message|>{}<|end|><|start|>assistant", *SOLVED, "{}"),
    "DeepSeek": chat("<｜User｜>{}<｜Assistant｜>", *SOLVED, "{}"),
    "Mistral": chat("[INST] {} [/INST]", *SOLVED, "{}"),
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_the_last_question_of_a_prompt_counts(prompt: str) -> None:
    prompt = prompt.replace("{}", "Factor $x^2+7x+12$.")
    assert matches("(x+3)(x+4)", "(x+4)(x+3)", 5.0, prompt) == 1
    assert matches("(x+3)(x+4)", "x^2+7x+12", 5.0, prompt) == 0


@pytest.mark.parametrize("prompt", [PROMPTS["labels"], PROMPTS["ChatML"]])
def test_a_form_that_an_example_asks_for_is_not_asked_for(prompt: str) -> None:
    assert matches("0.5", "\\frac12", 5.0, prompt.replace("{}", "Find half of one.")) == 1
    assert matches("0.5", "\\frac12", 5.0, prompt.replace("{}", "Write it as a decimal.")) == 0


@pytest.mark.parametrize(("question", "gold", "formula"), TASKS)
def test_a_policy_that_only_copies_earns_nothing(question: str, gold: str, formula: str) -> None:
    assert matches(gold, gold, 5.0, question) == 1
    assert [answer for answer in lazy(formula) if matches(gold, answer, 5.0, question)] == []
