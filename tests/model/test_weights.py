"""All weights trained in the place of an adapter (model.train: full).

1. The log-probs' gradient reaches the head, and the head that is the embedding: autograd's own.
2. Its reference is the checkpoint on disk; afterwards every bit is back, where it was.
3. A pattern says which weights; one that matches nothing is told.
4. A run keeps a whole model, which is loaded as any other, and goes on from the archive.
5. In bfloat16 steps too small for a weight's last bit still add up.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import ROOT, TINY
from learners import groups, learn, learner
from reason_llm.app import training
from reason_llm.app.chat import ChatOptions, ChatSession, find_subject
from reason_llm.app.console import Console
from reason_llm.config import Config, ModelSection
from reason_llm.errors import CheckpointError, ModelError
from reason_llm.model import collate, policy_logprobs, to_data, weights
from reason_llm.model.base import Model
from reason_llm.run.store import checkpoint, metrics
from reason_llm.run.store.folder import find_adapter, learned_steps


def full(tokenizer: Any, dtype: str = "float32", **options: Any) -> Model:
    section = ModelSection(path=str(TINY), dtype=dtype, train="full", **options)
    return Model(section, tokenizer, seed=0)


def test_gradients_are_autograd_s_own(tokenizer: Any) -> None:
    data = to_data(groups())
    with full(tokenizer) as model:
        ids_BT, mask_BT = collate(data, model.device)
        policy_logprobs(model, ids_BT, mask_BT, 0.7, chunk_tokens=5)[0].sum().backward()
        names = dict(model.policy.named_parameters())
        found = {name: each.grad for name, each in names.items()}
        model.policy.zero_grad()
        logits_BTV = model.policy(input_ids=ids_BT, use_cache=False).logits[:, :-1] / 0.7
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        (logprobs_BT * mask_BT[:, 1:]).sum().backward()
        assert model.head.weight is names["model.embed_tokens.weight"]  # tied: one parameter
        for name, parameter in names.items():
            assert torch.allclose(found[name], parameter.grad, atol=1e-3, rtol=1e-3), name


def test_the_reference_is_the_checkpoint_on_disk(tokenizer: Any) -> None:
    data = to_data(groups())
    with full(tokenizer) as model:
        made = learner(model, optimizer="adafactor")
        base, _ = made.measure(data, "policy")
        held = model.adapter_of("policy")
        places = [each.data_ptr() for each in made.parameters]
        learn(made)
        after = [each.detach().clone() for each in made.parameters]
        policy, _ = made.measure(data, "policy")
        reference, _ = made.measure(data, "reference")
        assert all(torch.equal(a, b) for a, b in zip(reference, base, strict=True))
        assert not torch.allclose(torch.cat(policy), torch.cat(base), atol=1e-3)
        now = made.parameters
        assert all(torch.equal(a, b) for a, b in zip(after, now, strict=True))
        assert [each.data_ptr() for each in now] == places
        with pytest.raises(RuntimeError, match="stop"), model.using("reference"):
            raise RuntimeError("stop")
        assert all(torch.equal(a, b) for a, b in zip(after, now, strict=True))
        with pytest.raises(CheckpointError, match="the saved weights do not fit"):
            model.load_adapter("policy", {})
        model.load_adapter("policy", held)
        back, _ = made.measure(data, "policy")
        assert all(torch.equal(a, b) for a, b in zip(back, base, strict=True))
        own = {"odd.weight": torch.nn.Parameter(torch.zeros(1))}
        with pytest.raises(ModelError, match=r"odd\.weight is not in its safetensors, so there is"):
            weights._read(own, str(TINY), "model")


def test_small_steps_add_up_in_bfloat16(tokenizer: Any) -> None:
    """A step of 1e-5 is a hundredth of the last bit of most weights."""
    with full(tokenizer, "bfloat16") as rounded, full(tokenizer) as exact:
        start = torch.cat([each.detach().flatten() for each in exact.parameters_of("policy")])
        for model in (rounded, exact):
            made = learner(model, learning_rate=1e-5, epochs=4)
            learn(made)
        way, own = (
            torch.cat([each.detach().float().flatten() for each in model.parameters_of("policy")])
            - start
            for model in (exact, rounded)
        )
        nearest = (start + way).bfloat16().float() - start.bfloat16().float()
    along = {
        name: float((each @ way) / (way @ way)) for name, each in (("own", own), ("near", nearest))
    }
    assert 0.8 < along["own"] < 1.2, along


def options_of(folder: Path, name: str) -> dict[str, Any]:
    return {
        "model": {"path": str(TINY), "dtype": "bfloat16", "train": "full"},
        "run__name": name,
        "run__buffer": str(folder / f"{name}.json"),
        "run__save_every": 2,
        "train__learning_rate": 2e-4,
        "algorithm": {"name": "grpo"},  # with its KL
        "eval__every": 1,
        "eval__max_new_tokens": 8,
        "data__eval": str(ROOT / "data" / "arithmetic_test.jsonl"),
        "data__limit": 16,
    }


@pytest.mark.long
def test_a_run_keeps_a_model_and_learns_again_from_the_archive(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    options = partial(options_of, tmp_path)
    console = Console("quiet")
    training.run_training(small_run(**options("whole")), console)
    run = tmp_path / "runs" / "whole"
    assert find_adapter(run) == run / "model" and learned_steps(run, run / "model") == 3
    loaded = AutoModelForCausalLM.from_pretrained(run / "model", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert not torch.equal(
        loaded.model.embed_tokens.weight,
        AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16).model.embed_tokens.weight,
    )
    records = metrics.read(run)
    assert records[1]["train/kl"] < 1e-9 < records[3]["train/kl"]

    other = tmp_path / "runs" / "again"
    training.run_training(small_run(run__steps=3, **options("again")), console)
    newest = checkpoint.listing(other)[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()  # as if it had been killed before the last save: step 2 is in the archive
    (other / "summary.json").unlink()
    training.run_training(small_run(**options("again")), console)
    for name in ("model/model.safetensors", f"checkpoints/{newest.name}/optimizer.safetensors"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.long
def test_every_command_takes_what_it_keeps(
    small_run: Callable[..., Config], script: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    options, console, run = partial(options_of, tmp_path), Console("quiet"), tmp_path / "runs/made"
    training.run_training(small_run(**options("made")), console)
    chat = ChatSession(
        find_subject(str(run), None, "best"), ChatOptions(max_new_tokens=4, temperature=0.0)
    )
    assert chat.model.path == str(run / "model_best") and "".join(chat.answer("What is 3 + 4?"))
    asked = ("--compare", "base", "--eval.limit", "8", "--out", tmp_path / "evaluation")
    code, out, error = script("evaluate.py", run, *asked)
    assert code == 0 and "adapter - base" in out, error
    code, out, error = script(
        "export.py", run, "--out", tmp_path / "exported", "--dtype", "float32"
    )
    assert (
        code == 0 and "log-prob difference to the run's model in float32: max 0, mean 0" in out
    ), error
    code, _, error = script("export.py", run, "--adapter-only", "--out", tmp_path / "other")
    assert code == 2 and "which trained all weights; leave it out" in error
    for path in (run / "model", tmp_path / "exported"):
        again = small_run(**options(path.name) | {"model__path": str(path), "run__steps": 1})
        training.run_training(again, console)
        assert (tmp_path / "runs" / path.name / "model" / "tokenizer.json").is_file()
