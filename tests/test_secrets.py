"""No value of the environment's tokens, keys and passwords in the report, trackers, cards or
the data check, though completions, prompts and the config hold it."""

import base64
import gzip
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from reason_llm.app.export import model_card
from reason_llm.app.report.page import page
from reason_llm.app.report.payload import blobs, examine, shown_config, to_value
from reason_llm.app.report.runs import read_run
from reason_llm.config.file import load
from reason_llm.errors import tree_without_secrets
from report_runs import group, record, write_run

SECRET = "hf_0123456789abcdefghij"


@pytest.fixture(autouse=True)
def in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)


@pytest.fixture
def run_with_secrets(tmp_path: Path) -> Path:
    """A run whose completions, prompts and system prompt hold one."""
    folder = tmp_path / "run"
    groups = [group([f"it is {SECRET}", "it is not"], [1.0, 0.0], f"What is {SECRET} + 2?")]
    write_run(folder, [record(0), record(1)], [groups])
    file = folder / "resolved_config.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["data"]["system_prompt"] = "Some words. " * 20 + f"'{SECRET}' is a \u001b secret.\nLine."
    file.write_text(yaml.safe_dump(tree))
    return folder


def unpacked(html: str) -> str:
    """The page with all that it packs."""
    packed = re.findall(r'id="rollouts-\d+-\d+">([A-Za-z0-9+/=]+)<', html)
    assert packed
    return html + "".join(
        gzip.decompress(base64.b64decode(each)).decode(errors="replace") for each in packed
    )


def test_the_report_holds_none(run_with_secrets: Path) -> None:
    examined = [examine(read_run(run_with_secrets, f"a {SECRET}"))]
    shown = unpacked(page(examined).decode())
    assert SECRET not in shown
    assert "<HF_TOKEN>" in shown  # in the packed rollouts
    assert "\\u003cHF_TOKEN\\u003e" in shown  # in the config and the previews
    live = orjson.dumps(to_value(examined)) + b"".join(
        map(gzip.decompress, blobs(examined).values())
    )
    assert SECRET.encode() not in live


def test_the_card_and_the_exported_config_hold_none(run_with_secrets: Path) -> None:
    config = load(run_with_secrets / "resolved_config.yaml")
    card = model_card.ModelCard(
        name="a",
        place=f"{SECRET}/a",
        base="b/c",
        merged="float32",
        parity=None,
        config=config,
        run=run_with_secrets,
        adapter=run_with_secrets / "adapter",
    )
    text = model_card.render(card)
    exported = shown_config(run_with_secrets / "resolved_config.yaml")
    for shown in (text, exported):
        assert SECRET not in shown
        assert "<HF_TOKEN>" in shown
    assert yaml.safe_load(exported)["data"]["train"] == config.data.train


def test_trees() -> None:
    tree: dict[str, Any] = {f"a {SECRET}": [SECRET, {"b": (1, f"-{SECRET}-")}], "c": None}
    assert tree_without_secrets(tree) == {
        "a <HF_TOKEN>": ["<HF_TOKEN>", {"b": [1, "-<HF_TOKEN>-"]}], "c": None,
    }  # fmt: skip
