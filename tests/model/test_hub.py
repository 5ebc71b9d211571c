"""With ``HF_HUB_OFFLINE`` a Hub id is one line at once, what is in the cache is used, and every
shipped config is planned."""

import socket
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from conftest import ROOT, TINY
from reason_llm.config import Config
from reason_llm.data.rows import read_rows
from reason_llm.errors import DataError, ModelError, ReasonError
from reason_llm.model import base
from reason_llm.model.plan import plan_only
from reason_llm.model.plan.shipped import SHAPES, known

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache and no network; the names that were looked up."""
    names: list[str] = []

    def look_up(host: str, *rest: Any, **options: Any) -> Any:
        names.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return names


def test_a_hub_id_that_is_not_in_the_cache_is_one_line_at_once(asked: list[str]) -> None:
    for call, error in (
        (lambda: base.load_tokenizer("org/name"), ModelError),
        (lambda: base.read_config("org/name"), ModelError),
        (lambda: list(read_rows("org/rows:main", "train")), DataError),
    ):
        with pytest.raises(error, match="HF_HUB_OFFLINE is set") as why:
            call()
        assert "\n" not in str(why.value)
    assert asked == []


def test_a_hub_that_is_not_reached_is_asked_once(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for call in (base.load_tokenizer, base.read_config):
        with pytest.raises(ModelError, match=r"the Hub cannot be asked for it \(no network\)"):
            call("org/other")
        assert 0 < len(asked) <= 2
        asked.clear()


def test_a_data_set_that_is_not_reached_is_asked_for_once(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    told = r"gsm8kk:main is not a folder here, and the Hub cannot be .* \(did you mean openai/gsm8k"
    with pytest.raises(DataError, match=told):
        list(read_rows("openai/gsm8kk:main", "train"))
    assert 0 < len(asked) <= 2


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("Qwen/Qwen3-4B-Instuct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("Qwen3-8b", "Qwen/Qwen3-8B"),
        ("org/naame", "org/name"),  # in the cache
        (str(TINY.with_name("tinny")), str(TINY)),
    ],
)
def test_a_wrong_name_of_a_model_is_told_the_right_one(
    wrong: str, meant: str, tmp_path: Path
) -> None:
    (tmp_path / "hub" / "models--org--name").mkdir(parents=True)
    with pytest.raises(ModelError, match=f"{wrong} .* \\(did you mean {meant}\\?"):
        base.read_config(wrong)


def test_what_is_in_the_cache_is_read_without_a_network(asked: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "abc").symlink_to(TINY)
    assert base.load_tokenizer("org/name").eos_token_id is not None
    assert base.read_config("org/name").vocab_size > 0
    assert asked == []


def test_shipped_models_are_planned_from_their_numbers() -> None:
    tree = {"model": {"path": "Qwen/Qwen2.5-1.5B-Instruct"}, "data": {"train": "x"},
            "algorithm": {"name": "opd"}, "teacher": {"model": "Qwen/Qwen3-8B"},
            "memory": {"budget_gib": 80}}  # fmt: skip
    plan = plan_only(Config.model_validate(tree))
    sizes = {line.name: max(line.learning, line.scoring) / 2 for line in plan.lines}
    assert sizes["base weights (bfloat16)"] == pytest.approx(1.54e9, rel=0.01)
    assert sizes["teacher"] == pytest.approx(8.19e9, rel=0.01)


@pytest.mark.long
def test_a_plan_that_does_not_fit_names_the_model() -> None:
    tree = {"model": {"path": "Qwen/Qwen2.5-32B-Instruct"}, "data": {"train": "x"},
            "memory": {"budget_gib": 8}}  # fmt: skip
    with pytest.raises(ReasonError, match=r"too little for Qwen/Qwen2\.5-32B-Instruct: learning"):
        plan_only(Config.model_validate(tree))
    tree["model"] = {"path": "org/unknown"}
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        plan_only(Config.model_validate(tree))


def test_the_shipped_shapes_are_those_of_the_shipped_configs() -> None:
    named = {
        line.split()[1]
        for path in CONFIGS
        for line in path.read_text().splitlines()
        if line.strip().startswith("path:") and "/" in line and len(line.split()) > 1
    }
    on_the_hub = ("Qwen/", "google/", "meta-llama/")
    assert {name for name in named if name.startswith(on_the_hub)} <= set(SHAPES)
    assert known("QWEN3.5-4b") == known("org/qwen3.5-4B") == "Qwen/Qwen3.5-4B"
    assert known("model/gpt-oss-20b") == "model/gpt-oss-20b"
    assert known("Qwen/Qwen3.5") is None
    assert known("openai/gpt-oss-20b") is None  # in MXFP4; the shape is that of a copy
