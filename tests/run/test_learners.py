"""The roles of a run and the settings of its learners, by its config."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.run import learners
from reason_llm.run.store import checkpoint

RL = {"run__steps": 7, "train__optimizer_steps": 3, "train__epochs": 2, "run__seed": 5,
      "sample__temperature": 0.7}  # fmt: skip
PPO = RL | {"algorithm": {"name": "ppo", "truncated": "leave_out"}, "critic__updates": 4,
            "critic__warmup_steps": 2, "critic__learning_rate": 0.25, "critic__value_clip": 0.3,
            "train__warmup_steps": 1}  # fmt: skip
ROWS = {"algorithm": {}, "sample": {}, "score": {}}
DPO = ROWS | {"stage": "preference", "preference__name": "dpo"}
OPD = RL | {"algorithm": {"name": "opd"}}
PAID = [{"name": "format"}, {"name": "reward_model", "label": "a", "options": {"path": "x"}}]
KL = {"name": "grpo", "kl": "k3", "kl_reference": "start"}


@pytest.mark.parametrize(
    ("options", "roles", "settings"),
    [
        (RL, [("policy", None, "none")],
         {"temperature": 0.7, "seed": 5, "total_optimizer_steps": 42, "first_step": 0,
          "micro_batch_tokens": 64, "chunk_tokens": 77, "reference": "reference"}),
        (RL | {"algorithm": KL, "model__start": "s"},
         [("policy", "run/start", "none"), ("start", "run/start", "none")],
         {"reference": "start"}),
        (RL | {"model__start": "s"}, [("policy", "run/start", "none")], {"reference": "reference"}),
        (RL | {"score__rewards": PAID}, [("policy", None, "none"), ("reward:a", "x", "score")], {}),
        (DPO | {"model__start": "s"},
         [("policy", "run/start", "none"), ("start", "run/start", "none")],
         {"reference": "start", "temperature": 1.0}),
        (DPO | {"model__start": "s", "preference__reference": "base"},
         [("policy", "run/start", "none")], {"reference": "reference"}),
        (ROWS | {"stage": "reward"}, [("policy", None, "score")], {"temperature": 1.0}),
        (OPD | {"teacher__adapter": "t"}, [("policy", None, "none"), ("teacher", "t", "none")],
         {"teacher": "teacher"}),
        (OPD | {"teacher__prompt": "Think. {prompt}"}, [("policy", None, "none")],
         {"teacher": "reference"}),
        (OPD | {"teacher__model": "m"}, [("policy", None, "none")], {"teacher": "teacher"}),
        (PPO, [("policy", None, "none"), ("critic", None, "value")],
         {"total_optimizer_steps": 30, "first_step": 2}),
        (PPO | {"critic__start": "c"}, [("policy", None, "none"), ("critic", "c", "value")], {}),
        (RL | {"run__shards": 4}, [("policy", None, "none")], {"shards": 4}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("halved", [None, 32, 128])
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
    wanted = settings | {"micro_batch_tokens": min(halved or 64, 64), "role": "policy"}
    assert {name: found[name] for name in wanted} == wanted
    assert policy.train is config.train
    assert policy.objective == learners.objective_of(config)
    if config.algorithm.name != "ppo":
        assert others == []
        return
    (critic, _), warmup = others
    assert (critic.role, critic.total_optimizer_steps, critic.first_step) == ("critic", 28, 0)
    assert (critic.objective.clip, critic.objective.leaves_out_truncated) == (0.3, True)
    of_train = critic.train
    assert (of_train.learning_rate, of_train.epochs, of_train.optimizer_steps, warmup) == (
        0.25, 4, 1, 2,
    )  # fmt: skip
    assert (of_train.warmup_steps, critic.temperature, critic.micro_batch_tokens) == (
        0, 0.7, min(halved or 64, 64),
    )  # fmt: skip
    start = config.critic.start
    assert scaled == ([] if start is None else [("the head", start, 2.0)])
