"""docs/gpu.md says what the plan says."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ROOT
from marks import most_are_long
from reason_llm.config import Config
from reason_llm.errors import ConfigError
from reason_llm.model.base import context_limit, meta_model
from reason_llm.model.plan import memory
from reason_llm.model.plan.machine import GIB, Machine
from reason_llm.model.plan.memory import Plan
from reason_llm.model.plan.shape import Shape
from shapes import PARAMETERS, write_config

CARDS = (12, 16, 24, 48, 80)
AT_ONCE = 8
THOUSAND = 1024
COUNTED = [name for name in PARAMETERS if "2.5-" in name or "-8B" in name]
COUNTED.remove("Qwen/Qwen2.5-Coder-7B-Instruct")  # which has the shape of Qwen2.5-7B
NEW = ["Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3.5-4B", "google/gemma-4-E4B-it",
       "model/gpt-oss-20b"]  # fmt: skip
"""One of each family; those of Qwen3.5-9B and Gemma 4 12B are made by the same calls."""


def longest(config: Config, shape: Shape, card: int, limit: int) -> int:
    """Thousands of tokens of the longest context of which ``AT_ONCE`` are decoded together."""

    def fits(thousands: int) -> bool:
        tokens = thousands * THOUSAND
        model = config.model.model_copy(update={"context_tokens": tokens})
        sample = config.sample.model_copy(update={"max_new_tokens": tokens // 2})
        tried = config.model_copy(update={"model": model, "sample": sample})
        try:
            plan = memory.plan(tried, shape, Machine("cuda", card * GIB, 64 * GIB), limit)
        except ConfigError:
            return False
        return plan.full_sequences >= AT_ONCE

    least, most = 0, limit // THOUSAND
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


@pytest.mark.parametrize(
    "name",
    most_are_long([*COUNTED, *NEW], [n for n in COUNTED if "14B" not in n and "32B" not in n]),
)
def test_what_fits_on_a_card_is_in_the_table(name: str, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"path": write_config(name, tmp_path), "dtype": "bfloat16"},
            "data": {"train": "some.jsonl"},
            "sample": {"engine": "vllm"},
        }
    )
    shape, limit = Shape.of(meta_model(config.model)), context_limit(config.model)
    page = (ROOT / "docs" / "gpu.md").read_text()
    for quantize, weights in (("none", "bfloat16"), ("nf4", "NF4")):
        if quantize == "nf4" and "gpt-oss" in name:  # the experts of a mixture have no NF4
            continue
        model = config.model.model_copy(update={"quantize": quantize})
        found = [
            longest(config.model_copy(update={"model": model}), shape, card, limit)
            for card in CARDS
        ]
        full = limit // THOUSAND
        cells = ("–" if n == 0 else f"**{n}**" if n == full else str(n) for n in found)
        short = name.partition("/")[2].removesuffix("-Instruct")
        row = f"| {short} | {weights} | {' | '.join(cells)} |"
        assert row in page, row


def test_what_an_option_costs_is_in_the_table(tmp_path: Path) -> None:
    path = write_config("Qwen/Qwen2.5-7B-Instruct", tmp_path)
    shapes: dict[int, Shape] = {}  # by the adapter's rank

    def planned(**options: Any) -> tuple[dict[str, float], Plan]:
        """GiB of each line in the phase where it is larger; the plan."""
        tree = yaml.safe_load((ROOT / "configs" / "gsm8k_qwen2.5-7b_24gb.yaml").read_text())
        tree["model"]["path"] = path
        for key, value in options.items():
            section, _, leaf = key.partition("__")
            tree[section] = tree.get(section, {}) | {leaf: value}
        config = Config.model_validate(tree)
        rank = config.model.adapter.rank
        if rank not in shapes:
            shapes[rank] = Shape.of(meta_model(config.model))
        shape = shapes[rank]
        plan = memory.plan(config, shape, Machine("cuda", 24 * GIB, 64 * GIB), 32768)
        sizes = {each.name: max(each.sampling, each.learning) / GIB for each in plan.lines}
        return sizes | {"base": sizes[plan.lines[0].name]}, plan

    def of_the_adapter(sizes: dict[str, float], rank: int) -> float:
        names = (f"adapter, rank {rank}", "optimizer state", "vLLM's adapter slot", "gradients")
        return sum(sizes[name] for name in names)

    plain, plan = planned()
    full, _ = planned(model__quantize="none")
    kept, long = planned(train__gradient_checkpointing=False)
    offloaded, away = planned(train__gradient_checkpointing="offload")
    small, _ = planned(train__micro_batch_tokens=4096)
    eight, _ = planned(train__optimizer="adamw_8bit")
    low, _ = planned(model__adapter={"rank": 8})
    high, _ = planned(model__adapter={"rank": 128})
    _, bare = planned(sample__engine="transformers")
    per_token = 1024 * plain["activations"] / plan.micro_batch_tokens
    kept_per_token = 1024 * kept["activations"] / long.micro_batch_tokens
    host = (away.host_bytes - plan.host_bytes) / GIB
    page = (ROOT / "docs" / "gpu.md").read_text()
    for said in (
        f"{plain['base']:.1f} GiB of weights and {plain['libraries, contexts, graphs']:.1f} of lib",
        f"a token, {plain['KV cache']:.1f} GiB), and activations while learning ({per_token:.1f} M",
        f"{plain['activations']:.1f} GiB for micro-batches of {plan.micro_batch_tokens:,} tokens",
        f"weights {full['base']:.1f} → {plain['base']:.1f} GiB",
        f"{kept_per_token:.1f} MiB for each token of a micro-batch in place of {per_token:.1f}",
        f"activations {plain['activations']:.1f} → {offloaded['activations']:.1f} GiB; {host:.1f}",
        f"activations {plain['activations']:.1f} → {small['activations']:.1f} GiB | more",
        f"optimizer {plain['optimizer state']:.2f} → {eight['optimizer state']:.2f} GiB",
        f"slot {of_the_adapter(plain, 32):.2f} → {of_the_adapter(low, 8):.2f} GiB; "
        f"rank 128: {of_the_adapter(high, 128):.1f}",
        f"{(plan.peak.learning - bare.peak.learning) / GIB:.1f} GiB less in learning",
    ):
        assert said in page, said
