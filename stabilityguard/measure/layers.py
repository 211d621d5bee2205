"""Which layer a parameter belongs to, and what the user calls that layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from stabilityguard.errors import ConfigurationError

ROOT_LAYER = "(root)"
"""Name of the layer made of the parameters that the model owns directly."""

_WRAPPER_ATTRIBUTES = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class LayerTable:
    """The parameters of one optimizer, grouped by the module that owns them.

    A tied parameter belongs to the first module that owns it. The layers are in the order of the model's definition.
    """

    places: dict[str, int]
    """Index of each of the ``L`` layers by its qualified name in the user's own model, without wrappers' prefixes."""

    parameters: tuple[nn.Parameter, ...]
    """The ``P`` parameters of the optimizer, each once, layer by layer."""

    layer_of: tuple[int, ...]
    """Index of the layer of every parameter."""

    uniform: frozenset[int]
    """Layers of torch's own classes, which use all of their parameters in a forward, or none."""

    @classmethod
    def of(cls, model: nn.Module, parameters: Iterable[nn.Parameter]) -> LayerTable:
        """Groups ``parameters`` by the layers of ``model``.

        Parameters that the model does not hold get layers of their own, named by their place in the optimizer.

        Raises:
            ConfigurationError: the model holds none of the parameters, or some have no shape yet.
        """
        wanted = list(dict.fromkeys(parameters))
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in wanted):
            raise ConfigurationError("the model has lazy parameters without a shape; run one forward before guarding")
        modules = list(named_layers(model))
        owner = {p: name for name, module in reversed(modules) for p in module._parameters.values() if p is not None}
        if wanted and not any(p in owner for p in wanted):
            raise ConfigurationError(
                f"none of the optimizer's {len(wanted)} parameters belongs to the model ({type(model).__name__}); "
                "pass the model whose parameters the optimizer updates"
            )
        names = {p: owner.get(p, f"(optimizer parameter {i})") for i, p in enumerate(wanted)}
        order = {name: i for i, (name, _) in enumerate(modules)}
        ordered = sorted(wanted, key=lambda p: order.get(names[p], len(order)))
        places = {name: i for i, name in enumerate(dict.fromkeys(names[p] for p in ordered))}
        torchs_own = {name for name, module in modules if _uses_all_or_none(module)}
        return cls(
            places,
            tuple(ordered),
            tuple(places[names[p]] for p in ordered),
            frozenset(places[name] for name in torchs_own & places.keys()),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Layer names by index."""
        return tuple(self.places)

    def nearest_loss_first(self, layers: Iterable[int], fired: Sequence[int]) -> list[int]:
        """``layers`` in backward order: as they ``fired`` in the last backward, else by reverse definition."""
        position = {layer: i for i, layer in enumerate(fired)}
        return sorted(layers, key=lambda layer: (position.get(layer, len(fired)), -layer))


def _uses_all_or_none(module: nn.Module) -> bool:
    home = type(module).__module__
    return home.startswith("torch.nn.") and home != nn.ParameterDict.__module__


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of ``model`` once, with its qualified name in the user's own model."""
    yield from _walk(model, "", set())


def _walk(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield name or ROOT_LAYER, module
    for attribute, child in module._modules.items():
        if child is not None:
            yield from _walk(child, _child_name(module, name, attribute), seen)


def _child_name(module: nn.Module, name: str, attribute: str) -> str:
    wraps = isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) and attribute == "module"
    if wraps or attribute in _WRAPPER_ATTRIBUTES:
        return name
    return f"{name}.{attribute}" if name else attribute
