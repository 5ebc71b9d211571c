"""What vLLM is asked and what is read of its answers, without vLLM; the phase in which it wakes."""

import random
import sys
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.sample import SamplingParams, phase, sampling, vllm_sampler
from reason_llm.sample.batches import Barrier, batch_of, turn_seed
from reason_llm.sample.transformers_sampler import TransformersSampler
from reason_llm.sample.vllm_sampler import VllmBatch, VllmSampler


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(f"p{n}", "", (1,) * n, "") for n in lengths]


def bare(**model: Any) -> Any:
    """A sampler of a model that has just this."""
    made: Any = object.__new__(VllmSampler)
    made.model = SimpleNamespace(**model)
    return made


def test_every_setting_reaches_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    own = bare(end_token_ids=[5, 6])
    params = SamplingParams(3, 12, temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, stop=("a", "b"))
    assert own._vllm_params(params, 7) == {
        "n": 3, "seed": 7, "max_tokens": 12, "temperature": 0.5, "top_p": 0.9, "top_k": -1,
        "min_p": 0.1, "stop_token_ids": [5, 6], "stop": ["a", "b"], "logprobs": 0,
        "detokenize": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip
    plain = own._vllm_params(SamplingParams(1, 1, top_k=4), 7)
    assert (plain["top_k"], plain["stop"], plain["detokenize"]) == (4, [], False)


def test_each_wave_of_a_batch_has_numbers_of_its_own_seed_and_comes_back_in_order() -> None:
    added: dict[int, Any] = {}

    class Batch:
        def __init__(self) -> None:
            self.keys: dict[int, Any] = {}

        def add(self, place: int, *asked: Any) -> None:
            self.keys[place] = added[place] = asked

        def step(self, progress: Any) -> Any:
            place = max(self.keys)  # the last one is the first to end
            return [(place, (self.keys.pop(place)[0].id,))]

    own, params = bare(), SamplingParams(1, 4)
    own.batch = lambda: nullcontext(Batch())
    first, second = prompts(1, 2), prompts(3)
    found = own.sample_together([(first, 8), (second, 8)], params, print)
    assert found == [[Group(p, (p.id,)) for p in wave] for wave in (first, second)]
    numbers = random.Random(8)
    expected = [numbers.getrandbits(62) for _ in range(2)]
    assert added == {
        place: (prompt, params, number)
        for place, (prompt, number) in enumerate(
            zip([*first, *second], [*expected, expected[0]], strict=True)
        )
    }


def test_a_choice_of_vllm_is_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "{} {} {}".format
    monkeypatch.setattr(vllm_sampler, "decode", lambda *given: [told(*given)])
    logprobs = [{7: SimpleNamespace(logprob=-0.5)}, {8: SimpleNamespace(logprob=-1.25)}]
    for reason, why in (("stop", "stop"), ("length", "length"), (None, "length")):
        choice = SimpleNamespace(token_ids=[7, 8], logprobs=logprobs, finish_reason=reason)
        made = bare(tokenizer="by", end_token_ids=[2])._completion(choice)
        assert made == Completion((7, 8), "by [(7, 8)] [2]", (-0.5, -1.25), why)


def test_requests_of_a_batch_are_known_by_vllm_s_names() -> None:
    asked: list[Any] = []
    ended = [Completion((1,) * n, "", (-1.0,) * n, "stop") for n in (2, 3)]
    outputs = [
        SimpleNamespace(finished=False, request_id="0"),
        SimpleNamespace(finished=True, request_id="1", outputs=ended),
    ]

    def enqueue(prompts: Any, params: Any, **options: Any) -> list[str]:
        asked.append((prompts, params, options))
        return [f"{len(asked) - 1}-ab"]

    engine = SimpleNamespace(
        abort_request=lambda names, internal: asked.append((names, internal)), step=lambda: outputs
    )
    sampler: Any = SimpleNamespace(
        engine=SimpleNamespace(llm=SimpleNamespace(enqueue=enqueue, llm_engine=engine)),
        sync=SimpleNamespace(request="adapter"),
        _vllm_params=lambda params, seed: (params, seed),
        _completion=lambda each: each,
    )
    batch, params, told = VllmBatch(sampler), SamplingParams(2, 4), list[Any]()
    for number, key in enumerate("abc"):
        batch.add(key, prompts(number)[0], params, 9 + number)
    options = {"lora_request": "adapter", "use_tqdm": False}
    assert asked[1] == ([{"prompt_token_ids": [1]}], [(params, 10)], options)
    assert batch.step(lambda *each: told.append(each)) == [("b", tuple(ended))]
    assert (told, list(batch.keys)) == ([(5, 2)], ["a", "c"])
    batch.keep(lambda key: key == "c")
    assert (asked[-1], batch.keys) == ((["0-ab"], True), {"c": "2-ab"})


def test_a_turn_s_seed_is_of_its_wave_its_rollout_and_its_number() -> None:
    seeds = [turn_seed(*each) for each in product((0, 1), repeat=3)]
    assert len(set(seeds)) == 8 and max(seeds) < 2**62


def test_turns_join_in_vllm_alone_and_not_where_the_same_bits_are_asked_for() -> None:
    for own, joins in ((bare(deterministic=False), True), (bare(deterministic=True), False)):
        own.batch = lambda: nullcontext("joined")
        with batch_of(own, 3) as batch:
            assert (batch == "joined") == joins == (not isinstance(batch, Barrier))
    with batch_of(TransformersSampler(own.model, 9), 3) as batch:
        assert isinstance(batch, Barrier) and batch._seed == 3


def test_vllm_wakes_before_it_takes_the_policy_s_adapter() -> None:
    done: list[str] = []
    policy = SimpleNamespace(eval=lambda: done.append("eval"))
    engine = SimpleNamespace(wake=lambda: done.append("wake"))
    model: Any = SimpleNamespace(policy=policy, engine=engine, sync=lambda: done.append("sync"))
    with sampling(model, 9) as sampler:
        assert isinstance(sampler, VllmSampler) and done == ["eval", "wake", "sync"]
    model.engine = model.sync = None
    with sampling(model, 9) as sampler:
        assert isinstance(sampler, TransformersSampler) and sampler.cache_tokens == 9


def test_the_sampler_is_proven_on_a_few_tokens_of_the_shortest_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    class Sampler:
        def sample(self, *given: Any, **named: Any) -> str:
            named.pop("progress")
            asked.append((*given, named))
            return "sampled"

    monkeypatch.setattr(phase, "prove_logprobs", lambda model, groups: {"of": groups})
    monkeypatch.setattr(phase, "_route_agreement", lambda *given: 0.5)
    monkeypatch.setattr(phase.routing, "routers", lambda policy: policy)
    own: Any = Sampler()
    routes = {"sample/route_agreement": 0.5}
    for engine, policy, more in ((None, True, {}), (1, False, {}), (1, True, routes)):
        model: Any = SimpleNamespace(engine=engine, policy=policy)
        found = phase.prove_sampler_is_policy(own, model, prompts(5, 9, 2, 7, 3))
        assert found == {"of": "sampled"} | more
    assert asked[0] == (prompts(2, 3, 5, 7), SamplingParams(2, 16), {"seed": 0})
