"""All options of a run, with types, docs and cross-checks. Imports neither torch nor transformers.

Unknown, mistyped, out-of-range and contradictory options are errors here; ``config.file`` turns
each into one line. ``score`` checks reward names, ``data`` checks templates.
"""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from reason_llm.config import installation
from reason_llm.config.algorithms import ALGORITHMS, Algorithm, AlgorithmSection
from reason_llm.config.data import (
    EVALUATION_SETS,
    DataSection,
    HeldOut,
    evaluation_source,
    leaving_both,
    share_of,
)
from reason_llm.config.preferences import PreferenceSection
from reason_llm.config.readers import READERS, Passes, ReaderReward, ReaderSections, Rule
from reason_llm.config.score import ScoreSection
from reason_llm.config.stages import (
    READ_BY,
    STAGES,
    Method,
    RewardSection,
    Stage,
    StageName,
)
from reason_llm.config.types import (
    ONE_IS_A_LIST,
    Count,
    Gib,
    NonNegative,
    Positive,
    Section,
    Whole,
    matching,
)

SHARED_BUFFER = Path("data/buffer.json")
"""Default buffer, shared by all runs that set none."""
HEAD = "lm_head"
"""Usual name of the output head in causal language models of Transformers."""


SHARDS = 8
"""Default number of shards of a run with replicas."""


class RunSection(Section):
    """Folder, length and processes of a run."""

    name: str | None = None
    """Name of the run, whose folder is <directory>/<name>/. null: the config file's name."""
    directory: Path = Path("runs")
    """Parent folder of all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Seed of the prompt order, sampling, adapter initialisation and dropout."""
    steps: Count = 100
    """Number of steps; each samples, scores and trains."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the training set, rounded up to a whole step; overrides run.steps, except a
    --run.steps on the command line. null: run.steps sets the length."""
    resume: str = "auto"
    """auto: resume where the run stopped. never: move an old run and its buffer aside and start
    over. A checkpoint's folder: start a new run from its adapter and optimizer; the same command
    later resumes that run."""
    from_buffer: Path | None = None
    """Train on saved rollouts instead of sampling: a buffer, or a run's folder of buffers, which
    sets the number of steps. Their stored rewards are used; the command rescore computes new
    ones."""
    buffer: Path | None = None
    """File of the rollout buffer, written after every wave. null: data/buffer.json, or
    data/buffer.<name>.json while another run uses that one or has unfinished rollouts in it."""
    save_every: Literal["auto"] | Count = "auto"
    """Steps between checkpoints. A killed run repeats the steps since the last one from their saved
    rollouts. auto: after each step, unless writing takes more than half a second and more than a
    twentieth of the run's time; then so often that it takes a twentieth."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep; older ones are deleted."""
    keep_best: bool = True
    """Keep the adapter with the best evaluation in <run>/adapter_best/ (a full model in
    <run>/model_best/): the highest held-out accuracy or, without held-out problems, the highest
    pair accuracy or the lowest loss of eval.rows."""
    keep_buffers_gib: NonNegative = 4.0
    """Disk limit for the rollouts of past steps, kept compressed in <run>/buffers/; the oldest are
    deleted first, never those needed to resume. 0: none are kept."""
    replicas: Literal["auto"] | Count = 1
    """Processes that share sampling and training, each with its own GPU and base copy (on the CPU
    if there is no GPU). 1: this process only, without Ray. auto: the number of GPUs, rounded down
    to a power of two; at most run.shards."""
    samplers: Annotated[int, Field(ge=0, le=1024, strict=True)] = 0
    """Additional processes that only sample, each with its own GPU and base copy; at most
    run.shards. With run.max_staleness they sample while the replicas train."""
    max_staleness: Annotated[int, Field(ge=0, le=4, strict=True)] = 0
    """Number of training steps between the policy that samples and the one that trains. It is
    constant, so the adapter is the same for any number of replicas and samplers. Above 0,
    algorithm.correction: auto applies importance weights. 0: the newest policy samples."""
    shards: Count = 1
    """Number of parts that each step's prompts and rows are split into. Results depend on it, but
    not on run.replicas and run.samplers, neither of which may exceed it. Default: 8 with replicas
    or samplers, otherwise 1."""
    ray: str | None = None
    """Address of the Ray cluster to join, such as auto or 10.0.0.1:6379. null: start a local
    cluster for the run."""

    @model_validator(mode="before")
    @classmethod
    def _replicas_have_shards(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("shards") is None:
            is_alone = values.get("replicas", 1) == 1 and values.get("samplers", 0) == 0
            return {**values, "shards": 1 if is_alone else SHARDS}
        return values

    @property
    def is_alone(self) -> bool:
        """Whether one process does all work of the run, one thing after the other, in one shard."""
        alone = (1, 1, 0, 0)
        return (self.replicas, self.shards, self.samplers, self.max_staleness) == alone

    def several(self) -> Any:
        """Return ``replicas.entry_points``, or None if the run is alone. Raises ConfigError where
        that folder is missing."""
        if self.is_alone:
            return None
        return installation.slice_for(
            "replicas.entry_points",
            "run.replicas, run.samplers, run.shards or run.max_staleness",
        )

    @field_validator("replicas", "shards")
    @classmethod
    def _is_a_power_of_two(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value & (value - 1):
            raise ValueError(f"must be a power of two, such as {1 << value.bit_length() - 1}")
        return value

    @field_validator("name")
    @classmethod
    def _is_one_folder(cls, name: str | None) -> str | None:
        if name is None:
            return None
        is_one = Path(name).name == name and name not in ("", ".", "..")
        if not is_one or not name.isprintable() or len(name.encode()) > 100:
            raise ValueError("must be one plain folder name of at most 100 bytes")
        return name

    @field_validator("directory", "buffer")
    @classmethod
    def _is_a_path(cls, path: Path | None) -> Path | None:
        if path is not None and (not path.name or not str(path).isprintable()):
            raise ValueError("is not a path")
        return path

    @property
    def buffer_path(self) -> Path:
        """``buffer``, or the shared one if it is null."""
        return SHARED_BUFFER if self.buffer is None else self.buffer


class AdapterSection(Section):
    """LoRA adapter to train. Source: arXiv:2106.09685."""

    rank: Annotated[int, Field(ge=1, le=4096, strict=True)] = 32
    """Rank r of the LoRA matrices."""
    alpha: Positive = 64
    """Scaling parameter; the update is scaled by alpha / rank."""
    rslora: bool = False
    """Use rank-stabilised LoRA, which scales by alpha / sqrt(rank), so that high ranks learn as
    fast as low ones. Source: arXiv:2312.03732 section 3."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of the LoRA layers during training."""
    targets: str | list[str] = "all-linear"
    """Modules to adapt. all-linear: all linear layers except the head; or a list of module names
    such as [q_proj, v_proj], or a regular expression. A model whose head (lm_head) is adapted is
    sampled with transformers."""
    target_parameters: tuple[str, ...] = ()
    """Expert weights of a mixture-of-experts model to adapt, by name suffix, such as
    [experts.gate_up_proj, experts.down_proj]. Requires dropout 0; the model is sampled with
    transformers."""

    @field_validator("rank", mode="before")
    @classmethod
    def _is_a_rank(cls, rank: Any) -> Any:
        if rank == 0:  # verl's value for all weights
            raise ValueError("must be 1 or more; to train all weights, set model.train to full")
        return rank

    @property
    def adapts_head(self) -> bool:
        """Whether the output head is adapted."""
        return self.adapts(HEAD)

    def adapts(self, name: str) -> bool:
        """Whether the targets name a layer whose last name is this; all-linear names none."""
        if not isinstance(self.targets, str):
            return name in self.targets
        try:
            return bool(matching(self.targets, [name]))
        except ValueError:  # reported when the targets are looked up in the model
            return False


class ModelSection(Section):
    """Base model, of which one copy is in memory, and its adapter."""

    path: str = "model/tiny"
    """Model folder or Hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, with your user's permissions. Such a model is
    sampled with transformers. false: a model that needs it is an error."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the base weights. auto: bfloat16 on a GPU and for nf4, otherwise float32. The
    adapter is always float32."""
    backend: Literal["auto", "native", "unsloth"] = "auto"
    """How vLLM and training share the weights. native: tensor views. unsloth: Unsloth's loader,
    kernels and Standby (Llama, Mistral, Qwen2 and Qwen3 on a GPU). auto: native, with a message if
    unsloth supports the model."""
    quantize: Literal["none", "nf4"] = "none"
    """Quantisation of the base. nf4: QLoRA, with the linear layers in 4-bit NormalFloat with double
    quantisation, by bitsandbytes. none: weights in dtype."""
    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """Attention implementation for training and for sampling with transformers (vLLM has its own).
    sdpa: torch's SDPA. flash: torch's FlashAttention, over packed rows on a GPU. eager:
    materialises all scores; works for any model. auto: flash for packed rows on a GPU, eager for
    models with terms that SDPA does not support (soft-capping, sinks), otherwise sdpa."""
    context_tokens: Count | None = None
    """Max tokens of prompt plus completion. null: the limit in the model's config; more than that
    scales the model's positions by YaRN, for short texts too."""
    deterministic: bool = False
    """Make steps bitwise reproducible on a GPU, as they always are on a CPU: deterministic
    operators in training, vLLM's batch-invariant sampling, and fixed batches of turns
    (docs/environments.md). Not tested on a GPU yet."""
    start: Path | None = None
    """Folder of the adapter to start from, such as an SFT run's adapter/. null: a new adapter."""
    train: Literal["adapter", "full"] = "adapter"
    """adapter: train a LoRA adapter over frozen weights. full: train all weights; the run then
    saves full models instead of adapters (docs/configs.md)."""
    adapter: AdapterSection = AdapterSection()
    """The LoRA adapter."""


class SampleSection(Section):
    """Sampling of completions."""

    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Engine that samples. vllm: vLLM holds the base weights, and training uses views of them.
    transformers: no further package is needed. auto: vllm if there is a GPU and vLLM is installed,
    otherwise transformers."""
    fold: Literal["auto"] | bool = "auto"
    """Add the adapter to the base weights while vLLM samples, and restore their bits afterwards, so
    that vLLM runs without its adapter kernels. The policy that samples is rounded to the type of
    the weights (docs/gpu.md). Requires vLLM, an adapter, and weights in bfloat16 or float32. auto:
    currently false; it has not yet been measured at 1.15 times the speed on a GPU."""
    prompts_per_step: Count = 16
    """Number of prompts in a step."""
    completions_per_prompt: Count = 8
    """Number of completions per prompt, the group size G."""
    max_new_tokens: Count = 512
    """Max tokens of a completion."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divisor of the logits, in sampling and in training. Evaluation is greedy unless eval.samples
    is set."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: keep the smallest set of most likely tokens with at least this total
    probability. 1: all."""
    top_k: Whole = 0
    """Keep the k most likely tokens. 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens whose probability is at least this fraction of the most likely token's. 0:
    all."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=100)]],
        Field(max_length=8),
        ONE_IS_A_LIST,
    ] = []  # noqa: RUF012
    """Strings that end a completion, in addition to the model's end tokens; the completion includes
    them. One string or a list, such as [</answer>]. Also used in evaluation and in the chat."""
    environment: (
        str | Annotated[dict[Annotated[str, Field(min_length=1)], str], Field(min_length=1)] | None
    ) = None
    """Environment of a rollout (docs/environments.md). path/to/file.py:Class: a class that replies
    to each turn, or whose methods are tools. {name: path/to/file.py:Class}: selected by each row's
    column environment. agent:path/to/file.py:function: an async function that calls the model.
    mcp:COMMAND, mcp:https://… or mcp:servers.json: tools of MCP servers. verifiers: tasks of
    data.train=verifiers:TASKSET. The code runs with your user's permissions. null: a single
    answer."""
    turns: Count = 8
    """Max turns of the model in an environment. All turns and replies together have at most
    sample.max_new_tokens tokens."""
    turn_tokens: Count | None = None
    """Max tokens of a turn. null: what remains of max_new_tokens."""
    reply_tokens: Count = 512
    """Max tokens of a reply of an environment or a tool; longer replies are cut in the middle."""
    environment_seconds: Positive = 10.0
    """Time limit of one call of an environment, in seconds; for an agent, the longest time that it
    may block all others."""

    @property
    def is_filtered(self) -> bool:
        """Whether sampling is filtered, so that its log-probs belong to another distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts of a step."""
        return self.prompts_per_step * self.completions_per_prompt


Schedule = Literal[
    "constant", "linear", "cosine", "inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay"
]  # fmt: skip


class TrainSection(Section):
    """Training."""

    learning_rate: NonNegative = 1e-5
    """Peak learning rate. 0 trains nothing and serves as a control."""
    schedule: Schedule = "constant"
    """Learning rate schedule after the warm-up, with the names of Transformers. linear and cosine
    decay to 0 at run.steps, cosine_with_min_lr to a tenth; warmup_stable_decay is constant and
    decays to 0 in the last tenth of the optimizer steps."""
    warmup_steps: Whole = 0
    """Optimizer steps of linear warm-up: step k of N has k/N of the learning rate, so 1 is none."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor"] = "adamw"
    """Optimizer. adamw: moments in float32; adamw_8bit: in 8 bits, by bitsandbytes;
    paged_adamw_8bit: also paged to host memory when the GPU is full. adafactor: one factored
    moment; its steps are relative to each weight's size, so it needs a larger learning rate.
    Source: arXiv:1711.05101, 2110.02861, 2305.14314, 1804.04235."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    rows_per_step: Count = 64
    """Rows of a step (pairs, for a pairwise loss), in the stages that train on a set of rows."""
    epochs: Count = 1
    """Passes over the rollouts or rows of each step."""
    optimizer_steps: Count = 1
    """Optimizer steps per pass; the rollouts or rows are split evenly among them."""
    router_aux_loss_coef: NonNegative = 0.0
    """Weight of the load-balancing loss of a mixture-of-experts model's routers, over the tokens of
    all rows (docs/configs.md). 0: none, whatever the model's config says. Source: arXiv:2101.03961
    eq. 4 to 6."""
    micro_batch_tokens: Literal["auto"] | Count = "auto"
    """Tokens of a forward and backward pass, including padding. It affects only memory and
    speed."""
    packing: Literal["auto", "padded", "varlen"] = "auto"
    """Layout of rollouts in a micro-batch. padded: one row each, with at most 5 % padding. varlen:
    packed end to end, with each prompt once for all its completions. auto: varlen if the model's
    attention supports it. It affects only memory and speed."""
    max_grad_norm: Positive = 1.0
    """Max gradient norm, for gradient clipping."""
    gradient_checkpointing: bool | Literal["offload"] = True
    """Recompute activations in the backward pass, which saves much memory and takes about a third
    more time. offload: also keep the inputs of the layers in host memory."""


class EvalSection(Section):
    """Evaluation on held-out sets, scored by the first reward."""

    every: Whole = 10
    """Steps between evaluations, in addition to one before the first step and one after the last.
    0: only those two."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")], str] = {}  # noqa: RUF012
    """Additional held-out sets, {name: file, folder or Hub id}, reported by name; or a list of
    gsm8k, math500, aime2024, aime2025, humaneval+ and mbpp+, which are on the Hub. Without
    data.eval, the first one is also the main held-out set."""
    rows: HeldOut | None = None
    """Held-out rows of the same form as the training rows, for the loss and the pair accuracy of
    stages that train on a set of rows; or a share of the rows of data.train, such as 5%. null:
    none."""
    limit: Count | None = None
    """Number of rows to use from the start of each set. null: all."""
    patience: Whole = 0
    """Stop early after this many consecutive evaluations without improvement (by the measure of
    run.keep_best). 0: never."""
    samples: Whole = 0
    """Completions per problem, sampled as in training; the accuracy is their mean. 0: one, by
    greedy decoding."""
    max_new_tokens: Count | None = None
    """Max tokens of a completion. null: sample.max_new_tokens."""

    @field_validator("sets")
    @classmethod
    def _leave_rows_to_train_on(cls, sets: dict[str, str]) -> dict[str, str]:
        return {name: leaving_both(source) for name, source in sets.items()}

    @field_validator("sets", mode="before")
    @classmethod
    def _of_names(cls, sets: object) -> object:
        names = [sets] if isinstance(sets, str) else sets
        if isinstance(names, list):
            unknown = [each for each in names if str(each) not in EVALUATION_SETS]
            if unknown:
                known = ", ".join(EVALUATION_SETS)
                raise ValueError(f"{unknown[0]!r:.60} is not one of {known}; give {{name: source}}")
            return {each: EVALUATION_SETS[each] for each in names}
        if not isinstance(names, dict):
            return names
        return {
            name: evaluation_source(name, each) if isinstance(each, str) else each
            for name, each in names.items()
        }


class MemorySection(Section):
    """Memory limits."""

    budget_gib: Literal["auto"] | Gib = "auto"
    """GPU memory in GiB (host memory without a GPU) from which all sizes are derived. auto: all of
    it, minus the GPU memory that other programs hold when the run starts."""
    host_gib: Literal["auto"] | Gib = "auto"
    """Limit of host memory in a run on a GPU. auto: all of the machine's memory."""


class LogSection(Section):
    """Console and trackers."""

    console: Literal["auto", "plain", "quiet"] = "auto"
    """auto: live display on a terminal, otherwise lines; plain: always lines; quiet: only warnings
    and errors."""
    rollouts: bool = False
    """Also send the texts of up to eight rollouts of each step to the trackers."""
    trackers: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], ONE_IS_A_LIST] = []  # noqa: RUF012
    """Trackers that receive the records of metrics.jsonl: tensorboard, wandb, trackio; one or a
    list. A tracker that fails is dropped with a warning."""


class _Sections(Section):
    """Stage of a run, and the sections that most runs have."""

    stage: StageName = "rl"
    """What the run trains on. rl: rewards of the policy's rollouts. sample: nothing; it samples and
    scores rollouts for the command pairs. sft: demonstrations. pretrain: texts. reward:
    preferences, for a reward model. preference: preferences, for the policy."""
    run: RunSection = RunSection()
    """Folder, length and processes of a run."""
    model: ModelSection = ModelSection()
    """Base model and adapter."""
    data: DataSection
    """Training and evaluation data."""
    sample: SampleSection = SampleSection()
    """Sampling."""
    score: ScoreSection = ScoreSection()
    """Rewards."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Algorithm: a row of the table, and changes to it."""
    train: TrainSection = TrainSection()
    """Training."""
    eval: EvalSection = EvalSection()
    """Evaluation."""
    memory: MemorySection = MemorySection()
    """Memory limits."""
    log: LogSection = LogSection()
    """Console and trackers."""


class Config(ReaderSections, _Sections):
    """Options of a run."""

    reward: RewardSection = RewardSection()
    """Training of a reward model."""
    preference: PreferenceSection = PreferenceSection()
    """Preference loss: a row of the table, and changes to it."""

    @property
    def eval_max_new_tokens(self) -> int:
        """``eval.max_new_tokens``, or ``sample.max_new_tokens`` if it is null."""
        return self.eval.max_new_tokens or self.sample.max_new_tokens

    @property
    def evaluation_sets(self) -> dict[str, str]:
        """Held-out sources by name; ``data.eval`` comes first, with an empty name."""
        unnamed = {} if self.data.eval is None else {"": self.data.eval}
        return unnamed | self.eval.sets

    @property
    def held_out_shares(self) -> list[float]:
        """Shares of the rows of ``data.train`` that are held out instead, the largest first."""
        sources = (*self.evaluation_sets.values(), self.eval.rows)
        found = (share_of(each) for each in sources)
        return sorted((each for each in found if each is not None), reverse=True)

    @property
    def is_off_policy(self) -> bool:
        """Whether another policy samples than is trained."""
        return self.run.from_buffer is not None or self.run.max_staleness > 0

    @property
    def learned_row(self) -> Algorithm:
        """Algorithm row with ``correction: auto`` resolved. Saved and stale rollouts come from
        another policy, and vLLM's log-probs differ slightly from the learner's. The weight is per
        completion if the ratio is."""
        row, sample = self.algorithm.row(), self.sample
        if row.correction != "auto":
            return row
        if not self.is_off_policy and (sample.engine != "vllm" or sample.is_filtered):
            return replace(row, correction="none")
        of_sequences = row.ratio != "token"
        return replace(row, correction="sequence_truncate" if of_sequences else "token_truncate")

    @property
    def turn_weight(self) -> float:
        """Weight of the turns' rewards in the total; 0 without credit per turn."""
        paid = [r for r in self.score.rewards if r.name == "environment" and not r.options]
        return sum(r.weight for r in paid) if self.algorithm.row().credit == "turn" else 0.0

    @property
    def of_stage(self) -> Stage:
        """Entry of the run's stage in the table."""
        return STAGES[self.stage]

    @property
    def method(self) -> Method:
        """Method of the run: an algorithm, a preference loss or a stage."""
        if (method := self.of_stage.method) is not None:
            return method
        if self.stage == "preference":
            loss = self.preference.row()
            return Method(self.preference.name, loss.idea, loss.source)
        row, usual = self.algorithm.row(), ALGORITHMS[self.algorithm.name]
        idea = row.idea
        if row.kl == "none" and usual.kl != "none":
            idea = f"{idea.replace(', KL to the base', '')}; here with no KL"
        return Method(self.algorithm.name, idea, row.source)

    @property
    def samples(self) -> bool:
        """Whether the stage samples rollouts."""
        return self.of_stage.samples

    @property
    def learns(self) -> bool:
        """Whether the stage trains the adapter."""
        return self.of_stage.learns

    @property
    def judges_answers(self) -> bool:
        """Whether completions are scored, in training or in evaluation."""
        return self.samples or bool(self.evaluation_sets)

    @property
    def prompting_reward(self) -> str:
        """First reward, which selects the prompt for ``data.system_prompt=auto``; empty if nothing
        is scored."""
        return self.score.rewards[0].kind if self.judges_answers else ""

    @property
    def first_policy_step(self) -> int:
        """Number of first steps that train only a reader, such as the critic."""
        return max(reader.first_policy_step(self) for reader in READERS.values())

    @property
    def policy_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the run."""
        steps = self.run.steps - self.first_policy_step
        return steps * self.train.epochs * self.train.optimizer_steps

    @property
    def compares_with_start(self) -> bool:
        """Whether the reference is a frozen copy of the starting adapter."""
        if self.model.start is None:
            return False
        if self.stage == "preference":
            return bool(self.preference.row().needs_reference)
        row_rl = self.algorithm.row()
        return self.stage == "rl" and row_rl.kl != "none" and row_rl.kl_reference == "start"

    @property
    def roles(self) -> dict[str, Path | None]:
        """Roles with a separate adapter, without the policy, and the folder of each; None: a new
        adapter."""
        adapters = [reader.adapters(self) for reader in READERS.values()]
        return {role: folder for each in adapters for role, folder in each.items()}

    @property
    def learned_roles(self) -> list[str]:
        """Trained roles that have a head of one output."""
        learned = [reader for reader in READERS.values() if reader.learns]
        return [role for reader in learned for role in reader.adapters(self)]

    @property
    def reads_base(self) -> bool:
        """Whether a reader reads by the base's weights as they were before training."""
        return any(reader.reads_base(self) for reader in READERS.values())

    @property
    def reading_passes(self) -> Passes:
        """Passes over a step's tokens that readers add."""
        each = [reader.passes(self) for reader in READERS.values()]
        names = [field.name for field in fields(Passes)]
        return Passes(**{name: sum(getattr(passes, name) for passes in each) for name in names})

    @property
    def reader_models(self) -> dict[str, ModelSection]:
        """Separate models of the base's kind that read rollouts, with their adapters off, by the
        name of their section."""
        options = {name: reader.model(self) for name, reader in READERS.items()}
        return {
            name: ModelSection(
                **given,
                dtype=self.model.dtype,
                context_tokens=self.model.context_tokens,
                adapter=AdapterSection(rank=1),
            )
            for name, given in options.items()
            if given is not None
        }

    @property
    def reader_prompts(self) -> dict[str, str]:
        """Prompts of readers that have another one than the policy, by their section."""
        prompts = {name: reader.prompt(self) for name, reader in READERS.items()}
        return {name: prompt for name, prompt in prompts.items() if prompt is not None}

    @property
    def rewards_by_readers(self) -> dict[str, ReaderReward]:
        """Rewards that readers give in the run, by reward key; none for saved rollouts."""
        asks = self.samples and self.run.from_buffer is None
        return self.score.by_readers if asks else {}

    @property
    def classifiers(self) -> dict[str, dict[str, Path]]:
        """Folders of separate models that give scores, by the name of the reader and of the
        reward."""
        return {name: dict(reader.classifiers(self)) for name, reader in READERS.items()}

    @property
    def other_adapters(self) -> dict[str, Path]:
        """Adapters of other runs that the run begins from or reads, by the option of each."""
        named: dict[str, Path | None] = {"model.start": self.model.start}
        for reader in READERS.values():
            named |= reader.named_adapters(self)
        return {option: path for option, path in named.items() if path is not None}

    @property
    def learns_pairs(self) -> bool:
        """Whether the stage trains on pairs of rows."""
        if self.stage == "preference":
            return self.preference.row().needs_pairs
        return self.stage == "reward"

    @property
    def units_per_step(self) -> int:
        """Number of rollouts, rows or pairs of a step."""
        return self.sample.rollouts_per_step if self.samples else self.train.rows_per_step

    @property
    def allowed_forms(self) -> tuple[str, ...]:
        """Allowed forms of the training rows, the default first."""
        if self.stage == "preference":
            return ("preferences",) if self.learns_pairs else ("labels",)
        return self.of_stage.forms

    @model_validator(mode="before")
    @classmethod
    def _form_follows_from_the_stage(cls, values: Any) -> Any:
        """Set the stage's default form in a data section without one."""
        data = values.get("data") if isinstance(values, dict) else None
        if not isinstance(data, dict) or "form" in data:
            return values
        stage, preference = values.get("stage", "rl"), values.get("preference")
        if stage not in [*STAGES]:  # it may be a list
            return values
        is_kto = isinstance(preference, dict) and preference.get("name") == "kto"
        form = "labels" if is_kto and stage == "preference" else STAGES[stage].forms[0]
        return {**values, "data": {**data, "form": form}}

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        row, found = self.algorithm.row(), list[str]()
        for name, stages in READ_BY.items():
            section, _, option = name.rpartition(".")
            owner = getattr(self, section) if section else self
            value, usual = getattr(owner, option), type(owner).model_fields[option].default
            if value == usual:
                continue
            if self.stage not in stages:
                what = f"{name}={value}" if section else f"the {name} section"
                found.append(
                    f"{what} contradicts stage={self.stage}, which does not read it; leave it "
                    f"out, or set stage to {stages[0]}"
                )
            elif name in READERS and READERS[name].is_of_algorithm and not getattr(row, name):
                found.append(
                    f"the {name} section contradicts algorithm.name={self.algorithm.name}, which "
                    f"has no {name}; leave it out"
                )
        found += [
            text.format(c=self, row=row) for is_so, text in CONTRADICTIONS if is_so(self, row)
        ]
        if found:
            raise ValueError("\n".join(found))
        return self


NOT_WITH_FULL: tuple[Rule, ...] = (
    (lambda c, row: c.model.quantize != "none", "model.quantize={c.model.quantize}"),
    (lambda c, row: c.model.backend == "unsloth", "model.backend=unsloth"),
    (lambda c, row: c.model.trust_remote_code, "model.trust_remote_code=true"),
    (lambda c, row: c.model.adapter != AdapterSection(), "the model.adapter section"),
    (lambda c, row: c.model.start is not None, "model.start={c.model.start}"),
    (lambda c, row: not c.run.is_alone,
     "run.replicas, run.shards, run.samplers or run.max_staleness"),
    (lambda c, row: c.of_stage.scores or not c.learns, "stage={c.stage}"),
    *(rule for reader in READERS.values() for rule in reader.needs_frozen_base),
)  # fmt: skip
"""Options that need an adapter over a frozen base, or several processes."""

CONTRADICTIONS: tuple[Rule, ...] = (
    (lambda c, row: c.data.form not in c.allowed_forms,
     "data.form={c.data.form} contradicts stage={c.stage} ({c.method.name}), which learns from "
     "{c.allowed_forms[0]}; leave it out, or set stage"),
    (lambda c, row: bool(c.held_out_shares) and len(c.data.sources) > 1,
     "a share of data.train is held out, and it names {c.data.sources[0].source} and others; set "
     "data.eval or eval.rows to a file, or data.train to one set"),
    (lambda c, row: share_of(c.data.eval) is not None and not c.of_stage.scores and (
        c.data.form in ("texts", "preferences", "labels")
        or (c.data.form == "demonstrations" and c.score.rewards[0].kind.startswith("code_tests"))
     ),
     "data.eval={c.data.eval} contradicts data.form={c.data.form} with score.rewards="
     "{c.score.rewards[0].kind}, as such rows hold no gold answer for it; set eval.rows="
     "{c.data.eval}, which measures the loss"),
    (lambda c, row: c.run.shards < max(
        c.run.samplers, 0 if c.run.replicas == "auto" else c.run.replicas
     ),
     "run.replicas={c.run.replicas} or run.samplers={c.run.samplers} contradicts run.shards="
     "{c.run.shards}: each needs a shard; raise run.shards, or lower the other"),
    (lambda c, row: bool(c.run.max_staleness or c.run.samplers) and (
        c.run.from_buffer is not None
        or not c.samples
        or (c.run.max_staleness > 0 and not c.learns)
     ),
     "run.max_staleness={c.run.max_staleness} or run.samplers={c.run.samplers} contradicts "
     "run.from_buffer={c.run.from_buffer} or stage={c.stage}, which samples no rollouts or does "
     "not train the policy; leave them out"),
    (lambda c, row: (
        c.sample.environment is None or str(c.sample.environment).startswith("mcp:")
     ) and any(spec.kind == "environment" for spec in c.score.rewards),
     "score.rewards has environment, which sample.environment={c.sample.environment} does not "
     "provide; set sample.environment to path/to/file.py:Class, or use a reward of the model's "
     "last answer"),
    (lambda c, row: row.credit == "turn" and c.samples and c.turn_weight == 0,
     "algorithm.credit=turn contradicts score.rewards, which ignore the environment's rewards; "
     "add environment with a weight, or set credit to rollout"),
    (lambda c, row: {re.split("[:?]", str(c.sample.environment))[0] == "verifiers"} != {
        source.startswith("verifiers:")
        for source in (*(each.source for each in c.data.sources), *c.evaluation_sets.values())
     },
     "sample.environment={c.sample.environment} contradicts data.train={c.data.train} or the "
     "held-out {c.evaluation_sets}: tasks of verifiers:TASKSET need "
     "sample.environment=verifiers, and it takes no other data"),
    (lambda c, row: c.sample.environment is not None and c.run.max_staleness > 0,
     "sample.environment={c.sample.environment} contradicts run.max_staleness="
     "{c.run.max_staleness}: steps with an environment are not sampled ahead; leave it out"),
    (lambda c, row: c.of_stage.scores and bool(c.evaluation_sets),
     "data.eval contradicts stage={c.stage}, whose model writes no answers; set "
     "eval.rows to held-out preferences"),
    (lambda c, row: c.algorithm.changes.get("kl_reference") == "start" and c.model.start is None,
     "algorithm.kl_reference=start contradicts model.start=null: there is no starting adapter; "
     "set model.start, or leave the option out to use the base"),
    (lambda c, row: c.sample.fold is True and (
        c.model.train == "full"
        or c.model.quantize != "none"
        or c.model.backend == "unsloth"
        or c.sample.engine == "transformers"
        or (c.run.replicas, c.run.samplers, c.run.max_staleness) != (1, 0, 0)
     ),
     "sample.fold=true contradicts model.train={c.model.train}, model.quantize={c.model.quantize}, "
     "model.backend={c.model.backend}, sample.engine={c.sample.engine} or run.replicas, "
     "run.samplers and run.max_staleness: it adds an adapter to unpacked weights that vLLM samples "
     "in one process; leave it out"),
    *(rule for reader in READERS.values() for rule in reader.contradictions),
    (lambda c, row: c.stage == "rl" and c.sample.completions_per_prompt < 2 and row.needs_group,
     "sample.completions_per_prompt={c.sample.completions_per_prompt} contradicts algorithm.name="
     "{c.algorithm.name}, which compares the completions of a group; set it to 2 or more, or "
     "algorithm.name to pg or reinforce_pp"),
    (lambda c, row: (
        c.stage == "rl" and c.sample.rollouts_per_step < 2
        and row.scale != "none" and row.kl_place != "token_reward"
     ),
     "sample.prompts_per_step * sample.completions_per_prompt = 1 contradicts algorithm.scale="
     "{row.scale}: one reward has no deviation; raise one of the two, or set scale to none"),
    (lambda c, row: isinstance(row.keep, int) and row.keep > c.sample.completions_per_prompt,
     "algorithm.keep={row.keep} contradicts sample.completions_per_prompt="
     "{c.sample.completions_per_prompt}; set it to that or less"),
    (lambda c, row: c.sample.is_filtered and (
        row.correction not in ("auto", "none") or row.off_policy_threshold > 0
     ),
     "algorithm.correction={row.correction} or algorithm.off_policy_threshold="
     "{row.off_policy_threshold} contradicts sample.top_p, top_k or min_p: their "
     "log-probs belong to a filtered distribution, so the ratio is biased; leave one out"),
    (lambda c, row: c.train.optimizer_steps > c.units_per_step,
     "train.optimizer_steps={c.train.optimizer_steps} contradicts the {c.units_per_step} rollouts "
     "or rows of a step (sample.prompts_per_step * sample.completions_per_prompt, or "
     "train.rows_per_step); set it to that or less"),
    (lambda c, row: (
        c.judges_answers
        and c.model.context_tokens is not None
        and c.sample.max_new_tokens >= c.model.context_tokens
     ),
     "sample.max_new_tokens={c.sample.max_new_tokens} contradicts model.context_tokens="
     "{c.model.context_tokens}: no prompt would fit; lower it, or raise model.context_tokens"),
    (lambda c, row: (
        c.stage == "preference"
        and not c.learns_pairs
        and c.train.rows_per_step < 2 * c.train.optimizer_steps
     ),
     "train.rows_per_step={c.train.rows_per_step} with train.optimizer_steps="
     "{c.train.optimizer_steps} leaves one row to an optimizer batch, and {c.preference.name} "
     "compares each row with another one; set rows_per_step to twice the optimizer_steps or more"),
    (lambda c, row: c.run.epochs is None and 0 < c.policy_optimizer_steps <= c.train.warmup_steps,
     "train.warmup_steps={c.train.warmup_steps} contradicts run.steps={c.run.steps}, in which the "
     "policy has {c.policy_optimizer_steps} optimizer steps: the learning rate would never be "
     "reached; lower it"),
    (lambda c, row: c.log.rollouts and not c.log.trackers,
     "log.rollouts=true contradicts log.trackers=[], which get them; name a tracker"),
    (lambda c, row: not c.evaluation_sets and c.eval.rows is None and c.eval != EvalSection(),
     "the eval section contradicts data.eval=null: nothing is evaluated; set data.eval or "
     "eval.sets"),
    (lambda c, row: c.data.max_tokens is not None and not c.data.is_offline,
     "data.max_tokens={c.data.max_tokens} does not act on rows of data.form={c.data.form}; set "
     "data.max_prompt_tokens and sample.max_new_tokens"),
    (lambda c, row: c.data.max_prompt_tokens is not None and c.data.form == "texts",
     "data.max_prompt_tokens={c.data.max_prompt_tokens} does not act on data.form=texts, which "
     "have no prompt; set data.max_tokens"),
    (lambda c, row: (
        c.train.router_aux_loss_coef > 0 and c.train.gradient_checkpointing == "offload"
     ),
     "train.router_aux_loss_coef={c.train.router_aux_loss_coef} contradicts "
     "train.gradient_checkpointing=offload, which passes only gradients of layer outputs; "
     "set gradient_checkpointing to true"),
    (lambda c, row: c.model.attention != "auto" and c.model.backend == "unsloth",
     "model.attention={c.model.attention} contradicts model.backend=unsloth, which has its own "
     "attention; set backend to native, or leave attention out"),
    (lambda c, row: (c.model.attention, c.train.packing) in (
        ("eager", "varlen"), ("flash", "padded")
     ),
     "model.attention={c.model.attention} contradicts train.packing={c.train.packing}: eager works "
     "with padded rows, and flash with packed ones; leave packing out, or set attention to "
     "sdpa"),
    *(
        (lambda c, row, is_so=is_so: c.model.train == "full" and is_so(c, row),
         f"{what} contradicts model.train=full, which trains all weights, in one process and "
         "without an adapter; leave it out, or set model.train to adapter")
        for is_so, what in NOT_WITH_FULL
    ),
)  # fmt: skip
"""(whether the options contradict each other, message). ``row`` is the algorithm's; the default one
in stages that do not read it."""

CHANGES: dict[str, Literal["free", "warn"]] = {
    **dict.fromkeys(
        (
            *("run.steps", "run.epochs", "run.directory", "run.resume", "run.buffer"),
            *("run.save_every", "run.keep_", "run.replicas", "run.samplers", "run.ray"),
            *("eval.", "data.eval", "log.", "score.timeout_seconds"),
            # The digest of the prompts, which is also compared, covers the rows that they drop.
            *("data.contamination", "data.on_bad_row", "data.limit", "data.preprocess"),
        ),
        "free",
    ),
    **dict.fromkeys(
        (
            *("train.learning_rate", "train.schedule", "train.warmup_steps", "train.weight_decay"),
            *("train.max_grad_norm", "train.micro_batch_tokens", "train.packing"),
            *("model.deterministic", "model.attention"),
            *("train.gradient_checkpointing", "memory.", "sample.engine", "sample.fold"),
            *("score.on_error", "run.shards"),
            "data.columns_sha256",  # columns that the rewards read in addition to the answer
            "score.custom_sha256",  # the files of custom rewards
        ),
        "warn",
    ),
    **{name: how for reader in READERS.values() for name, how in reader.changes.items()},
}
"""Options that may change when a run is resumed, as dotted prefixes; all others may not. ``free``:
the adapter is the same. ``warn``: the adapter changes, perhaps only in its bits, and the run
warns."""
