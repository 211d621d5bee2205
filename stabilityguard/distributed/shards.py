"""What this rank holds of every parameter, read off the parameters themselves.

A plain tensor is a whole parameter, a DTensor the part that its mesh and placements say, and a flat parameter of FSDP 1
holds parts of several parameters, side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from stabilityguard.errors import ConfigurationError
from stabilityguard.measure.modules import ROOT_LAYER, clean_name, named_layers

ShardOf = Callable[[str, Tensor], Hashable]
"""Maps a parameter's qualified name and tensor to what tells this rank's part of it from others', beyond what the
tensor itself says; None where it is a replica."""


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of one parameter whose gradient this rank reads."""

    layer: str
    """Qualified name of the layer in the user's model."""

    name: str
    """The parameter's name within its layer."""

    parameter: Tensor
    """The tensor whose ``.grad`` holds the part's gradient."""

    identity: Hashable
    """Equal on the ranks that hold the same elements; None where this rank holds none of them."""

    span: slice | None = None
    """Place within the flattened gradient; None for all of it."""

    trigger: Tensor | None = None
    """The tensor that autograd accumulates into, if it is another one."""

    whole: torch.Size = field(default_factory=torch.Size)
    """Shape of the parameter in the unsharded model."""

    run: slice | None = None
    """Which elements of the flattened whole parameter it holds; None where the tensor itself tells."""

    @property
    def qualified_name(self) -> str:
        """The parameter's name in the user's model."""
        return qualified(self.layer, self.name)

    @property
    def key(self) -> tuple[str, str, Hashable]:
        """What the same elements have in common over ranks."""
        return self.layer, self.name, self.identity

    @property
    def is_plain(self) -> bool:
        """Whether it is an ordinary tensor, of which no wrapper knows."""
        return self.trigger is None and local_part(self.parameter) is self.parameter

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return self.local(self.parameter).numel() if self.run is None else self.run.stop - self.run.start

    def local(self, tensor: Tensor) -> Tensor:
        """The same part of ``tensor``, which is the parameter or its gradient, as a plain tensor on this rank."""
        whole = local_part(tensor)
        return whole if self.span is None else whole.reshape(-1)[self.span]


def local_part(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, any other tensor as it is. Neither a collective nor a wait."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def find_shards(model: nn.Module, parameters: Iterable[Tensor], shard_of: ShardOf | None = None) -> list[Shard]:
    """The shards of ``parameters`` in the order of the model's definition, each once.

    Parameters that the model does not hold get layers of their own, named by their place in the optimizer.

    Raises:
        ConfigurationError: the model holds none of the parameters, or some have no shape yet.
    """
    wanted = list(dict.fromkeys(parameters))
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in wanted):
        raise ConfigurationError("the model has lazy parameters without a shape; run one forward before guarding")
    modules = list(named_layers(model))
    flat = _flat_shards(modules, shard_of)
    owner: dict[Tensor, tuple[str, str]] = {
        p: (name, k) for name, m in reversed(modules) for k, p in m._parameters.items() if p is not None
    }
    if wanted and not any(p in owner or p in flat for p in wanted):
        raise ConfigurationError(
            f"none of the optimizer's {len(wanted)} parameters belongs to the model ({type(model).__name__}); "
            "pass the model whose parameters the optimizer updates"
        )
    shards: list[Shard] = []
    for i, parameter in enumerate(wanted):
        if parameter in flat:
            shards += flat[parameter]
        else:
            layer, name = owner.get(parameter, (f"(optimizer parameter {i})", ""))
            identity = _identity(parameter, layer, name, shard_of)
            shards.append(Shard(layer, name, parameter, identity, whole=parameter.shape))
    order = {name: i for i, (name, _) in enumerate(modules)}
    return sorted(shards, key=lambda shard: order.get(shard.layer, len(order)))


def tied_names(model: nn.Module, shards: Iterable[Shard]) -> dict[str, str]:
    """Further names of parameters that several modules own, with the name of their shard."""
    kept = {shard.parameter: shard.qualified_name for shard in shards if shard.trigger is None}
    names = [
        (qualified(layer, key), kept[parameter])
        for layer, module in named_layers(model)
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter in kept
    ]
    return {name: first for name, first in names if name != first}


def _identity(parameter: Tensor, layer: str, name: str, shard_of: ShardOf | None) -> Hashable:
    is_split = local_part(parameter) is not parameter
    found = _identity_on_mesh(parameter) if is_split else tuple(parameter.shape)
    return _told_apart(found, layer, name, parameter, shard_of)


def _told_apart(found: Hashable, layer: str, name: str, parameter: Tensor, shard_of: ShardOf | None) -> Hashable:
    """The identity ``found``, with what the user knows beyond it."""
    return found if found is None or shard_of is None else (found, shard_of(qualified(layer, name), parameter))


def qualified(layer: str, name: str) -> str:
    """The name of a parameter ``name`` of ``layer`` in the user's model."""
    return name if layer == ROOT_LAYER else f"{layer}.{name}" if name else layer


def _identity_on_mesh(parameter: Any) -> Hashable:
    """The shard of a DTensor: the coordinates of this rank along the mesh dimensions that split it."""
    coordinates = parameter.device_mesh.get_coordinate()
    if coordinates is None or (local_part(parameter).numel() == 0 and parameter.numel() > 0):
        return None
    placed = zip(coordinates, map(str, parameter.placements), parameter.placements, strict=True)
    return tuple(parameter.shape), tuple((c, text) for c, text, p in placed if not p.is_replicate())


def partial_terms(gradient: Any) -> float | None:
    """By what the sum over all ranks that hold a shard's Partial gradient counts each of its terms too little.

    The gradient is the sum (or mean) of the local tensors over the partial dimensions of the mesh: None if there are
    none, else the number of ranks along them (1 for a mean).

    Raises:
        ConfigurationError: the gradient is partial in a way that is neither a sum nor a mean.
    """
    partial = [i for i, placement in enumerate(getattr(gradient, "placements", ())) if placement.is_partial()]
    if not partial:
        return None
    operations = {gradient.placements[i].reduce_op for i in partial}
    if operations == {"sum"}:
        return float(math.prod(gradient.device_mesh.size(i) for i in partial))
    if operations == {"avg"}:
        return 1.0
    raise ConfigurationError(f"a gradient is {gradient.placements}, but only partial sums and means can be measured")


# Flat parameters of FSDP 1 -----------------------------------------------------------------------------------------


def _flat_shards(modules: Sequence[tuple[str, nn.Module]], shard_of: ShardOf | None) -> dict[Tensor, list[Shard]]:
    """The shards of every parameter that FSDP 1 keeps in a flat one, by the parameter that an optimizer is given."""
    found: dict[Tensor, list[Shard]] = {}
    for prefix, module in modules:
        handle = module.__dict__.get("_handle")
        flat = getattr(handle, "flat_param", None)
        if flat is not None:
            found.update(_shards_of_flat("" if prefix == ROOT_LAYER else prefix, flat, handle, shard_of))
    return found


def _shards_of_flat(prefix: str, flat: Any, handle: Any, shard_of: ShardOf | None) -> dict[Tensor, list[Shard]]:
    spans = unsharded_spans(flat)
    infos = flat._shard_param_infos if handle.uses_sharded_strategy else [None] * len(flat._fqns)
    found: dict[Tensor, list[Shard]] = {}
    for i, (fqn, info) in enumerate(zip(flat._fqns, infos, strict=True)):
        layer, _, name = clean_name(f"{prefix}.{fqn}" if prefix else fqn).rpartition(".")
        parameter = flat._params[i] if handle._use_orig_params else flat
        whole = torch.Size(flat._shapes[i])
        identity, span, run = ("all", spans[fqn], slice(0, whole.numel())) if info is None else _within_shard(info)
        shard = Shard(
            layer or ROOT_LAYER,
            name,
            parameter,
            _told_apart(identity, layer or ROOT_LAYER, name, parameter, shard_of),
            None if handle._use_orig_params else span,
            trigger=flat,
            whole=whole,
            run=run,
        )
        found.setdefault(parameter, []).append(shard)
    return found


def _within_shard(info: Any) -> tuple[Hashable, slice, slice]:
    """What tells the part of a parameter in this rank's shard, where it lies in that, and in the whole parameter."""
    if not info.in_shard:
        return None, slice(0, 0), slice(0, 0)
    start, first, last = info.offset_in_shard, info.intra_param_start_idx, info.intra_param_end_idx
    return (first, last), slice(start, start + info.numel_in_shard), slice(first, last + 1)


def unsharded_spans(flat: Any) -> Mapping[str, slice]:
    """Where each parameter lies in the unsharded flat one, by its name below the module that FSDP 1 wraps."""
    return dict(_spans(flat))


def _spans(flat: Any) -> Iterator[tuple[str, slice]]:
    names = iter(flat._fqns)
    ends = accumulate(flat._numels_with_padding)
    for end, numel, is_padding in zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            yield next(names), slice(end - numel, end)
