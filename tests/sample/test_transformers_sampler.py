"""The sampler: what it draws, what it reports, and what finished rows cost.

1. Frequencies equal the filtered distribution.      2. Reported log-probs belong to it.
3. Greedy equals ``generate``.                       4. Batching changes nothing.
5. Finished rows leave.                              6. Same seed, same tokens.
7. The text of a completion has all its tokens but the end token.
"""

import math
from string import ascii_letters
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from transformers import PreTrainedTokenizerFast

from conftest import TINY
from families import prompts_of, quiet
from reason_llm.config import ScoreSection
from reason_llm.errors import ConfigError
from reason_llm.model.base import Model, decode, load_tokenizer
from reason_llm.rollout import Group, Prompt
from reason_llm.sample import (
    SamplingParams,
    TransformersSampler,
    stop_strings,
    stream,
)
from reason_llm.sample.transformers_sampler import draw, filtered_logprobs
from reason_llm.score import Scorer

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -torch.inf]])


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"num_completions": 4, "max_new_tokens": 20, **options})


TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@pytest.fixture
def with_special_tags() -> Any:
    """The tiny tokenizer, whose tags are special tokens."""
    made = load_tokenizer(str(TINY))
    made.add_special_tokens({"additional_special_tokens": list(TAGS)})
    return made


@pytest.fixture
def prompts(tokenizer: Any) -> list[Prompt]:
    return prompts_of(tokenizer, "What is 3 + 4?", "What is 57 + 68?", "What is 9 + 85?")


def ids(groups: list[Group]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in group.completions] for group in groups]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.7}, [0, 1]),  # probabilities .56 .21 .13 .08 .03
        ({"top_p": 0.5}, [0]),
        ({"min_p": 0.2}, [0, 1, 2]),
        ({"temperature": 2.0, "top_p": 0.75}, [0, 1, 2]),  # .36 .22 .17 .13 .08; without it .7
        ({"temperature": 2.0, "min_p": 0.3}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.7}, [0]),  # .73 of the two
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.8, "min_p": 0.5}, [0, 1]),
        ({"min_p": 0.3, "top_p": 0.7}, [0]),  # .73 of the two that min-p leaves
    ],
)
def test_draws_follow_the_filtered_distribution(options: dict, kept: list[int]) -> None:
    chosen = params(**options)
    count = 40_000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(LOGITS.expand(count, -1), chosen, uniforms)
    weights = (LOGITS[0] / chosen.temperature).exp()
    expected = torch.zeros(6)
    expected[kept] = weights[kept] / weights[kept].sum()
    frequencies = torch.bincount(tokens, minlength=6) / count
    assert torch.allclose(frequencies, expected, atol=0.01)
    assert torch.allclose(logprobs.exp(), expected[tokens], atol=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    edges = torch.tensor([0.0, 1e-12, 1 - 2**-24, 0.999999])
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(4, -1)
    tokens, logprobs = draw(logits, params(), edges)
    assert tokens.tolist() == [1, 1, 2, 2]
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 50_000),
        *(
            pytest.param(options, 200_000, marks=pytest.mark.long)
            for options in ({}, {"top_k": 500}, {"top_p": 0.9}, {"min_p": 0.01})
        ),
    ],
)
def test_draws_from_a_large_vocabulary(options: dict[str, Any], count: int) -> None:
    """By a chi-squared test; ties and tokens of no probability among them."""
    chosen, size = params(**options), 1301
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, size, generator=generator) * 2
    logits[:, 100:200] = logits[:, 300:600] = -torch.inf
    logits[:, 700:900] = 1.0
    tokens = torch.cat(
        [
            draw(logits.expand(50_000, -1), chosen, torch.rand(50_000, generator=generator))[0]
            for _ in range(count // 50_000)
        ]
    )
    expected = filtered_logprobs(logits, chosen)[0].double().exp() * count
    seen = torch.bincount(tokens, minlength=size)
    assert not seen[expected == 0].any()
    often = expected > 5
    squares = ((seen - expected).square() / expected)[often].sum()
    degrees = int(often.sum()) - 1
    assert squares < degrees + 4 * (2 * degrees) ** 0.5


def test_the_edges_of_blocks(vocabulary: int = 1300) -> None:
    """The token at the middle of each one's share is drawn, whichever block it lies in."""
    logits = torch.zeros(1, vocabulary)
    uniforms = (torch.arange(vocabulary) + 0.5) / vocabulary
    tokens, logprobs = draw(logits.expand(vocabulary, -1), params(), uniforms)
    assert tokens.tolist() == list(range(vocabulary))
    assert torch.allclose(logprobs, torch.full_like(logprobs, -math.log(vocabulary)))
    alone = logits.index_fill(1, torch.tensor([vocabulary - 1]), 50.0)
    assert draw(alone, params(), torch.tensor([1 - 2**-24]))[0].tolist() == [vocabulary - 1]


def test_top_k_larger_than_the_vocabulary_keeps_all() -> None:
    assert torch.equal(
        filtered_logprobs(LOGITS, params(top_k=100)), filtered_logprobs(LOGITS, params())
    )


def test_greedy_equals_generate(model: Model, prompts: list[Prompt]) -> None:
    sampler = TransformersSampler(model, cache_tokens=10**6)
    groups = sampler.sample(prompts, params(num_completions=1, temperature=0.0), 0, quiet)
    for group, prompt in zip(groups, prompts, strict=True):
        output = model.policy.generate(
            input_ids=torch.tensor([prompt.token_ids]),
            attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=20,
        )
        expected = output[0, len(prompt.token_ids) :].tolist()
        (completion,) = group.completions
        assert list(completion.token_ids) == expected
        assert completion.finish_reason == ("stop" if expected[-1] == 2 else "length")


def test_text_is_the_tokens_decoded_without_the_end(
    model: Model, prompts: list[Prompt], tokenizer: Any
) -> None:
    for group in TransformersSampler(model, 10**6).sample(prompts, params(), 0, quiet):
        for completion in group.completions:
            assert "<|im_end|>" not in completion.text
            whole = tokenizer.decode(completion.token_ids)
            assert whole == completion.text + ("<|im_end|>" if whole.endswith("|>") else "")


@pytest.mark.parametrize("cache_tokens", [40, 100, 200])
def test_batching_changes_neither_tokens_nor_order(
    model: Model, prompts: list[Prompt], cache_tokens: int
) -> None:
    whole = TransformersSampler(model, 10**6).sample(prompts, params(), 5, quiet)
    parts = TransformersSampler(model, cache_tokens).sample(prompts, params(), 5, quiet)
    assert ids(parts) == ids(whole)
    for a, b in zip(whole, parts, strict=True):
        assert a.prompt == b.prompt
        for x, y in zip(a.completions, b.completions, strict=True):
            assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)


@pytest.mark.parametrize("cache_tokens", [100, 10**6])
def test_a_group_is_reported_when_it_ends(
    model: Model, prompts: list[Prompt], cache_tokens: int
) -> None:
    """The last report comes after the last step, and the first one before it."""
    events: list[Any] = []
    groups = TransformersSampler(model, cache_tokens).sample(
        prompts, params(max_new_tokens=40), 5,
        lambda tokens, items: events.append(None), lambda *ended: events.append(ended),
    )  # fmt: skip
    reported = [each for each in events if each is not None]
    assert sorted(reported, key=lambda ended: ended[0]) == list(enumerate(groups))
    assert events[-1] is not None
    assert None in events[events.index(reported[0]) :]


def test_seeds(model: Model, prompts: list[Prompt]) -> None:
    sampler = TransformersSampler(model, 10**6)
    first = sampler.sample(prompts, params(), 1, quiet)
    torch.manual_seed(99)  # the global generator has no say
    assert sampler.sample(prompts, params(), 1, quiet) == first
    assert ids(sampler.sample(prompts, params(), 2, quiet)) != ids(first)
    completions = [c.token_ids for group in first for c in group.completions]
    assert len(set(completions)) > len(completions) / 2


def test_finish_reasons_and_lengths(model: Model, prompts: list[Prompt]) -> None:
    (group, *_) = TransformersSampler(model, 10**6).sample(
        prompts, params(max_new_tokens=3), 0, quiet
    )
    assert {c.finish_reason for c in group.completions} == {"length"}
    assert {len(c.token_ids) for c in group.completions} == {3}
    for group in TransformersSampler(model, 10**6).sample(
        prompts, params(max_new_tokens=60), 0, quiet
    ):
        for completion in group.completions:
            ended = completion.token_ids[-1] in model.end_token_ids
            assert (completion.finish_reason == "stop") == ended
            assert not set(completion.token_ids[:-1]) & set(model.end_token_ids)


@pytest.mark.parametrize("strings", [("1",), ("</answer>",), ("12", "er>")])
def test_stop_strings_end_completions_where_their_text_first_holds_one(
    model: Model, prompts: list[Prompt], strings: tuple[str, ...]
) -> None:
    sampler = TransformersSampler(model, 10**6)
    free = sampler.sample(prompts, params(max_new_tokens=40), 3, quiet)
    ended = sampler.sample(prompts, params(max_new_tokens=40, stop=strings), 3, quiet)
    by_string = 0
    for before, after in zip(free, ended, strict=True):
        for whole, cut in zip(before.completions, after.completions, strict=True):
            assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
            assert cut.logprobs == pytest.approx(whole.logprobs[: len(cut.logprobs)], abs=1e-4)
            holds = any(string in cut.text for string in strings)
            assert cut.text == whole.text or holds
            (one_less,) = decode(model.tokenizer, [cut.token_ids[:-1]])
            assert not any(string in one_less for string in strings)
            if holds:
                assert cut.finish_reason == "stop"
                by_string += cut.token_ids[-1] not in model.end_token_ids
    assert by_string


def test_an_end_in_the_last_token_that_is_allowed_is_an_end(
    model: Model, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, most = TransformersSampler(model, 10**6), params(num_completions=1, max_new_tokens=1)
    [cut] = sampler.sample(prompts[:1], most, 3, quiet)
    assert cut.completions[0].finish_reason == "length"
    monkeypatch.setattr(
        model, "end_token_ids", [*model.end_token_ids, cut.completions[0].token_ids[0]]
    )
    [ended] = sampler.sample(prompts[:1], most, 3, quiet)
    assert ended.completions[0].token_ids == cut.completions[0].token_ids
    assert ended.completions[0].finish_reason == "stop"


def test_the_chat_ends_at_a_stop_string(model: Model, prompts: list[Prompt]) -> None:
    options = params(num_completions=1, max_new_tokens=40, stop=("1", "2", "3"))
    [group] = TransformersSampler(model, 10**6).sample(prompts[:1], options, 3, quiet)
    assert tuple(stream(model, prompts[0], options, 3)) == group.completions[0].token_ids
    assert group.completions[0].text[-1] in "123"


def test_a_stop_string_that_no_token_can_write_is_refused() -> None:
    letters = BPE({letter: number for number, letter in enumerate(ascii_letters)}, [])
    rust = Tokenizer(letters)
    rust.decoder, rust.normalizer = Fuse(), Lowercase()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="z")
    assert stop_strings(tokenizer, ()) is None
    assert stop_strings(tokenizer, ("two",)) is stop_strings(tokenizer, ("two",)) is not None
    for strings in (("two", "☃"), ("Two",), ("o", "Two")):
        with pytest.raises(
            ConfigError, match=rf"stop='{strings[-1]}': the tokenizer does not write"
        ):
            stop_strings(tokenizer, strings)


def test_progress_counts_every_token_and_completion(model: Model, prompts: list[Prompt]) -> None:
    told: list[tuple[int, int]] = []
    groups = TransformersSampler(model, 100).sample(
        prompts, params(), 0, lambda tokens, items: told.append((tokens, items))
    )
    completions = [c for group in groups for c in group.completions]
    assert sum(tokens for tokens, _ in told) == sum(len(c.token_ids) for c in completions)
    assert sum(items for _, items in told) == len(completions)


def test_finished_rows_cost_nothing(
    model: Model, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the decoder is given, summed over steps: at most an eighth more than tokens."""
    rows_given = 0
    original = model.hidden_states

    def counting(ids_BT: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal rows_given
        rows_given += ids_BT.shape[0] if ids_BT.shape[1] == 1 else 0
        return original(ids_BT, *args, **kwargs)

    monkeypatch.setattr(model, "hidden_states", counting)
    groups = TransformersSampler(model, 10**6).sample(
        prompts, params(num_completions=16, max_new_tokens=200, temperature=2.5), 0, quiet
    )
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    assert max(lengths) > 2.5 * sum(lengths) / len(lengths), "the wave is not of mixed lengths"
    assert rows_given <= 1.15 * sum(lengths)
    assert rows_given < 0.45 * len(lengths) * max(lengths)


# 7. The text of a completion


def test_tags_that_are_special_tokens_are_in_the_text_and_paid(
    shared_model: Model, with_special_tags: Any, prompts: list[Prompt], monkeypatch: Any
) -> None:
    """The tiny model as it is writes its answers in tags; a format reward sees them."""
    config = ScoreSection.model_validate({"rewards": [{"name": "format"}]})
    with Scorer(config, max_new_tokens=40) as scorer, shared_model.using("reference"):
        scored = []
        for tokenizer in (shared_model.tokenizer, with_special_tags):
            monkeypatch.setattr(shared_model, "tokenizer", tokenizer)
            sampler = TransformersSampler(shared_model, 10_000)
            scored.append(
                scorer.score(sampler.sample(prompts, params(max_new_tokens=40), 3, quiet))
            )
    assert scored[0] == scored[1]
    rewards = [c.reward for group in scored[0] for c in group.completions]
    assert sum(reward or 0.0 for reward in rewards) > 0


def test_the_text_is_that_of_all_tokens_but_the_end_token(with_special_tags: Any) -> None:
    by, ends = with_special_tags, (0, 2)
    ids = by.encode("<think>a</think><answer>7</answer>", add_special_tokens=False)
    for end in ([2], [0], []):
        assert decode(by, [[*ids, *end]], ends) == ["<think>a</think><answer>7</answer>"]
    turns = [*ids, 2, 1, *ids, 2]
    (text,) = decode(by, [turns], ends)
    tags = "<think>a</think><answer>7</answer>"
    assert text == f"{tags}<|im_end|><|im_start|>{tags}"
    assert decode(by, [[*ids, 1], [2], [2, 2], []], ends) == [
        f"{tags}<|im_start|>", "", "<|im_end|>", "",
    ]  # fmt: skip
    by.clean_up_tokenization_spaces = True
    spaced = by.encode("It is 7 , not 8 .", add_special_tokens=False)
    assert decode(by, [spaced], ends) == ["It is 7 , not 8 ."]
