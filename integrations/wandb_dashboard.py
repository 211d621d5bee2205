"""Makes a view of a W&B project that shows what the guard tells. Run it once; a second run makes a second view:

python integrations/wandb_dashboard.py ENTITY/PROJECT [FILE.json]

With a file, or where W&B cannot be asked, the definition of the view is written instead, as W&B would get it.
"""

import sys
from pathlib import Path

import wandb

from stabilityguard.integrations import metrics
from stabilityguard.integrations.tally import Tally

try:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import RunsetSettings, Section, Workspace, WorkspaceSettings
except ImportError:
    sys.exit('wandb-workspaces is not installed; run: pip install "wandb[workspaces]"')

FILE = "wandb_dashboard.json"
"""Where the definition goes if W&B cannot be asked."""

CHARTS = {
    "Gradient norm": {"y": [metrics.GRAD_NORM], "log_y": True},
    "Largest ratio to the baseline": {"y": [metrics.RATIO_MAX], "log_y": True},
    "Norms of layers": {"metric_regex": f"{metrics.LAYER}.*", "log_y": True},
    "Trips and layers that are not finite": {"y": [metrics.TRIP, metrics.NONFINITE_LAYERS]},
    "Skipped and rolled back so far": {"y": [metrics.SKIPPED_TOTAL, metrics.ROLLBACKS_TOTAL]},
    "Spread of losses over ranks": {"y": [metrics.LOSS_SPREAD]},
    "Milliseconds that the guard took": {"y": [metrics.OVERHEAD_MS]},
}


def workspace(entity: str, project: str) -> Workspace:
    """The view: all charts over the guard's count of steps, and each run's verdict and trips beside its name."""
    charts = [LinePlot(title=title, x=metrics.STEP, **content) for title, content in CHARTS.items()]
    columns = [f"summary:{metrics.PREFIX}{name}" for name in Tally().summary]
    return Workspace(
        entity=entity,
        project=project,
        name="StabilityGuard",
        sections=[Section(name="StabilityGuard", panels=charts, is_open=True)],
        settings=WorkspaceSettings(x_axis=metrics.STEP),
        runset_settings=RunsetSettings(pinned_columns=columns),
    )


def write(view: Workspace, file: str) -> None:
    """Writes what ``save()`` sends; there is no public word for that."""
    definition = view._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2)
    Path(file).write_text(definition + "\n", encoding="utf-8")
    print(f"the definition of the view is in {file}")


def main() -> None:
    """Makes the view in the project that the command line names, or writes its definition."""
    if len(sys.argv) not in (2, 3) or sys.argv[1].count("/") != 1:
        sys.exit("usage: python integrations/wandb_dashboard.py ENTITY/PROJECT [FILE.json]")
    view = workspace(*sys.argv[1].split("/"))
    if len(sys.argv) == 3:
        write(view, sys.argv[2])
        return
    try:
        view.save()
    except (wandb.Error, OSError) as error:
        write(view, FILE)
        sys.exit(f"it is not in W&B yet: {error}")


if __name__ == "__main__":
    main()
