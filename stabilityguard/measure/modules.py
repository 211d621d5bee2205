"""The modules of a model under the names that their user gave them, without wrappers' prefixes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

ROOT_LAYER = "(root)"
"""Name of the layer made of the parameters that the model owns directly."""

_WRAPPER_ATTRIBUTES = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


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
            yield from _walk(child, child_name(module, name, attribute), seen)


def child_name(module: nn.Module, name: str, attribute: str) -> str:
    """Qualified name in the user's model of what the module called ``name`` holds as ``attribute``."""
    wraps = isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) and attribute == "module"
    if wraps or attribute in _WRAPPER_ATTRIBUTES:
        return name
    return f"{name}.{attribute}" if name else attribute


def clean_name(name: str) -> str:
    """The qualified name ``name`` without the attributes under which wrappers hold what they wrap."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_ATTRIBUTES)


def data_parallel_wrappers(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Every DistributedDataParallel in ``model``, itself included."""
    return [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]


def reduces_gradients(model: nn.Module) -> bool:
    """Whether DistributedDataParallel is at work in ``model``."""
    return bool(data_parallel_wrappers(model))


def reduces_in_groups(model: nn.Module) -> bool:
    """Whether FSDP hands over gradients group by group, so that their order is not the one backward went."""
    return any("_handle" in m.__dict__ or _is_fully_sharded(m) for m in model.modules())


def _is_fully_sharded(module: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def leaves_gradients_to_the_end(model: nn.Module) -> bool:
    """Whether DistributedDataParallel reduces copies of the gradients: until it ends, ``.grad`` is this rank's own."""
    wrappers = data_parallel_wrappers(model)
    return bool(wrappers) and not any(wrapper.gradient_as_bucket_view for wrapper in wrappers)
