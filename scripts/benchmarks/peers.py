"""TRL's GRPOTrainer as one would set it up, and as Unsloth runs it (its loader, kernels
and Standby).

Their own loop runs untouched; a callback waits for the turn before each optimizer step and stops
the clock after it, so loading data and logging are not counted. Two methods are wrapped to time
generation and scoring. On a CPU, in float32 and without checkpointing, generation gets a logits
processor that forbids the end token before a row's length and forces it there; where nothing is to
be sampled, the given ids are returned in its place. On a GPU vLLM is colocated, and asleep while
learning; waking, syncing and going to sleep are within sampling, because the trainer does them
there.

Each gets what serves it best: TRL's chunked log-probs where liger-kernel is installed, and no
importance-sampling correction, which costs it a forward pass and us none. Arguments as TRL 1.14.2
(trl/trainer/grpo_config.py, trl/generation/vllm_generation.py) and Unsloth 2026.10.7 name them.
"""

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback

from benchmarks import device, ours
from benchmarks.device import GIB
from benchmarks.sides import Turns
from benchmarks.work import TARGETS, Work, completions, lengths, prompts

RUNTIME_BYTES = int(1.5 * GIB)
"""CUDA's context, and the trainer's memory without the model."""
USED_FRACTION = 0.93
"""Fraction of the budget that a peer may use; the rest is fragmentation."""


def measure_trl(work: Work, turns: Turns) -> None:
    """TRL's GRPOTrainer; on a GPU it has a second copy of the base.

    TRL has one memory saver for the log-probs, which comes with ``use_liger_kernel`` and therefore
    needs Triton; where it is not installed, the trainer's switch is set after its construction,
    which runs the same chunked log-probs without Liger's kernels.
    """
    from peft import LoraConfig

    has_liger = importlib.util.find_spec("liger_kernel") is not None
    chunked = has_liger if work.is_chunked is None else work.is_chunked
    turns.notes = [f"{_rows(work)} rows in a pass"]
    with TemporaryDirectory() as folder:
        arguments = _arguments(work, folder)
        more: dict[str, Any] = {
            "model": work.model,
            "processing_class": AutoTokenizer.from_pretrained(work.model, padding_side="left"),
            "peft_config": LoraConfig(
                r=work.rank,
                lora_alpha=2 * work.rank,
                target_modules=TARGETS,
                task_type="CAUSAL_LM",
            ),
        }
        turns.notes.append("chunked log-probs" if chunked else "full logits")
        if work.engine == "vllm":
            arguments |= _vllm_arguments(work) | {"use_liger_kernel": chunked}
        trainer = _grpo(work, arguments, more)
        trainer.use_liger_kernel = chunked  # chunks the log-probs also where Liger is missing
        _run(work, trainer, turns)


def measure_unsloth(work: Work, turns: Turns) -> None:
    """Unsloth's documented GRPO: FastLanguageModel with fast_inference, Standby, its trainer."""
    from unsloth import FastLanguageModel  # ``sides`` has imported it before all that it patches

    with TemporaryDirectory() as folder:
        model, tokenizer = FastLanguageModel.from_pretrained(
            model_name=work.model,
            max_seq_length=work.context,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            fast_inference=True,
            max_lora_rank=work.rank,
            gpu_memory_utilization=_unsloth_utilisation(work),
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=work.rank,
            target_modules=TARGETS,
            lora_alpha=2 * work.rank,
            use_gradient_checkpointing="unsloth",
            random_state=0,
        )
        arguments = _grpo_arguments(work) | _arguments(work, folder)
        trainer = _grpo(work, arguments, {"model": model, "processing_class": tokenizer})
        _run(work, trainer, turns)


def _arguments(work: Work, folder: str) -> dict[str, Any]:
    """Return the common trainer arguments: all rows of a step in one optimizer step."""
    rows, is_gpu = _rows(work), work.engine == "vllm"
    more = {} if is_gpu else {"use_cpu": True, "dataloader_pin_memory": False}
    return more | {
        "output_dir": folder,
        "max_steps": work.steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": work.rollouts // rows,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "bf16": work.kind != "float32",
        "gradient_checkpointing": is_gpu,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": work.seed,
    }


def _grpo_arguments(work: Work) -> dict[str, Any]:
    """GRPO without KL."""
    return {
        "num_generations": work.completions,
        "max_completion_length": work.completion_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "shuffle_dataset": False,
        "generation_kwargs": {"ignore_eos": True} if work.engine == "vllm" else None,
        "vllm_importance_sampling_correction": False,
    }


def _vllm_arguments(work: Work) -> dict[str, Any]:
    """vLLM colocated, with sleep mode: a second copy of the base, merged into."""
    return {
        "model_init_kwargs": {"dtype": "bfloat16"},
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": _give_kv_cache(work),
        "vllm_max_model_length": work.context,
    }


def _give_kv_cache(work: Work) -> float:
    """Have TRL's vLLM take a KV cache as large as ours, which TRL has no argument for: then it does
    not measure the memory that is free, and other processes may use the GPU as it loads.

    Returns:
        The fraction of the GPU's memory that is left to vLLM's check of it.
    """
    from trl.generation import vllm_generation

    engine = ours.plan_of(work).engine
    assert engine is not None
    more = {"kv_cache_memory_bytes": engine.kv_cache_bytes}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **more)
    return 0.01


def _grpo(work: Work, arguments: dict[str, Any], more: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        """Return 0 and 1 in turn."""
        return [float(i % 2) for i in range(len(completions))]

    texts = [prompt.text for step in range(work.steps) for prompt in prompts(work, step)]
    rows = [{"prompt": text} for text in texts]
    return GRPOTrainer(
        args=GRPOConfig(**(_grpo_arguments(work) | arguments)),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        **more,
    )


def _rows(work: Work) -> int:
    """Rows of a micro-batch: as many as ours holds, and a divisor of the step's rollouts."""
    if work.trl_rows is not None:
        return work.trl_rows
    max_rows = max(1, ours.plan_of(work).micro_batch_tokens // work.context)
    return max(rows for rows in range(1, max_rows + 1) if work.rollouts % rows == 0)


def _unsloth_utilisation(work: Work) -> float:
    """The part of what is free for the weights and the KV cache, which sleeps while learning."""
    total = device.total_bytes()
    budget = total if work.budget_gib is None else min(total, work.budget_gib * GIB)
    return min(0.95, (USED_FRACTION * budget - RUNTIME_BYTES) / device.free_bytes())


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


class _Clock(TrainerCallback):
    """Takes turns, one optimizer step each; where it samples, generation and scoring are timed."""

    def __init__(self, work: Work, trainer: Any, turns: Turns) -> None:
        self.work = work
        self.trainer = trainer
        self.turns = turns
        self.step = 0
        self.sampling = self.before_learning = 0.0
        self.tokens = 0
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self._timed_generation
        self._score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._timed_scoring

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the turn: nothing is sampled yet."""
        self.turns.wait()
        device.settle()
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Say what the step took."""
        device.settle()
        work, total = self.work, time.perf_counter() - self.started
        values = {"step_seconds": total, "learning_seconds": total - self.before_learning}
        if work.is_random:
            values["step_seconds"] = values["learning_seconds"]
        else:
            values["sampling_seconds"] = self.sampling
            values["sampling_tokens_per_second"] = self.tokens / self.sampling
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts(work, self.step))
        passed = prompt_tokens * work.completions + self.tokens
        values["learning_tokens_per_second"] = passed / values["learning_seconds"]
        values["tokens"] = self.tokens
        self.step += 1
        self.turns.answer(values)

    def _timed_scoring(self, inputs: Any) -> Any:
        return self._timed("before_learning", self._score, inputs)

    def _timed_generation(self, prompt_ids: list[list[int]], *args: Any, **named: Any) -> Any:
        work = self.work
        expected = [list(prompt.token_ids) for prompt in prompts(work, self.step)]
        if prompt_ids[:: work.completions] != expected:
            raise RuntimeError("it reads other prompts")
        exact = lengths(work)
        if work.is_random:
            result = ([list(ids) for ids in completions(work, self.step)], None)
        else:
            if work.engine == "transformers":
                self._force(exact)
            result = self._timed("sampling", self._generate, prompt_ids, *args, **named)
        num_tokens = tuple(len(ids) for ids in result[0])
        if num_tokens != exact:
            raise RuntimeError(f"completions of {num_tokens} tokens, not of {exact}")
        self.tokens = sum(num_tokens)
        return result

    def _timed(self, name: str, act: Callable[..., Any], *args: Any, **named: Any) -> Any:
        device.settle()
        started = time.perf_counter()
        result = act(*args, **named)
        device.settle()
        setattr(self, name, time.perf_counter() - started)
        return result

    def _force(self, exact: Sequence[int]) -> None:
        end = ForcedLengths(exact, self.trainer.processing_class.eos_token_id)
        base = self.trainer.model.get_base_model()
        processors = LogitsProcessorList([end])
        base.generate = functools.partial(type(base).generate, base, logits_processor=processors)


def _run(work: Work, trainer: Any, turns: Turns) -> None:
    trainer.add_callback(_Clock(work, trainer, turns))
    trainer.train()
