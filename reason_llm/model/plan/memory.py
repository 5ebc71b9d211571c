"""Memory plan: the bytes of each phase, before a weight is read. ``meter`` measures them.

Sizes depend on the model's config, the run's config and the machine's memory (``machine``) alone,
so that a resumed run batches as the first one did. Each phase gets all that the other leaves.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reason_llm.config import Config
from reason_llm.errors import ConfigError
from reason_llm.model.plan import bound
from reason_llm.model.plan.bound import OutsideModel
from reason_llm.model.plan.machine import GIB, Machine
from reason_llm.model.plan.shape import Shape
from reason_llm.model.plan.states import LINE as STATES
from reason_llm.model.plan.team_sizes import ALONE, TeamSizes, team_sizes
from reason_llm.model.sizes import (
    MAX_LORA_RANKS,
    TILE_TOKENS,
    AttachmentSizes,
    EngineSizes,
    Line,
    chunk_bytes,
)

USABLE_FRACTION = {"cuda": 0.95, "cpu": 0.75}
"""Usable part of the budget; the rest is fragmentation (GPU) or other programs (CPU)."""
MOST_SEQUENCES = {"cpu": 256, "cuda": 1024}
"""Sequences that are decoded at once; on a GPU fewer, as its memory says."""
MOST_MICRO_BATCH_TOKENS = {"cpu": 512, "cuda": 16384}
"""Larger micro-batches gain no speed. On a CPU, where padded, they lose some: more padding."""
PACKED_MICRO_BATCH_TOKENS = 2048
"""The same on a CPU for rows end to end."""
PROMPTS_PER_MICRO_BATCH = 8
"""Micro-batches on a CPU are as long as that many of the longest prompt, where that is more: each
passes its prompts through the model again."""
PREFILL_TOKENS = 2048
"""Tokens of one forward pass of vLLM on a GPU; at least one for each sequence."""
READ_TOKENS = 8192
"""Tokens of all prompts together in one forward pass of the Transformers sampler."""
RUNTIME_BYTES = {"cuda": 0.85 * GIB, "cpu": 0.7 * GIB}
"""CUDA's context (0.61 GiB), kernels and workspaces; on a CPU Python and its libraries."""
VLLM_BYTES = {"cuda": 0.25 * GIB, "cpu": 0.7 * GIB}
"""Bytes that vLLM adds to that: CUDA graphs on a GPU, its libraries on a CPU."""
NARROW = 896
"""Hidden size of the model for which those of a GPU are."""
WIDTH_BYTES = {"cuda": 0.35 * GIB / (3584 - NARROW), "cpu": 0.0}
"""Bytes that each of the two grows by for each element of the hidden size above ``NARROW``, as
workspaces, CUDA graphs and the allocator's reserve do: together 1.1 GiB at 0.5 B, 1.8 GiB at 7 B.
Source: docs/gpu.md, 26 and 27 November 2026: measured, without all other lines of the plan, 1.0
and 1.1 GiB at 0.5 B (hidden size 896), 1.1 to 1.75 GiB at 7 B (3,584). Others are not measured."""
KERNELS_BYTES = int(0.25 * GIB)
"""oneDNN's kernels for products in bfloat16 on a CPU, one for each shape that occurs."""
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.04, "paged_adamw_8bit": 2.04, "adafactor": 0.1}
"""Moments of each trained parameter, with the scales of blocks of 256; Adafactor's are a row and a
column of each matrix."""
UPDATE_BYTES = {"adafactor": 8.0}
"""Temporaries of one parameter's step, which depends on all of its elements; by the others in none,
but for 20 bytes by bitsandbytes' 8-bit ones on a CPU."""
STEPPED_AT_ONCE = 2**23
"""Elements of a parameter in bfloat16 whose step is made at once by those others."""
OTHER_FILES = 1.01
"""Disk of a run, of its weights and moments: headers, the tokenizer's files, records."""
HOST_BYTES = 5 * GIB
"""Host memory of a process with CUDA, torch and vLLM, without the checkpoint's pages."""
ASSUMED_PROMPT_TOKENS = 1024
"""Longest prompt where the data was not read and model.context_tokens is not set."""
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**25}
"""Logits of the log-probs that are computed at once; on a GPU in no more than
``CHUNK_FRACTION`` of its memory."""
CHUNK_FRACTION = 1 / 50
SKIPS = (3, 2)
"""Values of ``skip_every``, tried in this order where the longest row does not fit otherwise."""
SHORTEST_CONTEXT = 256
"""Shortest context in tokens that is recommended in an error."""
BLOCK_TOKENS = 128
"""Largest block in which vLLM hands out its KV cache, and one more for each sequence; with
recurrent layers ``States.block_tokens``, if that is more."""
CACHES = ("KV cache", STATES)
"""Lines of the ledger that vLLM's cache holds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes that follow from machine, model and config, and the ledger behind them."""

    config: Config
    """Its engine is chosen."""
    machine: Machine
    context_tokens: int
    """Longest prompt plus completion."""
    limit_tokens: int
    """The most that the model or the config allows of it."""
    full_tokens: int
    """Longest rollout or row to learn from: the context, or what the options of the data leave."""
    cache_tokens: int
    """KV cache, all sequences together."""
    micro_batch_tokens: int
    chunk_tokens: int
    """Tokens whose logits exist at once while learning."""
    engine: EngineSizes | None
    """None: without vLLM."""
    lines: tuple[Line, ...]
    host_bytes: int
    """Planned host memory of this process on a machine with a GPU; without one everything is in the
    ledger."""
    team_host_bytes: int
    """Host memory of all processes of the run, if they are on one machine."""
    checkpoint_bytes: int
    """Size on disk of each: adapter, optimizer state, and the best adapter."""
    written_bytes: int
    """The most that a run from its start to its end has on disk at once, without rollouts and
    downloads."""
    sequence_tokens: int
    """Tokens of the KV cache that a sequence of full length takes; in layers with a window vLLM
    keeps only that."""
    short_sequences: int
    """The most sequences that are decoded at once; each has its recurrent states."""
    phases: tuple[bound.Phase, ...]
    """The least cost of one card's share of a step."""
    evaluations: bound.Evaluations
    team: TeamSizes = ALONE
    """Cards that share a step."""
    skip_every: int = 0
    """Of so many layers one keeps no input; 0: all keep theirs."""
    tile_tokens: int | None = None
    """Tokens of a feed-forward's tile; None: all of a micro-batch."""
    downloads: tuple[tuple[str, int], ...] = ()
    """Hub ids whose weights are not in the cache, and the bytes of these."""

    @property
    def peak(self) -> Line:
        """Planned peak of each phase, in bytes."""
        return _total(self.lines)

    @property
    def full_sequences(self) -> int:
        """Sequences of full length that the KV cache holds at once."""
        return self.cache_tokens // self.sequence_tokens

    def table(self) -> list[str]:
        """The ledger as lines of text."""
        is_gpu, peak = self.machine.kind == "cuda", self.peak
        head = f"memory on a {'GPU' if is_gpu else 'CPU'} of {_gib(self.machine.budget_bytes)} GiB"
        phases = ("sampling", "learning", *(["scoring"] if peak.scoring else []))
        rows = [f"{head:<52}" + "".join(f"{phase:>12}" for phase in phases)]
        for line in (*self.lines, peak):
            sizes = (_shown(getattr(line, phase)) for phase in phases)
            rows.append(f"{line.name:<52}" + "".join(f"{size:>12}" for size in sizes))
        chosen = [f"context {self.context_tokens:,} tokens"]
        if self.full_tokens < self.context_tokens:
            samples = self.config.samples
            option = "data.max_prompt_tokens" if samples else "data.max_tokens"
            chosen[0] += f" ({'rollouts' if samples else 'rows'} of at most {self.full_tokens:,} "
            chosen[0] += f"by {option}; memory is planned for the context)"
        if self.engine is not None:
            most, whole = self.short_sequences, self.full_sequences
            shorter = f", {most} shorter ones" if whole < most else ""
            chosen.append(f"{min(most, whole)} sequences at once of full length{shorter}")
        if any(line.name == "KV cache" and line.sampling for line in self.lines):
            longest = self.full_tokens if self.config.samples else self.context_tokens
            in_all = " in all layers" * (self.sequence_tokens < longest)
            chosen.append(f"KV cache {self.cache_tokens:,} tokens{in_all}")
        micro_batches = f"micro-batches of {self.micro_batch_tokens:,} tokens"
        if self.tile_tokens is not None:
            micro_batches += f" (feed-forwards in tiles of {self.tile_tokens:,})"
        chosen.append(micro_batches)
        if self.skip_every:
            chosen.append(f"of {self.skip_every} layers one keeps no input")
        rows.append(", ".join(chosen))
        rows += [f"disk: downloads {size / 1e9:.1f} GB of {name}" for name, size in self.downloads]
        run = self.config.run
        written = f"disk: writes checkpoints of {_shown(self.checkpoint_bytes)}"
        most = self.written_bytes + sum(size for _, size in self.downloads)
        kept = "models" if self.config.model.train == "full" else "adapters"
        written += f" and keeps {run.keep_checkpoints}; at most {_shown(most)} at once (one being "
        written += f"written, the kept {kept}{', what is downloaded' * bool(self.downloads)})"
        if self.config.samples and run.keep_buffers_gib:
            written += f", and rollouts of up to {run.keep_buffers_gib:g} GiB"
        rows.append(written)
        if is_gpu or self.team.processes > 1:
            rows.append(self._host)
        if run.replicas == "auto":
            rows.append("run.replicas=auto: planned for 1 GPU; name a number to plan several")
        if is_gpu:
            budget = self.machine.budget_bytes
            most = max(peak.sampling, peak.learning, peak.scoring)
            rows.append(f"fits: {_gib(most)} of {_gib(budget)} GiB")
            if self.phases:
                kinds = bound.cards_of(self.machine)
                steps = run.steps if run.epochs is None else None
                team, evaluations = self.team, self.evaluations
                time = bound.line(self.phases, kinds, steps, most / GIB, team, evaluations)
                rows[-1] += f"; {time}"
                if steps is None:
                    rows[-1] += f"; the data decides how many steps run.epochs={run.epochs:g} has"
        return rows

    @property
    def _host(self) -> str:
        """Line with the host memory that the run needs on one machine."""
        there, count = self.machine.host_bytes, self.team.processes
        whose = f"{count} processes on one machine need" if count > 1 else "needs"
        if self.config.run.replicas == "auto":
            whose = "each replica needs"
        needed = self.team_host_bytes if count > 1 else self.host_bytes
        line = f"host memory: {whose} {_gib(needed)} of {_gib(there)} GiB"
        line += "; the table is of one of them" * (count > 1)
        if needed > there and not self.machine.is_host_known:
            line += "; that is this machine's: name the planned one's as memory.host_gib"
        return line


def _total(lines: Sequence[Line]) -> Line:
    sizes = zip(*((line.sampling, line.learning, line.scoring) for line in lines), strict=True)
    return Line("total", *map(sum, sizes))


def plan(
    config: Config,
    shape: Shape,
    machine: Machine,
    limit: int,
    longest_prompt: int | None = None,
    learns: bool = True,
    longest_row: int = 0,
    outside: Sequence[OutsideModel] = (),
    attachments: AttachmentSizes | None = None,
) -> Plan:
    """Plan with the largest KV cache and micro-batches that fit.

    Args:
        config: its engine is chosen already.
        shape: of the model with its adapter.
        limit: longest context that the model or the config allows.
        longest_prompt: tokens of the longest prompt of all; None if the data was not read.
        longest_row: tokens of the longest row, of a stage that learns from a set of rows.
        learns: False: there is no learning phase, nor an optimizer.
        outside: models with weights of their own that read the rollouts.
        attachments: of the data; None without any.

    Raises:
        ConfigError: it does not fit; with what it needs and the nearest setting that does.
    """
    context = _context_tokens(config, limit, longest_prompt, longest_row)
    draft = _Draft(config, shape, machine, context, learns, tuple(outside), attachments)
    if draft.can_skip:  # no more than it takes, as each skipped input takes time
        ways = [replace(draft, skip_every=each) for each in (0, *SKIPS)]
        draft = next((each for each in ways if each.least() <= draft.usable), ways[-1])
    if draft.least() > draft.usable:
        raise ConfigError(_refusal(draft, limit, longest_prompt, longest_row))

    def outside_sampling(tokens: int) -> int:
        total = draft.total(0, tokens)
        return max(total.learning, total.scoring)

    most = MOST_MICRO_BATCH_TOKENS[machine.kind]
    if config.train.packing != "padded" and machine.kind == "cpu":
        most = max(PACKED_MICRO_BATCH_TOKENS, PROMPTS_PER_MICRO_BATCH * (longest_prompt or 0))
    micro_batch = draft.largest(draft.unit_tokens, most, outside_sampling)
    asked = config.train.micro_batch_tokens
    if asked != "auto":
        needed = outside_sampling(asked)
        if needed > draft.usable:
            raise ConfigError(
                f"train.micro_batch_tokens={asked} needs {_gib(needed)} GiB and "
                f"{_gib(draft.usable)} GiB is there; set it to {micro_batch} or to auto"
            )
        micro_batch = asked
    is_one_machine = config.run.ray is None
    needed, there = draft.host_bytes(micro_batch, is_one_machine), machine.host_bytes
    if needed > there and machine.is_host_known:
        count = draft.team.processes if is_one_machine else 1
        whose = f"{count} processes on one machine need" if count > 1 else "are needed"
        fixes = ["raise it"]
        if count > 1:
            fixes.append("lower run.replicas or run.samplers")
        if config.train.gradient_checkpointing == "offload":
            fixes.append("set train.gradient_checkpointing to true")
        raise ConfigError(
            f"memory.host_gib={_gib(there)} is less than the {_gib(needed)} GiB of host memory "
            f"that {whose}; {', or '.join(fixes)}"
        )
    wanted = draft.sequences * (draft.held_cache + draft.block_tokens)
    cache = draft.largest(draft.least_cache, wanted, lambda tokens: draft.total(tokens, 1).sampling)
    return draft.plan(cache, micro_batch, limit)


def element_bytes(config: Config, machine: Machine, quantize: str) -> int:
    """Bytes of an element of a model that is loaded in the run's dtype."""
    small = machine.kind == "cuda" or quantize == "nf4"
    dtype = config.model.dtype
    name = dtype if dtype != "auto" else "bfloat16" if small else "float32"
    return 2 if name == "bfloat16" else 4


@dataclass(frozen=True, slots=True)
class _Draft:
    """A plan in which two sizes are still to be chosen."""

    config: Config
    shape: Shape
    machine: Machine
    context: int
    learns: bool
    outside: tuple[OutsideModel, ...] = ()
    attachments: AttachmentSizes | None = None
    skip_every: int = 0
    """Of so many layers one keeps no input, which takes longer; 0: all keep theirs."""

    @property
    def team(self) -> TeamSizes:
        return team_sizes(self.config)

    @property
    def can_skip(self) -> bool:
        """Whether every second layer need not keep its input."""
        return self.config.train.gradient_checkpointing is True and self._recomputes

    @property
    def can_pack(self) -> bool:
        """Whether the base could be in NF4 with all other options as they are, and is not."""
        model, fold = self.config.model, self.config.sample.fold
        is_free = model.quantize == "none" and model.train != "full" and fold is not True
        return is_free and self.machine.kind == "cuda" and self.shape.can_pack

    @property
    def _recomputes(self) -> bool:
        """Whether layers are computed again in the backward pass, by us and not by Unsloth."""
        is_ours = self.config.model.backend != "unsloth" or not self.under_vllm
        return is_ours and bool(self.config.train.gradient_checkpointing)

    @property
    def tile_tokens(self) -> int | None:
        """Tokens of a feed-forward's tile; None: there are no tiles."""
        is_tiled = self._recomputes and not self.shape.untiled
        return TILE_TOKENS[self.machine.kind] if is_tiled else None

    @property
    def usable(self) -> int:
        return int(USABLE_FRACTION[self.machine.kind] * self.machine.budget_bytes)

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.config, self.machine, self.config.model.quantize)

    @property
    def learned(self) -> dict[str, int]:
        """Trained parameters by role: its adapter's and its head's."""
        has_score = self.config.of_stage.scores
        counts = {"policy": self.shape.trained + (self.shape.hidden if has_score else 0)}
        for role in self.config.learned_roles:
            counts[role] = self._adapter_of(role) + self.shape.hidden + 1
        return counts

    def _adapter_of(self, role: str) -> int:
        """Parameters of a role's adapter: by its file, where it has one and it is there already, as
        it is when a run begins; else as many as the policy's."""
        folder = self.config.roles[role]
        if folder is None or not folder.exists():
            return self.shape.adapter
        from reason_llm.model import adapters

        if not (folder / adapters.WEIGHTS).exists():
            return self.shape.adapter
        return adapters.num_parameters(folder)

    def _moments(self, role: str) -> int:
        """Bytes of a role's optimizer state."""
        if not self.learns:
            return 0
        train, count = self.config.train, self.learned[role]
        size = count * OPTIMIZER_BYTES[train.optimizer]
        return int(size)

    @property
    def is_full(self) -> bool:
        return self.config.model.train == "full"

    @property
    def is_bare(self) -> bool:
        """Whether vLLM has no adapter slot."""
        return self.is_full or self.config.sample.fold is True

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained parameter, and of its gradient."""
        return self.element_bytes if self.is_full else 4

    @property
    def update_bytes(self) -> int:
        """Bytes of the largest step: of elements in bfloat16 the copies of them and of their
        gradients in float32, and the optimizer's temporaries."""
        name, elements = self.config.train.optimizer, self.shape.largest
        copies, more = 8 if self.trained_bytes < 4 else 0, UPDATE_BYTES.get(name, 0.0)
        if copies and not more:
            elements = min(elements, STEPPED_AT_ONCE)
        if self.machine.kind == "cpu" and name.endswith("8bit"):
            more = 20.0
        return int(elements * (copies + more))

    @property
    def optimizer_bytes(self) -> int:
        """Moments on the device: on a GPU of one role at a time, the others wait in host memory."""
        sizes = [self._moments(role) for role in self.learned]
        return max(sizes) if self.machine.kind == "cuda" else sum(sizes)

    @property
    def unit_tokens(self) -> int:
        """Tokens of the longest unit that is never split: a row, or both sides of a pair."""
        return self.context * (2 if self.config.learns_pairs else 1)

    @property
    def full_tokens(self) -> int:
        """The longest rollout or row to learn from that the options of the data leave."""
        data, most = self.config.data, None
        if not self.config.samples:
            most = data.max_tokens if data.is_offline else None
        elif data.max_prompt_tokens is not None:
            most = data.max_prompt_tokens + self.config.sample.max_new_tokens
        return min(self.context, most or self.context)

    @property
    def under_vllm(self) -> bool:
        return self.config.sample.engine == "vllm"

    @property
    def sequences(self) -> int:
        """Sequences decoded at once; fewer if their logits would take a twentieth of the memory."""
        most = min(self.config.sample.rollouts_per_step, MOST_SEQUENCES[self.machine.kind])
        while most > 16 and most * self._logit_bytes > self.machine.budget_bytes / 20:
            most //= 2
        return most

    @property
    def _logit_bytes(self) -> int:
        """Bytes of one sequence: four float32 copies of the logits, and vLLM's token counts."""
        return self.shape.vocabulary * 4 * (5 if self.under_vllm else 4)

    @property
    def _counts_bytes(self) -> int:
        """Bytes of one sequence in vLLM's counts of tokens, which stay in all phases."""
        on_card = self.under_vllm and self.machine.kind == "cuda"
        return self.shape.vocabulary * 4 if on_card else 0

    @property
    def _chunk_bytes(self) -> int:
        """Bytes of the log-prob chunk per token."""
        shape, is_trained = self.shape, self.config.model.adapter.adapts_head or self.is_full
        return chunk_bytes(shape.vocabulary, self.element_bytes, shape.has_softcap, is_trained)

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits exist at once while learning."""
        most = CHUNK_ELEMENTS[self.machine.kind] // self.shape.vocabulary
        if self.machine.kind == "cuda":
            most = min(most, int(CHUNK_FRACTION * self.machine.budget_bytes) // self._chunk_bytes)
        return max(1, most)

    @property
    def least_cache(self) -> int:
        """Tokens of the cache that one sequence needs: in layers with a window, vLLM 0.32 reserves
        it and two batches in flight (SlidingWindowSpec.max_admission_blocks_per_request)."""
        return self._in_all_layers(self.context, 2 * self.prefill_tokens) + self.block_tokens

    @property
    def held_cache(self) -> int:
        """Tokens of the cache that a sequence as long as the context takes while it is decoded."""
        return self._in_all_layers(self.context, 0)

    @property
    def block_tokens(self) -> int:
        """Tokens of the blocks that a sequence fills in part."""
        if not self.under_vllm:
            return 2 * BLOCK_TOKENS
        states, keys = self.shape.states, self.shape.key_value
        return 2 * max(BLOCK_TOKENS, states.block_tokens(keys, self.element_bytes))

    @property
    def frees_windows(self) -> bool:
        """Whether the cache drops what is before a layer's window: vLLM's does by default, and
        ours gives each row its full length."""
        return self.under_vllm and self.machine.kind == "cuda" and bool(self.shape.windows)

    def _in_all_layers(self, tokens: int, more: int) -> int:
        """Tokens with keys in all layers that take as much as so many with ``more`` than the window
        in the layers that have one."""
        if not self.frees_windows:
            return tokens
        return math.ceil(self.shape.key_elements(tokens, more) / self.shape.cached)

    def state_bytes(self, cache_tokens: int) -> int:
        """Bytes of the recurrent states of the sequences of full length that fit into the cache:
        one for each, and with vLLM's prefix cache a second one, at the end of its last block."""
        each = self.shape.states.num_bytes(self.element_bytes)
        if self.under_vllm and self.machine.kind == "cuda":
            each *= 2
        return -(-cache_tokens // self.least_cache) * each

    @property
    def prefill_tokens(self) -> int:
        if self.under_vllm and self.machine.kind == "cuda":
            return max(PREFILL_TOKENS, self.sequences)
        return min(self.context * self.sequences, READ_TOKENS)

    def resident(self) -> dict[str, int]:
        """Bytes that stay in all phases."""
        model, shape, machine = self.config.model, self.shape, self.machine.kind
        is_gpu = machine == "cuda"
        kind = "bfloat16" if self.element_bytes == 2 else "float32"
        width = WIDTH_BYTES[machine] * (shape.hidden - NARROW)
        runtime = RUNTIME_BYTES[machine] + width
        base = shape.weight_bytes(self.element_bytes, model.quantize, self.under_vllm)
        sizes = {f"base weights ({'NF4' if model.quantize == 'nf4' else kind})": base}
        if self.attachments is not None:
            sizes |= self.attachments.resident(self.element_bytes)
        if not self.is_full:
            sizes[f"adapter, rank {model.adapter.rank}"] = self.learned["policy"] * 4
        sizes["optimizer state"] = self.optimizer_bytes
        if self.learns:
            counts = {name: self._adapter_of(name) for name in self.config.roles} | self.learned
            for name in self.config.roles:
                sizes[f"adapter of the role {name}"] = counts[name] * 4
        if self.under_vllm:
            rank = next((r for r in MAX_LORA_RANKS if r >= model.adapter.rank), MAX_LORA_RANKS[-1])
            if not self.is_bare:
                sizes["vLLM's adapter slot"] = rank * shape.adapter_lines * self.element_bytes
            runtime += VLLM_BYTES[machine] + width
            runtime += self.sequences * self._counts_bytes
        sizes |= self.team.gpu_bytes if is_gpu else {}
        sizes["libraries, contexts, graphs"] = int(runtime)
        if not is_gpu and self.element_bytes == 2:
            sizes["compiled kernels"] = KERNELS_BYTES
        return sizes

    def lines(self, cache_tokens: int, micro_batch_tokens: int) -> list[Line]:
        """All lines of the ledger."""
        config, shape, size = self.config, self.shape, self.element_bytes
        tokens = max(micro_batch_tokens, self.unit_tokens)  # a longer unit is a separate batch
        states = self.state_bytes(cache_tokens)
        widest = max(shape.packable) * 2 * 2 if config.model.quantize == "nf4" else 0
        # Each pass holds a few vectors of a layer; the decoder of Transformers keeps them in full.
        prefill = self.prefill_tokens * (3 * shape.intermediate + 4 * shape.hidden) * size
        passing = prefill + self.sequences * self._logit_bytes
        is_packed, again = config.train.packing != "padded", config.train.gradient_checkpointing
        is_flash = is_packed and self.machine.kind == "cuda"
        activations = shape.activation_bytes(
            tokens, self.context, size, again, is_packed, is_flash, self.tile_tokens,
            self.skip_every,
        )  # fmt: skip
        if config.train.router_aux_loss_coef:  # logits and probabilities
            activations += 8 * shape.routed * tokens
        chunks = 0 if config.of_stage.scores else self._chunk_bytes * self.chunk_tokens
        gradients = max(self.learned.values()) * self.trained_bytes
        gradients *= self.team.gradients
        if self.is_full and self.tile_tokens is not None:  # a layer's gradients, and their sums
            activations += sum(shape.packable) // shape.layers * (4 + size)
        if self.is_full:  # the head's gradient is summed over chunks, and waits for the embedding's
            head, kept = shape.vocabulary * shape.hidden * size, activations
            if again == "offload":
                kept = 0
            elif again:
                kept = tokens * shape.kept_bytes_per_token(size, self.skip_every)
            chunks += head + max(0, head + kept - activations)
        step = self.update_bytes - activations - widest - chunks
        host = self._held_bytes if self.machine.kind == "cpu" else 0
        is_scored = self.learns and bool(self.outside)
        lines = [
            *(Line(n, each, each, each * is_scored) for n, each in self.resident().items()),
            Line("KV cache", sampling=cache_tokens * shape.kv_bytes_per_token(size)),
            *([Line(STATES, states)] if states else []),
            Line("prompts and logits in flight", sampling=passing + widest),
            Line("gradients", learning=gradients),
            Line("activations", learning=activations + widest),
            Line("log-prob chunk", learning=chunks),
            *([Line("more, for the largest weight's step", learning=step)] if step > 0 else []),
            *([Line("host copies", host, host)] if host else []),
            *(self._outside_models(tokens) if is_scored else []),
            *self._attachment_lines(),
        ]
        if not config.judges_answers:
            lines = [replace(line, sampling=0) for line in lines]
        return lines if self.learns else [replace(line, learning=0) for line in lines]

    def _attachment_lines(self) -> Sequence[Line]:
        if self.attachments is None:
            return ()
        # max_num_batched_tokens, which on a CPU is vLLM's own choice
        tokens = max(self.prefill_tokens, PREFILL_TOKENS) if self.under_vllm else None
        is_gpu = self.machine.kind == "cuda"
        return self.attachments.lines(self.element_bytes, self.context, tokens, is_gpu)

    def _outside_models(self, tokens: int) -> list[Line]:
        """The outside models, with a batch of so many tokens. On a GPU one is there at a time, in
        the scoring phase alone; without one all of them stay in host memory."""
        sizes = {each.name: each.weight_bytes for each in self.outside}
        passing = max(each.passing_bytes(tokens, self.chunk_tokens) for each in self.outside)
        if self.machine.kind == "cuda":
            largest = max(sizes, key=lambda name: sizes[name])
            found = [Line(largest, scoring=sizes[largest])]
        else:
            found = [Line(name, size, size, size) for name, size in sizes.items()]
        return [*found, Line("activations while it reads", scoring=passing)]

    def total(self, cache_tokens: int, micro_batch_tokens: int) -> Line:
        return _total(self.lines(cache_tokens, micro_batch_tokens))

    def least(self) -> int:
        """The smallest sizes: one sequence at a time in every phase."""
        total = self.total(self.least_cache, self.unit_tokens)
        return max(total.sampling, total.learning, total.scoring)

    def largest(self, least: int, most: int, total: Callable[[int], int]) -> int:
        """The largest number from ``least`` to ``most`` whose total is usable."""
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if total(middle) <= self.usable else (least, middle - 1)
        return least

    def least_budget(self) -> float:
        """The smallest budget, in tenths of a GiB, that is enough. A larger one has more sequences
        at once, and larger chunks of logits, which grow by less than a tenth of it."""
        tenths, tried = math.ceil(10 * self.least() / GIB), self
        while tried.least() > tried.usable:
            tenths += 1
            budget = int(tenths / 10 * GIB)
            tried = replace(self, machine=replace(self.machine, budget_bytes=budget))
        return tenths / 10

    def plan(self, cache_tokens: int, micro_batch_tokens: int, limit: int) -> Plan:
        lines = tuple(self.lines(cache_tokens, micro_batch_tokens))
        states, total = self.state_bytes(self.least_cache), _total(lines)
        pool = sum(line.sampling for line in lines if line.name in CACHES)
        engine = None
        if self.under_vllm:
            engine = EngineSizes(
                context_tokens=self.context,
                kv_cache_bytes=pool,
                max_sequences=self.sequences,
                lora_rank=0 if self.is_bare else self.config.model.adapter.rank,
                lora_targets=self.shape.adapted,
                quantize=self.config.model.quantize,
                prefill_tokens=self.prefill_tokens if self.machine.kind == "cuda" else None,
                other_bytes=sum(line.sampling for line in lines if line.name not in CACHES),
                attachments=self.attachments,
            )
        tile, longest = self.tile_tokens, max(micro_batch_tokens, self.unit_tokens)
        sizes = bound.Sizes(
            self.context, pool, micro_batch_tokens, self.sequences, self.skip_every,
            state_bytes=states, element_bytes=self.element_bytes, frees_windows=self.frees_windows,
        )  # fmt: skip
        full = replace(sizes, context=self.full_tokens)  # held-out rows may be longer
        return Plan(
            config=self.config,
            machine=self.machine,
            context_tokens=self.context,
            limit_tokens=limit,
            full_tokens=self.full_tokens,
            cache_tokens=cache_tokens,
            micro_batch_tokens=micro_batch_tokens,
            chunk_tokens=self.chunk_tokens,
            engine=engine,
            lines=lines,
            host_bytes=self.host_bytes(micro_batch_tokens),
            team_host_bytes=self.host_bytes(micro_batch_tokens, is_team=True)
            if self.machine.kind == "cuda"
            else self.team.processes * max(total.sampling, total.learning, total.scoring),
            checkpoint_bytes=self._checkpoint_bytes,
            written_bytes=self._written_bytes,
            sequence_tokens=self.least_cache
            if states
            else self._in_all_layers(self.full_tokens if self.config.samples else self.context, 0),
            short_sequences=int(sizes.sequences(0)),
            phases=tuple(bound.phases(self.config, self.shape, full, self.outside, self.team)),
            evaluations=bound.evaluations(self.config, self.shape, sizes, self.team),
            team=self.team,
            skip_every=self.skip_every,
            tile_tokens=tile if tile is not None and tile < longest else None,
        )

    @property
    def _keeps_best(self) -> bool:
        config = self.config
        evaluates = bool(config.evaluation_sets) or config.eval.rows is not None
        return config.run.keep_best and config.learns and evaluates

    @property
    def _model_bytes(self) -> int:
        """Bytes of the policy's file: an adapter, or the whole model."""
        whole = self.shape.weight_bytes(self.element_bytes, "none", self.under_vllm)
        return whole if self.is_full else 4 * self.learned["policy"]

    @property
    def _checkpoint_bytes(self) -> int:
        others = sum(4 * count for role, count in self.learned.items() if role != "policy")
        held = others + sum(self._moments(role) for role in self.learned)
        return held + (1 + self._keeps_best + self.team.earlier_adapters) * self._model_bytes

    @property
    def _written_bytes(self) -> int:
        """While a checkpoint is written, or at the end, when the last adapter is; with the folder
        of the best adapter."""
        run, best = self.config.run, self._keeps_best * self._model_bytes
        newest = max(self._checkpoint_bytes, self._model_bytes)
        most = run.keep_checkpoints * self._checkpoint_bytes + newest
        return int(OTHER_FILES * (most + best))

    @property
    def _held_bytes(self) -> int:
        """Copies of all weights in host memory: of the best evaluation until a checkpoint has it;
        and of the trained ones while the checkpoint on disk is in their place, for a reference."""
        if not (self.is_full and self.learns):
            return 0
        return self._keeps_best * self._model_bytes + self.config.reads_base * (
            self.shape.trained * self.element_bytes
        )

    def host_bytes(self, micro_batch_tokens: int, is_team: bool = False) -> int:
        """Host memory of the first process, which alone scores and writes, or of all of them."""
        if self.machine.kind == "cpu":
            return 0
        each, team = HOST_BYTES, self.team
        if self.attachments is not None:
            each += self.attachments.kept_bytes(self.element_bytes)
        # only one role is on the GPU
        learner = self._held_bytes + (self.optimizer_bytes if len(self.learned) > 1 else 0)
        if self.config.train.gradient_checkpointing == "offload":
            tokens = max(micro_batch_tokens, self.unit_tokens)
            learner += self.shape.pinned_bytes(tokens, self.element_bytes)
        first = team.host_states * self._checkpoint_bytes
        first += team.host_adapters * 4 * self.learned["policy"]
        first += sum(model.weight_bytes for model in self.outside) if self.learns else 0
        if self.is_full:  # what is written of a checkpoint at once
            first += max(self._model_bytes, self.optimizer_bytes)
        learners, processes = (team.cards, team.processes) if is_team else (1, 1)
        return processes * each + learners * learner + first


def _shown(size: int) -> str:
    if not size:
        return "-"
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _context_tokens(
    config: Config, limit: int, longest_prompt: int | None, longest_row: int
) -> int:
    completion = max(config.sample.max_new_tokens, config.eval_max_new_tokens)
    if longest_prompt is not None:
        return max(longest_row, longest_prompt + completion if longest_prompt else 0)
    return config.model.context_tokens or min(limit, ASSUMED_PROMPT_TOKENS + completion)


def _refusal(draft: _Draft, limit: int, longest_prompt: int | None, longest_row: int) -> str:
    """Error with what does not fit and the nearest settings that do, each alone."""
    config, machine = draft.config, draft.machine
    lines = draft.lines(draft.least_cache, draft.unit_tokens)
    total = _total(lines)
    phase = max(("learning", "sampling", "scoring"), key=lambda name: getattr(total, name))
    largest = sorted(lines, key=lambda line: -getattr(line, phase))[:2]
    parts = ", ".join(f"{line.name} {_gib(getattr(line, phase))}" for line in largest)

    def with_option(option: str, value: object) -> _Draft:
        other = config.with_options({option: value})
        context = _context_tokens(other, limit, longest_prompt, longest_row)
        tried = replace(draft, config=other, context=context)
        return replace(tried, skip_every=SKIPS[-1] if tried.can_skip else 0)

    def fits(tried: _Draft) -> bool:
        return tried.least() <= draft.usable

    changes: dict[str, object] = {}
    if not config.train.gradient_checkpointing:
        changes["train.gradient_checkpointing"] = True
    if draft.can_pack:
        changes["model.quantize"] = "nf4"
    if draft.is_full and machine.kind == "cuda":
        changes["train.optimizer"] = "adamw_8bit"
    if config.model.dtype == "float32" and machine.kind == "cuda":
        changes["model.dtype"] = "bfloat16"
    tried = {option: with_option(option, value) for option, value in changes.items()}
    fixes = [
        f"{option} to {str(changes[option]).lower()}" for option in changes if fits(tried[option])
    ]
    if fits(replace(draft, context=SHORTEST_CONTEXT)):
        tokens = draft.largest(
            SHORTEST_CONTEXT, draft.context, lambda each: replace(draft, context=each).least()
        )
        fixes.append(f"model.context_tokens to {tokens} with sample.max_new_tokens below it")
    needed = getattr(total, phase)
    less = ""
    if draft.can_pack and not fits(tried["model.quantize"]):
        less = f" ({tried['model.quantize'].least_budget()} with model.quantize=nf4)"
    budget = f"memory.budget_gib to {draft.least_budget()} or more{less}"
    fixes.append(f"{budget}, if there is as much")
    where = " on the CPU of this machine, which has no GPU" if machine.kind == "cpu" else ""
    if machine.budget_bytes <= GIB:
        where += ": it is in GiB, not a fraction, 24 for a card of 24 GB"
    return (
        f"memory.budget_gib={_gib(machine.budget_bytes)} is too little for {config.model.path}"
        f"{where}: {phase} needs {_gib(needed)} GiB of the {_gib(draft.usable)} GiB usable "
        f"({parts}) for one sequence of {draft.context} tokens; set {', or '.join(fixes)}"
    )
