"""Families of their own kind train: the real loop, log-probs, checkpoint and export."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import families
from reason_llm.app.console import Console
from reason_llm.app.export.export import Request, export
from reason_llm.app.training import run_training
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.model import adapters
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.run.store import metrics

pytestmark = pytest.mark.filterwarnings("default")  # PEFT warns of Conv1D


@pytest.mark.long
@pytest.mark.parametrize("name", families.OLDER)
def test_three_steps_and_an_export(
    name: str, small_run: Callable[..., Config], tmp_path: Path
) -> None:
    path = families.make(tmp_path / "base", name)
    options = {"path": path, "dtype": "float32", "context_tokens": 256, "adapter": {"rank": 4}}
    reward = tmp_path / "mine.py"
    reward.write_text("def mine(token_ids):\n    return sum(token_ids) % 7 / 7\n")
    config = small_run(
        model=options,
        sample__max_new_tokens=8,
        train__learning_rate=1e-2,
        score__rewards=[{"custom": f"{reward}:mine"}],
    )
    run_training(config, Console("quiet"))
    run = config.run.directory / "small"
    records = metrics.read_all(run)
    assert [record["step"] for record in records][-1] == 3
    learned = [record for record in records if record["step"]]
    assert all(0 < record["train/grad_norm"] < math.inf for record in learned)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        policy = PeftModel.from_pretrained(base, str(run / "adapter"))
        expected = policy(input_ids=ids).logits
    export(request(run, tmp_path / "out"), Console("quiet"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        found = exported(input_ids=ids).logits
    assert (found - expected).abs().max() < 1e-4
    assert (expected - plain).abs().max() > 1e-3


def request(run: Path, out: Path) -> Request:
    return Request(
        source=run,
        out=out,
        base=None,
        adapter_only=False,
        dtype="float32",
        shard_bytes=2**30,
        rollouts=None,
        push=None,
        gguf=None,
    )


@pytest.mark.parametrize("targets", ["all-linear", ["lm_head"]], ids=["all-linear", "head"])
@pytest.mark.parametrize("name", families.OLDER)
def test_chunked_log_probs_are_those_of_full_logits(
    name: str, targets: Any, tmp_path: Path
) -> None:
    path = families.make(tmp_path / "base", name)
    section = ModelSection(
        path=path, dtype="float32", adapter=AdapterSection(rank=4, targets=targets)
    )
    with Model(section, load_tokenizer(path), seed=0) as model:
        for parameter in model.policy.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
        model.policy.train()  # as while learning: the base's own dropout must not count
        ids_BT = torch.randint(3, 512, (2, 40))
        mask_BT = torch.ones(2, 40, dtype=torch.bool)
        mask_BT[:, 0] = False
        with torch.no_grad():
            found_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 0.7, chunk_tokens=7)
            model.policy.eval()
            logits_BTV = model.policy(input_ids=ids_BT).logits / 0.7
        expected_BT = logits_BTV.log_softmax(-1)[:, :-1].gather(-1, ids_BT[:, 1:, None])[..., 0]
        assert (found_BT[:, 1:] - expected_BT).abs().max() < 1e-5
        adapters.save(model.policy, tmp_path / "adapter")
        again = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        reloaded = adapters.over(again, tmp_path / "adapter").eval()
        with torch.no_grad():
            theirs = reloaded(input_ids=ids_BT).logits / 0.7
        assert (theirs - logits_BTV).abs().max() < 1e-5
