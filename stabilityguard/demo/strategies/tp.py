"""The matrices of each block are split over the ranks, which all work on the same text."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import GPT
from stabilityguard.demo.trainer import Trainer


def spread(model: GPT) -> Trainer:
    """Over all ranks."""
    return Trainer(split(model, ranks.mesh(parts=ranks.count())))


def split(model: GPT, mesh: DeviceMesh) -> GPT:
    """Each rank gets heads of attention and hidden units of its own, and their results are added up."""
    for block in model.blocks:
        attention = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
        parallelize_module(block, mesh, {**attention, "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    return model
