"""Blocks are sharded over the ranks, the parameters of each as one flat parameter."""

from __future__ import annotations

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import GPT, Block
from stabilityguard.demo.trainer import Trainer


def spread(model: GPT) -> Trainer:
    """What is in no block has a flat parameter of its own."""
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=ranks.device()
    )
    return Trainer(wrapped, part=ranks.rank(), parts=ranks.count())
