"""A reward model is trained, pays a policy, goes home and comes back as a model of its own.

1. The rule of form is learned, and length alone raises the alarm.    2. What it pays is what PEFT
and Transformers say it gives, over the base and exported.    3. Killed anywhere, the same bits.
"""

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from conftest import ROOT, TINY, small_config
from reason_llm.app.console import Console
from reason_llm.app.export import ExportRequest, export
from reason_llm.app.report.payload import examine
from reason_llm.app.report.runs import read_run
from reason_llm.config import Config, file as config_file
from reason_llm.errors import ReasonError, RewardError
from reason_llm.files import MANIFEST, read_object
from reason_llm.loop import train
from reason_llm.readers.reward_models import RewardModelReader
from reason_llm.rollout import Completion, Group
from reason_llm.run.start.prepare import prepare
from reason_llm.run.store import metrics
from reason_llm.run.store.document import read_document
from reason_llm.run.watch import SILENT
from reward_runs import by_form, reward_config

ALARM = "The reward model goes by length"


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: 3 steps of 24 pairs that differ in their form."""
    folder = tmp_path_factory.mktemp("form")
    train(reward_config(folder, "form", by_form, 3))
    return folder / "runs" / "form"


@pytest.fixture(scope="module")
def exported(form: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("home") / "model"
    request = ExportRequest(form, out, None, False, "float32", None, None)
    found = export(request, Console("quiet"))
    assert found is not None
    return out


@pytest.mark.long
def test_the_rule_of_form_is_learned_from_log_2_on(tmp_path: Path) -> None:
    train(reward_config(tmp_path, "form", by_form, 10))
    form = tmp_path / "runs" / "form"
    records = metrics.read(form)
    assert records[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[-1]["eval/pair_accuracy"] >= 0.98
    assert abs(records[-1]["eval/reward_mean"]) < 0.2
    described = orjson.loads((form / "adapter" / "reward.json").read_bytes())
    assert described["mean"] == records[-1]["eval/reward_mean"]
    assert described["std"] == records[-1]["eval/reward_std"]
    assert examine(read_run(form, "form")).findings[ALARM].state == "clear"


def paid(folder: Path, models: list[dict[str, Any]], name: str = "rl") -> Config:
    rewards = [{"name": "think_answer_tags", "weight": 0}] + [
        {"name": "reward_model", "weight": 0.5 + i, **each} for i, each in enumerate(models)
    ]
    return small_config(
        folder, run__name=name, run__steps=2, run__buffer=str(folder / f"{name}.json"),
        data__eval=str(ROOT / "data" / "arithmetic_test.jsonl"), eval__limit=4,
        sample__completions_per_prompt=3, model__adapter={"rank": 4},
        score__rewards=rewards, train__learning_rate=3e-3,
    )  # fmt: skip


def model(path: Path, label: str, normalize: str = "none") -> dict[str, Any]:
    return {"label": label, "options": {"path": str(path), "normalize": normalize}}


def completions(folder: Path, name: str, step: int = 0) -> list[tuple[Group, Completion]]:
    document = read_document(folder / "runs" / name / "buffers" / f"step-{step:08d}.json.gz")
    return [(group, c) for group in document.groups for c in group.completions]


@torch.no_grad()
def peft_score(policy: Any, head_1D: torch.Tensor, group: Group, c: Completion) -> float:
    """By PEFT and the head, at the last token."""
    ids = torch.tensor([[*group.prompt.token_ids, *c.token_ids]])
    hidden = policy(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
    return float(head_1D[0] @ hidden)


@torch.no_grad()
def score_of(classifier: Any, ids_1T: torch.Tensor) -> float:
    return float(classifier(ids_1T).logits[0, 0])


def test_it_pays_what_it_gives(form: Path, exported: Path, tmp_path: Path) -> None:
    models = [
        model(form / "adapter", "fixed", "fixed"),
        model(form / "adapter", "plain"),
        model(exported, "own"),
    ]
    train(paid(tmp_path, models))
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, form / "adapter").eval()
    head_1D = load_file(form / "adapter" / "score.safetensors")["weight"]
    scale = orjson.loads((form / "adapter" / "reward.json").read_bytes())
    classifier = AutoModelForSequenceClassification.from_pretrained(exported, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    found, alike = completions(tmp_path, "rl"), 0
    assert len({c.rewards["plain"] for _, c in found}) > 6
    for group, c in found:
        score = peft_score(policy, head_1D, group, c)
        assert c.rewards["plain"] == pytest.approx(score, abs=1e-4)
        expected = min(max((score - scale["mean"]) / scale["std"], -10), 10)
        assert c.rewards["fixed"] == pytest.approx(expected, abs=1e-4)
        chat = [*group.prompt.extra["@chat"], {"role": "assistant", "content": c.text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False).rstrip()
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        assert c.rewards["own"] == pytest.approx(score_of(classifier, ids), abs=1e-4)
        if ids[0].tolist() == [*group.prompt.token_ids, *c.token_ids]:  # spelt as it was sampled
            assert c.rewards["own"] == pytest.approx(score, abs=1e-3)
            alike += 1
        total = 0.5 * c.rewards["fixed"] + 1.5 * c.rewards["plain"] + 2.5 * c.rewards["own"]
        assert c.reward == pytest.approx(total, abs=1e-6)
    assert alike >= 3
    records = metrics.read(tmp_path / "runs" / "rl")
    assert records[-1]["score/fixed"] != 0
    assert "eval/accuracy" in records[-1]
    best = max(found, key=lambda each: each[1].reward or 0.0)[1]
    assert (best.advantage or 0.0) > 0
    assert examine(read_run(tmp_path / "runs" / "rl", "rl")).findings


def bits(folder: Path) -> tuple[bytes, list[dict[str, float]], list[Any]]:
    run = folder / "runs" / "rl"
    timed = ("time/", "memory/", "sample/tokens_")
    records = [
        {k: v for k, v in each.items() if not k.startswith(timed)} for each in metrics.read(run)
    ]
    rollouts = [completions(folder, "rl", step) for step in range(2)]
    return (run / "adapter" / "adapter_model.safetensors").read_bytes(), records, rollouts


@pytest.fixture(scope="module")
def uninterrupted(form: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whole")
    train(paid(folder, [model(form / "adapter", "a", "fixed"), model(form / "adapter", "b")]))
    return bits(folder)


class Killed(BaseException):
    """In the place of a signal that nothing catches."""


@pytest.mark.long
@pytest.mark.parametrize("call", [1, 3])
def test_stopped_while_scoring_it_goes_on_to_the_same_bits(
    call: int,
    form: Path,
    uninterrupted: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a model was asked: the first step's first, and the second step's first."""
    config = paid(tmp_path, [model(form / "adapter", "a", "fixed"), model(form / "adapter", "b")])
    real, asked = RewardModelReader.rewards, []

    def rewards(self: RewardModelReader, *arguments: Any) -> list[float]:
        asked.append(self.key)
        found = real(self, *arguments)
        if len(asked) == call:
            raise Killed
        return found

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(RewardModelReader, "rewards", rewards)
        train(config)
    again: list[str] = []

    def counted(self: RewardModelReader, *arguments: Any) -> list[float]:
        again.append(self.key)
        return real(self, *arguments)

    monkeypatch.setattr(RewardModelReader, "rewards", counted)
    train(config)
    assert bits(tmp_path) == uninterrupted
    assert "".join(again) == {1: "abab", 3: "ab"}[call]  # the buffer kept the others


@pytest.mark.faults
def test_killed_as_the_scores_are_saved_it_goes_on_to_the_same_bits(
    form: Path, uninterrupted: Any, tmp_path: Path
) -> None:
    """SIGKILL, in a process of its own, between a model's scores and the buffer's second write."""
    config = paid(tmp_path, [model(form / "adapter", "a", "fixed"), model(form / "adapter", "b")])
    path = tmp_path / "config.yaml"
    path.write_text(config_file.to_yaml(config))
    die_at = ROOT / "tests" / "fixtures" / "die_at.py"
    place = "reason_llm.score.scorer:Scorer.with_model_reward"
    ended = subprocess.run(
        [sys.executable, str(die_at), place, "2", str(path)], capture_output=True, text=True
    )
    assert ended.returncode == -9, ended.stderr
    document = read_document(tmp_path / "rl.json")
    assert set(document.groups[0].completions[0].rewards) == {"think_answer_tags", "a"}
    train(config)
    assert bits(tmp_path) == uninterrupted


def broken(form: Path, to: Path, change: Callable[[Path], object]) -> Path:
    """A copy that carries no digests, as another program's."""
    shutil.copytree(form / "adapter", to)
    (to / MANIFEST).unlink()
    change(to)
    return to


def head_of_nan(folder: Path) -> None:
    weight = load_file(folder / "score.safetensors")["weight"]
    save_file({"weight": weight * math.nan}, folder / "score.safetensors")


@pytest.mark.long
def test_a_head_of_nan_is_one_line(form: Path, tmp_path: Path) -> None:
    bad = broken(form, tmp_path / "bad", head_of_nan)
    with pytest.raises(RewardError, match=r"the reward model bad gave nan for .*:\d+#0"):
        train(paid(tmp_path, [model(bad, "bad")]))
    config = paid(tmp_path, [model(bad, "bad")], "zero")
    train(config.model_copy(update={"score": config.score.model_copy(update={"on_error": "zero"})}))
    assert {c.rewards["bad"] for _, c in completions(tmp_path, "zero")} == {0.0}
    assert metrics.read(tmp_path / "runs" / "zero")[-1]["score/errors"] == 12


def write(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        value = read_object(folder / name) | changes
        kept = {key: each for key, each in value.items() if each is not None}
        (folder / name).write_bytes(orjson.dumps(kept))

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (shutil.rmtree, "is not a folder"),
        (lambda f: (f / "score.safetensors").unlink(), "no score.safetensors"),
        (write("adapter_config.json", base_model_name_or_path="org/other"), "over org/other"),
        (write("reward.json", base="0" * 16), "another digest of the base's config"),
        (write("reward.json", std=None), "no mean and no std above 0"),
        (write("reward.json", std=0.0), "no mean and no std above 0"),
        (write("reward.json", mean="1"), "no mean and no std above 0"),
        (lambda f: (f / "reward.json").write_text("{"), "cannot be read"),
        (
            lambda f: [(f / n).unlink(missing_ok=True) for n in ("reward.json", "digests.json")],
            "no mean and no std above 0",
        ),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "cannot be read"),
    ],
)
def test_a_folder_that_cannot_pay_is_one_line_before_a_weight_is_read(
    change: Callable[[Path], object], told: str, form: Path, tmp_path: Path
) -> None:
    bad = broken(form, tmp_path / "bad", change)
    with pytest.raises(ReasonError, match=told) as refused:
        prepare(paid(tmp_path, [model(bad, "bad", "fixed")]), SILENT)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_another_template_is_told(
    form: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = broken(form, tmp_path / "other", write("reward.json", template="0" * 16))
    prepare(paid(tmp_path, [model(other, "other", "fixed")]), SILENT)
    assert "trained with another chat template" in caplog.text


@pytest.mark.long
def test_another_reward_model_is_another_run(form: Path, tmp_path: Path) -> None:
    copy = broken(form, tmp_path / "copy", lambda folder: None)
    config = paid(tmp_path, [model(copy, "a", "fixed")])
    train(config)
    write("reward.json", mean=0.5)(copy)
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 3})})
    with pytest.raises(ReasonError, match="reward_models_sha256"):
        train(longer)


def test_an_outside_model_is_planned_and_checked(exported: Path, tmp_path: Path) -> None:
    config = paid(tmp_path, [model(exported, "own", "fixed")])
    plan = prepare(config, SILENT).plan
    lines = {line.name: line for line in plan.lines}
    stored = sum(t.nbytes for t in load_file(exported / "model.safetensors").values())
    assert lines["reward model own"].scoring == stored
    assert plan.peak.scoring > stored + lines["libraries, contexts, graphs"].scoring
    assert "scoring" in plan.table()[0]
    for name, change, told in (
        ("labels", write("config.json", id2label={"0": "a", "1": "b"}), "has 2 labels"),
        ("code", write("config.json", model_type="own", auto_map={"AutoConfig": "a.B"}),
         "needs Python code"),
        ("template", lambda f: (f / "chat_template.jinja").unlink(), "has no chat template"),
        ("pickle", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
         "no .safetensors file"),
    ):  # fmt: skip
        bad = tmp_path / name
        shutil.copytree(exported, bad)
        change(bad)
        with pytest.raises(ReasonError, match=told):
            prepare(paid(tmp_path, [model(bad, "own", "none")]), SILENT)


def test_a_head_that_is_missing_in_the_file_is_not_made_up(exported: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(exported, bad)
    weights = load_file(bad / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ReasonError, match=r"lack score\.weight"):
        train(paid(tmp_path, [model(bad, "own")]))
