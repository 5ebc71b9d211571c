"""Whether saved rollouts fit a run, and where a run keeps its own."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.errors import RolloutBufferError
from reason_llm.rollout import Completion, Conversation, Group, Prompt
from reason_llm.run.start import locks, resolve, saved_rollouts
from reason_llm.run.start.saved_rollouts import check_fits
from reason_llm.run.store.archive import Archive
from reason_llm.run.store.document import Document, RunIdentity, to_bytes

Make = Callable[..., Config]


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
    assert locks.buffer_path(small_run(**named)).name == expected
    assert locks.buffer_path(small_run(**named | {"run__buffer": "set.json"})).name == "set.json"
    rows = {"stage": "sft", "sample": {}, "algorithm": {}, "score": {}}
    assert locks.buffer_path(small_run(**named, **rows)).name == "buffer.json"


def test_a_run_that_starts_afresh_does_not_move_its_source_aside(
    tmp_path: Path, small_run: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = Completion((1,), "", (-1.0,), "stop", {"a": 1.0}, 1.0, 0.0)
    run = RunIdentity("x", "x", {"run": {}})
    for step in (0, 1):
        document = Document(run, step, True, True, 1, [Group(PROMPT, (one,))])
        Archive(tmp_path / "runs" / "mine", 1 << 30).add(document)
    source = tmp_path / "runs" / "mine" / "buffers"
    named = {"run__name": "mine", "run__from_buffer": str(source)}
    for resume, steps, folder in (("auto", 2, "mine"), ("never", 1, "other"), ("never", 3, "mine")):
        config = small_run(**named, run__resume=resume, run__steps=steps)
        if (resume, folder) == ("never", "mine"):
            with pytest.raises(
                RolloutBufferError, match=r"moves aside; give this run another --run\.name"
            ):
                resolve._saved_buffers(config, tmp_path / "runs" / folder)
        else:
            assert len(resolve._saved_buffers(config, tmp_path / "runs" / folder)) == 2
    (told,) = caplog.messages  # of the second
    assert told.startswith("run.steps=1 is not used") and "holds 2 steps" in told


PROMPT = Prompt("file:1", "text", (1, 2), "3", {"column": 4})


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
