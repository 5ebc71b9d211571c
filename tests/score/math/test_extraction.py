"""Where the final answer stands in texts written by hand."""

import pytest

from reason_llm.score.math import matches
from reason_llm.score.math.extraction import (
    candidates,
    extract_answer,
    final_boxed,
    last_answer_tags,
    last_boxed,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{\\{1, \\sqrt{2}\\}}", "\\{1, \\sqrt{2}\\}"),
        ("\\boxed{1} then \\boxed{ 2 }.", "2"),
        ("\\boxed{1} then \\boxed{2", None),
        ("\\boxed {7}", "7"),
        ("\\boxed 7", "7"),
        ("\\fbox{7}", "7"),
        ("\\boxed{The answer is \\boxed{7}}", "7"),
        ("\\boxed{}", ""),
        ("\\boxedx{7}", "x"),
        ("7", None),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{4}, \\boxed{5}",
        "\\boxed{4} \\boxed{5}",
        "\\boxed{4} \\text{ or } \\boxed{5}",
        "$x=\\boxed{4}$ and $y=\\boxed{5}$.",
        "\\boxed{4} cm or \\boxed{5} cm",
        "\\boxed 4 or \\boxed 5",
        "\\boxed{4}\n\\boxed{5}",
        "\\boxed{4}. \\boxed{5}.",
        "\\[\\boxed{4}\\]\n\\[\\boxed{5}\\]",
        "\\fbox{4}\\quad\\boxed{5}",
        "\\boxed{5}, \\boxed{4}, \\boxed{5}",
        "\\boxed{\\boxed{4}, \\boxed{5}}",
        "\\boxed{ \\boxed{4}, \\boxed{5}",
        "\\boxed{x = \\boxed{4}}; \\boxed{5}",
        "not \\boxed{3}. It is \\boxed{4} and \\boxed{5}.",
    ],
)
def test_several_boxes_side_by_side_are_one_answer_of_several_values(text: str) -> None:
    assert last_boxed(text) == "5"
    assert final_boxed(text) == extract_answer(text) == "4, 5"
    found, number = candidates(f"Thus the answer: {text}")
    assert "5" not in [*found, number]
    assert matches("4, 5", final_boxed(text), 5.0) == 1
    assert matches("5", final_boxed(text), 5.0) == 0


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"\\boxed{{5.{'0' * n}}}" for n in range(20)) + "\\boxed{5}",
        "3 + \\boxed{4}, \\boxed{5}",
        "\\boxed{4}^2 or \\boxed{5}",
        "not \\boxed{4}, \\boxed{5}",
    ],
)
def test_boxes_of_which_one_is_none_or_that_are_too_many_are_no_answer(text: str) -> None:
    assert last_boxed(text) == "5"
    assert final_boxed(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{5}",
        "\\boxed{5.0} = \\boxed{5}",
        "\\boxed{5}, \\boxed{ 5 }",
        "\\boxed{4}\n\n\\boxed{5}",
        "\\[\\boxed{4}\\]\n \n\\[\\boxed{5}\\]",
        "Half is \\boxed{4}. The sum is \\boxed{5}.",
        "It is $\\boxed{4}$. Wait, it is \\boxed{5}",
        "\\boxed{4} no, \\boxed{5}",
        "\\boxed{4}\nSo the sum is\n\\[\\boxed{5}\\]",
        "\\boxed{x = \\boxed{5}}",
        "\\boxed{4, \\boxed{5}",
        "\\boxed{4}, \\boxed{6}.\n\nTogether \\boxed{5}",
    ],
)
def test_the_last_statement_s_box_is_the_answer(text: str) -> None:
    assert final_boxed(text) == "5"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 3\n\\boxed{4}", "4"),
        ("\\boxed{4}\n#### 3", None),
        ("\\boxed{4}\n#### 4", "4"),
        ("\\boxed{4 #### 3", None),
        ("<answer>\n4 </answer> #### 3", "4"),
        ("work\n#### 1,234\n", "1,234"),
        ("#### 3\n#### 4", "4"),
        ("#### The profit is $1,250.", "1,250"),
        ("####", None),
        ("The answer is 4.", "4"),
        ("The answer is 4.5. Next", "4.5"),
        ("the answer is 3. No, the answer is $\\frac{1}{2}$, I hope", "\\frac{1}{2}"),
        ("**Answer:** 4", "4"),
        ("Answer: **4**", "4"),
        ("**Answer: 4**", "4"),
        ("The answer is **4**.", "4"),
        ("**Final Answer: (1, 2)** apples", "(1, 2) apples"),
        ("Answer: 2**3", "2**3"),
        ("The final answer is 4. I hope it is correct.", "4"),
        ("\\boxed{3}</think> The answer is 4.", "4"),
        ("<think>\\boxed{3}</think> none", "none"),
        ("#### 4<|im_end|>", "4"),
        ("#### 4</s><eos>", "4"),
        ("#### 3\n####\n", "3"),
        ("<answer>4</answer> The answer is 3.", "4"),
        ("#### 4\nThe answer is 3.", "4"),
        ("Answer = \\(4\\) and more", "4"),
        ("the answer is: \\[4\\] now", "4"),
        ("The answer is 4. The answer is", "4"),
        ("so it is 4", "so it is 4"),
        ("so it is **4**, not 5.", "4"),
        ("They differ. **No**, they are not equal.", "No"),
        ("1. **Sum** of both", "**Sum** of both"),
        ("The answer is the point $(4,1)$, not $(1,4)$.", "the point $(4,1)$"),
        ("It is **4**.\nThat is all.", "That is all"),
        ("2. **Sum**: so it is 4", "**Sum**: so it is 4"),
        ("it is x**4 + y**4", "it is x**4 + y**4"),
        ("", None),
        ("Ans: 4", "4"),
        ("It is 3. So he has 4 apples.", "So he has 4 apples"),
        ("x=-2 is rejected. The only root is $x = 3$.", "The only root is $x = 3$"),
        ("So:\nx = 3\ny = 2", "x = 3, y = 2"),
        ("So:\n- $x = 3$\n- $y = 2$.", "x = 3, y = 2"),
        ("2x = 6\nx = 3", "x = 3"),
        ("So\n\\[\nx = 3\n\\]", "x = 3"),
        ("So $$x = 3$$", "x = 3"),
        ("It is 4 <answer>4", None),
        ("<think>It is 4.", None),
        ("The answer is: $\\sqrt{2}$ is irrational", "$\\sqrt{2}$ is irrational"),
        ("**Answer:** $\\$2,664.00$", "\\$2,664.00"),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


SPELLINGS = [f"\\boxed{{5.{'0' * n}}}" for n in range(1, 10)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("".join(SPELLINGS[:8]) + "\\boxed{5}", "5"), ("".join(SPELLINGS) + "\\boxed{5}", None),
        ("\\boxed{5}" + "." * 199_991, "5"), ("\\boxed{5}" + "." * 199_992, None),
    ],
)  # fmt: skip
def test_how_far_one_looks_for_an_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_last_answer_tags() -> None:
    assert last_answer_tags("<think>3</think><answer> 4 </answer>") == "4"
    assert last_answer_tags("<answer>4</answer> so <answer>4.0</answer>") == "4.0"
    assert last_answer_tags("<answer>So it is \\boxed{4}.</answer>") == "4"
    assert last_answer_tags("<answer>It is not \\boxed{4}.</answer>") is None


@pytest.mark.parametrize(
    "text",
    [
        "<answer>3",
        "<answer>3</answer><answer> 4 </answer>",
        "<answer>4</answer> or <answer>5</answer>",
        "<answer>4 <answer>5</answer>",
        "<answer>5</answer></answer>",
        "<think><answer>5</answer></think> I do not know.",
        "<think><answer>5</answer>",
    ],
)
def test_tags_that_hedge_or_think_are_no_answer(text: str) -> None:
    assert last_answer_tags(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "<think>\\boxed{5}</think> I do not know.",
        "<think>\\boxed{5}",
        "<think>\\boxed{5}</think> So.",
        "a</think> \\boxed{5}</think> So.",
        "\\boxed{5} <think>4</think>",
        "It is not \\boxed{5}.",
        "So that the answer to it all is not \\boxed{5}.",
        "\\boxed{5} then is wrong for a number of reasons.",
        "\\boxed{5} is wrong.",
        "\\boxed{5} or 6",
        "\\boxed{5}, or maybe 6",
        "x is never equal to $\\boxed{5}$",
        "It is neither 4 nor \\boxed{5}.",
        "The wrong answer is \\boxed{5}.",
        "\\boxed{5} is not the answer.",
        "I think \\boxed{5} would be incorrect",
        "\\boxed{5}. Wait, I made a mistake: it is 6.",
        "\\boxed{5}\n\nActually, x should be 6.",
        "\\boxed{5}\n\nThe final answer is 7.",
        "\\boxed{5}\n\n**Answer:** B",
        "\\boxed{5}\n\nNo wait, that's wrong. 6.",
        "\\boxed{5}\n\nSorry, the right value is 6.",
        "\\boxed{5}\n\nThus x = 6.",
        "\\boxed{5}.\n\nCorrection: the sum is 6, so the answer is 6 and not 5.",
        "\\boxed{5}.\n\nThe answer above is wrong.",
        "\\boxed{5}. So the final answer is 6 instead of 5.",
        "This is not the answer: \\boxed{5}",
        "3 + \\boxed{5}",
        "$-\\boxed{5}$",
        "\\frac{\\boxed{5}}{2}",
        "\\sqrt{\\boxed{5}}",
        "\\boxed{5}^2",
        "2\\cdot\\boxed{5}",
        "1\\boxed{5}",
    ],
)
def test_a_box_in_the_wrong_place_is_no_answer(text: str) -> None:
    assert final_boxed(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "- \\boxed{5}",
        "**\\boxed{5}**",
        "x=\\boxed{5}",
        "\\boxed{5}^\\circ",
        "\\boxed{5}!",
        "Step 2\n\\boxed{5}",
        "Since it is not 4, the answer is \\boxed{5}.",
        "It is not hard to see that it is \\boxed{5}.",
        "\\boxed{5} is what one gets, not 4.",
        "The number of integers that are not prime is $\\boxed{5}$.",
        "Those that are neither squares nor cubes number \\boxed{5}.",
        "The number of false statements is **\\boxed{5}**",
        "The probability that it never rains is\n\\[\\boxed{5}\\]",
        "\\boxed{5} of these are not divisible by 3.",
        "He got \\boxed{5} wrong.",
        "Thus statement \\boxed{5} is false.",
        "The incorrect value is \\boxed{5}, since it is not a multiple of 4.",
        "It is not 4 but \\boxed{5}.",
        "\\boxed{5} (or else there were more).",
        "\\boxed{5} or \\(5.0\\)",
        "\\boxed{5}\n\nThe final answer is 5 apples.",
        "\\boxed{5}. Wait, let me check: $2 \\cdot 5 = 10$. Yes, it is correct.",
        "\\boxed{5}. Alternatively, we could solve $x + 3 = 8$.",
        "\\boxed{5}\n\nThe answer is shown above.",
        "\\boxed{5} (or $5.0$).",
        "\\boxed{5}. So the final answer is 5, not 6.",
        "\\boxed{5}. A first answer of 6 would be wrong.",
        "\\boxed{5}\n\nNote: a common wrong answer is 6.",
        "<think>4</think> $\\boxed{5}$",
        "<think>\\boxed{4}</think> \\boxed{5} <think>\\boxed{6}",
    ],
)
def test_a_box_of_its_own_is_the_answer(text: str) -> None:
    assert final_boxed(text) == "5"


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("He gave 8 away.\n\nSo Tom has 12 apples left.", 1),
        ("He had 20.\n= 12", 1),
        ("Tom has 12 or 13 apples.", 0),
        ("It is 12. But that is wrong.", 0),
        ("I do not think Tom has 12 apples left.", 0),
        ("He gave 12 away. So Tom has 8 apples left.", 0),
    ],
)
def test_the_last_sentence_of_an_output_without_marks_is_its_answer(text: str, paid: int) -> None:
    assert matches("12", extract_answer(text), 5.0, "How many apples has Tom left?") == paid
