"""The matrices of each block are split over a pair of ranks, and every parameter is sharded over the pairs."""

from __future__ import annotations

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import GPT
from stabilityguard.demo.strategies.fsdp2 import shard
from stabilityguard.demo.strategies.tp import split
from stabilityguard.demo.trainer import Trainer


def spread(model: GPT) -> Trainer:
    """Over pairs of neighbours; each pair reads a text of its own."""
    mesh = ranks.mesh(shards=ranks.count() // 2, parts=2)
    sharded = shard(split(model, mesh["parts"]), mesh["shards"])
    return Trainer(sharded, part=mesh.get_local_rank("shards"), parts=ranks.count() // 2)
