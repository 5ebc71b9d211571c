"""Every option of the config changes a run, first where it should, or is named with its own test.

An option that is read, checked and then not passed on is a mistake that nobody sees. Each case runs
a small run with the option and without it, and names the first thing that differs.
"""

import gzip
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from conftest import ROOT
from option_runs import (
    OFF,
    SFT,
    SMALL,
    STEPS,
    config_of_case,
    make_folder,
)
from reason_llm.config import Config, ModelSection
from reason_llm.errors import ReasonError, Stopped
from reason_llm.loop import train
from reason_llm.model import base
from reason_llm.run import Progress, Record, Watch
from reason_llm.run.store import metrics
from slices import installed, is_gone

CASES: list[tuple[dict[str, Any], str, Any, str]] = [
    (SMALL, "run.seed", 1, "prompts"),
    (SMALL, "run.shards", 2, "rollouts"),
    (SMALL, "run.steps", 2, "files"),
    (STEPS | {"run__keep_checkpoints": 3}, "run.save_every", 2, "files"),
    (STEPS, "run.keep_checkpoints", 1, "files"),
    (STEPS, "run.keep_buffers_gib", 1e-9, "files"),
    (SMALL, "model.path", "{folder}/model", "rollouts"),
    (SMALL, "model.dtype", "bfloat16", "rollouts"),
    (SMALL, "model.quantize", "nf4", "rollouts"),
    (SMALL, "model.attention", "eager", "rollouts"),
    (SMALL | {"model__adapter": {}}, "model.train", "full", "files"),
    (SMALL, "model.adapter.rank", 4, "learned"),
    (SMALL, "model.adapter.alpha", 8, "learned"),
    (SMALL, "model.adapter.rslora", True, "learned"),
    (SMALL, "model.adapter.dropout", 0.5, "learned"),
    (SMALL, "model.adapter.targets", ["q_proj"], "learned"),
    (SMALL, "sample.prompts_per_step", 3, "prompts"),
    (SMALL, "sample.completions_per_prompt", 3, "rollouts"),
    (SMALL, "sample.max_new_tokens", 8, "rollouts"),
    (SMALL, "sample.temperature", 0.5, "rollouts"),
    (SMALL, "sample.top_k", 2, "rollouts"),
    (SMALL, "train.learning_rate", 1e-3, "learned"),
    (OFF, "train.schedule", "linear", "learned"),
    (OFF, "train.warmup_steps", 2, "learned"),
    (SMALL, "train.optimizer", "adafactor", "adapter"),
    (SMALL, "train.weight_decay", 0.5, "adapter"),
    (SFT, "train.rows_per_step", 8, "learned"),
    (SMALL, "train.epochs", 2, "learned"),
    (SMALL, "train.optimizer_steps", 2, "learned"),
    (SMALL, "train.micro_batch_tokens", 256, "learned"),
    (SMALL, "train.packing", "padded", "learned"),
    (SMALL, "train.max_grad_norm", 1e-3, "adapter"),
]
ELSEWHERE = {
    "stage": "tests/end_to_end/test_stages.py",
    "data.": "tests/data",
    "score.": "tests/score",
    "algorithm.": "tests/train",
    "preference.": "tests/train",
    "critic.": "tests/train",
    "reward.": "tests/train",
    "teacher.": "tests/run/test_teacher_model.py",
    "eval.": "tests/run/test_eval_samples.py",
    "memory.": "tests/model/plan",
    "log.": "tests/end_to_end/test_console.py",
    "run.name": "names the folder where every case looks",
    "run.directory": "the same",
    "run.buffer": "tests/run/test_buffers_apart.py",
    "run.resume": "tests/end_to_end/test_resume.py",
    "run.from_buffer": "tests/end_to_end/test_saved_rollouts.py",
    "run.keep_best": "tests/run/test_best.py",
    "run.epochs": "tests/run/test_run_options.py",
    "run.max_staleness": "tests/replicas/test_staleness.py",
    "run.ray": "tests/replicas/test_replicas.py",
    "run.replicas": "tests/replicas/test_replicas.py",
    "run.samplers": "tests/replicas/test_staleness.py",
    "model.start": "tests/end_to_end/test_stages.py",
    "model.context_tokens": "refuses what is longer: tests/data/test_load.py",
    "model.trust_remote_code": "tests/end_to_end/test_untrusted.py",
    "model.backend": "of a GPU",
    "model.deterministic": "of a GPU",
    "model.adapter.target_parameters": "of mixtures: tests/end_to_end/test_families.py",
    "sample.engine": "of vLLM: tests/model/vllm",
    "sample.fold": "of vLLM: tests/model/vllm/test_folding.py",
    "sample.stop": "tests/sample/test_transformers_sampler.py",
    "sample.top_p": "tests/end_to_end/test_training.py",
    "sample.min_p": "tests/end_to_end/test_training.py",
    "sample.environment": "tests/environments/test_turns.py",
    "sample.turns": "tests/environments/test_turns.py",
    "sample.turn_tokens": "tests/environments/test_turns.py",
    "sample.reply_tokens": "tests/environments/test_turns.py",
    "sample.environment_seconds": "tests/environments/test_turns.py",
    "train.gradient_checkpointing": "memory alone: tests/model/plan",
    "train.router_aux_loss_coef": "of mixtures: tests/model/test_routing.py",
}
"""Options, or whole sections, that other tests hold; each file there must exist."""
FEW_TARGETS = {"model__adapter__targets": ["q_proj", "up_proj"]}
"""They take less time; an adapter to begin from has its own."""
BEFORE_LEARNING = ["prompts", "rollouts", "scores", "advantages"]
"""Parts of a run that are there before it learns."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the runs; a model's files are checked once for each ``model`` section."""
    checked: dict[str, Any] = {}
    original = base.check_model

    def check_once(section: ModelSection) -> Any:
        key = section.model_dump_json()
        if key not in checked:
            checked[key] = original(section)
        return checked[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(base, "check_model", check_once)
        yield make_folder(tmp_path_factory.mktemp("options"))


class Until(Watch):
    """Ends a run when this part of it is there."""

    def __init__(self, part: str) -> None:
        self.part = part

    def phase(self, name: str, total: int) -> AbstractContextManager[Progress]:
        if name == "learning" and self.part in BEFORE_LEARNING:
            raise Stopped(0)
        return super().phase(name, total)

    def step(self, record: Record, group: Any) -> None:
        if record["step"] and self.part == "learned":
            raise Stopped(0)


def observed(folder: Path) -> dict[str, Any]:
    """What the run in ``folder`` did, in the order in which it did it in its first step."""
    run, buffer = folder / "runs" / "small", folder / "buffer.json"
    records = [
        {k: v for k, v in record.items() if not k.startswith(("time/", "memory/"))}
        for record in metrics.read(run)
    ]
    documents = [
        orjson.loads(gzip.decompress(file.read_bytes()))["groups"]
        for file in sorted(run.glob("buffers/step*"))
    ]
    if not documents and buffer.exists():  # it has not learned
        documents = [orjson.loads(buffer.read_bytes())["groups"]]
    first = documents[0] if documents else []
    completions = [each for group in first for each in group["completions"]]
    learned = [
        {k: v for k, v in record.items() if k.startswith(("train/", "critic/"))}
        for record in records
    ]
    return {
        "files": sorted(str(file.relative_to(run)) for file in run.rglob("*")),
        "prompts": [group["prompt"] for group in first],
        "rollouts": [[c["token_ids"], c["logprobs"]] for c in completions],
        "scores": [[c["rewards"], c["reward"]] for c in completions],
        "advantages": [c["advantage"] for c in completions],
        "learned": learned[:2],
        "adapter": [
            hashlib.sha256(file.read_bytes()).hexdigest()
            for file in [*run.glob("adapter/*.safetensors"), *run.glob("model/*.safetensors")]
        ],
        "evaluated": [
            [{k: v for k, v in each.items() if k.startswith("eval/")} for each in records],
            [gzip.decompress(file.read_bytes()) for file in sorted(run.glob("evaluations/*"))],
        ],
        "later": [documents[1:], learned[2:]],
    }


_whole: dict[bytes, dict[str, Any]] = {}
"""What whole runs did, by their options."""


def run_of(folder: Path, options: dict[str, Any], until: str = "") -> dict[str, Any]:
    """What a run with these options does, up to this part."""
    key = orjson.dumps(options, option=orjson.OPT_SORT_KEYS)
    if key in _whole:
        return _whole[key]
    shutil.rmtree(folder / "runs", ignore_errors=True)
    (folder / "buffer.json").unlink(missing_ok=True)
    try:
        has_own = any(name in str(options) for name in ("{folder}/start", "{folder}/judge"))
        given = options if has_own else FEW_TARGETS | options
        train(config_of_case(folder, given), Until(until))
        _whole[key] = found = observed(folder)
    except Stopped:
        found = observed(folder)
    except ReasonError as error:
        _whole[key] = found = {"files": str(error)}
    return found


def leaves(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """The dotted name of every option."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{before}{name}.")
        else:
            yield before + name


@pytest.mark.parametrize(
    ("options", "option", "value", "first"),
    [case for case in CASES if case[1] != "run.shards" or installed("replicas")],
)
def test_an_option_acts_first_where_it_should(
    options: dict[str, Any], option: str, value: Any, first: str, folder: Path
) -> None:
    without = run_of(folder, options)
    with_it = run_of(folder, options | {option.replace(".", "__"): value}, first)
    parts = [*BEFORE_LEARNING, "learned"] if first in (*BEFORE_LEARNING, "learned") else [*without]
    differing = [part for part in parts if without[part] != with_it[part]]
    assert differing and differing[0] == first


def test_every_option_is_here_or_named() -> None:
    named = {option for _, option, _, _ in CASES}
    assert sorted(named & ELSEWHERE.keys()) == []
    paths = [part for text in ELSEWHERE.values() for part in text.split() if "/" in part]
    assert [p for p in paths if not (ROOT / p).exists() and not is_gone(p)] == []
    sections = tuple(name for name in ELSEWHERE if name.endswith("."))
    left = {*leaves(Config)} - named - ELSEWHERE.keys()
    assert sorted(option for option in left if not option.startswith(sections)) == []
