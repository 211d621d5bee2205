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

    @classmethod
    def of(cls, model: nn.Module, parameters: Iterable[nn.Parameter]) -> LayerTable:
        """Groups ``parameters`` by the layers of ``model``.

        Parameters that the model does not hold get layers of their own, named by their place in the optimizer.

        Raises:
            ConfigurationError: the model holds none of the parameters.
        """
        wanted = list(dict.fromkeys(parameters))
        owner = {
            p: name
            for name, module in reversed(list(named_layers(model)))
            for p in module._parameters.values()
            if p is not None
        }
        if wanted and not any(p in owner for p in wanted):
            raise ConfigurationError(
                f"none of the optimizer's {len(wanted)} parameters belongs to the model ({type(model).__name__}); "
                "pass the model whose parameters the optimizer updates"
            )
        strangers = {p: f"(optimizer parameter {i})" for i, p in enumerate(wanted) if p not in owner}
        order = {
            name: i for i, name in enumerate(dict.fromkeys([*(n for n, _ in named_layers(model)), *strangers.values()]))
        }
        ordered = sorted(wanted, key=lambda p: order[strangers.get(p) or owner[p]])
        layer_names = [strangers.get(p) or owner[p] for p in ordered]
        places = {name: i for i, name in enumerate(dict.fromkeys(layer_names))}
        return cls(places, tuple(ordered), tuple(places[name] for name in layer_names))

    @property
    def names(self) -> tuple[str, ...]:
        """Layer names by index."""
        return tuple(self.places)

    def nearest_loss_first(self, layers: Iterable[int], fired: Sequence[int]) -> list[int]:
        """``layers`` in backward order: as they ``fired`` in the last backward, else by reverse definition."""
        position = {layer: i for i, layer in enumerate(fired)}
        return sorted(layers, key=lambda layer: (position.get(layer, len(fired)), -layer))


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
