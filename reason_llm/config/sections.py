"""Every option of a run: typed, documented, cross-checked. Imports neither torch nor transformers.

Anything unknown, of the wrong type, out of range or contradictory is refused here; ``config.file``
turns that into one line. Reward names are checked in ``score``, templates in ``data``.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from reason_llm.config.algorithms import ALGORITHMS, Algorithm, AlgorithmSection
from reason_llm.config.data import DataSection
from reason_llm.config.matching import matching
from reason_llm.config.preferences import PreferenceSection
from reason_llm.config.score import RewardModelOptions, ScoreSection
from reason_llm.config.stages import (
    READ_BY,
    STAGES,
    CriticSection,
    Method,
    RewardSection,
    Stage,
    StageName,
    TeacherSection,
    usual_form,
)
from reason_llm.config.types import (
    ONE_IS_A_LIST,
    Count,
    NonNegative,
    Positive,
    Section,
    ServiceSection,
    Whole,
)

SHARED_BUFFER = Path("data/buffer.json")
"""Buffer of the runs that name none."""
HEAD = "lm_head"
"""Usual name of the output head in causal language models of Transformers."""


SHARDS = 8
"""Default number of shards of a run with replicas."""


class RunSection(Section):
    """Where a run lives and how long it goes on."""

    name: str | None = None
    """Name of the run; it lives in <directory>/<name>/. null: the config file's name."""
    directory: Path = Path("runs")
    """Folder of all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Seed of the prompt order, the sampling, the adapter's start and the dropout."""
    steps: Count = 100
    """Steps to take: each samples, scores, learns."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the training set, rounded up to a whole step: with it, run.steps does not count.
    null: run.steps says how long the run is."""
    resume: str = "auto"
    """auto: go on where the run stopped. never: move an old run and its buffer aside and start
    afresh. A checkpoint's folder: begin as a new run with its adapter and optimizer; called again,
    go on with that run."""
    from_buffer: Path | None = None
    """Learn from these rollouts and sample none: a saved buffer, or a run's folder of them, which
    says how many steps there are. Their rewards count; the command rescore gives others."""
    buffer: Path | None = None
    """The rollout buffer, written after every wave. null: data/buffer.json, or, while that holds
    rollouts of another unfinished run, data/buffer.<name>.json."""
    save_every: Count = 1
    """Steps between checkpoints. Above 1, a killed run repeats up to that many steps."""
    keep_checkpoints: Count = 2
    """Checkpoints kept; older ones are deleted."""
    keep_best: bool = True
    """Keep the adapter of the best evaluation in <run>/adapter_best/ (a whole model in
    <run>/model_best/): of the highest held-out
    accuracy; without held-out problems the highest accuracy of pairs or the lowest loss of
    eval.rows."""
    keep_buffers: Literal["none", "all"] | Count = "all"
    """Buffers kept after learning, compressed, in <run>/buffers/. A number n: every n-th."""
    keep_buffers_gib: Positive = 4.0
    """What they may take together; the oldest go first, but for those since the checkpoint before
    the newest, which a run may go on from."""
    replicas: Literal["auto"] | Count = 1
    """Processes that share a step's sampling and learning, each with a GPU and a base copy of its
    own (without a GPU, on the CPU). 1: this process alone, without Ray. auto: as many as there are
    GPUs, rounded down to a power of two; at most run.shards."""
    samplers: Annotated[int, Field(ge=0, le=1024, strict=True)] = 0
    """Further processes beside the replicas, each with a GPU and a base copy of its own, that only
    sample; at most run.shards. With run.max_staleness they sample while the replicas learn."""
    max_staleness: Annotated[int, Field(ge=0, le=4, strict=True)] = 0
    """Learned steps by which the policy that samples a step is behind the one that learns from it:
    always so many, so that the adapter is the same for any number of replicas and samplers. Above
    0, algorithm.correction: auto weighs tokens by importance. 0: the newest policy samples."""
    shards: Count = 1
    """Parts that a step's prompts and rows are dealt in. What is sampled and learned depends on it
    and not on run.replicas or run.samplers, each of which may be at most as many. Left out: 8 with
    replicas or samplers, 1 without."""
    ray: str | None = None
    """Address of a Ray cluster to join, such as auto or 10.0.0.1:6379. null: one that this command
    starts on this machine and ends with the run."""

    @model_validator(mode="before")
    @classmethod
    def _replicas_have_shards(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("shards") is None:
            is_alone = values.get("replicas", 1) == 1 and values.get("samplers", 0) == 0
            return {**values, "shards": 1 if is_alone else SHARDS}
        return values

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
            raise ValueError("is no path")
        return path

    @property
    def buffer_path(self) -> Path:
        """``buffer``, or if it is null the shared one."""
        return SHARED_BUFFER if self.buffer is None else self.buffer


class AdapterSection(Section):
    """The LoRA adapter that is trained. Source: arXiv:2106.09685."""

    rank: Annotated[int, Field(ge=1, le=4096, strict=True)] = 32
    """Rank r of the two factors."""
    alpha: Positive = 64
    """The update is scaled by alpha / rank."""
    rslora: bool = False
    """true: rank-stabilised LoRA, scaled by alpha / sqrt(rank) instead, so that a high rank learns
    as fast as a low one. Source: arXiv:2312.03732 section 3."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the first factor while learning."""
    targets: str | list[str] = "all-linear"
    """all-linear: every linear layer but the head; or a list of module names such as [q_proj,
    v_proj], or a regular expression of them. With lm_head, the head, it is sampled with
    transformers."""
    target_parameters: tuple[str, ...] = ()
    """Weights of a mixture's experts that are adapted, too, by the ends of their names, such as
    [experts.gate_up_proj, experts.down_proj], each expert with factors of this rank. Without
    dropout, sampled with transformers."""

    @property
    def adapts_head(self) -> bool:
        """Whether the output head is among the targets."""
        if not isinstance(self.targets, str):
            return HEAD in self.targets
        try:
            return bool(matching(self.targets, [HEAD]))
        except ValueError:  # told where the targets are looked up in the model
            return False


class ModelSection(Section):
    """The base model, of which one copy exists, and the adapter over it."""

    path: str = "model/tiny"
    """A folder or a Hub id."""
    trust_remote_code: bool = False
    """true: run Python code that comes with the model, with all your rights. Such a model is
    sampled with transformers. false: a model that needs it is refused."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base weights. auto: bfloat16 on a GPU and for nf4, else float32. The adapter is
    always float32."""
    backend: Literal["auto", "native", "unsloth"] = "auto"
    """How vLLM and the learner share the weights. native: our own views. unsloth: Unsloth's loader,
    kernels and Standby (Llama, Mistral, Qwen2 and Qwen3 on a GPU). auto: native, and a word on
    whether unsloth serves the model too."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: QLoRA, the base's linear layers in 4-bit NormalFloat with double quantisation, by
    bitsandbytes. none: the base as dtype says."""
    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """Attention of the learner and of sampling with transformers (vLLM has its own). sdpa: torch's
    SDPA. flash: FlashAttention as torch ships it, over packed rows on a GPU. eager: all scores are
    stored, for any model. auto: flash where rows are packed on a GPU, eager where SDPA leaves out
    what the model adds to its scores (soft-capping, sinks), else sdpa."""
    context_tokens: Count | None = None
    """Longest prompt plus completion, in tokens. null: what the model's config allows."""
    deterministic: bool = False
    """true: the same step gives the same bits on a GPU, as it does on a CPU anyway: deterministic
    operators while learning, vLLM's sampling that does not depend on the batch, and the same
    batches of turns (docs/environments.md). Never run on a GPU, nor its cost measured."""
    start: Path | None = None
    """Folder of an adapter to begin from, such as an SFT run's adapter/. null: a fresh one."""
    train: Literal["adapter", "full"] = "adapter"
    """adapter: LoRA over weights that stay. full: the weights themselves; the run keeps whole
    models in the place of adapters (docs/configs.md)."""
    adapter: AdapterSection = AdapterSection()
    """The LoRA adapter."""


class SampleSection(Section):
    """Sampling of completions."""

    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """vllm: vLLM samples and holds the base weights, the learner views them. transformers: nothing
    more is needed. auto: vllm where there is a GPU and vLLM is installed, else transformers."""
    prompts_per_step: Count = 16
    """Prompts drawn in a step."""
    completions_per_prompt: Count = 8
    """Completions of each prompt: the size G of a group."""
    max_new_tokens: Count = 512
    """Longest completion, in tokens."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Logits are divided by this, in sampling and in learning alike. Evaluation is greedy
    without eval.samples."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens with at least this probability. 1: all."""
    top_k: Whole = 0
    """Keep the k likeliest tokens. 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens with at least this fraction of the likeliest token's probability. 0: all."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=100)]],
        Field(max_length=8),
        ONE_IS_A_LIST,
    ] = []  # noqa: RUF012
    """Strings that end a completion, beside the model's end tokens; they are part of it. One or a
    list, such as [</answer>]. They hold in evaluation and in the chat, too."""
    environment: (
        str | Annotated[dict[Annotated[str, Field(min_length=1)], str], Field(min_length=1)] | None
    ) = None
    """path/to/file.py:Class, which answers what the model writes, turn by turn, or whose methods
    are tools that the model may call. {name: path/to/file.py:Class}: the column environment of each
    row names its own. agent:path/to/file.py:function, an async function that asks the model itself;
    mcp:COMMAND, mcp:https://… or mcp:servers.json, tools of MCP servers; verifiers, for tasks of
    data.train=verifiers:TASKSET
    (docs/environments.md). All run in this process or beside it: it is your own code. null: one
    answer and no more."""
    turns: Count = 8
    """Most turns of the model in an environment. All of them and the replies to them have at most
    sample.max_new_tokens together."""
    turn_tokens: Count | None = None
    """Longest turn, in tokens. null: as long as max_new_tokens leaves."""
    reply_tokens: Count = 512
    """Longest reply of an environment or a tool, in tokens; a longer one loses its middle."""
    environment_seconds: Positive = 10.0
    """What one call of an environment may take; of a program that asks the model itself, how long
    it may keep all others waiting."""

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens cannot be sampled, so that log-probs are of another distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def rollouts_per_step(self) -> int:
        """Prompts times completions."""
        return self.prompts_per_step * self.completions_per_prompt


Schedule = Literal[
    "constant", "linear", "cosine", "inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay"
]  # fmt: skip


class TrainSection(Section):
    """Learning from the buffer."""

    learning_rate: NonNegative = 1e-5
    """Peak learning rate. 0 trains nothing, as a control."""
    schedule: Schedule = "constant"
    """After the warm-up, by its name in Transformers. constant; linear, cosine: down to 0 at
    run.steps; cosine_with_min_lr: down to a tenth; warmup_stable_decay: constant, and down to 0 in
    the last tenth of the optimizer steps; inverse_sqrt."""
    warmup_steps: Whole = 0
    """Optimizer steps of linear rise from 0."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"] = "adamw"
    """AdamW with moments in float32, in 8 bits (bitsandbytes), or in 8 bits and paged to host
    memory when the GPU is full. adafactor: one moment, as a row and a column; its steps are a part
    of each weight's size, so its learning rate is larger. muon: one moment and orthogonal steps for
    matrices, scaled so that AdamW's learning rate fits; AdamW for embeddings, head and vectors.
    Source: arXiv:1711.05101, 2110.02861, 2305.14314, 1804.04235, 2502.16982."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the policy's adapter over optimizer steps, such as
    0.9; the run's end writes it to <run>/adapter_ema/. null: no average."""
    rows_per_step: Count = 64
    """Rows (pairs, for a loss of pairs) of a step, in the stages that learn from a set of rows."""
    epochs: Count = 1
    """Passes over each step's rollouts or rows."""
    optimizer_steps: Count = 1
    """Optimizer steps in a pass; the rollouts or rows are split evenly among them."""
    router_aux_loss_coef: NonNegative = 0.0
    """Of a mixture of experts: weight of the loss that balances how its routers choose, over the
    tokens of all rows that are passed (docs/configs.md). 0: none, whatever the model's config says.
    Source: arXiv:2101.03961 eq. 4 to 6."""
    micro_batch_tokens: Literal["auto"] | Count = "auto"
    """Tokens of one forward and backward pass with padding. It changes memory and speed only."""
    packing: Literal["auto", "padded", "varlen"] = "auto"
    """How rollouts lie in a micro-batch. padded: side by side, at most 5 % padding. varlen: end to
    end, a prompt once for all its completions. auto: varlen where the model's attention knows it.
    It changes memory and speed, never the gradient."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    gradient_checkpointing: bool | Literal["offload"] = True
    """Recompute activations in the backward pass: much less memory, about a third more time.
    offload: what is kept for each layer waits in host memory too."""


class EvalSection(Section):
    """Evaluation on the held-out set, scored by the first reward."""

    every: Whole = 10
    """Steps between evaluations, besides the first and the last. 0: only those two."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")], str] = {}  # noqa: RUF012
    """Further held-out sets, {name: file or Hub id}, reported by name. Without data.eval, the first
    one is the held-out set that is reported plainly, too."""
    rows: str | None = None
    """Held-out rows of the same form as the training rows, whose loss is measured (and the accuracy
    of pairs), in the stages that learn from a set of rows. null: none."""
    limit: Count | None = None
    """Take only this many rows from the start of each set. null: all."""
    patience: Whole = 0
    """End the run early after this many evaluations in a row that are no better than the best one
    (run.keep_best says by what). 0: never."""
    samples: Whole = 0
    """Completions of each problem, sampled as in training (sample.temperature and its like), of
    which the accuracy is the mean. 0: one, by greedy decoding."""
    max_new_tokens: Count | None = None
    """Longest completion. null: as in sample."""


class MemorySection(Section):
    """Memory limits."""

    budget_gib: Literal["auto"] | Positive = "auto"
    """Memory of the GPU (of the host, without one) that sizes are derived from. auto: all that the
    machine has, on a GPU less what other programs hold as the run starts."""
    host_gib: Literal["auto"] | Positive = "auto"
    """Host memory that may be used beside a GPU. auto: all that the machine has."""


class LogSection(Section):
    """Console and trackers."""

    console: Literal["auto", "plain", "quiet"] = "auto"
    """auto: live on a terminal, lines elsewhere; plain: always lines; quiet: only warnings,
    errors."""
    project: str | None = None
    """Project of the run in wandb and trackio. null: WANDB_PROJECT of the environment for wandb,
    else reason_llm."""
    trackers: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], ONE_IS_A_LIST] = []  # noqa: RUF012
    """Where the records of metrics.jsonl go, too: tensorboard, wandb, trackio; one or a list of
    them. One that fails, or takes longer than a minute for a record, is dropped with a warning."""

    @field_validator("trackers")
    @classmethod
    def _are_named_once(cls, trackers: list[str]) -> list[str]:
        return list(dict.fromkeys(trackers))


class Config(Section):
    """A whole run."""

    stage: StageName = "rl"
    """What the run learns from. rl: rewards of its own rollouts. sample: nothing, it samples and
    scores rollouts for the command pairs. sft: demonstrations. pretrain: texts. reward:
    preferences, for a reward model. preference: preferences, for the policy."""
    run: RunSection = RunSection()
    """Where a run lives and how long it goes on."""
    model: ModelSection = ModelSection()
    """The base model and the adapter over it."""
    data: DataSection
    """What is trained and evaluated on."""
    sample: SampleSection = SampleSection()
    """How completions are drawn."""
    score: ScoreSection = ScoreSection()
    """How completions become rewards."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """A row of the algorithm table."""
    train: TrainSection = TrainSection()
    """How the adapter learns."""
    eval: EvalSection = EvalSection()
    """When and how the held-out set is judged."""
    memory: MemorySection = MemorySection()
    """What may be used."""
    log: LogSection = LogSection()
    """What is shown."""
    critic: CriticSection = CriticSection()
    """The critic of algorithm.name ppo."""
    teacher: TeacherSection = TeacherSection()
    """The teacher of algorithm.name opd."""
    reward: RewardSection = RewardSection()
    """How a reward model is learned."""
    preference: PreferenceSection = PreferenceSection()
    """A row of the table of preference losses."""

    @property
    def as_written(self) -> Self:
        """This config as a file holds it: without functions and rows that were given in Python."""
        return type(self).model_validate(self.model_dump(mode="json"))

    @property
    def eval_max_new_tokens(self) -> int:
        """``eval.max_new_tokens``, or ``sample.max_new_tokens`` where that is null."""
        return self.eval.max_new_tokens or self.sample.max_new_tokens

    @property
    def evaluation_sets(self) -> dict[str, str]:
        """Held-out sources by name; that of ``data.eval`` is first and has the empty name."""
        unnamed = {} if self.data.eval is None else {"": self.data.eval}
        return unnamed | self.eval.sets

    @property
    def is_off_policy(self) -> bool:
        """Whether another policy samples than the one that learns from it."""
        return self.run.from_buffer is not None or self.run.max_staleness > 0

    @property
    def learned_row(self) -> Algorithm:
        """The algorithm's row with ``correction: auto`` resolved. Saved and stale rollouts come
        from another policy, and vLLM's log-probs differ slightly from the learner's. Where the
        ratio is the whole completion's, so is the weight."""
        row, sample = self.algorithm.row(), self.sample
        if row.correction != "auto":
            return row
        if not self.is_off_policy and (sample.engine != "vllm" or sample.is_filtered):
            return replace(row, correction="none")
        of_sequences = row.ratio != "token"
        return replace(row, correction="sequence_truncate" if of_sequences else "token_truncate")

    @property
    def turn_weight(self) -> float:
        """Weight of the turns' rewards in the total; 0 where turns have no credit of their own."""
        paid = [r for r in self.score.rewards if r.name == "environment" and not r.options]
        return sum(r.weight for r in paid) if self.algorithm.row().credit == "turn" else 0.0

    @property
    def of_stage(self) -> Stage:
        """The table's entry for the run's stage."""
        return STAGES[self.stage]

    @property
    def method(self) -> Method:
        """The algorithm's row, the preference loss's, or the stage."""
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
        """Whether the stage changes the adapter."""
        return self.of_stage.learns

    @property
    def judges_answers(self) -> bool:
        """Whether completions are scored, in training or in evaluation."""
        return self.samples or bool(self.evaluation_sets)

    @property
    def prompting_reward(self) -> str:
        """The first reward, whose prompt ``data.system_prompt=auto`` takes; empty without
        judging."""
        return self.score.rewards[0].kind if self.judges_answers else ""

    @property
    def first_policy_step(self) -> int:
        """Steps before the first one in which the policy learns: the critic's alone."""
        return self.critic.warmup_steps if self.algorithm.row().critic else 0

    @property
    def policy_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        steps = self.run.steps - self.first_policy_step
        return steps * self.train.epochs * self.train.optimizer_steps

    @property
    def compares_with_start(self) -> bool:
        """Whether the reference is a frozen copy of the adapter that the run begins from."""
        if self.model.start is None:
            return False
        if self.stage == "preference":
            return bool(self.preference.row().needs_reference)
        row_rl = self.algorithm.row()
        return self.stage == "rl" and row_rl.kl != "none" and row_rl.kl_reference == "start"

    @property
    def roles(self) -> list[str]:
        """Roles beside the policy's that have an adapter of their own."""
        row = self.algorithm.row()
        roles = ["start"] if self.compares_with_start else []
        if row.critic:
            roles.append("critic")
        if row.teacher and self.teacher.adapter is not None:
            roles.append("teacher")
        return [*roles, *self.reward_adapters]

    @property
    def teacher_model(self) -> ModelSection | None:
        """The teacher that is a model of its own; None without one. Its adapter is off."""
        path = self.teacher.model
        if path is None or self.teacher.url:
            return None
        return ModelSection(
            path=path,
            dtype=self.model.dtype,
            quantize=self.teacher.quantize,
            context_tokens=self.model.context_tokens,
            adapter=AdapterSection(rank=1),
        )

    @property
    def reward_models(self) -> dict[str, RewardModelOptions]:
        """Reward models that the run uses, by reward; none if saved rollouts have all rewards."""
        asks = self.samples and self.run.from_buffer is None
        return self.score.reward_models if asks else {}

    @property
    def reward_adapters(self) -> dict[str, Path]:
        """Folders of the reward models that are adapters over the base, by role."""
        models = self.reward_models.items()
        return {f"reward:{key}": each.path for key, each in models if not each.is_outside}

    @property
    def outside_reward_models(self) -> dict[str, Path]:
        """Folders of the reward models that are models of their own, by the key of their reward."""
        models = self.reward_models.items()
        return {key: each.path for key, each in models if each.is_outside}

    @property
    def learns_pairs(self) -> bool:
        """Whether a unit of learning is a pair of rows."""
        if self.stage == "preference":
            return self.preference.row().needs_pairs
        return self.stage == "reward"

    @property
    def units_per_step(self) -> int:
        """Rollouts, rows or pairs that a step learns from."""
        return self.sample.rollouts_per_step if self.samples else self.train.rows_per_step

    @property
    def allowed_forms(self) -> tuple[str, ...]:
        """What the training rows may be, the usual first."""
        if self.stage == "preference":
            return ("preferences",) if self.learns_pairs else ("labels",)
        return self.of_stage.forms

    @model_validator(mode="before")
    @classmethod
    def _form_follows_from_the_stage(cls, values: Any) -> Any:
        """Give a data section without a form the stage's usual form."""
        if not isinstance(values, dict):
            return values
        data, form = (
            values.get("data"),
            usual_form(values.get("stage", "rl"), values.get("preference")),
        )
        if isinstance(data, dict) and "form" not in data and form is not None:
            return {**values, "data": {**data, "form": form}}
        return values

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        row, found = self.algorithm.row(), list[str]()
        for name, stages in READ_BY.items():
            if (section := getattr(self, name)) == type(section)():
                continue
            if self.stage not in stages:
                found.append(
                    f"the {name} section contradicts stage={self.stage}, which does not read it; "
                    f"leave it out, or set stage to {stages[0]}"
                )
            elif name in ("critic", "teacher") and not getattr(row, name):
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


NOT_WITH_FULL: tuple[tuple[Callable[[Config, Algorithm], bool], str], ...] = (
    (lambda c, row: c.model.quantize != "none",
     "model.quantize={c.model.quantize}: packed weights have no gradient; leave it out"),
    (lambda c, row: c.model.backend == "unsloth",
     "model.backend=unsloth: Unsloth keeps the weights as they are; set it to native"),
    (lambda c, row: c.model.trust_remote_code,
     "model.trust_remote_code: the models that the run saves hold no code; leave it out"),
    (lambda c, row: c.model.adapter != AdapterSection(),
     "the model.adapter section: there is no adapter; leave it out"),
    (lambda c, row: c.model.start is not None,
     "model.start={c.model.start}: there is no adapter; merge it by the command export and set "
     "model.path to the result"),
    (lambda c, row: (
        c.run.replicas != 1 or c.run.shards > 1 or c.run.samplers > 0 or c.run.max_staleness > 0
     ),
     "run.replicas, run.shards, run.samplers or run.max_staleness: only adapters are sent between "
     "processes; leave them out"),
    (lambda c, row: row.critic,
     "algorithm.name={c.algorithm.name}: its critic is an adapter over a base that stays; take "
     "grpo"),
    (lambda c, row: c.teacher.adapter is not None,
     "teacher.adapter={c.teacher.adapter}: it was trained over a base that stays; set "
     "teacher.prompt"),
    (lambda c, row: bool(c.reward_adapters),
     "a reward model in score.rewards that is an adapter: its base must stay; name a model"),
    (lambda c, row: c.of_stage.scores or not c.learns,
     "stage={c.stage}: it trains an adapter and a head, or nothing; take another stage"),
    (lambda c, row: c.train.ema is not None,
     "train.ema={c.train.ema}: the average of all weights would take them once more; leave it out"),
)  # fmt: skip
"""What needs a base that stays: (whether it is asked for, ``what: why; fix``)."""

CONTRADICTIONS: tuple[tuple[Callable[[Config, Algorithm], bool], str], ...] = (
    (lambda c, row: c.data.form not in c.allowed_forms,
     "data.form={c.data.form} contradicts stage={c.stage} ({c.method.name}), which learns from "
     "{c.allowed_forms[0]}; leave it out, or set stage"),
    (lambda c, row: c.samples and c.eval.rows is not None,
     "eval.rows={c.eval.rows} contradicts stage={c.stage}, which has no rows; use data.eval"),
    (lambda c, row: c.stage != "rl" and c.run.from_buffer is not None,
     "run.from_buffer={c.run.from_buffer} contradicts stage={c.stage}, which learns from no saved "
     "rollouts; give them to the command pairs, and set data.train to the file that it writes"),
    (lambda c, row: c.run.shards < max(
        c.run.samplers, 0 if c.run.replicas == "auto" else c.run.replicas
     ),
     "run.replicas={c.run.replicas} or run.samplers={c.run.samplers} contradicts run.shards="
     "{c.run.shards}: each needs a shard; raise run.shards, or lower the other"),
    (lambda c, row: c.run.replicas == 1 and not c.run.samplers and c.run.ray is not None,
     "run.ray={c.run.ray} contradicts run.replicas=1, which needs no cluster; set run.replicas, or "
     "leave run.ray out"),
    (lambda c, row: bool(c.run.max_staleness or c.run.samplers) and (
        c.run.from_buffer is not None
        or not c.samples
        or (c.run.max_staleness > 0 and not c.learns)
     ),
     "run.max_staleness={c.run.max_staleness} or run.samplers={c.run.samplers} contradicts "
     "run.from_buffer={c.run.from_buffer} or stage={c.stage}, which samples no rollouts or does "
     "not change the policy; leave them out"),
    (lambda c, row: (
        c.sample.environment is None or str(c.sample.environment).startswith("mcp:")
     ) and any(spec.kind == "environment" for spec in c.score.rewards),
     "score.rewards has environment, which sample.environment={c.sample.environment} does not "
     "give; set sample.environment to path/to/file.py:Class, or take a reward that judges the "
     "model's last answer"),
    (lambda c, row: row.credit == "turn" and c.samples and c.turn_weight == 0,
     "algorithm.credit=turn contradicts score.rewards, which do not pay what an environment gives; "
     "add environment with a weight, or set credit to rollout"),
    (lambda c, row: {re.split("[:?]", str(c.sample.environment))[0] == "verifiers"} != {
        source.startswith("verifiers:")
        for source in (*(each.source for each in c.data.sources), *c.evaluation_sets.values())
     },
     "sample.environment={c.sample.environment} contradicts data.train={c.data.train} or the "
     "held-out {c.evaluation_sets}: tasks of verifiers:TASKSET are played by "
     "sample.environment=verifiers, which plays nothing else, and by no other"),
    (lambda c, row: c.sample.environment is not None and c.run.max_staleness > 0,
     "sample.environment={c.sample.environment} contradicts run.max_staleness="
     "{c.run.max_staleness}: no steps are sampled ahead in an environment; leave it out"),
    (lambda c, row: c.of_stage.scores and bool(c.evaluation_sets),
     "data.eval contradicts stage={c.stage}, whose model writes no answers; give held-out "
     "preferences as eval.rows"),
    (lambda c, row: c.algorithm.changes.get("kl_reference") == "start" and c.model.start is None,
     "algorithm.kl_reference=start contradicts model.start=null: there is no adapter that the run "
     "begins from; set model.start to one, or leave the option out for the base"),
    (lambda c, row: c.teacher.prompt is not None and "{prompt}" not in c.teacher.prompt,
     "teacher.prompt={c.teacher.prompt!r:.60} must hold {{prompt}}, in whose place the question is "
     "put"),
    (lambda c, row: row.teacher and not (
        c.teacher.adapter or c.teacher.model or c.teacher.prompt
     ),
     "algorithm.name={c.algorithm.name} needs a teacher: set teacher.adapter to a folder, "
     "teacher.model to another model, or teacher.prompt to a prompt that tells the base more than "
     "the student"),
    (lambda c, row: c.teacher.adapter is not None and c.teacher.model is not None,
     "teacher.adapter={c.teacher.adapter} contradicts teacher.model={c.teacher.model}: the adapter "
     "is over the model that learns; leave one of them out, or merge an adapter of that model"),
    (lambda c, row: c.teacher.quantize != "none" and (
        c.teacher.model is None or c.teacher.url is not None
     ),
     "teacher.quantize={c.teacher.quantize} contradicts teacher.model={c.teacher.model} or "
     "teacher.url={c.teacher.url}: it is of a teacher that is loaded here as a model; leave it "
     "out"),
    (lambda c, row: c.teacher.url is not None and c.teacher.model is None,
     "teacher.url={c.teacher.url} needs teacher.model, the name of the model there"),
    (lambda c, row: c.teacher.url is not None and c.sample.temperature != 1,
     "teacher.url={c.teacher.url} contradicts sample.temperature={c.sample.temperature}: what a "
     "server tells of a prompt is at temperature 1; set it to 1, or load teacher.model here"),
    (lambda c, row: c.teacher.url is None and any(
        getattr(c.teacher, name) != TeacherSection.model_fields[name].default
        for name in ServiceSection.model_fields
     ),
     "teacher.timeout_seconds, retries or key_env contradicts teacher.url=null: they "
     "are of a server; set teacher.url, or leave them out"),
    (lambda c, row: (
        c.teacher.model is not None and c.teacher.url is None and c.model.backend == "unsloth"
     ),
     "teacher.model={c.teacher.model} contradicts model.backend=unsloth, which changes how every "
     "model of the process computes; set model.backend to native"),
    (lambda c, row: c.critic.start is not None and c.critic.warmup_steps == 0,
     "critic.warmup_steps=0 contradicts critic.start={c.critic.start}: a reward model must first "
     "learn the values of unfinished answers; set warmup_steps to 1 or more, such as 10"),
    (lambda c, row: row.critic and c.run.epochs is None and c.critic.warmup_steps >= c.run.steps,
     "critic.warmup_steps={c.critic.warmup_steps} contradicts run.steps={c.run.steps}: the policy "
     "would never learn; set it below"),
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
    (lambda c, row: row.dynamic_sampling > 1 and bool(c.score.reward_models),
     "algorithm.dynamic_sampling={row.dynamic_sampling} contradicts the reward model in "
     "score.rewards, which scores after all is sampled; set dynamic_sampling to 1, or leave the "
     "reward model out"),
    (lambda c, row: c.sample.is_filtered and (
        row.correction not in ("auto", "none") or row.off_policy_threshold > 0
     ),
     "algorithm.correction={row.correction} or algorithm.off_policy_threshold="
     "{row.off_policy_threshold} contradicts sample.top_p, top_k or min_p: the sampler's log-probs "
     "are then of another distribution than the policy's, so their ratio is biased; leave one out"),
    (lambda c, row: c.train.optimizer_steps > c.units_per_step,
     "train.optimizer_steps={c.train.optimizer_steps} contradicts the {c.units_per_step} rollouts "
     "or rows of a step (sample.prompts_per_step * sample.completions_per_prompt, or "
     "train.rows_per_step); set it to that or less"),
    (lambda c, row: (
        c.samples
        and c.train.rows_per_step != TrainSection.model_fields["rows_per_step"].default
     ),
     "train.rows_per_step={c.train.rows_per_step} contradicts stage={c.stage}, which learns from "
     "rollouts; set sample.prompts_per_step and sample.completions_per_prompt"),
    (lambda c, row: (
        c.judges_answers
        and c.model.context_tokens is not None
        and c.sample.max_new_tokens >= c.model.context_tokens
     ),
     "sample.max_new_tokens={c.sample.max_new_tokens} contradicts model.context_tokens="
     "{c.model.context_tokens}: no prompt would fit; set it below"),
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
     "reached; set it below"),
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
     "train.gradient_checkpointing=offload, whose layers hand on no gradient but their output's; "
     "set gradient_checkpointing to true"),
    (lambda c, row: c.model.attention != "auto" and c.model.backend == "unsloth",
     "model.attention={c.model.attention} contradicts model.backend=unsloth, which has an "
     "attention of its own; set backend to native, or leave attention out"),
    (lambda c, row: (c.model.attention, c.train.packing) in (
        ("eager", "varlen"), ("flash", "padded")
     ),
     "model.attention={c.model.attention} contradicts train.packing={c.train.packing}: eager is "
     "for padded rows, and flash for packed ones here; leave packing out, or set attention to "
     "sdpa"),
    *(
        (lambda c, row, is_so=is_so: c.model.train == "full" and is_so(c, row),
         what.replace(":", " contradicts model.train=full:", 1) + ", or set model.train to adapter")
        for is_so, what in NOT_WITH_FULL
    ),
)  # fmt: skip
"""(whether the options contradict each other, what the user is told). ``row`` is
the algorithm's, of stages that do not read it the default."""

CHANGES: dict[str, Literal["free", "warn"]] = {
    **dict.fromkeys(
        (
            *("run.steps", "run.epochs", "run.directory", "run.resume", "run.buffer"),
            *("run.save_every", "run.keep_", "run.replicas", "run.samplers", "run.ray"),
            *("eval.", "data.eval", "log.", "score.timeout_seconds"),
            *("teacher.timeout_seconds", "teacher.retries", "teacher.key_env"),
            # What they drop is told by the digest of the prompts, compared beside the config.
            *("data.contamination", "data.on_bad_row", "data.limit", "data.preprocess"),
        ),
        "free",
    ),
    **dict.fromkeys(
        (
            *("train.learning_rate", "train.schedule", "train.warmup_steps", "train.weight_decay"),
            *("train.max_grad_norm", "train.micro_batch_tokens", "train.packing"),
            *("model.deterministic", "model.attention", "teacher.url"),
            *("train.gradient_checkpointing", "memory.", "sample.engine"),
            *("score.on_error", "run.shards"),
            "data.columns_sha256",  # what the rewards read beside the answer
            "score.custom_sha256",  # the files of custom rewards
        ),
        "warn",
    ),
}
"""What may differ between a run and its resumption, as dotted prefixes; nothing else may. ``free``:
the adapter comes out the same. ``warn``: another one comes out, or another one bit by bit, and the
run says so."""
