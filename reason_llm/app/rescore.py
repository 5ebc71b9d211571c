"""New rewards and advantages for saved rollouts, to compare rewards or algorithms on them."""

import os
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from reason_llm.config import Config
from reason_llm.errors import ConfigError, RolloutBufferError, WriteError
from reason_llm.files import write_atomically
from reason_llm.rollout import CHAT, MAY_LACK, ROW, Group, without_learner_logprobs
from reason_llm.run import ANSWERS, Document, RunIdentity, lock, read_document, to_bytes
from reason_llm.score import Scorer
from reason_llm.train import with_advantages


def rescore(document: Document, config: Config, source: Path) -> Document:
    """The rollouts with rewards of ``config.score`` and advantages of ``config.algorithm``. Raises
    a ReasonError if a reward needs a model, or data that the rollouts were saved without."""
    for key, options in config.score.by_readers.items():
        raise ConfigError(
            f"score.rewards has the {options.title} {key}, and rescore loads no model; leave it "
            "out, or sample again with it"
        )
    answers = config.run.directory / str(config.run.name) / ANSWERS
    with Scorer(config.score, config.sample.max_new_tokens, answers=answers) as scorer:
        _check(document.groups, scorer.columns, source)
        scored = scorer.score(document.groups)
        groups = with_advantages(scored, config.algorithm.row(), scorer.weights, config.turn_weight)
    changed = config.model_dump(mode="json", include={"score", "algorithm"})
    run = RunIdentity(uuid.uuid4().hex[:12], document.run.name, document.run.config | changed)
    return replace(
        document, run=run, complete=True, trained=True, groups=without_learner_logprobs(groups)
    )


def rescore_file(source: Path, target: Path, config: Config) -> Document:
    """Rescore a file into a new file; raise a WriteError if ``target`` exists."""
    if os.path.lexists(target):
        raise WriteError(f"{target} exists and was not changed; name another file with --out")
    document = rescore(read_document(source), config, source)
    write_atomically(target, to_bytes(document, compressed=target.suffix == ".gz"))
    return document


def accept_edited(path: Path) -> bool:
    """Update the digest of a buffer that was edited on purpose; return False if it is right."""
    read_document(path, accept_edited=True)  # before the lock creates a file next to it
    is_archived = path.suffix == ".gz"
    with nullcontext() if is_archived else lock(path):
        try:
            read_document(path)
        except RolloutBufferError:  # only because of its digest; the rest can be read
            document = read_document(path, accept_edited=True)
            write_atomically(path, to_bytes(document, compressed=is_archived))
            return True
    return False


def _check(groups: Sequence[Group], columns: set[str], source: Path) -> None:
    sizes = sorted({len(group.completions) for group in groups})
    if len(sizes) != 1:
        raise RolloutBufferError(
            f"{source} has groups of {sizes} completions, and all must have as many; name another "
            "buffer"
        )
    columns = {name for name in columns if not name.endswith(MAY_LACK)}
    for group in groups:
        if missing := sorted(columns - set(group.prompt.extra)):
            names = {ROW: "its row", CHAT: "its messages"}
            without = " and ".join(names.get(name, f"the column {name!r}") for name in missing)
            raise RolloutBufferError(
                f"{source}: {group.prompt.id!r} was saved without {without}, which a reward "
                "asks for; take a reward that needs no more than the answer"
            )
