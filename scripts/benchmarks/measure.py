"""Benchmarks: in ``cpu`` the systems take turns step by step; in ``gpu`` each system has the GPU to
itself, in several rounds. Either way, load on the machine affects all systems equally.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.models import make
from benchmarks.sides import LEARNERS, SYSTEMS, Outcome, take_turns
from benchmarks.work import VARIANTS, WORKLOADS, Kind, Work, lengths
from reason_llm.errors import ConfigError

LADDER = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072)
"""Contexts that are tried, in tokens."""
DAY = 24 * 3600.0
UNSLOTH_GIB = 36.0
"""GPU memory for Unsloth where others use the GPU at the same time: it takes all that it may."""


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest context that fits under a cap."""

    tokens: int
    """0: not even the shortest that is tried."""
    used_gib: float
    """Of the GPU, at its largest, with that context."""
    reason: str
    """Why the next one does not fit; empty if all do."""


@dataclass(slots=True)
class Block:
    """All sides at one piece of work."""

    name: str
    """Of the workload, or of the kind of weights."""
    title: str
    sides: dict[str, list[Outcome]]
    """One for each round."""
    contexts: dict[float, dict[str, Longest]] = field(default_factory=dict)
    """By cap in GiB and side."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the GPU benchmark."""

    calls: Sequence[str]
    """Names of ``calls``."""
    systems: Collection[str]
    """Systems that take part."""
    work: Work
    """Of the speeds; its model is the one of everything."""
    kinds: Sequence[Kind]
    """Base weights for which the longest contexts are sought."""
    caps_gib: Sequence[float]
    ladder: Sequence[int]
    group: int
    """Completions of the one prompt with which a context is tried."""
    most_seconds: float
    """A system may take for one piece of work."""


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
        variants: of ``VARIANTS``, measured too where lengths are given and a step samples.
    """
    blocks = []
    for name in names:
        title, work = WORKLOADS[name]
        work = replace(work.smallest() if is_small else work, repeats=repeats)
        if not work.is_quickstart:
            work = replace(work, model=make(work.model, folder / work.model))
        work = replace(work, trl_rows=trl_rows or work.trl_rows)
        given = {system: (system, work) for system in ("reason_llm", "trl")}
        if work.lengths != "own":
            given |= {
                variant: (VARIANTS[variant][0], replace(work, **VARIANTS[variant][2]))  # type: ignore[arg-type]
                for variant in variants
            }
        outcomes = take_turns(given, DAY, threads=threads)
        sides = {name: [outcome] for name, outcome in outcomes.items()}
        blocks.append(Block(name, f"({name}) {title}: {described(work)}", sides))
    return blocks


def described(work: Work) -> str:
    """Sizes of a step, for a person."""
    given = lengths(work)
    each = f"up to {work.completion_tokens}" if given is None else f"{min(given)} to {max(given)}"
    return (
        f"{Path(work.model).name}, LoRA rank {work.rank}, {work.prompts} prompts of up to "
        f"{work.prompt_tokens} tokens, {work.completions} completions of {each} tokens each"
    )


def calls(work: Work, most_tokens: int) -> dict[str, Callable[[], dict[str, tuple[str, Work]]]]:
    """Calls of the GPU benchmark: each makes its sides, with their systems and work.

    ``memory`` samples and learns 8,192 tokens in NF4 under 24 GiB, and learns the longest rows that
    the plan allows there; nothing else limits the memory, so the largest use has to be read.
    """
    nf4 = replace(work, kind="nf4")
    return {
        "speed": lambda: {
            "reason_llm": ("reason_llm", work),
            "vllm": ("vllm", work),
            "trl": ("trl", work),
        },
        "unsloth": lambda: {
            "reason_llm": ("reason_llm", work),
            "unsloth": ("unsloth", replace(work, budget_gib=UNSLOTH_GIB)),
        },
        "adapter": lambda: {"vllm": ("vllm", work), "vllm_lora": ("vllm_lora", work)},
        "nf4": lambda: {"reason_llm": ("reason_llm", work), "nf4": ("reason_llm", nf4)},
        "memory": lambda: {
            "under_24_gib": ("reason_llm", _under_24_gib(replace(
                nf4, prompt_tokens=7 * work.context, completion_tokens=work.context
            ))),
            "longest": ("reason_llm", longest_planned(
                _under_24_gib(replace(nf4, is_given=True)), most_tokens
            )),
        },
    }  # fmt: skip


def _under_24_gib(work: Work) -> Work:
    return replace(work, prompts=1, completions=4, repeats=1, warmup=False, budget_gib=24.0)


def longest_planned(work: Work, most_tokens: int) -> Work:
    """The work with the longest rows that its plan allows, in steps of 512 tokens."""
    from benchmarks import ours

    def fits(tokens: int) -> bool:
        try:
            ours.plan_of(replace(work, completion_tokens=tokens))
        except ConfigError:
            return False
        return True

    ladder = range(512, most_tokens - work.prompt_tokens + 1, 512)
    return replace(work, completion_tokens=ladder[max(0, last_that_fits(ladder, fits))])


def gpu(
    settings: Settings, say: Callable[[str], None], keep: Callable[[list[Block]], None]
) -> list[Block]:
    """Measure the calls, then the contexts; everything is kept as it is measured."""
    given = calls(settings.work, settings.ladder[-1])
    blocks = []
    for name in settings.calls:
        blocks.append(Block(name, f"{name}: {described(settings.work)}", {}))

        def kept(outcomes: dict[str, Outcome], block: Block = blocks[-1]) -> None:
            block.sides = {side: [outcome] for side, outcome in outcomes.items()}
            keep(blocks)

        sides = {k: v for k, v in given[name]().items() if v[0] in settings.systems}
        outcomes = take_turns(sides, settings.most_seconds, kept)
        for side, outcome in outcomes.items():
            say(f"{name} {side}: {outcome.error or 'measured'}")
            if outcome.trace:
                say(outcome.trace)
    for cap in settings.caps_gib:
        for kind in settings.kinds:
            block = Block(kind, f"{kind}: longest contexts", {})
            blocks.append(block)
            for system in LEARNERS:
                found = longest_context(settings, kind, system, cap)
                block.contexts.setdefault(cap, {})[system] = found
                keep(blocks)
                say(f"under {cap:g} GiB: {kind} {system}: {found.tokens} tokens ({found.reason})")
    return blocks


def _alone(system: str, work: Work, most_seconds: float) -> Outcome:
    return take_turns({system: (system, work)}, most_seconds)[system]


def longest_context(settings: Settings, kind: Kind, system: str, cap: float) -> Longest:
    """Find the longest context by bisection over the ladder; each trial is one step with one
    group."""
    work = replace(settings.work, kind=kind, completions=settings.group)
    tried: dict[int, Outcome] = {}

    def fits(tokens: int) -> bool:
        outcome = _alone(system, work.at_context(tokens, cap), settings.most_seconds)
        if outcome.error is None and outcome.largest_gib > cap:
            outcome.error = f"used {outcome.largest_gib:.1f} GiB"
        tried[tokens] = outcome
        return outcome.error is None

    index = last_that_fits(settings.ladder, fits)
    tokens = settings.ladder[index] if index >= 0 else 0
    used = tried[tokens].largest_gib if tokens else 0.0
    beyond = settings.ladder[index + 1] if index + 1 < len(settings.ladder) else None
    reason = "" if beyond is None else f"{beyond}: {tried[beyond].error}"
    return Longest(tokens, used, reason)


def last_that_fits(ladder: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The index of the last rung that fits, if all below it do; -1 if none does."""
    least, most = -1, len(ladder) - 1
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(ladder[middle]) else (least, middle - 1)
    return least


def titles(blocks: Sequence[Block]) -> dict[str, str]:
    """Return the titles of the measured sides, by their names in ``Block.sides``."""
    known = SYSTEMS | {name: variant[1] for name, variant in VARIANTS.items()}
    known |= {"nf4": "reason_llm, NF4", "under_24_gib": "8,192 tokens", "longest": "longest rows"}
    sides = dict.fromkeys(side for block in blocks for side in block.sides)
    sides |= dict.fromkeys(
        side for block in blocks for found in block.contexts.values() for side in found
    )
    return {side: known.get(side, side.replace("_", " ")) for side in sides}
