"""Trains a small GPT with DeepSpeed under a guard; to be started by torchrun or by the deepspeed launcher.

The batch of one rank is poisoned at the steps that ``--poison`` names; the guard names layer and rank, and the run goes
on. Started again with the same ``--checkpoints``, it goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported

import deepspeed
import deepspeed.ops

from stabilityguard import CheckpointPolicy
from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import GPT, draw_batch, read_corpus
from stabilityguard.distributed.deepspeed import guard_engine

ROWS, ACCUMULATION = 4, 2


class Poisonable(GPT):
    """The same model; ``factor`` spoils its loss."""

    def forward(self, text: Tensor, factor: float = 1.0) -> Tensor:
        """The loss, times ``factor``."""
        return super().forward(text) * factor


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains to the end, from the newest checkpoint on if there is one."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed calls what newer releases of torch rename
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without it
    deepspeed.init_distributed()
    train(options)
    ranks.leave()
    return 0


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's settings; what matters to a guard has a comment."""
    zero: dict[str, Any] = {"stage": options.stage}
    zero |= {f"offload_{what}": {"device": "cpu"} for what in options.offload}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,  # the guard judges what has accumulated, once for each update
        "gradient_clipping": 1.0,  # after the guard has measured
        "bf16": {"enabled": options.bf16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's AdamW, whose replay after a rollback is bit for bit
        "zero_force_ds_cpu_optimizer": False,  # the same, with offload
        "steps_per_print": 10**9,
    }


def train(options: argparse.Namespace) -> None:
    """What one rank does."""
    torch.manual_seed(options.seed)
    corpus, _ = read_corpus()
    model = Poisonable(options.width, options.depth)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=configuration(options)
    )
    checkpoints = None
    if options.checkpoints:
        checkpoints = CheckpointPolicy(
            directory=options.checkpoints, every=options.every, quarantine=options.quarantine
        )
    guard = guard_engine(engine, nan_action=options.nan_action, log_dir=options.log_dir, checkpoints=checkpoints)
    resumed = guard.resume() if checkpoints else None
    for step in range(resumed.step if resumed else 0, options.steps):
        for micro_batch in range(ACCUMULATION):
            drawn = torch.Generator().manual_seed((options.seed * 10**6 + step) * ACCUMULATION + micro_batch)
            text = draw_batch(corpus, ROWS * ranks.count(), drawn)[ranks.rank() :: ranks.count()]
            is_poisoned = step + 1 in options.poison and ranks.rank() == ranks.count() - 1
            engine.backward(engine(text.to(engine.device), float("nan") if is_poisoned else 1.0))
            engine.step()
    guard.close()
    record = guard.last_record
    ranks.say(f"{engine.global_steps} steps, {engine.skipped_steps} of them skipped; loss {record.loss:.4f}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Trains a small GPT with DeepSpeed under a guard.")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="of ZeRO (default %(default)s)")
    parser.add_argument(
        "--offload", nargs="*", choices=("optimizer", "param"), default=(), help="what to keep on the host"
    )
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16")
    parser.add_argument("--steps", type=int, default=100, help="updates (default %(default)s)")
    parser.add_argument("--poison", type=int, nargs="*", default=(), help="steps at which one rank's loss is NaN")
    parser.add_argument("--nan-action", choices=("skip", "rollback", "raise"), default="skip", help="what a trip does")
    parser.add_argument("--checkpoints", help="a directory that all ranks share (default: none are written)")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--quarantine", type=int, default=10, help="healthy steps that make one clean")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (default %(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="blocks of the model (default %(default)s)")
    parser.add_argument("--log-dir", default="./sg_logs", help="where reports and journal go (default %(default)s)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
