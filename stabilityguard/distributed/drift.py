"""Replicas that are no longer alike: silent data corruption, or a broadcast that was missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from stabilityguard.distributed.census import ReplicaSet
from stabilityguard.distributed.digest import named_ranks
from stabilityguard.distributed.shards import Shard
from stabilityguard.errors import ReplicaDriftError

_MASK = (1 << 48) - 1
"""Keeps a checksum exact in float64."""

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 over the golden ratio, an odd number, as int64: the place of a tensor counts."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """0-dim int64 below 2^48, on the device: of the bits of all elements. A single flipped bit changes it."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else "cpu")
    for tensor in tensors:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bits = values.contiguous().view(_INTEGERS[values.element_size()])
        total = total * _MULTIPLIER + bits.sum(dtype=torch.int64).to(total.device)
    return (total * _MULTIPLIER >> 16) & _MASK


def checksums(replicas: Sequence[ReplicaSet], shards: Sequence[Shard]) -> list[Tensor]:
    """One for each replica set that this rank is a member of."""
    return [checksum([shards[i].local(shards[i].parameter) for i in r.shards]) for r in replicas if r.shards]


def odd_ones(sums: Sequence[int]) -> list[int]:
    """Indices of those that differ from the majority; all of them where there is none."""
    if len(set(sums)) <= 1:
        return []
    common, count = Counter(sums).most_common(1)[0]
    return [i for i, value in enumerate(sums) if value != common or 2 * count <= len(sums)]


def check_replicas(
    sums: Sequence[Sequence[int]], replicas: Sequence[ReplicaSet], ranks: Sequence[int], step: int
) -> None:
    """Raises ReplicaDriftError, on every rank alike, if the members of a replica set differ."""
    drifted = sorted({ranks[r.members[i]] for r, of_set in zip(replicas, sums, strict=True) for i in odd_ones(of_set)})
    if drifted:
        told = "; ".join(
            ", ".join(f"rank {ranks[m]}: {value:012x}" for m, value in zip(r.members, of_set, strict=True))
            for r, of_set in zip(replicas, sums, strict=True)
            if odd_ones(of_set)
        )
        raise ReplicaDriftError(
            f"replicated parameters are no longer alike before step {step}: {named_ranks(drifted)} differ(s) "
            f"(checksums: {told}). A memory fault, a missed broadcast, or moments left apart by join(); "
            "go back to a checkpoint",
            step=step,
            ranks=tuple(drifted),
        )
