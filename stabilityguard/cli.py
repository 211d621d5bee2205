"""The command ``stabilityguard``."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

from stabilityguard import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 on success, 1 if the demo's guard failed; argparse exits with 2 on bad usage."""
    options = _parser().parse_args(arguments)
    exit_code: int = options.run(options)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stabilityguard", description="A circuit breaker for PyTorch training.")
    parser.add_argument("--version", action="version", version=f"stabilityguard {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a small GPT with injected faults, without and with the guard")
    demo.add_argument("--steps", type=_steps, default=200, help="training steps of each run (default 200)")
    demo.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default 0)")
    demo.add_argument("--log-dir", default="./sg_logs", help="where reports and journal go (default ./sg_logs)")
    demo.set_defaults(run=_demo)
    return parser


def _demo(options: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's; the demo does without
    from stabilityguard.demo.runs import Settings, demonstrate  # noqa: PLC0415 (--help needs no torch)

    saved = demonstrate(Settings(steps=options.steps, seed=options.seed, log_dir=options.log_dir))
    return 0 if saved else 1


def _steps(text: str) -> int:
    if not text.isdigit() or int(text) < 50:
        raise argparse.ArgumentTypeError(f"at least 50 are needed for baselines and three faults, but is {text!r}")
    return int(text)
