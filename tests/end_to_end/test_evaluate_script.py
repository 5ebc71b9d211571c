"""scripts/evaluate.py: any model on any set, by either engine; killed, it goes on to the same file;
what it cannot do is one line and changes nothing."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import yaml

from conftest import ROOT, TINY, tree_of
from marks import most_are_long
from reason_llm.config import EVALUATION_SETS, AdapterSection
from reason_llm.model import adapters
from reason_llm.model.base import Model

EVALUATE = ROOT / "scripts" / "evaluate.py"
DIE_AT = Path(__file__).parents[1] / "fixtures" / "die_at.py"
TEST_SET = ROOT / "data" / "arithmetic_test.jsonl"

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, shared_model: Model) -> Path:
    """What a run leaves: its config and its adapter, here one that was made up."""
    run = tmp_path_factory.mktemp("runs") / "made"
    tree = {
        "run": {"name": "made", "directory": str(run.parent), "resume": "never"},
        "model": {"path": str(TINY), "dtype": "float32", "adapter": {"rank": 8, "alpha": 16}},
        "data": {"train": str(ROOT / "data" / "arithmetic_train.jsonl"), "eval": str(TEST_SET),
                 "system_prompt": "none"},
        "sample": {"engine": "transformers", "max_new_tokens": 32},
        "score": {"rewards": [{"name": "think_answer_tags"}, {"name": "tag_count"}]},
        "eval": {"limit": 10},
        "log": {"console": "plain"},
    }  # fmt: skip
    run.mkdir()
    (run / "resolved_config.yaml").write_text(yaml.safe_dump(tree))
    randomize(shared_model)
    adapters.snapshot(shared_model.policy).write(run / "adapter")
    return run


def randomize(model: Model) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.policy.named_parameters():
        if parameter.requires_grad:
            scale = 0.05 if ".lora_A." in name else 0.02
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def call(script: Call) -> Call:
    return partial(script, "evaluate.py")


def rows(folder: Path, name: str = "problems.jsonl") -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (folder / name).read_bytes().splitlines()]


def test_adapter_against_base(call: Call, run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, shown, error = call(run_folder, "--compare", "base", "--k", "2", "--out", out)
    assert (code, error) == (0, "")
    found = rows(out)
    assert [row["model"] for row in found] == ["adapter"] * 10 + ["base"] * 10
    assert [row["id"] for row in found[:10]] == [f"{TEST_SET}:{n}" for n in range(1, 11)]
    assert found[0]["gold"] == str(orjson.loads(TEST_SET.read_bytes().splitlines()[0])["answer"])
    assert all(len(row["samples"]) == 2 for row in found)
    assert [r["greedy"]["text"] for r in found[:10]] != [r["greedy"]["text"] for r in found[10:]]
    summary = orjson.loads((out / "summary.json").read_bytes())
    for model, part in (("adapter", found[:10]), ("base", found[10:])):
        greedy = summary["results"][model]["held_out"]["greedy"]
        assert greedy["value"] == sum(row["greedy"]["reward"] for row in part) / 10
        assert greedy["low"] < greedy["value"] < greedy["high"] or greedy["value"] in (0, 1)
    assert set(summary["comparisons"]["held_out"]) == {"greedy", "mean@2", "pass@2", "maj@2"}
    assert "held_out greedy: adapter - base =" in shown
    assert "sampling with transformers" in shown
    assert "learning" not in shown
    # The base by itself, from a config, is the base beside an adapter.
    code, _, _ = call(run_folder / "resolved_config.yaml", "--k", "2", "--out", tmp_path / "base")
    assert code == 0
    assert rows(tmp_path / "base") == found[10:]
    # A finished evaluation is shown again from what is there.
    before = (out / "problems.jsonl").stat().st_mtime_ns
    code, again, _ = call(run_folder, "--compare", "base", "--k", "2", "--out", out)
    assert code == 0
    assert "20 problems are done already" in again
    assert again.splitlines()[-12:] == shown.splitlines()[-12:]
    assert (out / "problems.jsonl").stat().st_mtime_ns == before


def test_the_base_is_what_transformers_generates(
    call: Call, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    code, _, error = call(
        *(TINY, "--sets", f"sums={TEST_SET}", "--eval.limit", "3", "--eval.max_new_tokens", "4"),
        *("--data.system_prompt", "none", "--score.rewards", "[{name: think_answer_tags}]"),
        *("--out", out, "--log.console", "quiet"),
    )
    assert (code, error) == (0, "")
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for row in rows(out):
        ids = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False).input_ids
        whole = base.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        assert row["set"] == "sums"
        assert row["greedy"]["text"] == tokenizer.decode(whole, skip_special_tokens=True)


DECODING = "reason_llm.sample.transformers_sampler:_DecodingBatch.extend"


@pytest.mark.parametrize(
    ("place", "count"),
    [
        pytest.param(DECODING, 60, marks=pytest.mark.long),
        pytest.param("reason_llm.score:Scorer.score", 3, marks=pytest.mark.faults),
        pytest.param("reason_llm.evaluate.evaluation:answer_of", 60, marks=pytest.mark.faults),
    ],
    ids=["sampling", "judging", "writing"],
)
def test_killed_it_goes_on_to_the_same_file(
    call: Call, run_folder: Path, tmp_path: Path, place: str, count: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = [run_folder, "--compare", "base", "--k", "3", "--out"]
    assert call(*arguments, whole)[0] == 0
    command = [sys.executable, DIE_AT, place, str(count), EVALUATE, *arguments, killed]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == -9, ended.stderr
    part = (killed / "problems.jsonl").read_bytes()
    expected = (whole / "problems.jsonl").read_bytes()
    assert 0 < len(part) < len(expected)
    (killed / "problems.jsonl").write_bytes(part + expected[len(part) :][:100])  # a torn write
    code, shown, _ = call(*arguments, killed)
    assert code == 0
    assert "problems are done already" in shown
    for name in ("problems.jsonl", "summary.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # vLLM warns of deprecations in what it imports
def test_either_engine_gives_the_same_numbers(call: Call, run_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    outs = {engine: tmp_path / engine for engine in ("transformers", "vllm")}
    for engine, out in outs.items():
        code, _, error = call(
            *(run_folder, "--compare", "base", "--sample.engine", engine, "--out", out),
            *("--eval.limit", "24", "--memory.budget_gib", "4"),
        )
        assert code == 0, error
    ours, theirs = (rows(out) for out in outs.values())
    assert len(ours) == 48
    assert ours == theirs
    summaries = [orjson.loads((out / "summary.json").read_bytes()) for out in outs.values()]
    assert summaries[0] == summaries[1]


@pytest.mark.long
def test_two_adapters_of_different_shape(call: Call, run_folder: Path, tmp_path: Path) -> None:
    from reason_llm.config import ModelSection
    from reason_llm.model.base import load_tokenizer

    small = AdapterSection(rank=2, alpha=2, targets=["q_proj", "v_proj"])
    section = ModelSection(path=str(TINY), dtype="float32", adapter=small)
    with Model(section, load_tokenizer(str(TINY)), seed=5) as model:
        adapters.snapshot(model.policy).write(tmp_path / "fresh")  # changes nothing yet
    out = tmp_path / "out"
    code, _, error = call(
        run_folder, "--model", "base", "--compare", tmp_path / "fresh", "--out", out
    )
    assert (code, error) == (0, "")
    found = rows(out)
    assert [row["greedy"] for row in found[:10]] == [row["greedy"] for row in found[10:]]
    comparison = orjson.loads((out / "summary.json").read_bytes())["comparisons"]["held_out"]
    assert comparison["greedy"]["p_value"] == 1


CASES: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "nothing": (lambda run: [], ["nothing to evaluate", "runs/quickstart"]),
    "no such set": (lambda run: [str(run), "--sets", "gsm9k"], ["is not one of gsm8k", "held_out"]),
    "no such file": (lambda run: [str(run), "--sets", "no.jsonl"], ["no.jsonl does not exist"]),
    "a set twice": (
        lambda run: [str(run), "--sets", "held_out", f"held_out={TEST_SET}"],
        ["--sets names held_out twice"],
    ),
    "a name that is no name": (lambda run: [str(run), "--sets", f"a b={TEST_SET}"], ["'a b'"]),
    "tasks without what plays them": (
        lambda run: [str(run), "--sets", "verifiers:sums?size=2"],
        ["{'verifiers_sums_size_2': 'verifiers:sums?size=2'}", "need sample.environment=verifiers"],
    ),
    "no number": (lambda run: [str(run), "--k", "many"], ["--k many"]),
    "no number that int() takes": (lambda run: [str(run), "--k", "9" * 5000], ["--k 999", "4096"]),
    "itself": (lambda run: [str(run), "--compare", "adapter"], ["--compare adapter is the model"]),
    "the base itself": (
        lambda run: [str(run), "--model", "base", "--compare", "base"],
        ["--compare base is the model itself; name another, such as a run's folder"],
    ),
    "no such run": (lambda run: [str(run.parent / "maid")], ["no run", "maid", "made?"]),
    "no folder": (lambda run: [str(TEST_SET)], ["arithmetic_test.jsonl is not a folder"]),
    "a folder of runs": (lambda run: [str(run.parent)], ["config.json is missing"]),
    "another option of this script": (lambda run: [str(run), "--comapre", "base"], ["--compare?"]),
    "no adapter": (
        lambda run: [str(run / "resolved_config.yaml"), "--model", "adapter"],
        ["there is no adapter"],
    ),
    "no sets": (lambda run: [str(TINY)], ["--sets", "gsm8k, math500, aime2024, aime2025"]),
    "no such model": (lambda run: [str(run), "--model", "model/none"], ["model/none", "not exist"]),
    "no such option": (lambda run: [str(run), "--eval.limt", "3"], ["--eval.limt", "eval.limit"]),
    "a value is missing": (lambda run: [str(run), "--k"], ["--k", "--help"]),
    "an adapter of another model": (
        lambda run: [str(run), "--model.path", str(run.parent / "other")],
        ["no adapter of"],
    ),
    "the sets' hub is out of reach": (
        lambda run: [str(run), "--sets", "aime2025"],
        [EVALUATION_SETS["aime2025"], "give a .jsonl"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_changes(
    name: str, call: Call, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, named = CASES[name]
    arguments = spoil(run_folder)
    if "other" in str(arguments):
        make_wider(run_folder.parent / "other")
    before = tree_of(run_folder)
    out = [] if name == "nothing" else ["--out", str(tmp_path / "out")]
    code, _, error = call(*arguments, *out)
    assert code == 2, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for part in named:
        assert part in error
    assert tree_of(run_folder) == before
    assert not (tmp_path / "out").exists()


def make_wider(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TINY)
    config.intermediate_size = 128
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())


@pytest.mark.long
def test_another_evaluation_is_not_overwritten(
    call: Call, run_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert call(run_folder, "--eval.limit", "2", "--out", out)[0] == 0
    changes = (["--k", "1"], ["--eval.limit", "3"], ["--model", "base"], ["--run.seed", "5"])
    for number, change in enumerate(changes, start=1):
        before = (out / "problems.jsonl").read_bytes()
        code, shown, _ = call(run_folder, "--eval.limit", "2", *change, "--out", out)
        assert code == 0
        assert f"out was renamed to {tmp_path / 'out'}.old-{number}" in shown
        assert (tmp_path / f"out.old-{number}" / "problems.jsonl").read_bytes() == before


def test_a_mended_reward_judges_all_problems(call: Call, run_folder: Path, tmp_path: Path) -> None:
    """Not those alone that the evaluation had not come to yet."""
    reward, out = tmp_path / "mine.py", tmp_path / "out"
    reward.write_text("def mine(completion):\n    return 0.0\n")
    rewards = f"[{{custom: '{reward}:mine'}}]"
    asked = [run_folder, "--score.rewards", rewards, "--eval.limit", "6", "--out", out]
    assert call(*asked)[0] == 0
    problems = out / "problems.jsonl"
    problems.write_bytes(b"".join(problems.read_bytes().splitlines(keepends=True)[:4]))
    (out / "summary.json").unlink()
    reward.write_text("def mine(completion):\n    return 1.0\n")
    code, _, error = call(*asked)
    assert code == 2
    assert "holds an evaluation with other options, data, weights or reward" in error
    assert call(*asked, "--run.resume", "never")[0] == 0
    assert [row["greedy"]["reward"] for row in rows(out)] == [1.0] * 6


def test_in_the_run_s_own_folder_a_finished_evaluation_gives_way(
    call: Call, run_folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(run_folder, tmp_path / "made")
    asked = [run, "--run.directory", tmp_path, "--eval.limit", "5"]
    assert call(*asked)[0] == 0
    code, shown, _ = call(*asked, "--k", "1")
    assert code == 0
    assert "was renamed to" in shown
    assert [len(row["samples"]) for row in rows(run / "evaluation")] == [1] * 5
    assert [len(row["samples"]) for row in rows(run / "evaluation.old-1")] == [0] * 5
    (run / "evaluation" / "summary.json").unlink()  # as if it had not come to its end
    code, _, error = call(*asked, "--k", "2")
    assert code == 2
    assert "holds an evaluation with other options" in error


@pytest.mark.parametrize("damage", most_are_long([b"{", None], [None]), ids=str)
def test_a_damaged_header_is_told_as_damaged(
    call: Call, run_folder: Path, tmp_path: Path, damage: bytes | None
) -> None:
    out = tmp_path / "out"
    asked = [run_folder, "--eval.limit", "1", "--out", out]
    assert call(*asked)[0] == 0
    header = out / "evaluation.json"
    header.unlink()
    (out / "summary.json").unlink()
    if damage is not None:
        header.write_bytes(damage)
    code, _, error = call(*asked)
    assert code == 2
    assert "or its evaluation.json is damaged; set another --out" in error
    assert error.count("\n") == 1
    assert (out / "problems.jsonl").exists()
    assert call(*asked, "--run.resume", "never")[0] == 0
