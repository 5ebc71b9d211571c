"""``benchmark.py count CONFIG``: what a step of learning asks of a card, counted without one.

The learner's own code runs a micro-batch on a narrow model of the config's family, and every
operation is counted as the card would see it: one launch each, FlashAttention as one forward and
one backward. A model with one layer more tells what a layer costs, which does not depend on its
width. Beside it PEFT's own layers under the same learner, and TRL's loss over Transformers' model.
The least seconds are those of ``plan.bound``.

Not here: what vLLM launches, which CUDA graphs hide, and the time of any kernel.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import save_tokenizer
from reason_llm.config import Config
from reason_llm.files import read_object
from reason_llm.model import (
    Datum,
    Model,
    attention,
    collate,
    lay_out,
    load_tokenizer,
    policy_logprobs,
)
from reason_llm.model.plan import Plan, plan_only
from reason_llm.model.plan.bound import CARDS
from reason_llm.model.plan.shipped import SHAPES, write_config

LAUNCH_SECONDS = 5e-6
"""What a launch costs the processor, about; a card that is faster than that waits."""
VOCABULARY = 512
NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
          "num_key_value_heads": 2, "vocab_size": VOCABULARY, "pad_token_id": 510,
          "eos_token_id": 511, "bos_token_id": None}  # fmt: skip
ROWS, PROMPT, NEW = 4, 16, 24
SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}
"""For these the processor waits until the card is done."""
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach",
             "_has_compatible_shallow_copy_type", "set_", "resize_"}  # fmt: skip


@dataclass(slots=True)
class Counts:
    """Of one micro-batch, forward and backward."""

    launches: int = 0
    syncs: int = 0

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(self.launches - other.launches, self.syncs - other.syncs)


class Counter(TorchDispatchMode):
    """Counts operations that a card would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        is_view = bool(returns) and all(
            each.alias_info is not None and not each.alias_info.is_write for each in returns
        )
        tensors = [each for arg in args if isinstance(arg, list | tuple) for each in arg]
        by_mask = name == "index" and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in tensors
        )
        self.found.syncs += name in SYNCS or by_mask
        self.found.launches += not (is_view or name in NO_LAUNCH or name in SYNCS)
        return func(*args, **(kwargs or {}))


class _Flash(torch.autograd.Function):
    """Stands for the card's attention: a launch each way, and no numbers."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return query.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value = ctx.saved_tensors
        gradients: Tensor = gradient.new_zeros(query.numel() + key.numel() + value.numel())
        parts = gradients.split([query.numel(), key.numel(), value.numel()])
        return tuple(part.view_as(x) for part, x in zip(parts, (query, key, value), strict=True))


def _attend(
    query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, segments: Any, *rest: Any
) -> Tensor:
    """``attention.attend`` as on a card, whose operator is ``_Flash``."""
    if (places := segments.keys) is not None:
        key_1KND, value_1KND = (attention._gathered(x, places) for x in (key_1KND, value_1KND))
    query_NHD, key_MKD, value_MKD = (
        x[0].transpose(0, 1).to(value_1KND.dtype) for x in (query_1HND, key_1KND, value_1KND)
    )
    attended_NHD: Tensor = _Flash.apply(query_NHD, key_MKD, value_MKD)
    return attended_NHD[None]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    attended: Tensor = _Flash.apply(query, key, value)
    return attended


def counted(config: Config, system: str, layers: int) -> Counts:
    """A micro-batch of ``ROWS`` rollouts of one prompt: learned by ours, by ours with PEFT's own
    layers ("peft"), or by TRL's loss over Transformers' model ("trl")."""
    with TemporaryDirectory() as folder, _narrow(config, layers, Path(folder)) as model:
        rows = [
            Datum.of(range(3, 3 + PROMPT), range(40 + i, 40 + i + NEW)).with_trained(
                "advantages", torch.ones(NEW)
            )
            for i in range(ROWS)
        ]
        counter = Counter()
        model.policy.train()
        for parameter in model.parameters_of("policy"):  # as from the second micro-batch on
            parameter.grad = torch.zeros_like(parameter)
        if config.train.gradient_checkpointing:
            model.policy.gradient_checkpointing_enable({"use_reentrant": False})
        if system == "trl":
            _of_trl(model, rows, counter)
            return counter.found
        joined = model.fused_adapters() if system == "ours" else nullcontext()
        ids_BT, mask_BT = collate(rows, model.device)
        laid = lay_out(rows, model.device)
        with patch.object(attention, "attend", _attend), joined, counter:
            logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0, layout=laid)
            (logprobs_BT * mask_BT).sum().backward()
        return counter.found


def _of_trl(model: Model, rows: Sequence[Datum], counter: Counter) -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    ids_BT, mask_BT = collate(rows, model.device)
    with (
        patch.object(torch.nn.functional, "scaled_dot_product_attention", _sdpa),
        torch.autocast("cpu", torch.bfloat16),
        counter,
    ):
        logits_BTV = model.policy(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        logprobs_BT = selective_log_softmax(logits_BTV, ids_BT[:, 1:])
        with torch.no_grad():
            entropy_from_logits(logits_BTV)
        (logprobs_BT * mask_BT[:, 1:]).sum().backward()


@contextmanager
def _narrow(config: Config, layers: int, folder: Path) -> Iterator[Model]:
    """The config's model with few numbers in so many layers, in the config's types."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(config.model.path)
    if config.model.path in SHAPES:
        write_config(config.model.path, folder)
        path = folder
    wide = read_object(path / "config.json")
    narrow = wide | NARROW | {"num_hidden_layers": layers, "dtype": "bfloat16"}
    narrow.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(narrow))
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    made.save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    section = config.model.with_options({"path": str(folder), "dtype": "bfloat16", "start": None})
    with Model(section, load_tokenizer(str(folder)), 0) as model:
        yield model


def table(config: Config, say: Callable[[str], None]) -> None:
    """What one step of the config costs, as lines of Markdown."""
    plan: Plan = plan_only(config)
    depth = _depth(config)
    say("| a micro-batch of learning | launches a layer | beside the layers | waits for the card |")
    say("|---|---|---|---|")
    of_layer: dict[str, int] = {}
    for system, name in (("ours", "ours"), ("peft", "PEFT's own layers"), ("trl", "TRL's loss")):
        two, three = counted(config, system, 2), counted(config, system, 3)
        layer = three - two
        rest = two.launches - 2 * layer.launches
        of_layer[system] = layer.launches
        say(f"| {name} | {layer.launches} | {rest} | {two.syncs} |")
        if system == "ours":
            total = depth * layer.launches + rest
    say("")
    for phase in plan.phases:
        least = ", ".join(
            f"{card.name} {phase.seconds(card):,.1f} s ({phase.limit(card)})" for card in CARDS
        )
        say(f"{phase.name}: {phase.flops / 1e15:,.2f} PFLOP, "
            f"{phase.read_bytes / 2**30:,.0f} GiB read; at least {least}")  # fmt: skip
        if phase.name == "learning":
            batches = -(-phase.tokens // plan.micro_batch_tokens)
            seconds = batches * total * LAUNCH_SECONDS
            share = seconds / min(phase.seconds(card) for card in CARDS)
            say(f"learning: {batches:,.0f} micro-batches of {total:,} launches; at "
                f"{1e6 * LAUNCH_SECONDS:.0f} us each {seconds:.1f} s, {share:.1%} of the fastest "
                "card's least")  # fmt: skip


def _depth(config: Config) -> int:
    from reason_llm.model import meta_model

    with TemporaryDirectory() as folder:
        if config.model.path in SHAPES:
            write_config(config.model.path, Path(folder))
            config = config.with_options({"model.path": folder})
        return int(meta_model(config.model).config.num_hidden_layers)
