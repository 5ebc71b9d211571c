"""What both sides of the CPU benchmark do: the model, the prompts, the lengths, the optimizer.

A workload is a record that goes to each side's process as JSON, so that nothing but the process
differs. Prompts are given as rendered text and as token ids; a length is a number of completion
tokens, the end-of-sequence token included.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from reason_llm.config import load
from reason_llm.data import load_data, order
from reason_llm.model import load_tokenizer
from reason_llm.rollout import Prompt

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "model" / "tiny"
SEED = 0
EVALUATED_EVERY = 2
"""Steps."""
TARGET = 0.8
"""Held-out accuracy that counts as learned, """
SMOOTHED = 3
"""as the mean of that many evaluations in a row."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step's work, and the prompts of every step."""

    title: str
    model: str
    """A folder that holds weights and tokenizer."""
    steps: tuple[tuple[Prompt, ...], ...]
    """The prompts of each optimizer step; the first step is a warm-up."""
    completions_per_prompt: int
    max_new_tokens: int
    lengths: tuple[int, ...] | None
    """Tokens of each row's completion, prompt by prompt; None: the model ends where it ends."""
    learner_only: bool
    """Completions are random ids of those lengths: nothing is sampled."""
    reward: str | None
    """A reward of the project's table; None: 0 and 1 in turn, so that every row has an
    advantage."""
    learning_rate: float
    trl_rows: int
    """Rows of one of TRL's forward passes: (a) the whole step; (b) 8, its default, as fast as 2,
    4 and 16; (c) 4, as more take too much memory."""
    trl_rows_small: int | None
    """The same where it takes the least memory; None: not measured apart."""
    rank: int = 16
    alpha: float = 32.0
    modules: tuple[str, str] = ("cpu_ours", "cpu_trl")
    """Our side and TRL's."""
    seed: int = SEED
    schedule: str = "constant"
    """Of the learning rate, by its name in Transformers."""
    held_out: tuple[Prompt, ...] = ()
    """Prompts whose greedy completions are judged every ``EVALUATED_EVERY`` steps, outside the
    clock; none: nothing is judged."""

    def is_evaluated(self, step: int) -> bool:
        """Whether the held-out prompts are completed after this step, counted from 0."""
        return bool(self.held_out) and (step + 1) % EVALUATED_EVERY == 0

    @property
    def rows(self) -> int:
        """Completions in a step."""
        return len(self.steps[0]) * self.completions_per_prompt

    def completions(self, step: int, vocabulary: int) -> list[list[int]]:
        """The given completions of a step where nothing is sampled: the last token ends each."""
        assert self.lengths is not None
        draw = random.Random(f"{SEED}/completions/{step}")
        return [
            [draw.randrange(300, vocabulary - 1) for _ in range(length - 1)] + [vocabulary - 1]
            for length in self.lengths
        ]

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Workload":
        """The workload that ``to_json`` gave."""

        def prompts(found: list[dict[str, Any]]) -> tuple[Prompt, ...]:
            return tuple(Prompt(**{**p, "token_ids": tuple(p["token_ids"])}) for p in found)

        read = {
            "steps": tuple(prompts(step) for step in value["steps"]),
            "held_out": prompts(value["held_out"]),
            "lengths": None if value["lengths"] is None else tuple(value["lengths"]),
            "modules": tuple(value["modules"]),
        }
        return cls(**{**value, **read})


def make(name: str, num_steps: int, small: bool, folder: Path) -> Workload:
    """The workload of that name, with its model made in ``folder``."""
    return WORKLOADS[name](num_steps, small, folder)


def _short_answers(
    num_steps: int, small: bool, folder: Path, seed: int = SEED, is_judged: bool = False
) -> Workload:
    """The quick start: its model, prompts, reward and sizes."""
    prompts_per_step = 8 if small else 64
    files = {f"data.{kind}": str(ROOT / "data" / f"arithmetic_{name}.jsonl")
             for kind, name in (("train", "train"), ("eval", "test"))}  # fmt: skip
    data = load_data(
        load(ROOT / "configs" / "quickstart.yaml", files), load_tokenizer(str(TINY)), 1024
    )
    everything = data.prompts
    steps = tuple(
        tuple(
            everything[i]
            for i in order(
                [len(everything)], [1.0], seed, step * prompts_per_step, prompts_per_step
            )
        )
        for step in range(num_steps)
    )
    return Workload(
        title=f"(a) short answers, model/tiny, {prompts_per_step} prompts x 4, at most 32 tokens",
        model=str(TINY),
        steps=steps,
        completions_per_prompt=4,
        max_new_tokens=32,
        lengths=None,
        learner_only=False,
        reward="think_answer_tags",
        learning_rate=2e-3,
        trl_rows=prompts_per_step * 4,
        trl_rows_small=None,
        seed=seed,
        held_out=tuple(data.held_out_prompts[: 32 if small else None]) if is_judged else (),
        schedule="linear" if is_judged else "constant",
    )


def _mixed_lengths(num_steps: int, small: bool, folder: Path) -> Workload:
    """Most answers are short, a few are long."""
    prompts, most = (2, 48) if small else (4, 256)
    return _given_lengths(
        "(b) mixed lengths",
        heavy_tail(prompts * 4, 16, most),
        MIDDLE,
        Sizes(prompts, 4, 16, 48, trl_rows=8),
        num_steps,
        small,
        folder,
    )


def _long_prompts(num_steps: int, small: bool, folder: Path) -> Workload:
    """Groups of eight over prompts as long as the answers."""
    prompts, most, prompt = (1, 48, 40) if small else (8, 384, 300)
    return _given_lengths(
        "(d) long prompts",
        geometric(prompts * 8, most),
        LARGE,
        Sizes(prompts, 8, prompt, prompt, trl_rows=8),
        num_steps,
        small,
        folder,
    )


def _long_answers(num_steps: int, small: bool, folder: Path) -> Workload:
    """Few answers, all of them long."""
    most = 64 if small else 1500
    return _given_lengths(
        "(e) long answers",
        (most,) * 4,
        MIDDLE,
        Sizes(2, 2, 64, 64, trl_rows=4),
        num_steps,
        small,
        folder,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompts of a step and their tokens."""

    prompts: int
    completions_per_prompt: int
    least: int
    most: int
    trl_rows: int


def _given_lengths(
    title: str,
    lengths: tuple[int, ...],
    model: dict[str, int],
    sizes: Sizes,
    num_steps: int,
    small: bool,
    folder: Path,
) -> Workload:
    """A random model that is made to end where it is told to."""
    vocabulary, shape = (2048, SMALL) if small else (32_000, model)
    parameters = make_model(folder, vocabulary, **shape)
    return Workload(
        title=f"{title}, {parameters / 1e6:.0f} M parameters, vocabulary {vocabulary:,}, "
        f"{sizes.prompts} prompts of {sizes.least} to {sizes.most} tokens x "
        f"{sizes.completions_per_prompt}, {min(lengths)} to {max(lengths)} tokens",
        model=str(folder),
        steps=tuple(
            _made_prompts(folder, step, sizes.prompts, sizes.least, sizes.most)
            for step in range(num_steps)
        ),
        completions_per_prompt=sizes.completions_per_prompt,
        max_new_tokens=max(lengths),
        lengths=lengths,
        learner_only=False,
        reward=None,
        learning_rate=1e-5,
        trl_rows=sizes.trl_rows,
        trl_rows_small=1,
    )


def _learner_alone(num_steps: int, small: bool, folder: Path) -> Workload:
    """A large vocabulary, and rollouts that are given."""
    prompts, most = (1, 48) if small else (4, 256)
    lengths = heavy_tail(prompts * 4, 16, most)
    vocabulary, sizes = (4096, SMALL) if small else (150_000, WIDE)
    parameters = make_model(folder, vocabulary, **sizes)
    return Workload(
        title=f"(c) learner alone, {parameters / 1e6:.0f} M parameters, vocabulary "
        f"{vocabulary:,}, {prompts} prompts x 4, {min(lengths)} to {max(lengths)} tokens",
        model=str(folder),
        steps=tuple(_made_prompts(folder, step, prompts, 16, 48) for step in range(num_steps)),
        completions_per_prompt=4,
        max_new_tokens=most,
        lengths=lengths,
        learner_only=True,
        reward=None,
        learning_rate=1e-5,
        trl_rows=4,
        trl_rows_small=1,
    )


def heavy_tail(rows: int, least: int, most: int) -> tuple[int, ...]:
    """Lengths at even quantiles of a Pareto distribution (shape 1.1) cut at ``most``, shuffled;
    the shortest is ``least`` and the longest ``most``."""
    quantiles = [(row + 0.5) / rows for row in range(rows)]
    lengths = [min(most, int(least * (1 - q) ** (-1 / 1.1))) for q in quantiles]
    lengths[0], lengths[-1] = least, most
    random.Random(SEED).shuffle(lengths)
    return tuple(lengths)


def geometric(rows: int, most: int) -> tuple[int, ...]:
    """Lengths at even quantiles of a geometric distribution of mean ``most / 2`` cut at ``most``,
    shuffled."""
    quantiles = [(row + 0.5) / rows for row in range(rows)]
    lengths = [min(most, 1 + int(-most / 2 * math.log1p(-q))) for q in quantiles]
    random.Random(SEED).shuffle(lengths)
    return tuple(lengths)


def _to_accuracy(seed: int, num_steps: int, small: bool, folder: Path) -> Workload:
    """The quick start until it answers most held-out prompts: what the speed is for."""
    made = _short_answers(num_steps, small, folder, seed, is_judged=True)
    return replace(made, title=f"(t{seed}) to {TARGET:.0%}, seed {seed}, {made.title[4:]}")


SMALL = {"hidden": 64, "layers": 2, "intermediate": 128}
MIDDLE = {"hidden": 384, "layers": 8, "intermediate": 1024}
WIDE = {"hidden": 256, "layers": 4, "intermediate": 768}
LARGE = {"hidden": 640, "layers": 8, "intermediate": 1792}
WORKLOADS: dict[str, Callable[[int, bool, Path], Workload]] = {
    "a": _short_answers,
    "b": _mixed_lengths,
    "c": _learner_alone,
    "d": _long_prompts,
    "e": _long_answers,
    **{f"t{seed}": partial(_to_accuracy, seed) for seed in range(3)},
}


def make_model(folder: Path, vocabulary: int, hidden: int, layers: int, intermediate: int) -> int:
    """Save a random Qwen2 with tied embeddings and a tokenizer of bytes; the parameters' number.

    The tokenizer's other tokens never occur in a text, and its last one ends an answer.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"<{i}>" for i in range(vocabulary - len(alphabet) - 2)]
    tokens = [*alphabet, *fillers, "<|endoftext|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    wrapped.save_pretrained(folder)
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 128),
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 2,
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _made_prompts(folder: Path, step: int, count: int, least: int, most: int) -> tuple[Prompt, ...]:
    """Prompts of random letters, ``least`` to ``most`` tokens."""
    draw = random.Random(f"{SEED}/prompts/{step}")
    tokenizer = load_tokenizer(str(folder))
    made = []
    for index in range(count):
        text = "".join(draw.choices("abcdefghij", k=draw.randint(least, most)))
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
        made.append(Prompt(f"made:{step}:{index}", text, tuple(ids), ""))
    return tuple(made)
