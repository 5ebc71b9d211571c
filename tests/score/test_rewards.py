"""Rewards on texts worked by hand, their options, and what happens when one fails."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from json_groups import group_from_json
from reason_llm.config.score import SAYS_RIGHT, RewardSpec, ScoreSection
from reason_llm.errors import ConfigError, RewardError
from reason_llm.rollout import ROW, Completion, Group, Prompt
from reason_llm.run.store.metrics import with_means
from reason_llm.score import Scorer
from reason_llm.score.custom import CustomReward
from reason_llm.score.rewards import cosine, length_in_group, repetition_penalty, soft_overlong


def group(*texts: str, answer: str = "3", extra: dict[str, Any] | None = None) -> Group:
    """Completions of as many tokens as their texts have characters."""
    made = tuple(
        Completion(tuple(map(ord, t)) or (0,), t, (0.0,) * max(1, len(t)), "stop") for t in texts
    )
    return Group(Prompt("p", "What?", (), answer, extra or {}), made)


def scores(specs: list[dict[str, Any]], *groups: Group, **section: Any) -> list[dict[str, float]]:
    """The rewards by name of every completion."""
    config = ScoreSection.model_validate({"rewards": specs, **section})
    with Scorer(config, max_new_tokens=100) as scorer:
        return [dict(c.rewards) for g in scorer.score(groups) for c in g.completions]


def reward(name: str, text: str, answer: str = "3", **options: Any) -> float:
    (found,) = scores([{"name": name, "options": options}], group(text, answer=answer))
    return found[name]


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("so \\boxed{3}", "3", 1),
        ("\\boxed{4} no, \\boxed{3}", "3", 1),
        ("\\boxed{3} no, \\boxed{4}", "3", 0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("\\boxed{\\dfrac{2}{4}}", "\\frac{1}{2}", 1),
        ("\\boxed{-3}", "3", 0),
        ("the answer is 3", "3", 0),
        ("\\boxed{3", "3", 0),
        ("\\boxed{}", "3", 0),
        ("\\boxed{37+45}", "82", 0),
        ("#### 3", "3", 0),
        ("\\boxed{4} #### 3", "3", 0),
        ("<answer>3</answer>", "3", 0),
        ("\\boxed{" + "1" * 6000 + "}", "3", 0),
    ],
)
def test_boxed(text: str, answer: str, value: float) -> None:
    assert reward("boxed", text, answer) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>1+2</think><answer>3</answer>", 1),
        ("<answer> 3\n</answer>", 1),
        ("<answer>4</answer><answer>3</answer>", 0),
        ("<answer>3</answer><answer>4</answer>", 0),
        ("<answer>4<answer>3</answer>", 0),
        ("<answer>3", 0),
        ("3", 0),
        ("\\boxed{3}", 0),
        ("<answer>1+2</answer>", 0),
        ("<answer></answer>", 0),
    ],
)
def test_think_answer_tags(text: str, value: float) -> None:
    assert reward("think_answer_tags", text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Billing and Refunds", 1),
        (" billing  AND\nrefunds\n", 1),
        ("<think>a bug? <answer>Bug</answer></think>billing and refunds", 1),
        ("<think>x</think>\nIt is <answer> Billing and refunds </answer>.", 1),
        ("<answer>billing and refunds</answer><answer>Billing and refunds</answer>", 1),
        ("refunds and billing", 0),
        ("billing and refunds.", 0),
        ("It is billing and refunds", 0),
        ("billing, bug, billing and refunds", 0),
        ("<answer>bug</answer><answer>billing and refunds</answer>", 0),
        ("<answer>billing and refunds", 0),
        ("billing and refunds</answer>", 0),
        ("<think>billing and refunds", 0),
        ("", 0),
    ],
)
def test_exact(text: str, value: float) -> None:
    assert reward("exact", text, "Billing and refunds") == value


def test_exact_reads_no_mathematics() -> None:
    assert [reward("exact", text, "bug") for text in ("bug", "gub", "b*u*g")] == [1, 0, 0]
    assert [reward("exact", text, "2.50") for text in ("2.50", "2.5", "5/2")] == [1, 0, 0]
    assert [reward("exact", text, "\u00e9t\u00e9") for text in ("E\u0301TE\u0301", "ete")] == [1, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a\nb</think>\n<answer>3</answer>\n", 1),
        ("<think></think><answer>3</answer>", 0),
        ("<think>a</think><answer> \n</answer>", 0),
        ("so <think>a</think><answer>3</answer>", 0),
        ("<think>a</think><answer>3</answer> so", 0),
        ("<think>a</think> so <answer>3</answer>", 0),
        ("<answer>3</answer><think>a</think>", 0),
        ("<think>a</think><think>b</think><answer>3</answer>", 0),
        ("<think>a</think><answer>3</answer><answer>3</answer>", 0),
        ("<think>a<answer>3</answer>", 0),
    ],
)
def test_format(text: str, value: float) -> None:
    assert reward("format", text) == value


def test_tag_count_is_a_quarter_for_each_tag_once() -> None:
    assert reward("tag_count", "<think>a</think><answer>3</answer>") == 1
    assert reward("tag_count", "<think>a</think><answer>3") == 0.75
    assert reward("tag_count", "<think><think>a</think>") == 0.25
    assert reward("tag_count", "<think> </think><answer>3</answer>") == 0.5
    assert reward("tag_count", "<think></think><answer></answer>") == 0
    assert reward("tag_count", "</answer>3<answer>") == 0
    assert reward("tag_count", "3") == 0


def test_soft_overlong_falls_over_the_cache() -> None:
    found = [soft_overlong(n, 16, 4) for n in range(11, 18)]
    assert found == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]
    assert reward("soft_overlong", "x" * 90, cache_tokens=20) == -0.5
    assert reward("soft_overlong", "x" * 25, cache_tokens=100) == -0.25  # the whole limit


def test_soft_overlong_s_own_cache_is_a_quarter_of_the_limit_and_at_most_1024() -> None:
    section = ScoreSection(rewards=[RewardSpec(name="boxed"), RewardSpec(name="soft_overlong")])
    for limit, length, value in ((100, 85, -0.4), (8192, 7936, -0.75), (2, 2, -1)):
        with Scorer(section, limit) as scorer:
            (found,) = scorer.score([group("x" * length)])
        assert found.completions[0].rewards["soft_overlong"] == value


def test_cosine_favours_short_right_answers_and_long_wrong_ones() -> None:
    ends = {"correct": (1.0, 0.5), "wrong": (-1.0, -0.5)}
    assert cosine(25, True, 100, **ends) == pytest.approx(0.92678, abs=1e-5)
    assert cosine(50, False, 100, **ends) == pytest.approx(-0.75)
    assert [cosine(n, True, 100, **ends) for n in (0, 100, 200)] == pytest.approx([1.0, 0.5, 0.5])
    right, wrong = scores(
        [{"name": "boxed", "weight": 0}, {"name": "cosine"}], group("\\boxed{3}", "\\boxed{4}")
    )
    at_nine = (1 + math.cos(math.pi * 9 / 100)) / 2
    assert right["cosine"] == pytest.approx(0.5 + 0.5 * at_nine)
    assert wrong["cosine"] == pytest.approx(-0.5 - 0.5 * at_nine)


def test_length_in_a_group() -> None:
    assert length_in_group([10, 20, 30], [True, True, True]) == [0.5, 0.0, -0.5]
    assert length_in_group([10, 20, 30], [False, False, False]) == [0.0, 0.0, -0.5]
    assert length_in_group([7, 7], [True, False]) == [0.0, 0.0]
    found = scores([{"name": "boxed"}, {"name": "length"}], group("\\boxed{3}", "so \\boxed{3}"))
    assert [f["length"] for f in found] == [0.5, -0.5]


def test_what_is_right_is_said_by_the_first_reward_whatever_stands_between(custom: Path) -> None:
    """Half right is right, 0 and less are not; tag_count pays the wrong ones. Of both groups."""
    options = {"correct": [0.9, 0.3], "wrong": [-0.8, -0.2]}
    specs = [{"custom": f"{custom}:grade", "weight": 0}, {"name": "tag_count"}, {"name": "length"},
             {"name": "cosine", "options": options}]  # fmt: skip
    texts = ["+" * 10, "<think>...", "-<think>".ljust(50)]
    found = scores(specs, group(*texts), group(*texts[::-1]))
    at_ten = (1 + math.cos(math.pi * 0.1)) / 2
    by_hand = [(0.5, 0.3 + 0.6 * at_ten), (0.0, -0.2 - 0.6 * at_ten), (-0.5, -0.5)]
    for row, pair in zip(found, [*by_hand, *by_hand[::-1]], strict=True):
        assert (row["length"], row["cosine"]) == pytest.approx(pair)


def test_a_short_program_that_passes_a_part_earns_less_than_a_long_right_one() -> None:
    tests = json.dumps({"test": "assert f(1) == 1\nassert f(2) == 4\nassert f(3) == 9"})
    programs = ["def f(x): return 1", "def f(x):\n    y = x * x\n    return y"]
    texts = [f"```python\n{program}\n```" for program in programs]
    specs: list[dict[str, Any]] = [{"name": "code_tests_fraction", "label": "part"}]
    specs += [{"name": name} for name in ("cosine", "length")]
    part, whole = scores(specs, group(*texts, answer=tests))
    assert (part["part"], whole["part"]) == (pytest.approx(1 / 3), 1)
    assert part["cosine"] < 0 < whole["cosine"] and part["length"] == 0


@pytest.mark.parametrize("first", ["format", "tag_count", "soft_overlong", "cosine", "length"])
@pytest.mark.parametrize("second", ["cosine", "length", "boxed"])
def test_rewards_that_go_by_what_is_right_need_a_first_one_that_says_it(
    first: str, second: str
) -> None:
    """With ``tag_count`` first a tiny model gave ``</answer>`` alone, and ``cosine`` 0.995."""
    specs = {name: {"name": name, "weight": 0.5} for name in (first, second)}
    if second == "boxed" and first not in ("cosine", "length"):
        assert ScoreSection.model_validate({"rewards": list(specs.values())})
        return
    with pytest.raises(ValidationError, match=f"begins with {first}, and .*such as boxed"):
        ScoreSection.model_validate({"rewards": list(specs.values())})


@pytest.mark.parametrize("first", SAYS_RIGHT)
def test_what_says_what_is_right_may_be_first(first: str) -> None:
    options = {"options": {"pattern": "x"}} if first == "regex" else {}
    rewards = [{"name": first} | options, {"name": "cosine"}]
    assert ScoreSection.model_validate({"rewards": rewards}).rewards[0].name == first


def test_length_is_no_reward_where_nothing_says_what_is_right(tmp_path: Path) -> None:
    path = tmp_path / "unsure.py"
    path.write_text("def unsure(completion):\n    return None if '?' in completion else 1.0\n")
    specs = [{"custom": f"{path}:unsure"}, {"name": "cosine"}, {"name": "length"}]
    sure, unsure = scores(specs, group("a", "b?"))
    assert not any(map(math.isnan, sure.values()))
    assert all(map(math.isnan, unsure.values()))


def test_repetition_is_counted_in_ngrams_of_tokens() -> None:
    assert repetition_penalty([1, 2, 3, 4], 2, -1.0) == 0
    assert repetition_penalty([5, 5, 5, 5, 5], 2, -0.5) == -0.375
    assert repetition_penalty([5], 2, -0.5) == 0
    assert reward("repetition_penalty", "abab", ngram=2) == pytest.approx(-1 / 3)
    assert reward("repetition_penalty", "abab", ngram=2, penalty=-0.6) == pytest.approx(-0.2)
    assert reward("repetition_penalty", "ababab") == pytest.approx(-0.5)  # aba bab aba bab


def test_the_model_s_last_turn_is_judged_and_not_the_whole_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def one(completion): return completion == 'last 1.'\n"
        "def all(completions): return [c == 'last 1.' for c in completions]\n"
        "def trl(completions, **kwargs): return [c == 'last 1.' for c in completions]\n"
    )
    specs: list[dict[str, Any]] = [{"custom": f"{path}:{n}"} for n in ("one", "all", "trl")]
    specs += [{"name": "regex", "options": {"pattern": "^last"}}, {"name": "reasoning_steps"}]
    asked = group("1. a\n<answer>4</answer>", extra={ROW: {"prompt": "x", "columns": {}}})
    last = replace(asked.completions[0], last_turn="last 1.")
    (found,) = scores(specs, replace(asked, completions=(last,)))
    assert list(found.values()) == [1, 1, 1, 1, 0]
    boxed = [{"name": name} for name in ("boxed", "think_answer_tags", "tag_count")]
    last = replace(last, last_turn="<answer>3</answer> \\boxed{3}")
    (found,) = scores(boxed, replace(asked, completions=(last,)))
    assert list(found.values()) == [1, 1, 0.5]


def test_what_trl_s_trainer_gives_beside_columns() -> None:
    def logs(completions: Any, log_extra: Any, log_metric: Any) -> Any:
        log_extra("text", completions)
        log_extra("any", [np.float32(0.5), {"a": "\ud800" * 5000}])
        for hits in (2, 5):
            log_metric("hits", hits)
        return [1.5, 1.5]

    asked = group("a", "b", extra={ROW: {"prompt": "x", "columns": {}}})
    spec = RewardSpec.model_validate({"custom": logs})
    with Scorer(ScoreSection(rewards=[spec]), 100) as scorer:
        (scored,) = scorer.score([asked])
        assert [c.rewards["logs"] for c in scored.completions] == [1.5, 1.5]
        counts = {**scorer.take_counts(), "score/errors": 3.0}
        assert with_means(counts) == {"score/errors": 3, "score/timeouts": 0, "logged/hits": 3.5}
        cut = "{'a': '" + "\\ud800" * 165 + "\\ud8"
        cut = cut[:1000]
        columns = [{"text": "a", "any": 0.5}, {"text": "b", "any": cut}]
        assert [c.logged for c in scored.completions] == columns
        stored = replace(scored, prompt=replace(scored.prompt, token_ids=(1,)))
        assert group_from_json(orjson.loads(orjson.dumps(stored))) == stored


def test_groups_that_come_one_by_one_are_scored_as_together() -> None:
    def counted(completions: Any, log_extra: Any, log_metric: Any) -> Any:
        log_extra("text", completions)
        log_metric("hits", len(completions[0]))
        if "bad" in completions:
            raise ValueError(completions[0])
        return [None if text == "none" else len(text) / 10 for text in completions]

    row = {ROW: {"prompt": "x", "columns": {}}}
    texts = [("\\boxed{3}", "3"), ("none", "\\boxed{4}"), ("a \\boxed{3}", "long \\boxed{3}")]
    groups = [group(*each, extra=row) for each in texts]
    specs = ["boxed", {"custom": counted}, "cosine", {"name": "length", "weight": 0.5}]
    with Scorer(ScoreSection.model_validate({"rewards": specs}), 100) as scorer:
        together = scorer.score(groups)
        counts = scorer.take_counts()
        assert with_means(counts)["logged/hits"] == (9 + 4 + 11) / 3
        assert scorer.score_as_they_come((n, groups[n]) for n in (2, 0, 1)) == together
        assert scorer.take_counts() == counts
        assert scorer.score([]) == []
        failing = [group("second", "bad", extra=row), group("first", "bad", extra=row)]
        with pytest.raises(RewardError, match="first"):
            scorer.score_as_they_come(zip((1, 0), failing, strict=True))
        with pytest.raises(KeyError):
            scorer.score_as_they_come((n, groups[{0: 0}[n]]) for n in (0, 1))
        assert scorer.score(groups) == together


def test_log_extra_takes_a_value_for_each_completion_and_few_columns() -> None:
    def short(completions: Any, log_extra: Any) -> Any:
        log_extra("one", completions[:1])
        return [1.0, 1.0]

    def many(completions: Any, log_extra: Any) -> Any:
        for number in range(17):
            log_extra(number, completions)
        return [1.0, 1.0]

    asked = group("a", "b", extra={ROW: {"prompt": "x", "columns": {}}})
    for function, says in ((short, "values than the 2 completions"), (many, "than 16 columns")):
        with pytest.raises(ValueError, match=says):
            CustomReward("f", 300.0, function).group(asked)


def test_a_parameter_s_default_is_taken_where_a_row_has_no_such_column() -> None:
    def near(completion: str, unit: str = "kg", answer: str = "") -> float:
        return float(completion.endswith(unit) and answer == "3")

    def all_near(completions: list[str], unit: str = "kg") -> list[float]:
        return [float(text.endswith(unit)) for text in completions]

    spec = [RewardSpec.model_validate({"custom": each}) for each in (near, all_near)]
    with Scorer(ScoreSection(rewards=spec), 100) as scorer:
        assert scorer.columns == {"unit?"}
        scored = scorer.score([group("3 kg", "3 m"), group("3 kg", "3 m", extra={"unit": "m"})])
    found = [list(c.rewards.values()) for each in scored for c in each.completions]
    assert found == [[1, 1], [0, 0], [0, 0], [1, 1]]


def test_numpy_s_numbers_and_truths_are_rewards() -> None:
    given = [np.bool_(True), np.float32(0.5), np.int64(2), np.array(False)]
    found = CustomReward("f", 300.0, lambda completions: given).group(group(*"abcd"))
    assert found == [1.0, 0.5, 2.0, 0.0]


def test_a_pattern_is_searched_within_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    spec = {"name": "regex", "options": {"pattern": "(?:a|aa)+$"}}
    assert scores([spec], group("a" * 99 + "b"), timeout_seconds=0.05) == [{"regex": 0}]
    assert "took more than 0.05 seconds on a completion of 100 characters" in caplog.text


def test_reasoning_steps_and_regex() -> None:
    text = "Step 1: add.\n2. carry\nFinally, 3 is it; the first digit stays."
    assert reward("reasoning_steps", text) == 1.0
    assert reward("reasoning_steps", text, wanted=6) == 0.5
    assert reward("reasoning_steps", "just 3") == 0.0
    assert reward("reasoning_steps", "1. add\n2. carry") == 2 / 3
    begins = "Step 12: add|  3) add|- add|* add|Firstly, add|second add|THIRD add|next add|Then add"
    assert reward("reasoning_steps", begins.replace("|", "\n"), wanted=18) == 0.5
    others = "step|2.5 is it|-5|thenceforth|so first|steps 2|12 add"
    assert reward("reasoning_steps", others.replace("|", "\n")) == 0.0
    assert reward("reasoning_steps", "1.\n2.\nFirst,\nNext:\n- </think>") == 0.0
    assert reward("reasoning_steps", "Step 1:\nadd\nStep 2:\n\n- \n**carry**") == 2 / 3
    assert reward("regex", "so a\nb.", pattern="a.b") == 1
    assert reward("regex", "ab", pattern="a.b") == 0


def test_a_pattern_pays_no_empty_tags_unless_it_asks_for_them() -> None:
    whole = "<think>.*</think>\\s*<answer>.*</answer>"
    assert reward("regex", "<think>a</think>\n<answer>3</answer>", pattern=whole) == 1
    assert reward("regex", "<think>a</think>\n<answer>\n</answer>", pattern=whole) == 0
    assert reward("regex", "<x></x> <x>a</x>", pattern="<x>[^<]*</x>") == 1
    asked = "^<think>\\n\\s*</think>.*<answer>.*</answer>"
    assert reward("regex", "<think>\n\n</think>so <answer>3</answer>", pattern=asked) == 1
    assert reward("regex", "<think>\n\n</think>so <answer></answer>", pattern=asked) == 0
    assert reward("regex", "abc", pattern="x*") == 0
    assert reward("regex", "abc", pattern="(?=.*c)(?=.*a)") == 1


OPENED = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        (OPENED, "<think>\n"),
        ("<｜User｜>What?<｜Assistant｜><think>\n", "<think>\n"),
        ("What?<start_working_out>", "<start_working_out>"),
        ("User: What?\nAssistant: <think>", "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("Think in <think> tags.<|im_end|>\n<|im_start|>assistant\n", ""),
        ("<user>What?</user>\n<assistant>\n", ""),
        ("<|assistant|>\n", ""),
        ("", ""),
    ],
)
def test_the_tag_that_a_prompt_opens(prompt: str, opened: str) -> None:
    assert Prompt("p", prompt, (), "3").opened == opened


def test_rewards_of_form_and_answers_see_the_thought_that_the_prompt_opened(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def starts(completion, prompt): return completion == 'a</think>"
                    "<answer>3</answer>' and prompt.endswith('<think>\\n')\n")  # fmt: skip
    specs = [{"name": name} for name in ("format", "tag_count", "think_answer_tags", "boxed")]
    specs += [{"name": "regex", "options": {"pattern": "^<think>.+</think>"}}]  # type: ignore[dict-item]
    specs += [{"custom": f"{path}:starts"}]
    texts = ["a</think><answer>3</answer>", "so <answer>3</answer> \\boxed{3}",
             "so \\boxed{4}</think> \\boxed{3}"]  # fmt: skip
    asked = replace(group(*texts), prompt=Prompt("p", OPENED, (), "3"))
    found = [list(each.values()) for each in scores(specs, asked)]
    assert found == [[1, 1, 1, 0, 1, 1], [0, 0.75, 0, 0, 0, 0], [0, 0.5, 0, 1, 1, 0]]
    assert [f["format"] for f in scores(specs[:1], group(texts[0]))] == [0]


def test_the_total_is_the_weighted_sum_and_the_parts_are_kept() -> None:
    section = ScoreSection(
        rewards=[RewardSpec(name="think_answer_tags"), RewardSpec(name="format", weight=0.25)]
    )
    right, wrong = "<think>a</think><answer>3</answer>", "<answer>3</answer>"
    with Scorer(section, 100) as scorer:
        (scored,) = scorer.score([group(right, wrong)])
        (judged,) = scorer.score([group(right, wrong)], only_first=True)
        assert scorer.weights == {"think_answer_tags": 1.0, "format": 0.25}
    first, second = scored.completions
    assert (first.reward, dict(first.rewards)) == (1.25, {"think_answer_tags": 1, "format": 1})
    assert (second.reward, dict(second.rewards)) == (1.0, {"think_answer_tags": 1, "format": 0})
    assert dict(judged.completions[0].rewards) == {"think_answer_tags": 1}
    assert first.token_ids == tuple(map(ord, right))


def test_programs_are_rewarded_by_their_tests() -> None:
    tests = '{"inputs": ["1 2\\n", "5 6\\n"], "outputs": ["3\\n", "11\\n"]}'
    good = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    half = "```python\nprint(11)\n```"  # fails the first one
    found = scores(
        [{"name": "code_tests"}, {"name": "code_tests_fraction"}],
        group(good, half, "no code", answer=tests),
    )
    assert [f["code_tests"] for f in found] == [1, 0, 0]
    assert [f["code_tests_fraction"] for f in found] == [1, 0.5, 0]


CUSTOM = """
import asyncio, time

def short(completion, token_ids, prompt, answer, level):
    assert prompt == "What?" and answer == "3" and len(token_ids) == len(completion)
    return level if len(completion) < 4 else 0

async def slow_length(completion):
    await asyncio.sleep(0.01)
    return len(completion)

def rank(completions):
    return [sorted(completions).index(c) for c in completions]

def broken(completion):
    if completion == "bad":
        raise KeyError("no such thing")
    return 1

def leaves(completion):
    if completion == "bad":
        raise SystemExit(0)
    return 1

def interrupts(completion):
    if completion == "bad":
        raise KeyboardInterrupt
    return 1

def hung(completion):
    if completion == "bad":
        time.sleep(600)
    return 1

def grade(completion): return {"+": 0.5, "-": -1.0}.get(completion[0], 0)
def unsure(completion): return None
def least(completion): return -1e9
def most(completion): return 1e9
def less(completion): return -1.1e9
def just_less(completion): return -1e9 - 1
def just_more(completion): return 1e9 + 1
def words(completion): return "1"
def text(completions): return "11"
def by_name(completions): return {1: 2, 3: 4}
def stops(completion): raise GeneratorExit
def both(completion, completions): return 1
def placed(completion, /): return 1

def nan(completion):
    return float("nan")

def huge(completion):
    return 10**400

def few(completions):
    return [1.0]

def of_all(completions):
    return 0.5

def silent(completions):
    pass

def endless(completions):
    while True:
        yield 1.0

def stuck(completions):
    yield 1.0
    while True:
        pass

def leaving(completions):
    yield 1.0
    raise SystemExit(3)

def by_ids(all_token_ids):
    assert type(all_token_ids[0]) is list
    return map(sum, all_token_ids)

def as_generated(completions):
    yield from map(len, completions)

def stars(*completion):
    return 1

def neither(prompt):
    return 1

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0}

def whole(completion):
    return {"score": 1.0}
"""


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    return path


def test_a_custom_reward_takes_what_it_names(custom: Path) -> None:
    found = scores(
        [
            {"custom": f"{custom}:{name}"}
            for name in ("short", "slow_length", "rank", "as_generated")
        ],
        group("bb", "aaaa", extra={"level": 7}),
    )
    assert found == [
        {"short": 7, "slow_length": 2, "rank": 1, "as_generated": 2},
        {"short": 0, "slow_length": 4, "rank": 0, "as_generated": 4},
    ]
    ends = scores([{"custom": f"{custom}:{name}"} for name in ("least", "most")], group("a"))
    assert ends == [{"least": -1e9, "most": 1e9}]
    assert scores([{"custom": f"{custom}:by_ids"}], group("b")) == [{"by_ids": 98}]
    config = ScoreSection.model_validate({"rewards": [{"custom": f"{custom}:short"}]})
    with Scorer(config, 100) as scorer:
        assert scorer.columns == {"level"}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("interrupts", r"failed on p#1 \(RuntimeError: .*mine\.py:interrupts raised Keyboard"),
        ("leaves", r"failed on p#1 \(RuntimeError: .*mine\.py:leaves raised SystemExit\(0\)"),
        ("broken", r"on p#1 \(KeyError: 'no such thing' at .*mine\.py:17\); .*on_error"),
        pytest.param(
            "hung",
            r"the reward hung failed on p#1 \(TimeoutError: .* longer than 2 s",
            marks=pytest.mark.long,
        ),
        ("nan", r"failed on p#0 \(ValueError: .*gave 'nan'; it must give a number from"),
        ("huge", r"gave '10{59}'; it must give a number from -1e\+09 to 1e\+09"),
        ("less", r"gave '-1100000000.0'; it must give a number from"),
        ("just_less", r"gave '-1000000001.0'; it must give a number from"),
        ("just_more", r"gave '1000000001.0'; it must give a number from"),
        ("words", r"gave '1'; it must give a number from"),
        (
            "whole",
            r"from -1e\+09 to .* for no reward; return one value of it, such as \[\"score\"\]",
        ),
        ("text", r"gave 11 and no list; it must give a list"),
        ("by_name", r"gave \{1: 2, 3: 4\} and no list; it must give a list"),
        ("stops", r"failed on p#0 \(RuntimeError: .*stops raised GeneratorExit"),
        ("few", r"failed on p \(ValueError: .*gave 1 rewards for 2 completions"),
        ("of_all", r"gave the number 0.5 and no list; .* one number for each completion, as TRL's"),
        ("silent", r"gave None and no list; it must give a list with one number for each"),
        ("endless", r"failed on p \(ValueError: .*gave more than 2 rewards for 2 completions"),
        ("stuck", r"failed on p \(TimeoutError: .* longer than 0\.3 s"),
        ("leaving", r"failed on p \(RuntimeError: .*leaving raised SystemExit\(3\)"),
        ("short", r"failed on p#0 \(ValueError: .*asks for 'level', which p lacks"),
    ],
)
def test_a_reward_that_fails_stops_with_the_rollout_or_counts_zero(
    custom: Path, function: str, message: str
) -> None:
    specs, asked = [{"custom": f"{custom}:{function}"}], group("fine", "bad")
    seconds = {"hung": 2.0, "stuck": 0.3}.get(function, 300.0)
    with pytest.raises(RewardError, match=message):
        scores(specs, asked, timeout_seconds=seconds)
    config = {"rewards": specs, "on_error": "zero", "timeout_seconds": seconds}
    with Scorer(ScoreSection.model_validate(config), 100) as scorer:
        (scored,) = scorer.score([asked])
        counts = scorer.take_counts()
        assert scorer.take_counts()["score/errors"] == 0
    values = [c.reward for c in scored.completions]
    assert values == ([1, 0] if function in ("leaves", "interrupts", "broken", "hung") else [0, 0])
    of_each = ("nan", "huge", "short", "less", "just_less", "just_more", "words", "whole", "stops")
    assert counts["score/errors"] == (2 if function in of_each else 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "boxd"}, r"'boxd'.*boxed, think_answer_tags"),
        ({"name": "boxed", "options": {"x": 1}}, r"option 'x' of boxed.*its options: equality"),
        ({"name": "soft_overlong", "options": {"cache_tokens": 101}}, "max_new_tokens=100; lower"),
        ({"name": "regex", "options": {"pattern": "("}}, r"'\(' is not a regular expression"),
        ({"name": "repetition_penalty", "options": {"penalty": 0.1}}, "option 'penalty'"),
        ({"name": "cosine", "options": {"correct": [math.inf, 0]}}, "option 'correct.0'"),
        ({"name": "cosine", "options": {"wrong": [0, math.nan]}}, "option 'wrong.1'"),
        ({"name": "format", "options": {"x": 1}}, r"option 'x' of format .*its options: none\)"),
        ({"custom": "python:mine.f"}, r"rewards=\[f\]\), or put it .*file\.py:f"),
        ({"custom": "nowhere.py:f"}, r"nowhere\.py does not exist"),
        ({"custom": "mine.py"}, r"must be path/to/file\.py:function"),
        ({"custom": "{mine}:nothing"}, r"has no function 'nothing'; it has short, .*rank"),
        ({"custom": "{mine}:stars"}, r"takes \* or positional"),
        ({"custom": "{mine}:placed"}, r"takes \* or positional"),
        ({"custom": "{mine}:neither"}, r"must take either completion .* it takes prompt"),
        (
            {"custom": "{mine}:compute_score"},
            r"it takes data_source.*; for verl's compute_score write .*: def score\(completion, "
            r'.*return compute_score\(data_source, completion, reward_model\["ground_truth"\], ',
        ),
        ({"custom": "{mine}:both"}, r"must take either .* it takes completion, completions"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_at_the_start(
    custom: Path, spec: dict, message: str
) -> None:
    if "custom" in spec:
        spec = {"custom": spec["custom"].replace("{mine}", str(custom))}
    with pytest.raises(ConfigError, match=message) as caught:
        Scorer(ScoreSection.model_validate({"rewards": [{"name": "gym"}, spec]}), 100)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("import nothing_of_the_sort", "ModuleNotFoundError"), ("raise SystemExit(0)", "SystemExit")],
)
def test_a_file_that_does_not_load_is_named(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    section = ScoreSection.model_validate({"rewards": [{"custom": f"{tmp_path}/bad.py:f"}]})
    with pytest.raises(ConfigError, match=rf"bad\.py cannot be imported \({problem}"):
        Scorer(section, 100)


@pytest.mark.parametrize(
    "spec", [{}, {"name": "boxed", "custom": "a.py:f"}, {"custom": "a.py:f", "options": {"x": 1}}]
)
def test_a_specification_is_one_reward(spec: dict) -> None:
    with pytest.raises(ValueError, match=r"custom"):
        ScoreSection.model_validate({"rewards": [spec]})


@pytest.mark.parametrize(
    ("first", "judged_by"),
    [({"name": "boxed"}, "accuracy"), ({"name": "boxed", "label": "mine"}, "accuracy"),
     ({"custom": "x.py:half", "label": "boxed"}, "boxed"), ({"custom": "x.py:half"}, "half"),
     ({"custom": "x.py:half", "label": "mine"}, "mine")],
)  # fmt: skip
def test_evaluation_is_told_by_the_first_reward_s_kind(
    first: dict[str, Any], judged_by: str
) -> None:
    section = ScoreSection.model_validate({"rewards": [first, {"name": "tag_count"}]})
    assert section.judged_by == judged_by
