"""The work done by TRL's GRPOTrainer: alone (vLLM colocated, asleep while learning), and as Unsloth
runs it (its loader, kernels and Standby).

Arguments as TRL 1.14.2 (trl/trainer/grpo_config.py, trl/generation/vllm_generation.py) and Unsloth
2026.10.7 name them. Each gets what serves it best: as many rows in a micro-batch as ours holds,
TRL's chunked log-probs where liger-kernel is installed, and no importance-sampling correction,
which costs it a forward pass and us none.
"""

import importlib.util
import time
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import device, models, ours
from benchmarks.device import GIB
from benchmarks.work import TARGETS, Keep, Outcome, Work
from reason_llm.model import meta_model
from reason_llm.model.plan import Shape

RUNTIME_BYTES = int(1.5 * GIB)
"""CUDA's context, and what a trainer holds beside the model."""
USED_FRACTION = 0.93
"""Of the budget, that a peer is told of; the rest is fragmentation."""


def measure_trl(work: Work, keep: Keep) -> Outcome:
    """GRPOTrainer with vLLM colocated and sleep mode: a second copy of the base, merged into.

    Raises:
        RuntimeError: the two copies leave no room.
    """
    from peft import LoraConfig
    from transformers import AutoTokenizer, BitsAndBytesConfig
    from trl import GRPOConfig, GRPOTrainer

    quantization = None
    if work.kind == "nf4":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    adapter = LoraConfig(
        r=work.rank, lora_alpha=2 * work.rank, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    with TemporaryDirectory() as folder:
        chunked = importlib.util.find_spec("liger_kernel") is not None
        args = GRPOConfig(
            **_arguments(work, folder),
            model_init_kwargs={"dtype": "bfloat16"},
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=True,
            vllm_gpu_memory_utilization=_trl_utilisation(work),
            vllm_max_model_length=work.context,
            use_liger_kernel=chunked,
        )
        trainer = GRPOTrainer(
            model=work.model,
            reward_funcs=_rising,
            args=args,
            train_dataset=_data(work),
            processing_class=AutoTokenizer.from_pretrained(work.model, padding_side="left"),
            quantization_config=quantization,
            peft_config=adapter,
        )
        note = "chunked log-probs" if chunked else "full logits: no liger-kernel"
        return _run(work, trainer, keep, [note])


def measure_unsloth(work: Work, keep: Keep) -> Outcome:
    """Unsloth's documented GRPO: FastLanguageModel with fast_inference, Standby, its trainer."""
    from trl import GRPOConfig, GRPOTrainer  # patched: ``worker`` has imported unsloth before
    from unsloth import FastLanguageModel

    with TemporaryDirectory() as folder:
        model, tokenizer = FastLanguageModel.from_pretrained(
            model_name=work.model,
            max_seq_length=work.context,
            dtype=torch.bfloat16,
            load_in_4bit=work.kind == "nf4",
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
        args = GRPOConfig(**_arguments(work, folder))
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=_rising,
            args=args,
            train_dataset=_data(work),
            processing_class=tokenizer,
        )
        return _run(work, trainer, keep, [])


def _arguments(work: Work, folder: str) -> dict[str, Any]:
    """What both trainers are told: GRPO without KL, all rollouts in one optimizer step."""
    rows = _rows(work)
    return {
        "output_dir": folder,
        "max_steps": work.steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": work.rollouts // rows,
        "num_generations": work.completions,
        "max_completion_length": work.completion_tokens,
        "generation_kwargs": {"ignore_eos": True},
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "vllm_importance_sampling_correction": False,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "bf16": True,
        "gradient_checkpointing": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }


def _rows(work: Work) -> int:
    """Rows of a micro-batch: as many as ours holds, and a divisor of the step's rollouts; one where
    the longest context is sought."""
    if work.budget_gib is not None:
        return 1
    most = max(1, ours.plan_of(work).micro_batch_tokens // work.context)
    return max(rows for rows in range(1, most + 1) if work.rollouts % rows == 0)


def _trl_utilisation(work: Work) -> float:
    """The part of the GPU for vLLM's copy and its KV cache, while the learner's copy stays."""
    config = ours.config_of(work, "native").model
    shape = Shape.of(meta_model(config))
    learner = shape.weight_bytes(2, config.quantize, under_vllm=False) + shape.adapter * 16
    left = USED_FRACTION * _budget_bytes(work) - learner - RUNTIME_BYTES
    if left <= 0:
        raise RuntimeError(f"its learner alone takes {learner / GIB:.1f} GiB")
    return min(0.9, left / device.total_bytes())


def _unsloth_utilisation(work: Work) -> float:
    """The part of what is free for the weights and the KV cache, which sleeps while learning."""
    left = USED_FRACTION * _budget_bytes(work) - RUNTIME_BYTES
    return min(0.95, left / device.free_bytes())


def _budget_bytes(work: Work) -> float:
    total = device.total_bytes()
    return total if work.budget_gib is None else min(total, work.budget_gib * GIB)


def _data(work: Work) -> Any:
    from datasets import Dataset

    texts = models.prompt_texts(work.model, work.prompts * work.steps, work.prompt_tokens, 0)
    return Dataset.from_dict({"prompt": texts})


def _rising(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within each group."""
    return [float(index) for index in range(len(completions))]


def _run(work: Work, trainer: Any, keep: Keep, notes: list[str]) -> Outcome:
    """Train, and time every step and the sampling in it: waking, syncing and going to sleep are
    within, because the trainer does them there."""
    from transformers import TrainerCallback

    outcome = Outcome(notes=notes)
    steps: list[float] = []
    sampled: list[float] = []
    tokens, passed = work.rollouts * work.completion_tokens, work.rollouts * work.context

    def tell() -> None:
        pairs = list(zip(steps, sampled, strict=True))[int(work.warmup) :]
        outcome.values["step_seconds"] = [whole for whole, _ in pairs]
        outcome.values["sampling_tokens_per_second"] = [tokens / part for _, part in pairs]
        outcome.values["learning_tokens_per_second"] = [passed / (w - part) for w, part in pairs]
        keep(outcome)

    class Timer(TrainerCallback):
        """Seconds of each optimizer step with the sampling before it."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """The batch is drawn, nothing is sampled yet."""
            device.settle()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """The optimizer has stepped."""
            device.settle()
            steps.append(time.perf_counter() - self.started)
            tell()

    generate_single_turn = trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        device.settle()
        started = time.perf_counter()
        result = generate_single_turn(*args, **kwargs)
        device.settle()
        sampled.append(time.perf_counter() - started)
        found = sum(len(ids) for ids in result[0])
        if found != tokens:
            raise RuntimeError(f"it sampled {found} tokens in a step, and the work is {tokens}")
        return result

    trainer._generate_single_turn = timed
    trainer.add_callback(Timer())
    trainer.train()
    return outcome
