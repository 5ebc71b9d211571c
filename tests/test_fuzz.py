"""No reader of what others wrote ends in a traceback, a hang or a message of several lines."""

import csv
import gzip
import hashlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import save

from conftest import ROOT
from fuzzing import JSON, NUM_TARGETS, TEXT, broken_bytes, broken_tree, fuzz
from reason_llm.app.export import merging
from reason_llm.app.report.page import page
from reason_llm.app.report.payload import examine
from reason_llm.app.report.runs import read_run
from reason_llm.config import Config, TrainSection, read_command_line
from reason_llm.config.data import ColumnsSection
from reason_llm.config.file import QUICK_START, changes, leaves, load, to_yaml
from reason_llm.data import forms as row_forms, load_data, sets
from reason_llm.data.rows import read_rows
from reason_llm.errors import DataError
from reason_llm.evaluate import accuracy
from reason_llm.evaluate.outcomes import EvaluationWave, OutcomeLog
from reason_llm.files import sealed
from reason_llm.model import adapters
from reason_llm.model.base import Model
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run.store import checkpoint, metrics
from reason_llm.run.store.document import Document, RunIdentity, read_document, to_bytes
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.score.code import cases
from reason_llm.score.math import majority
from reason_llm.train.optim import make_optimizer
from report_runs import record, write_run
from stages import OF_FORM

CONFIG = Config.model_validate({"data": {"train": "x.jsonl"}})
IDENTITY = RunIdentity("run-a", "small", CONFIG.model_dump(mode="json"))
OPTIONS = [key for key, _ in leaves(Config)]
TALK = [
    {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"},
]  # fmt: skip
LEARNED: list[tuple[str, dict[str, Any]]] = [
    ("demonstrations", {"prompt": "p", "completion": "c"}),
    ("demonstrations", {"prompt": "p", "completion": TALK[1:2], "score": 1.5}),
    ("demonstrations", {"messages": TALK}),
    ("texts", {"text": "A whole document.\n"}),
    ("preferences", {"prompt": "p", "chosen": "a", "rejected": "c"}),
    ("preferences", {"chosen": TALK, "rejected": [*TALK[:3], TALK[1]], "margin": 1}),
    ("labels", {"prompt": "p", "completion": "c", "label": True}),
    ("labels", {"prompt": "p", "completion": "c", "label": "-1"}),
]
ROWS: list[dict[str, Any]] = [
    {"question": "What is 1 + 2?", "answer": "so 3\n#### 3"},
    {"messages": [{"role": "user", "content": "Two\nlines"}], "gt_answer": 4},
    {"prompt": "p", "reward_model": {"ground_truth": "\\boxed{7}"}, "completion": "c"},
    {"prompt": "p", "test_cases": {"inputs": ["1\n"], "outputs": ["2"], "fn_name": None}},
    {"prompt": "p", "tests": '{"inputs": [[1]], "outputs": [2], "fn_name": "f"}', "atol": 0.1},
    {"prompt": "p", "test_list": ["assert f(1) == 2"], "entry_point": "f"},
    {"prompt": "p", "chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]},
    *[row for _, row in LEARNED],
]


def document() -> Document:
    completions = tuple(
        Completion((5, i), f"ü {i}", (-0.1, -2.5), "stop", {"boxed": 1.0}, 1.0, 0.5) for i in (0, 1)
    )
    groups = [
        Group(Prompt(f"x.jsonl:{n}", "q", (1, 2), "4", {"a": [1]}), completions) for n in (1, 2)
    ]
    return Document(IDENTITY, 3, True, False, 2, groups)


def test_config_text(tmp_path: Path) -> None:
    path = tmp_path / "my_run.yaml"
    texts = [file.read_bytes() for file in sorted((ROOT / "configs").glob("*.yaml"))]
    texts += [to_yaml(CONFIG).encode(), b"data: &a {train: x}\nrun: {<<: {steps: 1}, name: b}\n"]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        to_yaml(load(path)).encode()

    fuzz(st.sampled_from(texts).flatmap(broken_bytes), read, 25)


def test_config_tree(tmp_path: Path) -> None:
    path = tmp_path / "my_run.yaml"

    def read(tree: Any) -> None:
        path.write_text(json.dumps(tree))  # JSON is YAML, but for what it escapes
        config = load(path)
        orjson.dumps(config.model_dump(mode="json"))
        changes(IDENTITY.config, config.model_dump(mode="json"))

    fuzz(broken_tree(CONFIG.model_dump(mode="json")), read, 40)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / QUICK_START
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({"data": {"train": "x"}}))
    option = st.sampled_from([f"--{key}" for key in OPTIONS] + ["--plan", "--run", "--x", "--"])
    value = st.one_of(
        TEXT, JSON.map(lambda v: json.dumps(v)), st.sampled_from(["1", "0.5", "auto"])
    )

    def read(arguments: list[str]) -> None:
        if not {"-h", "--help"} & set(arguments):
            line = read_command_line("train.py", "", ("CONFIG.yaml", ""), arguments, {"plan": "p"})
            line.config([])

    pairs = st.lists(
        st.one_of(st.tuples(option, value), st.tuples(option), st.tuples(value)), max_size=3
    )
    fuzz(pairs.map(lambda found: [each for pair in found for each in pair]), read, 60)


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_buffer(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"buffer.{suffix}"
    whole = to_bytes(document())
    # The digest of most is right, as the readers behind it are meant, too.
    inner = {name: part for name, part in orjson.loads(whole).items() if name != "sha256"}
    trees = broken_tree(inner).map(lambda tree: sealed(json.dumps(tree).encode()))
    packed = trees.map(partial(gzip.compress, mtime=0)) if suffix == "json.gz" else trees
    file = gzip.compress(whole, mtime=0) if suffix == "json.gz" else whole

    def read(content: bytes) -> None:
        path.write_bytes(content)
        found = read_document(path)
        orjson.loads(to_bytes(found))
        changes(found.run.config, IDENTITY.config)
        if found.complete and found.groups:
            metrics.describe(found.groups)

    fuzz(st.one_of(packed, broken_bytes(file)), read, 200)


def files_of_rows(folder: Path) -> dict[str, bytes]:
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["question", "answer"])
    writer.writeheader()
    writer.writerows([{"question": "Two\nlines, and", "answer": "3"}] * 3)
    columns = {"question": ["a", "b"], "answer": ["1", None], "n": [1, 2], "l": [[1.5], []]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "whole.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    return {
        "jsonl": lines,
        "json": json.dumps(ROWS).encode(),
        "csv": b"\xef\xbb\xbf" + table.getvalue().encode(),
        "parquet": (folder / "whole.parquet").read_bytes(),
    }


def test_data_files(tmp_path: Path) -> None:
    kinds = [st.tuples(st.just(k), broken_bytes(c)) for k, c in files_of_rows(tmp_path).items()]

    def read(case: tuple[str, bytes]) -> None:
        path = tmp_path / f"rows.{case[0]}"
        path.write_bytes(case[1])
        notes: list[DataError] = []
        try:
            list(read_rows(str(path), "train", notes.append))
        finally:
            for note in notes:
                assert str(note).isprintable()
        for _, row in read_rows(str(path), "train"):
            forms(row)

    fuzz(st.one_of(kinds), read, 300)


def forms(row: Any) -> None:
    for columns in (ColumnsSection(), ColumnsSection(prompt="question", answer="tests")):
        for form in (
            row_forms.read_problem,
            partial(row_forms.read_problem, tests=True),
            partial(row_forms.read_problem, answer=False),
            row_forms.read_demonstration,
            row_forms.read_document,
            row_forms.read_preference,
            row_forms.read_labelled,
        ):
            try:
                example = form("x.jsonl:1", row, columns)
            except DataError as error:
                assert str(error).strip()
                continue
            if isinstance(example, row_forms.Problem):
                example.answer.encode()
            else:
                sets.question_key(example)


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def read(row: Any) -> None:
        path.write_text(json.dumps(row) + "\n")
        for _, again in read_rows(str(path), "train"):
            forms(again)

    fuzz(st.sampled_from(ROWS).flatmap(broken_tree), read, 300)


def test_token_rows(tmp_path: Path, tokenizer: Any) -> None:
    """Whatever a row holds, what is learned ends with an end token, or the row is refused."""
    path = tmp_path / "rows.jsonl"
    odd = st.one_of(TEXT, st.sampled_from(["<|im_end|>", "<|im_start|>user\n", "</think>"]))
    words = st.tuples(odd, odd).map("".join)
    rows = st.sampled_from(LEARNED).flatmap(
        lambda pair: st.tuples(
            st.just(pair[0]), st.one_of(st.just(pair[1]), broken_tree(pair[1])), words, words
        )
    )

    def read(case: tuple[str, Any, str, str]) -> None:
        form, row, *texts = case
        path.write_text(json.dumps(_reworded(row, *texts)) + "\n")
        data = {"train": str(path), "form": form, "max_tokens": 60, "system_prompt": "none"}
        config = Config.model_validate({"data": data, **OF_FORM[form]})
        for unit in load_data(config, tokenizer, 80, end_token_ids=[2]).units:
            assert len(unit) == (2 if form == "preferences" else 1)
            for each in unit:
                assert len(each.ids) == len(each.trained) <= 60
                assert (each.trained[0], any(each.trained)) == (False, True)
                assert form == "texts" or (each.ids[-1] == 2 and each.trained[-1])

    fuzz(rows, read, 200)


def _reworded(tree: Any, first: str, second: str) -> Any:
    """The row with other texts in the place of some."""
    if isinstance(tree, dict):
        return {key: _reworded(value, first, second) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_reworded(value, first, second) for value in tree]
    return {"a": first, "c": second, "p": second, "q": first}.get(str(tree), tree)


def test_tests_of_programs() -> None:
    def read(text: str) -> None:
        try:
            cases.read_tests(text)
        except ValueError as error:
            raise DataError(str(error)) from error

    texts = [json.dumps(row) for row in ROWS if "tests" in str(row) or "test_" in str(row)]
    broken = st.sampled_from(texts).flatmap(lambda text: broken_bytes(text.encode()))
    trees = st.sampled_from(texts).flatmap(lambda text: broken_tree(json.loads(text)))
    as_text = broken.map(lambda content: content.decode(errors="replace"))
    fuzz(st.one_of(as_text, trees.map(json.dumps)), read, 150)


def test_metrics(tmp_path: Path) -> None:
    records = [{"step": s, "score/reward": 0.5, "time/total_seconds": 1.0} for s in range(3)]

    def read(content: bytes) -> None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
        if records := metrics.read(tmp_path):
            metrics.summarize(records, tmp_path, 0.0)

    lines = broken_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records))
    trees = broken_tree(records).map(lambda t: b"".join(json.dumps(r).encode() + b"\n" for r in t))
    fuzz(st.one_of(lines, trees), read, 150)


ANSWER = {"text": "so 3", "tokens": 5, "finish_reason": "stop", "reward": 1.0, "answer": "3"}
OUTCOMES = [
    {"model": "base", "set": "s", "id": f"x:{n}", "prompt": "p", "gold": "3", "greedy": ANSWER,
     "samples": [ANSWER, ANSWER]}
    for n in (1, 2)
]  # fmt: skip
START: dict[str, Any] = {
    "step": 0, "time": "now", "reason_llm": "1",
    "packages": {"torch": "2"}, "machine": {"processor": "p", "cores": 1, "host_gib": 1.5},
    "data": {"training": [{"name": "", "source": "a", "rows": 1, "prompts": 1, "left_out": {}}],
             "held_out": [], "in_both": 0},
    "plan": [{"name": "a", "sampling": 1, "learning": 2}],
}  # fmt: skip


def test_outcomes_of_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    waves = [EvaluationWave("base", "s", 0, [Prompt(f"x:{n}", "p", (1,), "3") for n in (1, 2)])]
    whole = b"".join(orjson.dumps(each) + b"\n" for each in OUTCOMES)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        log = OutcomeLog(path, num_samples=2)
        if log.resume(waves):
            accuracy.table(accuracy.summarize(log.outcomes, 2, majority, False))

    trees = broken_tree(OUTCOMES).map(
        lambda tree: b"".join(json.dumps(each).encode() + b"\n" for each in tree)
    )
    fuzz(st.one_of(broken_bytes(whole), trees), read, 150)


def test_what_a_run_left_for_its_report(tmp_path: Path) -> None:
    """A file that is damaged is passed over with a notice, so metrics.jsonl decides."""
    folder = write_run(tmp_path / "run", [record(0), record(1)])
    metrics_file = (folder / "metrics.jsonl").read_bytes()

    def read(contents: tuple[bytes, bytes, bytes]) -> None:
        names = ("environment.json", "summary.json", "metrics.jsonl")
        for name, content in zip(names, contents, strict=True):
            (folder / name).write_bytes(content)
        page([examine(read_run(folder, "run"))])

    environments = broken_tree({"starts": [START, START]}).map(lambda v: json.dumps(v).encode())
    summaries = broken_tree({"steps": 1, "accuracy_after": 0.5}).map(
        lambda value: json.dumps(value).encode()
    )
    fuzz(st.tuples(environments, summaries, broken_bytes(metrics_file)), read, 20)


def test_an_adapter_s_config(tmp_path: Path, shared_model: Model) -> None:
    adapters.snapshot(shared_model.policy).write(tmp_path)
    path = tmp_path / "adapter_config.json"
    whole = json.loads(path.read_text())

    def read(content: bytes) -> None:
        path.write_bytes(content)
        adapters.section_of(tmp_path)
        merging.adapted(tmp_path)

    trees = broken_tree(whole).map(lambda tree: json.dumps(tree).encode())
    fuzz(st.one_of(trees, broken_bytes(json.dumps(whole).encode())), read, 100)


@pytest.fixture
def saved(tmp_path: Path, shared_model: Model) -> tuple[Path, Any]:
    """A run's folder with one checkpoint, and the optimizer that it is of."""
    parameters = [p for p in shared_model.policy.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters, TrainSection())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with BackgroundWriter() as writer:
        state = checkpoint.RunState(IDENTITY, 3, None, 12)
        checkpoint.save(tmp_path / "run", state, shared_model, {"policy": optimizer}, 2, writer)
    return tmp_path / "run", optimizer


def signed(tree: Any) -> bytes:
    """A state whose own checksum is right, whatever it says."""
    if isinstance(tree, dict):
        tree.pop("sha256", None)
        try:
            content = orjson.dumps(tree, option=orjson.OPT_SORT_KEYS)
        except TypeError:
            return json.dumps(tree).encode()
        tree["sha256"] = hashlib.sha256(content).hexdigest()
    return json.dumps(tree).encode()


def test_checkpoint(saved: tuple[Path, Any]) -> None:
    run, _ = saved
    state = run / "checkpoints" / "step-00000003" / "state.json"
    whole = state.read_bytes()

    def read(content: bytes) -> None:
        state.write_bytes(content)
        found = checkpoint.find(run, "small", IDENTITY.config)
        assert found.step >= 0

    trees = broken_tree(orjson.loads(whole)).map(signed)
    fuzz(st.one_of(trees, broken_bytes(whole)), read, 150)


def test_restoring(saved: tuple[Path, Any], shared_model: Model) -> None:
    """Files whose checksums are right and whose content is not."""
    run, optimizer = saved
    folder = run / "checkpoints" / "step-00000003"
    state = checkpoint.RunState(IDENTITY, 3, folder)
    names = [checkpoint.adapters.WEIGHTS, checkpoint.OPTIMIZER]
    wholes = {name: (folder / name).read_bytes() for name in names}
    before = {n: p.detach().clone() for n, p in shared_model.policy.named_parameters()}
    small = st.dictionaries(
        st.one_of(TEXT, st.sampled_from(["0.exp_avg", "0.step", "999.step", "x.step", "0."])),
        st.sampled_from([torch.zeros(2), torch.tensor(1.0), torch.zeros(0, 3)]).map(torch.clone),
        max_size=3,
    ).map(save)
    case = st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), st.one_of(broken_bytes(wholes[name]), small))
    )

    def read(case: tuple[str, bytes]) -> None:
        for name in names:
            (folder / name).write_bytes(case[1] if name == case[0] else wholes[name])
        checkpoint.restore(state, shared_model, {"policy": optimizer})

    try:
        fuzz(case, read, 40)
    finally:
        with torch.no_grad():
            for name, parameter in shared_model.policy.named_parameters():
                parameter.copy_(before[name])


def test_the_time_is_shared_among_all_targets() -> None:
    tests = [name for name in globals() if name.startswith("test_")]
    assert len(tests) - 1 + 1 == NUM_TARGETS  # without this one; the buffer's test runs twice
