"""Evaluation of a run: accuracy on held-out problems, greedy or of samples; the loss, and of
pairs the accuracy, on held-out rows; a reward model's scale and its dependence on length."""

import gzip
import hashlib
import logging
import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev

import orjson

from reason_llm.config import Config
from reason_llm.errors import one_line
from reason_llm.files import open_regular, write_atomically
from reason_llm.model import Datum
from reason_llm.rollout import Group, Prompt
from reason_llm.run import collect
from reason_llm.run.start.prepare import Job
from reason_llm.run.store import metrics
from reason_llm.run.store.metrics import Record
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.run.team import Team
from reason_llm.run.watch import Watch
from reason_llm.sample import Progress, Sampler, SamplingParams, sampling
from reason_llm.score import Scorer
from reason_llm.score.statistics import estimate
from reason_llm.train import Learner, learning, length_bias

logger = logging.getLogger(__name__)

HELD_OUT = "held_out"
"""Name of the set of ``data.eval`` in the files of evaluations."""
MAX_EVALUATION_BYTES = 4 << 30
"""Most bytes that are read of an evaluation, unpacked."""
LARGEST_NLL = 200.0
"""In nats per token; a larger one is shown as the perplexity of this."""


def sampling_params(config: Config) -> SamplingParams:
    """One greedy completion of each held-out problem, or ``eval.samples`` as in training."""
    tokens, stop = config.eval_max_new_tokens, tuple(config.sample.stop)
    if k := config.eval.samples:
        return replace(collect.sampling_params(config), num_completions=k, max_new_tokens=tokens)
    return SamplingParams(1, tokens, temperature=0.0, stop=stop)


class HeldOut:
    """The evaluations of one run."""

    def __init__(self, job: Job, learner: Learner, team: Team) -> None:
        self._job = job
        self._learner = learner
        self._team = team
        sets, held = job.data.held_out, job.data.held_out_rows
        identity = [
            [(prompt.token_ids, prompt.answer) for prompt in sets[0].prompts] if sets else [],
            [] if held is None else [(row.ids, row.value) for row in held.rows],
            job.config.eval_max_new_tokens,
        ]
        self._params = sampling_params(job.config)
        self._folder = job.folder / "evaluations"
        if job.config.eval.samples:
            identity.append(asdict(self._params))
        self.digest = hashlib.sha256(orjson.dumps(identity)).hexdigest()[:16]
        """Of what an evaluation asks."""
        self.exists = bool(sets) or held is not None
        """Whether there is something to evaluate on."""
        self._first: dict[str, float] | None = None
        """The score of each problem of the first set in the run's first evaluation."""

    def is_due(self, step: int) -> bool:
        """Whether to evaluate the policy after ``step`` learned steps."""
        every, last = self._job.config.eval.every, self._job.config.run.steps
        return self.exists and (step == last or (every > 0 and step % every == 0))

    def evaluate(self, step: int, watch: Watch, writer: BackgroundWriter) -> Record:
        """The metrics of this moment's policy; the completions are written to a file."""
        answers = self._answers(step, watch, writer) if self._job.data.held_out else {}
        if (held := self._job.data.held_out_rows) is None:
            return answers
        with learning(self._learner):
            return answers | judge(self._learner, [Datum.of_row(row) for row in held.rows])

    def _answers(self, step: int, watch: Watch, writer: BackgroundWriter) -> Record:
        job, config, params = self._job, self._job.config, self._params
        record: Record = {}
        content = b""
        total = len(job.data.held_out_prompts) * params.num_completions
        with (
            sampling(self._learner.model, job.plan.cache_tokens) as sampler,
            watch.phase("evaluating", total) as progress,
        ):
            dealing = job.run.episodes.over(self._team.dealing(sampler))
            for data_set in job.data.held_out:
                seed = random.Random(f"{config.run.seed}/held_out/{data_set.name}").getrandbits(63)
                values, groups = evaluate(
                    dealing, data_set.prompts, job.scorer, params, progress, seed
                )
                if not record:  # the first set's count for the run
                    record |= values | self._compared(data_set.name or HELD_OUT, groups)
                record |= metrics.by_name(values, data_set.name) if data_set.name else {}
                content += to_lines(data_set.name or HELD_OUT, groups)
        path = self._folder / f"step-{step:08d}.jsonl.gz"
        writer.submit(lambda: write_atomically(path, gzip.compress(content, mtime=0)))
        return record

    def _compared(self, name: str, groups: Sequence[Group]) -> Record:
        """Number of problems with a higher and with a lower score than in the run's first
        evaluation; empty for that one, and if it asked other problems."""
        scores = {g.prompt.id: fmean(c.reward or 0.0 for c in g.completions) for g in groups}
        if self._first is None:
            written = sorted(self._folder.glob("step-*.jsonl.gz"))[:1]
            self._first = _read_scores(written[0], name) if written else scores
        if self._first is scores or self._first.keys() != scores.keys():
            return {}
        changes = [scores[each] - self._first[each] for each in scores]
        return {
            "eval/problems_better": float(sum(change > 0 for change in changes)),
            "eval/problems_worse": float(sum(change < 0 for change in changes)),
        }


def _read_scores(path: Path, name: str) -> dict[str, float]:
    """The mean score of each problem of a set in a written evaluation; empty if the file is
    damaged."""
    found: dict[str, list[float]] = {}
    try:
        with open_regular(path) as packed, gzip.open(packed) as file:
            content = file.read(MAX_EVALUATION_BYTES)
        for each in map(orjson.loads, content.splitlines()):
            if each["set"] == name:
                found.setdefault(str(each["id"]), []).append(float(each["score"]))
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
        logger.warning(
            "%s cannot be read (%s): evaluations are not compared with it", path, one_line(error)
        )
        return {}
    return {problem: fmean(scores) for problem, scores in found.items()}


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    params: SamplingParams,
    progress: Progress,
    seed: int,
) -> tuple[Record, list[Group]]:
    """Metrics of completions of each prompt, and the scored completions."""
    groups = scorer.score(
        sampler.sample(prompts, params, seed=seed, progress=progress), only_first=True
    )
    completions = [completion for group in groups for completion in group.completions]
    count, name = len(completions), scorer.rewards[0].name
    record = {
        "eval/accuracy": sum(c.rewards[name] for c in completions) / count,
        "eval/problems": float(len(groups)),
        "eval/completion_tokens": sum(len(c.sampled_ids) for c in completions) / count,
        "eval/truncated_fraction": sum(c.finish_reason == "length" for c in completions) / count,
    }
    if params.temperature > 0:
        record |= of_samples([[c.rewards[name] for c in g.completions] for g in groups])
    return record, groups


def of_samples(rewards: Sequence[Sequence[float]]) -> Record:
    """Statistics of k samples of each problem beyond their mean: ``eval/samples``, k; the 95 %
    interval of the mean, over problems; and ``eval/pass_at_k`` of rewards of 0 and 1."""
    k = len(rewards[0])
    interval = estimate([fmean(samples) for samples in rewards], trials_each=k)
    record = {
        "eval/samples": float(k),
        "eval/accuracy_low": interval.low,
        "eval/accuracy_high": interval.high,
    }
    if k > 1 and all(reward in (0.0, 1.0) for samples in rewards for reward in samples):
        record["eval/pass_at_k"] = fmean(max(samples) for samples in rewards)
    return {name: value for name, value in record.items() if not math.isnan(value)}


def to_lines(name: str, groups: Sequence[Group]) -> bytes:
    """JSON lines with one completion of an evaluation each."""
    lines = []
    for group in groups:
        for completion in group.completions:
            values = {
                "set": name,
                "id": group.prompt.id,
                "prompt": group.prompt.text,
                "answer": group.prompt.answer,
                "completion": completion.text,
                "score": completion.reward,
                "tokens": len(completion.sampled_ids),
                "finish_reason": completion.finish_reason,
            }
            lines.append(orjson.dumps(values) + b"\n")
    return b"".join(lines)


def judge(learner: Learner, data: Sequence[Datum]) -> Record:
    """Loss and metrics of held-out rows; the perplexity of tokens that are learned by their
    likelihood, the number of pairs, and of a reward model its scale and how it goes by length."""
    metrics = learner.judge(data)
    if "nll" in metrics:
        metrics["perplexity"] = math.exp(min(metrics["nll"], LARGEST_NLL))
    if learner.settings.objective.unit == "pair":
        metrics["pairs"] = len(data) / 2
    if learner.settings.objective.output == "scores":
        scores = learner.scores(data, learner.settings.role)
        lengths = [datum.num_trained for datum in data]
        of_scores = {"reward_mean": fmean(scores), "reward_std": stdev(scores)}
        of_scores |= length_bias(scores[::2], scores[1::2], lengths[::2], lengths[1::2])
        metrics |= {name: value for name, value in of_scores.items() if not math.isnan(value)}
    return {f"eval/{name}": value for name, value in metrics.items()}
