"""The least seconds of a step, by hand: 7.6 billion parameters on an RTX 4090."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_memory import card_config

from conftest import ROOT
from reason_llm.config import Config, load
from reason_llm.model.plan import OutsideModel, bound, plan_only
from reason_llm.model.plan.bound import CARDS, Sizes
from reason_llm.model.plan.machine import Machine
from reason_llm.model.plan.outline import outline
from reason_llm.model.plan.states import States
from reason_llm.model.plan.team_sizes import TeamSizes

BASE = 28 * (3584 * (3584 + 512 + 512 + 3584) + 3 * 3584 * 18944)
HEAD = 3584 * 152064
PROMPT, NEW, PROMPTS, GROUP = 256, 1024, 16, 8
SIZES = Sizes(context=PROMPT + NEW, pool_bytes=10**12, micro_batch=16384, at_once=64)


def found(folder: Path, **changes: Any) -> dict[str, bound.Phase]:
    sample = {"sample__prompts_per_step": PROMPTS, "sample__completions_per_prompt": GROUP}
    config, shape = card_config(folder, **(sample | changes))
    shape = replace(shape, adapter=0)
    assert sum(shape.packable) == BASE and shape.vocabulary * shape.hidden == HEAD
    return {phase.name: phase for phase in bound.phases(config, shape, SIZES)}


def test_a_decoded_token_reads_the_weights_and_its_own_cache(tmp_path: Path) -> None:
    sampling = found(tmp_path)["sampling"]
    rollouts, kept = PROMPTS * GROUP, 28 * 2 * 512 * 2
    waves = rollouts / 64
    assert sampling.read_bytes == pytest.approx(
        NEW * waves * 2 * (BASE + HEAD) + kept * rollouts * NEW**2 / 2
    )
    assert sampling.flops == pytest.approx(
        2 * BASE * (PROMPTS * PROMPT + rollouts * NEW) + 2 * HEAD * rollouts * NEW
    )
    assert sampling.limit(CARDS[0]) == "memory bandwidth"
    assert sampling.seconds(CARDS[0]) == sampling.read_bytes / 1.008e12
    packed = found(tmp_path, model__quantize="nf4")["sampling"]
    assert packed.read_bytes < 0.4 * sampling.read_bytes


def test_layers_with_a_window_read_no_more_than_it(tmp_path: Path) -> None:
    """Of 28 layers 7 read at most 256 tokens: of 1024 decoded ones 256²/2 + 768 * 256, not 1024²/2.
    In the cache a rollout takes half of its 1024 tokens on average and its part of the prompt, but
    in those 7 layers 256 tokens at most, so that more rollouts fit."""
    config, shape = card_config(
        tmp_path, sample__prompts_per_step=1, sample__completions_per_prompt=16
    )
    shape = replace(shape, adapter=0, windows=((512, 256),) * 7)
    assert shape.cached == 28 * 512
    assert shape.read_elements(NEW) == 512 * (21 * 1024**2 / 2 + 7 * (256**2 / 2 + 768 * 256))
    assert shape.key_elements(1280) == 512 * (21 * 1280 + 7 * 256)
    sizes = replace(SIZES, pool_bytes=2048 * 28 * 512 * 4, frees_windows=True)
    (sampling, *_) = bound.phases(config, shape, sizes)
    held = 512 * (21 * (256 / 16 + 512) + 7 * 256)
    at_once = 2048 * 28 * 512 / held
    assert sampling.read_bytes == pytest.approx(
        NEW * 16 / at_once * 2 * (BASE + HEAD) + 16 * 4 * shape.read_elements(NEW)
    )


def test_recurrent_states_leave_room_for_fewer_sequences(tmp_path: Path) -> None:
    """A rollout has half of its 1024 tokens and an eighth of the prompt in the cache on average,
    and its states. The weights are read once for as many as fit, and each reads its states and
    writes them again for every token."""
    config, shape = card_config(
        tmp_path, sample__prompts_per_step=PROMPTS, sample__completions_per_prompt=GROUP
    )
    state, keys = 48 * 2**20, 4 * 28 * 512 * (PROMPT / GROUP + NEW / 2)
    shape = replace(shape, adapter=0, states=States(layers=24, elements=state // 4))
    fit = 10
    sizes = replace(SIZES, pool_bytes=int(fit * (keys + 2 * state)), state_bytes=2 * state)
    assert sizes.sequences(0) == pytest.approx(fit * (keys + 2 * state) / (2 * state))
    (sampling, *_) = bound.phases(config, shape, sizes)
    waves = PROMPTS * GROUP / fit
    of_states = 2 * state * PROMPTS * GROUP * NEW
    assert sampling.read_bytes == pytest.approx(
        NEW * waves * 2 * (BASE + HEAD) + 4 * PROMPTS * GROUP * shape.read_elements(NEW) + of_states
    )


def test_the_plan_of_qwen3_5_and_its_time_have_as_many_sequences() -> None:
    """In a step of 512 rollouts. States take 49.5 MiB (docs/configs.md), and twice that with
    vLLM's prefix cache."""
    options = {"sample.prompts_per_step": 64}
    plan = plan_only(load(ROOT / "configs" / "math_qwen3.5-9b_24gb.yaml", options))
    found = outline(plan.config.model)
    assert plan.engine is not None and found is not None
    pool, most, states = plan.engine.kv_cache_bytes, plan.engine.max_sequences, 99 * 2**20
    sizes = Sizes(plan.context_tokens, pool, plan.micro_batch_tokens, most, state_bytes=states)
    assert int(sizes.sequences(0)) == plan.short_sequences < most
    assert bound.phases(plan.config, found.shape, sizes)[0] == plan.phases[0]


def test_each_of_two_cards_reads_all_weights_for_half_of_the_rollouts(tmp_path: Path) -> None:
    """128 rollouts, 64 at once: one card decodes two waves, and each of two decodes one. With 32 at
    once of a step of 32, two cards read the weights as often as one."""
    config, shape = card_config(
        tmp_path, sample__prompts_per_step=PROMPTS, sample__completions_per_prompt=GROUP
    )
    shape, kept = replace(shape, adapter=0), 28 * 2 * 512 * 2

    def shared(config: Config, cards: int) -> list[bound.Phase]:
        return bound.phases(config, shape, SIZES, team=TeamSizes(cards=cards))

    (one, alone), (half, learned) = shared(config, 1), shared(config, 2)
    assert (half.read_bytes, half.flops) == (one.read_bytes / 2, one.flops / 2)
    assert (learned.flops, learned.tokens) == (alone.flops / 2, alone.tokens / 2)
    sampler = TeamSizes(samplers=1)
    assert bound.phases(config, shape, SIZES, team=sampler) == [half, alone]
    small = config.with_options({"sample.prompts_per_step": 4})
    for cards in (1, 2, 4):
        sampling = shared(small, cards)[0]
        cached = kept * 4 * GROUP / cards * NEW**2 / 2
        assert sampling.read_bytes == pytest.approx(NEW * 2 * (BASE + HEAD) + cached)
        assert sampling.flops == shared(small, 1)[0].flops / cards


def test_a_teacher_reads_padded_rows_once_and_unpacks_its_weights(tmp_path: Path) -> None:
    changes = {"algorithm__name": "opd", "teacher__model": "x", "teacher__quantize": "nf4"}
    config, shape = card_config(tmp_path, sample__completions_per_prompt=2, **changes)
    reading = partial(bound.reading, "the teacher", "nf4", replace(shape, attention_layers=7))
    teacher = OutsideModel("teacher", 0, lambda tokens, chunk_tokens: 0, reading)
    phases = bound.phases(config, shape, SIZES, [teacher])
    assert (
        bound.phases(config, shape, SIZES, [teacher], TeamSizes(cards=2))[1] == phases[1]
    )  # by the head
    assert [phase.name for phase in phases] == ["sampling", "the teacher", "learning"]
    rows, context = 2 * config.sample.prompts_per_step, PROMPT + NEW
    of_attention = 4 * 3584 * 7 * rows * context**2 / 2
    products = 2 * BASE * rows * context + 2 * HEAD * rows * NEW
    assert phases[1].flops == pytest.approx(products + of_attention)
    assert phases[1].read_bytes == pytest.approx(max(1, rows * context / 16384) * BASE * 4.5)
    assert phases[1].tokens == rows * context


def test_a_reward_model_over_the_base_reads_the_rollouts_once(tmp_path: Path) -> None:
    """All of a step on the first card, packed, with a head of one output."""
    paid = {"name": "reward_model", "options": {"path": str(tmp_path / "adapter")}}
    rewards = [{"name": "boxed", "weight": 0}, paid]
    changes = {"sample__prompts_per_step": PROMPTS, "score__rewards": rewards}
    config, shape = card_config(tmp_path, **changes, sample__completions_per_prompt=GROUP)
    shape = replace(shape, adapter=0)
    for cards in (1, 2):
        phases = bound.phases(config, shape, SIZES, team=TeamSizes(cards=cards))
        assert [phase.name for phase in phases] == ["sampling", "the reward model", "learning"]
        tokens = PROMPTS * PROMPT + PROMPTS * GROUP * NEW
        pairs = PROMPTS * PROMPT**2 / 2 + PROMPTS * GROUP * (NEW * PROMPT + NEW**2 / 2)
        assert phases[1].flops == pytest.approx(2 * BASE * tokens + 4 * 3584 * 28 * pairs)
        assert phases[1].read_bytes == pytest.approx(tokens / 16384 * 2 * BASE)
        assert phases[1].tokens == tokens


def test_a_separate_reward_model_reads_the_rollouts_once(tmp_path: Path) -> None:
    config, _ = card_config(tmp_path, sample__completions_per_prompt=2)
    phase = bound.classifying("the reward model", 10**9, 28 * 3584, 2, config, SIZES)
    rows, context = 2 * config.sample.prompts_per_step, PROMPT + NEW
    assert phase.flops == pytest.approx(
        2e9 * rows * context + 4 * 28 * 3584 * rows * context**2 / 2
    )
    assert phase.read_bytes == pytest.approx(max(1, rows * context / 16384) * 2e9)


def test_learning_is_two_passes_and_one_again_for_checkpointing(tmp_path: Path) -> None:
    """A prompt goes through once; the base has no gradient of its own."""
    tokens, trained = PROMPTS * PROMPT + PROMPTS * GROUP * NEW, PROMPTS * GROUP * NEW
    pairs = PROMPTS * PROMPT**2 / 2 + PROMPTS * GROUP * (NEW * PROMPT + NEW**2 / 2)

    def flops(base: float, attention: float, head: float) -> float:
        of_attention = 4 * 3584 * 28 * pairs * attention
        return 2 * BASE * tokens * base + of_attention + 2 * HEAD * trained * head

    for changes, expected in (
        ({"train__gradient_checkpointing": False}, flops(2, 3.5, 2)),
        ({}, flops(3, 4.5, 2)),
        ({"train__epochs": 2}, flops(7, 10, 5)),  # and what the policy was before
        ({"algorithm__name": "grpo", "algorithm__kl": "k3"}, flops(4, 5.5, 3)),
    ):
        learning = found(tmp_path, **{"algorithm__name": "dapo"} | changes)["learning"]
        assert learning.flops == pytest.approx(expected), changes
        assert learning.limit(CARDS[0]) == "arithmetic"
    ppo = found(tmp_path, algorithm__name="ppo", critic__updates=2)[
        "learning"
    ]  # old, KL and values; the critic has a head of one output
    assert ppo.flops == pytest.approx(flops(3 + 3 * 3, 3 + 3 * 4.5, 2 + 2))
    full = found(tmp_path, algorithm__name="dapo", model__train="full")["learning"]
    assert full.flops == pytest.approx(flops(4, 4.5, 4))
    padded = found(tmp_path, algorithm__name="dapo", train__packing="padded")["learning"]
    assert padded.flops > flops(3, 4.5, 2)


def test_the_line(tmp_path: Path) -> None:
    phases = [bound.Phase("sampling", 0, 1.008e12, 0), bound.Phase("learning", 3 * 165.2e12, 0, 0)]
    assert bound.line(phases, CARDS[:1], 1800, 24) == (
        "a step of full length takes at least 4.0 s on an RTX 4090, "
        "learning 75% of it (limited by arithmetic); 1,800 steps at least 2.0 h; not counted: "
        "starts, saves, dropped groups, and the unpacking of NF4 while sampling"
    )
    for seconds, told in ((9.94, "9.9"), (10.0, "10"), (2000.4, "2,000")):
        phase = bound.Phase("sampling", seconds * 165.2e12, 0, 0)
        assert f"at least {told} s on" in bound.line([phase], CARDS[:1], 1, 24)
    assert "step time unknown: data sheets are known for RTX 4090, " in bound.line(
        phases, [], 1, 24
    )
    phases[0] = bound.Phase("sampling", 0, 4 * 0.936e12, 0)
    assert (
        " on 2 times an RTX 4090, sampling 55% of it (limited by memory bandwidth); 450 steps "
        "at least 0.8 h (RTX 3090: 11 s, 1.4 h; L4 with 22.5 GiB, too small for this plan: 17 s, "
        "2.1 h); not counted: "
    ) in bound.line(phases, CARDS[:3], 450, 24, TeamSizes(cards=2))
    for steps, told in ((25_700, "47.9 h"), (25_740, "2.0 days")):  # 6.714 s each
        assert f"steps at least {told}; not" in bound.line(phases, CARDS[:1], steps, 24)


def test_evaluations_are_counted_where_their_size_is_known(tmp_path: Path) -> None:
    """With one before the first step and one after the last, 300 steps have 1 + 300 // 40 + 1
    evaluations. Each decodes 2 x 500 problems once, of 512 tokens each; 64 at once, that reads the
    weights 1000 / 64 times for every token."""
    changes = {
        "run__steps": 300, "eval__every": 40, "data__eval": "x", "eval__sets": {"math": "y"},
        "eval__max_new_tokens": 512,
    }  # fmt: skip
    config, shape = card_config(tmp_path, **changes, eval__limit=500)
    shape = replace(shape, adapter=0)
    found = bound.evaluations(config, shape, SIZES)
    assert str(found) == "9 evaluations of up to 1,000 problems"
    (phase,) = found.phases
    prompt, kept = PROMPT + NEW - 512, 28 * 2 * 512 * 2
    assert phase.read_bytes == pytest.approx(
        512 * 1000 / 64 * 2 * (BASE + HEAD) + kept * 1000 * 512**2 / 2
    )
    assert phase.flops == pytest.approx(2 * BASE * 1000 * (prompt + 512) + 2 * HEAD * 1000 * 512)
    card, phases = CARDS[0], [bound.Phase("learning", 36 * CARDS[0].flops, 0, 0)]
    hours = 3 + 9 * phase.seconds(card) / 3600
    said = bound.line(phases, [card], 300, 24, evaluations=found)
    assert f"; 300 steps and 9 evaluations of up to 1,000 problems at least {hours:.1f} h;" in said
    sampled = config.with_options({"eval.samples": 4, "eval.every": 0})
    told = bound.evaluations(sampled, shape, SIZES)
    assert str(told) == "2 evaluations of up to 1,000 problems x 4 completions"
    assert told.phases[0].tokens == pytest.approx(1000 * prompt + 4000 * 512)
    many = config.with_options({"eval.limit": None})
    found = bound.evaluations(many, shape, SIZES)
    said = bound.line(phases, [card], 300, 24, evaluations=found)
    assert "; 300 steps at least 3.0 h; not counted: " in said
    assert said.endswith("; nor the 9 evaluations, whose size is known if eval.limit is set")
    config, _ = card_config(tmp_path, run__steps=300)
    found = bound.evaluations(config, shape, SIZES)
    assert "evaluations" not in bound.line(phases, [card], 300, 24, evaluations=found)


def test_held_out_rows_pass_the_model_once(tmp_path: Path) -> None:
    changes = {"stage": "sft", "eval__rows": "x", "eval__limit": 100}
    config, shape = card_config(tmp_path, run__steps=20, **changes)
    shape = replace(shape, adapter=0)
    found = bound.evaluations(config, shape, SIZES)
    assert str(found) == "3 evaluations of up to 100 rows"
    tokens = 100 * (PROMPT + NEW)
    of_attention = 4 * 3584 * 28 * 100 * (PROMPT + NEW) ** 2 / 2
    assert found.phases[0].flops == pytest.approx(2 * (BASE + HEAD) * tokens + of_attention)


def test_a_plan_by_epochs_leaves_the_number_of_steps_open() -> None:
    """It reads no data, which decides it."""
    config = load(ROOT / "configs" / "gsm8k_qwen2.5-7b_24gb.yaml", {"run.epochs": 2})
    (said,) = [line for line in plan_only(config).table() if "a step of full length" in line]
    assert " h " not in said and " steps and " not in said
    assert said.endswith("; the data decides how many steps run.epochs=2 has")
    config = load(ROOT / "configs" / "gsm8k_qwen2.5-7b_24gb.yaml")
    (said,) = [line for line in plan_only(config).table() if "a step of full length" in line]
    assert "; 300 steps and 13 evaluations of up to 500 problems " in said


@pytest.mark.parametrize(
    ("is_ahead", "told"),
    [
        (False, "110 s on an RTX 4090 and 1 more that sample, learning 55% of it"),
        (True, "60 s on an RTX 4090 and 1 more that sample at the same time, learning 55% of "),
    ],
)
def test_a_sampler_that_samples_ahead_hides_sampling(is_ahead: bool, told: str) -> None:
    (card,) = CARDS[:1]
    sampling = bound.Phase("sampling", 0, 50 * card.bandwidth, 0)
    phases = [sampling, bound.Phase("learning", 60 * card.flops, 0, 0)]
    team = TeamSizes(samplers=1, samples_ahead=is_ahead)
    assert f"at least {told}" in bound.line(phases, [card], 1, 24, team)


def test_the_samplers_of_a_config_are_planned() -> None:
    options = {"run.samplers": 2, "run.max_staleness": 1, "memory.budget_gib": 24}
    config = load(ROOT / "configs" / "gsm8k_qwen2.5-1.5b_24gb.yaml", options)
    (told,) = [line for line in plan_only(config).table() if "a step of full length" in line]
    assert " and 2 more that sample at the same time, " in told


@pytest.mark.parametrize(
    ("gib", "told"),
    [
        (22.5, "RTX 4090, RTX 3090, L4"),
        (24, "RTX 4090, RTX 3090, L4 with 22.5 GiB, too small for this plan"),
        (31.8, "RTX 5090"), (32, "RTX 5090 with 31.8 GiB, too small for this plan"),
        (40, "A100 SXM 40GB"),
        (45, "RTX A6000, L40S"), (48, "RTX A6000, L40S with 45.0 GiB, too small for this plan"),
        (79.6, "H100 SXM, A100 SXM 80GB"),
        (80, "H100 SXM with 79.6 GiB, too small for this plan, A100 SXM 80GB"),
        (141, "H200 SXM with 140.4 GiB, too small for this plan"),
    ],
)  # fmt: skip
def test_a_card_with_less_memory_than_is_planned_for_is_told(gib: float, told: str) -> None:
    """A card of 48 GB has 45.0 GiB if it keeps error codes in them."""
    cards = bound.cards_of(Machine("cuda", int(gib * 2**30), 0))
    assert ", ".join(card.titled(gib) for card in cards) == told
    said = bound.line([bound.Phase("learning", 1.0, 0, 0)], cards, 1, gib)
    assert all(name in said for name in told.split(", "))


def test_the_memory_of_each_card_is_in_the_table() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    for card in CARDS:
        row = f"| {card.name} | {card.gib:g} | {card.mib:,} | {card.mib / 1024:.1f} |"
        assert row in page, row


@pytest.mark.parametrize(
    ("card", "gib", "name"),
    [
        (None, 24, "RTX 4090, RTX 3090, L4"), (None, 22.5, "RTX 4090, RTX 3090, L4"),
        (None, 48, "RTX A6000, L40S"), (None, 80, "H100 SXM, A100 SXM 80GB"),
        (None, 40, "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-80GB", 40, "A100 SXM 80GB"), ("NVIDIA A100 80GB PCIe", 80, ""),
        ("NVIDIA A100-PCIE-40GB", 40, ""), ("NVIDIA H100 PCIe", 80, ""),
        ("NVIDIA L40S", 24, "L40S"),
        (None, 12, ""), (None, 16, ""), (None, 60, ""), (None, 500, ""),
        ("NVIDIA GeForce RTX 4090", 20, "RTX 4090"), ("NVIDIA H100 80GB HBM3", 12, "H100 SXM"),
        ("NVIDIA L4", 22, "L4"), ("NVIDIA L40", 24, ""), ("Tesla T4", 15, ""),
        ("NVIDIA GeForce RTX 3090", 24, "RTX 3090"), ("NVIDIA GeForce RTX 3090 Ti", 24, ""),
    ],
)  # fmt: skip
def test_the_cards_whose_time_is_told(card: str | None, gib: float, name: str) -> None:
    """This machine's own, or all with the memory that is planned for."""
    found = bound.cards_of(Machine("cuda", int(gib * 2**30), 0, card))
    assert ", ".join(each.name for each in found) == name


def test_a_mixture_reads_the_experts_that_its_tokens_meet(tmp_path: Path) -> None:
    """4 of 32 experts a token: a decoded one passes an eighth of them, and 64 at once read all but
    (7/8)^64, if the routers choose all alike."""
    config, shape = card_config(tmp_path, algorithm__name="dapo")
    experts = 10**9
    mixture = replace(shape, experts=experts, active_experts=experts // 8)
    (sampling, learning), (plain, dense) = (
        bound.phases(config, each, SIZES) for each in (mixture, shape)
    )
    passes = config.sample.prompts_per_step * PROMPT + config.sample.rollouts_per_step * NEW
    waves = config.sample.rollouts_per_step / 64
    assert sampling.flops - plain.flops == pytest.approx(2 * experts / 8 * passes)
    met = 1 - (7 / 8) ** 64
    assert sampling.read_bytes - plain.read_bytes == pytest.approx(NEW * waves * 2 * experts * met)
    assert learning.flops - dense.flops == pytest.approx(3 * 2 * experts / 8 * passes)
