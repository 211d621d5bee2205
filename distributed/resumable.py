"""Trains a small GPT on several ranks, and goes on where it was when it is started again; to be started by torchrun.

Ranks may be killed, or asked to stop by SIGTERM, at any time. The parameters at the end are bit for bit those of a run
that nothing has happened to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stabilityguard import CheckpointPolicy, GuardedOptimizer
from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import draw_batch, read_corpus
from stabilityguard.demo.settings import Settings
from stabilityguard.demo.strategies import make_trainer
from stabilityguard.distributed.shards import local_part

WARM_UP = 20
"""Steps in which the learning rate rises."""

EVALUATION_ROWS = 64
"""Of the text that the loss at the end is of, the same in every run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains to the end, from the newest checkpoint on if there is one."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's; the demo does without
    options = parse(arguments)
    with ranks.joined():
        train(options)
    return 0


def train(options: argparse.Namespace) -> None:
    """What one rank does."""
    corpus, held_out = read_corpus()
    sizes = {"width": options.width, "depth": options.depth, "rows": options.rows}
    trainer = make_trainer(Settings(strategy=options.strategy, seed=options.seed, **sizes))
    base = torch.optim.AdamW(trainer.parameter_groups(), lr=1e-3)
    scheduler = LambdaLR(base, lambda step: min(1.0, (step + 1) / WARM_UP))
    optimizer = GuardedOptimizer(
        base,
        trainer.model,
        nan_action="rollback",
        log_dir=options.log_dir,
        checkpoints=CheckpointPolicy(
            directory=options.checkpoints,
            every=options.every,
            quarantine=options.quarantine,
            asynchronous=options.asynchronous,
        ),
        track={"lr_scheduler": scheduler},
    )
    resumed = optimizer.resume()
    start = resumed.step if resumed else 0
    ranks.say(f"Goes on from step {start}." if resumed else "Starts anew.")
    losses = []
    for step in range(start, options.steps):
        text = draw_batch(corpus, options.rows, generator(options.seed, step))
        trainer.backward(trainer.share(text))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(optimizer.last_record.loss)
    optimizer.close()
    loss = trainer.evaluate(draw_batch(held_out, EVALUATION_ROWS, generator(0, 0)).to(ranks.device()))
    ranks.say(f"Loss on text that it has not seen: {loss:.4f} nats per byte")
    write(options.result, {"start": start, "losses": losses, "loss": loss, "digests": digests(trainer.model, base)})


def generator(seed: int, step: int) -> torch.Generator:
    """Draws the batch of ``step``, the same after a restart."""
    return torch.Generator().manual_seed(1_000_003 * seed + step)


def digests(model: nn.Module, base: Optimizer) -> list[Any]:
    """Of the bits of every rank's parameters and optimizer state: equal for runs that have ended alike."""
    tensors = [part for p in model.parameters() for part in (p, *(entry for _, entry in sorted(base.state[p].items())))]
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(bytes(local_part(tensor.detach()).cpu().contiguous().view(-1).view(torch.uint8).tolist()))
    found = [None] * ranks.count()
    dist.all_gather_object(found, digest.hexdigest())
    return found


def write(path: str | None, result: dict[str, Any]) -> None:
    """On the first rank alone."""
    if path and ranks.rank() == 0:
        Path(path).write_text(json.dumps(result, indent=1), encoding="ascii")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Trains a small GPT that goes on from its checkpoints.")
    parser.add_argument("--strategy", choices=("ddp", "fsdp1", "fsdp2"), default="ddp", help="how ranks share it")
    parser.add_argument("--steps", type=int, default=1000, help="training steps (default %(default)s)")
    parser.add_argument("--checkpoints", default="./sg_checkpoints", help="a directory that all ranks share")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--quarantine", type=int, default=10, help="healthy steps that make one clean")
    parser.add_argument("--asynchronous", action="store_true", help="write files in the background")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model (default %(default)s)")
    parser.add_argument("--rows", type=int, default=12, help="of a step's batch, over all ranks (default %(default)s)")
    parser.add_argument("--log-dir", default="./sg_logs", help="where reports and journal go (default %(default)s)")
    parser.add_argument("--result", help="a file for the losses, and for digests of the state at the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
