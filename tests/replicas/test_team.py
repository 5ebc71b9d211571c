"""By which adapter a replica samples."""

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch

from reason_llm.config import Config
from reason_llm.replicas.errors import ReplicaError
from reason_llm.replicas.replica import Replica, Work, as_written
from reason_llm.replicas.sharded_sampler import Part
from reason_llm.run.start.prepare import prepare
from reason_llm.run.watch import SILENT
from reason_llm.sample import SamplingParams, TransformersSampler

PARAMS = SamplingParams(1, 4)


def test_a_replica_samples_by_what_it_learned_or_by_what_it_holds(
    small_run: Callable[..., Config],
) -> None:
    job = prepare(small_run(run__shards=2, run__steps=1), SILENT)
    work = Work(as_written(job.config), job.folder, Path.cwd(), job.state, job.plan, {}, 1, False)
    replica, lot = Replica(work), (Part(0, tuple(job.data.prompts[:2]), 3),)
    model = replica._model
    adapter = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        for name, tensor in model.adapter_of("policy").items()
    }

    def drawn(version: int | None) -> list[list[int]]:
        content, _ = replica.sample(lot, PARAMS, version)
        groups = orjson.loads(content)
        assert [g["prompt"]["id"] for g in groups] == [p.id for p in lot[0].prompts]
        return [g["completions"][0]["token_ids"] for g in groups]

    own = drawn(None)
    sampler = TransformersSampler(model, job.plan.cache_tokens)
    groups = sampler.sample(lot[0].prompts, PARAMS, 3, lambda *told: None)
    assert own == [[*g.completions[0].token_ids] for g in groups]
    replica.hold(7, adapter)
    with pytest.raises(ReplicaError, match="version 8 is asked for and 7 is held"):
        drawn(8)
    other = drawn(7)
    assert drawn(None) == own != other
    model.load_adapter("policy", adapter)
    assert drawn(None) == other
    replica.load(replica._learners.state(), 48)
    assert replica._learners.policy.micro_batches.tokens == 48
