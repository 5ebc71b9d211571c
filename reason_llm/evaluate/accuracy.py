"""Scores of an evaluation with intervals, comparisons, and a table.

Scores, each a mean over problems: ``greedy``; ``mean@k`` of k samples; ``pass@j``, the chance that
one of j is right, estimated from all k; ``maj@k``, whether the answer that most of the k gave is
right. Intervals and tests are in ``score.statistics``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from reason_llm.evaluate.outcomes import Outcome
from reason_llm.score.statistics import Comparison, Estimate, compare, estimate, pass_at_k

Values = dict[str, list[float]]
"""The value of each problem by the score's name."""
Vote = Callable[[Sequence[str | None]], str | None]
"""Finds the most frequent of some answers."""
MAX_TRUNCATED_FRACTION = 0.05
"""Fraction of truncated completions above which the table has a warning."""


def scores(outcomes: Sequence[Outcome], num_samples: int, vote: Vote | None) -> Values:
    """Value of each problem for every score of ``num_samples`` samples; ``vote`` is None if the
    first reward extracts no answers to compare."""
    values: Values = {"greedy": [outcome["greedy"]["reward"] for outcome in outcomes]}
    if not num_samples:
        return values
    samples = [[sample["reward"] for sample in outcome["samples"]] for outcome in outcomes]
    values[f"mean@{num_samples}"] = [fmean(rewards) for rewards in samples]
    if all(value in (0.0, 1.0) for rewards in samples for value in rewards):
        rights = [round(sum(rewards)) for rewards in samples]
        for k in _ladder(num_samples):
            values[f"pass@{k}"] = [pass_at_k(num_samples, right, k) for right in rights]
    if vote is not None and num_samples > 1:
        values[f"maj@{num_samples}"] = [_majority_reward(outcome, vote) for outcome in outcomes]
    return values


def estimates(values: Values, num_samples: int) -> dict[str, Estimate]:
    """Each score with its interval."""
    by_score = {}
    for name, score_values in values.items():
        kind, _, k = name.partition("@")
        trials_each = {"mean": num_samples, "pass": num_samples // int(k or 1)}.get(kind, 1)
        by_score[name] = estimate(score_values, trials_each)
    return by_score


def comparisons(ours: Values, theirs: Values, num_samples: int) -> dict[str, Comparison]:
    """Differences of two models, for each score that both have, problem by problem."""
    by_score = {}
    for name in (name for name in ours if name in theirs):
        unit = 1 / num_samples if name.startswith("mean@") else 1.0
        both = (*ours[name], *theirs[name])
        has_unit = all(abs(value / unit - round(value / unit)) < 1e-9 for value in both)
        by_score[name] = compare(ours[name], theirs[name], unit if has_unit else 0.0)
    return by_score


def summarize(
    outcomes: Sequence[Outcome], num_samples: int, vote: Vote | None, compared: bool
) -> dict[str, Any]:
    """Content of ``summary.json``: ``results`` by model and set, and for two models ``comparisons``
    by set, the first model minus the second."""
    grouped: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome["model"], {}).setdefault(outcome["set"], []).append(outcome)
    values = {
        model: {name: scores(of_set, num_samples, vote) for name, of_set in sets.items()}
        for model, sets in grouped.items()
    }
    # Comparisons pair the values of a problem, so these are kept beyond the estimates.
    results = {
        model: {
            name: {"problems": len(of_set)}
            | _as_dicts(estimates(values[model][name], num_samples))
            | _lengths(of_set)
            for name, of_set in sets.items()
        }
        for model, sets in grouped.items()
    }
    compared_sets = {}
    if compared:
        ours, theirs = values.values()
        for name in ours:
            compared_sets[name] = _as_dicts(comparisons(ours[name], theirs[name], num_samples))
    return {"results": results, "comparisons": compared_sets}


def _as_dicts(statistics: Mapping[str, Any]) -> dict[str, Any]:
    return {score: asdict(statistic) for score, statistic in statistics.items()}


def table(summary: Mapping[str, Any]) -> list[str]:
    """The summary as lines of text."""
    models = list(summary["results"])
    rows = []
    for model, sets in summary["results"].items():
        for name, set_results in sets.items():
            for score, value in set_results.items():
                if isinstance(value, dict):
                    cell = f"{_percent(value['value']):5.1f}   {_interval(value)}"
                    rows.append((name, f"{set_results['problems']}", score, model, cell))
    # By set and score first, so that the two models of a score stand below each other.
    sets_in_order = list(dict.fromkeys(row[0] for row in rows))
    scores_in_order = list(dict.fromkeys(row[2] for row in rows))
    rows.sort(key=lambda row: (sets_in_order.index(row[0]), scores_in_order.index(row[2])))
    rows.insert(0, ("set", "problems", "score", "model", "value   95 % interval"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join([*map(str.ljust, row[:4], widths), row[4]]).rstrip() for row in rows]
    for model, sets in summary["results"].items():
        lines += [
            f"{name} {model}: {100 * cut_off:.0f}% of the completions were cut off and count as "
            "wrong; raise eval.max_new_tokens"
            for name, set_results in sets.items()
            if (cut_off := set_results["truncated_fraction"]) >= MAX_TRUNCATED_FRACTION
        ]
    for name, of_set in summary["comparisons"].items():
        for score, comparison in of_set.items():
            difference = comparison["difference"]
            lines.append(
                f"{name} {score}: {models[0]} - {models[1]} = "
                f"{_percent(difference['value']):+.1f} "
                f"{_interval(difference)}, p = {comparison['p_value']:.2g} "
                f"(better on {comparison['better']}, worse on {comparison['worse']})"
            )
    return lines


def _ladder(num_samples: int) -> list[int]:
    """Powers of 2 up to ``most``, and ``most`` itself; empty for 1 sample."""
    powers = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples] if num_samples > 1 else []


def _majority_reward(outcome: Outcome, vote: Vote) -> float:
    """Reward of the most frequent answer, in its first spelling."""
    answers = [sample["answer"] for sample in outcome["samples"]]
    chosen = vote(answers)
    return 0.0 if chosen is None else float(outcome["samples"][answers.index(chosen)]["reward"])


def _lengths(outcomes: Sequence[Outcome]) -> dict[str, float]:
    answers = [a for outcome in outcomes for a in ([outcome["greedy"]] + outcome["samples"])]
    return {
        "completion_tokens": fmean(answer["tokens"] for answer in answers),
        "truncated_fraction": fmean(answer["finish_reason"] == "length" for answer in answers),
    }


def _interval(estimate: Mapping[str, float]) -> str:
    return f"[{_percent(estimate['low']):.1f}, {_percent(estimate['high']):.1f}]"


def _percent(value: float) -> float:
    """In percent, rounded as it is shown; never -0.0."""
    return round(100 * value, 1) + 0.0
