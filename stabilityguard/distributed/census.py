"""Who holds what: every rank's shards counted over all ranks, once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stabilityguard.distributed.peers import Peers
from stabilityguard.distributed.shards import Shard, partial_terms

Key = tuple[str, str, Hashable]


@dataclass(frozen=True, kw_only=True)
class _Holding:
    """What one rank holds of one shard, as it tells the others."""

    key: Key
    terms: float | None
    """For a Partial gradient see ``partial_terms``, else None."""

    elements: int

    by_hand: bool
    """Whether nothing but the user's own code could reduce the gradient."""


@dataclass(frozen=True, kw_only=True)
class PartialGradient:
    """A shard whose gradient is the sum of what several ranks hold; its elements travel before they are squared."""

    shard: int | None
    """Index of the shard on this rank; None if it has none."""

    layer: int
    elements: slice
    """Place among all such elements."""

    weight: float
    """By which each rank's elements enter the sum."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSet:
    """Ranks that hold the same shards."""

    members: tuple[int, ...]
    """Places of the ranks among the peers; at least two."""

    shards: tuple[int, ...]
    """Indices of those shards on this rank; empty if it is no member."""


@dataclass(frozen=True, kw_only=True)
class Census:
    """The count, the same on every rank but for what is said to be this rank's."""

    layers: tuple[str, ...]
    """The layers of all ranks: the first rank's in its own order, then those that it lacks of the second, and so on."""

    holders: tuple[int, ...]
    """How many ranks hold each shard of this rank; 1 for an empty one."""

    layer_holders: tuple[int, ...]
    """How many ranks hold anything of each layer."""

    replicated: tuple[bool, ...]
    """Whether all that hold anything of a layer hold the whole of it."""

    is_reduced_by_hand: bool
    """Whether some replicas' gradients are reduced by the user's own code, if at all: collectives leave no trace on the
    version of a tensor, so that gradients have to be read again at ``step()``."""

    partial: tuple[PartialGradient, ...]
    replicas: tuple[ReplicaSet, ...]

    @classmethod
    def take(cls, shards: Sequence[Shard], peers: Peers, *, is_wrapped: bool) -> Census:
        """Counts. A collective over ``peers``.

        Args:
            shards: this rank's.
            peers: all ranks.
            is_wrapped: whether a wrapper reduces the gradients of plain tensors.
        """
        mine = [_holding(shard, is_wrapped=is_wrapped) for shard in shards]
        told = [mine] if len(peers) == 1 else peers.gather(mine, "telling which shards it holds")
        layers = tuple(dict.fromkeys(holding.key[0] for of_rank in told for holding in of_rank))
        places = {name: i for i, name in enumerate(layers)}
        holders: dict[Key, list[int]] = defaultdict(list)
        for rank, of_rank in enumerate(told):
            for key in dict.fromkeys(h.key for h in of_rank if h.key[2] is not None):
                holders[key].append(rank)
        by_layer: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for (layer, _, _), ranks in holders.items():
            by_layer[layer].append(tuple(ranks))
        of_layer = [{rank for ranks in by_layer[name] for rank in ranks} for name in layers]
        return cls(
            layers=layers,
            holders=tuple(max(1, len(holders[shard.key])) for shard in shards),
            layer_holders=tuple(max(1, len(ranks)) for ranks in of_layer),
            replicated=tuple(
                all(len(some) == len(ranks) for some in by_layer[name])
                for name, ranks in zip(layers, of_layer, strict=True)
            ),
            is_reduced_by_hand=any(h.by_hand and len(holders[h.key]) > 1 for of_rank in told for h in of_rank),
            partial=_partial(told, shards, places, Counter({key: len(ranks) for key, ranks in holders.items()})),
            replicas=_replica_sets(holders, shards),
        )

    @property
    def partial_elements(self) -> int:
        """Elements of all Partial gradients together."""
        return sum(gradient.elements.stop - gradient.elements.start for gradient in self.partial)


def _holding(shard: Shard, *, is_wrapped: bool) -> _Holding:
    gradient = shard.parameter.grad
    terms = None if gradient is None else partial_terms(gradient)
    elements = 0 if gradient is None or terms is None else _real_elements(shard.local(gradient))
    by_hand = not is_wrapped and shard.is_plain
    return _Holding(key=shard.key, terms=terms, elements=elements, by_hand=by_hand)


def _real_elements(values: Tensor) -> int:
    return values.numel() * (2 if values.is_complex() else 1)


def _partial(
    told: Sequence[Sequence[_Holding]], shards: Sequence[Shard], places: dict[str, int], holders: Counter[Key]
) -> tuple[PartialGradient, ...]:
    """The Partial gradients of all ranks, each once."""
    here = {shard.key: i for i, shard in enumerate(shards)}
    found: dict[Key, PartialGradient] = {}
    end = 0
    for holding in (holding for of_rank in told for holding in of_rank):
        if holding.terms is not None and holding.key[2] is not None and holding.key not in found:
            start, end = end, end + holding.elements
            found[holding.key] = PartialGradient(
                shard=here.get(holding.key),
                layer=places[holding.key[0]],
                elements=slice(start, end),
                weight=holding.terms / holders[holding.key],
            )
    return tuple(found.values())


def _replica_sets(holders: dict[Key, list[int]], shards: Sequence[Shard]) -> tuple[ReplicaSet, ...]:
    members = sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1})
    of_shard = [tuple(holders[shard.key]) for shard in shards]
    return tuple(
        ReplicaSet(members=ranks, shards=tuple(i for i, held in enumerate(of_shard) if held == ranks))
        for ranks in members
    )
