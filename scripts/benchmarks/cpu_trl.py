"""TRL's side: GRPOTrainer as one would set it up on a CPU, in float32 and without checkpointing.

Its own loop runs untouched; a callback waits for the turn before each optimizer step and stops the
clock after it, so loading data and logging are not counted. Three methods are overridden: one to
time generation, one to time scoring, and where lengths are given, generation gets a logits
processor that forbids the end token before a row's length and forces it there (a column of the
scores a token, and a row for each row that ends). Where nothing is to be sampled, the given ids are
returned in generation's place.

TRL has one memory saver for the log-probs, which comes with ``use_liger_kernel`` and therefore
needs Triton; with ``chunked`` the trainer's switch is set after its construction, which runs the
same chunked log-probs without Liger's kernels. With ``bfloat16`` it learns under autocast, which is
what TRL's ``bf16`` means.
Arguments: workload.json folder [chunked] [bfloat16]
"""

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.cpu_worker import Turns, accuracy, check_lengths, read_workload
from benchmarks.cpu_workloads import Workload
from reason_llm.config import RewardSpec, ScoreSection
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.score import Scorer


class ForcedLengths(LogitsProcessor):
    """Row b draws the end token at its length and not before."""

    def __init__(self, lengths: Sequence[int], end_id: int) -> None:
        self.ends = [(torch.tensor(lengths) == n + 1).nonzero()[:, 0] for n in range(max(lengths))]
        self.end_id = end_id
        self.position = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change the scores (B, V) of the next token in place."""
        scores[:, self.end_id] = -torch.inf
        rows = self.ends[self.position]
        if len(rows):
            scores[rows] = -torch.inf
            scores[rows, self.end_id] = 0.0
        self.position += 1
        return scores


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with the clock read around generation."""

    workload: Workload
    step = -1
    sampling = 0.0
    """Seconds of the last generation."""
    before_learning = 0.0
    """Seconds of the last generation and of scoring it."""
    lengths: Sequence[int] = ()

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], None]:
        workload = self.workload
        self.step += 1
        given = [list(prompt.token_ids) for prompt in workload.steps[self.step]]
        if prompt_ids[:: workload.completions_per_prompt] != given:
            raise RuntimeError("TRL reads other prompts")
        started = time.perf_counter()
        if workload.learner_only:
            completion_ids = workload.completions(self.step, len(self.processing_class))
            self.sampling = 0.0
        else:
            if workload.lengths is not None:
                end = ForcedLengths(workload.lengths, self.processing_class.eos_token_id)
                base = self.model.get_base_model()
                base.generate = functools.partial(
                    type(base).generate, base, logits_processor=LogitsProcessorList([end])
                )
            completion_ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.sampling = time.perf_counter() - started
        self.lengths = [len(ids) for ids in completion_ids]
        check_lengths(workload, list(self.lengths))
        return completion_ids, None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        self.before_learning = time.perf_counter() - started
        return batch


class Clock(TrainerCallback):
    """Takes turns, one optimizer step each."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.started = 0.0
        self.trainer: TimedTrainer | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the turn."""
        self.turns.wait()
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Say what the step took."""
        total = time.perf_counter() - self.started
        assert self.trainer is not None
        workload = self.trainer.workload
        taken = {
            "sampling": self.trainer.sampling,
            "learning": total - self.trainer.before_learning,
            "total": total - (self.trainer.before_learning if workload.learner_only else 0.0),
            "tokens": sum(self.trainer.lengths),
        }
        if workload.is_evaluated(self.trainer.step):
            taken["accuracy"] = accuracy(workload, _greedy(self.trainer))
        self.turns.answer(taken)


@torch.no_grad()
def _greedy(trainer: TimedTrainer) -> list[str]:
    """Completions of the held-out prompts by the trainer's model as it is now."""
    tokenizer, workload = trainer.processing_class, trainer.workload
    prompts = [prompt.text for prompt in workload.held_out]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left",
                      add_special_tokens=False)  # fmt: skip
    trainer.model.eval()
    found = trainer.model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        max_new_tokens=workload.max_new_tokens,
    )
    trainer.model.train()
    written = found[:, batch["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(written, skip_special_tokens=True)
    return texts


def main() -> None:
    """Take as many steps as the workload has."""
    turns = Turns()
    workload = read_workload()
    clock = Clock(turns)
    prompts = [prompt for step in workload.steps for prompt in step]
    trainer = TimedTrainer(
        model=workload.model,
        reward_funcs=_reward(workload, prompts),
        args=_config(workload, sys.argv[2]),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt.text, "index": i} for i, prompt in enumerate(prompts)]
        ),
        processing_class=AutoTokenizer.from_pretrained(workload.model),
        peft_config=LoraConfig(
            r=workload.rank,
            lora_alpha=workload.alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=[clock],
    )
    trainer.workload, clock.trainer = workload, trainer
    trainer.use_liger_kernel = "chunked" in sys.argv[3:]
    trainer.train()
    turns.finish()


def _config(workload: Workload, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=workload.trl_rows,
        gradient_accumulation_steps=workload.rows // workload.trl_rows,
        num_generations=workload.completions_per_prompt,
        max_completion_length=workload.max_new_tokens,
        max_steps=len(workload.steps),
        learning_rate=workload.learning_rate,
        lr_scheduler_type=workload.schedule,
        loss_type="grpo",
        epsilon=0.2,
        beta=0.0,
        temperature=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16="bfloat16" in sys.argv[3:],
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=workload.seed,
    )


def _reward(workload: Workload, prompts: Sequence[Prompt]) -> Any:
    """The project's reward as TRL calls it, on completions as text."""

    def in_turn(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    def of_the_table(completions: list[str], index: list[int], **kwargs: Any) -> list[float]:
        assert workload.reward is not None
        groups = [
            Group(prompts[i], (Completion((), text, (), "stop"),))
            for i, text in zip(index, completions, strict=True)
        ]
        section = ScoreSection(rewards=[RewardSpec(name=workload.reward)])
        with Scorer(section, workload.max_new_tokens) as scorer:
            return [group.completions[0].reward or 0.0 for group in scorer.score(groups)]

    return in_turn if workload.reward is None else of_the_table
