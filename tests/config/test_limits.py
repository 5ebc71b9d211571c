"""Defaults and limits of all options, what contradicts what and by how little it does not, and what
follows from the options."""

import re
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest

from reason_llm.config import AdapterSection, Config, ModelSection
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
sample.reply_tokens=512 >=1; sample.environment_seconds=10 >0
score.rewards=[RewardSpec(name='boxed', label=None, custom=None, weight=1.0, options={})] #>=1
score.timeout_seconds=None >0; algorithm.clip_low=0.2 >=0; algorithm.clip_high=0.2 >=0
algorithm.delta=0 >=0; algorithm.keep=all >=1; algorithm.kl_coefficient=0 >=0
algorithm.kl_target=0 >=0; algorithm.kl_horizon=10000 >=1; algorithm.entropy_coefficient=0 >=0
algorithm.top_entropy_fraction=1 >0<=1; algorithm.off_policy_threshold=0 >=0
algorithm.correction_cap=2 >0; algorithm.dynamic_sampling=1 >=1<=100
algorithm.success_range=None >=0<=1>=0<=1; algorithm.missing_eos_penalty=0 >=0
train.learning_rate=1e-05 >=0; train.warmup_steps=0 >=0; train.weight_decay=0 >=0
train.ema=None >0<1; train.rows_per_step=64 >=1; train.epochs=1 >=1; train.optimizer_steps=1 >=1
train.router_aux_loss_coef=0 >=0; train.micro_batch_tokens=auto >=1
train.max_grad_norm=1 >0; eval.every=10 >=0
eval.limit=None >=1; eval.patience=0 >=0; eval.samples=0 >=0; eval.max_new_tokens=None >=1
memory.budget_gib=auto >0; memory.host_gib=auto >0; critic.learning_rate=0.0001 >=0
critic.updates=1 >=1; critic.warmup_steps=10 >=0; critic.gamma=1 >0<=1; critic.lam=1 >=0<=1
critic.value_clip=0.2 >=0
teacher.timeout_seconds=60 >0<=3600; teacher.retries=2 >=0<=10
reward.centering=0.01 >=0; preference.beta=0.1 >0
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
GIVEN = {"name": "environment", "label": "given"}
UNPAID = ["boxed", {"name": "environment", "weight": 0}]
SAVED, UNSAVED = {"run.from_buffer": "b"}, {"run.from_buffer": None}
STALE, FRESH = {"run.max_staleness": 1}, {"run.max_staleness": 0}
OPD, TEACHER = {"algorithm.name": "opd"}, {"algorithm.name": "opd", "teacher.model": "m"}
SERVED = TEACHER | {"teacher.url": "http://a/v1"}
RATE, VARLEN = {"data.pass_rate.column": "r"}, {"train.packing": "varlen"}
EAGER, FLASH = {"model.attention": "eager"}, {"model.attention": "flash"}
TURN, ONE = {"algorithm.credit": "turn"}, {"sample.completions_per_prompt": 1}
START, PAIRS, FULL = {"model.start": "s"}, {"stage": "preference"}, {"model.train": "full"}
NOT_WITH_FULL: list[tuple[dict[str, Any], str]] = [
    ({"model.quantize": "nf4"}, "model.quantize=nf4"),
    ({"model.backend": "unsloth"}, "model.backend=unsloth"),
    ({"model.allow_pickle": True}, "model.trust_remote_code or model.allow_pickle"),
    ({"model.trust_remote_code": True}, "model.trust_remote_code or model.allow_pickle"),
    ({"model.adapter.rank": 4}, "the model.adapter section"),
    ({"model.start": "x"}, "model.start=x"),
    ({"run.shards": 2}, "run.replicas, run.shards, run.samplers or run.max_staleness"),
    ({"run.max_staleness": 1}, "run.samplers or run.max_staleness"),
    ({"run.replicas": "auto", "run.shards": 1}, "run.samplers or run.max_staleness"),
    ({"run.samplers": 1, "run.shards": 1}, "run.samplers or run.max_staleness"),
    (PPO, "algorithm.name=ppo"),
    (OPD | {"teacher.adapter": "x"}, "teacher.adapter=x"),
    ({"score.rewards": JUDGED}, "a reward model in score.rewards that is an adapter"),
    ({"stage": "reward"}, "stage=reward"),
    ({"stage": "sample"}, "stage=sample"),
    ({"train.ema": 0.9}, "train.ema=0.9"),
]
WEIGHED = "learned_row.correction"


@pytest.mark.parametrize(
    ("options", "change", "told"),
    [
        (SAVED | {"stage": "sample"}, RL, "run.from_buffer=b contradicts stage=sample"),
        (SFT | {"run.samplers": 1}, RL, "run.samplers=1 contradicts run.from_buffer=None or s"),
        (SFT | STALE, RL, "which samples no rollouts"),
        *(({"run.replicas": 2, f"run.{name}": 16}, {"run.shards": 16}, f"run.{name}=16 ")
          for name in ("replicas", "samplers")),
        ({"run.ray": "auto"}, {"run.replicas": 2}, "run.ray=auto contradicts run.replicas=1"),
        ({"run.ray": "auto"}, {"run.samplers": 1}, "run.ray=auto contradicts run.replicas=1"),
        (STALE | {"stage": "sample"}, RL, "does not change the policy"),
        (SAVED | {"run.samplers": 1}, {"run.samplers": 0}, "contradicts run.from_buffer"),
        ({"score.rewards": ["boxed", "environment"]}, PLAYED, "environment=None does not give"),
        ({"score.rewards": ["boxed", "environment"], "sample.environment": "mcp:x"}, PLAYED,
         "environment=mcp:x does not give"),
        *(({"score.rewards": ["boxed", GIVEN]} | other, PLAYED, told)
          for other, told in (({}, "environment=None does not give"),
                              ({"sample.environment": "mcp:x"}, "mcp:x does not give"))),
        (PLAYED | TURN, {"score.rewards": ["environment"]}, "do not pay"),
        (PLAYED | TURN | {"score.rewards": UNPAID}, {"algorithm.credit": "rollout"}, "do not pay"),
        ({"sample.environment": "verifiers"}, {"data.train": "verifiers:t"}, "plays nothing else"),
        (PLAYED | {"data.train": "verifiers:t"}, {"data.train": "x"}, "and by no other"),
        (PLAYED | {"data.eval": "verifiers:t"}, {"data.eval": "x"}, "and by no other"),
        (PLAYED | STALE, FRESH, "no steps are sampled ahead"),
        (OPD, {"teacher.prompt": "T {prompt}"}, "needs a teacher"),
        (OPD, {"teacher.adapter": "a"}, "needs a teacher"),
        (TEACHER | {"teacher.adapter": "a"}, {"teacher.adapter": None}, "=a contradicts teacher.m"),
        (OPD | {"teacher.prompt": "{prompt}", "teacher.quantize": "nf4"}, TEACHER, "model=None or"),
        *((TEACHER | {"model.backend": "unsloth"}, other, "backend=unsloth, whi")
          for other in ({"model.backend": "auto"}, {"teacher.url": "http://a/v1"})),
        *((PPO | {"run.steps": 10}, longer, "critic.warmup_steps=10 contradicts")
          for longer in ({"run.steps": 11}, {"run.epochs": 1})),
        (ONE, {"sample.completions_per_prompt": 2}, "compares the completions of a group"),
        (ONE, {"stage": "sample", "sample.prompts_per_step": 1}, "completions of a group"),
        *((ONE | {"algorithm.name": "pg", "algorithm.scale": "batch", "sample.prompts_per_step": 1},
           other, "one reward has no deviation")
          for other in ({"sample.prompts_per_step": 2}, {"sample.completions_per_prompt": 2},
                        {"algorithm.scale": "none"}, PPO | {"algorithm.scale": None})),
        ({"algorithm.keep": 9}, {"algorithm.keep": 8}, "algorithm.keep=9 cont"),
        ({"algorithm.dynamic_sampling": 2, "score.rewards": JUDGED},
         {"algorithm.dynamic_sampling": 1}, "algorithm.dynamic_sampling=2 contradicts"),
        *(({name: value, "algorithm.correction": "token_mask"}, {name: none}, "=token_mask or al")
          for name, value, none in (("sample.top_p", 0.99, 1), ("sample.top_k", 1, 0),
                                    ("sample.min_p", 0.01, 0))),
        ({"sample.top_k": 1, "algorithm.off_policy_threshold": 0.1}, {"sample.top_k": 0}, "=0.1 "),
        ({"train.optimizer_steps": 129}, {"train.optimizer_steps": 128}, "the 128 rollouts or"),
        ({"model.context_tokens": 512}, {"model.context_tokens": 513}, "no prompt would fit"),
        (SFT | {"model.context_tokens": 9, "data.eval": "y"}, {"data.eval": None}, "would fit"),
        *((KTO | {"train.rows_per_step": 7, "train.optimizer_steps": 4}, other,
           "train.rows_per_step=7 with train.optimizer_steps=4")
          for other in ({"train.rows_per_step": 8}, {"preference.name": "dpo"})),
        ({"run.steps": 5, "train.optimizer_steps": 2, "train.epochs": 3, "train.warmup_steps": 30},
         {"train.warmup_steps": 29}, "the policy has 30 optimizer steps"),
        ({"run.steps": 5, "train.warmup_steps": 5}, {"run.epochs": 1}, "has 5 optimizer steps"),
        (PPO | {"run.steps": 12, "train.warmup_steps": 2}, {"train.warmup_steps": 1}, "has 2 opti"),
        ({"eval.samples": 2}, {"eval.sets": {"a": "y"}}, "the eval section contradicts"),
        ({"reward.centering": 0.1}, {"stage": "reward"}, "the reward section contradicts stage=rl"),
        (SFT | {"algorithm.name": "dapo"}, RL, "algorithm section contradicts"),
        (SFT | {"data.form": "texts"}, {"stage": "pretrain"}, "data.form=texts contradicts"),
        ({"eval.rows": "x"}, SFT, "eval.rows=x contradicts stage=rl"),
        ({"stage": "reward", "data.eval": "y"}, {"data.eval": None}, "contradicts stage=reward"),
        ({"critic.lam": 0.5}, PPO, "the critic section contradicts algorithm.name=grpo"),
        ({"teacher.adapter": "x"}, OPD, "the teacher section contradicts algorithm.name=grpo"),
        (PPO | {"critic.start": "rm", "critic.warmup_steps": 0}, {"critic.warmup_steps": 1},
         "critic.warmup_steps=0 contradicts critic.start=rm"),
        ({"algorithm.missing_eos_penalty": 1.0}, PPO, "because algorithm.name is not ppo or"),
        (PPO | {"algorithm.missing_eos_penalty": 1.0, "algorithm.truncated": "leave_out"},
         {"algorithm.truncated": "train"}, "algorithm.truncated is leave_out"),
        (PPO | {"algorithm.kl_reference": "start"}, START, "kl_reference=start contradicts"),
        ({"train.rows_per_step": 63}, SFT, "train.rows_per_step=63 contradicts stage=rl"),
        (OPD | {"teacher.prompt": "x"}, {"teacher.prompt": "{prompt}"}, "'x' must hold {prompt}"),
        (SERVED | {"teacher.model": None, "teacher.prompt": "{prompt}"}, TEACHER, "needs teach"),
        (SERVED | {"teacher.quantize": "nf4"}, {"teacher.quantize": "none"}, "that is loaded here"),
        (SERVED | {"sample.temperature": 0.9}, {"sample.temperature": 1}, "is at temperature 1"),
        *((TEACHER | {f"teacher.{name}": value}, SERVED, "contradicts teacher.url=null")
          for name, value in (("timeout_seconds", 9), ("retries", 3), ("key_env", "K"),
                              ("tokenizer", "t"))),
        ({"train.router_aux_loss_coef": 0.1, "train.gradient_checkpointing": "offload"},
         {"train.gradient_checkpointing": True}, "train.router_aux_loss_coef=0.1 contradicts"),
        ({"model.attention": "sdpa", "model.backend": "unsloth"}, {"model.backend": "native"},
         "model.attention=sdpa contradicts model.backend=unsloth"),
        (EAGER | VARLEN, {"train.packing": "padded"}, "model.attention=eager contradicts"),
        (EAGER | VARLEN, {"model.attention": "sdpa"}, "model.attention=eager contradicts"),
        (FLASH | {"train.packing": "padded"}, VARLEN, "model.attention=flash contradicts"),
        (FLASH | {"train.packing": "padded"}, EAGER, "model.attention=flash contradicts"),
        (RATE | {"data.pass_rate.min": 2}, {"data.pass_rate.max": 2}, "min=2 is above data.pass_"),
        ({"data.pass_rate.min": 0.5}, RATE, "set data.pass_rate.column"),
        ({"data.max_tokens": 9}, SFT, "data.max_tokens=9 does not act"),
        ({"stage": "pretrain", "data.max_prompt_tokens": 9}, SFT, "max_prompt_tokens=9 does not"),
        *((FULL | given, {"model.train": "adapter"}, f"{told} contradicts model.train=full: ")
          for given, told in NOT_WITH_FULL),
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
    ("grpo", {"delta": 1.21, "clip_low": 1.0, "keep": 1}),
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
        ("compares_with_start", START | PAIRS | {"preference.name": "simpo"}, False),
        ("compares_with_start", START | SFT, False),
        ("roles", PPO | START | {"score.rewards": JUDGED},
         ["start", "critic", "reward:reward_model"]),
        ("reward_adapters", SAVED | {"score.rewards": JUDGED}, {}),
        ("units_per_step", {"sample.prompts_per_step": 3, "sample.completions_per_prompt": 5}, 15),
        ("units_per_step", SFT | {"train.rows_per_step": 7}, 7),
        ("run.shards", {}, 1),
        ("run.shards", {"run.replicas": 1}, 1),
        ("run.shards", {"run.replicas": "auto"}, 8),
        ("run.shards", {"run.replicas": 2, "run.shards": 2}, 2),
        ("run.shards", {"run.samplers": 1}, 8),
        ("run.shards", STALE, 1),
        (WEIGHED, {}, "none"),
        (WEIGHED, STALE, "token_truncate"),
        (WEIGHED, {"sample.engine": "vllm"}, "token_truncate"),
        (WEIGHED, {"sample.engine": "vllm", "sample.top_p": 0.9}, "none"),
        (WEIGHED, SAVED, "token_truncate"),
        (WEIGHED, SAVED | {"sample.top_p": 0.9}, "token_truncate"),
        (WEIGHED, SAVED | {"algorithm.correction": "none"}, "none"),
        (WEIGHED, SAVED | {"algorithm.correction": "token_mask"}, "token_mask"),
        *((WEIGHED, STALE | {"algorithm.name": name}, "sequence_truncate")
          for name in ("gspo", "gspo_token", "luspo")),
        ("prompting_reward", {}, "boxed"),
        ("prompting_reward", {"stage": "sample"}, "boxed"),
        ("prompting_reward", {"score.rewards": ["think_answer_tags"]}, "think_answer_tags"),
        *(("prompting_reward", {"stage": name}, "") for name in ("sft", "reward", "pretrain")),
        ("prompting_reward", SFT | {"data.eval": "y"}, "boxed"),
        ("data.form", {}, "problems"),
        ("data.form", SFT, "demonstrations"),
        ("data.form", {"stage": "pretrain"}, "texts"),
        ("data.form", {"stage": "reward"}, "preferences"),
        ("data.form", KTO, "labels"),
        ("learns_pairs", KTO, False),
        ("compares_with_start", PPO, False),
        ("compares_with_start", PPO | START, True),
        *(("is_off_policy", each, each != {}) for each in ({}, SAVED, STALE)),
        ("run.buffer_path", {}, Path("data/buffer.json")),
        ("run.buffer_path", {"run.buffer": "b.json"}, Path("b.json")),
        ("teacher_model", TEACHER | {"teacher.quantize": "nf4", "model.dtype": "bfloat16",
                                     "model.context_tokens": 600, "model.adapter.rank": 9},
         ModelSection(path="m", dtype="bfloat16", quantize="nf4", context_tokens=600,
                      adapter=AdapterSection(rank=1))),
        ("teacher_model", SERVED, None),
        ("roles", OPD | {"teacher.adapter": "a"}, ["teacher"]),
        ("prompting_reward", {"score.rewards": [{"name": "boxed", "label": "mine"}]}, "boxed"),
        ("reward_adapters", SFT | {"data.eval": "y", "score.rewards": JUDGED}, {}),
        ("turn_weight", PLAYED | TURN | {"score.rewards": ["boxed", GIVEN | {"weight": 0.5}]}, 0.5),
        ("turn_weight", PLAYED | TURN | {"score.rewards": [
            "boxed", "environment", GIVEN | {"options": {"name": "length"}}]}, 1.0),
        ("turn_weight", PLAYED | {"score.rewards": ["boxed", GIVEN]}, 0.0),
        *(("model.adapter.adapts_head", {"model.adapter.targets": targets}, found)
          for targets, found in ((["q_proj"], False), (["q_proj", "lm_head"], True),
                                 ("all-linear", False), ("lm_.*", True), ("(", False))),
        ("run.name", {"run.name": "é" * 50}, "é" * 50),
        *((f"learned_row.{name}", options, found) for name, options, found in (
            ("needs_group", {"algorithm.name": "pg"}, False),
            ("needs_group", {"algorithm.name": "pg", "algorithm.scale": "group"}, True),
            ("needs_group", {"algorithm.name": "pg", "algorithm.dynamic_sampling": 2}, True),
            ("needs_group", {"algorithm.name": "rloo"}, True),
            *(("compares_rewards_in_groups", row | {"algorithm.dynamic_sampling": 2}, not row)
              for row in ({}, PPO, TEACHER)),
        )),
        ("roles", TEACHER, []),
    ],
    ids=str,
)  # fmt: skip
def test_what_follows_from_the_options(name: str, options: dict[str, Any], expected: Any) -> None:
    assert attrgetter(name)(made(options)) == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"run.replicas": 3}, "run.replicas=3 must be a power of two, such as 2"),
        ({"run.shards": 6}, "run.shards=6 must be a power of two, such as 4"),
        ({"run.replicas": 0}, "run.replicas=0"),
        ({"run.replicas": "many"}, "run.replicas='many'"),
    ],
)
def test_parts_and_processes_are_powers_of_two(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        made(options)


def test_rows_that_are_given_come_beside_those_that_were_given() -> None:
    data = made({}).data.with_rows({"a": [1], "b": [2]})
    assert data.with_rows({"b": [3], "c": [4]}).given == {"a": [1], "b": [3], "c": [4]}
    assert data.given == {"a": [1], "b": [2]}


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
