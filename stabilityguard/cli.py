"""The command ``stabilityguard``."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

from stabilityguard import __version__
from stabilityguard.demo.launch import launch
from stabilityguard.demo.settings import Settings, add_options


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
    demo.add_argument("--ranks", type=int, default=1, help="processes that train together (default %(default)s)")
    add_options(demo)
    demo.set_defaults(run=_demo, error=demo.error)
    return parser


def _demo(options: argparse.Namespace) -> int:
    settings = Settings.of(options)
    if options.ranks != 1:
        objection = settings.objection(options.ranks)
        return options.error(objection) if objection else launch(settings, options.ranks)
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's; the demo does without
    from stabilityguard.demo.runs import demonstrate  # noqa: PLC0415 (--help needs no torch)

    return 0 if demonstrate(settings) else 1
