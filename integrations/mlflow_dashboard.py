"""Draws what the guard has told of an MLflow run, and leaves the page among the run's artifacts.

python integrations/mlflow_dashboard.py RUN_ID [TRACKING_URI]
"""

import html
import sys

from mlflow import MlflowClient

from stabilityguard.integrations import metrics

PAGE = "stabilityguard/dashboard.html"
WIDTH, HEIGHT, LEFT = 760, 130, 60
"""Of each chart, in pixels, and of the room for its labels."""

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
    "body{font:14px sans-serif;margin:24px;color:#222}h2{font-size:14px;margin:20px 0 4px}td{padding:2px 16px 2px 0}"
    "polyline{fill:none;stroke:#1668b8;stroke-width:1.5}.trip{stroke:#d33;opacity:.5}text{font-size:11px;fill:#666}"
)


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, by step."""
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


def chart(points: list[tuple[int, float]], trips: list[int], first: int, last: int) -> str:
    """An SVG of values over the steps from ``first`` to ``last``, with a red line at each trip."""
    low, high = min(value for _, value in points), max(value for _, value in points)

    def x(step: int) -> float:
        return LEFT + (step - first) / max(1, last - first) * (WIDTH - LEFT - 10)

    def y(value: float) -> float:
        return HEIGHT - 20 - (value - low) / ((high - low) or 1.0) * (HEIGHT - 35)

    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    marks = "".join(f'<line class="trip" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="10" y2="{HEIGHT - 20}"/>' for t in trips)
    labels = f'<text x="0" y="{y(high) + 4:.1f}">{high:.3g}</text>'
    labels += f'<text x="0" y="{y(low) + 4:.1f}">{low:.3g}</text>' if high > low else ""
    labels += f'<text x="{LEFT}" y="{HEIGHT - 4}">step {first}</text>'
    labels += f'<text x="{WIDTH - 10}" y="{HEIGHT - 4}" text-anchor="end">{last}</text>'
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{marks}<polyline points="{line}"/>{labels}</svg>'


def page(client: MlflowClient, run_id: str) -> str:
    """The whole page. Exits where the guard has told nothing of the run."""
    run = client.get_run(run_id)
    steps = history(client, run_id, metrics.TRIP)
    if not steps:
        sys.exit(f"run {run_id} has no metric {metrics.TRIP}; train with an MLflowBridge first")
    trips = [step for step, value in steps if value]
    told = {name: value for name, value in sorted(run.data.tags.items()) if name.startswith("sg.")}
    rows = [f"<tr><td>{html.escape(name[3:])}<td>{html.escape(value)}" for name, value in told.items()]
    layers = sorted(name for name in run.data.metrics if name.startswith(metrics.LAYER))
    named = CHARTS | {f"Norm of {name.removeprefix(metrics.LAYER)}": name for name in layers}
    parts = ["<!doctype html><meta charset=utf-8><title>StabilityGuard</title>", f"<style>{STYLE}</style>"]
    parts += [f"<h1>StabilityGuard</h1><table>{''.join(rows)}</table><p>Red lines: {len(trips)} trips."]
    for title, name in named.items():
        points = history(client, run_id, name)
        if points:
            parts.append(f"<h2>{html.escape(title)}</h2>{chart(points, trips, steps[0][0], steps[-1][0])}")
    return "\n".join(parts)


def main() -> None:
    """Makes the page of the run that the command line names."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python integrations/mlflow_dashboard.py RUN_ID [TRACKING_URI]")
    client = MlflowClient(tracking_uri=sys.argv[2] if len(sys.argv) == 3 else None)
    client.log_text(sys.argv[1], page(client, sys.argv[1]), PAGE)
    print(f"{PAGE} is among the run's artifacts")


if __name__ == "__main__":
    main()
