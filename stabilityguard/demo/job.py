"""One rank of the demonstration, as torchrun starts it."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence

from stabilityguard.demo import ranks
from stabilityguard.demo.runs import demonstrate
from stabilityguard.demo.settings import Settings, add_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes part in the runs. Returns 0 if the guard saved the last, else 1; argparse exits with 2 on bad usage."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's; the demo does without
    parser = argparse.ArgumentParser(description="Trains a small GPT with injected faults, without and with the guard.")
    add_options(parser)
    settings = Settings.of(parser.parse_args(arguments))
    objection = settings.objection(int(os.environ.get("WORLD_SIZE", "1")))
    if objection is not None:
        parser.error(objection)
    with ranks.joined():
        saved = demonstrate(settings)
    return 0 if saved else 1


if __name__ == "__main__":
    raise SystemExit(main())
