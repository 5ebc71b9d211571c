"""Rewards and rows that are given in Python: trained on, known again, and refused in one line."""

import functools
import linecache
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from math_verify import parse, verify
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

import reason_llm
from conftest import ROOT, TINY
from reason_llm.config import Config, file as config_file
from reason_llm.config.functions import name_of, source_digest
from reason_llm.config.score import RewardSpec
from reason_llm.data import load_data
from reason_llm.errors import CheckpointError, ConfigError, DataError, ReasonError, RewardError
from reason_llm.model import load_tokenizer
from reason_llm.rollout import ROW, Group
from reason_llm.run import Record

ROWS = [{"prompt": f"What is {a} + {b}?", "total": a + b} for a in range(6) for b in range(6)]


def right_total(completions: list[str], total: list[int], **kwargs: Any) -> list[float]:
    return [float(str(t) in text) for text, t in zip(completions, total, strict=True)]


def brief(completion: str) -> float:
    return -len(completion) / 100


def broken(completion: str) -> float:
    return 1 / len(completion.split("there is no such text")[1:])


class Notes(reason_llm.Silent):
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[float] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def step(self, record: Record, group: Group | None) -> None:
        self.steps.append(record["step"])


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return {
        "run": {"steps": 1, "name": "given"},
        "model": {"path": str(TINY)},
        "data": {"form": "prompts", "system_prompt": "none"},
        "sample": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 24},
        "train": {"gradient_checkpointing": False, "learning_rate": 1e-3},
    }


def test_a_run_with_functions_and_rows_goes_on_with_them(
    tree: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rewards = [right_total, {"custom": brief, "weight": 0.5}, "tag_count"]
    watch = Notes()
    summary = reason_llm.train(tree, rewards=rewards, rows=ROWS, watch=watch)
    assert isinstance(summary, reason_llm.Summary) and summary["steps"] == 1
    assert summary.report.is_file() and summary.curves.is_file() and summary.adapter.is_dir()
    assert [record["step"] for record in summary.records()] == watch.steps == [0, 1]
    assert {"score/right_total", "score/brief", "score/tag_count"} <= summary.records()[1].keys()
    assert any("36 prompts" in line for line in watch.lines)
    assert capsys.readouterr().out == ""
    rows = datasets.Dataset.from_list(ROWS)  # of the same rows, so the same run
    more = {**tree, "run": {**tree["run"], "steps": 2}}
    more["score"] = {"rewards": [right_total, {"custom": brief, "weight": 0.5}, "tag_count"]}
    assert reason_llm.train(more, rows=rows)["steps"] == 2
    assert "resumes after step 1" in capsys.readouterr().out
    more["run"] = {**tree["run"], "steps": 3}
    with pytest.raises(CheckpointError, match="prompts_sha256"):
        reason_llm.train(more, rows=ROWS[1:])
    config = tmp_path / "runs" / "given" / "resolved_config.yaml"
    here = Path(__file__)
    assert f"custom: {here}:right_total" in config.read_text()
    with pytest.raises(DataError, match=r"python:rows are rows that Python passes; pass them"):
        reason_llm.train(config, watch=Notes())


def test_a_config_without_data_is_for_rows_of_python(
    tree: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        f"{section}.{name}": value for section in tree for name, value in tree[section].items()
    }
    config = reason_llm.load_config(overrides=options)
    assert config.data.form == "prompts"
    with pytest.raises(DataError, match=r"pass them, as in reason_llm.train\(config, rows=rows\)"):
        reason_llm.train(config, rewards=[right_total], watch=Notes())
    watch = Notes()
    reason_llm.train(config, rewards=[right_total], rows=ROWS, watch=watch)
    assert any("36 prompts" in line for line in watch.lines)
    Path("mine.yaml").write_text("run: {steps: 1}\ndata:\n")
    assert reason_llm.load_config("mine.yaml").run.name == "mine"
    with pytest.raises(ConfigError, match=r"data.train is missing"):
        reason_llm.train("mine.yaml", watch=Notes())
    with pytest.raises(ConfigError, match=r"unknown key 'data.trian'; did you mean data.train"):
        reason_llm.load_config("mine.yaml", {"data.trian": "x"})
    with pytest.raises(ConfigError, match=r"^overrides: run\.steps='many' must be a valid integer"):
        reason_llm.load_config("mine.yaml", {"run.steps": "many"})
    with pytest.raises(ConfigError, match=r"^argument: score\.rewards"):
        reason_llm.train("mine.yaml", rewards=[], rows=ROWS, watch=Notes())


def test_a_changed_column_is_told(tree: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    def near(completion: str, total: int) -> float:
        return float(str(total) in completion)

    rows = [dict(row) for row in ROWS]
    reason_llm.train(tree, rewards=near, rows=rows)  # as a list of one
    assert "another experiment" not in capsys.readouterr().out
    more = {**tree, "run": {**tree["run"], "steps": 2}}
    rows[-1]["total"] = 4
    reason_llm.train(more, rewards=[near], rows=rows)
    assert "data.columns_sha256" in capsys.readouterr().out


def test_a_changed_function_is_told_and_another_refused(
    tree: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def defined(body: str) -> Callable[..., Any]:
        path = tmp_path / "cell.py"
        path.write_text(f"def f(completion):\n    return {body}\n")
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(path.read_text(), str(path), "exec"), names)
        linecache.checkcache()
        found: Callable[..., Any] = names["f"]
        return found

    assert name_of(defined("1")) == "python:__main__.f"
    reason_llm.train(tree, rewards=[defined("len(completion)")], rows=ROWS, watch=Notes())
    tree["run"]["steps"] = 2
    reason_llm.train(tree, rewards=[defined("-len(completion)")], rows=ROWS)
    assert "resumes with score.custom_sha256.f: " in capsys.readouterr().out
    tree["run"]["steps"] = 3
    with pytest.raises(CheckpointError, match=r"score\.rewards: .*__main__\.f.*brief"):
        reason_llm.train(tree, rewards=[brief], rows=ROWS, watch=Notes())
    with pytest.raises(ConfigError, match=r"custom=python:__main__\.f was given in Python; give"):
        reason_llm.train(
            tmp_path / "runs" / "given" / "resolved_config.yaml", rows=ROWS, watch=Notes()
        )


def test_a_failing_function_shows_its_line_here(tree: dict[str, Any]) -> None:
    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"ZeroDivisionError.* at .*{__name__}\.py:{line}\)"):
        reason_llm.train(tree, rewards=[broken], rows=ROWS, watch=Notes())


def of_messages(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def test_a_reward_for_messages_is_told_that_completions_are_strings(tree: dict[str, Any]) -> None:
    line = of_messages.__code__.co_firstlineno + 1
    message = (
        rf"TypeError: string indices must be integers.* at .*{__name__}\.py:{line}\); fix it "
        r"\(completions are strings; as in TRL they are lists of messages"
    )
    with pytest.raises(RewardError, match=message):
        reason_llm.train(tree, rewards=[of_messages], rows=ROWS, watch=Notes())
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    reason_llm.train(tree, rewards=[of_messages], rows=rows, watch=Notes())


@pytest.mark.parametrize(
    "read",
    [lambda text: text.strip(), partial(re.search, "7"), "".__add__, lambda text: text + ""],
    ids=["method", "pattern", "before", "behind"],
)
def test_a_reward_for_texts_is_told_that_completions_are_messages(
    tree: dict[str, Any], read: Callable[[str], Any]
) -> None:
    def of_texts(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(bool(read(each))) for each in completions]

    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    with pytest.raises(RewardError, match="as in TRL they are lists of messages, whose text is"):
        reason_llm.train(tree, rewards=[of_texts], rows=rows, watch=Notes())


def with_math_verify(completions: list[str], total: list[int], **kwargs: Any) -> list[float]:
    found = [parse(text) for text in completions]
    return [float(verify(parse(str(t)), f)) for t, f in zip(total, found, strict=True)]


def with_math_verify_in_a_thread(
    completions: list[str], total: list[int], **kwargs: Any
) -> list[float]:
    golds = [parse(str(each), parsing_timeout=None) for each in total]
    found = [parse(text, parsing_timeout=None) for text in completions]
    pairs = zip(golds, found, strict=True)
    return [float(verify(gold, each, timeout_seconds=None)) for gold, each in pairs]


def test_signals_in_a_reward_are_refused_before_anything_is_written(
    tree: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = with_math_verify.__code__.co_firstlineno + 1
    message = (
        r"failed on a made-up completion of python:rows:row 1 \(ValueError: signal only works in "
        rf"main thread, and rewards are called in threads at .*{__name__}\.py:{line}\); pass "
        "parsing_timeout=None to math_verify's parse and timeout_seconds=None to its verify, "
    )
    with pytest.raises(RewardError, match=message):
        reason_llm.train(tree, rewards=[with_math_verify], rows=ROWS, watch=Notes())
    assert list(tmp_path.iterdir()) == []
    tree["score"] = {"on_error": "zero"}
    summary = reason_llm.train(tree, rewards=[with_math_verify], rows=ROWS, watch=Notes())
    assert "counts 0 (ValueError: signal only works in main thread" in caplog.text
    assert summary.records()[1]["score/errors"] == 2  # the two groups' alone
    tree["run"]["name"] = "in_a_thread"
    reason_llm.train(tree, rewards=[with_math_verify_in_a_thread], rows=ROWS, watch=Notes())


def test_a_reward_is_called_once_at_the_start_with_a_group_and_by_the_data_check(
    tree: dict[str, Any], tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(completion, answer, token_ids):\n"
        "    with open('calls', 'a') as file:\n"
        "        print(completion.count(answer), len(token_ids) > 9, file=file)\n"
        "    return 1 / completion.count(answer)\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 9 * 2?", "answer": "18"}\n')
    config = tmp_path / "config.yaml"
    data = {"train": "rows.jsonl", "system_prompt": "none"}
    rewards = [{"custom": "mine.py:f"}]
    config.write_text(yaml.safe_dump(tree | {"data": data, "score": {"rewards": rewards}}))
    message = (
        "the reward f failed on a made-up completion of rows.jsonl:1#0 (ZeroDivisionError: "
        "division by zero at mine.py:4); fix it"
    )
    for check in ([], ["--data-check"]):
        code, shown, errors = script("train.py", config, *check)
        assert (code, message in shown + errors) == (2, True), shown + errors
    assert "no errors in the rows; a reward has one, below" in shown
    calls = {*(tmp_path / "calls").read_text().split("\n")[:-1]}
    assert {"0 True"} <= calls <= {"0 True", "2 True"}  # of two threads: an error ends both
    assert not (tmp_path / "runs").exists()


def closed(count: int) -> Callable[..., float]:
    def inner(completion: str) -> float:
        return count

    return inner


def longer(completion: str, least: int) -> float:
    return float(len(completion) > least)


class Callables:
    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __call__(self, completion: str) -> float:
        return self.value

    def method(self, completion: str) -> float:
        return self.value


class Locked(Callables):
    """What cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


TYPED: dict[str, Any] = {}
exec("def typed(completion):\n    return 1.0", TYPED)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Callables, r"is the class Callables, not a function; pass an instance, as in Call"),
        (len, "is builtin_function_or_method len, whose source cannot be read"),
        (TYPED["typed"], "whose source cannot be read"),
    ],
    ids=range(3),
)
def test_what_could_not_be_known_again_is_refused(
    reward: Any, message: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        reason_llm.train(tree, rewards=[reward], rows=ROWS)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


GIVEN: list[tuple[Any, str, Any]] = [
    (lambda completion: 1.0, "lambda", lambda completion: 2.0),
    (closed(2), "inner", closed(3)),
    (functools.partial(longer, least=2), "longer", functools.partial(longer, least=3)),
    (Callables(), "Callables", Callables(2.0)),
    (Callables().method, "method", Callables(2.0).method),
    (get_soft_overlong_punishment(24, 8), "soft_overlong_punishment_reward",
     get_soft_overlong_punishment(24, 9)),
    (get_repetition_penalty_reward(2), "repetition_penalty_reward",
     get_repetition_penalty_reward(3)),
]  # fmt: skip


@pytest.mark.parametrize(("reward", "key", "changed"), GIVEN, ids=[key for _, key, _ in GIVEN])
def test_whatever_can_be_called_is_a_reward_and_known_by_what_it_holds(
    reward: Any, key: str, changed: Any
) -> None:
    spec, same, other = (RewardSpec.model_validate(r) for r in (reward, reward, changed))
    assert (spec.key, spec.function) == (key, reward)
    assert str(spec.custom).startswith("python:")
    assert spec.custom == other.custom
    assert spec.source_sha256 == same.source_sha256 != other.source_sha256


def test_a_run_takes_objects_and_closures_and_goes_on_with_them(
    tree: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tree["score"] = {"rewards": [each for each, *_ in GIVEN] + [{"custom": Locked()}]}
    record = reason_llm.train(tree, rows=ROWS).records()[1]
    assert {f"score/{key}" for _, key, _ in GIVEN} <= record.keys()
    assert record["score/Callables"] == record["score/method"] == record["score/Locked"] == 1
    assert record["score/soft_overlong_punishment_reward"] <= 0
    tree["run"]["steps"] = 2
    tree["score"]["rewards"][1] = closed(3)
    reason_llm.train(tree, rows=ROWS)
    assert "resumes with score.custom_sha256.inner: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"train": ROWS}, "type dict; pass a list of dicts .* one split of a DatasetDict"),
        (iter(ROWS), r"list_iterator; pass .*list\(rows\)"),
        ("rows.jsonl", "type str"),
        (["a"], r"python:rows:row 1: is str 'a'; expected a dict"),
        ([{"x": 1}], r"python:rows:row 1: lacks any of the columns"),
        ([{"prompt": "\ud800"}], r"python:rows:row 1: .*surrogates"),
        ([{"prompt": "a", "of": {(1, 2): 3}}], r"python:rows:row 1: keys must be"),
        ([], "python:rows holds no rows"),
    ],
)
def test_rows_that_are_none_are_refused(
    rows: Any, message: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ReasonError, match=message) as caught:
        reason_llm.train(tree, rewards=[brief], rows=rows)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_functions_are_known_by_their_file_and_source() -> None:
    assert name_of(brief) == f"{Path(__file__).relative_to(Path.cwd())}:brief"
    assert source_digest(brief) == source_digest(brief) != source_digest(broken)
    spec = RewardSpec.model_validate({"custom": brief, "weight": 2})
    assert (spec.key, spec.kind, spec.weight, spec.function) == ("brief", "brief", 2, brief)
    assert RewardSpec.model_validate("boxed").name == "boxed"
    assert RewardSpec.model_validate("mine.py:f").custom == "mine.py:f"


def test_a_config_takes_rewards_and_held_out_rows_and_evaluates(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    config = small_run(run__steps=1, log__console="quiet")
    held_out = [{"prompt": "What is 1 + 2?", "answer": 3, "total": 3}]
    rows = [{**row, "answer": row["total"]} for row in ROWS]
    summary = reason_llm.train(config, rewards=[right_total], rows=rows, eval_rows=held_out)
    assert summary["accuracy_after"] is not None
    test = ROOT / "data" / "arithmetic_test.jsonl"
    options = {"eval.limit": 2, "log.console": "quiet"}
    with pytest.raises(DataError, match="lacks column 'total'"):
        reason_llm.evaluate(summary.folder, sets=[str(test)], overrides=options)
    found = reason_llm.evaluate(
        summary.folder, sets=[f"sums={test}"], rewards=brief, overrides=options
    )
    assert found["judged_by"] == "brief"


def of_even_sums(completions: list[str], total: list[int], **kwargs: Any) -> list[float | None]:
    return [None if t % 2 else len(c) / 10 for c, t in zip(completions, total, strict=True)]


def never(completions: list[str], **kwargs: Any) -> list[None]:
    return [None for _ in completions]


def test_a_run_whose_rewards_give_none_learns_and_is_reported(
    tree: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tree["run"]["steps"] = 2
    tree["sample"]["prompts_per_step"] = 6
    summary = reason_llm.train(tree, rewards=[of_even_sums, never], rows=ROWS)
    shown = capsys.readouterr().out
    assert "every reward gave None for" in shown and "no report was written" not in shown
    assert summary.report.is_file()
    record = summary.records()[1]
    assert record["score/of_even_sums"] == record["score/reward"] > 0
    assert "score/never" not in record
    tree["run"] |= {"name": "nothing", "steps": 1, "buffer": "nothing.json"}
    nothing = reason_llm.train(tree, rewards=[never], rows=ROWS)
    assert "no report was written" not in capsys.readouterr().out
    assert nothing.records()[1]["score/groups_without_signal_fraction"] == 1
    assert nothing.records()[1]["train/grad_norm"] == 0


def test_a_column_that_a_reward_of_trl_s_form_does_not_get_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [{"prompt": "a", "level": 1, "tests": (1, 2)}, {"prompt": "b", "tests": (3,)}]
    config = config_file.build(
        {"data": {"train": "python:rows", "form": "prompts"}}, Path("given"), {}
    )
    config = config.model_copy(update={"data": config.data.with_rows({"python:rows": rows})})
    data = load_data(config, load_tokenizer(str(TINY), False), 1024, extra_columns=[ROW])
    assert data.prompts[0].extra[ROW]["columns"] == {"prompt": "a", "level": 1}
    (told,) = [record.getMessage() for record in caplog.records if "TRL" in record.getMessage()]
    assert told.startswith("python:rows:row 1: column 'tests' holds (1, 2), which JSON cannot")
