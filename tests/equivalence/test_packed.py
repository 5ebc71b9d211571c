"""Rows end to end, a prompt once for its completions, give what padded rows give.

1. Attention alone, in float64, against one dense mask: windows, shared prompts, gradients.
2. Every family that is served: log-probs and the adapter's gradient, with sliding windows and with
   both kinds of checkpointing.
3. The learner: same gradient for every row of the table and any size of a micro-batch, far fewer
   tokens through the model, no padding.
4. What would go wrong is caught before learning; torch's own kernel takes what it is given.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from equivalence.test_micro_batches import gradient, groups
from families import TODAY, with_tokenizer
from learners import OF_REWARDS, SHORT
from marks import most_are_long
from reason_llm.config import AdapterSection, ModelSection, TrainSection
from reason_llm.config.algorithms import ALGORITHMS
from reason_llm.errors import ModelError
from reason_llm.model import attention as packed_attention, layout as layouts
from reason_llm.model.attention import Segments, attend
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.model.canary import prove_packing
from reason_llm.model.datum import Datum, to_data
from reason_llm.model.families import PACKED
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.train.learner import Learner, Learners, LearningSettings, learning
from reason_llm.train.objectives import PolicyGradient

CPU = torch.device("cpu")


def rollouts(vocabulary: int = 250) -> list[Datum]:
    """Three prompts with 3, 1 and 4 completions of 1 to 24 tokens, mixed."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (count,), generator=generator).tolist())

    prompts = [ids(21), ids(1), ids(9)]
    return [
        Datum.of(prompts[p], ids(length), str(i))
        for i, (p, length) in enumerate(
            [(0, 5), (2, 24), (0, 1), (1, 17), (2, 1), (0, 24), (2, 2), (2, 12)]
        )
    ]


def dense_mask(rows: list[Datum], window: int | None) -> Tensor:
    """(N, N): which token of the laid out row sees which, from the tokens' owners alone."""
    owners: list[tuple[set[int], int]] = []  # rollouts that have this token, its position
    places: dict[tuple[int, ...], list[int]] = {}
    for r, row in enumerate(rows):
        if row.prompt_ids in places:
            for place in places[row.prompt_ids]:
                owners[place][0].add(r)
        else:
            places[row.prompt_ids] = list(range(len(owners), len(owners) + len(row.prompt_ids)))
            owners += [({r}, t) for t in range(len(row.prompt_ids))]
        owners += [({r}, t) for t in range(len(row.prompt_ids), row.num_tokens)]
    return torch.tensor(
        [
            [
                bool(mine & theirs) and j <= i and (window is None or i - j < window)
                for theirs, j in owners
            ]
            for mine, i in owners
        ]
    )


@pytest.mark.parametrize("window", [None, 1, 4, 25])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_of_segments_is_dense_attention_under_its_mask(
    window: int | None, key_heads: int
) -> None:
    rows = rollouts()
    segments = layouts.lay_out(rows, CPU).segments
    mask = dense_mask(rows, window)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, len(mask), 8) for heads in (4, key_heads, key_heads)]
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    ours = [x.clone().requires_grad_() for x in made]
    theirs = [x.clone().requires_grad_() for x in made]
    found = attend(*ours, segments, scaling=0.3, sliding_window=window)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *theirs, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(found, dense, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    (found * weights).sum().backward()
    (dense * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-12)  # type: ignore[arg-type]


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 257,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "max_position_embeddings": 512}  # fmt: skip
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2
                    + ["full_attention"]},
    "mistral": {"sliding_window": 6},
    "phi3": {"sliding_window": 6},
    "cohere2": WINDOW,
    "gemma4_text": WINDOW,
    "mixtral": {"sliding_window": 6},
    "olmo3": WINDOW,
    "starcoder2": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
}  # fmt: skip
OF_IMAGES = {"qwen2_5_vl_text", "qwen3_vl_text"}
"""Parts of models that also read images: tests/model/test_multimodal.py."""
CASES = [(family, {}) for family in PACKED if family not in OF_IMAGES] + list(WINDOWS.items())


def make_model(folder: Path, family: str, options: dict[str, Any]) -> ModelSection:
    torch.manual_seed(0)
    plain = TODAY.get(family, SIZES) | {"vocab_size": SIZES["vocab_size"]}
    plain |= {"mistral": {"sliding_window": None}}.get(family, {})
    config = CONFIG_MAPPING[family](**ENDS, **(plain | options))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    adapter = AdapterSection(rank=4)
    return ModelSection(path=with_tokenizer(folder), dtype="float32", adapter=adapter)


def stir(model: Model) -> list[torch.nn.Parameter]:
    """An adapter that changes something."""
    torch.manual_seed(1)
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return trained


def passed(model: Model, rows: list[Datum], is_packed: bool) -> tuple[Tensor, Tensor]:
    """Log-probs of the completions, and the adapter's gradient of a weighted sum of them."""
    trained = [p for p in model.policy.parameters() if p.requires_grad]
    ids, mask = layouts.collate(rows, CPU)
    layout = layouts.lay_out(rows, CPU) if is_packed else None
    logprobs, entropies = policy_logprobs(model, ids, mask, 0.9, True, layout)
    weights = torch.linspace(-1, 1, mask.numel()).view(mask.shape)
    ((logprobs + 0.1 * entropies) * weights * mask).sum().backward()
    found = torch.cat([p.grad.flatten() for p in trained])  # type: ignore[union-attr]
    for parameter in trained:
        parameter.grad = None
    return logprobs[mask].detach(), found


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_every_family_gives_the_same_end_to_end(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    section, rows = make_model(tmp_path, family, options), rollouts()
    with Model(section, load_tokenizer(section.path), 0) as model:
        stir(model)
        prove_packing(model)
        model.policy.train()
        text = model.policy.config.get_text_config(decoder=True)
        most = 3e-5 if packed_attention.has_delta_rule(text) else 1e-5  # states sum many keys
        padded, expected = passed(model, rows, is_packed=False)
        for reentrant in (None, False, True):
            if reentrant is not None:
                model.policy.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.policy.enable_input_require_grads()
            packed, found = passed(model, rows, is_packed=True)
            assert (packed - padded).abs().max() < most
            assert (found - expected).norm() / expected.norm() < most
        # The completions do depend on what stands before them in the row.
        alone, _ = passed(model, [rows[1]], is_packed=True)
        assert torch.allclose(alone, padded[5:29], atol=1e-5)
        if options:
            narrow = rows[1].prompt_ids[:2], rows[1].ids[2:]
            first = Datum.of(*narrow)
            wide, _ = passed(model, [first], is_packed=True)
            assert torch.allclose(wide[7:], padded[5:29], atol=1e-5)


@pytest.mark.parametrize("name", most_are_long(OF_REWARDS, SHORT))
def test_the_learner_takes_the_same_step_with_fewer_tokens(model: Model, name: str) -> None:
    row, data = ALGORITHMS[name], groups()
    expected, metrics = gradient(model, row, 10**6, data)
    for budget in (1, 60, 10**6):
        found, packed = gradient(model, row, budget, data, packing="varlen")
        assert (found - expected).norm() / expected.norm() < 1e-5
        assert packed["train/padding_fraction"] == 0
        for key in (
            "train/loss",
            "train/entropy",
            "train/kl",
            "train/tokens",
            "train/clip_fraction",
        ):
            value = metrics.get(key, 0.0)  # no KL where the row has none
            assert packed.get(key, 0.0) == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("offload", [True, "offload"])
def test_checkpointing_and_several_optimizer_steps_learn_the_same(
    model: Model, offload: bool | str
) -> None:
    row, data = ALGORITHMS["grpo"], groups()
    options: dict[str, Any] = {"gradient_checkpointing": offload, "optimizer_steps": 2}
    expected, _ = gradient(model, row, 200, data, **options)
    found, _ = gradient(model, row, 200, data, packing="varlen", **options)
    model.policy.gradient_checkpointing_disable()
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_a_prompt_goes_through_once(model: Model) -> None:
    """Counted where they go in: the decoder."""
    seen = []
    hook = model.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    settings = LearningSettings(
        PolicyGradient(ALGORITHMS["dr_grpo"], 32),
        TrainSection(packing="varlen", gradient_checkpointing=False),
        1.0,
        10**6,
        0,
        1,
    )
    learner, data = Learner(model, settings), groups()
    scored = [
        group.__class__(group.prompt, tuple(
            c.__class__(c.token_ids, c.text, c.logprobs, c.finish_reason, c.rewards, c.reward, 1.0)
            for c in group.completions
        ))
        for group in data
    ]  # fmt: skip
    seen.clear()
    with learning(learner):
        Learners(learner).learn(0, to_data(scored), lambda items: None)
    hook.remove()
    once = sum(len(g.prompt.token_ids) + sum(len(c.token_ids) for c in g.completions) for g in data)
    assert seen == [once]


def test_an_attention_that_sees_too_much_is_caught(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove_packing(model)
    right = packed_attention._one_segment

    def one_key_short(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return right(query, key.roll(1, dims=2), value.roll(1, dims=2), **options)

    monkeypatch.setattr(packed_attention, "_one_segment", one_key_short)
    with pytest.raises(ModelError, match=r"rows end to end give other.*set train\.packing to"):
        prove_packing(model)


def test_the_kernel_for_a_gpu_takes_what_it_is_given() -> None:
    """Shapes and gradients of torch's own operator, without its kernel: tensors without storage."""
    rows = rollouts()
    segments = layouts.lay_out(rows, CPU).segments
    tokens, keys = sum(segments.query_lengths), sum(segments.key_lengths)
    query, key, value = (
        torch.empty(1, heads, count, 16, dtype=dtype, device="meta", requires_grad=True)
        for heads, count, dtype in (
            (4, tokens, torch.float32), (2, keys, torch.float32), (2, keys, torch.bfloat16)
        )
    )  # fmt: skip
    segments = Segments(
        segments.query_lengths,
        segments.key_lengths,
        segments.prompt_starts,
        None,
        segments.query_ends.to("meta"),
        segments.key_ends.to("meta"),
    )
    found = packed_attention._flash(query, key, value, segments, 0.25, 6)
    assert (found.shape, found.dtype) == ((1, tokens, 4, 16), torch.bfloat16)
    found.sum().backward()
    assert key.grad is not None
    assert (key.grad.shape, key.grad.dtype) == (key.shape, torch.float32)
