"""The command ``stabilityguard``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from stabilityguard import __version__
from stabilityguard.demo.launch import launch
from stabilityguard.demo.settings import Settings, add_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 on success, 1 if the demo's guard failed or a checkpoint is broken.

    argparse exits with 2 on bad usage.
    """
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
    checkpoints = commands.add_parser(
        "checkpoints", help="list the checkpoints in a directory, and what they are worth"
    )
    checkpoints.add_argument("directory", help="that of the CheckpointPolicy")
    checkpoints.add_argument("--verify", action="store_true", help="read every file, and compare it with its digest")
    checkpoints.set_defaults(run=_checkpoints, error=checkpoints.error)
    return parser


def _checkpoints(options: argparse.Namespace) -> int:
    from stabilityguard.recover.listing import table  # noqa: PLC0415 (the demo needs it not)

    directory = Path(options.directory)
    if not directory.is_dir():
        options.error(f"{directory} is no directory")
    lines, whole = table(directory, verify=options.verify)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if whole else 1


def _demo(options: argparse.Namespace) -> int:
    settings = Settings.of(options)
    if options.ranks != 1:
        objection = settings.objection(options.ranks)
        return options.error(objection) if objection else launch(settings, options.ranks)
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's; the demo does without
    from stabilityguard.demo.runs import demonstrate  # noqa: PLC0415 (--help needs no torch)

    return 0 if demonstrate(settings) else 1
