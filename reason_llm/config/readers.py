"""Table of the readers: models other than the policy that read rollouts. A row says what the rest
of the package has to know of a kind without loading it: its options and their contradictions, its
adapters and models for the memory plan, what it reads, and its numbers for console and report.

``reason_llm.readers`` holds how each of them reads.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from reason_llm.config.types import Count, Fraction, NonNegative, Section, ServiceSection, Whole

Rule = tuple[Callable[[Any, Any], bool], str]
"""(whether the options contradict each other, message); of the config and the algorithm's row."""


class CriticSection(Section):
    """Critic of PPO: an adapter and a value head over the same base."""

    learning_rate: NonNegative = 1e-4
    """Peak learning rate of the critic."""
    updates: Count = 1
    """Optimizer steps of the critic per step; each passes over all rollouts once."""
    warmup_steps: Whole = 10
    """Number of first steps that train only the critic."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token."""
    lam: Fraction = 1.0
    """Lambda of GAE: 1 uses full returns, 0 only the critic's values. Below 1 a final reward hardly
    reaches the first tokens of a long answer: at 0.95, 4 millionths of it remain 240 tokens
    earlier. The critic is trained on full returns. Source: arXiv:1506.02438 eq. 16; 1 is the
    default of OpenRLHF and verl."""
    value_clip: NonNegative = 0.2
    """Clip range of the values around their old values. 0: no clipping."""
    start: Path | None = None
    """Reward model adapter to start from; its head is scaled like its rewards. It was trained on
    finished answers only, so it needs warmup_steps. null: a new adapter and a zero head."""


class TeacherSection(ServiceSection):
    """Teacher of algorithm.name opd."""

    adapter: Path | None = None
    """Folder of the teacher's adapter for the same base. null: teacher.model, or the base, which
    then needs teacher.prompt."""
    model: str | None = None
    """Folder or Hub id of a separate teacher model with the student's tokenizer. It reads a step's
    rollouts before training and is on the GPU only in that phase. null: the teacher uses the same
    base."""
    quantize: Literal["none", "nf4"] = "none"
    """Quantisation of teacher.model, as in model.quantize."""
    url: str | None = None
    """Address of a vLLM server, such as http://localhost:8000/v1, that returns the log-probs of the
    sampled tokens (prompt_logprobs); teacher.model is then the model's name there."""
    prompt: str | None = None
    """Prompt of the teacher, with {prompt} and {answer}, for example a hint that the student does
    not get. null: the student's prompt."""


class ReaderReward(Section):
    """Options of a reward that a reader gives when the step's sampling is done."""

    title: ClassVar[str]
    """Name of the reader in messages."""
    path: Path
    """Folder of the reader."""

    @property
    def is_outside(self) -> bool:
        """Whether it is a separate model, which reads the messages as text."""
        return False


class RewardModelOptions(ReaderReward):
    """Options of a reward model."""

    title: ClassVar[str] = "reward model"

    path: Path
    """Folder adapter/ of a reward run with the same base, or a sequence-classification model with
    one label."""
    normalize: Literal["fixed", "none"] = "fixed"
    """fixed: standardised by the mean and standard deviation in the folder's reward.json and
    clipped to [-10, 10]. none: the raw score."""

    @property
    def is_outside(self) -> bool:
        """Whether the folder holds a full model rather than an adapter of the run's base."""
        has_model = (self.path / "config.json").is_file()
        return has_model and not (self.path / "adapter_config.json").is_file()


class ReaderSections(Section):
    """Sections of the readers, a part of the config."""

    critic: CriticSection = CriticSection()
    """Critic of algorithm.name ppo."""
    teacher: TeacherSection = TeacherSection()
    """Teacher of algorithm.name opd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Passes of the base and an adapter over a step's tokens."""

    logprobs: int = 0
    """Without gradient, for log-probs."""
    values: int = 0
    """Without gradient, for a head of one output, shared by the cards like the former."""
    learned: int = 0
    """Learned from, by a head of one output."""
    scores: int = 0
    """Without gradient, for rewards, on the first card alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRow:
    """A kind of reader. The functions take the config."""

    is_of_algorithm: bool = False
    """Whether only algorithms read it whose row has the column of its name."""
    adapters: Callable[[Any], Mapping[str, Path | None]] = lambda c: {}
    """Folders of its adapters over the base, by role; None: a new adapter."""
    learns: bool = False
    """Whether its adapter and a head are trained, too."""
    first_policy_step: Callable[[Any], int] = lambda c: 0
    """Number of first steps in which it learns alone."""
    named_adapters: Callable[[Any], Mapping[str, Path | None]] = lambda c: {}
    """Adapters of other runs that options name, by option."""
    model: Callable[[Any], Mapping[str, Any] | None] = lambda c: None
    """Options of a separate model of the base's kind, as of ModelSection."""
    classifiers: Callable[[Any], Mapping[str, Path]] = lambda c: {}
    """Folders of its separate models that give scores, by reward key."""
    reward: type[ReaderReward] | None = None
    """Options of the reward of its name that it gives."""
    reads_base: Callable[[Any], bool] = lambda c: False
    """Whether it reads by the base's weights as they were before training."""
    passes: Callable[[Any], Passes] = lambda c: Passes()
    """Passes over a step's tokens that it adds, beside those of separate models."""
    prompt: Callable[[Any], str | None] = lambda c: None
    """Its prompt, if it reads another one than the policy."""
    text_only: Callable[[Any], Iterable[str]] = lambda c: ()
    """Options in use that contradict rows with images."""
    contradictions: tuple[Rule, ...] = ()
    """Rules of its options."""
    needs_frozen_base: tuple[Rule, ...] = ()
    """Uses that contradict model.train=full: (whether it is so, what)."""
    changes: Mapping[str, Literal["free", "warn"]] = field(default_factory=dict)
    """Its options that may change when a run is resumed."""
    watched: Mapping[str, str] = field(default_factory=dict)
    """Texts of the console, by the metric that each shows."""


def _reward_models(c: Any, is_outside: bool) -> dict[str, Path]:
    """Folders of the reward models that the run uses, by reward key."""
    return {
        key: each.path
        for key, each in c.rewards_by_readers.items()
        if isinstance(each, RewardModelOptions) and each.is_outside == is_outside
    }


def _needs_reference(c: Any) -> bool:
    if c.stage == "preference":
        return bool(c.preference.row().needs_reference)
    return bool(c.stage == "rl" and c.algorithm.row().kl != "none")


READERS: dict[str, ReaderRow] = {
    "reference": ReaderRow(
        adapters=lambda c: {"start": None} if c.compares_with_start else {},
        reads_base=_needs_reference,
        passes=lambda c: Passes(logprobs=int(_needs_reference(c))),
    ),
    "critic": ReaderRow(
        is_of_algorithm=True,
        adapters=lambda c: {"critic": c.critic.start} if c.algorithm.row().critic else {},
        learns=True,
        first_policy_step=lambda c: c.critic.warmup_steps if c.algorithm.row().critic else 0,
        named_adapters=lambda c: {"critic.start": c.critic.start},
        passes=lambda c: (
            Passes(values=1, learned=c.critic.updates) if c.algorithm.row().critic else Passes()
        ),
        contradictions=(
            (lambda c, row: c.critic.start is not None and c.critic.warmup_steps == 0,
             "critic.warmup_steps=0 contradicts critic.start={c.critic.start}: a reward model must "
             "first learn the values of unfinished answers; set warmup_steps to 1 or more, such as "
             "10"),
            (lambda c, row: (
                row.critic and c.run.epochs is None and c.critic.warmup_steps >= c.run.steps
             ),
             "critic.warmup_steps={c.critic.warmup_steps} contradicts run.steps={c.run.steps}: the "
             "policy would never be trained; lower it"),
        ),
        needs_frozen_base=(
            (lambda c, row: row.critic, "algorithm.name={c.algorithm.name}"),
        ),
        watched={"critic/explained_variance": "explained variance {:.2f}"},
    ),
    "teacher": ReaderRow(
        is_of_algorithm=True,
        adapters=lambda c: (
            {"teacher": c.teacher.adapter}
            if c.algorithm.row().teacher and c.teacher.adapter is not None else {}
        ),
        named_adapters=lambda c: {"teacher.adapter": c.teacher.adapter},
        model=lambda c: (
            None if c.teacher.model is None or c.teacher.url
            else {"path": c.teacher.model, "quantize": c.teacher.quantize}
        ),
        reads_base=lambda c: c.samples and c.algorithm.row().teacher,
        passes=lambda c: Passes(
            logprobs=int(c.algorithm.row().teacher and c.teacher.model is None)
        ),
        prompt=lambda c: c.teacher.prompt,
        text_only=lambda c: (
            f"teacher.{name}" for name in ("prompt", "model", "url")
            if getattr(c.teacher, name) is not None
        ),
        contradictions=(
            (lambda c, row: c.teacher.prompt is not None and "{prompt}" not in c.teacher.prompt,
             "teacher.prompt={c.teacher.prompt!r:.60} must contain {{prompt}}, which is replaced "
             "by the question"),
            (lambda c, row: row.teacher and not (
                c.teacher.adapter or c.teacher.model or c.teacher.prompt
             ),
             "algorithm.name={c.algorithm.name} needs a teacher: set teacher.adapter to a folder, "
             "teacher.model to another model, or teacher.prompt to a prompt that tells the base "
             "more than the student gets"),
            (lambda c, row: c.teacher.adapter is not None and c.teacher.model is not None,
             "teacher.adapter={c.teacher.adapter} contradicts teacher.model={c.teacher.model}: the "
             "adapter belongs to the student's base; leave one of them out, or merge the adapter "
             "into the model"),
            (lambda c, row: c.teacher.quantize != "none" and (
                c.teacher.model is None or c.teacher.url is not None
             ),
             "teacher.quantize={c.teacher.quantize} contradicts teacher.model={c.teacher.model} or "
             "teacher.url={c.teacher.url}: it applies to a teacher model that is loaded here; "
             "leave it out"),
            (lambda c, row: c.teacher.url is not None and c.teacher.model is None,
             "teacher.url={c.teacher.url} needs teacher.model, the name of the model there"),
            (lambda c, row: c.teacher.url is not None and c.sample.temperature != 1,
             "teacher.url={c.teacher.url} contradicts sample.temperature={c.sample.temperature}: a "
             "server returns log-probs at temperature 1; set it to 1, or load teacher.model here"),
            (lambda c, row: c.teacher.url is None and any(
                getattr(c.teacher, name) != TeacherSection.model_fields[name].default
                for name in ServiceSection.model_fields
             ),
             "teacher.timeout_seconds or key_env contradicts teacher.url=null: they "
             "apply to a server; set teacher.url, or leave them out"),
            (lambda c, row: (
                c.teacher.model is not None and c.teacher.url is None
                and c.model.backend == "unsloth"
             ),
             "teacher.model={c.teacher.model} contradicts model.backend=unsloth, which patches all "
             "models of the process; set model.backend to native"),
        ),
        needs_frozen_base=(
            (lambda c, row: c.teacher.adapter is not None,
             "teacher.adapter={c.teacher.adapter}"),
        ),
        changes={
            "teacher.timeout_seconds": "free",
            "teacher.key_env": "free", "teacher.url": "warn",
        },
        watched={"train/teacher_kl": "KL to the teacher {:.3g}"},
    ),
    "reward_model": ReaderRow(
        reward=RewardModelOptions,
        adapters=lambda c: {
            f"reward:{key}": path for key, path in _reward_models(c, is_outside=False).items()
        },
        named_adapters=lambda c: {
            f"path of the reward {key}": each.path for key, each in c.score.by_readers.items()
            if isinstance(each, RewardModelOptions) and not each.is_outside
        },
        classifiers=lambda c: _reward_models(c, is_outside=True),
        passes=lambda c: Passes(scores=len(_reward_models(c, is_outside=False))),
        text_only=lambda c: (
            f"the reward model {key}" for key, each in c.rewards_by_readers.items()
            if isinstance(each, RewardModelOptions)
        ),
        contradictions=(
            (lambda c, row: row.dynamic_sampling > 1 and bool(c.score.by_readers),
             "algorithm.dynamic_sampling={row.dynamic_sampling} contradicts the reward model in "
             "score.rewards, which scores after sampling; set dynamic_sampling to 1, or leave the "
             "reward model out"),
        ),
        needs_frozen_base=(
            (lambda c, row: bool(_reward_models(c, is_outside=False)),
             "a reward model in score.rewards that is an adapter"),
        ),
    ),
}  # fmt: skip
"""By name, in the order of their roles in the memory plan."""
READER_REWARDS: dict[str, type[ReaderReward]] = {
    name: reader.reward for name, reader in READERS.items() if reader.reward is not None
}
"""Options of the rewards that readers give, by the reward's name."""
