"""What the demonstration can be told on the command line; needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

STRATEGIES = {
    "ddp": "each rank holds the whole model (DistributedDataParallel)",
    "fsdp1": "blocks are sharded over the ranks as flat parameters (FullyShardedDataParallel)",
    "fsdp2": "each parameter is sharded over the ranks (fully_shard)",
    "hsdp": "each parameter is sharded over a pair of ranks, and the pairs are replicas (fully_shard)",
    "tp": "the matrices of each block are split over the ranks (tensor parallelism)",
    "fsdp2_tp": "matrices are split over a pair of ranks, and sharded over the pairs",
    "pp": "each rank holds some of the blocks (pipeline parallelism)",
}
"""How several ranks share the work."""

HEADS = 4
"""Of attention, in each block."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is common to the runs."""

    steps: int = 200
    seed: int = 0
    log_dir: str = "./sg_logs"
    strategy: str = "ddp"
    """Where there are several ranks: one of ``STRATEGIES``."""

    width: int = 128
    depth: int = 4
    rows: int = 12
    """Pieces of text in the batch of a step, over all ranks; at least one for each rank that reads its own."""

    quick: bool = False
    """Whether the run that has no guard is left out."""

    def objection(self, ranks: int) -> str | None:
        """Why that many ranks cannot do this; None if they can."""
        fits, needed = {
            "hsdp": (ranks % 2 == 0 and ranks >= 4, "an even number of ranks, at least 4"),
            "tp": (ranks >= 2 and HEADS % ranks == 0, "2 or 4 ranks, to divide the heads of attention"),
            "fsdp2_tp": (ranks % 2 == 0 and ranks >= 4, "an even number of ranks, at least 4"),
            "pp": (
                2 <= ranks <= self.depth and self.rows % 2 == 0,
                "2 ranks or more, --depth at most, and even --rows",
            ),
        }.get(self.strategy, (ranks >= 2, "at least 2 ranks"))
        return None if fits else f"{self.strategy} needs {needed}, but the number of ranks is {ranks}"

    def as_arguments(self) -> list[str]:
        """The options that tell these settings to another process."""
        told = {name.replace("_", "-"): value for name, value in asdict(self).items() if name != "quick"}
        words = [word for name, value in told.items() for word in (f"--{name}", str(value))]
        return [*words, "--quick"] if self.quick else words

    @classmethod
    def of(cls, options: argparse.Namespace) -> Settings:
        """The settings among parsed options."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each setting."""
    usual = Settings()
    many, three, one = _at_least(50, "for baselines and three faults"), _at_least(3, "for the faults"), _at_least(1)
    parser.add_argument("--steps", type=many, help="training steps of each run (default %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of weights and batches (default %(default)s)")
    parser.add_argument("--log-dir", help="where reports and journal go (default %(default)s)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="how several ranks share it (default %(default)s)")
    parser.add_argument("--width", type=_width, help="of the model (default %(default)s)")
    parser.add_argument("--depth", type=three, help="blocks of the model (default %(default)s)")
    parser.add_argument("--rows", type=one, help="of a step's batch, over all ranks (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="leave out the run that has no guard")
    parser.set_defaults(**asdict(usual))


def _at_least(least: int, purpose: str = "") -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            reason = f"are needed {purpose}".rstrip()
            raise argparse.ArgumentTypeError(f"at least {least} {reason}, but is {text!r}")
        return int(text)

    return parse


def _width(text: str) -> int:
    width = _at_least(HEADS)(text)
    if width % HEADS:
        raise argparse.ArgumentTypeError(f"must be a multiple of {HEADS}, the heads of attention, but is {text!r}")
    return width
