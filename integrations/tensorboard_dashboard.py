"""Puts the guard's metrics side by side in TensorBoard's custom scalars tab. Run it once:

python integrations/tensorboard_dashboard.py LOG_DIR
"""

import sys

from torch.utils.tensorboard import SummaryWriter

from stabilityguard.integrations import metrics

LAYOUT = {
    "StabilityGuard": {
        "gradient norm": ["Multiline", [metrics.GRAD_NORM]],
        "largest ratio to the baseline": ["Multiline", [metrics.RATIO_MAX]],
        "trips and layers that are not finite": ["Multiline", [metrics.TRIP, metrics.NONFINITE_LAYERS]],
        "skipped and rolled back so far": ["Multiline", [metrics.SKIPPED_TOTAL, metrics.ROLLBACKS_TOTAL]],
        "layers": ["Multiline", [f"{metrics.LAYER}.*"]],
        "spread of losses over ranks": ["Multiline", [metrics.LOSS_SPREAD]],
        "milliseconds that the guard took": ["Multiline", [metrics.OVERHEAD_MS]],
    }
}


def main() -> None:
    """Writes the layout to the directory that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python integrations/tensorboard_dashboard.py LOG_DIR")
    with SummaryWriter(sys.argv[1], filename_suffix=".layout") as writer:
        writer.add_custom_scalars(LAYOUT)
    print(f"run: tensorboard --logdir {sys.argv[1]}, and open its tab Custom Scalars")


if __name__ == "__main__":
    main()
