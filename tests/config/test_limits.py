"""Defaults and limits of all options, what contradicts what and by how little it does not, and what
follows from the options."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from reason_llm.config import Config
from reason_llm.config.algorithms import Algorithm, resolve
from reason_llm.config.file import build, leaves
from reason_llm.config.preferences import PREFERENCES, PreferenceRow, resolve as preference_of
from reason_llm.errors import ConfigError

NUMBERS = """
run.seed=0 >=0<9.22337e+18; run.steps=100 >=1; run.epochs=None >0<=1e+06; run.save_every=1 >=1
run.keep_checkpoints=2 >=1; run.keep_buffers=all >=1; run.keep_buffers_gib=4 >0; run.replicas=1 >=1
run.samplers=0 >=0<=1024; run.max_staleness=0 >=0<=4; run.shards=1 >=1
model.context_tokens=None >=1; model.adapter.rank=32 >=1<=4096; model.adapter.alpha=64 >0
model.adapter.dropout=0 >=0<1; data.train=PydanticUndefined #>=1; data.limit=None >=1
data.max_prompt_tokens=None >=1; data.max_tokens=None >=1; data.pass_rate.min=0
data.pass_rate.max=1; sample.prompts_per_step=16 >=1; sample.completions_per_prompt=8 >=1
sample.prompts_per_wave=None >=1; sample.max_new_tokens=512 >=1; sample.temperature=1 >=0.01<=100
sample.top_p=1 >0<=1; sample.top_k=0 >=0; sample.min_p=0 >=0<1; sample.stop=[] #<=8#>=1#<=100
sample.environment=None #>=1#>=1; sample.turns=8 >=1; sample.turn_tokens=None >=1
sample.reply_tokens=512 >=1; sample.tool_calls_per_turn=4 >=1; sample.environment_seconds=10 >0
score.rewards=[RewardSpec(name='boxed', label=None, custom=None, weight=1.0, options={})] #>=1
score.timeout_seconds=None >0; algorithm.clip_low=0.2 >=0; algorithm.clip_high=0.2 >=0
algorithm.delta=0 >=0; algorithm.dual_clip=0 >=0; algorithm.temperature_positive=1 >0
algorithm.temperature_negative=1.05 >0; algorithm.top_k=0 >=0; algorithm.kl_coefficient=0 >=0
algorithm.kl_target=0 >=0; algorithm.kl_horizon=10000 >=1; algorithm.entropy_coefficient=0 >=0
algorithm.top_entropy_fraction=1 >0<=1; algorithm.off_policy_threshold=0 >=0
algorithm.max_ratio=0 >=0; algorithm.correction_cap=2 >0; algorithm.correction_floor=0 >=0
algorithm.min_reward_std=0 >=0; algorithm.dynamic_sampling=1 >=1<=100
algorithm.success_range=None >=0<=1>=0<=1; algorithm.missing_eos_penalty=0 >=0
train.learning_rate=1e-05 >=0; train.warmup_steps=0 >=0; train.weight_decay=0 >=0
train.ema=None >0<1; train.rows_per_step=64 >=1; train.epochs=1 >=1; train.optimizer_steps=1 >=1
train.replay=0 >=0; train.micro_batch_tokens=auto >=1; train.max_grad_norm=1 >0; eval.every=10 >=0
eval.limit=None >=1; eval.patience=0 >=0; eval.samples=0 >=0; eval.max_new_tokens=None >=1
memory.budget_gib=auto >0; memory.host_gib=auto >0; critic.learning_rate=0.0001 >=0
critic.updates=1 >=1; critic.warmup_steps=10 >=0; critic.gamma=1 >0<=1; critic.lam=1 >=0<=1
critic.value_lam=1 >=0<=1; critic.value_clip=0.2 >=0; teacher.coefficient=1 >0
sft.condition_bins=5 >=2<=100; reward.centering=0.01 >=0; preference.beta=0.1 >0
preference.label_smoothing=0 >=0<0.5; preference.margin=0 >=0; preference.nll_coefficient=0 >=0
preference.desirable_weight=1 >0; preference.undesirable_weight=1 >0
"""
"""Each option that is a number or has a limit: its default, of the two tables that of a row which
names no other, and its limits."""
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "#>=", "max_length": "#<="}


def limits_of(kind: Any, metadata: Any = ()) -> str:
    """``>=0<1`` of a type with its members."""
    parts = (*metadata, *getattr(kind, "__metadata__", ()))
    flat = [each for part in parts for each in getattr(part, "metadata", [part])]
    own = [(sign, getattr(each, name, None)) for each in flat for name, sign in SIGNS.items()]
    told = [f"{sign}{limit:g}" for sign, limit in own if limit is not None]
    return "".join([*told, *map(limits_of, get_args(kind))])


def test_numbers_and_limits_are_those_that_users_know() -> None:
    """One that is changed on purpose is changed here, too."""
    rows: Any = {"algorithm": Algorithm, "preference": PreferenceRow}
    columns = {f"{s}.{c.name}": c.default for s, row in rows.items() for c in fields(row)}
    found = set()
    for key, option in leaves(Config):
        default = columns.get(key, option.default)
        value = f"{default:g}" if type(default) in (int, float) else str(default)
        limits = limits_of(option.annotation, option.metadata)
        if limits or type(default) in (int, float):
            found.add(f"{key}={value} {limits}".strip())
    assert found == {each.strip() for each in re.split(r"[;\n]", NUMBERS)} - {""}


def made(options: dict[str, Any]) -> Config:
    return build({"data": {"train": "x"}}, Path("my.yaml"), options)


RL, SFT, KTO = {"stage": "rl"}, {"stage": "sft"}, {"stage": "preference", "preference.name": "kto"}
PLAYED, PPO = {"sample.environment": "a.py:B"}, {"algorithm.name": "ppo"}
JUDGED = ["boxed", {"name": "reward_model", "options": {"path": "none"}}]
UNPAID = ["boxed", {"name": "environment", "weight": 0}]
ORDERED, REPLAYED = {"data.order": "informative"}, {"train.replay": 1}
SAVED, UNSAVED = {"run.from_buffer": "b"}, {"run.from_buffer": None}
STALE, FRESH = {"run.max_staleness": 1}, {"run.max_staleness": 0}
OPD, TEACHER = {"algorithm.name": "opd"}, {"algorithm.name": "opd", "teacher.model": "m"}
TURN, ONE = {"algorithm.credit": "turn"}, {"sample.completions_per_prompt": 1}


@pytest.mark.parametrize(
    ("options", "change", "told"),
    [
        (SAVED | {"stage": "sample"}, RL, "run.from_buffer=b contradicts stage=sample"),
        (SFT | {"run.samplers": 1}, RL, "run.samplers=1 contradicts stage=sft"),
        (SFT | STALE, RL, "which samples no rollouts"),
        (STALE | {"stage": "sample"}, RL, "whose policy does not change"),
        (SAVED | {"run.samplers": 1}, {"run.samplers": 0}, "contradicts run.from_buffer"),
        (ORDERED | {"stage": "sample"}, RL, "data.order=informative"),
        (ORDERED | SFT, RL, "data.order=informative"),
        (ORDERED | ONE | {"algorithm.name": "pg"}, {"sample.completions_per_prompt": 2}, "it asks"),
        (ORDERED | SAVED, UNSAVED, "are drawn already"),
        (ORDERED | STALE, FRESH, "must be known"),
        (REPLAYED | SFT, RL, "train.replay=1 contradicts stage=sft"),
        (REPLAYED | PPO, {"algorithm.name": "dapo"}, "algorithm.name=ppo: it learns"),
        (REPLAYED | {"algorithm.name": "rloo"}, {"algorithm.kl_place": "loss"}, "=rloo: it learns"),
        (REPLAYED | {"algorithm.correction": "none"}, {"algorithm.correction": "auto"}, "wrote"),
        (REPLAYED | {"run.keep_buffers": 2}, {"run.keep_buffers": 1}, "run.keep_buffers=2"),
        (REPLAYED | {"run.keep_buffers": "none"}, {"train.replay": 0}, "run.keep_buffers=none"),
        (REPLAYED | SAVED, UNSAVED, "run.from_buffer=b: it takes"),
        ({"score.rewards": ["boxed", "environment"]}, PLAYED, "nothing would give it"),
        ({"score.rewards": ["environment"], "sample.environment": "mcp:x"}, PLAYED, "do not give"),
        (PLAYED | TURN, {"score.rewards": ["environment"]}, "do not pay"),
        (PLAYED | TURN | {"score.rewards": UNPAID}, {"algorithm.credit": "rollout"}, "do not pay"),
        ({"sample.environment": "verifiers"}, {"data.train": "verifiers:t"}, "plays nothing else"),
        (PLAYED | {"data.train": "verifiers:t"}, {"data.train": "x"}, "and by no other"),
        (PLAYED | {"data.eval": "verifiers:t"}, {"data.eval": "x"}, "and by no other"),
        (PLAYED | STALE, FRESH, "no steps are sampled ahead"),
        (OPD, {"teacher.prompt": "T {prompt}"}, "needs a teacher"),
        (OPD, {"teacher.adapter": "a"}, "needs a teacher"),
        (TEACHER | {"teacher.adapter": "a"}, {"teacher.adapter": None}, "=a contradicts teacher.m"),
        (OPD | {"teacher.prompt": "{prompt}", "teacher.quantize": "nf4"}, TEACHER, "model=null"),
        (TEACHER | {"model.backend": "unsloth"}, {"model.backend": "auto"}, "backend=unsloth, whi"),
        (PPO | {"run.steps": 10}, {"run.steps": 11}, "critic.warmup_steps=10 contradicts"),
        (ONE, {"sample.completions_per_prompt": 2}, "compares the completions of a group"),
        (ONE | {"algorithm.name": "pg", "algorithm.scale": "batch", "sample.prompts_per_step": 1},
         {"sample.prompts_per_step": 2}, "one reward has no deviation"),
        ({"algorithm.max_ratio": 2}, {"train.epochs": 2}, "algorithm.max_ratio=2"),
        ({"algorithm.max_ratio": 2}, {"train.optimizer_steps": 2}, "algorithm.max_ratio=2"),
        ({"algorithm.keep": "top_k", "algorithm.top_k": 9}, {"algorithm.top_k": 8}, "top_k=9 cont"),
        ({"algorithm.dynamic_sampling": 2, "score.rewards": JUDGED},
         {"algorithm.dynamic_sampling": 1}, "algorithm.dynamic_sampling=2 contradicts"),
        *(({name: value, "algorithm.correction": "token_mask"}, {name: none}, "=token_mask contr")
          for name, value, none in (("sample.top_p", 0.99, 1), ("sample.top_k", 1, 0),
                                    ("sample.min_p", 0.01, 0))),
        ({"sample.top_k": 1, "algorithm.off_policy_threshold": 0.1}, {"sample.top_k": 0}, "=0.1 "),
        ({"train.optimizer_steps": 129}, {"train.optimizer_steps": 128}, "= 128 rollouts; set it"),
        ({"model.context_tokens": 512}, {"model.context_tokens": 513}, "no prompt would fit"),
        (SFT | {"model.context_tokens": 9, "data.eval": "y"}, {"data.eval": None}, "would fit"),
        (KTO | {"train.rows_per_step": 7, "train.optimizer_steps": 4}, {"train.rows_per_step": 8},
         "train.rows_per_step=7 with train.optimizer_steps=4"),
        ({"run.steps": 5, "train.optimizer_steps": 2, "train.epochs": 3, "train.warmup_steps": 30},
         {"train.warmup_steps": 29}, "the policy has 30 optimizer steps"),
        (PPO | {"run.steps": 12, "train.warmup_steps": 2}, {"train.warmup_steps": 1}, "has 2 opti"),
        ({"eval.samples": 2}, {"eval.sets": {"a": "y"}}, "the eval section contradicts"),
    ],
    ids=str,
)  # fmt: skip
def test_a_contradiction_is_refused_and_its_nearest_neighbour_taken(
    options: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        made(options)
    assert told in str(refused.value)
    assert not getattr(refused.value, "__notes__", None)
    made(options | change)


AT_THE_LIMITS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"dual_clip": 1.01, "delta": 1.21, "max_ratio": 1.0, "correction_floor": 1.99,
              "clip_low": 1.0, "keep": "top_k", "top_k": 1, "min_reward_std": 0.1}),
    ("dapo", {"delta": 1.29, "success_range": (0.5, 0.5), "kl": "k3", "kl_coefficient": 0.1}),
    ("cispo", {"clip_low": 1.0, "credit": "turn", "ratio": "sequence"}),
    ("gmpo", {"clip_low": 1.5}),
    ("gspo_token", {"credit": "turn"}),
    ("gdpo", {"scale": "group"}),
    ("rloo", {"kl_target": 6.0, "kl_horizon": 9, "kl_reference": "start"}),
    ("reinforce_pp", {"kl_place": "reward", "scale": "batch"}),
    ("ppo", {"scale": "none", "kl_place": "loss", "truncated": "leave_out"}),
    ("opd", {"clip_low": 0.1, "aggregation": "constant"}),
]  # fmt: skip


def test_a_row_takes_what_is_just_within_its_limits() -> None:
    for name, taken in AT_THE_LIMITS:
        row = resolve(name, taken)
        assert {column: getattr(row, column) for column in taken} == taken


def test_each_preference_loss_takes_the_columns_that_it_reads() -> None:
    nll, smooth = "nll_coefficient", "label_smoothing"
    read = {name: {nll, smooth} for name in ("irpo", "dpo", "cdpo", "rdpo")}
    read |= {"ipo": {nll, "normalize_length"}, "orpo": {nll}, "simpo": {nll, "margin"}}
    read |= {"kto": {"desirable_weight", "undesirable_weight"}}
    assert read.keys() == PREFERENCES.keys()
    for name, columns in read.items():
        for column in set.union(*read.values()):
            value = True if column == "normalize_length" else 0.3
            if column in columns:
                assert getattr(preference_of(name, {column: value}), column) == value
            else:
                with pytest.raises(ValueError, match=f"preference.{column}={value} would be"):
                    preference_of(name, {column: value})


START, PAIRS = {"model.start": "s"}, {"stage": "preference"}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("eval_max_new_tokens", {}, 512),
        ("eval_max_new_tokens", {"eval.max_new_tokens": 9, "data.eval": "y"}, 9),
        ("judges_answers", SFT | {"data.eval": "y"}, True),
        ("first_policy_step", {}, 0),
        ("policy_optimizer_steps", {"train.epochs": 2, "train.optimizer_steps": 3}, 600),
        ("policy_optimizer_steps", PPO | {"run.steps": 17, "train.epochs": 3}, 21),
        ("compares_with_start", START, False),
        ("compares_with_start", START | {"algorithm.kl_reference": "start"}, True),
        ("compares_with_start", START | PAIRS, True),
        ("compares_with_start", START | PAIRS | {"preference.reference": "base"}, False),
        ("compares_with_start", START | PAIRS | {"preference.name": "simpo"}, False),
        ("compares_with_start", START | SFT, False),
        ("roles", PPO | START | {"score.rewards": JUDGED},
         ["start", "critic", "reward:reward_model"]),
        ("reward_adapters", SAVED | {"score.rewards": JUDGED}, {}),
        ("units_per_step", {"sample.prompts_per_step": 3, "sample.completions_per_prompt": 5}, 15),
        ("units_per_step", SFT | {"train.rows_per_step": 7}, 7),
    ],
    ids=str,
)  # fmt: skip
def test_what_follows_from_the_options(name: str, options: dict[str, Any], expected: Any) -> None:
    assert getattr(made(options), name) == expected


def test_several_options_of_a_section_are_set_at_once() -> None:
    config = made({"run.steps": 5, "model.adapter.alpha": 7})
    found = config.with_options({
        "run.seed": 3, "run.name": "b", "model.adapter.rank": 4, "model.path": "p",
        "model.adapter.dropout": 0.5, "data": "all",
    })  # fmt: skip
    assert (found.run.seed, found.run.name, found.run.steps, found.data) == (3, "b", 5, "all")
    adapter = found.model.adapter
    assert (found.model.path, adapter.rank, adapter.dropout, adapter.alpha) == ("p", 4, 0.5, 7)
    assert (config.run.seed, config.model.adapter.rank) == (0, 32)
