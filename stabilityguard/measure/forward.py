"""What passes through the model's own forward: the batch going in, the loss coming out."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stabilityguard.measure.batch import describe_batch, has_bad_values
from stabilityguard.measure.hooks import Hooks
from stabilityguard.measure.loss import LossMeter, find_loss

HELD_BATCHES = 8
"""Micro-batches of the running step whose inputs are referenced until it ends, the newest ones."""


class ForwardObserver:
    """Watches the training forwards of ``model``; evaluation, and what runs inside a compiled graph, is passed over.

    ``on_forward`` is called before every training forward of the model itself. The hooks hold this object weakly, and
    are inert in copies of the model.
    """

    def __init__(self, model: nn.Module, on_forward: Callable[[], None] | None = None) -> None:
        self._model = model
        self._on_forward = on_forward
        self._losses = LossMeter()
        self._batches: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque(maxlen=HELD_BATCHES)
        self._before_next: Callable[[], None] | None = None
        self._at_exit, self._at_entry = Hooks(self), Hooks(self)
        leave, arrive = (
            _Hook(weakref.ref(self), method) for method in (ForwardObserver._leave, ForwardObserver._arrive)
        )
        self._at_exit.add(model.register_forward_hook(leave, with_kwargs=True))
        self._at_exit.add(model.register_forward_pre_hook(arrive))

    def close(self) -> None:
        """Removes the hooks."""
        self._at_exit.close()
        self._at_entry.close()

    def call_before_next(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once, before the next training forward of the model or a part of it touches anything."""
        self._at_entry.close()
        self._before_next = callback
        hook = _Hook(weakref.ref(self), ForwardObserver._enter)
        for module in self._model.modules():
            self._at_entry.add(module.register_forward_pre_hook(hook))

    def backward_ended(self) -> None:
        """Counts the losses whose backward pass has just reached the layers of interest."""
        self._losses.arrive()

    def take_loss(self) -> Tensor | None:
        """Mean loss since the last step as a 0-dim float64 tensor on the device, or None."""
        return self._losses.take()

    def testimony(self) -> dict[str, Any]:
        """What is known of the step's micro-batches. Waits for the device."""
        return {"bad_inputs": self._saw_bad_inputs(), "batches": self._describe_batches()}

    def forget_batches(self) -> None:
        """Lets go of the inputs of the step that ended."""
        self._batches.clear()

    def _describe_batches(self) -> list[list[dict[str, Any]]]:
        """Shapes and fingerprints of the micro-batches since the last step. Waits for the device."""
        described = []
        for args, kwargs in self._batches:
            with contextlib.suppress(Exception):  # inputs can be anything, and a trip must be told of all the same
                described.append(describe_batch(args, kwargs))
        return described

    def _saw_bad_inputs(self) -> bool:
        """Whether one of those micro-batches held NaN or Inf. Waits for the device."""
        with contextlib.suppress(Exception):
            return any(has_bad_values(args, kwargs) for args, kwargs in self._batches)
        return False

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._before_next is not None and module.training and torch.is_grad_enabled():
            self._before_next()
            self._before_next = None
            self._at_entry.close()

    def _arrive(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._on_forward is not None and module.training and torch.is_grad_enabled():
            self._on_forward()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._batches.append((args, kwargs))
        loss = find_loss(output)
        if loss is not None:
            hook = _loss_hook(weakref.ref(self._losses), loss.detach())
            loss.register_hook(hook)  # type: ignore[no-untyped-call]


def _loss_hook(meter: weakref.ref[LossMeter], loss: Tensor) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        alive = meter()
        if alive is not None:
            alive.flows(loss, torch._C._current_graph_task_id())

    return hook


class _Hook:
    """A module hook that holds its observer weakly, and is inert in copies of the model."""

    def __init__(self, observer: weakref.ref[ForwardObserver] | None, method: Callable[..., None] | None) -> None:
        self._observer = observer
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        if self._observer is None or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        observer = self._observer()
        if observer is not None and self._method is not None:
            self._method(observer, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Hook, (None, None))
