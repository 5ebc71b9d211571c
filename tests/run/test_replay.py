"""Groups of the last steps learned once more (train.replay).

1. As many as the step has groups without signal, the newest first, from memory or the archive.
2. The learner is given them, with weights by their own log-probs; a run that goes on has the same
   bits.
3. What it cannot act on is one line, and an archive that is gone is told.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reason_llm.config import Config
from reason_llm.loop import train
from reason_llm.model import Datum
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run.run import Run
from reason_llm.run.store import metrics
from reason_llm.run.store.archive import Archive, Replay
from reason_llm.run.store.document import Document, RunIdentity, read_document
from reason_llm.train import OBJECTIVES, Learners
from reason_llm.train.objectives import Batch, Counts

Small = Callable[..., Config]
RUN = RunIdentity("abc", "run", {})


def group(name: str, *advantages: float) -> Group:
    made = [Completion((1, 2), "x", (-1.0, -1.0), "stop", {"a": 0.0}, 0.0, a) for a in advantages]
    return Group(Prompt(name, "p", (3,), ""), tuple(made))


def test_the_newest_groups_with_signal_in_the_places_of_those_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [
        [group("a0", 1, -1), group("b0", 1, -1), group("c0", 0, 0)],
        [group("a1", 0, 0), group("b1", -1, 1), group("c1", 1, -1)],
        [group("a2", 0, 0), group("b2", 0, 0), group("c2", 0, 0)],
        [group("a3", 1, -1), group("b3", 0, 0), group("c3", 0, 0)],
    ]
    wanted = [[], ["a0"], ["b1", "c1", "a0"], ["b1", "c1"]]
    archive = Archive(tmp_path, "all", 1 << 30)
    whole = Replay(archive, RUN, 2)
    for step, groups in enumerate(steps):
        assert [g.prompt.id for g in whole.beside(step, groups)] == wanted[step]
        resumed = Replay(archive, RUN, 2)  # which has only the archive
        assert [g.prompt.id for g in resumed.beside(step, groups)] == wanted[step]
        archive.add(Document(RUN, step, True, False, 3, groups))
    assert Replay(archive, RUN, 0).beside(3, steps[3]) == []
    assert not caplog.records
    (tmp_path / "buffers" / "step-00000001.json.gz").unlink()
    with caplog.at_level(logging.WARNING):
        assert Replay(archive, RUN, 1).beside(2, steps[2]) == []
    assert "the rollouts of step 2 are not in" in caplog.text


def test_the_archive_keeps_what_a_run_that_goes_on_learns_once_more(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "all", 1)  # full with any document
    for step in range(5):
        archive.add(Document(RUN, step, True, False, 0, []), needed_from=0)
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    run: Any = SimpleNamespace(
        _archived=archive, job=SimpleNamespace(folder=tmp_path),
        config=SimpleNamespace(learns=False, train=SimpleNamespace(replay=2)),
        learners=SimpleNamespace(policy=SimpleNamespace(logprobs_at_start=[])),
        _writer=SimpleNamespace(submit=lambda write: write()),
    )  # fmt: skip
    Run._archive(run, Document(RUN, 5, True, False, 0, []))
    kept = [path.name for path in sorted((tmp_path / "buffers").iterdir())]
    assert kept == [f"step-0000000{step}.json.gz" for step in (3, 4, 5)]


REPLAY: dict[str, Any] = {
    "train__replay": 2, "run__steps": 4, "sample__completions_per_prompt": 3,
    "sample__max_new_tokens": 24, "sample__prompts_per_step": 6,
}  # fmt: skip


@pytest.mark.long
def test_the_learner_is_given_them_and_a_run_goes_on_with_them(
    small_run: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[Datum]] = []
    learn = Learners.learn

    def seen(self: Learners, step: int, data: list[Datum], *rest: Any) -> dict[str, float]:
        given.append(list(data))
        return learn(self, step, data, *rest)

    monkeypatch.setattr(Learners, "learn", seen)
    train(small_run(**REPLAY, run__name="whole"))
    runs = tmp_path / "runs"
    documents = [read_document(path) for path in sorted((runs / "whole" / "buffers").iterdir())]
    replayed = 0
    for step, (rows, document) in enumerate(zip(given, documents, strict=True)):
        signal = [g for g in document.groups if any(c.advantage for c in g.completions)]
        before = [
            g
            for earlier in documents[max(0, step - 2) : step][::-1]
            for g in earlier.groups
            if any(c.advantage for c in g.completions)
        ]
        more = before[: len(document.groups) - len(signal)]
        expected = [c for g in [*document.groups, *more] for c in g.completions]
        assert [row.on_trained("sampler_logprobs").tolist() for row in rows] == [
            pytest.approx(c.logprobs) for c in expected
        ]
        assert all(
            row.on_trained("advantages")[0] == pytest.approx(c.advantage)
            for row, c in zip(rows, expected, strict=True)
        )
        assert len({row.group for row in rows}) == len(document.groups) + len(more)
        replayed += len(more)
    assert replayed > 3
    records = metrics.read(runs / "whole")
    assert sum(record.get("train/replayed_groups", 0) for record in records) == replayed
    for steps in (2, 4):
        train(small_run(**REPLAY | {"run__steps": steps}, run__name="parts"))
    adapters = [
        runs / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "parts")
    ]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_they_count_by_the_ratio_to_their_own_log_probs(small_run: Small) -> None:
    """A token twice as likely as when it was drawn weighs two, one that is ten times so the cap."""
    objective = OBJECTIVES["rl"](small_run(**REPLAY))
    mask = torch.tensor([[False, True, True, True]])
    now = torch.tensor([[0.0, -1.0, -1.0, -1.0]], requires_grad=True)
    theirs = now.detach() - torch.tensor([[0.0, 1.5, 10.0, 1.0]]).log().nan_to_num(neginf=0)
    columns = {"sampler_logprobs": theirs, "advantages": torch.ones(1, 4)}
    batch = Batch(mask, now, torch.zeros(1, 4), columns, torch.zeros(1))
    objective.loss(batch, Counts(1.0, 3)).total.backward()
    assert now.grad is not None
    gradient = -now.grad[0, 1:]
    torch.testing.assert_close(gradient / gradient[2], torch.tensor([1.5, 2.0, 1.0]))


@pytest.mark.parametrize(
    "given",
    [{"run__keep_buffers": "none"}, {"algorithm__correction": "none"}, {"stage": "sample"},
     {"algorithm": {"name": "ppo"}}],
)  # fmt: skip
def test_what_it_cannot_act_on_is_one_line(given: dict[str, Any], small_run: Small) -> None:
    with pytest.raises(ValueError, match=r"train\.replay=2 contradicts"):
        small_run(**REPLAY | given)
