"""Learning from saved rollouts without sampling, rescoring them, and going on from a checkpoint."""

import gzip
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from conftest import ROOT, TINY, small_config
from reason_llm.app.report.payload import examine
from reason_llm.app.report.runs import read_run
from reason_llm.config.file import to_yaml
from reason_llm.files import sealed
from reason_llm.run.store import metrics
from reason_llm.run.store.document import read_document, to_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture
def call(script: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str]]:
    """A script: its exit code and all that it printed."""

    def call(*words: str) -> tuple[int, str]:
        code, shown, error = script(*words)
        return code, shown + error

    return call


@pytest.fixture
def config(folder: Path, call: Callable[..., tuple[int, str]]) -> str:
    """A config whose run, of three steps, is done."""
    path = folder / "first.yaml"
    if not path.exists():
        made = small_config(folder, run__name="first", train__optimizer_steps=2)
        path.write_text(to_yaml(made))
        assert call("train.py", str(path))[0] == 0
    return str(path)


def adapter(folder: Path, name: str) -> bytes:
    return (folder / "runs" / name / "adapter" / "adapter_model.safetensors").read_bytes()


def test_learning_again_from_the_archive_gives_the_same_adapter(
    folder: Path, config: str, call: Callable[..., tuple[int, str]]
) -> None:
    before = (folder / "buffer.json").read_bytes()
    source = str(folder / "runs" / "first" / "buffers")
    code, shown = call("train.py", config, "--run.name", "again", "--from-buffer", source)
    assert code == 0, shown
    assert shown.count("sampled before") == 3
    assert "learning from saved rollouts: 3 steps, the first is step 0 of the run first" in shown
    assert adapter(folder, "again") == adapter(folder, "first")
    assert (folder / "buffer.json").read_bytes() == before
    assert "does not count" not in shown
    other = ("--run.name", "dapo", "--algorithm.name", "dapo", "--from-buffer", source)
    code, shown = call("train.py", config, *other, "--run.steps", "2")
    assert (code, "WARNING  run.steps=2 is not used: run.from_buffer=" in shown) == (0, True)
    assert "holds 3 steps" in shown
    assert adapter(folder, "dapo") != adapter(folder, "first")


@pytest.mark.parametrize("tokens", [[5] * 100_000, [10**6]], ids=["too long", "another model's"])
def test_an_export_refuses_rollouts_that_the_base_cannot_read(
    folder: Path,
    config: str,
    call: Callable[..., tuple[int, str]],
    tokens: list[int],
    tmp_path: Path,
) -> None:
    document = read_document(folder / "buffer.json")
    first = document.groups[0]
    prompt = replace(first.prompt, token_ids=tuple(tokens))
    groups = [replace(first, prompt=prompt), *document.groups[1:]]
    run = shutil.copytree(folder / "runs" / "first", tmp_path / "unfit")
    spoilt = sorted((run / "buffers").iterdir())[-1]
    spoilt.write_bytes(gzip.compress(to_bytes(replace(document, groups=groups))))
    out = ("--out", str(folder / "exported"), "--dtype", "float32")
    code, shown = call("export.py", str(run), *out)
    assert (code, shown.count("\n")) == (2, 1), shown
    assert f"{spoilt}: " in shown
    assert not (folder / "exported").exists()


def test_new_rewards_for_old_rollouts(
    folder: Path, config: str, call: Callable[..., tuple[int, str]]
) -> None:
    source = folder / "runs" / "first" / "buffers" / "step-00000000.json.gz"
    kept, target = source.read_bytes(), folder / "new.json"
    options = ("--score.rewards", "[{name: think_answer_tags}, {name: length, weight: 0.1}]")
    code, shown = call("rescore.py", str(source), config, "--out", str(target), *options)
    assert code == 0, shown
    old, new = read_document(source), read_document(target)
    assert source.read_bytes() == kept
    for before, after in zip(old.groups, new.groups, strict=True):
        assert before.prompt == after.prompt
        for c, d in zip(before.completions, after.completions, strict=True):
            assert (c.token_ids, c.logprobs) == (d.token_ids, d.logprobs)
            assert d.rewards["think_answer_tags"] == c.rewards["think_answer_tags"]
            assert d.reward == d.rewards["think_answer_tags"] + 0.1 * d.rewards["length"]
    assert any(c.advantage for group in new.groups for c in group.completions)
    code, shown = call("train.py", config, "--run.name", "new", "--from-buffer", str(target))
    assert code == 0, shown
    code, shown = call("rescore.py", str(source), config, "--out", str(target))
    assert (code, "exists and was not changed" in shown) == (2, True)
    (mine := folder / "mine.py").write_text("def f(completion, unit, price): ...\n")
    own = ("--score.rewards", f"[{{custom: {mine}:f}}]")
    code, shown = call("rescore.py", str(source), config, *own)
    assert (code, "the column 'price' and the column 'unit'" in shown) == (2, True)
    for arguments in ([], [str(source), "--out"]):
        code, shown = call("rescore.py", *arguments)
        assert (code, shown.count("\n"), shown.startswith("error: ")) == (2, 1, True), shown


@pytest.mark.long
def test_a_new_run_from_a_checkpoint_and_on_with_it(
    folder: Path, config: str, call: Callable[..., tuple[int, str]]
) -> None:
    checkpoint = str(folder / "runs" / "first" / "checkpoints" / "step-00000002")
    fork = ("--run.name", "fork", "--run.resume", checkpoint)
    assert call("train.py", config, *fork)[0] == 0
    # The very steps that the first run took, from there on.
    assert adapter(folder, "fork") == adapter(folder, "first")
    assert [r["step"] for r in metrics.read(folder / "runs" / "fork")] == [2, 3]
    code, shown = call("train.py", config, *fork, "--run.steps", "4")
    assert (code, "resumes after step 3" in shown) == (0, True)
    code, shown = call("train.py", config, "--run.resume", checkpoint, "--run.steps", "9")
    assert (code, "did not begin from run.resume" in shown) == (2, True)
    # What it began from may be gone by now.
    gone = ("--run.name", "fork", "--run.resume", str(folder / "runs" / "gone"))
    code, shown = call("train.py", config, *gone)
    assert (code, "leave --run.resume out to resume the run" in shown) == (2, True)
    # A finished run without its checkpoints is nobody's place to begin.
    summary = folder / "runs" / "bare" / "summary.json"
    summary.parent.mkdir()
    summary.write_text("{}")
    code, shown = call("train.py", config, "--run.name", "bare", "--run.resume", checkpoint)
    assert (code, "without its checkpoints" in shown) == (2, True)
    assert list(summary.parent.iterdir()) == [summary]


@pytest.mark.long
def test_going_on_with_saved_rollouts_that_became_others(
    folder: Path, config: str, call: Callable[..., tuple[int, str]]
) -> None:
    """More of them are more steps; without the first, each step would learn from another's."""
    source = folder / "of a run that goes on"
    shutil.copytree(folder / "runs" / "first" / "buffers", source)
    from_it = ("train.py", config, "--run.name", "others", "--from-buffer", str(source))
    assert call(*from_it)[0] == 0
    shutil.copy(source / "step-00000002.json.gz", source / "step-00000003.json.gz")
    code, shown = call(*from_it)
    assert (code, "resumes after step 3" in shown) == (0, True)
    (source / "step-00000000.json.gz").unlink()
    shutil.copy(source / "step-00000002.json.gz", source / "step-00000004.json.gz")
    code, shown = call(*from_it)
    assert (code, "run.first_buffer: 'step-00000000.json.gz' -> 'step-0" in shown) == (2, True)


def test_edited_rollouts_are_refused_by_every_reader_until_they_are_accepted(
    folder: Path, config: str, call: Callable[..., tuple[int, str]]
) -> None:
    runs, buffer = folder / "runs", folder / "edited.json"
    shutil.copytree(runs / "first", runs / "edited")
    archive = runs / "edited" / "buffers" / "step-00000001.json.gz"
    value = orjson.loads((folder / "buffer.json").read_bytes())
    value["groups"][0]["completions"][0]["token_ids"][0] += 1
    buffer.write_bytes(orjson.dumps(value))
    packed = orjson.loads(gzip.decompress(archive.read_bytes()))
    packed["groups"].pop()
    archive.write_bytes(gzip.compress(orjson.dumps(packed)))
    calls = [
        ("train.py", config, "--run.buffer", str(buffer), "--run.steps", "4"),
        ("train.py", config, "--run.name", "from_edited", "--from-buffer", str(buffer)),
        ("rescore.py", str(buffer), config, "--out", str(folder / "out.json")),
        ("rescore.py", str(archive), config, "--out", str(folder / "out.json")),
    ]
    before = sorted(runs.rglob("*"))
    for words in calls:
        code, shown = call(*words)
        told = [
            line
            for line in shown.splitlines()
            if not line.endswith("loading PyTorch and Transformers")
        ]
        assert (code, len(told)) == (2, 1), shown
        assert "is not what was written" in shown
        assert "--accept-edited" in shown
    assert sorted(runs.rglob("*")) == before
    notices = examine(read_run(runs / "edited", "edited")).rollouts.notices
    assert [archive.name in each and "not what was written" in each for each in notices] == [True]
    for path in (buffer, archive):
        code, shown = call("rescore.py", str(path), "--accept-edited")
        assert (code, "now has the SHA-256 of its edited content" in shown) == (0, True), shown
        code, shown = call("rescore.py", str(path), "--accept-edited")
        assert (code, "is as written" in shown) == (0, True), shown
        assert read_document(path).groups
    assert (
        read_document(buffer).groups[0].completions[0].token_ids[0]
        == (value["groups"][0]["completions"][0]["token_ids"][0])
    )
    assert call(*calls[1])[0] == 0
    assert call(*calls[2])[0] == 0
    assert not examine(read_run(runs / "edited", "edited")).rollouts.notices


@pytest.mark.long
def test_starting_afresh_from_saved_rollouts(
    folder: Path, config: str, call: Callable[..., tuple[int, str]]
) -> None:
    """Nothing is moved aside but a run: neither the rollouts themselves nor an empty folder."""
    source, runs = folder / "runs" / "first" / "buffers", folder / "runs"
    afresh = ("train.py", config, "--run.resume", "never", "--from-buffer", str(source))
    before = sorted(folder.rglob("*"))
    code, shown = call(*afresh)
    assert (code, "which --run.resume never moves aside" in shown) == (2, True)
    assert sorted(folder.rglob("*")) == before
    for others in ([], ["afresh.old-1"]):
        assert call(*afresh, "--run.name", "afresh")[0] == 0
        assert sorted(path.name for path in runs.glob("afresh.*")) == others


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        ({"max_new_tokens": 3}, "raise that to"),
        ({"token": 10**6}, "sampled by another model"),
        ({"complete": False}, "cut off while step 0 was sampled"),
        ({"ragged": True}, "all must have as many"),
        ({"missing": True}, "does not exist"),
    ],
    ids=lambda value: str(value),
)
def test_rollouts_that_do_not_fit(
    spoil: dict[str, int],
    problem: str,
    folder: Path,
    config: str,
    tmp_path: Path,
    call: Callable[..., tuple[int, str]],
) -> None:
    document = read_document(folder / "runs" / "first" / "buffers" / "step-00000000.json.gz")
    value = orjson.loads(orjson.dumps({"format": 2, "groups": document.groups}))
    value |= {"counts": {}, "checkpoint": None}
    run = {"id": "x", "name": "y", "config": document.run.config}
    value |= {"run": run, "step": 0, "weight_version": 0, "trained": True, "drawn": 4}
    value["complete"] = spoil.get("complete", True)
    if "token" in spoil:
        value["groups"][0]["completions"][0]["token_ids"][0] = spoil["token"]
    if "ragged" in spoil:
        value["groups"][0]["completions"].pop()
    path = tmp_path / "buffer.json"
    if "missing" not in spoil:
        path.write_bytes(sealed(orjson.dumps(value)))
    options = ["--sample.max_new_tokens", "3"] if "max_new_tokens" in spoil else []
    before = sorted(folder.rglob("*"))
    call_it = ("train.py", config, "--run.name", "bad", "--from-buffer", str(path), *options)
    code, shown = call(*call_it)
    assert code == 2
    assert problem in shown
    assert sorted(folder.rglob("*")) == before


@pytest.mark.long
@pytest.mark.timeout(1200)  # 25 s on a machine that has nothing else to do
def test_another_algorithm_learns_from_saved_rollouts_as_the_readme_says(
    folder: Path, call: Callable[..., tuple[int, str]]
) -> None:
    """The quick start's rollouts, then DAPO on them, in a third of its steps: eight are sampled,
    and learned from three times over. Without importance weights accuracy falls to 31 %, and to
    8.2 % over the sixty steps of the README's own command (66 and 90.6 % with them)."""
    config, runs = str(ROOT / "configs" / "quickstart.yaml"), folder / "runs"
    given = ("--run.directory", str(runs), "--run.buffer", str(folder / "quick.json"),
             "--run.steps", "8", "--train.schedule", "constant", "--eval.every", "0",
             "--model.path", str(TINY), "--data.train", str(ROOT / "data/arithmetic_train.jsonl"),
             "--data.eval", str(ROOT / "data/arithmetic_test.jsonl"))  # fmt: skip
    code, shown = call("train.py", config, *given)
    assert code == 0, shown
    source = folder / "three times"
    source.mkdir()
    for step in range(24):
        file = runs / "quickstart" / "buffers" / f"step-{step % 8:08d}.json.gz"
        shutil.copy(file, source / f"step-{step:08d}.json.gz")
    replay = ("--run.name", "dapo8", "--algorithm.name", "dapo", "--from-buffer", str(source),
              "--train.schedule", "linear")  # fmt: skip
    code, shown = call("train.py", config, *given, *replay)
    assert code == 0, shown
    summary = orjson.loads((runs / "dapo8" / "summary.json").read_bytes())
    assert summary["accuracy_before"] == pytest.approx(0.352, abs=0.01)
    assert summary["accuracy_after"] > 0.55
    findings = examine(read_run(runs / "dapo8", "dapo8")).findings["KL or mismatch jumps"]
    if findings.state == "alarm":
        assert "A mismatch of rollouts by an earlier policy" in findings.advice
    records = metrics.read(runs / "dapo8")
    assert (
        records[1]["train/importance_weight"] == 1.0
    )  # the base sampled these, and learns from them
    assert records[-1]["train/importance_weight"] != 1.0
