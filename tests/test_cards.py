"""docs/cards.md says what the plan says."""

from pathlib import Path

import pytest
from shapes import SHAPES, write_config

from conftest import ROOT
from reason_llm import memory
from reason_llm.config import Config
from reason_llm.errors import ConfigError
from reason_llm.memory import GIB, Machine
from reason_llm.model.base import meta_model
from reason_llm.model.shape import Shape

CARDS = (12, 16, 24, 48, 80)
AT_ONCE = 8
THOUSAND = 1024
LISTED = [name for name in SHAPES if "Coder" not in name]
"""Qwen2.5-Coder-7B has the shape of Qwen2.5-7B."""


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
        return plan.cache_tokens >= AT_ONCE * tokens

    least, most = 0, limit // THOUSAND
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


@pytest.mark.parametrize("name", LISTED)
def test_what_fits_on_a_card_is_in_the_table(name: str, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"path": write_config(name, tmp_path), "dtype": "bfloat16"},
            "data": {"train": "some.jsonl"},
            "sample": {"engine": "vllm"},
        }
    )
    shape, limit = Shape.of(meta_model(config.model)), SHAPES[name][-1]
    page = (ROOT / "docs" / "cards.md").read_text()
    for quantize, weights in (("none", "bfloat16"), ("nf4", "NF4")):
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
