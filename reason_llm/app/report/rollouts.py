"""Archived rollouts of a run, as many as a page can hold, read one archive at a time.

Each step becomes facts about its groups, which the page lists and the alarms judge, and a gzipped
blob with all texts and numbers, which the page opens on demand:

    uint32 little-endian: bytes of the header; the header as JSON, padded with spaces to a multiple
    of 4; then of all tokens of the step, one after the other, uint16 each: the length of its text,
    the log-prob, the log of the ratio
"""

import gzip
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson

from reason_llm.app.report.token_texts import TokenTexts
from reason_llm.data import folder_of, rollout_sides
from reason_llm.errors import RolloutBufferError, secrets, tree_without_secrets, without_secrets
from reason_llm.rollout import Completion, Group
from reason_llm.run import read_document

T = TypeVar("T")
MAX_ROLLOUTS = 20_000
"""In a page."""
MAX_BLOB_BYTES = 21 * 2**20
"""In a page, before base64 adds a third."""
MAX_READ_BYTES = 192 * 2**20
"""Compressed bytes of the archives that are read; 50 MiB take a few seconds."""
MAX_STEPS = 500
PREVIEW_CHARS = 160
LOGPROB_UNIT = 0.01
"""What 1 means in a blob, in nats."""
MAX_NUMBER = 0xFFFF
MAX_ATTACHMENTS = 8
NGRAM, SHINGLE = 4, 3
"""Tokens of the sequences that repeat in a completion, and that completions share."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group as the page lists it and the alarms judge it; lists have an entry per completion."""

    step: int
    """Learned steps of the policy that sampled it; the record of ``step + 1`` has its metrics."""
    prompt_id: str
    preview: str
    rewards: list[float]
    parts: dict[str, list[float]]
    """Each reward by name, before weights; 0 where the reward gave none."""
    advantages: list[float]
    lengths: list[int]
    are_truncated: list[bool]
    repeated: list[float]
    similarity: float


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """Rollouts of one archive in a page."""

    step: int
    num_rollouts: int
    """In the archive; the page may hold fewer."""
    groups: list[GroupFacts]
    blob: bytes
    num_split: int
    """Completions whose tokens could be separated in the text."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts of a run's archives in a page."""

    steps: list[StepRollouts]
    num_archives: int
    notices: list[str]

    @property
    def groups(self) -> list[GroupFacts]:
        """Groups of all steps, in order."""
        return [group for step in self.steps for group in step.groups]

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts in the page."""
        return sum(len(group.rewards) for group in self.groups)


Reader = Callable[[Path, TokenTexts | None, int, int], StepRollouts]


def read_rollouts(
    archives: Sequence[Path], tokens: TokenTexts | None, share: float, read: Reader
) -> Rollouts:
    """Rollouts of an even sample of archives and of groups, within ``share`` of the bounds above. A
    damaged archive is skipped with a notice; without ``tokens`` tokens are not separated."""
    total = sum(path.stat().st_size for path in archives)
    by_bytes = len(archives) * int(share * MAX_READ_BYTES) // max(1, total)
    chosen = evenly(archives, max(2, min(int(share * MAX_STEPS), by_bytes)))
    steps, notices = [], []
    for path in chosen:
        limits = [int(share * limit) // len(chosen) for limit in (MAX_ROLLOUTS, MAX_BLOB_BYTES)]
        try:
            steps.append(read(path, tokens, *limits))
        except RolloutBufferError as error:
            notices.append(f"{path.name} was passed over: {error}")
    return Rollouts(steps, len(archives), notices)


def evenly(items: Sequence[T], max_items: int) -> list[T]:
    """At most ``most`` of the items, including the first and the last."""
    if len(items) <= max_items:
        return list(items)
    if max_items == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (max_items - 1))] for i in range(max_items)]


def read_step(
    path: Path, tokens: TokenTexts | None, max_rollouts: int, max_bytes: int
) -> StepRollouts:
    """Rollouts of one archive: all its groups, or an even sample within the bounds."""
    document = read_document(path)
    if not document.groups:
        raise RolloutBufferError(f"{path} holds no rollouts")
    return pack(document.step, document.groups, tokens, max_rollouts, max_bytes)


def pack(
    step: int,
    all_groups: Sequence[Group],
    tokens: TokenTexts | None,
    max_rollouts: int,
    max_bytes: int,
) -> StepRollouts:
    """The groups, or an even sample of them within the bounds, as a page holds them."""
    size = max(len(group.completions) for group in all_groups)
    num_groups = max(1, max_rollouts // size)
    groups: Sequence[Group] = all_groups
    while True:  # the size of a blob is known only after it is compressed
        groups = evenly(groups, num_groups)
        split = _split(groups, tokens)
        blob = _blob(groups, split)
        if len(blob) <= max_bytes or len(groups) <= 1:
            break
        num_groups = min(len(groups) - 1, max(1, int(0.9 * len(groups) * max_bytes / len(blob))))
    begin, end = _markers([group.prompt.text for group in all_groups])
    return StepRollouts(
        step=step,
        num_rollouts=sum(len(group.completions) for group in all_groups),
        groups=[_facts(step, group, begin, end) for group in groups],
        blob=blob,
        num_split=sum(lengths is not None for lengths in split),
    )


def _facts(step: int, group: Group, begin: int, end: int) -> GroupFacts:
    completions = group.completions
    ids = [completion.sampled_ids for completion in completions]
    return GroupFacts(
        step=step,
        prompt_id=group.prompt.id,
        preview=_preview(group.prompt.text, begin, end),
        rewards=[completion.reward or 0.0 for completion in completions],
        parts={
            name: [0.0 if math.isnan(c.rewards[name]) else c.rewards[name] for c in completions]
            for name in completions[0].rewards
        },
        advantages=[completion.advantage or 0.0 for completion in completions],
        lengths=list(map(len, ids)),
        are_truncated=[completion.finish_reason == "length" for completion in completions],
        repeated=list(map(repeated_fraction, ids)),
        similarity=similarity(ids),
    )


def _markers(prompts: Sequence[str]) -> tuple[int, int]:
    """Number of characters that all prompts share at either end, in whole lines or tags: those of
    the chat template and the system prompt."""
    if len(set(prompts)) < 2:
        return 0, 0
    shared = os.path.commonprefix(prompts)  # noqa: RUF071, characters are meant
    begin = max(shared.rfind(mark) for mark in "\n>]") + 1
    reversed_ends = [text[begin:][::-1] for text in prompts]
    shared = os.path.commonprefix(reversed_ends)[::-1]  # noqa: RUF071
    starts = [place for mark in "\n<[" if (place := shared.find(mark)) >= 0]
    return begin, len(shared) - min(starts, default=len(shared))


def _preview(text: str, begin: int, end: int) -> str:
    flat = " ".join(without_secrets(text[begin : len(text) - end]).split())
    return flat if len(flat) <= PREVIEW_CHARS else f"{flat[:PREVIEW_CHARS]}…"


def _split(groups: Sequence[Group], tokens: TokenTexts | None) -> list[list[int] | None]:
    """Token text lengths of each completion; None if unknown or with a secret in the text."""
    environment_secrets = secrets()

    def lengths(completion: Completion) -> list[int] | None:
        text = completion.text
        if tokens is None or without_secrets(text, environment_secrets) != text:
            return None
        return tokens.lengths(completion.token_ids, text)

    return [lengths(completion) for group in groups for completion in group.completions]


def _blob(groups: Sequence[Group], split: Sequence[list[int] | None]) -> bytes:
    completions = [completion for group in groups for completion in group.completions]
    header = {
        "groups": [
            {
                "prompt": group.prompt.text,
                "answer": group.prompt.answer,
                "texts": [completion.text for completion in group.completions],
                "attachments": [  # names, each with a thumbnail as a data URL
                    folder_of(item.kind, f"the report of {group.prompt.id}").thumbnail(item)
                    for item in group.prompt.attachments[:MAX_ATTACHMENTS]
                ],
            }
            for group in groups
        ],
        "tokens": [len(completion.token_ids) for completion in completions],
        "split": [lengths is not None for lengths in split],
        "played": [  # entries of the rollouts of several turns
            next(filter(None, (side.page_entry(rollout) for side in rollout_sides())), None)
            for rollout in completions
        ],
    }
    packed = orjson.dumps(tree_without_secrets(header))
    packed += b" " * (-len(packed) % 4)
    lengths, logprobs = [], []
    for completion, of_texts in zip(completions, split, strict=True):
        sampled_T = np.array(completion.logprobs)
        lengths.append(np.zeros(len(sampled_T)) if of_texts is None else np.array(of_texts))
        logprobs.append(np.rint(-sampled_T / LOGPROB_UNIT))
    planes = [np.concatenate(rows).clip(0, MAX_NUMBER) for rows in (lengths, logprobs)]
    content = b"".join(plane.astype("<u2").tobytes() for plane in planes)
    return gzip.compress(len(packed).to_bytes(4, "little") + packed + content, 6, mtime=0)


def repeated_fraction(token_ids: Sequence[int]) -> float:
    """Fraction of n-grams that occurred before in the same completion; 0 without n-grams."""
    total = len(token_ids) - NGRAM + 1
    return 1 - len(_ngrams(token_ids, NGRAM)) / total if total > 0 else 0.0


def similarity(completions: Sequence[Sequence[int]]) -> float:
    """Mean Jaccard index of the completions' n-grams over all pairs, 0 to 1; 0 for a single one."""
    sets = [_ngrams(ids, min(SHINGLE, len(ids))) for ids in completions]
    pairs = list(combinations(sets, 2))
    return sum(len(a & b) / len(a | b) for a, b in pairs) / max(1, len(pairs))


def _ngrams(token_ids: Sequence[int], size: int) -> set[tuple[int, ...]]:
    return set(zip(*(token_ids[start:] for start in range(size)), strict=False))
