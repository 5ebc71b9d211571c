"""Run folders for the tests of reports, as a run leaves them, with rollouts of one's choice."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from conftest import ROOT, TINY
from reason_llm import config_file
from reason_llm.buffer import Document, RunIdentity, to_bytes
from reason_llm.config import Config
from reason_llm.rollout import Completion, Group, Prompt

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
END = 2  # <|im_end|>


def completion(text: str, reward: float = 0.0, **options: Any) -> Completion:
    """With the tiny model's tokens, each but the end with a log-prob of -0.5."""
    ids = (*TOKENIZER.encode(text, add_special_tokens=False).ids, END)
    values: dict[str, Any] = {
        "token_ids": ids, "text": text, "logprobs": (-0.5,) * (len(ids) - 1) + (-0.01,),
        "finish_reason": "stop", "rewards": {"boxed": reward}, "reward": reward, "advantage": 0.0,
    }  # fmt: skip
    return Completion(**values | options)


def group(
    texts: Sequence[str],
    rewards: Sequence[float],
    question: str = "What is 1 + 2?",
    **options: Any,
) -> Group:
    prompt = Prompt(
        f"set.jsonl:{question}", f"<|im_start|>user\n{question}<|im_end|>\n", (1, 5), "3"
    )
    pairs = zip(texts, rewards, strict=True)
    return Group(prompt, tuple(completion(text, reward, **options) for text, reward in pairs))


def record(step: int, **values: float) -> dict[str, float]:
    """A step's record with what every step has; ``__`` stands for the slash of a key."""
    usual = {
        "score/reward": 0.5, "score/boxed": 0.5, "sample/completion_tokens": 20.0,
        "sample/truncated_fraction": 0.0, "score/groups_without_signal_fraction": 0.3,
        "sample/groups_dropped": 0, "score/errors": 0.0, "score/timeouts": 0.0,
        "train/entropy": 1.0, "train/kl": 0.0, "train/sampler_kl": 1e-6,
        "train/sampler_mismatch_max": 1e-3, "train/clip_fraction": 0.0, "sample/tokens": 100,
        "time/sampling_seconds": 1.0, "time/learning_seconds": 2.0, "time/total_seconds": 3.5,
        "memory/sampling_peak_gib": 0.5, "memory/sampling_planned_gib": 1.0,
        "memory/learning_peak_gib": 0.6, "memory/learning_planned_gib": 0.9,
    }  # fmt: skip
    return {"step": step} | usual | {key.replace("__", "/"): v for key, v in values.items()}


def write_run(
    folder: Path,
    records: Sequence[dict[str, float]],
    steps: Sequence[Sequence[Group]] = (),
    rewards: Sequence[dict[str, Any]] = ({"name": "boxed"},),
    model: str = str(TINY),
) -> Path:
    """A run's folder; ``steps`` are the groups of step 0, 1, …"""
    tree = {
        "run": {"name": folder.name, "steps": 100},
        "model": {"path": model},
        "data": {"train": str(ROOT / "data" / "arithmetic_train.jsonl")},
        "sample": {"engine": "transformers"},
        "score": {"rewards": list(rewards)},
    }
    config = Config.model_validate(tree)
    (folder / "buffers").mkdir(parents=True)
    (folder / "resolved_config.yaml").write_text(config_file.to_yaml(config))
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records))
    identity = RunIdentity("0123456789ab", folder.name, config.model_dump(mode="json"))
    for step, groups in enumerate(steps):
        document = Document(identity, step, step, True, True, len(groups), list(groups))
        path = folder / "buffers" / f"step-{step:08d}.json.gz"
        path.write_bytes(gzip.compress(to_bytes(document), 1, mtime=0))
    return folder
