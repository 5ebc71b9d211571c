"""Many prompts at once; the order of prompts: shuffled, mixed by weight, drawn from anywhere."""

import random
from collections import Counter
from math import factorial
from typing import Any

import pytest

from reason_llm.data.render import AT_ONCE, Renderer, order
from reason_llm.data.templates import ChatTemplate
from reason_llm.errors import DataError

NO_ODD = "{% for m in messages %}{{ 1 // (m.content != 'odd') }}{{ m.content }}\n{% endfor %}"


def test_many_prompts_at_once_are_those_made_one_by_one(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, ChatTemplate("a test's", NO_ODD), "Add.")
    questions = [f"{i} + {i}" for i in range(AT_ONCE + 9)]
    asked = [(f"row {q}", [{"role": "user", "content": q}], f"{q}!") for q in questions]
    made = renderer.prompts(asked)
    assert made == {each[0]: renderer.prompt(*each) for each in asked}
    assert made["row 1 + 1"].text == "1Add.\n11 + 1\n"
    asked[AT_ONCE][1][0]["content"] = "odd"
    again = renderer.prompts(asked)
    assert str(again.pop(asked[AT_ONCE][0])).startswith("row 256 + 256: a test's fails on it")
    assert again == {name: prompt for name, prompt in made.items() if name in again}
    assert len(again) == len(made) - 1 and renderer.prompts([]) == {}


CHANGES = {
    "all": "{{ m.content | upper }}",
    "an end": "{{ m.content | trim }}",
    "quotes": "{{ m.content | tojson }}",
    "a word at the start": "{% if m.content.startswith('Add 7') %}!{% endif %}{{ m.content }}",
    "a word at the end": "{{ m.content }}{% if m.content.endswith('7') %}!{% endif %}",
    "a word in it": "{{ m.content.replace('+', 'and') }}",
    "other scripts": "{{ m.content }}{% if m.content.isascii() %}!{% endif %}",
    "letters of others": "{{ m.content.encode('ascii', 'replace').decode() }}",
    "a very long one": "{{ m.content }}{% if m.content | length > 7000 %}!{% endif %}",
    "a long one": "{{ m.content }}{% if m.content | length > 999 %}!{% endif %}",
    "nothing": "{{ m.content }}{{ m.content.count('\n') if m.role == 'system' }}",
}
"""Templates that change some questions, by what they change."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_question_is_rendered_as_the_template_writes_it_alone(
    change: str, tokenizer: Any
) -> None:
    jinja = f"{{% for m in messages %}}<{{{{ m.role }}}}>{CHANGES[change]}{{% endfor %}}"
    renderer = Renderer(tokenizer, ChatTemplate("a test's", jinja), "Be\nbrief.")
    questions = [f"Add {n} + {m}" + "." * (n // 6) for n in range(12) for m in range(8)]
    questions += [
        " Add 7",
        'Say "7".',
        "Zähle bis 7",
        "Two\nlines",
        "<|im_end|>",
        "user",
        "7",
        *("1 + " * count + "1" for count in (300, 301, 2000)),
    ]
    asked = [(str(n), [{"role": "user", "content": q}], "1") for n, q in enumerate(questions)]
    asked.append(("x", [*asked[0][1], {"role": "assistant", "content": "0"}, *asked[1][1]], "1"))
    alone: dict[str, Any] = {}
    for each in asked:
        try:
            alone[each[0]] = renderer.prompt(*each)
        except DataError as error:
            alone[each[0]] = str(error)
    assert len({prompt.text for prompt in alone.values() if not isinstance(prompt, str)}) > 100
    made: dict[str, Any] = renderer.prompts(asked)
    assert {n: str(p) if isinstance(p, DataError) else p for n, p in made.items()} == alone


def test_order_is_a_function_of_seed_and_position() -> None:
    whole = order([10], [1.0], seed=1, start=0, count=35)
    assert sorted(whole[:10]) == list(range(10))
    assert sorted(whole[10:20]) == list(range(10))
    assert whole[:10] != whole[10:20]
    assert order([10], [1.0], seed=1, start=7, count=6) == whole[7:13]
    assert order([10], [0.3], seed=1, start=0, count=35) == whole
    assert order([10], [1.0], seed=2, start=0, count=10) != whole[:10]


def test_a_pass_is_shuffled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled: list[int] = []
    shuffle = random.Random.shuffle

    def counted(self: random.Random, items: Any) -> None:
        shuffled.append(len(items))
        shuffle(self, items)

    monkeypatch.setattr(random.Random, "shuffle", counted)
    steps = [order([997, 499], [1.0, 1.0], seed=77, start=8 * n, count=8) for n in range(20)]
    whole = order([997, 499], [1.0, 1.0], seed=77, start=0, count=160)
    assert [each for step in steps for each in step] == whole
    assert sorted(shuffled) == [499, 997]


MIXES = [
    ([10, 30], [1.0, 1.0]),
    ([10, 3, 40], [0.7, 0.2, 0.1]),
    ([5, 5, 5], [1.0, 1.0, 1.0]),
    ([7, 4], [1000.0, 1.0]),
    ([4, 7, 9, 2], [1e-3, 3.0, 1 / 3, 2.0]),
]


def set_of(index: int, sizes: list[int]) -> int:
    return next(k for k in range(len(sizes)) if index < sum(sizes[: k + 1]))


@pytest.mark.parametrize(("sizes", "weights"), MIXES)
def test_any_slice_of_a_mix_is_drawn_alone(sizes: list[int], weights: list[float]) -> None:
    whole = order(sizes, weights, seed=3, start=0, count=300)
    for start in (0, 1, 17, 150, 299):
        assert order(sizes, weights, 3, start, 300 - start) == whole[start:]
    assert [order(sizes, weights, 3, p, 1)[0] for p in range(300)] == whole


@pytest.mark.parametrize(("sizes", "weights"), MIXES)
def test_every_stretch_holds_the_proportions(sizes: list[int], weights: list[float]) -> None:
    whole = [set_of(i, sizes) for i in order(sizes, weights, seed=3, start=0, count=3000)]
    for start, count in ((0, 3000), (0, 16), (1234, 16), (1500, 701)):
        found = Counter(whole[start : start + count])
        for number, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(found[number] - count * share) < len(sizes)


@pytest.mark.parametrize(("sizes", "weights"), MIXES)
def test_each_pass_over_a_set_is_a_fresh_permutation(
    sizes: list[int], weights: list[float]
) -> None:
    whole = order(sizes, weights, seed=3, start=0, count=3000)
    for number, size in enumerate(sizes):
        mine = [i - sum(sizes[:number]) for i in whole if set_of(i, sizes) == number]
        passes = [mine[i : i + size] for i in range(0, len(mine) - size, size)]
        assert all(sorted(one) == list(range(size)) for one in passes)
        assert len({tuple(one) for one in passes}) >= 0.6 * min(len(passes), factorial(size))


def test_sets_of_one_size_are_shuffled_differently() -> None:
    both = order([50, 50], [1.0, 1.0], seed=0, start=0, count=100)
    first, second = ([i % 50 for i in both if i // 50 == k] for k in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_far_position_costs_no_more() -> None:
    assert len(order([10, 20], [0.1, 0.9], seed=0, start=10**12, count=5)) == 5
