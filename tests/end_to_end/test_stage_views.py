"""What a person sees of each stage: real short runs with their lines, curves and report in a
browser, and what evaluate, chat and export make of them."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from chromium import PROGRAM, Chromium
from conftest import ROOT, TINY
from marks import most_are_long
from reason_llm.app import training
from reason_llm.app.chat import ChatOptions, ChatSession, find_subject
from reason_llm.app.console import Console, restored_output
from reason_llm.app.data_check import check_data
from reason_llm.app.export.export import ExportRequest, export
from reason_llm.app.report.page import write_report
from reason_llm.config import Config, Value, read_command_line
from reason_llm.errors import ConfigError, ReasonError
from reason_llm.evaluate import make_request, run_evaluation

EVAL = str(ROOT / "data" / "arithmetic_test.jsonl")


def work(a: int, b: int) -> str:
    """The tiny model's own way to add."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    shown = f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}+{ones // 10}={tens + ones // 10}"
    return f"<think>{shown}</think><answer>{a + b}</answer>"


def write_rows(folder: Path) -> dict[str, Path]:
    """Rows of every form, by the form."""
    pairs = [(a, b) for a in range(11, 30, 3) for b in range(13, 60, 11)]
    asked = [(f"What is {a} + {b}?", work(a, b), f"{a + b}") for a, b in pairs]
    forms: dict[str, list[dict[str, Any]]] = {
        "demonstrations": [{"prompt": q, "completion": right} for q, right, _ in asked],
        "texts": [{"text": f"{q} {right}"} for q, right, _ in asked],
        "preferences": [{"prompt": q, "chosen": r, "rejected": bad} for q, r, bad in asked],
        "labels": [
            {"prompt": q, "completion": [r, bad][i % 2], "label": i % 2 == 0}
            for i, (q, r, bad) in enumerate(asked)
        ],
    }
    found = {}
    for name, rows in forms.items():
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    """What to change for each kind of run, by its name."""
    rows = {name: str(path) for name, path in write_rows(folder).items()}

    def offline(stage: str, form: str, **more: Any) -> dict[str, Any]:
        judged = {} if stage == "reward" else {"eval": EVAL}
        return {
            "stage": stage,
            "data": {"train": rows[form], "system_prompt": "none", **judged},
            "train": {"rows_per_step": 8, "learning_rate": 1e-3, "gradient_checkpointing": False},
            "eval": {"every": 1, "limit": 8, "rows": rows[form]},
            **more,
        }

    def online(name: str, **more: Any) -> dict[str, Any]:
        return {
            "data": {
                "train": str(ROOT / "data" / "arithmetic_train.jsonl"), "system_prompt": "none",
                "eval": EVAL,
            },
            "sample": {"prompts_per_step": 4, "completions_per_prompt": 2, "max_new_tokens": 32},
            "algorithm": {"name": name},
            "train": {"learning_rate": 1e-3, "gradient_checkpointing": False},
            "eval": {"every": 0, "limit": 8},
            **more,
        }  # fmt: skip

    return {
        "sft": offline("sft", "demonstrations"),
        "pretrain": offline("pretrain", "texts"),
        "reward": offline("reward", "preferences"),
        "irpo": offline("preference", "preferences", preference={"name": "irpo"}),
        "orpo": offline("preference", "preferences", preference={"name": "orpo"}),
        "kto": offline("preference", "labels", preference={"name": "kto"}),
        "ppo": online("ppo", critic={"warmup_steps": 1}),
        "opd": online("opd", teacher={"prompt": "{prompt} It is {answer}."}),
    }


NAMES = ("sft", "pretrain", "reward", "irpo", "orpo", "kto", "ppo", "opd")
SHORT = most_are_long(NAMES, ["sft", "reward"])


class Made(dict[str, tuple[Path, str, Config]]):
    """A run of each kind, made when it is asked for: its folder, what was shown, its config."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._changes = folder, configs(folder)

    def __missing__(self, name: str) -> tuple[Path, str, Config]:
        folder = self._folder
        tree = {
            "run": {
                "name": name, "directory": str(folder / "runs"), "steps": 3,
                "buffer": str(folder / f"{name}.json"),
            },
            "model": {"path": str(TINY), "adapter": {"rank": 8}},
            "sample": {"max_new_tokens": 32},
            **({} if name == "reward" else {"score": {"rewards": [{"name": "think_answer_tags"}]}}),
        }  # fmt: skip
        config = Config.model_validate(tree | self._changes[name])
        with restored_output(), contextlib.redirect_stdout(io.StringIO()) as shown:
            training.run_training(config, Console("plain"))
        self[name] = (folder / "runs" / name, shown.getvalue(), config)
        return self[name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("stages"))


NUMBER = r"-?[\d.]+(e-?\d+)?"
SHOWN = {
    "sft": [
        *("loss N", "held-out accuracy N% on N problems", "held-out loss N  perplexity N"),
        "epoch 0.69",
    ],
    "pretrain": ["loss N", "held-out loss N  perplexity N", "epoch 0.69"],
    "reward": ["loss N", "pairs N%", r"held-out pairs N% \(N% to N%\)", "margin N"],
    "irpo": ["pairs N%", "margin N", "log-ratio chosen [+-]N  rejected [+-]N"],
    "orpo": ["pairs N%", r"held-out pairs N% \(N% to N%\)", "margin N"],
    "kto": ["loss N", "log-ratio chosen [+-]N  rejected [+-]N"],
    "ppo": ["reward N", "explained variance N", "KL of a completion N"],
    "opd": ["reward N", "KL to the teacher N"],
}


@pytest.mark.parametrize("name", SHORT)
def test_the_lines_say_how_the_stage_gets_on(made: Made, name: str) -> None:
    _, shown, _ = made[name]
    (last,) = re.findall(r"^step 3/3  .*$", shown, re.MULTILINE)
    for wanted in SHOWN[name]:
        assert re.search(wanted.replace("N", NUMBER), last), (wanted, last)
    assert "nan" not in last
    assert ("the critic alone learns" in shown) == (name == "ppo")
    assert "the critic alone learns" not in last
    summary = shown[shown.index("step 3/3") :]
    assert ("held-out loss" in summary.partition("\n")[2]) == (name not in ("ppo", "opd"))
    assert ("sampling 0" not in summary) or name not in ("reward",)
    assert "no report was written" not in shown
    # Of these pairs the chosen side is always the longer one.
    assert ("alarms: The reward model goes by length" in shown) == (name == "reward")
    assert ("no alarms" in shown) == (name != "reward")


def test_the_summary_holds_what_was_judged(made: Made) -> None:
    summary = orjson.loads((made["reward"][0] / "summary.json").read_bytes())
    assert summary["held_out_loss"][0] == pytest.approx(0.6931, abs=1e-4)  # log 2: a head of zeros
    assert summary["held_out_pair_accuracy"][0] == 0.5
    assert summary["held_out_pairs"] == [35, 35]
    assert summary["accuracy_before"] is None
    records = (made["sft"][0] / "metrics.jsonl").read_bytes().splitlines()
    last = orjson.loads(records[-1])
    assert last["eval/perplexity"] == pytest.approx(2.718281828 ** last["eval/nll"])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if PROGRAM is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


EMPTY = (
    "[...document.querySelectorAll('figure.chart')]"
    ".filter(f => !f.querySelector('path, circle, .bar, rect:not(.warmup):not(.band)'))"
    ".map(f => f.id)"
)
DRAWN = {
    "sft": ["eval/loss", "eval/perplexity", "train/loss", "eval/accuracy", "data/epoch"],
    "pretrain": ["eval/loss", "eval/perplexity", "train/loss", "data/epoch"],
    "reward": ["eval/pair_accuracy", "train/margin", "train/chosen_reward", "eval/loss"],
    "irpo": ["eval/pair_accuracy", "train/margin", "train/chosen_log_ratio", "eval/accuracy"],
    "orpo": ["eval/pair_accuracy", "train/margin", "train/chosen_logprob"],
    "kto": ["train/chosen_log_ratio", "train/rejected_log_ratio", "train/kl_baseline"],
    "ppo": ["critic/explained_variance", "critic/loss", "critic/clip_fraction",
            "train/kl_per_completion", "score/reward"],
    "opd": ["train/teacher_kl", "score/reward", "eval/accuracy"],
}  # fmt: skip


def opened(browser: Chromium, report: Path, view: str = "overview") -> str:
    browser.call("Page.navigate", url="about:blank")
    browser.wait("location.href === 'about:blank'")
    browser.complaints.clear()
    browser.open(f"{report.resolve().as_uri()}#view={view}")
    browser.wait(f"document.getElementById('main').dataset.view === '{view}'")
    browser.wait("[...document.querySelectorAll('figure.chart svg')].every(s => s.children.length)")
    text: str = browser.run("document.getElementById('main').innerText")
    return text


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_the_report_draws_every_chart(made: Made, browser: Chromium, name: str) -> None:
    report = made[name][0] / "report.html"
    text = opened(browser, report)
    for key in DRAWN[name]:
        assert browser.run(f"Boolean(document.getElementById('chart-{key}'))"), key
    assert browser.run(EMPTY) == []
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.wait("[...document.querySelectorAll('figure.chart svg')].every(s => s.children.length)")
    assert browser.run(EMPTY) == []
    assert ("No alarms" in text) == (name != "reward")
    assert (browser.run("document.querySelectorAll('rect.warmup').length") > 0) == (name == "ppo")
    assert browser.run("document.querySelector('#tabs a[href*=rollouts]').hidden") == (
        name not in ("ppo", "opd")
    )
    assert "null" not in text
    text += opened(browser, report, "setup") + opened(browser, report, "rollouts")
    for word in ("undefined", "NaN", "Infinity"):
        assert not re.search(rf"\b{word}\b", text), word
    opened(browser, report, "setup")
    assert "section Equations" in browser.run("document.body.innerText")
    assert browser.complaints == []


@pytest.mark.long
def test_runs_of_several_stages_stand_beside_one_another(
    made: Made, browser: Chromium, tmp_path: Path
) -> None:
    write_report([made[name][0] for name in ("reward", "sft", "ppo")], tmp_path / "all.html")
    text = opened(browser, tmp_path / "all.html")
    heads = browser.run("[...document.querySelectorAll('table.compare th')].map(e => e.innerText)")
    assert {"Held-out accuracy", "Held-out pairs", "Held-out loss", "Mean reward"} <= {*heads}
    assert browser.run(EMPTY) == []
    assert "undefined" not in text
    # The rollouts are those of the one run that has some.
    text = opened(browser, tmp_path / "all.html", "rollouts")
    assert "8 groups" in text or "12 groups" in text
    assert browser.complaints == []


def line_of(*arguments: str) -> Any:
    """A command line of evaluate."""
    values = {name: Value("X", "") for name in ("k", "model", "out", "compare")}
    values["sets"] = Value("X", "", "+")
    return read_command_line("evaluate", "", ("X", ""), [*arguments], {}, values)


@pytest.mark.parametrize("name", most_are_long(["sft", "ppo"], ["sft"]))
def test_evaluate_chat_and_export_take_the_policy(made: Made, tmp_path: Path, name: str) -> None:
    run = made[name][0]
    chat = ChatSession(find_subject(str(run), None), ChatOptions(temperature=0, max_new_tokens=32))
    assert chat.adapter is not None
    assert "".join(chat.answer("What is 12 + 13?"))
    with restored_output(), contextlib.redirect_stdout(io.StringIO()) as shown:
        console = Console("plain")
        request = make_request(line_of(str(run), f"--out={tmp_path / 'scores'}", "--eval.limit=4"))
        found = run_evaluation(request, console)
        out = tmp_path / "merged"
        parity = export(ExportRequest(run, out, None, False, "float32", None, None), console)
    assert found["results"]["adapter"]["held_out"]["problems"] == 4
    assert parity is not None
    assert f"exported {run}" in shown.getvalue()
    card = (out / "README.md").read_text()
    assert f": {name}: " in card
    assert ("completions each" in card) == (name in ("ppo", "opd"))
    assert ("- held-out loss " in card) == (name not in ("ppo", "opd"))


def test_a_reward_model_is_one_line_where_completions_are_needed(made: Made) -> None:
    run = made["reward"][0]
    with pytest.raises(ConfigError, match=r"reward is a reward model .* so chat does not take"):
        find_subject(str(run), None)
    with pytest.raises(ConfigError, match=r"so evaluate does not take it"):
        make_request(line_of(str(run), "--sets=held_out"))
    with pytest.raises(ConfigError, match=r"so evaluate does not take it"):
        make_request(line_of(str(made["sft"][0]), f"--compare={run}"))


@pytest.mark.parametrize("name", SHORT)
def test_the_data_check_shows_what_is_learned(made: Made, name: str) -> None:
    config = made[name][2]
    mistakes: list[ReasonError] = []
    report = check_data(config, mistakes)
    assert not mistakes
    text = "\n".join(report.lines)
    assert report.num_errors == 0
    if config.samples:
        assert "gold answer: " in text
    else:
        assert "35 taken" in text
        assert "held out " in text
        assert "--- learned, " in text
    if name == "opd":
        assert "the teacher is asked:" in text
        assert re.search(r"What is \d+ \+ \d+\? It is \d+\.", text)
