"""Each parameter is sharded over a pair of ranks, and the pairs are replicas."""

from __future__ import annotations

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import GPT
from stabilityguard.demo.strategies.fsdp2 import shard
from stabilityguard.demo.trainer import Trainer


def spread(model: GPT) -> Trainer:
    """Over pairs of neighbours."""
    mesh = ranks.mesh(replicas=ranks.count() // 2, shards=2)
    return Trainer(shard(model, mesh), part=ranks.rank(), parts=ranks.count())
