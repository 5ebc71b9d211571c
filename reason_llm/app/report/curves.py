"""Curves of a run as a picture."""

import io

from reason_llm.run import Record, accuracies

Curve = tuple[str, str, str]
"""Key of the records, label, style."""


def draw_curves(records: list[Record], title: str, judged_by: str = "accuracy") -> bytes:
    """What a run is judged by over its steps, as a PNG: reward, accuracy and completion length; the
    losses of a stage that learns from a set of rows; the critic of PPO.

    Args:
        judged_by: name of what evaluation measures.
    """
    from matplotlib.figure import Figure

    drawn = [
        found
        for panel in _panels(records, judged_by)
        if (found := [each for each in panel if each[3]])
    ] or [[]]
    width = 9 if len(drawn) > 1 else 6
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    ratios = [2, *[1] * (len(drawn) - 1)] if drawn[0] else [1]
    for axes, panel in zip(
        figure.subplots(1, len(drawn), width_ratios=ratios, squeeze=False)[0], drawn, strict=True
    ):
        for _, label, style, points in panel:
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


def _panels(
    records: list[Record], judged_by: str
) -> list[list[tuple[str, str, str, list[tuple[float, float]]]]]:
    """The curves side by side, each with its points."""
    named = {f"eval/{name}/accuracy": name for name in accuracies(records[0])}
    is_first_of_named = any(
        all(record.get("eval/accuracy") == record.get(key) for record in records) for key in named
    )
    labels = named if is_first_of_named else {"eval/accuracy": "held-out"} | named
    samples = any("score/reward" in record for record in records)
    losses: list[Curve] = [("train/loss", "loss", "-"), ("eval/loss", "held-out loss", "o-")]
    panels: list[list[Curve]] = [
        [
            ("score/reward", "mean reward of the samples", "-"),
            *((key, f"{name} {judged_by}, greedy", "o-") for key, name in labels.items()),
            ("train/pair_accuracy", "pairs in order", "-"),
            ("eval/pair_accuracy", "held-out pairs in order", "o-"),
        ],
        [] if samples else losses,
        [("sample/completion_tokens", "completion length, tokens", "-")],
        [("critic/explained_variance", "explained variance of the critic", "-")],
    ]
    return [
        [(*curve, [(r["step"], r[curve[0]]) for r in records if curve[0] in r]) for curve in panel]
        for panel in panels
    ]
