"""Draws what the guard has told of an MLflow run, and leaves the page among the run's artifacts.

python integrations/mlflow_dashboard.py RUN_ID [TRACKING_URI]
"""

import html
import math
import statistics
import sys

from mlflow import MlflowClient
from mlflow.entities import Run

from stabilityguard.integrations import metrics

PAGE = "stabilityguard/dashboard.html"
WIDTH, HEIGHT = 480, 140
"""Of each chart, in units that its drawing shares; how large it is, is up to the page."""

LEFT, RIGHT, TOP, BOTTOM = 52, WIDTH - 8, 12, HEIGHT - 22
"""Of the field that the line lies in; the labels are outside."""

LOGARITHMIC_FROM = 30.0
"""Times the median: from there on a spike would flatten all the rest on a linear scale."""

TOLD = {
    "sg.verdict": "Verdict",
    "sg.trips": "Trips (red lines)",
    "sg.worst_layer": "Worst layer",
    "sg.left_out": "NaN or Inf, not drawn",
    "sg.dropped": "Messages lost",
}

CHARTS = {
    "Gradient norm": metrics.GRAD_NORM,
    "Largest ratio to the baseline": metrics.RATIO_MAX,
    "Layers that are not finite": metrics.NONFINITE_LAYERS,
    "Skipped steps so far": metrics.SKIPPED_TOTAL,
    "Rollbacks so far": metrics.ROLLBACKS_TOTAL,
    "Spread of losses over ranks": metrics.LOSS_SPREAD,
    "Milliseconds that the guard took": metrics.OVERHEAD_MS,
}

STYLE = (
    "body{font:14px sans-serif;margin:20px;color:#222}h1{font-size:20px}h2{font-size:14px;margin:16px 0 0}"
    "td{padding:2px 20px 2px 0}td:first-child{color:#666;white-space:nowrap}"
    "main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr));gap:0 24px;max-width:1120px}"
    "svg{width:100%}rect{fill:#f6f7f9}text{font-size:11px;fill:#666}circle{fill:#1668b8}"
    "polyline{fill:none;stroke:#1668b8;stroke-width:1.5}.trip{stroke:#d33;stroke-width:1.5;opacity:.6}"
)


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, by step."""
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


def is_logarithmic(values: list[float]) -> bool:
    """Whether a linear scale would show little but the highest of the values."""
    return min(values) > 0 and max(values) >= LOGARITHMIC_FROM * statistics.median(values)


def heights(values: list[float]) -> list[float]:
    """Where each value lies between the lowest, which is 0, and the highest, which is 1."""
    scaled = [math.log(value) for value in values] if is_logarithmic(values) else values
    low, high = min(scaled), max(scaled)
    return [(value - low) / (high - low) if high > low else 0.0 for value in scaled]


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    """A label."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def short(value: float) -> str:
    """A number as people write it: three digits, or the whole of a larger one."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def labels(first: int, last: int, values: list[float]) -> str:
    """What is written around the field."""
    written = [text(LEFT, HEIGHT - 6, f"step {first}"), text(RIGHT, HEIGHT - 6, str(last), "end")]
    written.append(text(LEFT - 6, BOTTOM, short(min(values)), "end"))
    if max(values) > min(values):
        written.append(text(LEFT - 6, TOP + 8, short(max(values)), "end"))
    if is_logarithmic(values):
        written.append(text(LEFT - 6, (TOP + BOTTOM) / 2 + 4, "log", "end"))
    return "".join(written)


def chart(points: list[tuple[int, float]], trips: list[int], first: int, last: int) -> str:
    """An SVG of values over the steps from ``first`` to ``last``, with a red line at each trip."""

    def x(step: int) -> float:
        return LEFT + (step - first) / max(1, last - first) * (RIGHT - LEFT)

    values = [value for _, value in points]
    places = [(x(step), BOTTOM - y * (BOTTOM - TOP)) for (step, _), y in zip(points, heights(values), strict=True)]
    drawn = f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
    if len(points) < (last - first) / 2:  # seen where they are, and seen at all if there is but one
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places)
    marks = "".join(f'<path class="trip" d="M{x(t):.1f} {TOP}V{BOTTOM}"><title>step {t}</title></path>' for t in trips)
    field = f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{field}{marks}{drawn}{labels(first, last, values)}</svg>'


def heading(run: Run) -> str:
    """The run's name, and what its tags tell."""
    told = {title: run.data.tags[tag] for tag, title in TOLD.items() if tag in run.data.tags}
    rows = [f"<tr><td>{title}<td>{html.escape(value)}" for title, value in told.items()]
    return f"<h1>StabilityGuard: {html.escape(run.info.run_name or run.info.run_id)}</h1><table>{''.join(rows)}</table>"


def page(client: MlflowClient, run_id: str) -> str:
    """The whole page. Exits where the guard has told nothing of the run."""
    run = client.get_run(run_id)
    steps = history(client, run_id, metrics.TRIP)
    if not steps:
        sys.exit(f"run {run_id} has no metric {metrics.TRIP}; train with an MLflowBridge first")
    trips = [step for step, value in steps if value]
    layers = sorted(name for name in run.data.metrics if name.startswith(metrics.LAYER))
    named = CHARTS | {f"Norm of {name.removeprefix(metrics.LAYER)}": name for name in layers}
    drawn = {title: history(client, run_id, name) for title, name in named.items()}
    parts = ["<!doctype html><meta charset=utf-8><title>StabilityGuard</title>", f"<style>{STYLE}</style>"]
    parts += [heading(run), "<main>"]
    for title, points in drawn.items():
        if points:
            parts.append(f"<div><h2>{html.escape(title)}</h2>{chart(points, trips, steps[0][0], steps[-1][0])}</div>")
    return "\n".join([*parts, "</main>"])


def main() -> None:
    """Makes the page of the run that the command line names."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python integrations/mlflow_dashboard.py RUN_ID [TRACKING_URI]")
    client = MlflowClient(tracking_uri=sys.argv[2] if len(sys.argv) == 3 else None)
    client.log_text(sys.argv[1], page(client, sys.argv[1]), PAGE)
    print(f"{PAGE} is among the run's artifacts")


if __name__ == "__main__":
    main()
