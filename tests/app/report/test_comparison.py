"""What the report says of several runs, and what it and the console call the same."""

import threading
import time
from pathlib import Path

import pytest

from reason_llm.app.cli import main
from reason_llm.app.report.page import write_report
from reason_llm.app.report.payload import differing_options
from reason_llm.app.report.serve import serve
from reason_llm.config import Config
from reason_llm.run.store.kept_adapters import readme
from report_runs import record, write_run


def config(**algorithm: object) -> Config:
    tree = {"run": {"name": "mine"}, "data": {"train": "rows.jsonl"}, "algorithm": algorithm}
    return Config.model_validate(tree)


def test_the_options_that_differ_are_told_and_no_others() -> None:
    one, other = config(name="grpo", clip_high=0.3), config(name="dapo")
    run = other.run.model_copy(update={"name": "other", "seed": 7})
    other = other.model_copy(update={"run": run})
    assert differing_options([one, other]) == [
        {"option": "run.seed", "values": ["0", "7"]},
        {"option": "algorithm.name", "values": ["grpo", "dapo"]},
        {"option": "algorithm.clip_high", "values": ["0.3", "null"]},
    ]
    assert differing_options([one, one]) == []
    between = one.with_options({"run.seed": 8, "eval.sets": {"a": "b"}})
    assert differing_options([one, between, one]) == [
        {"option": "run.seed", "values": ["0", "8", "0"]},
        {"option": "eval.sets.a", "values": ["null", "b", "null"]},
    ]


def test_an_alarm_says_which_run_it_is_of(tmp_path: Path) -> None:
    dead = [record(step, score__boxed=0.0, score__reward=0.0) for step in range(4)]
    alive = [record(step) for step in range(4)]
    runs = [write_run(tmp_path / name, each) for name, each in (("dead", dead), ("alive", alive))]
    assert write_report(runs, tmp_path / "both.html") == [
        "dead: alarms: No right answer", "alive: no alarms",
    ]  # fmt: skip
    assert write_report(runs[:1], tmp_path / "one.html") == ["alarms: No right answer"]


def test_the_page_of_several_runs_leaves_the_report_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, [record(step) for step in range(3)]) for name in "ab"]
    (runs[0] / "report.html").write_text("its own")
    assert main(["report", *map(str, runs)]) == 0
    assert f"report in {tmp_path / 'comparison.html'} " in capsys.readouterr().out
    assert (runs[0] / "report.html").read_text() == "its own"


def test_where_there_is_no_kl_nothing_says_that_there_is() -> None:
    without, usual = config(name="grpo", kl="none", kl_coefficient=0.0), config(name="grpo")
    assert "KL to the base" in usual.method.idea
    assert without.method.idea.endswith("here with no KL")
    assert "KL to the base" not in without.method.idea


def test_the_readme_of_an_adapter_is_ours() -> None:
    text = readme(config(name="grpo"), 7, "It was the best.").decode()
    assert "# mine" in text
    assert "over `model/tiny`, made with reason_llm: grpo" in text
    assert "after step 7 of 100. It was the best." in text
    assert "More Information Needed" not in text


@pytest.mark.long
def test_the_server_waits_for_a_run_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(serve.__globals__, "WAIT_SECONDS", 0.01)
    said: list[str] = []

    class Ended(Exception):
        pass

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("following"):
            raise Ended

    def begin() -> None:
        while not said:
            time.sleep(0.01)
        write_run(tmp_path / "later", [record(1)])

    thread = threading.Thread(target=begin)
    thread.start()
    with pytest.raises(Ended):
        serve([tmp_path / "later"], 0, say)
    thread.join()
    assert said[0] == f"waiting for {tmp_path / 'later'} to begin; Ctrl-C ends"
    assert said[1].startswith("following on http://127.0.0.1:")
