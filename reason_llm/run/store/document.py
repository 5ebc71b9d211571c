"""The JSON document of a step's rollouts, in data/buffer.json, in ``ahead/`` and in the archive.

    {"sha256", "format": 2, "run": {"id", "name", "config"}, "step", "weight_version", "checkpoint",
    "complete", "trained", "drawn", "groups": [...], "counts": {}}

``sha256`` is the digest of the file's bytes, unpacked, without that first member. Whoever reads a
document compares it, so that a changed number is reported and not learned from.
"""

import gzip
import os
import shlex
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import orjson

from reason_llm.config import command
from reason_llm.errors import NotAsWritten, RolloutBufferError, one_line
from reason_llm.files import MIB, check_seal, open_regular, read_bounded, sealed, too_large
from reason_llm.rollout import (
    NOT_TOO_DEEP,
    Count,
    Flag,
    Group,
    Number,
    Text,
    check_lengths,
    record_from_json,
)

FORMAT = 2
WRITTEN = (
    *("run", "step", "weight_version", "checkpoint", "complete", "trained", "drawn", "groups"),
    "counts",
)
"""Members of a document after the format, in their order in the file."""
MAX_BYTES = 4 << 30
"""Largest size of a document, unpacked."""
MAX_RATIO = 200
"""Largest ratio of an archive's unpacked bytes to its own, above a size that always fits."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Identity of the run that sampled the rollouts."""

    id: Text
    name: Text
    config: Annotated[dict[str, Any], NOT_TOO_DEEP] = field(repr=False)
    """The whole config as JSON-ready values."""


@dataclass(frozen=True, slots=True)
class Document:
    """A step's rollouts, with what led to them."""

    run: RunIdentity
    step: Count
    complete: Flag
    """Whether all groups are there, with their advantages."""
    trained: Flag
    """Whether the run is over."""
    drawn: Count
    """Prompts sampled so far, those of dropped groups included."""
    groups: list[Group]
    counts: dict[str, Number] = field(default_factory=dict)
    """Of the rewards' errors and time limits while these were scored, by metric."""
    checkpoint: Text | None = None
    """Path of the run's newest checkpoint when these were written; None: it had none."""
    weight_version: Count | None = None
    """Learned steps of the policy that sampled these; None: it was not written."""


def to_bytes(document: Document, *, compressed: bool = False) -> bytes:
    """The document as JSON with its digest; ``compressed``: in gzip, the same bytes every time."""
    value = {"format": FORMAT} | {name: getattr(document, name) for name in WRITTEN}
    content = sealed(orjson.dumps(value) + b"\n")
    # most of it are digits of log-probs: level 4 takes twice as long for 7 % fewer bytes
    return gzip.compress(content, compresslevel=1, mtime=0) if compressed else content


def read_document(
    path: Path, way_on: str = "restore it or name another file", *, accept_edited: bool = False
) -> Document:
    """The document in ``path``: data/buffer.json, a copy of it, or an archived one (.json.gz).

    Args:
        way_on: what to do about a damaged one, for the error.
        accept_edited: the digest may be wrong or missing.

    Raises:
        RolloutBufferError: it is not there, cannot be read, is damaged, or is not what was written.
    """
    content = _read(path, way_on)
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RolloutBufferError(
            f"{path} is cut short or damaged: not whole JSON ({error}); {way_on}"
        ) from error
    # The format comes first: fields of another version would look like damage.
    version = value.get("format") if isinstance(value, dict) else type(value).__name__
    if type(version) is not int or version != FORMAT:
        raise RolloutBufferError(
            f"{path} is of format {version!r:.60} and this version reads {FORMAT}; {way_on}"
        )
    try:
        if not accept_edited:
            check_seal(content, must_carry=True)
        document = record_from_json(Document, value)
        _check(document)
    except NotAsWritten as error:
        raise RolloutBufferError(
            f"{path} is not what was written ({error}); {way_on}, or, if it was edited on purpose, "
            f"accept it with: {command('rescore')} {shlex.quote(str(path))} --accept-edited"
        ) from error
    except ValueError as error:
        raise RolloutBufferError(f"{path} is damaged: {error!s:.300}; {way_on}") from error
    return document


def _read(path: Path, way_on: str) -> bytes:
    try:
        if path.suffix != ".gz":
            return read_bounded(path, MAX_BYTES)
        with open_regular(path) as packed, gzip.open(packed) as file:
            limit = min(MAX_BYTES, 64 * MIB + MAX_RATIO * path.stat().st_size)
            content = file.read(limit + 1)
        if len(content) > limit:
            raise too_large(limit)
    except (OSError, EOFError, zlib.error) as error:
        raise RolloutBufferError(f"{path} cannot be read ({one_line(error)}); {way_on}") from error
    return content


def _check(document: Document) -> None:
    """Raises ValueError where something contradicts something else."""
    completions = [c for group in document.groups for c in group.completions]
    if document.complete and not completions:
        raise ValueError("a whole step without rollouts")
    if document.complete and any(c.reward is None or c.advantage is None for c in completions):
        raise ValueError("a completion without reward or advantage")
    if len({frozenset(c.rewards) for c in completions if c.reward is not None}) > 1:
        raise ValueError("completions with different rewards")
    for group in document.groups:
        check_lengths(group)
        if len({completion.reward is None for completion in group.completions}) > 1:
            raise ValueError(f"{group.prompt.id!r} is scored in part")


def unfinished_run(path: Path) -> str | None:
    """Name of the unfinished run whose rollouts are in ``path``; None without a readable one."""
    if not os.path.lexists(path):
        return None
    try:
        document = read_document(path)
    except RolloutBufferError:
        return None
    return None if document.trained else document.run.name
