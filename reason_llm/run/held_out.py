"""What a run is judged by: greedy accuracy on held-out problems; the loss, and of pairs the
accuracy, on held-out rows; a reward model's scale and its dependence on length."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import orjson

from reason_llm.model import Datum
from reason_llm.rollout import Group, Prompt
from reason_llm.run.store.metrics import Record
from reason_llm.sample import Progress, Sampler, SamplingParams
from reason_llm.score import Scorer
from reason_llm.train import Learner, length_bias

LARGEST_NLL = 200.0
"""Nats per token whose perplexity is told; of more it is that of these."""


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    params: SamplingParams,
    progress: Progress,
) -> tuple[Record, list[Group]]:
    """Accuracy from one completion of each prompt, judged by the first reward.

    Returns:
        ``eval/accuracy``, the mean reward; ``eval/completion_tokens``, the mean length;
        ``eval/truncated_fraction``; and the scored completions.
    """
    groups = scorer.score(
        sampler.sample(prompts, params, seed=0, progress=progress), only_first=True
    )
    completions = [group.completions[0] for group in groups]
    count, name = len(completions), scorer.rewards[0].name
    found = {
        "eval/accuracy": sum(completion.rewards[name] for completion in completions) / count,
        "eval/completion_tokens": sum(len(completion.token_ids) for completion in completions)
        / count,
        "eval/truncated_fraction": sum(
            completion.finish_reason == "length" for completion in completions
        )
        / count,
    }
    return found, groups


def to_lines(name: str, groups: Sequence[Group]) -> bytes:
    """JSON lines with one completion of an evaluation each: the set's name, the prompt, the gold
    answer, the completion, its score, its length in tokens and why it ended."""
    lines = []
    for group in groups:
        [completion] = group.completions
        values = {
            "set": name,
            "id": group.prompt.id,
            "prompt": group.prompt.text,
            "answer": group.prompt.answer,
            "completion": completion.text,
            "score": completion.reward,
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }
        lines.append(orjson.dumps(values) + b"\n")
    return b"".join(lines)


def judge(learner: Learner, data: Sequence[Datum]) -> Record:
    """Loss and metrics of held-out rows, as ``eval/loss``, ``eval/pair_accuracy``; the perplexity
    of tokens that are learned by their likelihood, the number of pairs, and of a reward model also
    its scale and how it goes by length."""
    found = learner.judge(data)
    if "nll" in found:
        found["perplexity"] = math.exp(min(found["nll"], LARGEST_NLL))
    if learner.settings.objective.unit == "pair":
        found["pairs"] = len(data) / 2
    if learner.settings.objective.output == "scores":
        scores = learner.scores(data, learner.settings.role)
        found |= _of_scores(scores, [datum.num_trained for datum in data])
    return {f"eval/{name}": value for name, value in found.items()}


def _of_scores(scores: Sequence[float], lengths: Sequence[int]) -> Record:
    bias = length_bias(scores[::2], scores[1::2], lengths[::2], lengths[1::2])
    found = {
        "reward_mean": fmean(scores),
        "reward_std": stdev(scores),
        "length_correlation": bias.pearson,
        "accuracy_chosen_longer": bias.chosen_longer.fraction,
        "accuracy_chosen_not_longer": bias.chosen_not_longer.fraction,
        "pairs_chosen_not_longer": float(bias.chosen_not_longer.num_pairs),
        "accuracy_prefer_longer": bias.prefer_longer.fraction,
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}
