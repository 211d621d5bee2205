"""Fault injection: bad gradients and losses at a chosen step, layer and rank, to try a guard with.

    faults = Faults().spike("blocks.2.mlp.up", step=60).nan("blocks.1.attention.out", step=90).inf_loss(step=120)
    with faults.inject(model):
        train(model, optimizer)

A gradient is spoiled where this rank first has it: before DDP and FSDP 1 reduce it over ranks, and after FSDP 2 has, in
this rank's shard. A rank that holds no element of a layer cannot spoil it.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stabilityguard.distributed.shards import local_part, unsharded_spans
from stabilityguard.errors import ConfigurationError
from stabilityguard.measure.loss import find_loss, replace_loss
from stabilityguard.measure.modules import ROOT_LAYER, clean_name, named_layers

FaultKind = Literal["spike", "nan", "inf", "inf_loss"]

_Place = tuple[Tensor, slice | None]
"""The tensor that autograd accumulates into, and where in it a parameter lies; None for all of it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: FaultKind
    step: int
    """1-based; counted in training forwards of the model, ``micro_batches`` of which make a step."""

    layer: str | None = None
    """Qualified name of the layer whose gradient is spoiled; None for a fault of the loss."""

    factor: float = 1.0
    """What a spike multiplies the gradient by."""

    rank: int | None = None
    """The rank on which it happens; None for all."""


class Faults:
    """A list of faults; the methods that declare one return the list, so that they chain."""

    def __init__(self) -> None:
        self.planned: list[Fault] = []

    def spike(self, layer: str, *, step: int, factor: float = 1000.0, rank: int | None = None) -> Faults:
        """Multiplies the gradient of ``layer`` by ``factor`` as backward produces it."""
        return self._plan(Fault(kind="spike", step=step, layer=layer, factor=factor, rank=rank))

    def nan(self, layer: str, *, step: int, rank: int | None = None) -> Faults:
        """Makes one element of every parameter's gradient in ``layer`` NaN."""
        return self._plan(Fault(kind="nan", step=step, layer=layer, rank=rank))

    def inf(self, layer: str, *, step: int, rank: int | None = None) -> Faults:
        """Makes one element of every parameter's gradient in ``layer`` infinite."""
        return self._plan(Fault(kind="inf", step=step, layer=layer, rank=rank))

    def inf_loss(self, *, step: int, rank: int | None = None) -> Faults:
        """Makes the loss that the model returns infinite, in its value and in what flows back from it."""
        return self._plan(Fault(kind="inf_loss", step=step, rank=rank))

    @contextlib.contextmanager
    def inject(self, model: nn.Module, *, micro_batches: int = 1, criterion: nn.Module | None = None) -> Iterator[None]:
        """Lets the faults happen in the training steps made inside the ``with`` block.

        Args:
            model: as it is trained: wrapped already, or one stage of a pipeline.
            micro_batches: training forwards that make a step; a gradient is spoiled as the last one flows back. A
                pipeline stage that infers its shapes makes one more before the first: tell it ``input_args`` and
                ``output_args``, or inject after a first step.
            criterion: the module that computes the loss, where the model does not return it.

        Raises:
            ConfigurationError: a fault of this rank names a layer that is not trained here.
        """
        faults = [fault for fault in self.planned if fault.rank in (None, _rank())]
        injector = _Injector(faults, micro_batches)
        try:
            injector.attach(model, criterion or model)
            yield
        finally:
            injector.close()

    def _plan(self, fault: Fault) -> Faults:
        self.planned.append(fault)
        return self


class _Injector:
    def __init__(self, faults: list[Fault], micro_batches: int) -> None:
        self._faults, self._micro_batches = faults, micro_batches
        self._forwards = 0
        self._flowing_back = 0
        """Number of the forward whose backward pass is under way; pipelines make several forwards first."""
        self._handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module, criterion: nn.Module) -> None:
        places = _gradient_places(model)
        for fault in self._faults:
            if fault.layer is not None:
                for tensor, span in _places_of(fault.layer, places):
                    hook = self._spoil(fault, span)
                    self._handles.append(tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._handles += [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, prepend=True),
            criterion.register_forward_hook(self._spoil_loss, prepend=True),  # before whoever reads the loss
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _ends_step(self, forward: int, fault: Fault) -> bool:
        """Whether that training forward is the last of the fault's step."""
        return forward == fault.step * self._micro_batches

    def _enter(self, module: nn.Module, args: Any) -> None:
        if _trains(module):
            self._forwards = self._flowing_back = self._forwards + 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if self._micro_batches > 1 and _trains(module) and isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(self._note_backward_of(self._forwards))  # type: ignore[no-untyped-call]

    def _note_backward_of(self, forward: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._flowing_back = forward

        return hook

    def _spoil_loss(self, module: nn.Module, args: Any, output: Any) -> Any:
        due = any(fault.kind == "inf_loss" and self._ends_step(self._forwards, fault) for fault in self._faults)
        return _with_infinite_loss(output) if due and _trains(module) else None

    def _spoil(self, fault: Fault, span: slice | None) -> Callable[[Tensor], None]:
        def hook(tensor: Tensor) -> None:
            if self._ends_step(self._flowing_back, fault) and tensor.grad is not None:
                gradient = local_part(tensor.grad)
                _spoil_(gradient if span is None else gradient[span], fault)

        return hook


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _gradient_places(model: nn.Module) -> Mapping[str, list[_Place]]:
    """Where the gradients of each layer's parameters are to be spoiled."""
    places: dict[str, list[_Place]] = {}
    flat: defaultdict[str, list[_Place]] = defaultdict(list)
    for name, module in named_layers(model):
        own = module.named_parameters(recurse=False)
        places[name] = [(p, None) for attribute, p in own if p.requires_grad and attribute != "_flat_param"]
        for layer, place in _flat_places(name, module):
            flat[layer].append(place)
    return {**places, **flat}


def _flat_places(name: str, module: nn.Module) -> Iterator[tuple[str, _Place]]:
    """The same for the layers whose parameters FSDP 1 keeps in the flat one of ``module``."""
    parameter = getattr(module.__dict__.get("_handle"), "flat_param", None)
    prefix = "" if name == ROOT_LAYER else f"{name}."
    if parameter is not None:
        for inner, span in unsharded_spans(parameter).items():
            yield clean_name(prefix + inner).rpartition(".")[0] or ROOT_LAYER, (parameter, span)


def _places_of(layer: str, places: Mapping[str, list[_Place]]) -> list[_Place]:
    if not places.get(layer):
        close = difflib.get_close_matches(layer, [name for name, found in places.items() if found], n=3)
        raise ConfigurationError(f"the model trains no layer {layer!r}; close ones: {', '.join(close) or 'none'}")
    return places[layer]


def _spoil_(gradient: Tensor, fault: Fault) -> None:
    values = gradient._values() if gradient.is_sparse else gradient
    if fault.kind == "spike":
        values.mul_(fault.factor)
    elif values.numel():
        values[(0,) * values.dim()] = math.nan if fault.kind == "nan" else math.inf


def _with_infinite_loss(output: Any) -> Any:
    loss = find_loss(output)
    if loss is None:
        raise ConfigurationError(
            "inf_loss needs a model that returns its loss (a scalar, .loss, ['loss'] or a tuple), or a criterion"
        )
    return replace_loss(output, loss * math.inf)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
