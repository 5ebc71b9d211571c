"""Training rows from saved rollouts: preferences, labels, demonstrations, or conditioned
demonstrations, whose prompts contain their score (``app.conditioned``).

    {"prompt", "chosen", "rejected", "prompt_ids", "chosen_ids", "rejected_ids", "tokenizer", ...}

Each row also has the sampled token ids and the digest of their tokenizer, so that a run learns the
tokens that the policy wrote. A completion that ended with a string of ``sample.stop`` gets an end
token. A truncated one may only be the rejected side, or a policy would learn never to stop."""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from reason_llm.app import conditioned
from reason_llm.app.conditioned import QuestionEnd
from reason_llm.config import PairForm, PairsSection
from reason_llm.data import tokenizer_digest
from reason_llm.errors import ConfigError, DataError, RolloutBufferError, WriteError
from reason_llm.files import sha256, write_atomically
from reason_llm.model import end_token_ids, load_tokenizer, quiet_libraries
from reason_llm.rollout import Completion, Group
from reason_llm.run import Document, buffer_files, missing_steps, read_document, warn_of_another
from reason_llm.score import selection

logger = logging.getLogger(__name__)

Sides = tuple[Completion, ...]
"""Completions of a row: chosen and rejected, or one."""


@dataclass(slots=True)
class PairCounts:
    """Counts of the written rows."""

    form: PairForm
    path: Path
    rows: int = 0
    prompts: set[bytes] = field(default_factory=set)
    rollouts: int = 0
    buffers: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    is_new: bool = True
    """Whether the file was written now."""

    @property
    def line(self) -> str:
        """``812 preferences of 300 prompts, from 1,024 rollouts in 4 buffers, in my.jsonl``"""
        if not self.is_new:
            return f"{self.path} holds these rows already"
        left_out = ", ".join(f"{count:,} {why}" for why, count in self.left_out.items())
        return (
            f"{self.rows:,} {self.form} of {len(self.prompts):,} prompts, from "
            f"{self.rollouts:,} rollouts in {self.buffers} buffers, in {self.path}"
            + (f"; left out: {left_out}" if left_out else "")
        )


def write_pairs(
    sources: Sequence[Path],
    target: Path,
    form: PairForm,
    section: PairsSection,
    model: str | None = None,
) -> PairCounts:
    """Write the rows that ``section`` selects from saved rollouts, one JSON object per line, unless
    ``target`` holds them already.

    Args:
        sources: saved buffers, or folders of them.
        model: folder or Hub id of the model that sampled; None: the one that the buffers name.

    Raises:
        RolloutBufferError: a buffer is missing, damaged, or of another model than the first.
        ReasonError: options do not go together, nothing is left to write, ``target`` holds other
            rows, or it or the tokenizer cannot be used.
    """
    if target.suffix != ".jsonl":
        raise ConfigError(f"--out {target} is not a .jsonl file, which data.train reads; rename it")
    way = section.way(form)
    quiet_libraries()
    builder: _RowBuilder | None = None
    written, rows = PairCounts(form, target), list[dict[str, Any]]()
    ends = dict[str, QuestionEnd]()
    for path in [path for source in sources for path in _buffers(source)]:
        document = read_document(path)
        warn_of_another(path, document, None)
        sampler = _model_of(path, document)
        if builder is None:
            builder = _RowBuilder(way, section, model or sampler, written)
        # Rows hold token ids, which are of one tokenizer.
        elif model is None and sampler != builder.model:
            raise RolloutBufferError(
                f"{path} was sampled by {sampler}, and the first buffer by {builder.model}; name "
                "buffers of one model"
            )
        written.buffers += 1
        origin = f"{document.run.name}, step {document.step}"
        for group in document.groups:
            rows += builder.rows(group, origin)
        if form == "conditioned":
            if document.run.id not in ends:
                ends[document.run.id] = QuestionEnd(document.run.config, builder.tokenizer)
            for row in rows:
                row.setdefault("run", document.run.id)
    if form == "conditioned":
        rows = _conditioned(rows, section, ends, written)
    written.rows = len(rows)
    if not rows:
        raise DataError(
            f"nothing to write: {written.rollouts:,} rollouts hold no {form} by {way}"
            + (f" ({written.line.partition('; ')[2]})" if written.left_out else "")
            + "; lower threshold, or name other buffers"
        )
    content = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    if os.path.lexists(target):
        written.is_new = False
        if not target.is_file() or sha256(target) != hashlib.sha256(content).hexdigest():
            raise WriteError(
                f"{target} exists and is not what is written from {', '.join(map(str, sources))} "
                "with these options; remove it to write the rows again, or name another file with "
                "--out"
            )
    else:
        write_atomically(target, content)
    return written


def _model_of(path: Path, document: Document) -> str:
    """Return the model that sampled a buffer. Raises RolloutBufferError if it does not say."""
    section = document.run.config.get("model")
    name = section.get("path") if isinstance(section, dict) else None
    if not isinstance(name, str):
        raise RolloutBufferError(f"{path} does not say which model sampled it; name it by --model")
    return name


def _buffers(source: Path) -> list[Path]:
    """Return the saved buffers of a source, with a warning if steps are missing."""
    files = buffer_files(source)
    missing, first = missing_steps(source, files)
    if source.is_dir() and missing:
        logger.warning(
            "%s lacks %d of its %d steps, the first is step %d: no rows are made of them; to keep "
            "all, raise run.keep_buffers_gib",
            *(source, missing, missing + len(files), first),
        )
    return files


def _conditioned(
    rows: Sequence[dict[str, Any]],
    section: PairsSection,
    ends: Mapping[str, QuestionEnd],
    written: PairCounts,
) -> list[dict[str, Any]]:
    """Return the rows, which name their ``run``, with their scores in their prompts."""
    condition = conditioned.fit([row["score"] for row in rows], section)
    conditioned_rows = []
    for row in rows:
        changed = ends[row.pop("run")].insert(row, condition.text(row["score"]))
        if changed is None:
            written.left_out["whose prompt does not end as the chat template's do"] += 1
        else:
            conditioned_rows.append(changed)
    return conditioned_rows


class _RowBuilder:
    """State of the selection."""

    def __init__(self, way: str, section: PairsSection, model: str, written: PairCounts) -> None:
        self.form, self.way, self.section = written.form, way, section
        self.model, self.written = model, written
        self.tokenizer = load_tokenizer(model)
        self.digest = tokenizer_digest(self.tokenizer)
        self.ends = frozenset(end_token_ids(model, self.tokenizer))
        self.counts: Counter[tuple[bytes, bool]] = Counter()
        """Number of rows per prompt so far; for labels, per label."""
        self.seen: set[bytes] = set()

    def rows(self, group: Group, source: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a group."""
        self.written.rollouts += len(group.completions)
        usable = self._usable(group)
        prompt = _digest(group.prompt.token_ids)
        limit = self.section.per_prompt or (1 if self.way == "best" else None)
        for sides, values in self._chosen(usable):
            is_right = self.form != "labels" or selection.reaches(values[0], self.section.threshold)
            if is_right and sides[0].finish_reason == "length":
                self.written.left_out["cut off at the token limit"] += 1
                continue
            key = prompt + b"".join(_digest(side.token_ids) for side in sides)
            if key in self.seen:
                self.written.left_out["that stand there already"] += 1
            elif limit is not None and self.counts[prompt, is_right] >= limit:
                self.written.left_out["beyond per_prompt"] += 1
            else:
                self.seen.add(key)
                self.counts[prompt, is_right] += 1
                self.written.prompts.add(prompt)
                yield self._row(group, sides, values, is_right, source)

    def _usable(self, group: Group) -> Group:
        """The completions that can be learned, with end tokens; truncated ones come last, so that
        of equal rewards a whole one is chosen."""
        ended = []
        for answer in sorted(group.completions, key=lambda c: c.finish_reason == "length"):
            if max(answer.token_ids) >= len(self.tokenizer):
                self.written.left_out["with tokens beyond the tokenizer's"] += 1
                continue
            if answer.spans:
                self.written.left_out["of several turns"] += 1
                continue
            if answer.finish_reason != "length" and answer.token_ids[-1] not in self.ends:
                answer = replace(answer, token_ids=(*answer.token_ids, self.tokenizer.eos_token_id))
            ended.append(answer)
        return replace(group, completions=tuple(ended))

    def _chosen(self, group: Group) -> Iterator[tuple[Sides, tuple[float, ...]]]:
        """Yield the completions of each row, and their rewards."""
        section = self.section
        if not group.completions:
            return
        if attachments := group.prompt.attachments:
            raise DataError(
                f"{group.prompt.id}: has {attachments[0].kind}, which the rows of pairs cannot "
                "hold; take rollouts of prompts of text"
            )
        rewards = selection.rewards_of(group, section.reward)
        places: Sequence[tuple[int, ...]]
        if self.form in ("labels", "conditioned"):
            places = [(i,) for i in rewards]
        elif self.way == "best":
            count = section.per_prompt or 1
            places = [(i,) for i in selection.best_of_n(group, count, section.reward)]
        elif self.form == "demonstrations":
            places = [(i,) for i in selection.at_least(group, section.threshold, section.reward)]
        elif self.way == "all":
            places = _spread(selection.right_wrong_pairs(group, section.threshold, section.reward))
        else:
            pair = selection.best_worst_pair(group, section.reward)
            places = [] if pair is None else [pair]
            if self.way == "threshold":
                is_right = partial(selection.reaches, minimum=section.threshold)
                rights = [[is_right(rewards[i]) for i in place] for place in places]
                places = places if rights == [[True, False]] else []
        for place in places:  # equal texts teach no preference
            sides = tuple(group.completions[i] for i in place)
            if len({side.text for side in sides}) == len(sides):
                yield sides, tuple(rewards[i] for i in place)

    def _row(
        self, group: Group, sides: Sides, values: tuple[float, ...], is_right: bool, source: str
    ) -> dict[str, Any]:
        names = ("chosen", "rejected") if len(sides) > 1 else ("completion",)
        scores = ("chosen_reward", "rejected_reward") if len(sides) > 1 else ("score",)
        return {
            "prompt": group.prompt.text,
            **{name: side.text for name, side in zip(names, sides, strict=True)},
            **({"label": is_right} if self.form == "labels" else {}),
            **dict(zip(scores, values, strict=True)),
            "prompt_ids": group.prompt.token_ids,
            **{f"{name}_ids": side.token_ids for name, side in zip(names, sides, strict=True)},
            "tokenizer": self.digest,
            "source": f"{source}, {group.prompt.id}",
        }


def _spread(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs in an order in which the first ones share few completions."""
    right = sorted({chosen for chosen, _ in pairs})
    wrong = sorted({rejected for _, rejected in pairs})

    def turn(pair: tuple[int, int]) -> tuple[int, int]:
        first, second = right.index(pair[0]), wrong.index(pair[1])
        return (second - first) % len(wrong), first

    return sorted(pairs, key=turn)


def _digest(prompt: object) -> bytes:
    return hashlib.sha256(orjson.dumps(prompt)).digest()
