"""Benchmarks: in ``cpu`` the systems take turns step by step; in ``gpu`` each system has the GPU to
itself, in several rounds. Either way, load on the machine affects all systems equally.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.models import make
from benchmarks.sides import LEARNERS, SYSTEMS, Outcome, take_turns
from benchmarks.work import VARIANTS, WORKLOADS, Kind, Work, lengths

LADDER = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072)
"""Contexts that are tried, in tokens."""
DAY = 24 * 3600.0


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

    systems: Sequence[str]
    kinds: Sequence[Kind]
    work: Work
    """Of the speeds; its model is the one of everything."""
    rounds: int
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


def gpu(
    settings: Settings, say: Callable[[str], None], keep: Callable[[list[Block]], None]
) -> list[Block]:
    """Speeds first, then contexts; everything is kept as it is measured."""
    blocks = [Block(kind, f"{kind}: {described(settings.work)}", {}) for kind in settings.kinds]
    for number in range(settings.rounds):
        for kind, block in zip(settings.kinds, blocks, strict=True):
            for system in settings.systems:
                work = replace(settings.work, kind=kind)
                rounds = block.sides.setdefault(system, [])
                rounds.append(_alone(system, work, settings.most_seconds))
                keep(blocks)
                said = rounds[-1].error or "measured"
                say(f"round {number + 1} of {settings.rounds}: {kind} {system}: {said}")
                if rounds[-1].trace:
                    say(rounds[-1].trace)
    for cap in settings.caps_gib:
        for kind, block in zip(settings.kinds, blocks, strict=True):
            for system in (s for s in settings.systems if s in LEARNERS):
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
    sides = dict.fromkeys(side for block in blocks for side in block.sides)
    return {side: known.get(side, side.replace("_", " ")) for side in sides}
