"""The file: what it holds, what it leaves out and says so, and the walls around others' words."""

import base64
import gzip
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import orjson
import pytest

from conftest import ROOT
from reason_llm.app.report import rollouts
from reason_llm.app.report.equation import equation
from reason_llm.app.report.page import page, write_report
from reason_llm.app.report.payload import Examined, examine, to_value
from reason_llm.app.report.runs import read_run, read_runs
from reason_llm.config import Config
from reason_llm.config.algorithms import ALGORITHMS
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


def unpacked(content: bytes, run: int, step: int) -> dict[str, Any]:
    pattern = rf'<script type="text/plain" id="rollouts-{run}-{step}">(.*?)</script>'
    found = re.search(pattern, content.decode())
    assert found
    blob = gzip.decompress(base64.b64decode(found[1]))
    size = int.from_bytes(blob[:4], "little")
    header: dict[str, Any] = orjson.loads(blob[4 : 4 + size])
    return header


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


def test_metrics_under_their_earlier_names_are_read(tmp_path: Path) -> None:
    records = [record(0), record(1, train__left_out=2.0, train__correction=1.1)]
    columns = to_value([examined(write_run(tmp_path / "run", records))])["runs"][0]["columns"]
    assert columns["train/left_out"] == [None, 2.0]
    assert columns["train/correction"] == [None, 1.1]


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


def equations(config: Config, **columns: object) -> list[str]:
    """The MathML of an algorithm's row on lines: a fraction as (a)/(b), an index as a_(b)."""
    section = config.algorithm.model_validate(columns)
    html = equation(config.model_copy(update={"algorithm": section}))
    found = ElementTree.fromstring(f"<div>{html}</div>")
    return [linear(each) for each in found.iter("{http://www.w3.org/1998/Math/MathML}math")]


def linear(node: ElementTree.Element) -> str:
    parts, tag = [linear(child) for child in node], node.tag.rpartition("}")[2]
    if tag == "mfrac":
        return f"({parts[0]})/({parts[1]})"
    if tag in ("msub", "munder", "msup"):
        return f"{parts[0]}{'^' if tag == 'msup' else '_'}({parts[1]})"
    if tag == "msubsup":
        return f"{parts[0]}_({parts[1]})^({parts[2]})"
    return "".join([*(node.text or "").split(), *parts])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return read_run(write_run(tmp_path / "run", [record(0)]), "run").config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_an_equation_with_its_numbers(config: Config, name: str) -> None:
    shown = equations(config, name=name)
    assert len(shown) >= 2
    row = ALGORITHMS[name]
    if row.kl_coefficient:
        assert any(f"−{row.kl_coefficient:g}" in each for each in shown)
    if row.surrogate == "clip":
        assert f"1−{row.clip_low:g},1+{row.clip_high:g}" in shown[0]


QUOTIENT = "(π_(θ)(o_(i,t)))/(π_(old)(o_(i,t)))"
EQUATIONS = {
    "grpo": [
        "J=(1)/(N)∑_(i)(1)/(|o_(i)|)∑_(t)(min(r_(i,t)A_(i),clip(r_(i,t),1−0.2,1+0.2)A_(i))"
        "−0.04D_(i,t))",
        "A_(i)=(R_(i)−meanofitsgroup)/(deviationinitsgroup+0.0001)",
        f"r_(i,t)={QUOTIENT}",
        "D_(i,t)=e^(l)−1−l,l=log(π_(ref))/(π_(θ))",
    ],
    "rloo": [
        "J=(1)/(N)∑_(i)∑_(t)A_(i)logπ_(θ)(o_(i,t))",
        "A_(i)=R_(i)^(KL)−meanoftheothersofitsgroup",
        "R_(i)^(KL)=R_(i)−0.05∑_(t)D_(i,t)",
        "D_(i,t)=−l,l=log(π_(ref))/(π_(old))",
    ],
    "reinforce_pp": [
        "J=(1)/(N)∑_(i)(1)/(|o_(i)|)∑_(t)min(r_(i,t)A_(i,t),clip(r_(i,t),1−0.2,1+0.2)A_(i,t))",
        "A_(i,t)=R_(i)−0.01∑_(u≥t)D_(i,u)",
        f"r_(i,t)={QUOTIENT}",
        "D_(i,t)=−l,l=log(π_(ref))/(π_(old))",
    ],
    "ppo": [
        "J=(1)/(∑_(i)|o_(i)|)∑_(i)∑_(t)min(r_(i,t)A_(i,t),clip(r_(i,t),1−0.2,1+0.2)A_(i,t))",
        "A_(i,t)=∑_(u≥t)(1·0.95)^(u−t)δ_(i,u)",
        "δ_(i,t)=ρ_(i,t)+1·V_(i,t+1)−V_(i,t)",
        "ρ_(i,t)=[t=|o_(i)|]R_(i)−0.02D_(i,t)",
        f"r_(i,t)={QUOTIENT}",
        "D_(i,t)=−l,l=log(π_(ref))/(π_(old))",
        "L_(V)=(1)/(∑_(i)|o_(i)|)∑_(i)∑_(t)(1)/(2)max((V_(i,t)−V^_(i,t))^(2),"
        "(V_(i,t)^(old)+clip(V_(i,t)−V_(i,t)^(old),−0.2,0.2)−V^_(i,t))^(2))",
        "V^_(i,t)=V_(i,t)^(old)+A_(i,t)",
    ],
    "opd": [
        "J=(1)/(∑_(i)|o_(i)|)∑_(i)∑_(t)min(r_(i,t)A_(i,t),clip(r_(i,t),1−0.2,1+0.2)A_(i,t))",
        "A_(i,t)=log(π_(teacher)(o_(i,t)))/(π_(old)(o_(i,t)))",
        f"r_(i,t)={QUOTIENT}",
    ],
    "luspo": [
        "J=(1)/(N)∑_(i)∑_(t)min(r_(i,t)A_(i),clip(r_(i,t),1−0.002,1+0.0025)A_(i))",
        "A_(i)=(R_(i)−meanofitsgroup)/(deviationinitsgroup+0.0001)",
        f"r_(i,t)=exp((1)/(|o_(i)|)∑_(t)log{QUOTIENT})",
    ],
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_is_the_row_s(config: Config, name: str) -> None:
    assert equations(config, name=name) == EQUATIONS[name]


def of_stage(config: Config, stage: str, **sections: dict[str, object]) -> list[str]:
    tree = config.model_dump(mode="json")
    tree["data"].pop("form")
    for name, values in sections.items():
        tree[name] |= values
    html = equation(Config.model_validate(tree | {"stage": stage}))
    found = ElementTree.fromstring(f"<div>{html}</div>")
    return [linear(each) for each in found.iter("{http://www.w3.org/1998/Math/MathML}math")]


H = "h=log(π_(θ)(c))/(π_(ref)(c))−log(π_(θ)(r))/(π_(ref)(r))"
NLL = "−(1)/(∑_(i)|c_(i)|)∑_(i)logπ_(θ)(c_(i))"
PREFERENCES = {
    "irpo": [f"L=(1)/(N)∑_(i)−logσ(0.1h_(i)){NLL}", H],
    "dpo": ["L=(1)/(N)∑_(i)−logσ(0.1h_(i))", H],
    "cdpo": ["L=(1)/(N)∑_(i)(−0.9logσ(0.1h_(i))−0.1logσ(−0.1h_(i)))", H],
    "rdpo": ["L=(1)/(N)∑_(i)(−0.9logσ(0.1h_(i))+0.1logσ(−0.1h_(i)))/(0.8)", H],
    "ipo": ["L=(1)/(N)∑_(i)(h_(i)−(1)/(2·0.1))^(2)", H],
    "kto": [
        "L=(1)/(N)(∑_(good)1(1−σ(0.1(l_(i)−z)))+∑_(bad)1(1−σ(0.1(z−l_(i)))))",
        "l_(i)=log(π_(θ)(y_(i)))/(π_(ref)(y_(i)))",
        "z=max(0,meanoflovermismatchedpromptsandanswers)",
    ],
    "orpo": [
        f"L=(1)/(N)∑_(i)−0.1logσ(h_(i)){NLL}",
        "h=log(p_(c))/(1−p_(c))−log(p_(r))/(1−p_(r)),p_(y)=exp((1)/(|y|)logπ_(θ)(y))",
    ],
    "simpo": [
        "L=(1)/(N)∑_(i)−logσ(2h_(i)−1)",
        "h=(1)/(|c|)logπ_(θ)(c)−(1)/(|r|)logπ_(θ)(r)",
    ],
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_preference_loss_is_the_row_s(config: Config, name: str) -> None:
    assert of_stage(config, "preference", preference={"name": name}) == PREFERENCES[name]


def test_the_other_stages_show_what_they_minimise(config: Config) -> None:
    tokens = "L=(1)/(∑_(i)|o_(i)|)∑_(i)∑_(t)−logπ_(θ)(o_(i,t))"
    assert of_stage(config, "sft") == of_stage(config, "pretrain") == [tokens]
    by_row = of_stage(config, "sft", sft={"aggregation": "sequence_mean"})
    assert by_row == ["L=(1)/(N)∑_(i)(1)/(|o_(i)|)∑_(t)−logπ_(θ)(o_(i,t))"]
    assert of_stage(config, "reward") == [
        "L=(1)/(N)∑_(i)−logσ(R(c_(i))−R(r_(i))−m_(i))+0.01(R(c_(i))+R(r_(i)))^(2)"
    ]
    assert of_stage(config, "sample", algorithm={"name": "grpo"}) == []
    bare = {"margin": False, "centering": 0.0}
    assert of_stage(config, "reward", reward=bare) == ["L=(1)/(N)∑_(i)−logσ(R(c_(i))−R(r_(i)))"]


def test_small_numbers_are_powers_of_ten(config: Config) -> None:
    shown = equations(config, name="grpo", kl_coefficient=2e-5, entropy_coefficient=1.5e-7)
    assert shown[0].endswith("−2·10^(−5)D_(i,t)+1.5·10^(−7)H_(i,t))")


def test_the_sampler_s_weight_is_of_the_surrogate_and_not_of_the_kl(config: Config) -> None:
    for name, expected in (("grpo", "w_(i,t)min"), ("vespo", "(sg(φ_(i))")):
        row = {"name": name, "correction": "token_truncate", "kl": "k3", "kl_coefficient": 0.1}
        objective = equations(config, **row)[0].partition("D")[0]
        assert objective.count("w") == (name == "grpo")
        assert expected in objective


def call(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "report.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_command_writes_the_report_and_names_alarms(tmp_path: Path) -> None:
    records = [record(s, **{"score/errors": float(s == 3)}) for s in range(6)]
    folder = write_run(tmp_path / "run", records, [[group(["1", "2"], [0.0, 1.0])]])
    done = call(str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"report in {folder / 'report.html'}" in done.stdout
    assert "alarm: Scoring errors" in done.stdout
    out = tmp_path / "elsewhere.html"
    assert call(str(folder), "--out", str(out)).returncode == 0
    assert b"<!doctype html>" in out.read_bytes()[:20]


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
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
        (("runs/broken",), "metrics.jsonl:1: no record with a step"),
        (("runs/newer",), "unknown key 'nonsense'"),
        (("runs/quickstart", "--nothing"), "unrecognized arguments: --nothing"),
        (("runs/quickstart", "--out", "runs/quickstart/metrics.jsonl/x.html"), "cannot be written"),
        (("runs/quickstart", "--serve", "--out", "x.html"), "--serve writes no file"),
        (("runs/quickstart", "--port", "8000"), "--port 8000 is for --serve"),
        (("runs/quickstart/metrics.jsonl",), "there is no run runs/quickstart/metrics.jsonl"),
        (("runs/quickstart", "--serve", "--port", "99999"), "--port 99999 cannot be listened on"),
    ):
        done = call(*arguments, cwd=tmp_path)
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: ")
        assert told in done.stderr
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
        {"starts": [START | {"data": []}]}, {"starts": [START | {"plan": [1]}]},
        {"starts": [START | {"data": {"training": [], "held_out": [{"prompts": "x"}]}}]},
        {"starts": [START | {"packages": ["x"]}]}, {"starts": [START | {"step": "x"}]},
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


@pytest.mark.timeout(30)
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
