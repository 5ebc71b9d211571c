"""This project's side of the workloads on rows: a learning phase of its loop, with the sizes of the
memory plan.

Arguments: workload.json folder
"""

import sys
import time
from pathlib import Path

from benchmarks.cpu_rows import BETA, RowsWorkload
from benchmarks.cpu_worker import Turns
from benchmarks.cpu_workloads import SEED
from reason_llm.config import Config
from reason_llm.files import read_object
from reason_llm.model import Datum, Model, base
from reason_llm.model.plan import Machine, Plan, Shape, memory
from reason_llm.train import Learner, Learners, LearningSettings, PairLoss, Supervised, learning


def main() -> None:
    """Take as many steps as the workload has."""
    turns = Turns()
    workload = RowsWorkload.from_json(read_object(Path(sys.argv[1])))
    config = _config(workload)
    tokenizer = base.load_tokenizer(workload.model)
    plan = _plan(config, workload)
    with Model(config.model, tokenizer, SEED, None, checkpointing=False) as model:
        learner = Learner(model, _settings(config, plan))
        for step in range(len(workload.steps)):
            data = workload.data(step)
            if workload.stage == "dpo_known":
                data = _with_references(learner, data)
            turns.wait()
            started = time.perf_counter()
            with learning(learner):
                Learners(learner).learn(step, data, lambda rows: None)
            seconds = time.perf_counter() - started
            tokens = workload.tokens(step)
            turns.answer({"sampling": 0.0, "learning": seconds, "total": seconds, "tokens": tokens})
        turns.finish()


def _with_references(learner: Learner, data: list[Datum]) -> list[Datum]:
    with learning(learner):
        logprobs, _ = learner.measure(data, "reference")
    return [
        row.with_trained("ref_logprobs", values) for row, values in zip(data, logprobs, strict=True)
    ]


def _config(workload: RowsWorkload) -> Config:
    tree = {
        "stage": "preference" if workload.is_paired else "sft",
        "run": {"seed": SEED, "steps": len(workload.steps)},
        "model": {
            "path": workload.model,
            "dtype": "float32",
            "adapter": {"rank": workload.rank, "alpha": workload.alpha},
        },
        "data": {"train": "given"},
        "train": {
            "learning_rate": workload.learning_rate,
            "rows_per_step": len(workload.steps[0]),
            "gradient_checkpointing": False,
            "packing": "varlen",
        },
    }
    preference = {"preference": {"name": "dpo", "beta": BETA}} if workload.is_paired else {}
    return Config.model_validate(tree | preference)


def _plan(config: Config, workload: RowsWorkload) -> Plan:
    rows = [row for step in range(len(workload.steps)) for row in workload.data(step)]
    return memory.plan(
        config,
        Shape.of(base.check_model(config.model)),
        Machine.here(config, base.default_device()),
        base.context_limit(config.model),
        longest_prompt=0,
        longest_row=max(row.num_tokens for row in rows),
    )


def _settings(config: Config, plan: Plan) -> LearningSettings:
    return LearningSettings(
        objective=PairLoss(row=config.preference.row()) if config.learns_pairs else Supervised(),
        train=config.train,
        temperature=1.0,
        micro_batch_tokens=plan.micro_batch_tokens,
        seed=SEED,
        total_optimizer_steps=config.run.steps,
        chunk_tokens=plan.chunk_tokens,
    )
