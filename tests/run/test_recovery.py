"""Where a run stands: by its checkpoints, by the one that run.resume names, or by its buffer; and
what makes it the same run."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.errors import CheckpointError, DataError, RolloutBufferError
from reason_llm.rollout import Completion, Conversation, Group, Prompt, TokenRow
from reason_llm.run.start import prepare, recovery, resolve, saved_rollouts
from reason_llm.run.start.saved_rollouts import check_fits
from reason_llm.run.store import checkpoint
from reason_llm.run.store.archive import Archive
from reason_llm.run.store.best import Best
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.document import Document, RunIdentity, to_bytes
from reason_llm.run.watch import SILENT

Make = Callable[..., Config]
HERE, THERE = Path("own"), Path("there")


def state(id: str, step: int, folder: Path | None, resume: str = "there") -> RunState:
    return RunState(RunIdentity(id, "mine", {"run": {"resume": resume}}), step, folder)


@pytest.mark.parametrize(
    ("resume", "own", "sampled", "expected"),
    [
        ("never", state("own", 5, HERE), 2, None),
        ("auto", state("own", 5, HERE), 2, ("own", 5, HERE)),
        ("auto", None, 0, ("source", 0, None)),  # by the buffer alone, as the base sampled it
        ("auto", None, None, ("found", 0, None)),
        ("there", None, None, ("new", 3, THERE)),
        ("there", None, 4, ("source", 3, THERE)),  # a copy, taken up with the buffer
        ("there", None, 2, ("new", 3, THERE)),  # the buffer is of an earlier step
        ("there", state("new", 5, HERE, "else"), None, ("new", 5, HERE)),  # it began there
        ("there", state("source", 5, HERE), None, ("source", 5, HERE)),  # from the copy
        ("there", state("source", 5, HERE, "auto"), None, "did not begin from run.resume=there"),
        ("there", state("own", 5, HERE), None, "did not begin from run.resume=there"),
        ("broken", state("own", 5, HERE), None, "broken; or leave --run.resume out to go on with"),
        ("broken", None, None, "broken$"),
    ],
)
def test_where_a_run_stands(
    resume: str, own: RunState | None, sampled: int | None, expected: Any, tmp_path: Path,
    small_run: Make, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = small_run(run__name="mine", run__resume=resume)
    states = {THERE: state("source", 3, THERE, "auto"), HERE: own}
    begun, found = state("new", 3, THERE), own or state("found", 0, None)
    monkeypatch.setattr(checkpoint, "read", states.__getitem__)

    def begin_from(path: Path, name: str, identity: object) -> RunState:
        if path == Path("broken"):
            raise CheckpointError("broken")
        return begun

    monkeypatch.setattr(checkpoint, "begin_from", begin_from)
    monkeypatch.setattr(checkpoint, "find", lambda folder, name, identity: found)
    monkeypatch.setattr(checkpoint, "refused_changes", lambda *given: ())
    if sampled is not None:
        source = RunIdentity("source", "mine", {"run": {"resume": "auto"}})
        content = to_bytes(Document(source, sampled, False, False, 0, []))
        config.run.buffer_path.write_bytes(content)
    run: Any = SimpleNamespace(
        config=config, folder=tmp_path / "run", identity=begun.run.config, checkpoints=own and [own]
    )
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            recovery._begun_from(run)
        return
    stands = recovery._begun_from(run)
    if expected is None:
        assert (stands.step, stands.folder, stands.run.id in ("own", "source")) == (0, None, False)
    else:
        assert (stands.run.id, stands.step, stands.folder) == expected


@pytest.mark.parametrize(
    ("name", "trained", "is_found"),
    [("mine", False, True), ("mine", True, False), ("other", False, False)],
)
def test_rollouts_of_an_unfinished_run_of_this_name(
    name: str, trained: bool, is_found: bool, tmp_path: Path
) -> None:
    path = tmp_path / "buffer.json"
    assert recovery._unfinished(path, "mine") is None
    one = Completion((1,), "", (-1.0,), "stop", {"a": 1.0}, 1.0, 0.0)
    group = Group(PROMPT, (one,))
    document = Document(RunIdentity("x", name, {}), 3, True, trained, 1, [group])
    path.write_bytes(to_bytes(document))
    assert recovery._unfinished(path, "mine") == (document if is_found else None)


@pytest.mark.parametrize(
    ("context", "vocabulary", "told"),
    [(None, 10, None), (5, 10, None), (4, 10, "has 5 tokens and the context is 4"),
     (5, 9, "the token id 9 and the model 9 tokens")],
)  # fmt: skip
@pytest.mark.parametrize("where", ["prompt", "completion", "other prompt", "other"])
def test_rollouts_fit_the_model(
    context: int | None, vocabulary: int, told: str | None, where: str
) -> None:
    """One of the conversations has the limit of tokens, and the largest id."""
    long: Any = {where: (9, 1, 1)}
    other = Conversation(long.get("other prompt", (1, 1)), long.get("other", (1, 1)), "", ())
    one = Completion(long.get("completion", (1, 1)), "", (), "stop", others=(other,))
    group = Group(Prompt("p", "", long.get("prompt", (1, 1)), ""), (one,))
    document = Document(RunIdentity("x", "x", {}), 0, True, False, 1, [group])
    with nullcontext() if told is None else pytest.raises(RolloutBufferError, match=told):
        check_fits(Path("buffer.json"), document, context, vocabulary)


@pytest.mark.parametrize(
    ("step", "whole", "named", "began", "expected"),
    [
        (0, False, None, "auto", 0),
        (0, False, None, "never", 0),
        (0, False, None, "there", "its checkpoint is missing: the buffer names none; restore it"),
        (2, False, None, "auto", "rescore.py buffer.json with this config and these options, then "
         "the same command with --run.name mine_replay --from-buffer buffer.rescored.json"),
        (2, True, None, "auto", "alone: the same command with --run.name mine_replay "
         "--from-buffer buffer.json"),
        (2, True, "gone", "auto", "is missing: gone is not there; restore it"),
        (2, True, "a\0b", "auto", "is not there; restore it"),
        (2, True, "damaged", "auto", "is missing: it is damaged; restore it"),
        (2, True, "source 1", "auto", 1),
        (2, True, "source 2", "there", 2),
        (2, True, "source 3", "auto", "source 3 is of another run or of a later step"),
        (2, True, "other 1", "auto", "other 1 is of another run or of a later step"),
    ],
)  # fmt: skip
def test_where_a_run_without_its_checkpoints_stands(
    step: int, whole: bool, named: str | None, began: str, expected: int | str, tmp_path: Path,
    small_run: Make, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the buffer and the checkpoint that this names, which is elsewhere."""
    monkeypatch.chdir(tmp_path)
    for name in ("damaged", "source 1", "source 2", "source 3", "other 1"):
        Path(name).mkdir()

    def read(folder: Path) -> RunState:
        if folder.name == "damaged":
            raise CheckpointError("it is damaged")
        id, number = folder.name.split()
        return state(id, int(number), folder)

    monkeypatch.setattr(checkpoint, "read", read)
    config = small_run(run__name="mine", run__buffer="buffer.json")
    resumed = config.model_dump(mode="json") | {"run": {"resume": began}}
    one = Completion((1,), "", (-1.0,), "stop", {"a": 1.0}, 1.0, 0.0 if whole else None)
    document = Document(
        RunIdentity("source", "mine", resumed), step, whole, False, 1, [Group(PROMPT, (one,))],
        checkpoint=named,
    )  # fmt: skip
    config.run.buffer_path.write_bytes(to_bytes(document))
    monkeypatch.setattr(checkpoint, "refused_changes", lambda *given: ())
    run: Any = SimpleNamespace(
        config=config, folder=tmp_path / "run", identity={"new": 1}, checkpoints=[]
    )
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            recovery._begun_from(run)
        return
    stands = recovery._begun_from(run)
    folder = Path(named) if named else None
    assert stands == RunState(RunIdentity("source", "mine", {"new": 1}), expected, folder)


@pytest.mark.parametrize(
    ("holder", "trained", "has_own", "expected"),
    [
        (None, False, False, "buffer.json"),
        (None, False, True, "buffer.mine.json"),
        ("mine", False, False, "buffer.json"),
        ("mine", False, True, "buffer.json"),
        ("other", False, False, "buffer.mine.json"),
        ("other", True, False, "buffer.json"),
        ("other", True, True, "buffer.mine.json"),
    ],
)
def test_where_its_rollouts_are(
    holder: str | None, trained: bool, has_own: bool, expected: str, tmp_path: Path,
    small_run: Make, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (data := tmp_path / "data").mkdir()
    if holder is not None:
        document = Document(RunIdentity("x", holder, {}), 0, False, trained, 0, [])
        (data / "buffer.json").write_bytes(to_bytes(document))
    if has_own:
        (data / "buffer.mine.json").touch()
    named = {"run__name": "mine", "run__buffer": None}
    assert resolve._buffer(small_run(**named)).name == expected
    assert resolve._buffer(small_run(**named | {"run__buffer": "set.json"})).name == "set.json"
    rows = {"stage": "sft", "sample": {}, "algorithm": {}, "score": {}}
    assert resolve._buffer(small_run(**named, **rows)).name == "buffer.json"


def test_a_run_that_starts_afresh_does_not_move_its_source_aside(
    tmp_path: Path, small_run: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = Completion((1,), "", (-1.0,), "stop", {"a": 1.0}, 1.0, 0.0)
    run = RunIdentity("x", "x", {"run": {"keep_buffers": "all"}})
    for step in (0, 1):
        document = Document(run, step, True, True, 1, [Group(PROMPT, (one,))])
        Archive(tmp_path / "runs" / "mine", "all", 1 << 30).add(document)
    source = tmp_path / "runs" / "mine" / "buffers"
    named = {"run__name": "mine", "run__from_buffer": str(source)}
    for resume, steps, folder in (("auto", 2, "mine"), ("never", 1, "other"), ("never", 3, "mine")):
        config = small_run(**named, run__resume=resume, run__steps=steps)
        if (resume, folder) == ("never", "mine"):
            with pytest.raises(
                RolloutBufferError, match=r"moves aside; give this run a --run\.name"
            ):
                resolve._saved_buffers(config, tmp_path / "runs" / folder)
        else:
            assert len(resolve._saved_buffers(config, tmp_path / "runs" / folder)) == 2
    (told,) = caplog.messages  # of the second
    assert told.startswith("run.steps=1 is not used") and "holds 2 steps" in told


PROMPT = Prompt("file:1", "text", (1, 2), "3", {"column": 4})
ROW = TokenRow("file:1", (1, 2, 3), (False, True, True), 0, 0.5)


def test_a_run_goes_on_with_the_same_data(tmp_path: Path, small_run: Make) -> None:
    model: Any = SimpleNamespace(key="a", digest="of a")

    def identity(**changes: Any) -> dict[str, Any]:
        """With changes to the second prompt or row."""
        prompt, row = (
            replace(each, **{k: v for k, v in changes.items() if hasattr(each, k)})
            for each in (PROMPT, ROW)
        )
        training = [SimpleNamespace(prompts=[PROMPT, prompt], rows=[ROW, row])]
        data: Any = SimpleNamespace(training=training, prompts=[prompt])
        return resolve._identity(small_run(), None, data, [model], [Path("b"), Path("c")])

    one = identity()
    assert identity(id="moved:1", text="other", name="moved:1") == one
    for changes in (
        {"token_ids": (2, 1)}, {"answer": "4"}, {"ids": (1, 3, 2)}, {"value": -0.5},
        {"trained": (False, False, True)}, {"extra": {"column": 5}},
    ):  # fmt: skip
        name = "columns_sha256" if "extra" in changes else "prompts_sha256"
        other = identity(**changes)
        assert other["data"].pop(name) != one["data"][name]
        assert one == other | {"data": other["data"] | {name: one["data"][name]}}
    assert one["score"]["reward_models_sha256"] == {"a": "of a"}
    assert one["run"]["first_buffer"] == "b"


@pytest.mark.parametrize(
    ("stage", "context", "found"),
    [("rl", 99, (5, 4)), ("sft", 99, (5, 6)), ("kto", 10, (5, 10)), ("kto", 9, "tokens together")],
)
def test_the_memory_is_planned_for_the_longest(
    stage: str, context: int, found: tuple[int, int] | str
) -> None:
    """Held-out prompts and rows are among them. KTO takes a prompt of 6 with an answer of 4; where
    a teacher reads another prompt, a row is as long as that with an answer."""

    def row(asked: int, answer: int) -> TokenRow:
        return TokenRow("r", (1,) * (asked + answer), (False,) * asked + (True,) * answer)

    def prompt(tokens: int) -> Prompt:
        return Prompt("p", "", (1,) * tokens, "")

    rows = {"rl": [], "sft": [row(2, 1)]}.get(stage, [row(6, 1)])
    held = {"rl": [row(1, 3)], "sft": [row(2, 4)]}.get(stage, [row(1, 4)])
    data: Any = SimpleNamespace(
        prompts=[prompt(3)], held_out_prompts=[prompt(5)], teacher_prompts={},
        training=[SimpleNamespace(rows=rows)], held_out_rows=SimpleNamespace(rows=held),
    )  # fmt: skip
    config = SimpleNamespace(
        stage="preference" if stage == "kto" else stage, learns_pairs=False, learns="learns",
        sample=SimpleNamespace(max_new_tokens=30),
    )  # fmt: skip
    subject: Any = SimpleNamespace(config=config, context_tokens=context)
    subject.plan = lambda prompt, *, learns, longest_row: (prompt, longest_row, learns)
    if isinstance(found, str):
        with pytest.raises(DataError, match=f"have 10 {found}"):
            prepare._plan(subject, data)
        return
    assert prepare._plan(subject, data) == (*found, "learns")
    data.teacher_prompts = {(1,): (1,) * 8, (2,): (1,) * 7}
    assert prepare._plan(subject, data) == (5, 38, "learns")


@pytest.mark.parametrize(
    ("stands", "finished", "patience", "found"),
    [(4, 4, 0, None), (5, 5, 0, "s"), (6, 6, 0, "s"), (5, 4, 0, None), (3, 3, 2, "s"),
     (3, 3, 3, None)],
)  # fmt: skip
def test_a_run_is_finished_where_its_summary_tells_of_its_last_step(
    stands: int, finished: int, patience: int, found: str | None, tmp_path: Path
) -> None:
    config = SimpleNamespace(run=SimpleNamespace(steps=5), eval=SimpleNamespace(patience=patience))
    best = Best(1, "eval/loss", 1.0, "set", "accuracy", 2)
    where = RunState(RunIdentity("a", "mine", {}), stands, None, best=best)
    run: Any = SimpleNamespace(config=config, folder=tmp_path, checkpoints=[])
    nothing: Any = None
    job = prepare.Job(run, nothing, nothing, nothing, where)
    assert job.finished(SILENT) is None
    (tmp_path / "summary.json").write_text(f'{{"steps": {finished}, "s": 1}}')
    assert (job.finished(SILENT) is not None) is (found is not None)


def test_what_is_told_at_the_start(small_run: Make) -> None:
    models = [SimpleNamespace(key=key, folder=f"at {key}", is_outside=key == "b") for key in "ab"]
    config = small_run(run__name="mine")
    subject = SimpleNamespace(why=["engine", "adapter", "packing"])
    run: Any = SimpleNamespace(config=config, reward_models=models, subject=subject)
    data: Any = SimpleNamespace(sizes=[3, 4], held_out_prompts=[1, 2], notes=lambda: ["note"])
    scorer: Any = SimpleNamespace(descriptions=["rewards"])
    begun = RunState(RunIdentity("a", "mine", {}), 4, None)
    lines = list(prepare._lines(run, begun, data, scorer))
    told = f"7 prompts, 2 held out, model {config.model.path}"
    assert lines == [
        f"run mine begins: {told}", "note",
        "the reward a is given by at a, an adapter over the base",
        "the reward b is given by at b, a model of its own",
        "engine", "adapter", "packing", "rewards",
    ]  # fmt: skip
    run.config = small_run(run__name="mine", stage="sample", algorithm={}, score={})
    lines = list(prepare._lines(run, replace(begun, folder=HERE), data, scorer))
    assert lines[0] == f"run mine goes on after step 4: {told}"
    assert lines[4:6] == ["engine", "adapter"] and "packing" not in lines


def test_whose_files_are_mixed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """By the step in the name, if there is one, and by the run's name, if that is known."""
    document = Document(RunIdentity("x", "one", {}), 3, True, False, 1, [])
    for file, name, is_told in (
        ("step-00000003.json.gz", "one", False), ("buffer.json", "one", False),
        ("step-00000003.json.gz", None, False), ("step-00000002.json.gz", "one", True),
        ("buffer.json", "two", True), ("step-00000003.json.gz", "two", True),
    ):  # fmt: skip
        caplog.clear()
        saved_rollouts.warn_of_another(Path(file), document, name)
        assert bool(caplog.messages) is is_told
    targets = {"buffer.json": "buffer.rescored.json", "a/x.json.gz": "a/x.rescored.json.gz"}
    assert {n: str(saved_rollouts.default_target(Path(n))) for n in targets} == targets


@pytest.mark.parametrize(
    ("options", "change", "told"),
    [
        ({}, {}, None),
        ({"sample__max_new_tokens": 2}, {}, "has 3 tokens and sample.max_new_tokens=2; raise that"),
        ({"sample__max_new_tokens": 3}, {}, None),
        ({}, {"complete": False}, "was cut off while step 3 was sampled"),
        ({"algorithm": {"name": "gdpo"}}, {}, "has the rewards a and algorithm.normalization"),
        ({"algorithm": {"name": "gdpo"}, "score__rewards": [{"name": "boxed", "label": "a"}]}, {},
         None),
    ],
)  # fmt: skip
def test_which_saved_rollouts_are_learned_from(
    options: dict[str, Any], change: dict[str, Any], told: str | None, small_run: Make,
    tmp_path: Path,
) -> None:  # fmt: skip
    one = Completion((1, 2, 3), "", (-1.0,) * 3, "stop", {"a": 1.0}, 1.0, 0.0)
    group = Group(PROMPT, (one, one))
    document = Document(RunIdentity("x", "x", {}), 3, True, False, 1, [group])
    (tmp_path / "b.json").write_bytes(to_bytes(replace(document, **change)))
    subject: Any = SimpleNamespace(config=small_run(**options), context_tokens=5, vocabulary=4)
    with nullcontext() if told is None else pytest.raises(RolloutBufferError, match=told):
        assert saved_rollouts.read(tmp_path / "b.json", subject) == document
