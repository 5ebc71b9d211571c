"""Data of the learner: tokens, which of them are trained, and numbers for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from reason_llm.rollout import Attachment, Group, TokenRow


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One row of T tokens. Every column has length T, and its entry t belongs to token t; entries
    of tokens that are not trained are 0 and count nowhere."""

    name: str
    """Name in messages: the prompt's id and the completion's index."""
    ids: NDArray[np.int64]
    trained: NDArray[np.bool_]
    """False for the prompt and for tokens that the model did not write."""
    group: int = 0
    """Rows with the same number belong to one prompt of the data."""
    rollout: int = 0
    """Rows with the same number are conversations of one rollout."""
    reward: float = 0.0
    is_truncated: bool = False
    """Whether the token limit cut the completion off."""
    has_reward: bool = True
    """False where every reward gave None: the row then teaches nothing."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns by name: sampler_logprobs, old_logprobs, ref_logprobs, entropies, advantages, ..."""
    attachments: tuple[Attachment, ...] = ()
    """Attachments of the prompt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", np.asarray(self.ids, np.int64))
        object.__setattr__(self, "trained", np.asarray(self.trained, np.bool_))

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        name: str = "",
        *,
        group: int = 0,
        rollout: int = 0,
        reward: float = 0.0,
        is_truncated: bool = False,
        has_reward: bool = True,
        columns: Mapping[str, ArrayLike] | None = None,
        is_sampled: Sequence[bool] | None = None,
    ) -> Self:
        """Row of a prompt with one completion; ``columns`` hold a number for each of its tokens,
        ``is_sampled`` which of them the model wrote (None: all)."""
        prompt = np.asarray(prompt_ids, np.int64)

        # A column has an entry for every token of the row: the prompt's are 0.
        def whole(of_completion: ArrayLike, dtype: type[np.generic]) -> NDArray[Any]:
            return np.append(np.zeros(len(prompt), dtype), np.asarray(of_completion, dtype))

        ids = np.append(prompt, np.asarray(completion_ids, np.int64))
        flags = np.ones(len(completion_ids)) if is_sampled is None else is_sampled
        columns_T = {
            key: torch.from_numpy(whole(values, np.float32))
            for key, values in (columns or {}).items()
        }
        return cls(
            name,
            ids,
            whole(flags, np.bool_),
            group,
            rollout,
            reward,
            is_truncated,
            has_reward,
            columns_T,
        )

    @classmethod
    def of_row(cls, row: TokenRow) -> Self:
        """Datum of a row of an offline stage, whose number is its reward."""
        ids, trained = np.asarray(row.ids, np.int64), np.asarray(row.trained, np.bool_)
        return cls(row.name, ids, trained, row.group, reward=row.value, attachments=row.attachments)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the row."""
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return int(self.trained.sum())

    @property
    def num_prompt(self) -> int:
        """Number of tokens before the first trained one."""
        return int(self.trained.argmax()) if self.trained.any() else self.num_tokens

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens before the first trained one."""
        return tuple(self.ids[: self.num_prompt].tolist())

    @property
    def prompt_key(self) -> tuple[bytes | str, ...]:
        """The prompt's ids, and the digests of what its attachments' tokens stand for."""
        return (
            self.ids[: self.num_prompt].tobytes(),
            *(attachment.sha256 for attachment in self.attachments),
        )

    def with_prompt(self, prompt_ids: tuple[int, ...]) -> Self:
        """A copy with another prompt and without columns."""
        start = self.num_prompt
        return replace(
            self,
            ids=np.append(np.asarray(prompt_ids, np.int64), self.ids[start:]),
            trained=np.append(np.zeros(len(prompt_ids), np.bool_), self.trained[start:]),
            columns={},
        )

    def on_trained(self, name: str) -> Tensor:
        """A column's entries for the trained tokens, in order."""
        column = self.columns[name]
        return column[torch.from_numpy(self.trained).to(column.device)]

    def with_trained(self, name: str, values: Tensor) -> Self:
        """The row with one more column, from the values of its trained tokens in order."""
        mask = torch.from_numpy(self.trained).to(values.device)
        column = torch.zeros(len(mask), dtype=values.dtype, device=values.device)
        return replace(self, columns={**self.columns, name: column.masked_scatter(mask, values)})


def to_data(groups: Sequence[Group]) -> list[Datum]:
    """The buffer's groups as rows for the learner, in order, with the columns ``sampler_logprobs``
    and ``advantages``. If an environment rewards turns, ``earned`` is the unweighted reward of all
    turns before the token's own. Further conversations of the rollouts come last."""
    numbered = [
        (number, group.prompt, i, completion)
        for number, group in enumerate(groups)
        for i, completion in enumerate(group.completions)
    ]
    rows, others = list[Datum](), list[Datum]()
    attachments = [group.prompt.attachments for group in groups]
    for rollout, (number, prompt, i, c) in enumerate(numbered):
        name, advantage = f"{prompt.id}#{i}", c.advantage or 0.0
        columns: dict[str, ArrayLike] = {
            "sampler_logprobs": c.logprobs,
            "advantages": c.of_turns(c.turn_advantages or [advantage] * c.num_turns),
        }
        if c.turn_rewards:
            columns["earned"] = c.of_turns(c.earned)
        datum_of = partial(
            Datum.of,
            group=number,
            rollout=rollout,
            reward=float(c.reward or 0.0),
            is_truncated=c.finish_reason == "length",
            has_reward=c.has_reward or c.reward is None,
        )
        row = datum_of(
            prompt.token_ids,
            c.token_ids,
            name,
            columns=columns,
            is_sampled=c.is_sampled if c.spans else None,
        )
        rows.append(replace(row, attachments=attachments[number]))
        for n, o in enumerate(c.others, 1):
            name_of_other, wrote = f"{name}.{n}", o.is_sampled
            columns = {
                "sampler_logprobs": o.logprobs,
                "advantages": [advantage * is_sampled for is_sampled in wrote],
            }
            others.append(
                datum_of(
                    o.prompt_ids, o.token_ids, name_of_other, columns=columns, is_sampled=wrote
                )
            )
    # The rows of completions come first, so that a rollout's number is that of its row.
    return rows + others
