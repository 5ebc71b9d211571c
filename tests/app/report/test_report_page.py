"""The file: what it holds, what it leaves out and says so, and the walls around others' words."""

import base64
import gzip
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from conftest import ROOT
from reason_llm.app.cli import main
from reason_llm.app.report import rollouts
from reason_llm.app.report.page import SCRIPTS, _asset, page, write_report
from reason_llm.app.report.payload import Examined, examine, to_value
from reason_llm.app.report.runs import read_run, read_runs
from reason_llm.errors import DataError
from report_runs import group, record, write_run

HOSTILE = "</script><script>alert(1)</script><!--<script> & \u2028\u2029 {{data}} {{script}}"


def examined(folder: Path) -> Examined:
    return examine(read_run(folder, folder.name))


def embedded(content: bytes) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', content.decode())
    assert found
    value: dict[str, Any] = orjson.loads(found[1])
    return value


def opened(content: bytes, run: int, step: int) -> tuple[dict[str, Any], Any]:
    """The header of a step's rollouts, and its two planes of numbers."""
    pattern = rf'<script type="text/plain" id="rollouts-{run}-{step}">(.*?)</script>'
    found = re.search(pattern, content.decode())
    assert found
    blob = gzip.decompress(base64.b64decode(found[1]))
    size = int.from_bytes(blob[:4], "little")
    return orjson.loads(blob[4 : 4 + size]), np.frombuffer(blob[4 + size :], "<u2").reshape(2, -1)


def unpacked(content: bytes, run: int, step: int) -> dict[str, Any]:
    return opened(content, run, step)[0]


def test_without_javascript_the_page_says_where_the_numbers_are(tmp_path: Path) -> None:
    text = page([examined(write_run(tmp_path / "run", [record(0)]))]).decode()
    (sentence,) = re.findall("<noscript>(.*)</noscript>", text)
    assert re.findall("<code>(.*?)</code>", sentence) == [
        "metrics.jsonl", "summary.json", "curves.png",
    ]  # fmt: skip


def test_a_token_has_its_log_prob(tmp_path: Path) -> None:
    said = group(["12"], [1.0])
    content = page([examined(write_run(tmp_path / "run", [record(0)], [[said]]))])
    _, (_, logprobs) = opened(content, 0, 0)
    assert logprobs.tolist() == [50] * (len(said.completions[0].logprobs) - 1) + [1]


def test_checks_point_at_the_groups_that_show_them(tmp_path: Path) -> None:
    records = [record(step, **{"score/errors": float(step == 2)}) for step in range(4)]
    steps = [[group(["1", "2"], [1.0, 1.0])], [group(["1"], [1.0]), group(["2"], [0.0])]]
    (run,) = to_value([examined(write_run(tmp_path / "run", records, steps))])["runs"]
    (check,) = [each for each in run["checks"] if each["state"] == "alarm"]
    assert (check["title"], check["steps"], check["groups"]) == ("Scoring errors", [2, 2], [2])
    assert check["charts"] == ["score/errors"]
    assert check["text"].startswith("1 errors and 0 timeouts")


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
    monkeypatch.setattr(rollouts, "MAX_ROLLOUTS", 8 * 6)
    found = examined(folder)
    assert [len(step.groups) for step in found.rollouts.steps] == [3] * 8
    value = to_value([found])["runs"][0]["rollouts"]
    assert (value["count"], value["archived"], value["steps"]) == (48, 160, 8)
    monkeypatch.setattr(rollouts, "MAX_STEPS", 3)
    assert [step.step for step in examined(folder).rollouts.steps] == [0, 4, 7]
    whole = examined(folder).rollouts.steps
    most = max(len(step.blob) for step in whole) - 30
    monkeypatch.setattr(rollouts, "MAX_BLOB_BYTES", 3 * most)
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
        (("other",), "other is not a training run: it has no metrics.jsonl"),
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
    "step": 0, "time": "now", "reason_llm": "1",
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
    folder = write_run(tmp_path / "run", [
        record(s, eval__accuracy=s / 4, eval__problems=1256) for s in range(4)
    ])  # fmt: skip
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
        "9 training rows ask what", "|weights|3.00 GiB|5.0 MiB|total planned|3.00 GiB|5.0 MiB|",
        "|measured peak|0.50 GiB|0.60 GiB", "|Processor|p, 1 core, ", "|Packages|torch 2",
        "|Resumed|after step 2, now|", "|grpo on ",
        "Held-out accuracy|0.0% → 75.0%| on 1,256 problems|",
        "|Mean reward|0.500 → 0.500|", "|Sampled|300| tokens|Time|14 s|Peak memory|0.60 GiB",
    ):  # fmt: skip
        assert row in ended.stdout, row


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
