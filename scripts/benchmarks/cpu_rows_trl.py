"""TRL's side of the workloads on rows: SFTTrainer and DPOTrainer as one would set them up on a CPU,
in float32 and without checkpointing, their loop untouched.

The rows are given as ids, in order: SFTTrainer takes them as they are, and of DPOTrainer the
tokenisation is overridden. A callback waits for the turn before each optimizer step and stops the
clock after it.
Arguments: workload.json folder
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from benchmarks.cpu_rows import BETA, Ids, RowsWorkload
from benchmarks.cpu_worker import Turns
from benchmarks.cpu_workloads import SEED
from reason_llm.files import read_object


class InOrderSFT(SFTTrainer):
    """SFTTrainer that takes the rows in order."""

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class InOrderDPO(DPOTrainer):
    """DPOTrainer that takes the rows in order and as ids."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Clock(TrainerCallback):
    """Takes turns, one optimizer step each."""

    def __init__(self, turns: Turns, workload: RowsWorkload) -> None:
        self.turns = turns
        self.workload = workload
        self.started = 0.0
        self.step = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the turn."""
        self.turns.wait()
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Say what the step took."""
        seconds = time.perf_counter() - self.started
        tokens = self.workload.tokens(self.step)
        self.step += 1
        self.turns.answer(
            {"sampling": 0.0, "learning": seconds, "total": seconds, "tokens": tokens}
        )


def main() -> None:
    """Take as many steps as the workload has."""
    turns = Turns()
    workload = RowsWorkload.from_json(read_object(Path(sys.argv[1])))
    units = [unit for step in workload.steps for unit in step]
    trainer = (_dpo if workload.is_paired else _sft)(workload, units)
    trainer.add_callback(Clock(turns, workload))
    trainer.train()
    turns.finish()


def _sft(workload: RowsWorkload, units: Sequence[Sequence[Ids]]) -> SFTTrainer:
    rows = [
        {
            "input_ids": [*prompt, *completion],
            "completion_mask": [0] * len(prompt) + [1] * len(completion),
        }
        for prompt, completion in units
    ]
    return InOrderSFT(
        model=workload.model,
        args=SFTConfig(completion_only_loss=True, **_options(workload)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(workload.model),
        peft_config=_lora(workload),
    )


def _dpo(workload: RowsWorkload, units: Sequence[Sequence[Ids]]) -> DPOTrainer:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [{name: list(ids) for name, ids in zip(names, unit, strict=True)} for unit in units]
    known = workload.stage == "dpo_known"
    return InOrderDPO(
        model=workload.model,
        args=DPOConfig(beta=BETA, precompute_ref_log_probs=known, **_options(workload)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(workload.model),
        peft_config=_lora(workload),
    )


def _lora(workload: RowsWorkload) -> LoraConfig:
    return LoraConfig(
        r=workload.rank,
        lora_alpha=workload.alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def _options(workload: RowsWorkload) -> dict[str, Any]:
    return {
        "output_dir": sys.argv[2],
        "per_device_train_batch_size": workload.trl_rows,
        "gradient_accumulation_steps": len(workload.steps[0]) // workload.trl_rows,
        "max_steps": len(workload.steps),
        "learning_rate": workload.learning_rate,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": SEED,
    }
