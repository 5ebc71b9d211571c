"""``scripts/train.py CONFIG --data-check``, and a run over several sets."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from conftest import ROOT, TINY
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.config import Config
from reason_llm.run.store import metrics
from reason_llm.score.code import code_tests
from stages import OF_FORM

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, script: Call) -> Call:
    """--data-check on a config of ``data`` with a model that has no weights."""
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()

    def call(data: dict, *arguments: str, **sections: Any) -> tuple[int, str, str]:
        of_form = OF_FORM[data.get("form", "problems")]
        tree = {"model": {"path": str(tmp_path / "model")}, "data": data, **of_form, **sections}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        return script("train.py", tmp_path / "config.yaml", "--data-check", *arguments)

    return call


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_a_clean_check_tells(tmp_path: Path, call: Call) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    train = lines(tmp_path / "a.jsonl", *rows, {"question": "\x1b[2Jred\nthen", "answer": "\x07"})
    other = lines(tmp_path / "b.jsonl", rows[3], rows[3])
    sources = [train, {"source": other, "weight": 3}]
    code, shown, errors = call(
        {"train": sources, "system_prompt": "none", "deduplicate": True},
        eval={
            "sets": {"x": lines(tmp_path / "c.jsonl", {"problem": "New", "answer": "5"}, rows[0])}
        },
    )
    assert (code, errors) == (2, "")  # nothing is left of b.jsonl
    assert f"{other}: no rows are left (left out: 2 by data.deduplicate" in shown
    code, shown, errors = call(
        {"train": sources, "system_prompt": "none", "template": "plain_chat"},
        eval={"sets": {"x": str(tmp_path / "c.jsonl")}},
    )
    assert (code, errors) == (0, "")
    assert f"train {train}, 25.0% of the prompts: 21 rows, 21 taken\n" in shown
    assert f"train {other}, 75.0% of the prompts: 2 rows, 2 taken\n" in shown
    assert f"eval x {tmp_path / 'c.jsonl'}: 2 rows, 2 taken\n  prompt tokens: min " in shown
    assert "warning: training rows with questions of an evaluation set: 1, such as" in shown
    first, last = (
        f"--- {train}:1\nUser: What is 0 + 1?\n\nAssistant:\n--- gold answer: 1\n",
        "no errors",
    )
    assert first in shown
    assert shown.endswith(f"{last}\n")
    assert shown.count("--- gold answer: ") == 3
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("system", "sections", "says"),
    [
        ("Rate it from 0 to 4.", {}, "boxed, the first of score.rewards; neither "
         "data.system_prompt nor the first, the middle or the last prompt asks for \\boxed"),
        ("Rate it from 0 to 4 within \\boxed{}.", {}, "boxed, the first of score.rewards"),
        ("Rate it from 0 to 4, please: <answer>", {"score": {"rewards": ["think_answer_tags"]}},
         "think_answer_tags, the first of score.rewards"),
        ("Rate it from 0 to 4.", {"score": {"rewards": ["exact"]}},
         "exact, the first of score.rewards"),
    ],
)  # fmt: skip
def test_the_check_names_the_reward_that_judges_and_what_nothing_asks_for(
    system: str, sections: dict, says: str, tmp_path: Path, call: Call
) -> None:
    rows = [{"question": f"Review {n}", "answer": n % 5} for n in range(20)]
    data = {"train": lines(tmp_path / "a.jsonl", *rows), "system_prompt": system}
    data |= {"template": "plain_chat"}
    code, shown, _ = call(data, **sections)
    assert code == 0
    assert f"\njudged by {says}\n" in shown


def test_escape_sequences_are_spelled_out(tmp_path: Path, call: Call) -> None:
    row = {"question": "\x1b[2Jred\nthen", "answer": "\x9b7"}
    code, shown, _ = call({"train": lines(tmp_path / "a.jsonl", row), "system_prompt": "none"})
    assert code == 0
    assert "\\x1b[2Jred\nthen" in shown
    assert "gold answer: \\x9b7" in shown
    assert "\x1b" not in shown


def test_ten_kinds_of_errors_with_the_first_of_each(tmp_path: Path, call: Call) -> None:
    good = {"question": "What is 1 + 1?", "answer": "2"}
    bad = [{"question": f"\x1b{n}"} for n in range(60)]
    others = [{"question": "Q", "answer": "1", name: 0} for name in "abcdefghij"]
    train = lines(tmp_path / "a.jsonl", good, *bad, *[dict(each, question=[0]) for each in others])
    held_out = str(tmp_path / "none.jsonl")
    code, shown, errors = call({"train": train, "eval": held_out})
    assert (code, errors) == (2, "")
    told = shown.partition("71 errors, the first of each kind:\n")[2].splitlines()
    assert len(told) == 3
    assert told[0].strip().startswith(f"data file {held_out} does not exist")
    assert told[1].strip().startswith(f"{train}:2: lacks any of the columns 'gt_answer'")
    assert told[1].endswith("or make such a column by data.preprocess (and 59 more such rows)")
    assert told[2].strip().startswith(f"{train}:62: 'question', message 1 is 0; expected")
    assert told[2].endswith("(and 9 more such rows)")
    assert f"train {train}: 71 rows, 1 taken" in shown
    names = [{"question": "Q", f"answer{'x' * n}": "1"} for n in range(2, 14)]
    code, shown, errors = call({"train": lines(tmp_path / "b.jsonl", *names)})
    assert shown.count("b.jsonl:") == 11


def test_errors_of_a_split_file_are_named_in_the_order_of_its_rows_and_once(
    tmp_path: Path, call: Call, script: Call
) -> None:
    rows = [{"question": f"What is {n} + 1?"} | ({"answer": n + 1} if n % 4 else {}) for n in
            range(40)]  # fmt: skip
    train = lines(tmp_path / "a.jsonl", {"question": "", "answer": "1"}, *rows)
    code, shown, _ = call({"train": train, "eval": "50%"})
    told = shown.partition("11 errors, the first of each kind:\n")[2].splitlines()
    assert [each.strip().partition(" ")[0] for each in told] == [f"{train}:1:", f"{train}:2:"]
    assert told[1].endswith(" (and 9 more such rows)")
    model = ["--model.path", str(TINY), "--run.directory", str(tmp_path)]
    code, shown, errors = script("train.py", tmp_path / "config.yaml", *model)
    assert (code, *(each.strip() for each in told)) == (
        2, *(each.removeprefix("error: ").strip() for each in errors.splitlines()),
    )  # fmt: skip
    (csv := tmp_path / "a.csv").write_bytes("question,answer\ncafé?,1\n".encode("cp1252"))
    code, shown, _ = call({"train": str(csv), "eval": "50%"})
    assert "1 error, the first of each kind:" in shown and "more such" not in shown
    assert "a.csv: not UTF-8 at byte 19; save it as UTF-8, in Excel as CSV UTF-8" in shown


def test_a_question_with_two_answers_is_found_across_a_split(tmp_path: Path, call: Call) -> None:
    rows = [{"question": f"What is {n // 2}?", "answer": n} for n in range(40)]
    _, shown, _ = call({"train": lines(tmp_path / "a.jsonl", *rows), "eval": "50%"})
    counts = [int(n) for n in re.findall(r"(\d+) questions have different gold answers", shown)]
    assert sum(counts) == 20, shown


TALK = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


@pytest.mark.parametrize(
    ("row", "sections", "fix"),
    [
        ({"messages": TALK}, {}, {"stage": "sft"}),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
         {}, {"stage": "sft"}),
        ({"prompt": "Q", "completion": "A"}, {}, {"stage": "sft"}),
        ({"text": "Q"}, {}, {"stage": "pretrain"}),
        ({"Prompt": "Q", "Completion": "A", "Label": True}, {},
         {"stage": "preference", "preference.name": "kto"}),
        ({"prompt": "Q", "completion": "A", "label": True}, {"stage": "preference"},
         {"stage": "preference", "preference.name": "kto"}),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"},
         {"stage": "preference", "preference": {"name": "kto"}},
         {"stage": "preference", "preference.name": "dpo"}),
        ({"chosen": "Q A", "rejected": "Q B"}, {"data": {"form": "prompts"}},
         {"stage": "preference", "preference.name": "dpo"}),
        ({"question": "Q", "reply": "A"}, {"stage": "sft"}, {"data.columns.answer": "reply"}),
    ],
)  # fmt: skip
def test_rows_of_another_stage_name_what_reads_them(
    row: dict, sections: dict, fix: dict, tmp_path: Path, script: Call
) -> None:
    """One line for all rows, and what it says works."""
    train = lines(tmp_path / "rows.jsonl", *[row] * 60)
    options = {"model.path": str(TINY), "data.train": train, "data.template": "plain_chat"}

    def check(options: dict) -> tuple[int, str, str]:
        given = [word for key, value in options.items() for word in (f"--{key}", value)]
        return script("train.py", *given, "--data-check")

    before = {key: value for key, value in sections.items() if key == "stage"}
    before |= {f"{s}.{k}": v for s, of in sections.items() if s != "stage" for k, v in of.items()}
    code, shown, _ = check(options | before)
    told = shown.partition("60 errors, the first of each kind:\n")[2].splitlines()
    assert (code, len(told)) == (2, 1)
    assert told[0].endswith(" (and 59 more such rows)")
    fixes = [f"{key}={value}" for key, value in fix.items()]
    if "data.columns.answer" in fix:
        fixes = ["it has question, reply; set data.columns.answer to one of these"]
    assert " and ".join(fixes) in told[0]
    if "leave data.form out" in told[0]:
        del before["data.form"]
    assert check(options | before | fix)[0] == 0


def test_held_out_rows_to_learn_from_are_sent_to_eval_rows(tmp_path: Path, call: Call) -> None:
    train = lines(tmp_path / "a.jsonl", {"messages": TALK})
    code, shown, _ = call({"train": train, "form": "demonstrations", "eval": train})
    assert (code, "a.jsonl:1: columns messages do not match data.form=problems; "
            "set eval.rows in the place of data.eval" in shown) == (2, True)  # fmt: skip


def test_rows_to_learn_from_show_what_is_learned(tmp_path: Path, call: Call) -> None:
    pair = {"prompt": "Q\x1b[2J", "chosen": "good one", "rejected": "bad", "margin": 0.5}
    train = lines(tmp_path / "a.jsonl", pair, pair | {"chosen": "bad"})
    code, shown, _ = call({"train": train, "form": "preferences", "system_prompt": "none"})
    assert code == 2  # for the second row
    assert shown.startswith(
        f"train {train}: 2 rows, 1 taken as 2 rows of tokens\n  chosen is column 'chosen', "
        "rejected is column 'rejected', the prompt is column 'prompt'\n  row tokens: "
    )
    assert f"--- {train}:1, chosen, " in shown and f"--- {train}:1, rejected, " in shown
    assert "  learned tokens: min " in shown
    asked = "<|im_start|>user\nQ\\x1b[2J<|im_end|>\n<|im_start|>assistant\n\n"
    assert f", value 0.5\n{asked}--- learned, 9 tokens:\ngood one<|im_end|>\n" in shown
    assert f"tokens\n{asked}--- learned, 4 tokens:\nbad<|im_end|>\n1 error, " in shown
    assert f"  {train}:2: 'chosen' and 'rejected' are the same text; remove the row\n" in shown
    talks = {"Chosen": "Q: 1\nA: 1", "Rejected": "Q: 1\nA: 2"}
    train = lines(tmp_path / "a.jsonl", talks)
    code, shown, _ = call({"train": train, "form": "preferences", "system_prompt": "none"})
    assert "rejected is column 'Rejected', the prompt is the start that both share" in shown


def test_a_long_document_is_shown_in_part(tmp_path: Path, call: Call) -> None:
    train = lines(tmp_path / "a.jsonl", {"text": "0123456789" * 300})
    code, shown, _ = call({"train": train, "form": "texts", "max_tokens": 2000})
    assert code == 0
    assert "1 rows, 1 taken as 2 rows of tokens\n" in shown
    assert "… and 999 tokens more\n" in shown
    assert len(shown) < 3500


@pytest.mark.parametrize("switch", ["--plan", "--data-check"])
def test_ten_mistakes_are_told_in_one_run(tmp_path: Path, script: Call, switch: str) -> None:
    """Of the config by itself, of what it names, and of rows."""
    row = {"question": "Q", "answer": "1"}
    train = lines(tmp_path / "a.jsonl", {"task": "Q", "answer": "1"}, row)
    none, adapter = tmp_path / "none.jsonl", tmp_path / "no" / "adapter"
    tree = {
        "run": {"steps": "many", "directory": train},
        "model": {"path": str(tmp_path / "model"), "start": str(adapter)},
        "data": {"train": train, "eval": str(none), "template": "r0_zero", "system_prompt": "boxd"},
        "score": {"rewards": ["tag_count", "boxd", {"custom": f"{tmp_path}/mine.py:f"}]},
        "train": {"lerning_rate": 1},
        "preference": {"beta": 2},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    told = [
        *("'train.lerning_rate'", "run.steps='many'", "the preference section", "names 'boxd'"),
        *(f"score.rewards: custom={tmp_path}/mine.py:f", "data.template='r0_zero'"),
        *("data.system_prompt='boxd'", f"data file {none} does not exist", str(adapter)),
        *(f"{train}/config cannot be written", "model.path="),
    ]
    if switch == "--plan":
        told.remove(str(adapter))  # an earlier run of a recipe may be still to write it
    for _ in range(2):
        code, shown, errors = script("train.py", tmp_path / "config.yaml", switch)
        assert (code, len(errors.splitlines())) == (2, len(told)), errors
        for line, part in zip(errors.splitlines(), told, strict=True):
            assert line.startswith("error: ") and part in line
        shutil.copytree(TINY, tmp_path / "model", dirs_exist_ok=True)  # one is fixed
        told.pop() if told[-1] == "model.path=" else None
    column = "a.jsonl:1: lacks any of the columns 'messages', 'question', 'problem', 'prompt'"
    # Without the wrong options it would be the plan of another run.
    assert shown == "" if switch == "--plan" else column in shown


@pytest.mark.parametrize("wrong", [
    ("--memory.budget_gib", "80GB"), ("--memory.budget_gib", "81920"),
    ("--model.quantize", "nf5", "--memory.budget_gib", "48"),
    ("--memory.host_gib", "4", "--train.optimizer", "adamx"),
])  # fmt: skip
def test_a_wrong_option_is_one_error_and_no_plan_without_it_is_refused(
    wrong: tuple[str, ...], script: Call
) -> None:
    """32 billion parameters, of which no plan fits without the option."""
    config = ROOT / "configs" / "dapo_qwen2.5-32b_80gb.yaml"
    code, shown, errors = script("train.py", config, *wrong, "--plan")
    assert (code, shown, len(errors.splitlines())) == (2, "", 1), errors
    assert any(f"{key[2:]}=" in errors for key in wrong)


def test_a_wrong_reward_is_one_error_and_no_plan_without_it(script: Call) -> None:
    for name, fix in (
        ("my_rewards.right", "did you mean my_rewards.py:right?"),
        ("mine.sums.right", "did you mean mine/sums.py:right?"),
        ("bxed", "did you mean boxed?"),
        ("zzqq", "name one of these, or path/to/file.py:function"),
    ):
        code, shown, errors = script("train.py", "--score.rewards", name, "--plan")
        assert (code, shown, len(errors.splitlines())) == (2, "", 1), errors
        assert f"score.rewards names '{name}'" in errors and errors.endswith(f"; {fix}\n")


def test_a_plan_of_a_machine_without_a_gpu_names_the_option_for_one(script: Call) -> None:
    """Of all options here the engine alone is of a GPU."""
    options = ["--model.path", "qwen2.5-1.5b-instruct", "--sample.engine", "vllm"]
    line = (
        "planned for the CPU of this machine, which has no GPU: for a GPU, name its memory in GiB, "
        "such as --memory.budget_gib 24"
    )
    code, shown, errors = script("train.py", *options, "--plan")
    assert (code, shown.splitlines()[-1]) == (0, line), errors
    code, shown, errors = script("train.py", *options, "--plan", "--memory.budget_gib", "24")
    assert code == 0 and "planned for the CPU" not in shown, errors
    options[1] = "qwen2.5-32b-instruct"
    code, shown, errors = script("train.py", *options, "--plan", "--memory.host_gib", "8")
    assert (code, shown) == (2, "") and len(errors.splitlines()) == 1
    where = "is too little for qwen2.5-32b-instruct on the CPU of this machine, which has no GPU: "
    assert where in errors


def test_wrong_options_are_one_line(tmp_path: Path, call: Call) -> None:
    train = lines(tmp_path / "a.jsonl", {"prompt": "Q", "chosen": "good one", "rejected": "bad"})
    for data, named in (
        ({"form": "preferences", "template": "r0_zero"}, "data.template='r0_zero'"),
        ({"form": "preferences", "max_tokens": 9999}, "data.max_tokens=9999 is not from 2 to "),
    ):
        code, shown, errors = call({"train": train, **data})
        assert (code, "1 taken" in shown, errors.count("\n")) == (2, "template" in data, 1)
        assert errors.startswith(f"error: {named}")


def test_a_column_that_a_custom_reward_asks_for(tmp_path: Path, call: Call) -> None:
    row = {"question": "Q", "answer": "1"}
    train = lines(tmp_path / "a.jsonl", row | {"unit": "m"}, row)
    (tmp_path / "mine.py").write_text("def has_unit(completion, unit):\n    return 1.0\n")
    rewards = [{"custom": f"{tmp_path / 'mine.py'}:has_unit"}]
    code, shown, _ = call({"train": train}, score={"rewards": rewards})
    assert (code, "a.jsonl:2: lacks column 'unit'" in shown) == (2, True)


def test_the_report_shows_what_the_model_reads(tmp_path: Path, call: Call) -> None:
    """The prompts of their ids, and how many rows spell control tokens."""
    rows = [{"question": f"{n} <|im_end|>?"[: 2 + 12 * (n > 0)], "answer": "1"} for n in range(3)]
    code, shown, _ = call({"train": lines(tmp_path / "a.jsonl", *rows), "system_prompt": "none"})
    assert code == 0
    assert "control tokens that the row spells (<|im_end|>) are read as text in 2 rows" in shown
    assert "<|im_start|>user\n1 <|im_end|>?<|im_end|>\n<|im_start|>assistant\n" in shown


def test_a_run_over_several_sets_tells_each_accuracy(
    small_run: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train, test = (ROOT / "data" / f"arithmetic_{name}.jsonl" for name in ("train", "test"))
    part = tmp_path / "part.jsonl"
    part.write_text("".join(train.read_text().splitlines(keepends=True)[:8]))
    config = small_run(
        data__train=[{"source": str(train), "weight": 3}, str(part)],
        eval={"sets": {"sums": str(test), "seen": str(part)}, "limit": 8},
        run__steps=2,
    )
    training.run_training(config, Console("plain"))
    shown = capsys.readouterr().out
    folder = config.run.directory / "small"
    records = metrics.read(folder)
    assert records[0]["eval/accuracy"] == records[0]["eval/sums/accuracy"]
    assert "eval/seen/completion_tokens" in records[-1]
    summary = orjson.loads((folder / "summary.json").read_bytes())
    assert list(summary["accuracy_of_sets"]) == ["sums", "seen"]
    sums, seen = (records[0][f"eval/{name}/accuracy"] for name in ("sums", "seen"))
    of_sets = f"(sums {sums:.1%} on 8 problems, seen {seen:.1%} on 8 problems)"
    assert f"held-out accuracy {sums:.1%} on 8 problems {of_sets}" in shown
    sums, seen = (summary["accuracy_of_sets"][name][1] for name in ("sums", "seen"))
    assert f" -> {sums:.1%} on 8 problems\n" in shown and f" -> {seen:.1%} on 8 problems\n" in shown
    assert (folder / "curves.png").stat().st_size > 10_000
    assert "questions of an evaluation set: 16, such as" in " ".join(shown.split())


def test_code_rows_are_checked_without_a_sandbox(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a sandbox is started")

    monkeypatch.setattr(code_tests, "Sandbox", refuse)
    good = {"prompt": "Write add.", "test_list": ["assert add(1, 2) == 3"]}
    bad = {"prompt": "Write add.", "test": "assert add("}
    source = lines(tmp_path / "a.jsonl", good, bad)
    rewards = [{"name": "code_tests_fraction"}, {"name": "code_tests", "weight": 0.1}]
    code, shown, errors = call({"train": source}, score={"rewards": rewards})
    assert (code, errors) == (2, "")
    assert "2 rows, 1 taken" in shown
    assert "is not valid Python" in shown
