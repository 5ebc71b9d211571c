"""Curves of a run as a picture."""

import io

from reason_llm.run import Record, accuracies


def draw_curves(records: list[Record], title: str) -> bytes:
    """Reward, held-out accuracy and completion length over the steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    quality, length = figure.subplots(1, 2, width_ratios=(2, 1))
    named = {f"eval/{name}/accuracy": name for name in accuracies(records[0])}
    is_first_of_named = any(
        all(record.get("eval/accuracy") == record.get(key) for record in records) for key in named
    )
    labels = named if is_first_of_named else {"eval/accuracy": "held-out"} | named
    for axes, key, label, style in (
        (quality, "score/reward", "mean reward of the samples", "-"),
        *((quality, key, f"{name} accuracy, greedy", "o-") for key, name in labels.items()),
        (length, "sample/completion_tokens", "completion length, tokens", "-"),
    ):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    for axes in (quality, length):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="best", fontsize=8)
    figure.suptitle(title, fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    return content.getvalue()
