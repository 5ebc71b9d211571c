"""Curves of a run as a picture."""

import io

from reason_llm.app.lines import mean_of
from reason_llm.run import Record, accuracies


def draw_curves(records: list[Record], title: str, judged_by: str) -> bytes:
    """Draw the main curves of a run as a PNG: reward, accuracy (called ``judged_by``), completion
    length, losses, and the curves of readers."""
    from matplotlib.figure import Figure  # slow to import

    panels = [
        curves
        for panel in _panels(records, judged_by)
        if (curves := [curve for curve in panel if any(curve[0] in r for r in records)])
    ] or [[]]
    figure = Figure(figsize=(9 if len(panels) > 1 else 6, 3.2), layout="constrained")
    ratios = [2, *[1] * (len(panels) - 1)] if panels[0] else [1]
    plots = figure.subplots(1, len(panels), width_ratios=ratios, squeeze=False)[0]
    for axes, panel in zip(plots, panels, strict=True):
        for key, label, style in panel:
            points = [(r["step"], r[key]) for r in records if key in r]
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
        if any(key.endswith("/pair_accuracy") for key, *_ in panel):
            axes.axhline(0.5, color="grey", linestyle=":", linewidth=1, label="chance")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="best", fontsize=8)
    figure.suptitle(title, fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    return content.getvalue()


def _panels(records: list[Record], judged_by: str) -> list[list[tuple[str, str, str]]]:
    """(key of the records, label, style) of the curves of each panel, side by side."""
    named = {f"eval/{name}/accuracy": name for name in accuracies(records[0])}
    is_first_of_named = any(
        all(record.get("eval/accuracy") == record.get(key) for record in records) for key in named
    )
    labels = named if is_first_of_named else {"eval/accuracy": "held-out"} | named
    drawn = max(record.get("eval/samples", 0) for record in records)
    samples = any("score/reward" in record for record in records)
    losses = [("train/loss", "loss", "-"), ("eval/loss", "held-out loss", "o-")]
    return [
        [
            ("score/reward", "mean reward of the samples", "-"),
            *((key, f"{name} {judged_by}, {mean_of(drawn)}", "o-") for key, name in labels.items()),
            ("train/pair_accuracy", "pairs in order", "-"),
            ("eval/pair_accuracy", "held-out pairs in order", "o-"),
        ],
        [] if samples else losses,
        [("sample/completion_tokens", "completion length, tokens", "-")],
    ]
