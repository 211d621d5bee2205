"""Each rank holds the whole model."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import GPT
from stabilityguard.demo.trainer import Trainer


def spread(model: GPT) -> Trainer:
    """Gradients are averaged over all ranks."""
    device = ranks.device()
    wrapped = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])
    return Trainer(wrapped, part=ranks.rank(), parts=ranks.count())
