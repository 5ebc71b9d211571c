"""What a run does between its phases, each method by itself: what it archives, shows, saves, and
gives to the others."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Named
from typing import Any

import orjson
import pytest

from reason_llm import loop
from reason_llm.config import Config
from reason_llm.files import read_object
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run import run as run_module
from reason_llm.run.run import Run
from reason_llm.run.start import saved_rollouts
from reason_llm.run.store import checkpoint
from reason_llm.run.store.best import Best
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.document import Document, RunIdentity
from reason_llm.run.watch import SILENT

Small = Callable[..., Config]
IDENTITY = RunIdentity("a", "small", {})
STATE = RunState(IDENTITY, 4, None, drawn=10, kl_coefficient=0.25)
ONE = Completion((1, 2), "", (-1.0, -1.0), "stop", {"a": 1.0}, 1.0, 0.5, (), (-2.0, -2.0))
GROUPS = [Group(Prompt(name, "", (1,), ""), (ONE, ONE)) for name in "pq"]
DOCUMENT = Document(IDENTITY, 4, True, False, 7, GROUPS, {"score/errors": 2.0}, None, 3)


@pytest.mark.parametrize(("tokens", "noted"), [(64, None), (63, 63)])
def test_what_a_checkpoint_holds(
    tokens: int, noted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller micro-batch than planned; the adapters of earlier versions, and the best one."""
    given, told = [], []
    monkeypatch.setattr(checkpoint, "save", lambda *all: given.append(all) or "saved")
    run: Any = Named(
        state=STATE, _saved=None, model="model", _writer="writer", _log=Named(sha256="digest"),
        learners=Named(policy=Named(micro_batches=Named(tokens=tokens)), optimizers="optimizers"),
        job=Named(folder="folder", plan=Named(micro_batch_tokens=64)),
        config=Named(run=Named(keep_checkpoints=7)),
        _team=Named(adapters={2: "two", 3: "three", 4: "own"}),
        _kept=Named(beside={"best.x": "best"}, saved=told.append),
    )  # fmt: skip
    Run._save(run)
    state = replace(STATE, micro_batch_tokens=noted, metrics_sha256="digest")
    versions = {f"version-0000000{n}.safetensors": each for n, each in ((2, "two"), (3, "three"))}
    beside = {"best.x": "best"} | versions
    assert given == [("folder", state, "model", "optimizers", 7, "writer", beside)]
    assert (run.state, run._saved, told) == ("saved", "saved", ["saved"])
    Run._save(run)
    assert len(given) == 1


@pytest.mark.parametrize(
    ("every", "steps", "early", "signal", "saves"),
    [(2, 9, False, False, False), (5, 9, False, False, True), (2, 5, False, False, True),
     (2, 9, True, False, True), (2, 9, False, True, True)],
)  # fmt: skip
@pytest.mark.parametrize("samples", [True, False])
def test_the_end_of_a_step(
    every: int, steps: int, early: bool, signal: bool, saves: bool, samples: bool
) -> None:
    """The fifth: every so many steps it is saved, at the last one, and when a signal asks."""
    acts: list[Any] = []

    def note(name: str, value: Any = None) -> Callable[..., Any]:
        return lambda *given: acts.append((name, *given)) or value

    section, stop = Named(steps=steps, save_every=every), Named(requested=signal, check=note("end"))
    run: Any = Named(
        state=STATE, record={"a": 1.0, "b": 1.0}, _stop=stop, _save=note("save"),
        config=Named(samples=samples, run=section, train=Named(rows_per_step=6)),
        _writer=Named(wait=note("wait"), take_seconds=lambda: 3.0, submit=note("submit")),
        _buffer=Named(find={4: DOCUMENT}.get), _archive=note("archive"), _show=note("show"),
        _of_rollouts=lambda document: {"of": 2.0}, _held_out=Named(is_due=lambda step: step == 5),
        _next_kl_coefficient=note("kl", 0.75), _evaluate_if=note("evaluate"),
        _kept=Named(take=note("take")), _log=Named(sync="sync"),
        _team=Named(take_record=lambda step: {"a": step, "c": step}),
        job=Named(ends_early=lambda state: early, data=Named(sizes=[5, 3])),
    )  # fmt: skip
    Run.end(run, 4, {"b": 2.0})
    state = replace(STATE, step=5, kl_coefficient=0.75, drawn=17 if samples else 16)
    assert run.state == state
    more = {"of": 2.0} if samples else {"data/epoch": 2.0}
    assert {k: v for k, v in run.record.items() if k != "time/saving_seconds"} == {
        "a": 1.0, "b": 2.0, "c": 4, "time/writing_seconds": 3.0, **more,
    }  # fmt: skip
    assert ("time/saving_seconds" in run.record) is saves
    assert acts == [
        ("wait",), *([("archive", DOCUMENT)] if samples else []), ("kl", {"b": 2.0}),
        ("evaluate", True), ("take", state), ("show", GROUPS[1] if samples else None),
        ("submit", "sync"), *([("save",), ("end",)] if saves else []),
    ]  # fmt: skip


@pytest.mark.parametrize(("staleness", "version"), [(2, 3), (0, 3), (2, None)])
def test_the_record_of_a_step_s_rollouts(staleness: int, version: int | None) -> None:
    rewards = [Named(key="a")]
    config = Named(score=Named(rewards=rewards), run=Named(max_staleness=staleness))
    run: Any = Named(config=config, job=Named(scorer=Named(finds=None)))
    found = Run._of_rollouts(run, replace(DOCUMENT, weight_version=version))
    stale = {"sample/staleness_steps": 1} if staleness and version else {}
    assert found == run_module.metrics.describe(GROUPS, "a") | stale | {
        "score/errors": 2.0, "sample/groups_dropped": 5,
    }  # fmt: skip
    assert found["score/first_reward_std"] == 0.0


def test_a_record_is_shown_with_what_was_planned() -> None:
    told: list[Any] = []
    peak = Named(sampling=3 << 30, learning=5 << 30)
    run: Any = Named(
        job=Named(plan=Named(peak=peak)), record={"x": 1.0}, state=STATE,
        _log=Named(write=lambda step, record: {"step": step} | record),
        _watch=Named(step=lambda *given: told.append(given)),
    )  # fmt: skip
    Run._show(run, GROUPS[0])
    ((record, group),) = told
    assert record.pop("memory/peak_rss_mib") > 1
    assert record == {"step": 4, "x": 1.0, "memory/sampling_planned_gib": 3.0,
                      "memory/learning_planned_gib": 5.0}  # fmt: skip
    assert (group, run.record) == (GROUPS[0], {})


@pytest.mark.parametrize(
    ("is_due", "learns", "best"), [(True, True, 4), (True, False, None), (False, True, None)]
)
def test_an_evaluation_counts_its_errors_and_may_be_the_best(
    is_due: bool, learns: bool, best: int | None
) -> None:
    asked: list[Any] = []

    def evaluate(*given: Any) -> dict[str, float]:
        asked.append(given)
        return {"eval/accuracy": 0.5}

    config = Named(learns=learns, score=Named(judged_by="mine"))
    run: Any = Named(
        record={"score/errors": 1.0}, state=STATE, config=config, _watch="watch", _writer="writer",
        _held_out=Named(evaluate=evaluate, digest="set"),
        job=Named(scorer=Named(take_counts=lambda: {"score/errors": 2.0, "score/timeouts": 3.0})),
    )  # fmt: skip
    Run._evaluate_if(run, is_due)
    assert asked == ([(4, "watch", "writer")] if is_due else [])
    assert (run.record["score/errors"], run.record["score/timeouts"]) == (3.0, 3.0)
    assert run.state.best == (best and Best(4, "eval/accuracy", 0.5, "set", "mine"))


def test_what_is_sampled_by_and_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest peak of memory of a phase in several parts; the routes once."""
    acts: list[Any] = []

    @contextmanager
    def phase() -> Any:
        yield Named(gib=peaks.pop(0))

    def prove(*given: Any) -> dict[str, float]:
        acts.append(given)
        return {"sample/route_agreement": 0.75}

    peaks = [2.0, 3.0, 1.0]
    monkeypatch.setattr(run_module, "sampling", lambda *given: nullcontext(given))
    monkeypatch.setattr(run_module, "prove_sampler_is_policy", prove)
    job = Named(plan=Named(cache_tokens=9), data=Named(prompts="prompts"), state=STATE)
    run: Any = Named(
        _team=Named(at=lambda version: acts.append(version) or nullcontext()), job=job, record={},
        model=Named(engine=None), _meter=Named(phase=phase), state=STATE,
        _watch=Named(line=acts.append),
    )  # fmt: skip
    run._measured = lambda phase: Run._measured(run, phase)
    for engine, step in ((None, 4), ("engine", 4), ("engine", 5)):
        run.model.engine, run.state = engine, replace(STATE, step=step)
        with Run._sampling_by(run, 3) as sampler:
            assert sampler == (run.model, 9)
    proof = ((run.model, 9), run.model, "prompts")
    line = "routes: sampler and learner choose the same experts for 75.0% of tokens and layers"
    assert acts == [3, 3, proof, line, 3, proof]
    assert run.record == {"memory/sampling_peak_gib": 3.0, "sample/route_agreement": 0.75}


def test_a_step_is_collected_and_learned_with_what_the_run_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    @contextmanager
    def phase(name: str, total: int) -> Any:
        told.append((name, total))
        yield lambda tokens, items: told.append((tokens, items))

    monkeypatch.setattr(run_module, "learning", lambda learner: nullcontext())

    def learn(step: int, data: Any, progress: Any, kl: float) -> tuple[Any, ...]:
        progress(2)
        return step, data, kl

    def ahead(step: Any, sampling: Any) -> Any:
        told.append((step, sampling))
        return nullcontext()

    run: Any = Named(
        state=STATE, job="job", record={}, _buffer="buffer", _stop="stop", _sampling_by="by",
        _watch=Named(phase=phase), _saved=None, _measured=lambda phase: nullcontext(),
        config=Named(samples=True, train=Named(epochs=3, rows_per_step=5)),
        learners=Named(policy=None), _log=Named(records=list),
        _team=Named(version_of=lambda number: number - 2, learn=learn, sampling_ahead=ahead),
    )  # fmt: skip
    run.step = lambda number: Run.step(run, number)
    step = Run.step(run, 6)
    assert (step.number, step.drawn, step.version, step.checkpoint) == (6, 10, 4, None)
    assert (step.job, step.buffer, step.stop, step.record) == ("job", "buffer", "stop", run.record)
    run._saved = replace(STATE, folder=Path("there"))
    assert Run.step(run, 6).checkpoint == "there"
    run.rows = Named(drawn=lambda *given: given)
    assert Run.batch(run, 6) == (10, 5)
    with Run.learning(run, 4, ["a", "b"]) as learned:
        assert learned() == (4, ["a", "b"], 0.25)
    assert told == [(Run.step(run, 4), "by"), ("learning", 6), (0, 2)]
    run._reading = lambda what, count: nullcontext((what, count))
    run._reward_models = Named(scores=lambda *given: given)
    scored = Run.model_scores(run, "model", GROUPS)  # type: ignore[arg-type]
    assert scored == ("model", GROUPS, None, ("scoring with reward models", 4))


@pytest.mark.parametrize("steps", [4, 6])
def test_the_summary_of_a_run(steps: int, tmp_path: Path) -> None:
    acts: list[Any] = []
    records = [{"step": 0, "eval/accuracy": 0.25, "time/total_seconds": 2.0}, {"step": 4}]
    best = Best(2, "eval/accuracy", 0.5, "set", "accuracy", 2)
    config = Named(
        samples=True, model=Named(train="lora"), score=Named(judged_by="mine"),
        run=Named(steps=steps), eval=Named(patience=2),
    )  # fmt: skip
    run: Any = Named(
        job=Named(folder=tmp_path), state=replace(STATE, best=best), config=config,
        _writer=Named(wait=lambda: acts.append("wait")),
        _kept=Named(finish=lambda *given: acts.append(given)), _held_out=Named(judge_rows="judge"),
        _buffer=Named(finish=lambda: acts.append("finish")),
        _log=Named(records=lambda: records, seconds_since=lambda: 0.5),
    )  # fmt: skip
    summary = Run.finish(run)
    assert acts == ["wait", (4, "judge"), "finish"]
    written = orjson.loads((tmp_path / "summary.json").read_bytes())
    assert written.pop("sha256") and written == summary
    assert read_object(tmp_path / "summary.json")["steps"] == 4
    assert (summary["total_seconds"], summary["adapter"]) == (2.5, str(tmp_path / "adapter"))
    assert (summary["best"]["step"], summary["judged_by"]) == (2, "mine")
    assert summary["ended_early"] == (
        None if steps == 4 else "ended early at step 4 of 6: 2 evaluations in a row were no better "
        "than held-out accuracy 50.0% at step 2 (eval.patience)"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "count", "is_alone"),
    [({}, 1, True), ({"run__shards": 2}, 1, False), ({"run__max_staleness": 1}, 1, False),
     ({}, 2, False), ({"run__samplers": 1, "run__shards": 1}, 1, False)],
)  # fmt: skip
def test_who_works_alone(
    options: dict[str, Any], count: int, is_alone: bool, small_run: Small,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("reason_llm.run.team.many.start", lambda *given: given)
    job: Any = Named(config=small_run(**options), run=Named(replicas=count))
    team = run_module._team_of(job, SILENT)
    assert (team == (job, SILENT, count)) is not is_alone
    if is_alone:
        with team as alone:
            assert (alone.version_of(3), alone.take_record(3), alone.adapters) == (3, {}, {})


@pytest.mark.parametrize(
    ("options", "saved", "source", "ahead"),
    [({}, [], "archive", False), ({"run__max_staleness": 1}, [], "archive", True),
     ({"run__resume": "never"}, [Path("b")], "saved", False)],
)  # fmt: skip
def test_the_buffer_of_a_run(
    options: dict[str, Any], saved: list[Path], source: str, ahead: bool, small_run: Small,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = small_run(**options, run__keep_buffers_gib=1.5, run__keep_buffers=3)
    job: Any = Named(config=config, folder=tmp_path / "f", state=STATE)
    job.run = Named(saved_buffers=saved, checkpoints=[])
    if config.run.resume == "never":  # whatever is there
        (tmp_path / "f" / "checkpoints" / "step-00000001").mkdir(parents=True)
    archive = run_module._archive_of(job)
    assert (archive.folder, archive.keep) == (tmp_path / "f" / "buffers", 3)
    assert archive.most_bytes == 3 << 29
    monkeypatch.setattr(run_module, "_archive_of", lambda job: Named(read="archive"))
    monkeypatch.setattr(run_module, "_saved_rollouts", lambda job, step, run: "saved")
    with run_module._locked(job) as (buffer, writer):
        (found,) = buffer.sources
        assert (found if saved == [] else found(0, IDENTITY)) == source
        assert buffer.ahead == (tmp_path / "f" / "ahead" if ahead else None)
        assert (buffer.discard, buffer.writer) == (config.run.resume == "never", writer)
        assert (buffer.path, buffer.run) == (config.run.buffer_path, IDENTITY)


def test_saved_rollouts_are_of_this_run_s_step(
    small_run: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With advantages by this run's algorithm, and as they were before they were learned from."""
    told: list[Any] = []
    monkeypatch.setattr(saved_rollouts, "read", lambda path, subject: DOCUMENT)
    monkeypatch.setattr(saved_rollouts, "warn_of_another", lambda *given: told.append(given))
    monkeypatch.setattr(run_module, "with_advantages", lambda groups, *given: [*groups[:1], *given])
    monkeypatch.setattr(run_module, "without_learner_logprobs", lambda groups: ["before", *groups])
    config = small_run()
    run = Named(saved_buffers=[Path("a"), Path("b")], subject="subject", saved_run="theirs")
    job: Any = Named(run=run, scorer=Named(weights={"a": 2.0}), config=config)
    found = run_module._saved_rollouts(job, 1, IDENTITY)
    assert told == [(Path("b"), DOCUMENT, "theirs")]
    groups: Any = ["before", GROUPS[0], config.learned_row, {"a": 2.0}, config.turn_weight]
    assert found == replace(DOCUMENT, step=1, groups=groups)


@pytest.mark.parametrize("case", ["whole", "scored", "sampled"])
def test_where_a_step_s_rollouts_come_from(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = None if case == "sampled" else Named(complete=case == "whole", groups=["on disk"])
    step = Named(begin=lambda: saved)
    before = ["before"] if case == "scored" else None
    monkeypatch.setattr(loop, "sampled_before", lambda step: before)
    monkeypatch.setattr(loop, "collect", lambda step, sampler: ["new", sampler])
    monkeypatch.setattr(loop, "with_reward_models", lambda step, groups, ask: [*groups, ask])
    run: Any = Named(step=lambda number: step, model_scores="scores")
    run.sampling = lambda number: nullcontext(f"by {number}")
    expected = {"whole": ["on disk"], "scored": ["before", "scores"],
                "sampled": ["new", "by 3", "scores"]}  # fmt: skip
    assert loop.rollouts(run, 3) == expected[case]
