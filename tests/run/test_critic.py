"""The critic of a run: its optimizer steps, the KL beside it, and where it begins."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reason_llm.config import Config
from reason_llm.errors import ConfigError
from reason_llm.loop import rollouts, train
from reason_llm.model import score_head, to_data
from reason_llm.readers import reward_models
from reason_llm.run import SILENT
from reason_llm.run.opening import open_run
from reason_llm.run.start.prepare import prepare
from reason_llm.run.store import metrics


def test_it_takes_its_updates_in_the_warm_up(small_run: Callable[..., Config]) -> None:
    critic = {"updates": 2, "warmup_steps": 1, "learning_rate": 1e-3}
    config = small_run(algorithm={"name": "ppo", "kl": "none"}, critic=critic)
    with open_run(prepare(config, SILENT), SILENT) as run:
        data = to_data(rollouts(run, 0))
        with run.learning(0, data) as learn:
            found = learn()
        learners = run.learners
        assert learners.critic is not None
        taken = {int(each["step"]) for each in learners.critic.optimizer.state.values()}
        assert taken == {2}
        assert learners.critic.settings.total_optimizer_steps == 3 * 2
        assert "train/loss" not in found  # the warm-up
        assert found["critic/loss"] > 0


def test_the_policy_s_schedule_begins_when_it_learns(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    options = {"algorithm": {"name": "ppo", "kl": "none"}, "critic": {"warmup_steps": 2}}
    train(small_run(**options, run__steps=4, train__warmup_steps=1, train__schedule="linear"))
    records = metrics.read(tmp_path / "runs" / "small")[1:]
    assert ["train/learning_rate" in record for record in records] == [False, False, True, True]
    assert [r["train/learning_rate"] for r in records[2:]] == pytest.approx([1e-3, 1e-3])
    assert [r["critic/learning_rate"] for r in records] == pytest.approx(
        [1e-4, 7.5e-5, 5e-5, 2.5e-5]
    )
    with pytest.raises(
        ValueError,
        match=r"train\.warmup_steps=2 contradicts run\.steps=4, in which the policy has 2",
    ):
        small_run(**options, run__steps=4, train__warmup_steps=2)


@pytest.mark.long
def test_saved_rollouts_that_are_fewer_than_the_warm_up_are_refused(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    train(small_run(run__steps=1))
    ppo = {"algorithm": {"name": "ppo", "kl": "none"}, "critic": {"warmup_steps": 1}}
    saved = tmp_path / "runs" / "small"
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps=1 contradicts run\.steps=1"):
        train(small_run(**ppo, run__name="again", run__from_buffer=str(saved), run__steps=3))
    assert not (tmp_path / "runs" / "again").exists()


def test_the_kl_is_known_where_no_row_counts(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    """Completions of one token are all cut off, and those are left out."""
    row = {"name": "ppo", "kl": "k1", "truncated": "leave_out"}
    config = small_run(
        algorithm=row, critic={"warmup_steps": 0}, run__steps=2, sample__max_new_tokens=1
    )
    train(config)
    found = metrics.read(tmp_path / "runs" / "small")[1:]
    assert [record["train/counted_fraction"] for record in found] == [0.0, 0.0]
    assert [record["train/kl_per_completion"] for record in found] == pytest.approx(
        [0, 0], abs=1e-6
    )


def test_a_reward_model_s_head_gives_what_the_run_pays(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    """(score - 3) / 0.5 by the folder's scale, times the reward's weight."""
    (tmp_path / "reward.json").write_text('{"mean": 3.0, "std": 0.5}')

    def values(weight: float, **options: object) -> list[float]:
        spec = {"name": "reward_model", "options": {"path": str(tmp_path), **options}}
        judge = {"name": "think_answer_tags", "weight": 0}
        config = small_run(score__rewards=[judge, {**spec, "weight": weight}])
        head = score_head.make(2, torch.device("cpu"), bias=True)
        head.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
        score_head.scale(head, *reward_models.paid_by(config, tmp_path, "critic.start"))
        return head(torch.tensor([[1.0, 1.0], [2.0, 1.0]]))[:, 0].tolist()  # scores 3 and 4

    assert values(1.0) == [0.0, 2.0]
    assert values(-2.0) == [0.0, -4.0]
    assert values(2.0, normalize="none") == [6.0, 8.0]
    other = small_run()
    assert reward_models.paid_by(other, tmp_path, "critic.start") == (2.0, -6.0)
    assert reward_models.paid_by(other, tmp_path / "none", "critic.start") == (1.0, 0.0)
