"""Each parameter is sharded over the ranks."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import GPT
from stabilityguard.demo.trainer import Trainer


def spread(model: GPT) -> Trainer:
    """Over all ranks."""
    return Trainer(shard(model, ranks.mesh(shards=ranks.count())), part=ranks.rank(), parts=ranks.count())


def shard(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shards parameters over the last dimension of ``mesh``, and replicates them over another one, if there is."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
