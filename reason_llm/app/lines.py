"""Console lines of a run, from its records and its summary."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from reason_llm.config import READERS, command
from reason_llm.errors import CheckpointError
from reason_llm.run import Best, Record
from reason_llm.run.store import folder as run_folder, metrics
from reason_llm.score.statistics import wilson

RECENT_STEPS = 20
"""Number of last steps from which the remaining time is estimated."""
PHASES = ("sampling", "scoring", "learning", "evaluation")
"""Phases whose seconds a run's last line has."""


def of_step(record: Record, last_step: int, judged_by: str) -> str:
    """``step 1/60  reward 0.238  sampling 0.3 s (17,933 tokens/s)  learning 0.4 s``, or without
    sampling ``step 1/40  loss 1.234  epoch 0.02  learning 0.4 s``."""
    parts = [f"step {record['step']:.0f}/{last_step}"]
    if "score/reward" in record:
        parts.append(f"reward {record['score/reward']:.3f}")
    else:
        loss = record["train/loss"]
        parts.append(f"loss {loss if abs(loss) >= 1e-12 else 0.0:.4g}")  # a sum's rounding error
        if "train/pair_accuracy" in record:
            parts.append(f"pairs {record['train/pair_accuracy']:.1%}")
    parts += [*judged(record, judged_by), *watched(record)]
    if "sample/tokens_per_second" in record:
        ahead, speed = record.get("time/ahead_sampling_seconds"), record["sample/tokens_per_second"]
        seconds = record.get("time/sampling_seconds", 0.0) + (ahead or 0.0)
        parts.append(
            f"sampling {seconds:.1f} s {'' if ahead is None else 'ahead '}({speed:,.0f} tokens/s)"
        )
    elif "score/reward" in record:
        parts.append("sampled before")
    if "time/learning_seconds" in record:
        parts.append(f"learning {record['time/learning_seconds']:.1f} s")
    return "  ".join(parts)


def of_stopped(run: Path) -> str | None:
    """Return the next commands for a run that a signal ended; None if it saved nothing."""
    if not (run / "metrics.jsonl").is_file():
        return None
    text = f"what is saved can be used now: {command('report')} {run}"
    with suppress(CheckpointError):
        policy = run_folder.find_adapter(run)
        if not (policy / run_folder.SCORE_HEAD).is_file():
            text += f", {command('chat')} {run}"
        text += f", {command('export')} {run} --out FOLDER"
    return text


def left(records: Sequence[Record], last_step: int) -> str:
    """``about 12 min left``, from the median of the recent steps; empty before two, and at the
    end."""
    key = "time/total_seconds"
    durations = [record[key] for record in records if record["step"] and key in record]
    if len(durations) < 2:
        return ""
    seconds = median(durations[-RECENT_STEPS:]) * max(0, last_step - records[-1]["step"])
    hours, minutes = divmod(round(seconds / 60), 60)
    if seconds >= 90:
        return f"about {f'{hours} h ' if hours else ''}{minutes} min left"
    return f"about {max(1.0, seconds):.0f} s left" if seconds else ""


def watched(record: Record) -> list[str]:
    """The numbers that show the progress of a stage and of its readers."""
    formats = {
        "train/margin": "margin {:.3g}",
        "train/chosen_log_ratio": "log-ratio chosen {:+.2f}",
        "train/rejected_log_ratio": "rejected {:+.2f}",
        **{key: text for reader in READERS.values() for key, text in reader.watched.items()},
        "train/kl_per_completion": "KL of a completion {:.3g}",
        "data/epoch": "epoch {:.2f}",
    }
    texts = [text.format(record[key]) for key, text in formats.items() if key in record]
    for name, reader in READERS.items():
        if reader.learns and f"{name}/loss" in record and "train/loss" not in record:
            texts.append(f"the {name} alone learns")
    return texts


def judged(record: Record, judged_by: str) -> list[str]:
    """The measurements on held-out problems and rows; only an ``accuracy`` is a percentage."""
    texts = [accuracy(record, judged_by)] if "eval/accuracy" in record else []
    for key, name in (("eval/loss", "held-out loss"), ("eval/perplexity", "perplexity")):
        if key in record:
            texts.append(f"{name} {record[key]:.4g}")
    if "eval/pair_accuracy" in record:
        accuracy_text = pairs(record["eval/pair_accuracy"], record.get("eval/pairs"))
        texts.append(f"held-out pairs {accuracy_text}")
    return texts


def pairs(accuracy: float, count: float | None) -> str:
    """``95.0% (90.2% to 97.5%)``: accuracy of pairs, with its 95 % interval for a ``count``."""
    if count is None:
        return f"{accuracy:.1%}"
    interval = wilson(accuracy, count)
    return f"{accuracy:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def accuracy(record: Record, judged_by: str) -> str:
    """Held-out accuracy, or mean of another first reward: with its number of problems, its 95 %
    interval if samples were drawn, and each named set."""

    def of(place: str, value: float) -> str:
        return f"{mean_score(value, judged_by)}{on(record.get(f'{place}/problems', 0))}"

    sets = metrics.accuracies(record).items()
    set_accuracies = ", ".join(f"{name} {of(f'eval/{name}', value)}" for name, value in sets)
    value = of("eval", record["eval/accuracy"])
    details = [set_accuracies] if set_accuracies else []
    if "eval/accuracy_low" in record:
        ends = [mean_score(record[f"eval/accuracy_{end}"], judged_by) for end in ("low", "high")]
        details.insert(0, f"{' to '.join(ends)}, {mean_of(record['eval/samples'])}")
    if "eval/pass_at_k" in record:
        details.insert(1, f"pass@{record['eval/samples']:.0f} {record['eval/pass_at_k']:.1%}")
    return f"held-out {judged_by} {value}" + (f" ({'; '.join(details)})" if details else "")


def on(num_problems: float) -> str:
    """`` on 48 problems``; empty for 0, where nobody counted them."""
    return f" on {num_problems:,.0f} problem{'s' * (num_problems != 1)}" if num_problems else ""


def mean_of(num_samples: float) -> str:
    """``mean of 2 samples``; ``greedy`` for 0."""
    several = f"mean of {num_samples:.0f} samples"
    return several if num_samples > 1 else "one sample" if num_samples else "greedy"


def mean_score(value: float, judged_by: str) -> str:
    """``91.4%`` of an accuracy, ``0.914`` of another first reward."""
    return f"{value:.1%}" if judged_by == "accuracy" else f"{value:.3f}"


def of_evaluations(summary: Mapping[str, Any]) -> list[str]:
    """Lines of a run's first and last evaluation: accuracy, held-out loss and pairs."""
    lines, by = [], summary.get("judged_by", "accuracy")
    if summary["accuracy_before"] is not None:
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        ends = f"{mean_score(before, by)} -> {mean_score(after, by)}"
        ends += on(summary.get("accuracy_problems", 0))
        samples = summary.get("accuracy_samples", 0)
        lines.append(f"held-out {by} {ends}" + (f" ({mean_of(samples)})" if samples else ""))
    for name, (before, after) in summary["accuracy_of_sets"].items():
        ends = f"{mean_score(before, by)} -> {mean_score(after, by)}"
        lines.append(f"  {name} {ends}{on(summary.get('problems_of_sets', {}).get(name, 0))}")
    if (loss := summary["held_out_loss"]) is not None:
        lines.append(f"held-out loss {loss[0]:.4g} -> {loss[1]:.4g}")
    if (right := summary["held_out_pair_accuracy"]) is not None:
        counts = summary["held_out_pairs"]
        last = pairs(right[1], None if counts is None else counts[1])
        lines.append(f"held-out pairs {right[0]:.1%} -> {last}")
    return lines


def of_summary(summary: dict[str, Any]) -> list[str]:
    """Lines of a run's result: evaluations, memory and plan, seconds."""
    lines = of_evaluations(summary)
    if (best := summary.get("best")) is not None and best["step"] < summary["steps"]:
        best_folder = run_folder.place_of(Path(summary["adapter"]).parent, "best")
        place = f", in {best_folder}" if best_folder.is_dir() else ""
        lines.append(f"best: {Best(**best)}{place}")
    if summary.get("ended_early"):
        lines.append(summary["ended_early"])
    peaks = [  # a phase that did not run has neither
        f"{phase} {summary[f'{phase}_peak_gib']:.2f} GiB "
        f"({summary[f'{phase}_planned_gib']:.2f} planned)"
        for phase in ("sampling", "learning")
        if summary[f"{phase}_planned_gib"] and summary[f"{phase}_peak_gib"]
    ]
    lines.append(f"memory: {', '.join(peaks)}")
    phases = {each: summary[f"{each}_seconds"] for each in PHASES}
    saving = summary["buffer_seconds"] + summary["saving_seconds"]
    other = summary["total_seconds"] - sum(phases.values()) - saving  # loading, above all
    seconds = [f"{value:.0f} s {phase}" for phase, value in phases.items() if value]
    seconds.append(f"{saving:.1f} s saving")
    seconds += [f"{other:.0f} s other"] if other >= 0.5 else []
    lines.append(
        f"{summary['steps']} steps in {summary['total_seconds']:.0f} s: {', '.join(seconds)}; "
        f"{Path(summary['adapter']).name} in {summary['adapter']}, "
        f"curves in {Path(summary['adapter']).with_name('curves.png')}"
    )
    return lines
