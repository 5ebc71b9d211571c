"""The page of a pipeline: its stages in order, what each reached, and the way to its report."""

import re
from pathlib import Path

import orjson
import pytest

from chromium import PROGRAM, Chromium
from conftest import TINY
from reason_llm.app.cli import main
from reason_llm.app.report.page import write_report
from reason_llm.app.report.stages import Stage, write
from reason_llm.errors import DataError
from report_runs import group, record, write_run

ODD = "<img src=x onerror=alert(1)>"


def written(folder: Path) -> Path:
    """A pipeline with a stage that has ended, a dead one and one that has not begun."""
    alive = [record(step, **{"eval/accuracy": 0.2 + step / 10}) for step in range(4)]
    dead = [record(step, score__boxed=0.0, score__reward=0.0) for step in range(4)]
    write_run(folder / "z first", alive, [[group(["1", "2"], [0.0, 1.0])]])
    (folder / "z first" / "summary.json").write_bytes(orjson.dumps({"steps": 3}))
    write_report([folder / "z first"], folder / "z first" / "report.html")
    write_run(folder / ODD, dead)
    stages = [Stage("z first", "sft", ()), Stage(ODD, "rl", ["z first"]), Stage("a", "rl", [ODD])]
    write(folder, stages)
    return folder


def test_stages_in_order_with_state_numbers_alarms_and_reports(tmp_path: Path) -> None:
    folder = written(tmp_path / "mine")
    out = folder / "report.html"
    assert write_report([folder], out) == ["z first: no alarms", f"{ODD}: alarms: No right answer"]
    text = out.read_text()
    data = orjson.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["pipeline"]["name"] == "mine"
    stages = data["pipeline"]["stages"]
    assert [(each["name"], each["begun"], each["report"]) for each in stages] == [
        ("z first", True, "z%20first/report.html"), (ODD, True, None), ("a", False, None),
    ]  # fmt: skip
    assert [run["finished"] for run in data["runs"]] == [True, False]
    assert data["runs"][0]["columns"]["eval/accuracy"] == [0.2, 0.3, 0.4, 0.5]
    assert 'id="rollouts-' not in text
    assert ODD not in text
    assert not re.search(f"{tmp_path}|{TINY.parent}", text)
    write_report([folder], tmp_path / "elsewhere.html")
    assert "first/report.html" not in (tmp_path / "elsewhere.html").read_text()


def test_what_is_no_page_of_a_pipeline_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "mine")
    for more in ([str(folder / "z first")], ["--serve"]):
        assert main(["report", str(folder), *more]) == 2
        assert f"error: {folder} is a pipeline" in capsys.readouterr().err
    for content in ("{}", '[{"name": "../other", "kind": "rl", "needs": []}]', "x"):
        (folder / "pipeline.json").write_text(content)
        with pytest.raises(DataError, match=r"pipeline\.json is damaged"):
            write_report([folder], folder / "report.html")


@pytest.mark.long
@pytest.mark.skipif(PROGRAM is None, reason="needs chromium (apt-get install chromium)")
def test_it_is_read_in_a_browser_and_leads_to_the_reports(tmp_path: Path) -> None:
    folder = written(tmp_path / "mine")
    write_report([folder], folder / "report.html")
    with Chromium(tmp_path / "browser") as page:
        for theme, width in (("light", 390), ("dark", 1280)):
            page.theme(theme)
            page.resize(width)
            page.open(folder / "report.html")
            assert page.run("document.documentElement.scrollWidth") <= width
        first, odd, last = page.run(
            "[...document.querySelectorAll('.stages li')].map(each => each.textContent)"
        )
        assert re.search(r"1\. z first.*finished after 3 steps.*20\.0% → 50\.0%.*No alarms", first)
        assert re.search(rf"2\. {re.escape(ODD)}reads z first.*at step 3 of 100, about", odd)
        assert "No right answer" in odd and "no report beside this page" in odd
        assert last == f"3. areads {ODD}rl · has not begun"
        assert page.run("document.querySelectorAll('main img, #tabs a:not([hidden])').length") == 0
        page.click(".stages .button")
        page.wait(
            "document.querySelector('h1') && document.querySelector('h1').textContent === 'z first'"
        )
        assert page.complaints == []
