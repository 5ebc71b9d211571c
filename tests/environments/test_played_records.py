"""What scores, metrics and reports read from the record of a played rollout."""

import gzip
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from reason_llm.app.report import alarms
from reason_llm.app.report.payload import blobs, examine
from reason_llm.app.report.runs import read_run
from reason_llm.app.rescore import rescore
from reason_llm.config import Config
from reason_llm.config.score import RewardSpec, ScoreSection
from reason_llm.errors import RewardError
from reason_llm.model import to_data
from reason_llm.rollout import ROW, Completion, Group, Prompt, Span
from reason_llm.run import Document, RunIdentity
from reason_llm.run.store import metrics
from reason_llm.run.store.metrics import with_means
from reason_llm.score import Scorer
from reason_llm.train.objectives import PolicyGradient
from report_runs import evidence, group, record, write_run

RIGHT = "<think>a</think><answer>3</answer>"
REWARD_MODEL = {"name": "reward_model", "label": "a", "options": {"path": "some/folder"}}


def answers(*texts: str) -> Group:
    made = tuple(Completion((1,), text, (0.0,), "stop") for text in texts)
    return Group(Prompt("p", "What?", (), "3", {ROW: {"prompt": "x", "columns": {}}}), made)


def scores(spec: dict[str, Any], asked: Group) -> list[dict[str, float]]:
    """The rewards by name of every completion."""
    with Scorer(ScoreSection.model_validate({"rewards": [spec]}), max_new_tokens=100) as scorer:
        return [dict(c.rewards) for g in scorer.score([asked]) for c in g.completions]


def test_an_environment_s_word_or_note_is_the_reward() -> None:
    asked = answers("a", "b")
    told = [{"reward": 0.5, "notes": {"hits": 2, "what": "x"}}, {"notes": {"hits": 0}}]
    pairs = zip(asked.completions, told, strict=True)
    asked = replace(asked, completions=tuple(replace(c, environment=e) for c, e in pairs))
    wanted = {None: [0.5, math.nan], "hits": [2, 0], "what": [math.nan] * 2}
    for note, values in wanted.items():
        found = scores({"name": "environment", "options": {"note": note}}, asked)
        assert [f["environment"] for f in found] == pytest.approx(values, nan_ok=True)


def test_a_reward_function_in_trl_s_form_gets_the_environments() -> None:
    def played(completions: Any, environments: Any, log_metric: Any) -> Any:
        for each in environments:
            log_metric("hits", each.hits)
        return [each.reward + each.turns for each in environments]

    asked = answers("a", "b")
    told = [{"turns": 1, "reward": 0.5, "notes": {"hits": n}} for n in (2, 5)]
    pairs = zip(asked.completions, told, strict=True)
    asked_there = replace(asked, completions=tuple(replace(c, environment=e) for c, e in pairs))
    spec = RewardSpec.model_validate({"custom": played})
    with Scorer(ScoreSection(rewards=[spec]), 100) as scorer:
        (scored,) = scorer.score([asked_there])
        assert [c.rewards["played"] for c in scored.completions] == [1.5, 1.5]
        assert with_means(scorer.take_counts())["logged/hits"] == 3.5
        with pytest.raises(RewardError, match=r"'environments', which p lacks \(there is no"):
            scorer.score([asked])


def test_completions_without_any_reward_are_told_with_their_commonest_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "custom.py").write_text("def unsure(completion):\n    return None\n")
    spec = RewardSpec(custom=f"{path}:unsure")
    asked = answers("a", "b", "c", "d")
    told = [{}, {"problem": "rare"}, {"problem": "often"}, {"problem": "often"}]
    pairs = zip(asked.completions, told, strict=True)
    asked = replace(asked, completions=tuple(replace(c, environment=e) for c, e in pairs))
    with Scorer(ScoreSection(rewards=[spec]), 9) as scorer:
        scorer.score([asked])
        assert "gave None for 4 completions, such as p#0; their" in caplog.messages[-1]
        assert caplog.messages[-1].endswith("teach nothing; the environment: often")
        scorer.score([asked], only_first=True)
        assert "failed in 3 completions, such as p#1, which" in caplog.messages[-1]


def test_where_the_environment_failed_no_reward_is_given(caplog: pytest.LogCaptureFixture) -> None:
    other, asked = answers("y").completions[0], answers(RIGHT)
    failed = replace(asked.completions[0], finish_reason="error", environment={"problem": "fell"})
    asked = replace(asked, completions=(failed, other))
    rewards = [{"name": "format", "weight": 2}, REWARD_MODEL]
    section = ScoreSection.model_validate({"rewards": rewards})
    with Scorer(section, 10) as scorer:
        (judged,) = scorer.score([asked], only_first=True)
        (found,) = scorer.with_model_reward(scorer.score([asked]), "a", [1.0, 2.0])
    assert "failed in 1 completions, such as p#0, which count as wrong; the env" in caplog.text
    assert [c.reward for c in judged.completions] == [0.0, 0.0]
    assert all(map(math.isnan, found.completions[0].rewards.values()))
    assert [c.reward for c in found.completions] == [0.0, 2.0]


def test_metrics_of_played_rollouts() -> None:
    """Means are over the rollouts that were played."""
    told: list[tuple[Any, dict[str, Any]]] = [
        ("stop", {}),
        ("turns", {"turns": 4, "calls": 1}),
        ("error", {"turns": 2, "calls": 3, "failed_calls": 1}),
    ]
    made = [
        Completion((1,), "", (-1.0,), reason, {"a": 1.0}, 1.0, 0.0, environment=environment)
        for reason, environment in told
    ]
    found = metrics.describe([Group(Prompt("p", "", (1,), ""), tuple(made))], "a")
    assert {
        "sample/turns": 3.0, "sample/out_of_turns_fraction": 0.5,
        "sample/failed_calls_fraction": 0.25,
        "sample/environment_error_fraction": 0.5, "sample/no_calls_fraction": 0.0,
    }.items() <= found.items()  # fmt: skip


@pytest.mark.parametrize(
    ("fractions", "state"), [([1.0], "alarm"), ([1.0, 0.0, 0.0], "alarm"), ([0.9, 0.9], "unknown")]
)
def test_an_environment_that_always_fails_is_told_at_once(
    fractions: list[float], state: str
) -> None:
    key = "sample/environment_error_fraction"
    records = [record(step, **{key: value}) for step, value in enumerate(fractions, 1)]
    assert alarms.ALARMS["The environment fails"].check(evidence(records)).state == state


def test_what_an_environment_did_is_beside_the_completion(tmp_path: Path) -> None:
    played = group(["12"], [1.0], environment={"calls": 2.0}, finish_reason="environment")
    folder = write_run(tmp_path / "a", [record(0)], [[played]])
    blob = gzip.decompress(blobs([examine(read_run(folder, "a"))])[0, 0])
    header = orjson.loads(blob[4 : 4 + int.from_bytes(blob[:4], "little")])
    spans = [[each.start, each.end] for each in played.completions[0].spans]
    assert header["played"] == [{"spans": spans, "end": "environment", "calls": 2.0}]
    assert header["groups"][0]["answer"] == "3"


def test_rescored_turns_have_the_new_weight() -> None:
    """The environment's reward counts 2 in the place of 0.5."""
    config = Config.model_validate({
        "data": {"train": "x.jsonl"}, "sample": {"environment": "x.py:Play"},
        "algorithm": {"name": "bnpo", "credit": "turn", "kl": "none", "scale": "none"},
        "score": {"rewards": [{"name": "environment", "weight": 2.0}]},
    })  # fmt: skip
    made = []
    for turns in ((0.5,), (1.0, -0.5)):
        length, spans = 3 * len(turns) - 1, (Span(2, 3),) * (len(turns) - 1)
        made.append(Completion(
            (5,) * length, "", (-1.0,) * length, "environment", spans=spans,
            environment={"turn_rewards": list(turns), "reward": 0.5},
        ))  # fmt: skip
    played = Group(Prompt("p", "", (1, 2), "", {ROW: {}}), tuple(made))
    document = Document(RunIdentity("x", "x", {}), 0, True, True, 1, [played])
    found = rescore(document, config, Path("buffer.json")).groups
    assert [[c.reward for c in g.completions] for g in found] == [[1.0, 1.0]]
    data = PolicyGradient(config.algorithm.row(), 32, turn_weight=2.0).prepared(to_data(found))
    by_turn = [datum.on_trained("advantages").tolist() for datum in data]
    assert by_turn == [[0.0, 0.0], [0.0, 0.0, -2.0, -2.0]]
    assert [[c.advantage for c in g.completions] for g in found] == [[0.0, 0.0]]
