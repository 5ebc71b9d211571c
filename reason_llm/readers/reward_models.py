"""Reward models as rewards: their folders, checked before a weight is read, and the scores of a
step's rollouts when all of them are sampled.

A reward model over the run's base is an adapter with a head, and has the role ``reward:<key>``. A
separate model reads text. A reward is ``(score - mean) / std`` by what ``reward.json`` of the
folder holds, cut off at -10 and 10, or the score as it is.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from reason_llm.config import Config, readers as kinds
from reason_llm.data import Renderer, chat_template
from reason_llm.errors import ConfigError, ModelError, one_line
from reason_llm.files import MIB, read_object, sealed
from reason_llm.model import (
    Model,
    SequenceClassifier,
    adapters,
    digests,
    load_tokenizer,
    score_head,
    sequence_classifier,
    to_data,
    weights,
)
from reason_llm.model.plan import Subject
from reason_llm.readers.reader import Base, Progress, RewardReader
from reason_llm.rollout import CHAT, Group
from reason_llm.train import Learner

SCALE = "reward.json"
"""File in the folder of a reward model's adapter."""
END_TOKEN = "end_token"
"""Where the score of our reward models is read: at the end token."""

CLIP = 10.0
"""Bound of a normalised reward. Source: OpenRLHF's ``reward.clip_range``."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RewardModelReader(RewardReader):
    """A reward model that the config names, checked."""

    key: str
    folder: Path
    scale: tuple[float, float] | None
    """Mean and deviation; None: its scores are the rewards."""
    digest: str
    """Digest of its files."""
    reads_end_token: bool
    """A separate model that reads the end token, and nothing that its template puts after it."""
    date: str | None = None
    """``data.date``."""
    is_outside: bool = False
    title: str = "scoring with reward models"
    _classifier: SequenceClassifier | None = field(default=None, init=False)
    """A separate one, kept in host memory once it has scored."""

    @property
    def role(self) -> str:
        """Role of its adapter."""
        return f"reward:{self.key}"

    def digests(self) -> Mapping[str, Any]:
        """See ``Reader``."""
        return {"score.reward_models_sha256": {self.key: self.digest}}

    def lines(self) -> list[str]:
        """See ``Reader``."""
        kind = "a separate model" if self.is_outside else "an adapter over the base"
        return [f"the reward {self.key} is given by {self.folder}, {kind}"]

    def add_roles(self, model: Model, run: Path) -> None:
        """See ``Reader``."""
        if not self.is_outside:
            model.add_role(self.role, self.folder, head="score")

    def rewards(self, groups: Sequence[Group], learner: Learner, progress: Progress) -> list[float]:
        """See ``RewardReader``."""
        return normalized(self._scores(groups, learner, progress), self.scale)

    def _scores(self, groups: Sequence[Group], learner: Learner, progress: Progress) -> list[float]:
        """Score of each completion, in order."""
        if not self.is_outside:
            of_rollouts = to_data(groups)[: sum(len(group.completions) for group in groups)]
            scores = learner.scores(of_rollouts, self.role)
            progress(len(scores))
            return scores
        if self._classifier is None:
            self._classifier = SequenceClassifier(self.folder, learner.model.device)
        rows = conversations(groups, self._classifier, self.reads_end_token, self.date)
        scores = [math.nan] * len(rows)
        with self._classifier.on_device():
            for index, score in self._classifier.scores(rows, learner.micro_batches.tokens):
                scores[index] = score
                progress(1)
        return scores


def normalized(scores: Sequence[float], scale: tuple[float, float] | None) -> list[float]:
    """Rewards from scores and their mean and deviation; a score that is not finite stays so."""
    if scale is None:
        return list(scores)
    mean, std = scale
    return [
        min(max((score - mean) / std, -CLIP), CLIP) if math.isfinite(score) else score
        for score in scores
    ]


def opened(config: Config, subject: Subject, base: Base) -> Sequence[RewardModelReader]:
    """The config's reward models. Raises ConfigError: a folder is missing or of another base;
    ModelError: its files are damaged."""
    rewards = config.rewards_by_readers.items()
    return [
        _checked(key, options, config, base)
        for key, options in rewards
        if isinstance(options, kinds.RewardModelOptions)
    ]


def _checked(
    key: str, options: kinds.RewardModelOptions, config: Config, base: Base
) -> RewardModelReader:
    folder = options.path
    if not folder.is_dir():
        raise ConfigError(
            f"score.rewards: path={folder} of the reward model {key} is not a folder; name a "
            "reward run's adapter/, or a folder with a sequence-classification model"
        )
    described = _described(key, folder)
    if options.is_outside:
        sequence_classifier.look_at(folder)
        if load_tokenizer(str(folder)).chat_template is None:
            raise ModelError(
                f"the reward model {key}: the tokenizer in {folder} has no chat template; save the "
                "one that it was trained with as chat_template.jinja"
            )
    else:
        _check_adapter(key, folder, config.model.path)
        if described and described.get("base") != base.config:
            raise ConfigError(
                f"the reward model {key} in {folder} was trained over another base than "
                f"{config.model.path}: its {SCALE} holds another digest of the base's config; "
                "name a reward model over this base"
            )
        if described and described.get("template") != base.template:
            # Such scores are less accurate, but not meaningless.
            logger.warning(
                "the reward model %s in %s was trained with another chat template or system prompt "
                "than this run's; set data.template and data.system_prompt alike",
                key,
                folder,
            )
    scale = _scale(key, folder, described) if options.normalize == "fixed" else None
    ends = described.get("read_at") == END_TOKEN
    digest = _digest(folder, options.is_outside)
    date, is_outside = config.data.date, options.is_outside
    return RewardModelReader(key, folder, scale, digest, ends, date, is_outside)


def paid_by(config: Config, folder: Path, option: str) -> tuple[float, float]:
    """Slope and offset from the score of the reward model in this folder to the run's reward, or to
    the normalised score if the run has no such reward. Raises ModelError, which names the
    ``option``."""
    described = _described(option, folder)
    mean, std = (_number(described.get(name)) for name in ("mean", "std"))
    weight, is_normalized = 1.0, True
    for spec in config.score.rewards:
        model = spec.reader
        if isinstance(model, kinds.RewardModelOptions) and model.path.resolve() == folder.resolve():
            weight, is_normalized = spec.weight, model.normalize == "fixed"
    if not is_normalized or mean is None or std is None or std <= 0:
        return weight, 0.0
    return weight / std, -weight * mean / std


def _described(key: str, folder: Path) -> dict[str, Any]:
    if not (folder / SCALE).exists():
        return {}
    try:
        return read_object(folder / SCALE, MIB)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder / SCALE} of the reward model {key} cannot be read ({one_line(error)[:200]}); "
            "restore it"
        ) from error


def _check_adapter(key: str, folder: Path, base: str) -> None:
    named = adapters.base_of(folder)
    if not (folder / score_head.FILE).is_file():
        raise ConfigError(
            f"the reward model {key}: {folder} has an adapter and no {score_head.FILE}; name the "
            "adapter/ of a run with stage=reward"
        )
    is_same = named == base or Path(named).resolve() == Path(base).resolve()
    if not is_same and Path(named).name != Path(base).name:  # it may have been moved
        raise ConfigError(
            f"the reward model {key} in {folder} was trained over {named} and this run's base is "
            f"{base}; name a reward model over this base"
        )


def _scale(key: str, folder: Path, described: Mapping[str, Any]) -> tuple[float, float]:
    mean, std = (_number(described.get(name)) for name in ("mean", "std"))
    if mean is None or std is None or std <= 0:
        raise ConfigError(
            f"the reward model {key}: {folder / SCALE} holds no mean and no std above 0 of "
            "held-out rewards; set its option normalize to none, or train it with eval.rows"
        )
    return mean, std


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _digest(folder: Path, is_outside: bool) -> str:
    read = ["*.safetensors", SCALE, "config.json"]
    if is_outside:  # it reads text by its own tokenizer and template
        read += weights.TOKENIZER_FILES
    return digests.folder_digest(folder, *read)[:16]


def conversations(
    groups: Sequence[Group],
    classifier: SequenceClassifier,
    reads_end_token: bool,
    date: str | None = None,
) -> list[list[int]]:
    """The conversations of all completions as token ids, by the reward model's own template and
    tokenizer. If it ``reads_end_token``, the white space after that token is omitted. Raises
    DataError."""
    template = chat_template("auto", str(classifier.path), model_has_one=True, date=date)
    renderer = Renderer(classifier.tokenizer, template, None)
    rows = []
    for group in groups:
        for c in group.completions:
            talk = [*group.prompt.extra[CHAT], {"role": "assistant", "content": c.answer}]
            text = renderer.marked_text(group.prompt.id, talk, generation=False)
            text = text.rstrip() if reads_end_token else text
            rows.append(renderer.marked_ids(group.prompt.id, text))
    return rows


def description(
    config: Config, records: Sequence[Mapping[str, float]], base: str, template: str
) -> dict[str, bytes]:
    """Files next to the adapter of a run, by name: ``reward.json`` of a reward model, with what the
    run's records say of its held-out rows, where there were any, and the digests of what it was
    trained over: of the base's config and of how prompts are written."""
    if not config.of_stage.scores:
        return {}
    measured = [record for record in records if "eval/reward_std" in record]
    last = measured[-1] if measured else {}
    names = {"eval/reward_mean": "mean", "eval/reward_std": "std"} | {
        f"eval/{name}": name for name in ("pair_accuracy", "pairs", "length_correlation")
    }
    values: dict[str, Any] = {name: last[key] for key, name in names.items() if key in last}
    values |= {"read_at": END_TOKEN, "base": base, "template": template}
    return {SCALE: sealed(orjson.dumps(values, option=orjson.OPT_INDENT_2))}
