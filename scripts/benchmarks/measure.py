"""Benchmarks: systems take turns step by step, so that other load affects all of them equally."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import make
from benchmarks.sides import SYSTEMS, Outcome, take_turns
from benchmarks.work import VARIANTS, WORKLOADS, Work, lengths

DAY = 24 * 3600.0
UNSLOTH_GIB = 36.0
"""GPU memory for Unsloth where others use the GPU at the same time: it takes all that it may."""


@dataclass(slots=True)
class Block:
    """All sides at one piece of work."""

    name: str
    """Of the workload, or of the kind of weights."""
    title: str
    sides: dict[str, Outcome]


def cpu(
    names: Sequence[str],
    repeats: int,
    is_small: bool,
    threads: int,
    trl_rows: int | None,
    variants: Collection[str],
    folder: Path,
) -> list[Block]:
    """Measure the workloads called ``names``, with their models made in ``folder``.

    Args:
        repeats: optimizer steps that count.
        trl_rows: rows of TRL's passes, in place of those found best.
        variants: of ``VARIANTS``, measured too.
    """
    blocks = []
    for name in names:
        title, work = WORKLOADS[name]
        work = replace(work.smallest() if is_small else work, repeats=repeats)
        work = replace(work, model=make(work.model, folder / work.model))
        work = replace(work, trl_rows=trl_rows or work.trl_rows)
        systems = {system: (system, work) for system in ("reason_llm", "trl")}
        systems |= {
            variant: (VARIANTS[variant][0], replace(work, **VARIANTS[variant][2]))  # type: ignore[arg-type]
            for variant in variants
        }
        sides = take_turns(systems, DAY, threads=threads)
        blocks.append(Block(name, f"({name}) {title}: {described(work)}", sides))
    return blocks


def described(work: Work) -> str:
    """Sizes of a step, for a person."""
    exact = lengths(work)
    return (
        f"{Path(work.model).name}, LoRA rank {work.rank}, {work.prompts} prompts of up to "
        f"{work.prompt_tokens} tokens, {work.completions} completions of {min(exact)} to "
        f"{max(exact)} tokens each"
    )


def calls(work: Work, max_tokens: int) -> dict[str, dict[str, tuple[str, Work]]]:
    """Sides of each call of the GPU benchmark, with their systems and work.

    ``memory`` samples and learns 8,192 tokens in NF4 with a plan for 24 GiB, and then learns
    rows of the longest length that this plan allows, up to ``max_tokens``.
    """
    nf4 = replace(work, kind="nf4")
    unsloth = ("unsloth", replace(work, budget_gib=UNSLOTH_GIB))
    under_24_gib = replace(
        nf4, prompts=1, completions=4, prompt_tokens=7 * work.context,
        completion_tokens=work.context, repeats=1, warmup=False, budget_gib=24.0,
        longest_tokens=max_tokens,
    )  # fmt: skip
    ours = {"reason_llm": ("reason_llm", work)}
    return {
        "speed": ours | {name: (name, work) for name in ("vllm", "vllm_lora")},
        "peers": {"trl": ("trl", work), "unsloth": unsloth},
        "nf4": ours | {"nf4": ("reason_llm", nf4)},
        "memory": {"under_24_gib": ("reason_llm", under_24_gib)},
        "fold": ours
        | {"folded": ("reason_llm", replace(work, is_folded=True)), "vllm": ("vllm", work)},
        "backend": ours | {"reason_llm_unsloth": ("reason_llm_unsloth", work)},
    }


def gpu(
    names: Sequence[str],
    systems: Collection[str],
    work: Work,
    max_tokens: int,
    max_seconds: float,
    say: Callable[[str], None],
    keep: Callable[[list[Block]], None],
) -> list[Block]:
    """Measure the calls called ``names``; everything is kept as it is measured.

    Args:
        systems: that take part.
        max_tokens: of the longest rows that are tried.
        max_seconds: that a system may take for a call.
    """
    blocks = []
    for name in names:
        blocks.append(Block(name, f"{name}: {described(work)}", {}))

        # A benchmark of hours that is killed leaves the table of what it measured.
        def keep_outcomes(outcomes: dict[str, Outcome], block: Block = blocks[-1]) -> None:
            block.sides = outcomes
            keep(blocks)

        sides = {k: v for k, v in calls(work, max_tokens)[name].items() if v[0] in systems}
        outcomes = take_turns(sides, max_seconds, keep_outcomes)
        for side, outcome in outcomes.items():
            say(f"{name} {side}: {outcome.error or 'measured'}")
            if outcome.trace:
                say(outcome.trace)
    return blocks


def titles(blocks: Sequence[Block]) -> dict[str, str]:
    """Return the titles of the measured sides, by their names in ``Block.sides``."""
    names = SYSTEMS | {name: variant[1] for name, variant in VARIANTS.items()}
    names |= {"nf4": "reason_llm, NF4", "folded": "reason_llm, folded"}
    names["under_24_gib"] = "reason_llm, NF4, 24 GiB"
    sides = dict.fromkeys(side for block in blocks for side in block.sides)
    return {side: names.get(side, side.replace("_", " ")) for side in sides}
