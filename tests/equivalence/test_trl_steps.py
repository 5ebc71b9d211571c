"""Generations and optimizer steps of TRL's GRPOTrainer and of a run with the options that
docs/coming_from.md converts its options to."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

with warnings.catch_warnings():  # of the version of vLLM
    warnings.simplefilter("ignore")
    from trl import GRPOConfig, GRPOTrainer

import reason_llm
from conftest import ROOT, TINY

ROWS = [{"prompt": f"What is {a} + {b}?"} for a in range(8) for b in range(3)]
MAX_STEPS, PER_DEVICE, NUM_GENERATIONS = 4, 4, 2
PAGE = (ROOT / "docs" / "coming_from.md").read_text()
PAIR = re.compile(r"^    ([a-z_.]+) = (.+)$", re.MULTILINE)


def converted(**theirs: int) -> dict[str, Any]:
    """Our options by the formulas of the page."""
    ours = dict[str, Any]()
    section = PAGE.partition("## Batch sizes and steps")[2].partition("\n## ")[0]
    for option, formula in PAIR.findall(section):
        known = {name.replace(".", "_"): value for name, value in (theirs | ours).items()}
        value = eval(re.sub(r"(?<=[a-z])\.(?=[a-z])", "_", formula), {}, known)
        assert value == int(value)
        ours[option] = int(value)
    return ours


def counted(made: list[tuple[int, int]]) -> Callable[..., list[float]]:
    """A reward that notes the completions and the prompts of each call."""

    def noted(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        made.append((len(completions), len({str(prompt) for prompt in prompts})))
        return [float(len(text) % 3) for text in completions]

    return noted


@contextmanager
def counting_optimizer_steps() -> Iterator[list[int]]:
    """A list with an item of each step of an optimizer of PyTorch."""
    taken = list[int]()
    hook = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    try:
        yield taken
    finally:
        hook.remove()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of TRL
@pytest.mark.parametrize(
    ("accumulation", "per_generation", "iterations"),
    [(2, None, 1), (2, 4, 1), (2, 4, 2), (4, 2, 1)],
)
def test_a_converted_run_generates_and_steps_as_often_as_trl(
    accumulation: int,
    per_generation: int | None,
    iterations: int,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    made = list[tuple[int, int]]()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TINY),
        reward_funcs=counted(made),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to=[],
            save_strategy="no", max_completion_length=8, max_steps=MAX_STEPS,
            per_device_train_batch_size=PER_DEVICE, num_generations=NUM_GENERATIONS,
            gradient_accumulation_steps=accumulation, steps_per_generation=per_generation,
            num_iterations=iterations, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    with counting_optimizer_steps() as theirs:
        trainer.train()
    assert trainer.state.global_step == len(theirs) == MAX_STEPS

    of_batch = max(accumulation, per_generation or 0)
    options = converted(
        max_steps=MAX_STEPS, save_steps=MAX_STEPS, eval_steps=MAX_STEPS,
        per_device_train_batch_size=PER_DEVICE, num_generations=NUM_GENERATIONS,
        gradient_accumulation_steps=accumulation, steps_per_generation=of_batch,
        num_iterations=iterations, GPUs=1,
    )  # fmt: skip
    steps = {options.pop("eval.every"), options["run.save_every"], options["run.steps"]}
    assert len(steps) == 1
    config = reason_llm.load_config(
        overrides=options
        | {
            "model.path": str(TINY), "data.form": "prompts", "run.name": "ours",
            "sample.completions_per_prompt": NUM_GENERATIONS, "sample.max_new_tokens": 8,
            "algorithm.kl": "none", "train.gradient_checkpointing": False,
            "train.schedule": "linear",
        }
    )  # fmt: skip
    scored = list[tuple[int, int]]()
    with counting_optimizer_steps() as ours:
        summary = reason_llm.train(
            config, rewards=[counted(scored)], rows=ROWS, watch=reason_llm.Silent()
        )
    assert len(ours) == MAX_STEPS
    generations = len(summary.records()) - 1  # without the record before the first step
    completions = sum(count for count, _ in scored[1:])  # without the try-out of the reward
    prompts = options["sample.prompts_per_step"]
    assert completions == generations * prompts * NUM_GENERATIONS == sum(n for n, _ in made)
    if of_batch == (per_generation or accumulation):
        assert [n for _, n in made] == generations * [prompts]
