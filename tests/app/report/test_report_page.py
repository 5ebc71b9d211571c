"""The file: what it holds, what it leaves out and says so, and the walls around others' words."""

import base64
import gzip
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from conftest import ROOT
from reason_llm.app.cli import main
from reason_llm.app.report import rollouts
from reason_llm.app.report.page import SCRIPTS, _asset, page, write_report
from reason_llm.app.report.payload import (
    Examined,
    _rollouts,
    differing_options,
    evidence,
    examine,
    to_value,
)
from reason_llm.app.report.runs import Run, read_run, read_runs
from reason_llm.config import Config
from reason_llm.errors import DataError
from reason_llm.rollout import Span
from report_runs import facts, group, record, write_run

HOSTILE = "</script><script>alert(1)</script><!--<script> & \u2028\u2029 {{data}} {{script}}"


def examined(folder: Path) -> Examined:
    return examine(read_run(folder, folder.name))


def embedded(content: bytes) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', content.decode())
    assert found
    value: dict[str, Any] = orjson.loads(found[1])
    return value


def opened(content: bytes, run: int, step: int) -> tuple[dict[str, Any], Any]:
    """The header of a step's rollouts, and its three planes of numbers."""
    pattern = rf'<script type="text/plain" id="rollouts-{run}-{step}">(.*?)</script>'
    found = re.search(pattern, content.decode())
    assert found
    blob = gzip.decompress(base64.b64decode(found[1]))
    size = int.from_bytes(blob[:4], "little")
    return orjson.loads(blob[4 : 4 + size]), np.frombuffer(blob[4 + size :], "<u2").reshape(3, -1)


def unpacked(content: bytes, run: int, step: int) -> dict[str, Any]:
    return opened(content, run, step)[0]


def test_a_token_s_ratio_is_the_learner_s_over_the_sampler_s(tmp_path: Path) -> None:
    said = group(["12"], [1.0])
    (before,) = said.completions
    learner = (before.logprobs[0] + 0.25, *before.logprobs[1:])
    said = replace(said, completions=(replace(before, learner_logprobs=learner),))
    content = page([examined(write_run(tmp_path / "run", [record(0)], [[said]]))])
    _, (_, logprobs, ratios) = opened(content, 0, 0)
    assert logprobs.tolist() == [50] * (len(learner) - 1) + [1]
    assert ratios.tolist() == [0x8000 + 250] + [0x8000] * (len(learner) - 1)


def test_a_token_s_numbers_are_cut_to_what_two_bytes_hold(tmp_path: Path) -> None:
    """The last value is of what has no number."""
    options: dict[str, Any] = {"token_ids": (5, 6, 2), "logprobs": (-1e9, -0.014, 0.0)}
    known = group(["x"], [1.0], **options, learner_logprobs=(1e9, -0.016, -1e9))
    unknown = group(["x"], [0.0], **options)
    content = page([examined(write_run(tmp_path / "run", [record(0)], [[known, unknown]]))])
    header, (lengths, logprobs, ratios) = opened(content, 0, 0)
    assert (header["tokens"], header["split"]) == ([3, 3], [False, False])
    assert (header["ratios"], header["played"]) == ([True, False], [None, None])
    assert lengths.tolist() == [0] * 6
    assert logprobs.tolist() == [0xFFFE, 1, 0] * 2
    assert ratios.tolist() == [0xFFFE, 0x8000 - 2, 0] + [0xFFFF] * 3


def test_what_an_environment_did_is_beside_the_completion(tmp_path: Path) -> None:
    played = group(["12"], [1.0], environment={"calls": 2.0}, finish_reason="environment")
    header = unpacked(page([examined(write_run(tmp_path / "a", [record(0)], [[played]]))]), 0, 0)
    spans = [[each.start, each.end] for each in played.completions[0].spans]
    assert header["played"] == [{"spans": spans, "end": "environment", "calls": 2.0}]
    assert header["groups"][0]["answer"] == "3"


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [9]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, list(range(10)))]
)
def test_an_even_sample_has_both_ends(most: int, expected: list[int]) -> None:
    assert rollouts.evenly(range(10), most) == expected


@pytest.mark.parametrize(
    ("share", "places", "most"),
    [(1.0, [0, 4, 9], [20 // 3, 50 // 3]), (0.5, [0, 9], [5, 12]), (0.1, [0, 9], [1, 2])],
)
def test_archives_are_read_within_the_bounds(
    share: float, places: list[int], most: list[int], tmp_path: Path, monkeypatch: Any
) -> None:
    """Here by bytes: ten archives of 20 each, of which 60 may be read."""
    bounds = {"READ_BYTES": 60, "ROLLOUTS": 20, "BLOB_BYTES": 50, "STEPS": 9}
    for name, bound in bounds.items():
        monkeypatch.setattr(rollouts, f"MOST_{name}", bound)
    archives = [tmp_path / str(number) for number in range(10)]
    for path in archives:
        path.write_bytes(b"." * 20)
    asked: list[Any] = []

    def read(path: Path, *more: Any) -> Any:
        asked.append((int(path.name), *more))

    found = rollouts.read_rollouts(archives, None, share, read)
    assert asked == [(place, None, *most) for place in places]
    assert (found.num_archives, found.notices) == (10, [])
    monkeypatch.setattr(rollouts, "MOST_STEPS", 2 / share)
    asked.clear()
    rollouts.read_rollouts(archives, None, share, read)
    assert [place for place, *_ in asked] == [0, 9]


def test_a_group_comes_to_its_facts(tmp_path: Path) -> None:
    said = group(["1", "2"], [0.25, 0.5], "What is\n 1?", advantage=-0.12345)
    cut = replace(said.completions[1], finish_reason="length", reward=None, advantage=None,
                  rewards={"boxed": float("nan")})  # fmt: skip
    said = replace(said, completions=(said.completions[0], cut))
    packed = rollouts.pack(7, [said, group(["3"], [1.0], "x" * 200)], None, 99, 1 << 20)
    first, second = packed.groups
    assert (packed.step, packed.num_rollouts, packed.num_split) == (7, 3, 0)
    assert (first.step, first.prompt_id) == (7, "set.jsonl:What is\n 1?")
    assert (first.rewards, first.parts) == ([0.25, 0.0], {"boxed": [0.25, 0.0]})
    assert (first.advantages, first.lengths) == ([-0.12345, 0.0], [2, 2])
    assert first.are_truncated == [False, True]
    assert (first.preview, second.preview) == ("What is 1?", f"{'x' * 160}…")
    ids = (5, *[9] * 12, 6, 7)  # the environment said nine, twelve times
    played = replace(cut, token_ids=ids, logprobs=(0.0,) * 15, spans=(Span(1, 13),))
    (turns,) = rollouts.pack(7, [replace(said, completions=(played,))], None, 9, 1 << 20).groups
    assert (turns.lengths, turns.repeated) == ([3], [0.0])
    (kept,) = rollouts.pack(7, [said, *[group(["3"], [1.0])] * 3], None, 3, 1 << 20).groups
    assert kept.rewards == [1.0]  # two completions are the most of a group: one fits


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [(["same"] * 2, (0, 0)), (["<s>a\nb", "<s>a\nc"], (5, 0)), (["ab", "ac"], (0, 0)),
     (["<s>1 is</s>", "<s>2 is</s>"], (3, 4)), (["1 or 2\nA", "1 or 3\nA"], (0, 2)),
     (["[s]7[e]!", "[s]8[e]!"], (3, 4)), (["x> 1 is so", "x> 2 is so"], (2, 0))],
)  # fmt: skip
def test_a_preview_leaves_out_what_all_prompts_share(
    prompts: list[str], shared: tuple[int, int]
) -> None:
    assert rollouts._markers(prompts) == shared


def test_what_the_page_lists_of_a_run(tmp_path: Path) -> None:
    rewards = [{"name": "boxed"}, {"name": "format", "weight": 0.5}]
    pair = {"eval__pair_accuracy": 0.75, "eval__pairs": 16.0}
    records = [record(1), record(2, **pair, train__kl=0.12345678), record(4)]
    made = [group(["1", "2"], [0.0, 1 / 3], advantage=1 / 3),
            group(["1", "1"], [-1.0, 2.0], "What is 4?")]  # fmt: skip
    said, more = (
        replace(each, completions=tuple(
            replace(one, rewards={"boxed": one.reward or 0.0, "format": 0.25})
            for one in each.completions))
        for each in made
    )  # fmt: skip
    folder = write_run(tmp_path / "run", records, [[said, more]], rewards)
    (run,) = to_value([examined(folder)])["runs"]
    assert (run["step"], run["planned_steps"], run["finished"]) == (4, 100, False)
    assert run["left"] == "about 6 min left"
    assert (run["stage"], run["judged_by"], run["algorithm"]) == ("rl", "accuracy", "grpo")
    assert run["warmup_steps"] == 0
    assert run["rewards"] == [{"name": "boxed", "weight": 1.0}, {"name": "format", "weight": 0.5}]
    assert run["pairs"] == pytest.approx({"count": 16, "low": 0.50497, "high": 0.89823}, abs=1e-4)
    assert run["columns"]["train/kl"] == [0.0, 0.123457, 0.0]
    assert run["columns"]["eval/pairs"] == [None, 16.0, None]
    listed = run["rollouts"]
    assert (listed["archives"], listed["steps"], listed["count"]) == (1, 1, 4)
    assert (listed["least"], listed["most"]) == (-1.0, 2.0)
    groups = listed["groups"]
    assert groups["rewards"] == [[0.0, 0.3333], [-1.0, 2.0]]
    assert groups["first"] == groups["parts"]["boxed"] == [[0.0, 0.3333], [-1.0, 2.0]]
    assert groups["parts"]["format"] == [[0.25, 0.25]] * 2
    assert groups["advantages"] == [[0.3333, 0.3333], [0.0, 0.0]]
    assert groups["lengths"] == [[2, 2], [2, 2]]
    assert groups["similarity"] == [0.0, 1.0]


def test_a_group_without_a_reward_is_listed_with_zeros_of_it() -> None:
    groups = [facts(0, parts={"boxed": [1.0, 2.0]}), facts(1, parts={"format": [0.5, 0.25]})]
    step = rollouts.StepRollouts(0, 9, groups, b"", 0)
    listed = _rollouts(rollouts.Rollouts([step], 3, []), "boxed")
    assert (listed["archives"], listed["archived"], listed["count"]) == (3, 9, 4)
    assert listed["groups"]["parts"]["format"] == [[0.0, 0.0], [0.5, 0.25]]
    assert listed["groups"]["first"] == [[1.0, 2.0], [0.0, 0.0]]


def test_checks_point_at_the_groups_that_show_them(tmp_path: Path) -> None:
    records = [record(step, **{"score/errors": float(step == 2)}) for step in range(4)]
    steps = [[group(["1", "2"], [1.0, 1.0])], [group(["1"], [1.0]), group(["2"], [0.0])]]
    (run,) = to_value([examined(write_run(tmp_path / "run", records, steps))])["runs"]
    (check,) = [each for each in run["checks"] if each["state"] == "alarm"]
    assert (check["title"], check["steps"], check["groups"]) == ("Scoring errors", [2, 2], [2])
    assert check["charts"] == ["score/errors"]
    assert check["text"].startswith("1 errors and 0 timeouts")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"algorithm": {"correction": "token_mask"}}, {}),
        ({"run": {"from_buffer": "b.json"}}, {"replayed": "token_truncate"}),
        ({"run": {"max_staleness": 1}}, {"stale": "token_truncate"}),
        ({"algorithm": {"name": "rloo"}, "sample": {"completions_per_prompt": 6}},
         {"group_size": 6}),
    ],
)  # fmt: skip
def test_the_checks_are_told_of_the_config(
    options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = Config.model_validate({"data": {"train": "x"}, **options})
    best = tmp_path / "adapter_best" / "best.json"
    best.parent.mkdir()
    best.write_text('{"step": 7}')
    starts = [{}, {"data": {"held_out": [{"prompts": 9}, {"prompts": 5}]}}]
    run = Run("run", tmp_path, config, [record(1)], None, starts, [])
    found = evidence(run, [])
    assert (found.num_held_out, found.best_step, found.stage) == (9, 7, "rl")
    assert found.weights == {reward.key: reward.weight for reward in config.score.rewards}
    usual = {"group_size": config.sample.completions_per_prompt, "replayed": None, "stale": None}
    for name, value in (usual | expected).items():
        assert getattr(found, name) == value
    assert found.compares_groups and not found.paid_by_model


@pytest.mark.parametrize(("weight", "is_paid"), [(1.0, True), (0.0, False)])
def test_a_reward_model_pays_if_it_has_a_weight(
    weight: float, is_paid: bool, tmp_path: Path
) -> None:
    paid = {"name": "reward_model", "weight": weight, "options": {"path": "x"}}
    rewards = [{"name": "boxed"}, paid]
    config = Config.model_validate({"data": {"train": "x"}, "score": {"rewards": rewards}})
    found = evidence(Run("run", tmp_path, config, [], None, [], []), [])
    assert found.paid_by_model is is_paid
    assert (found.num_held_out, found.best_step) == (None, None)


def test_options_of_every_run_are_not_compared_and_long_ones_are_cut() -> None:
    tree = {"run": {"name": "a"}, "data": {"train": "x"}}
    one, other = (
        Config.model_validate(tree | {"run": {"name": name, "directory": name}, "data": {
            "train": "x", "system_prompt": name * 300}}) for name in "ab"
    )  # fmt: skip
    assert differing_options([one, other]) == [
        {"option": "data.system_prompt", "values": ["a" * 200, "b" * 200]}
    ]


def test_what_is_shown_is_what_was_recorded(tmp_path: Path) -> None:
    groups = [[group(["1+2=3", "4"], [1.0, 0.0]), group(["5", "6"], [0.0, 0.0], "What is 4?")]]
    records = [record(0), record(1, **{"score/reward": 0.25, "train/kl": 1e-9})]
    content = page([examined(write_run(tmp_path / "run", records, groups))])
    run = embedded(content)["runs"][0]
    assert run["steps"] == [0, 1]
    assert run["columns"]["score/reward"] == [0.5, 0.25]
    assert run["columns"]["train/kl"] == [0.0, 1e-9]
    assert run["rollouts"]["groups"]["rewards"] == [[1.0, 0.0], [0.0, 0.0]]
    assert run["rollouts"]["groups"]["preview"] == ["What is 1 + 2?", "What is 4?"]
    assert (run["rollouts"]["count"], run["rollouts"]["archived"]) == (4, 4)
    header = unpacked(content, 0, 0)
    assert [each["texts"] for each in header["groups"]] == [["1+2=3", "4"], ["5", "6"]]
    assert header["split"] == [True] * 4
    assert run["finished"] is False
    assert "sample:\n  engine: transformers" in run["config"]


def test_nothing_of_a_run_can_end_the_data_or_begin_a_script(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "<b onload=x>", [record(0), record(1)], [[group([HOSTILE], [1.0], HOSTILE)]]
    )
    content = page([examined(folder)]).decode()
    assert content.count("<script") == content.count("</script>") == 3  # data, one step, the page
    assert "<script>alert" not in content
    assert "<b onload" not in content
    assert "\u2028" not in content.replace("\\u2028", "")
    assert embedded(content.encode())["runs"][0]["label"] == "<b onload=x>"
    assert unpacked(content.encode(), 0, 0)["groups"][0]["texts"] == [HOSTILE]


def test_the_policy_allows_the_page_s_own_script_and_style_alone(tmp_path: Path) -> None:
    content = page([examined(write_run(tmp_path / "run", [record(0), record(1)]))]).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', content)
    assert policy
    script, style = (
        content.rsplit("<script>", 1)[1],
        re.search(r"<style>(.*?)</style>", content, re.S),
    )
    assert style
    for name, text in (("script", script.split("</script>")[0]), ("style", style[1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval\(|new Function", content)


def test_a_damaged_archive_is_named_and_passed_over(tmp_path: Path) -> None:
    groups = [[group(["1", "2"], [0.0, 1.0])] for _ in range(3)]
    folder = write_run(tmp_path / "run", [record(s) for s in range(4)], groups)
    damaged = folder / "buffers" / "step-00000001.json.gz"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    whole = gzip.decompress((damaged.parent / "step-00000002.json.gz").read_bytes())
    empty = orjson.loads(whole) | {"groups": []}
    (damaged.parent / "step-00000003.json.gz").write_bytes(gzip.compress(orjson.dumps(empty)))
    (folder / "summary.json").write_text("{")
    run = embedded(page([examined(folder)]))["runs"][0]
    assert run["rollouts"]["groups"]["step"] == [0, 2]
    for name in ("step-00000001.json.gz", "step-00000003.json.gz"):
        assert any(f"{name} was passed over" in text for text in run["notices"])
    assert any("summary.json" in text for text in run["notices"])


def test_beyond_the_bounds_rollouts_are_sampled_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [[group([f"{s} {g}", "x"], [0.0, 1.0]) for g in range(10)] for s in range(8)]
    folder = write_run(tmp_path / "run", [record(s) for s in range(9)], groups)
    monkeypatch.setattr(rollouts, "MOST_ROLLOUTS", 8 * 6)
    found = examined(folder)
    assert [len(step.groups) for step in found.rollouts.steps] == [3] * 8
    value = to_value([found])["runs"][0]["rollouts"]
    assert (value["count"], value["archived"], value["steps"]) == (48, 160, 8)
    monkeypatch.setattr(rollouts, "MOST_STEPS", 3)
    assert [step.step for step in examined(folder).rollouts.steps] == [0, 4, 7]
    whole = examined(folder).rollouts.steps
    most = max(len(step.blob) for step in whole) - 30
    monkeypatch.setattr(rollouts, "MOST_BLOB_BYTES", 3 * most)
    small = examined(folder).rollouts.steps
    assert all(0 < len(a.groups) < len(b.groups) for a, b in zip(small, whole, strict=True))
    assert all(len(step.blob) <= most for step in small)


def test_a_long_run_s_records_are_thinned_but_for_evaluations(tmp_path: Path) -> None:
    records = [record(s) for s in range(9001)]
    records[4001]["eval/accuracy"] = 0.7
    run = to_value([examined(write_run(tmp_path / "run", records))])["runs"][0]
    assert 4000 <= len(run["steps"]) <= 4001
    assert {0, 4001, 9000} <= set(run["steps"])
    assert run["columns"]["eval/accuracy"][run["steps"].index(4001)] == 0.7


def test_tokens_that_cannot_be_told_apart_are_a_word_in_the_report(tmp_path: Path) -> None:
    groups = [[group(["1", "2"], [0.0, 1.0])]]
    away = write_run(tmp_path / "away", [record(0)], groups, model="nobody/nothing")
    assert "nobody/nothing has no tokenizer.json" in (examined(away).token_notice or "")
    lied = [[group(["1", "2"], [0.0, 1.0], token_ids=(5, 6), logprobs=(-1.0, -1.0))]]
    other = examined(write_run(tmp_path / "other", [record(0)], lied))
    assert "In 2 completions" in (other.token_notice or "")
    assert other.rollouts.num_rollouts == 2


def test_two_runs_of_one_name_have_labels_of_their_own(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "run", [record(0)]) for parent in "ab"]
    assert [run.label for run in read_runs(folders)] == [str(folder) for folder in folders]
    with pytest.raises(DataError, match="named twice"):
        read_runs([folders[0], folders[0] / ".." / "run"])


def test_no_absolute_path_of_the_machine_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [[group(["1", "2"], [0.0, 1.0])]]
    folders = [
        write_run(tmp_path / "machine" / parent / "run", [record(0)], groups) for parent in "ab"
    ]
    (folders[0] / "summary.json").write_text("no JSON")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_report(folders, tmp_path / "report.html")
    shown = (tmp_path / "report.html").read_text()
    for path in (str(tmp_path), str(ROOT), str(Path.home())):
        assert path not in shown
    assert "arithmetic_train.jsonl" in shown and "machine/a/run" in shown


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in a folder: its exit code, standard output and error."""

    def call(*arguments: str, cwd: Path = ROOT) -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        code = main(["report", *arguments])
        return code, *capsys.readouterr()

    return call


def test_the_command_writes_the_report_and_names_alarms(
    tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    records = [record(s, **{"score/errors": float(s == 3)}) for s in range(6)]
    folder = write_run(tmp_path / "run", records, [[group(["1", "2"], [0.0, 1.0])]])
    code, shown, error = call(str(folder))
    assert (code, error) == (0, "")
    assert f"report in {folder / 'report.html'}" in shown
    assert "alarms: Scoring errors" in shown
    out = tmp_path / "elsewhere.html"
    assert call(str(folder), "--out", str(out))[0] == 0
    assert b"<!doctype html>" in out.read_bytes()[:20]


def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    folder = write_run(tmp_path / "runs" / "quickstart", [record(0)])
    broken = write_run(tmp_path / "runs" / "broken", [record(0)])
    (broken / "metrics.jsonl").write_text("[1]\n")
    newer = write_run(tmp_path / "runs" / "newer", [record(0)])
    config = newer / "resolved_config.yaml"
    config.write_text(config.read_text() + "nonsense: {a: 1}\n")
    (tmp_path / "other").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for arguments, told in (
        ((), "the following arguments are required: RUN"),
        (("runs/quikstart",), "there is no run runs/quikstart; did you mean runs/quickstart?"),
        (("quickstart",), "did you mean runs/quickstart?"),
        (("other",), "other is no training run: it has no metrics.jsonl"),
        (("runs/broken",), "metrics.jsonl:1: it holds list, not an object"),
        (("runs/newer",), "unknown key 'nonsense'"),
        (("runs/quickstart", "--nothing"), "unrecognized arguments: --nothing"),
        (("runs/quickstart", "--out", "runs/quickstart/metrics.jsonl/x.html"), "cannot be written"),
        (("runs/quickstart", "--serve", "--out", "x.html"), "--serve writes no file"),
        (("runs/quickstart", "--port", "8000"), "--port 8000 is for --serve"),
        (("runs/quickstart/metrics.jsonl",), "there is no run runs/quickstart/metrics.jsonl"),
        (("runs/quickstart", "--serve", "--port", "99999"), "--port 99999 cannot be listened on"),
    ):
        code, shown, error = call(*arguments, cwd=tmp_path)
        assert (code, shown) == (2, ""), arguments
        assert error.count("\n") == 1, error
        assert error.startswith("error: ")
        assert told in error
    assert sorted(tmp_path.rglob("*")) == before
    assert folder.exists()


def test_writing_over_a_folder_is_an_error_and_leaves_no_rest(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(0)])
    (folder / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html cannot be written"):
        write_report([folder], folder / "report.html")
    assert not list(folder.glob(".*"))


SET = {"name": "", "source": "a", "rows": 1, "prompts": 1, "left_out": {}}
START: dict[str, Any] = {
    "step": 0, "time": "now", "reason_llm": {"version": "1", "commit": None, "dirty": None},
    "packages": {"torch": "2"}, "machine": {"processor": "p", "cores": 1},
    "data": {"training": [SET], "held_out": [SET], "in_both": 0},
    "plan": [{"name": "a", "sampling": 1, "learning": 2}],
}  # fmt: skip


@pytest.mark.parametrize(
    "environment",
    [
        {"starts": [5]}, {"starts": 5}, {"starts": {"a": 1}}, {}, {"starts": [{}]},
    ],
)  # fmt: skip
def test_a_damaged_environment_is_passed_over(environment: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(0), record(1)])
    (folder / "environment.json").write_bytes(orjson.dumps(environment))
    found = examine(read_run(folder, "run"))
    assert found.run.starts == []
    assert any("environment.json is damaged" in each for each in found.run.notices)
    page([found])


def test_an_environment_that_is_whole_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(0), record(1)])
    (folder / "environment.json").write_bytes(orjson.dumps({"starts": [START]}))
    found = read_run(folder, "run")
    assert (found.starts, found.notices, found.num_held_out) == ([START], [], 1)


ELEMENTS = """
globalThis.ResizeObserver = class {};
const element = () => ({
  children: [], style: {}, classList: { add() {}, toggle() {} }, setAttribute() {},
  append(...more) { this.children.push(...more); }, get firstChild() { return this.children[0]; },
});
globalThis.document = { createElement: element, getElementById: element, addEventListener() {} };
const words = (node) => node.children ? node.children.map(words).join("|") : node;
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node (apt-get install nodejs)")
def test_the_page_s_own_code_shows_each_number_in_its_place(tmp_path: Path) -> None:
    """Without a browser: the words of its elements, one after the other."""
    folder = write_run(tmp_path / "run", [record(s, eval__accuracy=s / 4) for s in range(4)])
    held_out = {"name": "h", "source": "b", "rows": 7, "prompts": 5, "left_out": {"x": 2}}
    taken = SET | {"rows": 4321, "prompts": 1234}
    plan = [{"name": "weights", "sampling": 3 << 30, "learning": 5 << 20}]
    data = {"training": [taken], "held_out": [held_out], "in_both": 9}
    start = START | {"step": 2, "data": data, "plan": plan}
    (folder / "environment.json").write_bytes(orjson.dumps({"starts": [START, start]}))
    script = "\n".join(map(_asset, SCRIPTS)).removesuffix("begin();\n")
    value = to_value([examined(folder)])
    shown = f"data = {orjson.dumps(value).decode()}; console.log(words(setup()), words(figures("
    ended = subprocess.run(
        ["node", "-"], input=f"{ELEMENTS}{script}{shown}data.runs[0])))",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for row in (
        "||Set|Rows|Taken|Left out|training|a|4,321|1,234|none|held out|h: b|7|5|2 by x",
        "9 training rows ask what", "|weights|3.00 GiB|5.0 MiB|planned in all|3.00 GiB|5.0 MiB|",
        "|measured peak|0.50 GiB|0.60 GiB", "|Processor|p, 1 cores, ", "|Packages|torch 2",
        "|Went on|after step 2, now|", "|grpo on ", "Held-out accuracy|0.0% → 75.0%|",
        "|Mean reward|0.500 → 0.500|", "|Sampled|300| tokens|Time|14 s|Peak memory|0.60 GiB",
    ):  # fmt: skip
        assert row in ended.stdout, row


def test_a_summary_is_read_only_if_the_run_ended_there(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(0), record(1)])
    for steps, summary in ((0, None), (1, {"steps": 1})):
        (folder / "summary.json").write_bytes(orjson.dumps({"steps": steps}))
        assert read_run(folder, "run").summary == summary


@pytest.mark.parametrize("name", ["summary.json", "environment.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_hangs_nothing(name: str, kind: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(0), record(1)])
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    if name == "metrics.jsonl":
        with pytest.raises(DataError):
            read_run(folder, "run")
        return
    assert any(name in each for each in read_run(folder, "run").notices)
