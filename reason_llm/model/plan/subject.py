"""A model before a weight is read: tokenizer, engine, shapes, context, memory."""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from reason_llm.config import Config
from reason_llm.errors import ConfigError
from reason_llm.model import adapters, base
from reason_llm.model.plan import backends, memory
from reason_llm.model.plan.machine import Machine
from reason_llm.model.plan.memory import Plan
from reason_llm.model.plan.shape import Shape
from reason_llm.model.plan.unread import outside_models
from reason_llm.model.sizes import AttachmentSizes
from reason_llm.model.tokenizer import end_token_ids, load_tokenizer, quiet_libraries


@dataclass(frozen=True, slots=True)
class Subject:
    """A config's model on this machine."""

    config: Config
    """With engine, backend and packing decided."""
    why: list[str]
    """A line for each of these decisions; the last one is of learning."""
    tokenizer: PreTrainedTokenizerBase
    policy: PeftModel
    """Model and adapter without storage."""
    context_tokens: int
    """Longest prompt plus completion."""
    vocabulary: int
    """Number of token ids in the model."""
    device: torch.device

    def plan(
        self,
        longest_prompt: int,
        learns: bool = True,
        longest_row: int = 0,
        attachments: AttachmentSizes | None = None,
        reads: bool = True,
    ) -> Plan:
        """The memory plan on this machine; arguments as ``memory.plan``'s, and whether the readers
        read what is sampled."""
        machine = Machine.here(self.config, self.device.type)
        outside = [*outside_models(self.config, machine)] if reads else []
        shape = Shape.of(self.policy, self.config.model.attention)
        return memory.plan(
            self.config, shape, machine, self.context_tokens, longest_prompt,
            learns=learns, longest_row=longest_row, outside=outside, attachments=attachments,
        )  # fmt: skip


def look_at(config: Config) -> Subject:
    """The config's model, its files checked and its weights unread. Raises ModelError: tokenizer,
    config or the weights' headers cannot be used; ConfigError: an option contradicts the model or
    the machine."""
    quiet_libraries()
    device, path, trusted = base.default_device(), config.model.path, config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trusted)
    end_token_ids(path, tokenizer)  # which sampling needs
    described = base.read_config(path, trusted)
    config, why = backends.choose(config, described, device)
    policy, context = base.check_model(config.model), base.context_limit(config.model)
    backends.check_fold(config, policy)
    vocabulary = described.get_text_config(decoder=True).vocab_size
    return Subject(config, why, tokenizer, policy, context, vocabulary, device)


def with_start(config: Config, start: Path) -> Config:
    """The config with the adapter section of the adapter in ``start``, which the run begins from.
    Raises ModelError: it cannot be read; ConfigError: model.adapter says something else."""
    asked = config.model.adapter
    section = adapters.section_of(start).with_options({"dropout": asked.dropout})
    for name in ("rank", "alpha", "rslora", "targets"):
        here, there = getattr(asked, name), getattr(section, name)
        if name in asked.model_fields_set and here not in (there, "all-linear"):
            raise ConfigError(
                f"model.adapter.{name}={here} contradicts model.start={config.model.start}, whose "
                f"{name} is {there}; leave it out, and the run takes the adapter's"
            )
    return config.with_options({"model.adapter": section})
