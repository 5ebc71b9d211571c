"""What options of TRL, Unsloth and verl are called here, for whoever types their names."""

from collections.abc import Iterable
from dataclasses import dataclass

TRL, UNSLOTH, VERL = "TRL", "Unsloth", "verl"


@dataclass(frozen=True, slots=True)
class Equivalent:
    """An option of another trainer, and what it is here."""

    whose: str
    options: tuple[str, ...]
    """Ours; none where there is nothing to set."""
    note: str = ""
    """How the values differ, or why there is nothing to set."""


_BATCH = "sizes of batches in memory are derived, and never change the gradient"
_PROMPTS = (
    "prompts: per_device_train_batch_size times gradient_accumulation_steps times GPUs, divided "
    "by num_generations"
)
_MEMORY = "leave it out; memory.budget_gib is all memory of both phases, and vLLM's part is derived"
_PRECISION = "auto is bfloat16 on a GPU"
_CORRECTION = "TRL's default is sequence_mask with a cap of 3, ours token_truncate with 2"
_ONE_GPU = "a model lies on one GPU; run.replicas takes more"
_NO_SERVER = "vLLM runs in this process, over the same weights"

EQUIVALENTS: dict[str, Equivalent] = {
    "beta": Equivalent(
        TRL,
        ("algorithm.kl_coefficient",),
        "with algorithm.kl=k3; of pairs preference.beta; TRL's default 0 is algorithm.kl=none",
    ),
    "lr": Equivalent(VERL, ("train.learning_rate",)),
    "max_steps": Equivalent(TRL, ("run.steps",)),
    "num_train_epochs": Equivalent(TRL, ("run.epochs",)),
    "num_iterations": Equivalent(TRL, ("train.epochs",)),
    "num_generations": Equivalent(TRL, ("sample.completions_per_prompt",)),
    "max_completion_length": Equivalent(TRL, ("sample.max_new_tokens",)),
    "stop_strings": Equivalent(TRL, ("sample.stop",)),
    "max_prompt_length": Equivalent(TRL, ("data.max_prompt_tokens",), "longer rows are dropped"),
    "max_length": Equivalent(TRL, ("data.max_tokens",), "longer rows are dropped, not cut"),
    "max_seq_length": Equivalent(UNSLOTH, ("model.context_tokens",)),
    "per_device_train_batch_size": Equivalent(
        TRL, ("sample.prompts_per_step",), f"{_PROMPTS}; train.micro_batch_tokens can stay auto"
    ),
    "gradient_accumulation_steps": Equivalent(TRL, ("sample.prompts_per_step",), _PROMPTS),
    "generation_batch_size": Equivalent(
        TRL, ("sample.prompts_per_step",), "prompts: divided by num_generations"
    ),
    "steps_per_generation": Equivalent(
        TRL, ("train.optimizer_steps",), "divided by gradient_accumulation_steps"
    ),
    "per_device_eval_batch_size": Equivalent(TRL, (), _BATCH),
    "warmup_ratio": Equivalent(
        TRL,
        ("train.warmup_steps",),
        "optimizer steps: the ratio times run.steps, train.epochs and train.optimizer_steps",
    ),
    "lr_scheduler_type": Equivalent(
        TRL, ("train.schedule",), "TRL's default is linear, ours constant"
    ),
    "optim": Equivalent(TRL, ("train.optimizer",)),
    "output_dir": Equivalent(TRL, ("run.directory", "run.name")),
    "run_name": Equivalent(TRL, ("run.name",)),
    "report_to": Equivalent(TRL, ("log.trackers",)),
    "logging_steps": Equivalent(TRL, (), "every step is logged"),
    "save_steps": Equivalent(TRL, ("run.save_every",)),
    "save_total_limit": Equivalent(TRL, ("run.keep_checkpoints",)),
    "eval_steps": Equivalent(TRL, ("eval.every",)),
    "resume_from_checkpoint": Equivalent(TRL, ("run.resume",), "the same command resumes anyway"),
    "epsilon": Equivalent(TRL, ("algorithm.clip_low", "algorithm.clip_high")),
    "epsilon_high": Equivalent(TRL, ("algorithm.clip_high",)),
    "loss_type": Equivalent(
        TRL,
        ("algorithm.name",),
        "dapo (TRL's default) and bnpo: bnpo; grpo: grpo with algorithm.kl=none; dr_grpo: grpo "
        "with algorithm.kl=none and algorithm.aggregation=constant; here dapo is the whole paper, "
        "with dynamic sampling",
    ),
    "scale_rewards": Equivalent(TRL, ("algorithm.scale",)),
    "reward_weights": Equivalent(TRL, ("score.rewards",), "a weight in each of them"),
    "reward_funcs": Equivalent(TRL, ("score.rewards",), "[{custom: file.py:function}]"),
    "importance_sampling_level": Equivalent(TRL, ("algorithm.ratio",)),
    "multi_objective_aggregation": Equivalent(
        TRL,
        ("algorithm.normalization",),
        "sum_then_normalize: total; normalize_then_sum: per_reward with algorithm.scale=whiten",
    ),
    "mask_truncated_completions": Equivalent(TRL, ("algorithm.truncated",), "leave_out"),
    "top_entropy_quantile": Equivalent(TRL, ("algorithm.top_entropy_fraction",)),
    "use_vllm": Equivalent(TRL, ("sample.engine",), "auto takes it where it is installed"),
    "vllm_mode": Equivalent(TRL, (), _NO_SERVER),
    "vllm_gpu_memory_utilization": Equivalent(TRL, (), _MEMORY),
    "gpu_memory_utilization": Equivalent(UNSLOTH, (), _MEMORY),
    "vllm_tensor_parallel_size": Equivalent(TRL, (), _ONE_GPU),
    "vllm_importance_sampling_correction": Equivalent(
        TRL, ("algorithm.correction",), "False: none"
    ),
    "vllm_importance_sampling_mode": Equivalent(TRL, ("algorithm.correction",), _CORRECTION),
    "vllm_importance_sampling_clip_max": Equivalent(
        TRL, ("algorithm.correction_cap",), _CORRECTION
    ),
    "chat_template_kwargs": Equivalent(TRL, ("data.template_arguments",)),
    "bf16": Equivalent(TRL, ("model.dtype",), _PRECISION),
    "fp16": Equivalent(TRL, ("model.dtype",), "float16 is not offered; auto is bfloat16 on a GPU"),
    "torch_dtype": Equivalent(TRL, ("model.dtype",), _PRECISION),
    "model_name_or_path": Equivalent(TRL, ("model.path",)),
    "model_name": Equivalent(UNSLOTH, ("model.path",)),
    "dataset_name": Equivalent(TRL, ("data.train",)),
    "dataset_config": Equivalent(TRL, ("data.train",), "part of it: owner/name:subset"),
    "dataset_train_split": Equivalent(TRL, ("data.split",)),
    "lora_r": Equivalent(TRL, ("model.adapter.rank",)),
    "lora_rank": Equivalent(VERL, ("model.adapter.rank",)),
    "max_lora_rank": Equivalent(UNSLOTH, ("model.adapter.rank",)),
    "lora_alpha": Equivalent(TRL, ("model.adapter.alpha",)),
    "lora_dropout": Equivalent(TRL, ("model.adapter.dropout",)),
    "target_modules": Equivalent(UNSLOTH, ("model.adapter.targets",)),
    "lora_target_modules": Equivalent(TRL, ("model.adapter.targets",)),
    "load_in_4bit": Equivalent(UNSLOTH, ("model.quantize",), "nf4"),
    "use_gradient_checkpointing": Equivalent(UNSLOTH, ("train.gradient_checkpointing",)),
    "fast_inference": Equivalent(UNSLOTH, ("sample.engine",), "vllm"),
    "rollout.n": Equivalent(VERL, ("sample.completions_per_prompt",)),
    "train_batch_size": Equivalent(VERL, ("sample.prompts_per_step",)),
    "ppo_mini_batch_size": Equivalent(VERL, ("train.optimizer_steps",), "steps, not their size"),
    "ppo_micro_batch_size_per_gpu": Equivalent(VERL, ("train.micro_batch_tokens",), _BATCH),
    "ppo_epochs": Equivalent(VERL, ("train.epochs",)),
    "max_response_length": Equivalent(VERL, ("sample.max_new_tokens",)),
    "train_files": Equivalent(VERL, ("data.train",)),
    "val_files": Equivalent(VERL, ("data.eval",)),
    "adv_estimator": Equivalent(VERL, ("algorithm.name",), "grpo, ppo for gae, rloo, ..."),
    "kl_loss_coef": Equivalent(VERL, ("algorithm.kl_coefficient",)),
    "kl_loss_type": Equivalent(VERL, ("algorithm.kl",), "k3 for low_var_kl"),
    "kl_coef": Equivalent(
        VERL, ("algorithm.kl_coefficient",), "with algorithm.kl=k1 and kl_place=token_reward"
    ),
    "clip_ratio": Equivalent(VERL, ("algorithm.clip_low", "algorithm.clip_high")),
    "clip_ratio_low": Equivalent(VERL, ("algorithm.clip_low",)),
    "clip_ratio_high": Equivalent(VERL, ("algorithm.clip_high",)),
    "loss_agg_mode": Equivalent(VERL, ("algorithm.aggregation",)),
    "entropy_coeff": Equivalent(VERL, ("algorithm.entropy_coefficient",)),
    "total_training_steps": Equivalent(VERL, ("run.steps",)),
    "total_epochs": Equivalent(VERL, ("run.epochs",)),
    "test_freq": Equivalent(VERL, ("eval.every",)),
    "save_freq": Equivalent(VERL, ("run.save_every",)),
    "project_name": Equivalent(VERL, ("log.project",)),
    "experiment_name": Equivalent(VERL, ("run.name",)),
    "n_gpus_per_node": Equivalent(VERL, ("run.replicas",)),
    "tensor_model_parallel_size": Equivalent(VERL, (), _ONE_GPU),
}
"""By the option's name, or by the last parts of it."""


def equivalent(key: str) -> tuple[str, Equivalent] | None:
    """The name of another trainer's option that ``key`` ends in, and what it is here."""
    parts = key.replace("-", "_").split(".")
    for i in range(len(parts)):
        if found := EQUIVALENTS.get(name := ".".join(parts[i:])):
            return name, found
    return None


def told(key: str, dashes: str, known: Iterable[str]) -> str | None:
    """``lr of verl is --train.learning_rate here``; None for no such name.

    Args:
        known: our options that there are.
    """
    found = equivalent(key)
    if found is None:
        return None
    name, same = found
    options = " and ".join(f"{dashes}{each}" for each in same.options if each in set(known))
    if not options:
        return f"{name} of {same.whose} is not needed here: {same.note}"
    note = f" ({same.note})" if same.note else ""
    return f"{name} of {same.whose} is {options} here{note}"
