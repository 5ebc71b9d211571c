"""Answers to held-out problems in the report, as text that cannot act."""

import base64
import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest

from reason_llm.app.report import texts
from reason_llm.app.report.page import write_report
from reason_llm.app.report.payload import examine, to_value
from reason_llm.app.report.runs import read_run
from report_runs import record, write_run

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">\x1b[2J\u202e"


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(b"".join(orjson.dumps(each) + b"\n" for each in rows)))


def answer(number: int, text: str, score: float | None, **more: Any) -> dict[str, Any]:
    asked = {"set": "held_out", "id": f"t.jsonl:{number}", "prompt": f"Say {number}!{HOSTILE}"}
    return asked | {"answer": "3", "completion": text, "score": score} | more


def with_texts(folder: Path) -> Path:
    """Two steps were learned; problem 3 was asked in the last evaluation alone."""
    write_run(folder, [record(step) for step in range(3)])
    place = folder / "evaluations"
    before = [answer(1, "no" + HOSTILE, 0.0), answer(2, "3", 1.0)]
    lines(place / "step-00000000.jsonl.gz", *before)
    after = [
        answer(1, "3", 1.0, finish_reason="environment"),
        answer(2, "4", None, finish_reason="length"),
    ]
    lines(place / "step-00000002.jsonl.gz", *after, answer(3, "3", 1.0))
    return folder


def shown(folder: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the page lists, and what it opens."""
    write_report([folder], folder / "report.html")
    text = (folder / "report.html").read_text()
    assert HOSTILE[:20] not in text
    data = orjson.loads(text.split('id="data">')[1].split("</script>")[0])
    blob = gzip.decompress(
        base64.b64decode(text.split(f'id="rollouts-0-{name}">')[1].split("</script>")[0])
    )
    size = int.from_bytes(blob[:4], "little")
    groups: list[dict[str, Any]] = orjson.loads(blob[4 : 4 + size])["groups"]
    return data["runs"][0]["texts"][name], groups


def test_answers_of_all_evaluations_to_one_problem_stand_together(tmp_path: Path) -> None:
    listed, opened = shown(with_texts(tmp_path / "run"), "held_out")
    assert listed["labels"] == ["before training", "after step 2"]
    assert listed["groups"]["prompt"] == ["t.jsonl:1", "t.jsonl:2"]
    assert listed["groups"]["first"] == [[0.0, 1.0], [1.0, 0.0]]
    assert listed["groups"]["truncated"] == [[0, 0], [0, 1]]
    assert [each["texts"] for each in opened] == [["no" + HOSTILE, "3"], ["3", "4"]]
    assert opened[0]["answer"] == "3"


def test_six_evaluations_are_shown_each_by_its_step(tmp_path: Path) -> None:
    for step in range(0, 100, 10):
        lines(tmp_path / "evaluations" / f"step-{step:08d}.jsonl.gz", answer(1, "3", step / 100))
    found = texts.read_texts(tmp_path, 1.0, [])
    assert found["held_out"].labels == [
        "before training",
        *(f"after step {step}" for step in (20, 40, 50, 70, 90)),
    ]


def test_a_damaged_file_is_named_and_the_bounds_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_texts(tmp_path / "run")
    (folder / "evaluations" / "step-00000003.jsonl.gz").write_bytes(b"no gzip")
    (folder / "evaluations" / "step-00000001.jsonl.gz").write_bytes(gzip.compress(b"[1]\n"))
    many = [answer(n, "3", 1.0) for n in range(100)]
    lines(folder / "evaluations" / "step-00000002.jsonl.gz", *many)
    monkeypatch.setattr(texts, "MAX_TEXTS", 10)
    lines(folder / "evaluations" / "step-00000000.jsonl.gz", *many)
    (run,) = to_value([examine(read_run(folder, "run"))])["runs"]
    assert run["texts"].keys() == {"held_out"}
    assert len(run["texts"]["held_out"]["groups"]["step"]) == 5
    for name in ("step-00000003.jsonl.gz", "step-00000001.jsonl.gz"):
        assert any(f"{name} was passed over" in each for each in run["notices"])
    monkeypatch.setattr(texts, "MAX_BYTES", 100)
    assert examine(read_run(folder, "run")).texts == {}
