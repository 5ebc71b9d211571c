"""The critic of a run: how many optimizer steps it takes."""

from collections.abc import Callable

from reason_llm.config import Config
from reason_llm.loop import rollouts
from reason_llm.model import to_data
from reason_llm.run import SILENT
from reason_llm.run.prepare import prepare
from reason_llm.run.run import open_run


def test_it_takes_its_updates_in_the_warm_up(small_run: Callable[..., Config]) -> None:
    critic = {"updates": 2, "warmup_steps": 1, "learning_rate": 1e-3}
    config = small_run(algorithm={"name": "ppo", "kl": "none"}, critic=critic)
    with open_run(prepare(config, SILENT), SILENT) as run:
        data = to_data(rollouts(run, 0))
        with run.learning(len(data)) as (replicas, _):
            found = replicas.learn(0, data, lambda rows: None)
        learners = run.learners
        assert learners.critic is not None
        taken = {int(each["step"]) for each in learners.critic.optimizer.state.values()}
        assert taken == {2}
        assert learners.critic.settings.total_optimizer_steps == 3 * 2
        assert "train/loss" not in found  # the warm-up
        assert found["critic/loss"] > 0
