"""A replica other than the head: a whole model with its sampler and its learners, under the head's
commands. One that only samples has no learners. It writes nothing to disk."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import orjson
import torch
from torch import Tensor

from reason_llm.config import Config
from reason_llm.model import Datum, Model, load_tokenizer
from reason_llm.model.plan import Plan
from reason_llm.readers import Reader
from reason_llm.replicas.errors import ReplicaError
from reason_llm.replicas.peers import GroupPeers, Seat
from reason_llm.replicas.sharded_learner import ShardedLearner, Shards, deal
from reason_llm.replicas.sharded_sampler import Lot, sample_lot
from reason_llm.rollout import Group, Prompt, check_lengths, record_from_json
from reason_llm.run.opening import make_learners
from reason_llm.run.store.checkpoint import RunState
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling
from reason_llm.train import Learner, Learners, LearningSettings, learning


@dataclass(frozen=True, slots=True)
class Work:
    """The data of the run that a replica needs."""

    config: Config
    folder: Path
    """The run's folder. With model.start it must be readable on every machine."""
    directory: Path
    """Folder to which relative paths refer."""
    state: RunState
    plan: Plan
    readers: Sequence[Reader]
    """Readers of the run that use the base model."""
    threads: int
    """Threads of torch on a CPU; the bits depend on them."""
    only_samples: bool


def as_written(config: Config) -> Config:
    """The config as it would be read from a file: rewards and rows passed as Python objects stay
    with the head, since they may not be picklable."""
    return Config.model_validate(config.model_dump(mode="json"))


class Replica:
    """A replica's model and learners; raises ReasonError where something that the config names
    cannot be used on this machine."""

    def __init__(self, work: Work) -> None:
        os.chdir(work.directory)
        if not torch.cuda.is_available():
            torch.set_num_threads(work.threads)
        config = work.config
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        checkpointing = bool(config.train.gradient_checkpointing)
        self._model = Model(
            config.model, tokenizer, config.run.seed, work.plan.engine, checkpointing
        )
        self._optional_learners: Learners | None = None
        if work.only_samples:  # it needs no optimizer and no reader
            self._model.add_role("policy")
        else:
            self._optional_learners = make_learners(
                config,
                work.folder,
                work.state,
                work.plan,
                self._model,
                work.readers,
                partial(learner, shards=config.run.shards),
            )
        self._work = work
        self._seat: Seat | None = None
        self._peers: GroupPeers | None = None
        self._proven = False
        self._held: tuple[int | None, Mapping[str, Tensor]] = None, {}

    @property
    def _learners(self) -> Learners:
        assert self._optional_learners is not None
        return self._optional_learners

    def load(self, state: Mapping[str, Tensor], micro_batch_tokens: int) -> None:
        """Load the state of the head's learners."""
        self._learners.load(state)
        self._learners.policy.micro_batches.tokens = micro_batch_tokens
        self._proven = False

    def hold(self, version: int, adapter: Mapping[str, Tensor]) -> None:
        """Store an adapter to sample with, that of ``version`` learned steps."""
        self._held = version, adapter
        self._proven = False

    def sample(self, lot: Lot, params: SamplingParams, version: int | None) -> tuple[bytes, float]:
        """Sample a lot; the groups of its parts, one after the other, as JSON, and the seconds.

        Args:
            version: that of ``hold``; None: by what this replica has learned.
        """
        started = time.perf_counter()
        with self._at(version), sampling(self._model, self._work.plan.cache_tokens) as sampler:
            if self._model.engine is not None and not self._proven:
                prove_sampler_is_policy(sampler, self._model, lot[0].prompts)
                self._proven = True
            groups = sample_lot(sampler, lot, params, lambda tokens, items: None)
        content = orjson.dumps([group for part in groups for group in part])
        return content, time.perf_counter() - started

    @contextmanager
    def _at(self, version: int | None) -> Iterator[None]:
        if version is None:
            yield
            return
        held, adapter = self._held
        if held != version:
            raise ReplicaError(f"version {version} is asked for and {held} is held")
        own = {} if self._optional_learners is None else self._model.adapter_of("policy")
        self._model.load_adapter("policy", dict(adapter))
        try:
            yield
        finally:
            if own:
                self._model.load_adapter("policy", own)

    def learn(self, step: int, data: Sequence[Datum], seat: Seat) -> dict[str, float]:
        """Learn a step together with the head; return ``learning_seconds``, ``waiting_seconds`` (of
        these) and ``sent_bytes``.

        Raises:
            PeersLost: another replica is gone.
            TrainingError, OutOfMemory: as ``Learners.learn``; the others stop as well.
        """
        count = self._work.config.run.shards
        self._proven = False
        started = time.perf_counter()
        try:
            if self._seat != seat:
                peers = GroupPeers(seat, self._model.device)
                self._peers, self._seat = peers, seat
                deal(self._learners, Shards(count, peers))
            assert self._peers is not None
            with learning(self._learners.policy), costs(self._peers) as costs_of_step:
                self._learners.learn(step, data, lambda rows: None)
            return costs_of_step | {"learning_seconds": time.perf_counter() - started}
        except BaseException:  # leave the group: whoever waits for this replica waits no longer
            deal(self._learners, Shards(count))
            if self._peers is not None:
                self._peers.close()
            self._peers = self._seat = None
            raise


def learner(model: Model, settings: LearningSettings, shards: int) -> Learner:
    """A learner that takes its steps in so many shards."""
    if shards == 1:
        return Learner(model, settings)
    return ShardedLearner(model, settings, Shards(shards))


@contextmanager
def costs(peers: GroupPeers) -> Iterator[dict[str, float]]:
    """``waiting_seconds`` and ``sent_bytes`` of the peers within the block, at its end."""
    measured: dict[str, float] = {}
    waited, sent = peers.waited_seconds, peers.sent_bytes
    yield measured
    measured["waiting_seconds"] = peers.waited_seconds - waited
    measured["sent_bytes"] = float(peers.sent_bytes - sent)


def completions(prompts: Sequence[Prompt], content: bytes) -> list[Group]:
    """The groups of ``Replica.sample``'s result, with the head's own prompts."""
    groups = [record_from_json(Group, group) for group in orjson.loads(content)]
    for group in groups:
        check_lengths(group)
    return [replace(g, prompt=prompt) for g, prompt in zip(groups, prompts, strict=True)]
