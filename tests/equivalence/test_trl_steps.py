"""What docs/coming_from.md says of TRL: generations and optimizer steps of its GRPOTrainer and of a
run with the converted options; steps, learning rates, tokens and loss of its SFT script and of the
config beside it."""

import json
import re
import shutil
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
from reason_llm.app.cli import call

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


TRAINING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The tiny model's, with the marks by which TRL finds the assistant's turns."""


@pytest.fixture
def sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """TRL's trainer after the page's script, and the records of the page's config, on some sums
    with the tiny model, in float32; options are replaced in both texts."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(TRAINING_TEMPLATE)
    section = PAGE.partition("## An SFT script")[2].partition("\n## ")[0]
    script, config = (
        section.partition(f"```{language}\n")[2].partition("```")[0]
        for language in ("python", "yaml")
    )

    def run(count: int, theirs: dict[str, str] = {}, ours: dict[str, str] = {}) -> tuple[Any, Any]:  # noqa: B006
        rows = [
            {"messages": [{"role": "user", "content": f"What is {i} + {i * i}?"},
                          {"role": "assistant", "content": f"<answer>{i + i * i}</answer>"}]}
            for i in range(count)
        ]  # fmt: skip
        Path("chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
        of_cpu = 'use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,'
        texts = []
        for text, others in ((script, theirs), (config, ours)):
            for old, new in {"Qwen/Qwen2.5-0.5B-Instruct": "tiny", **others}.items():
                assert old in text
                text = text.replace(old, new)
            texts.append(text)
        found = dict[str, Any]()
        exec(texts[0].replace("output_dir=", f"{of_cpu} output_dir="), found)
        summary = reason_llm.train(texts[1], watch=reason_llm.Silent())
        return found["trainer"], summary.records()[1:]

    return run


def trained_tokens(trainer: Any) -> int:
    """Tokens of TRL's data set that have a label."""
    return sum(label != -100 for labels in trainer.train_dataset["labels"] for label in labels)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of TRL
def test_the_sft_script_and_its_config_take_the_same_steps_on_the_same_tokens(
    sft: Callable[..., tuple[Any, Any]],
) -> None:
    trainer, records = sft(48)
    history = [each for each in trainer.state.log_history if "learning_rate" in each]
    assert trainer.state.global_step == len(records) == 6
    assert [each["train/learning_rate"] for each in records] == pytest.approx(
        [each["learning_rate"] for each in history]
    )
    for epoch in (records[:3], records[3:]):
        assert sum(each["train/tokens"] for each in epoch) == trained_tokens(trainer)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of TRL
def test_the_sft_script_and_its_config_have_the_same_first_loss(
    sft: Callable[..., tuple[Any, Any]],
) -> None:
    trainer, records = sft(16)
    assert records[0]["train/loss"] == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of TRL
def test_what_differs_from_the_sft_script_is_as_the_page_says(
    sft: Callable[..., tuple[Any, Any]],
) -> None:
    trainer, records = sft(40)
    assert (trainer.state.global_step, len(records)) == (6, 5)
    of_ten = {
        "per_device_train_batch_size=4": "per_device_train_batch_size=10",
        "gradient_accumulation_steps=4": "gradient_accumulation_steps=1",
        "num_train_epochs=2": "num_train_epochs=3",
    }
    shutil.rmtree("runs")
    ours = {"rows_per_step: 16": "rows_per_step: 10", "epochs: 2": "epochs: 3"}
    trainer, records = sft(24, of_ten, ours)
    assert (trainer.state.global_step, len(records)) == (9, 8)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of TRL
def test_rows_per_step_of_a_script_that_packs_are_converted_by_the_rows_of_a_block(
    sft: Callable[..., tuple[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    packed = {
        "per_device_train_batch_size=4": "per_device_train_batch_size=1, packing=True",
        "gradient_accumulation_steps=4": "gradient_accumulation_steps=1",
        "max_length=1024": "max_length=512",
    }
    sft(192)  # writes the rows
    options = ["--stage", "sft", "--model.path", "tiny", "--data.train", "chats.jsonl"]
    assert call("train", "train.py", [*options, "--data-check"]) == 0
    shown = re.search(r"row tokens: min \d+, mean ([\d.]+)", capsys.readouterr().out)
    assert shown is not None
    size = f"rows_per_step: {round(512 / float(shown[1]))}"
    shutil.rmtree("runs")
    trainer, records = sft(192, packed, {"rows_per_step: 16": size})
    assert len(records) == pytest.approx(trainer.state.global_step, rel=0.1)
    assert len(records) < 2 * 192 / 10  # not the steps of one row each


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of TRL
def test_packing_of_trl_changes_its_steps_and_its_default_trains_the_prompt(
    sft: Callable[..., tuple[Any, Any]],
) -> None:
    trainer, records = sft(48, {"assistant_only_loss=True": "packing=True"})
    assert trainer.state.global_step < len(records) == 6
    assert trained_tokens(trainer) == sum(map(len, trainer.train_dataset["input_ids"]))
    assert trained_tokens(trainer) > sum(each["train/tokens"] for each in records) / 2
