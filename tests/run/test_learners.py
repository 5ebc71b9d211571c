"""The roles of a run and the settings of its learners, by its config."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.run import learners
from reason_llm.run.store import checkpoint

RL = {"run__steps": 7, "train__optimizer_steps": 3, "train__epochs": 2, "run__seed": 5,
      "sample__temperature": 0.7}  # fmt: skip
PPO = RL | {"algorithm": {"name": "ppo", "truncated": "leave_out"}, "train__warmup_steps": 1,
            "critic__updates": 4, "critic__warmup_steps": 2, "critic__learning_rate": 0.25,
            "critic__value_clip": 0.3}  # fmt: skip
ROWS = {"algorithm": {}, "sample": {}, "score": {}}
DPO = ROWS | {"stage": "preference", "preference__name": "dpo", "model__start": "s"}
OPD = RL | {"algorithm": {"name": "opd"}}
PAID = [{"name": "format"}, {"name": "reward_model", "label": "a", "options": {"path": "x"}}]
KL = {"name": "grpo", "kl": "k3", "kl_reference": "start"}
BARE, BEGUN = ("policy", None, "none"), ("policy", "run/start", "none")
START = ("start", "run/start", "none")


@pytest.mark.parametrize(
    ("options", "roles", "settings"),
    [
        (RL, [BARE], {"temperature": 0.7, "seed": 5, "total_optimizer_steps": 42, "first_step": 0,
                      "chunk_tokens": 77, "reference": "reference"}),
        (RL | {"algorithm": KL, "model__start": "s"}, [BEGUN, START], {"reference": "start"}),
        (RL | {"model__start": "s"}, [BEGUN], {"reference": "reference"}),
        (RL | {"score__rewards": PAID}, [BARE, ("reward:a", "x", "score")], {}),
        (RL | {"run__shards": 4}, [BARE], {"shards": 4}),
        (DPO, [BEGUN, START], {"reference": "start", "temperature": 1.0, "shards": 1}),
        (ROWS | {"stage": "reward"}, [("policy", None, "score")], {"temperature": 1.0}),
        (OPD | {"teacher__adapter": "t"}, [BARE, ("teacher", "t", "none")], {"teacher": "teacher"}),
        (OPD | {"teacher__prompt": "Think. {prompt}"}, [BARE], {"teacher": "reference"}),
        (OPD | {"teacher__model": "m"}, [BARE], {"teacher": "teacher"}),
        (PPO, [BARE, ("critic", None, "value")], {"total_optimizer_steps": 30, "first_step": 2}),
        (PPO | {"critic__start": "c"}, [BARE, ("critic", "c", "value")], {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("halved", [None, 32, 128])  # the plan says 64
def test_roles_and_settings(
    options: dict[str, Any], roles: list[tuple[Any, ...]], settings: dict[str, Any],
    halved: int | None, small_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config, added, scaled = small_run(**options), [], []
    model: Any = SimpleNamespace(heads={"critic": "the head"})
    model.add_role = lambda role, path, head="none": added.append((role, path, head))
    sharded = lambda model, settings, shards: (settings, shards.count)  # noqa: E731
    monkeypatch.setattr(learners, "Learner", lambda model, settings: (settings, 1))
    monkeypatch.setattr(learners, "ShardedLearner", sharded)
    monkeypatch.setattr(learners, "Learners", lambda *given: given)
    monkeypatch.setattr(learners.score_head, "scale", lambda *given: scaled.append(given))
    monkeypatch.setattr(learners.reward_models, "paid_by", lambda config, path: (path, 2.0))
    plan: Any = SimpleNamespace(micro_batch_tokens=64, chunk_tokens=77)
    state = checkpoint.RunState(None, 0, None, micro_batch_tokens=halved)  # type: ignore[arg-type]
    (policy, shards), *others = learners.make(config, Path("run"), state, plan, model)
    assert added == [(role, path and Path(path), head) for role, path, head in roles]
    found = {"shards": shards} | {name: getattr(policy, name) for name in policy.__slots__}
    tokens = {"micro_batch_tokens": min(halved or 64, 64)}
    assert found == found | settings | tokens | {"role": "policy", "train": config.train}
    assert policy.objective == learners.OBJECTIVES[config.stage](config)
    if "critic" not in config.roles:
        assert others == []
        return
    (critic, _), warmup = others
    values = learners.Values(clip=0.3, leaves_out_truncated=True)
    of_critic = {"learning_rate": 0.25, "epochs": 4, "optimizer_steps": 1, "warmup_steps": 0}
    assert critic == replace(
        policy, objective=values, train=config.train.with_options(of_critic), first_step=0,
        total_optimizer_steps=28, role="critic",
    )  # fmt: skip
    start = config.critic.start
    assert (warmup, scaled) == (2, [] if start is None else [("the head", start, 2.0)])
