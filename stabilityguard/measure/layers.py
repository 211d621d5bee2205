"""The layers of one optimizer's parameters, and what this rank holds of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from stabilityguard.distributed.census import Census
from stabilityguard.distributed.peers import ALONE, Peers
from stabilityguard.distributed.shards import Shard
from stabilityguard.measure.modules import named_layers, reduces_gradients


@dataclass(frozen=True, eq=False)
class LayerTable:
    """The parameters of one optimizer, grouped by the module that owns them.

    A tied parameter belongs to the first module that owns it. The layers are those of all ranks together, in the order
    of the model's definition.
    """

    places: dict[str, int]
    """Index of each of the ``L`` layers by its qualified name in the user's own model, without wrappers' prefixes."""

    shards: tuple[Shard, ...]
    """The ``S`` shards on this rank, layer by layer; one for each parameter that is not split."""

    layer_of: tuple[int, ...]
    """Index of the layer of every shard."""

    uniform: frozenset[int]
    """Layers of torch's own classes, which use all of their parameters in a forward, or none."""

    census: Census
    """Who else holds the same."""

    @classmethod
    def of(cls, model: nn.Module, find_shards: Callable[[], Sequence[Shard]], peers: Peers = ALONE) -> LayerTable:
        """Groups this rank's shards by the layers of ``model``. A collective over ``peers``, unless alone.

        Raises:
            ConfigurationError: the model holds none of the parameters, or some have no shape yet; on every rank, also
                where it is so on one.
        """
        with peers.sharing_errors("finding the shards that it holds"):
            shards = find_shards()
        census = Census.take(shards, peers, is_wrapped=reduces_gradients(model))
        places = {name: i for i, name in enumerate(census.layers)}
        torchs_own = {name for name, module in named_layers(model) if _uses_all_or_none(module)}
        return cls(
            places,
            tuple(shards),
            tuple(places[shard.layer] for shard in shards),
            frozenset(places[name] for name in torchs_own & places.keys()),
            census,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Layer names by index."""
        return tuple(self.places)

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """The ``P`` parameters of the optimizer, each once, layer by layer."""
        return tuple(dict.fromkeys(shard.parameter for shard in self.shards))

    def parameters_of(self, layer: int | None) -> list[Tensor]:
        """Those of one layer on this rank."""
        return [shard.parameter for shard, of in zip(self.shards, self.layer_of, strict=True) if of == layer]

    @cached_property
    def held(self) -> frozenset[int]:
        """Layers of which this rank holds any elements."""
        shards = zip(self.shards, self.layer_of, strict=True)
        return frozenset(layer for shard, layer in shards if shard.identity is not None)

    @cached_property
    def elements(self) -> tuple[float, ...]:
        """Number of real elements of every layer: this rank's share."""
        counts = [0.0] * len(self.places)
        for shard, layer, holders in zip(self.shards, self.layer_of, self.census.holders, strict=True):
            counts[layer] += shard.numel * (2 if shard.parameter.is_complex() else 1) / holders
        return tuple(counts)

    @cached_property
    def weights(self) -> Tensor:
        """float64, shape (S,): one over the number of ranks that hold the same shard."""
        return torch.tensor([1.0 / n for n in self.census.holders], dtype=torch.float64, device="cpu")

    def nearest_loss_first(self, layers: Iterable[int], fired: Sequence[int]) -> list[int]:
        """``layers`` in backward order: as they ``fired`` in the last backward, else by reverse definition."""
        position = {layer: i for i, layer in enumerate(fired)}
        return sorted(layers, key=lambda layer: (position.get(layer, len(fired)), -layer))


def _uses_all_or_none(module: nn.Module) -> bool:
    home = type(module).__module__
    return home.startswith("torch.nn.") and home != nn.ParameterDict.__module__
