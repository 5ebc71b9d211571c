"""The least seconds that a step takes on a card: its products at the card's peak, or its reads of
weights and KV cache at the card's bandwidth, whichever is more, for rollouts that take all their
tokens. Nothing is measured, and a real step takes longer: launches and copies are not counted.

Source of the counts: arXiv:2001.08361, section 2.1; attention: arXiv:2205.14135.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reason_llm.config import Config
from reason_llm.model.plan.machine import GIB, Machine
from reason_llm.model.plan.shape import Shape
from reason_llm.model.plan.team_sizes import ALONE, TeamSizes

BACKWARD_OF_ATTENTION = 2.5
"""Its products, of those of the forward pass, which FlashAttention makes anew."""
UNPACKED_BYTES = 2 + 2
"""Bytes of a weight in NF4 that are written in 16 bits for the product, and read by it."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU by its data sheet."""

    name: str
    gib: float
    """Memory by its name."""
    mib: int
    """Memory that nvidia-smi shows, with ECC where the card comes with it turned on."""
    flops: float
    """Dense bfloat16 products per second, summed in float32."""
    bandwidth: float
    """Bytes per second of its memory."""

    def titled(self, needed: float) -> str:
        """Its name, and its memory where that is less than these GiB."""
        there = round(self.mib / 1024, 1)
        is_small = there < round(needed, 1)
        return f"{self.name} with {there} GiB, too small for this plan" if is_small else self.name


CARDS = (
    Card("RTX 4090", 24, 24564, 165.2e12, 1.008e12),
    Card("RTX 3090", 24, 24576, 71e12, 0.936e12),
    Card("L4", 24, 23034, 121e12, 0.3e12),
    Card("RTX 5090", 32, 32607, 209.5e12, 1.792e12),
    Card("A100 SXM 40GB", 40, 40960, 312e12, 1.555e12),
    Card("RTX A6000", 48, 49140, 154.8e12, 0.768e12),
    Card("L40S", 48, 46068, 362.05e12, 0.864e12),
    Card("H100 SXM", 80, 81559, 989.4e12, 3.35e12),
    Card("A100 SXM 80GB", 80, 81920, 312e12, 2.039e12),
    Card("H200 SXM", 141, 143771, 989.4e12, 4.8e12),
)
"""Source: NVIDIA's data sheets; where they count sparse products, half of that. RTX 3090 and A6000:
"NVIDIA Ampere GA102 GPU Architecture", V2, pages 15 and 44; RTX 5090: "NVIDIA RTX Blackwell GPU
Architecture"; A100: "NVIDIA A100 Tensor Core GPU", 1758950-r4, its SXM modules, whose memory is the
faster one; L40S: "NVIDIA L40S". Memory: nvidia-smi's tables in public reports, such as
github.com/akash-network/provider-configs/pull/99 (L40S) and github.com/RLinf/RLinf/issues/255 (RTX
4090)."""
LEAST_OF_CARD = 0.9
"""Part of a card's memory that is at least planned for, where it is meant."""
UNCOUNTED = "starts, saves, dropped groups, and the unpacking of NF4 while sampling"


def cards_of(machine: Machine) -> list[Card]:
    """The machine's own card, or for an imagined one all with that memory; empty where there is no
    data sheet of it. A Ti is another card, as are those for PCIe."""
    if machine.card is not None:
        words = set(machine.card.replace("-", " ").split())  # A100-SXM4-80GB
        if words & {"Ti", "PCIe", "PCIE"}:
            return []
        return [each for each in CARDS if words >= {*each.name.split()} - {"SXM"}]
    budget = machine.budget_bytes / GIB
    return [card for card in CARDS if LEAST_OF_CARD * card.gib <= budget <= card.gib]


@dataclass(frozen=True, slots=True)
class Phase:
    """The cost of one phase of a step."""

    name: str
    flops: float
    read_bytes: float
    tokens: float
    """Tokens that go through the model; in learning, per pass."""

    def seconds(self, card: Card) -> float:
        """The least seconds that it takes."""
        return max(self.flops / card.flops, self.read_bytes / card.bandwidth)

    def limit(self, card: Card) -> str:
        """What limits it: arithmetic, that is the products, or memory bandwidth."""
        is_busy = self.seconds(card) == self.flops / card.flops
        return "arithmetic" if is_busy else "memory bandwidth"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that the plan chose; tokens and sequences, unless said otherwise."""

    context: int
    pool_bytes: int
    """Keys, values and recurrent states of all sequences that are decoded at once."""
    micro_batch: int
    at_once: int
    """The most of these sequences."""
    skip_every: int = 0
    state_bytes: int = 0
    """Recurrent states of each of them."""
    element_bytes: int = 2
    """Of a key."""
    frees_windows: bool = False
    """The cache drops what is before a layer's window."""

    def sequences(self, key_elements: float) -> float:
        """Sequences that are decoded at once, each with so many elements of keys in the cache, as
        many of values, and its states."""
        each = 2 * self.element_bytes * key_elements + self.state_bytes
        return min(self.at_once, self.pool_bytes / each) if each else self.at_once


@dataclass(frozen=True, slots=True)
class OutsideModel:
    """A model with separate weights, such as a reward model, that reads the rollouts in a separate
    phase."""

    name: str
    weight_bytes: int
    passing_bytes: Callable[[int, int], int]
    """Bytes of a pass over so many tokens, with so many tokens' logits at once."""
    phase: Callable[[Config, Sizes], Phase]
    """Its time in a step."""


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The evaluations of a run, and the least cost of each."""

    count: int
    sizes: str
    """What each evaluates: ``500 problems``; empty where its size is not known."""
    phases: tuple[Phase, ...] = ()

    def __str__(self) -> str:
        return f"{self.count} evaluations of {self.sizes}"


def line(
    phases: Sequence[Phase],
    cards: Sequence[Card],
    steps: int | None,
    needed: float,
    team: TeamSizes = ALONE,
    evaluations: Evaluations | None = None,
) -> str:
    """One line: the least seconds of a step on the first card, its longest phase, and the hours of
    so many steps with their evaluations; seconds and hours of the other cards; or that there are no
    numbers of the card.

    Args:
        phases: the share of one card.
        steps: None where their number is not known.
        needed: GiB of the plan's peak.
        team: cards that share a step.
    """
    if not cards:
        names = ", ".join(each.name for each in CARDS)
        return f"step time unknown: data sheets are known for {names} only"

    count, evaluated = (evaluations.count, evaluations.phases) if evaluations else (0, ())

    def times(card: Card) -> list[str]:
        """Seconds of a step and, where its steps are known, hours of the run."""
        total = _seconds(phases, card, team)
        told = [f"{total:,.0f} s" if total >= 10 else f"{total:.1f} s"]
        if steps is not None:
            total = steps * total + count * sum(phase.seconds(card) for phase in evaluated)
            hours = total / 3600
            told.append(f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} h")
        return told

    card, *others = cards
    told, *hours = times(card)
    length = ""
    if hours:
        length = (
            f"; {steps:,} steps{f' and {evaluations}' if evaluated else ''} at least {hours[0]}"
        )
    left = UNCOUNTED
    if hours and count and not evaluated:
        left += f"; nor the {count} evaluations, whose size is known if eval.limit is set"
    total = sum(phase.seconds(card) for phase in phases)
    longest = max(phases, key=lambda phase: phase.seconds(card))
    where = f"{'' if team.cards == 1 else f'{team.cards} times '}an {card.titled(needed)}"
    if team.samplers:
        where += f" and {team.samplers} more that sample"
        where += " at the same time" if team.samples_ahead else ""
    more = "; ".join(f"{each.titled(needed)}: {', '.join(times(each))}" for each in others)
    return (
        f"a step of full length takes at least {told} on {where}, {longest.name} "
        f"{longest.seconds(card) / total:.0%} of {'all work' if team.samples_ahead else 'it'} "
        f"(limited by {longest.limit(card)}){length}{f' ({more})' if more else ''}; "
        f"not counted: {left}"
    )


def _seconds(phases: Sequence[Phase], card: Card, team: TeamSizes) -> float:
    """The least seconds of a step: those of its longer part, where samplers sample ahead."""
    sampling, *learning = (phase.seconds(card) for phase in phases)
    return max(sampling, sum(learning)) if team.samples_ahead else sampling + sum(learning)


def phases(
    config: Config,
    shape: Shape,
    sizes: Sizes,
    outside: Sequence[OutsideModel] = (),
    team: TeamSizes = ALONE,
) -> list[Phase]:
    """The phases of a step in which the card works, those of outside models included. Of several
    cards that share a step it is the first one: with its part of the rollouts, for which it reads
    all weights as often as for more of them at once, and with all that outside models read."""
    reading = [each.phase(config, sizes) for each in outside]
    if config.reading_passes.scores:
        reading.append(_scoring(config, shape, sizes))
    return [
        *([_sampling(config, shape, sizes, team.cards + team.samplers)] if config.samples else []),
        *(reading if config.learns else []),
        *([_learning(config, shape, sizes, team.cards)] if config.learns else []),
    ]


def evaluations(
    config: Config,
    shape: Shape,
    sizes: Sizes,
    team: TeamSizes = ALONE,
) -> Evaluations:
    """The evaluations of a run: before the first step, every ``eval.every`` steps and after the
    last, of ``eval.limit`` problems of each set."""
    of, steps = config.eval, config.run.steps
    sets, has_rows = len(config.evaluation_sets), of.rows is not None
    if not (sets or has_rows):
        return Evaluations(0, "")
    due = steps // of.every if of.every else 0
    count = 1 + due + (not of.every or steps % of.every > 0)
    if of.limit is None:
        return Evaluations(count, "")
    problems, rows = sets * of.limit, has_rows * of.limit  # a set may have fewer
    told, found, group = list[str](), list[Phase](), max(1, of.samples)
    if problems:
        told.append(
            f"up to {problems:,} problems{f' x {of.samples} completions' if of.samples else ''}"
        )
        part, new = problems / (team.cards + team.samplers), config.eval_max_new_tokens
        found.append(_decoding("evaluation", config, shape, sizes, part, group, new))
    if rows:
        told.append(f"up to {rows:,} rows")
        rows *= 2 if config.learns_pairs else 1
        new = 0 if config.of_stage.scores else sizes.context
        found.append(_reading("evaluation", config.model.quantize, shape, sizes, rows, new))
    return Evaluations(count, " and ".join(told), tuple(found))


def _sampling(config: Config, shape: Shape, sizes: Sizes, cards: int) -> Phase:
    """One card's part of a step's rollouts."""
    sample = config.sample
    prompts, group = sample.prompts_per_step / cards, sample.completions_per_prompt
    return _decoding("sampling", config, shape, sizes, prompts, group, sample.max_new_tokens)


def _decoding(
    name: str, config: Config, shape: Shape, sizes: Sizes, prompts: float, group: int, most: int
) -> Phase:
    """Each prompt is read once; then every decoded token, ``most`` in each of a ``group`` of
    completions, reads the weights, together with as many others as the cache holds, and the keys
    and values of its own completion."""
    rollouts, new = prompts * group, min(most, sizes.context)
    prompt = sizes.context - new
    held = prompt / group + new / 2
    held = shape.key_elements(held) if sizes.frees_windows else shape.cached * held
    at_once = max(1.0, min(rollouts, sizes.sequences(held)))
    base, head = _passed(shape), shape.vocabulary * shape.hidden
    flops = 2 * (base + shape.adapter) * (prompts * prompt + rollouts * new)
    flops += 2 * head * rollouts * new
    weights = _weight_bytes(config.model.quantize, shape) + 2 * head
    if shape.experts:  # those that tokens meet if routers choose all alike
        left = (1 - shape.active_experts / shape.experts) ** at_once
        weights += 2 * shape.experts * (1 - left)
    cached = 2 * 2 * shape.read_elements(new) * rollouts
    cached += 2 * shape.states.num_bytes(2) * rollouts * new  # read and written
    read = new * rollouts / at_once * weights + cached
    return Phase(name, flops, read, prompts * prompt + rollouts * new)


def classifying(
    name: str, weights: int, query: int, element_bytes: int, config: Config, sizes: Sizes
) -> Phase:
    """One pass of a separate reward model over a step's rollouts. Its way to the card and back is
    not counted.

    Args:
        weights: those that each token passes.
        query: elements of the queries of one token in all layers.
    """
    rows, context = config.units_per_step, sizes.context
    tokens = rows * context
    total = 2.0 * weights * tokens + 4 * query * rows * context**2 / 2
    read = max(1.0, tokens / sizes.micro_batch) * element_bytes * weights
    return Phase(name, total, read, tokens)


def reading(name: str, quantize: str, shape: Shape, config: Config, sizes: Sizes) -> Phase:
    """One pass of an outside model over a step's rollouts. Its way to the card and back is not
    counted."""
    new = min(config.sample.max_new_tokens, sizes.context)
    return _reading(name, quantize, shape, sizes, config.units_per_step, new)


def _reading(name: str, quantize: str, shape: Shape, sizes: Sizes, rows: int, new: int) -> Phase:
    """One pass over padded rows, with the logits of ``new`` tokens of each."""
    context = sizes.context
    tokens = rows * context
    total = 2.0 * _passed(shape) * tokens + 2 * shape.vocabulary * shape.hidden * rows * new
    total += 4 * shape.query * shape.attention_layers * rows * context**2 / 2
    batches = max(1.0, tokens / sizes.micro_batch)
    read = batches * (_weight_bytes(quantize, shape, unpacked=True) + 2 * shape.experts)
    return Phase(name, total, read, tokens)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the learner passes of one card's rows of a step."""

    tokens: float
    """Tokens of all rows; where rows are packed, a prompt counts once for all its completions."""
    pairs: float
    """Pairs of a token and one that it attends to."""
    trained: float
    """Tokens whose log-probs are computed."""


def _rows(config: Config, sizes: Sizes, cards: int) -> _Rows:
    rows = config.units_per_step * (2 if config.learns_pairs else 1) / cards
    new = min(config.sample.max_new_tokens, sizes.context) if config.samples else sizes.context
    prompt, group = sizes.context - new, config.sample.completions_per_prompt
    prompts = rows / group if config.train.packing != "padded" else rows
    tokens = prompts * prompt + rows * new
    pairs = prompts * prompt**2 / 2 + rows * (new * prompt + new**2 / 2)
    return _Rows(tokens, pairs, rows * new)


def _scoring(config: Config, shape: Shape, sizes: Sizes) -> Phase:
    """The passes of reward models that are adapters over the base, over a whole step."""
    rows, passes = _rows(config, sizes, 1), config.reading_passes.scores
    total = 2 * (_passed(shape) + shape.adapter) * rows.tokens
    total += 4 * shape.query * shape.attention_layers * rows.pairs
    read = max(1.0, rows.tokens / sizes.micro_batch) * _read_of_pass(config, shape)
    return Phase("the reward model", passes * total, passes * read, rows.tokens)


def _read_of_pass(config: Config, shape: Shape) -> float:
    """Bytes of weights that one pass of a micro-batch reads."""
    return _weight_bytes(config.model.quantize, shape, unpacked=True) + 2 * shape.experts


def _learning(config: Config, shape: Shape, sizes: Sizes, cards: int) -> Phase:
    """The passes before the first update, and forward and backward passes of every epoch. The base
    has gradients in its inputs alone, or with ``model.train: full`` in its weights, too."""
    rows, of, train = _rows(config, sizes, cards), config.reading_passes, config.train
    updates = train.epochs * train.optimizer_steps
    is_old_read = config.stage == "rl" and (config.algorithm.row().needs_whole_step or updates > 1)
    measured, epochs = is_old_read + of.logprobs, train.epochs + of.learned
    again = 1.0 if config.train.gradient_checkpointing else 0.0
    if sizes.skip_every:
        again += 1 / sizes.skip_every

    def flops(backward: float) -> float:
        """Cost in forward passes, where a backward pass costs ``backward`` of them."""
        return measured + of.values + epochs * (1 + again + backward)

    base, head = _passed(shape), shape.vocabulary * shape.hidden
    is_full = config.model.train == "full"
    total = 2 * base * rows.tokens * flops(1 + is_full) + 2 * shape.adapter * rows.tokens * flops(2)
    total += 4 * shape.query * shape.attention_layers * rows.pairs * flops(BACKWARD_OF_ATTENTION)
    if not config.of_stage.scores:
        total += 2 * head * rows.trained * (measured + (2 + 2 * is_full) * train.epochs)
    batches = max(1.0, rows.tokens / sizes.micro_batch)
    read = batches * flops(1) * _read_of_pass(config, shape)
    return Phase("learning", total, read, rows.tokens)


def _passed(shape: Shape) -> int:
    """Weights of the linear layers and experts that one token passes."""
    return sum(shape.packable) + shape.active_experts


def _weight_bytes(quantize: str, shape: Shape, *, unpacked: bool = False) -> float:
    """Bytes of the linear layers, without experts, that one pass reads, and writes where it unpacks
    them first."""
    weights = sum(shape.packable)
    if quantize == "none":
        return 2.0 * weights
    return weights * (0.5 + (UNPACKED_BYTES if unpacked else 0))
