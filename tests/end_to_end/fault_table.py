"""The faults: where, when and of what kind."""
# ruff: noqa: E501

import random

from faults import Fault

START = "start"
LOADING = "reason_llm.job:load_data"
LOADED = "reason_llm.checkpoint:restore"
BEGINNING = "reason_llm.job:Job.begin"
TOKEN = "reason_llm.sample.transformers_sampler:_Batch.extend"
WAVE = "reason_llm.sample.transformers_sampler:TransformersSampler.sample"
SCORING = "reason_llm.score:Scorer.score"
BUFFER = "open */.buffer.json.writing"
BUFFER_RENAMED = "rename */buffer.json"
LEARNING = "reason_llm.train.phase:Learner.learn"
OLD_LOGPROBS = "reason_llm.train.phase:Learner._logprobs_of"
BACKWARD = "reason_llm.train.phase:Learner._backward"
UPDATE = "reason_llm.train.phase:Learner._update"
TENSORS = "reason_llm.checkpoint:save_file"
ADAPTER = "reason_llm.model.adapters:save_file"
STATE = "open */state.json"
CHECKPOINT = "rename */step-0000000?"
OLD_CHECKPOINT = "reason_llm.checkpoint:shutil.rmtree"
ARCHIVED = "rename */step-*.json.gz"
INDEX = "open */index.jsonl"
METRICS = "open */metrics.jsonl"
METRICS_RENAMED = "rename */metrics.jsonl"
EVALUATING = "reason_llm.loop:evaluate"
CURVES = "reason_llm.report.curves:draw_curves"
FINAL_ADAPTER = "rename */adapter"
SUMMARY = "rename */summary.json"
FINISHED = "reason_llm.buffer:RolloutBuffer.finish"


def _each(phase: str, kinds: str, *places: tuple[str, int], **options: object) -> list[Fault]:
    """Every kind (separated by commas) at every place."""
    return [
        Fault(phase, kind.strip(), (place,), call, **options)  # type: ignore[arg-type]
        for kind in kinds.split(",")
        for place, call in places
    ]


LOADING_FAULTS = [
    *_each("loading", "SIGKILL", (LOADING, 1), (LOADED, 1), (BEGINNING, 1), (METRICS_RENAMED, 1)),
    Fault("loading", "SIGTERM", (LOADING,), exits=(-15, 143)),
    Fault("loading", "SIGINT to the group", (LOADING,), run="rare"),
    Fault("loading", "SIGINT", (LOADED,)),
    Fault("loading", "SIGKILL", after_seconds=1.0, is_fresh=True),
    Fault("loading", "SIGINT to the group", after_seconds=2.0, is_fresh=True),
    Fault("loading", "SIGTERM", after_seconds=1.5, is_fresh=True, exits=(-15, 143)),
    *_each("loading", "MemoryError", (LOADED, 1)),
    *_each(
        "loading", "ENOSPC", ("open */.run.lock", 1), ("open */.resolved_config.yaml.writing", 1)
    ),
    *_each(
        "loading", "EROFS", ("open */.buffer.json.lock", 1), ("open */.metrics.jsonl.writing", 1)
    ),
]

SAMPLING_FAULTS = [
    *_each("sampling", "SIGKILL", (TOKEN, 100), (TOKEN, 140)),
    *_each("sampling", "SIGKILL", (f"after {WAVE}", 3), run="rare", may_lose=2),
    *_each("sampling", "SIGKILL", (WAVE, 8), run="rare"),
    *_each("sampling", "SIGKILL", (TOKEN, 90), (WAVE, 6), run="dynamic"),
    *_each(
        "sampling", "SIGTERM, SIGINT, SIGINT to the group, SIGINT twice, SIGTERM twice", (TOKEN, 70)
    ),
    *_each("sampling", "SIGINT", (TOKEN, 90), run="dynamic"),
    *_each("sampling", "SIGTERM", (WAVE, 8), run="rare"),
    *_each("sampling", "MemoryError, torch.OutOfMemoryError", (TOKEN, 110), exits=(1, 2)),
]

SCORING_FAULTS = [
    *_each("scoring", "SIGKILL", (SCORING, 3), (f"after {SCORING}", 3)),
    *_each("scoring", "SIGKILL", (SCORING, 4), run="rare"),
    *_each("scoring", "SIGKILL", (f"after {SCORING}", 3), run="dynamic"),
    *_each("scoring", "SIGINT, SIGINT twice", (SCORING, 3)),
    *_each("scoring", "SIGINT to the group", ("reason_llm.score.judge:_Worker.ask", 5), run="rare"),
    *_each("scoring", "SIGKILL", ("reason_llm.score.judge:_Worker.ask", 30), run="rare"),
    *_each("scoring", "MemoryError", (SCORING, 4)),
    *_each("scoring", "RuntimeError", ("reason_llm.score.custom:CustomReward.one", 14), run="strict", exits=(2,)),
    Fault("scoring", "broken reward", (SCORING,), 3, "{folder}/broken", (2,), "strict",
          damage="the reward is mended"),
]  # fmt: skip

BUFFER_FAULTS = [
    *_each("buffer", "SIGKILL", (BUFFER, 2), (BUFFER_RENAMED, 4), may_lose=1),
    *_each("buffer", "SIGKILL", (BUFFER_RENAMED, 2), run="dynamic", may_lose=2),
    *_each("buffer", "torn write", (BUFFER_RENAMED, 3), may_lose=1),
    *_each("buffer", "ENOSPC, EROFS", (BUFFER, 2), (BUFFER_RENAMED, 4), may_lose=1),
    *_each("buffer", "SIGINT", (BUFFER_RENAMED, 3)),
    Fault("buffer", "file size limit", (BUFFER,), 3, "2000", (2,), may_lose=1),
    Fault("buffer", "disk full", (BUFFER,), 3, "{folder}/data", (2,), damage="the disk is freed", may_lose=1),
    Fault("buffer", "read-only", target="{folder}/data"),
]  # fmt: skip

LEARNING_FAULTS = [
    *_each("learning", "SIGKILL", (LEARNING, 1), (OLD_LOGPROBS, 2), (BACKWARD, 2)),
    *_each("learning", "SIGKILL", (LEARNING, 3), (BACKWARD, 6), run="rare"),
    *_each("learning", "SIGKILL", (BACKWARD, 2), run="dynamic"),
    *_each("learning", "SIGTERM, SIGINT to the group, SIGINT twice", (BACKWARD, 3)),
    *_each("learning", "SIGINT", (LEARNING, 2), run="rare"),
    *_each("learning", "RuntimeError", (BACKWARD, 3)),
    Fault("optimizer step", "MemoryError", (UPDATE,), 2),
    *_each(
        "optimizer step", "SIGKILL", (UPDATE, 2), (f"after {UPDATE}", 2), (f"after {UPDATE}", 3)
    ),
    *_each("optimizer step", "SIGKILL", (f"after {UPDATE}", 2), (f"after {UPDATE}", 4), run="rare"),
    *_each("optimizer step", "SIGTERM", (f"after {UPDATE}", 1)),
    *_each(
        "optimizer step", "torch.OutOfMemoryError", ("torch.optim.adamw:AdamW.step", 3), exits=(2,)
    ),
]

CHECKPOINT_FAULTS = [
    *_each("checkpoint", "SIGKILL", (TENSORS, 1), (TENSORS, 2), (ADAPTER, 2), (STATE, 2),
           (CHECKPOINT, 2), (OLD_CHECKPOINT, 1)),
    *_each("checkpoint", "SIGKILL", (CHECKPOINT, 2), run="rare"),
    *_each("checkpoint", "SIGKILL", (CHECKPOINT, 2), run="dynamic"),
    *_each("checkpoint", "SIGINT, SIGINT twice, SIGTERM", (TENSORS, 2)),
    *_each("checkpoint", "torn write", ("rename */buffers/*.gz", 1), (METRICS_RENAMED, 1)),
    *_each("checkpoint", "ENOSPC, EROFS", (TENSORS, 2), (STATE, 2), (CHECKPOINT, 2), may_lose=1),
    *_each("checkpoint", "ENOSPC", (ARCHIVED, 1), (INDEX, 1), may_lose=1),
    *_each("checkpoint", "SIGKILL", (ARCHIVED, 1), (INDEX, 1)),
    *_each("checkpoint", "SIGKILL", (ARCHIVED, 3), run="rare"),
    Fault("checkpoint", "file size limit", (TENSORS,), 2, "2000", (2,), may_lose=1),
    Fault("checkpoint", "disk full", (TENSORS,), 2, "{folder}/runs", (2,), damage="the disk is freed", may_lose=1),
    Fault("checkpoint", "read-only", target="{folder}/runs"),
    *(Fault("checkpoint", "SIGKILL", (UPDATE,), 3, damage=damage) for damage in (
        "the newest adapter is cut short", "a bit of the newest optimizer flips",
        "the newest state is cut short", "the newest adapter is gone",
        "the archive's index is torn", "all files are of the future")),
    *(Fault("checkpoint", "SIGKILL", (WAVE,), 10, run="rare", damage=damage) for damage in (
        "a bit of the newest optimizer flips", "the archive's index is torn")),
    Fault("checkpoint", "SIGKILL", (UPDATE,), 3, run="rare", damage="the newest archived buffer is torn", may_lose=8,
          sets_aside=("data/buffer.old-1.json",)),  # the step of the gap and the one after it
]  # fmt: skip

METRICS_FAULTS = [
    *_each("metrics", "SIGKILL", (METRICS, 1), (METRICS, 2)),
    *_each("metrics", "ENOSPC, EROFS", (METRICS, 2)),
    Fault(
        "metrics",
        "disk full",
        (METRICS,),
        2,
        "{folder}/runs",
        (2,),
        damage="the disk is freed",
        may_lose=1,
    ),
    Fault("metrics", "SIGKILL", (TOKEN,), 110, damage="the last metrics are torn"),
]

EVALUATION_FAULTS = [
    *_each("evaluation", "SIGKILL", (TOKEN, 5), (EVALUATING, 2), (f"after {EVALUATING}", 2)),
    *_each("evaluation", "SIGKILL", (EVALUATING, 2), run="rare"),
    *_each("evaluation", "SIGTERM, SIGINT twice", (EVALUATING, 2)),
    *_each("evaluation", "SIGINT", (EVALUATING, 1)),
    *_each("evaluation", "torch.OutOfMemoryError", (EVALUATING, 2), exits=(1, 2)),
]

LAST_FAULTS = [
    *_each("last save", "SIGKILL", (CURVES, 1), (FINAL_ADAPTER, 1), (FINISHED, 1), (SUMMARY, 1),
           (CHECKPOINT, 3)),
    *_each("last save", "SIGKILL", (CURVES, 1), run="rare"),
    *_each("last save", "SIGINT, SIGTERM", (CURVES, 1), exits=(0,)),
    *_each("last save", "SIGINT twice", (CURVES, 1)),
    *_each("last save", "ENOSPC", (FINAL_ADAPTER, 1), (SUMMARY, 1)),
    *_each("last save", "EROFS", ("open */.curves.png.writing", 1)),
]  # fmt: skip

CLOCK_AND_TEMPORARY = [
    *(Fault(phase, "clock set back", (place,), call) for phase, place, call in (
        ("loading", START, 1), ("learning", LEARNING, 1), ("checkpoint", TENSORS, 2))),
    Fault("sampling", "full temporary folder", environment={"TMPDIR": "{folder}/tmp"}, exits=(0,)),
    Fault("scoring", "full temporary folder", environment={"TMPDIR": "{folder}/tmp"}, exits=(0,), run="rare"),
]  # fmt: skip


def at_random(count: int) -> list[tuple[Fault, float]]:
    """kill -9, and now and then another signal, at any moment of the run, from 0 to 1."""
    draw = random.Random(6)
    return [
        (
            Fault(
                "any",
                draw.choice(["SIGKILL", "SIGKILL", "SIGTERM", "SIGINT to the group"]),
                run=draw.choice(["plain", "rare", "dynamic"]),
                exits=(-9, -15, 143, 130, 0),
                may_lose=2,
            ),
            draw.uniform(0.02, 0.9),
        )
        for _ in range(count)
    ]


ALL = [
    *LOADING_FAULTS, *SAMPLING_FAULTS, *SCORING_FAULTS, *BUFFER_FAULTS, *LEARNING_FAULTS,
    *CHECKPOINT_FAULTS, *METRICS_FAULTS, *EVALUATION_FAULTS, *LAST_FAULTS, *CLOCK_AND_TEMPORARY,
]  # fmt: skip

CHAINS = {
    "plain": [
        Fault("evaluation", "SIGKILL", (TOKEN,), 5),
        Fault("checkpoint", "SIGKILL", (TENSORS,), 1),
        Fault("scoring", "SIGINT to the group", (SCORING,), 3),
        Fault("buffer", "ENOSPC", (BUFFER_RENAMED,), 1, may_lose=1),
        Fault("buffer", "torn write", (BUFFER_RENAMED,), 1, may_lose=1),
        Fault("learning", "SIGKILL", (LEARNING,), 1),
        Fault("learning", "SIGKILL", (BACKWARD,), 2),
        Fault("optimizer step", "SIGTERM twice", (f"after {UPDATE}",), 1),
        Fault("checkpoint", "SIGKILL", (CHECKPOINT,), 1),
        Fault("evaluation", "torch.OutOfMemoryError", (EVALUATING,), 1, exits=(1, 2)),
        Fault("metrics", "torn write", (METRICS_RENAMED,), 1),
        Fault("checkpoint", "file size limit", (TENSORS,), 1, "2000", (2,), may_lose=1),
        Fault("last save", "SIGKILL", (CURVES,), 1),
        Fault("last save", "SIGKILL", (FINISHED,), 1),
    ],
    "rare": [
        Fault("sampling", "SIGTERM", (WAVE,), 5, run="rare"),
        Fault("sampling", "SIGKILL", (f"after {WAVE}",), 3, run="rare", may_lose=2),
        Fault("learning", "SIGTERM", (BACKWARD,), 2, run="rare"),
        Fault("optimizer step", "SIGKILL", (UPDATE,), 1, run="rare",
              damage="a bit of the newest optimizer flips"),
    ],
    "unlucky": [  # after the loop had asked whether to save, and before it asks whether to end
        Fault("checkpoint", "SIGTERM", ("reason_llm.stopping:StopSignal.check",), 3, run="rare"),
    ],
    "archive": [  # the older step's rollouts are there alone, and it ends inside that step
        Fault("checkpoint", "SIGKILL", (UPDATE,), 3, damage="the newest state is cut short"),
        Fault("optimizer step", "SIGTERM", (UPDATE,), 1),
    ],
    "strict": [
        Fault("scoring", "broken reward", (SCORING,), 3, "{folder}/broken", (2,), "strict",
              damage="the reward is mended"),
    ],
}  # fmt: skip
"""A dozen and more for every day: one run suffers them in turn."""
