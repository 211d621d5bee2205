"""Fault injection: bad gradients and losses at a chosen step, layer and rank, to try a guard with.

faults = Faults().spike("blocks.2.mlp.up", step=60).nan("blocks.1.attention.out", step=90).inf_loss(step=120)
with faults.inject(model):
train(model, optimizer)
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stabilityguard.errors import ConfigurationError
from stabilityguard.measure.loss import find_loss, replace_loss
from stabilityguard.measure.modules import named_layers

FaultKind = Literal["spike", "nan", "inf", "inf_loss"]


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
    def inject(self, model: nn.Module, *, micro_batches: int = 1) -> Iterator[None]:
        """Lets the faults happen in the training steps made inside the ``with`` block.

        Raises:
            ConfigurationError: a fault names a layer that the model lacks.
        """
        injector = _Injector(model, [f for f in self.planned if f.rank in (None, _rank())], micro_batches)
        try:
            yield
        finally:
            injector.close()

    def _plan(self, fault: Fault) -> Faults:
        self.planned.append(fault)
        return self


class _Injector:
    def __init__(self, model: nn.Module, faults: list[Fault], micro_batches: int) -> None:
        layers = dict(named_layers(model))
        for fault in faults:
            if fault.layer is not None and fault.layer not in layers:
                close = difflib.get_close_matches(fault.layer, layers, n=3)
                raise ConfigurationError(
                    f"the model has no layer {fault.layer!r}; close ones: {', '.join(close) or 'none'}"
                )
        self._faults, self._micro_batches, self._forwards = faults, micro_batches, 0
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, prepend=True),  # before whoever reads the loss
        ]
        for fault in faults:
            if fault.layer is not None:
                for parameter in layers[fault.layer].parameters(recurse=False):
                    self._handles.append(self._spoil(parameter, fault))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _due(self, fault: Fault) -> bool:
        """Whether the last micro-batch of the fault's step is under way."""
        return self._forwards == fault.step * self._micro_batches

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._forwards += module.training and torch.is_grad_enabled()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        due = any(fault.kind == "inf_loss" and self._due(fault) for fault in self._faults)
        return _with_infinite_loss(output) if due and module.training and torch.is_grad_enabled() else None

    def _spoil(self, parameter: nn.Parameter, fault: Fault) -> RemovableHandle:
        def hook(spoiled: Tensor) -> None:
            if self._due(fault) and spoiled.grad is not None:
                _spoil_(spoiled.grad, fault)

        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call, no-any-return]


def _spoil_(gradient: Tensor, fault: Fault) -> None:
    local = getattr(gradient, "_local_tensor", gradient)
    if fault.kind == "spike":
        local.mul_(fault.factor)
    elif local.numel():
        local.view(-1)[0] = math.nan if fault.kind == "nan" else math.inf


def _with_infinite_loss(output: Any) -> Any:
    loss = find_loss(output)
    if loss is None:
        raise ConfigurationError("inf_loss needs a model that returns its loss: a scalar, .loss, ['loss'] or a tuple")
    return replace_loss(output, loss * math.inf)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
