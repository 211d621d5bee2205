"""What passes through the model's own forward: the batch going in, the loss coming out."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stabilityguard.measure.batch import describe_batch
from stabilityguard.measure.loss import LossMeter, find_loss

HELD_BATCHES = 8
"""Micro-batches of the running step whose inputs are referenced until it ends, the newest ones."""


class ForwardObserver:
    """Watches the training forwards of ``model``; evaluation, and what runs inside a compiled graph, is passed over."""

    def __init__(self, model: nn.Module) -> None:
        self._before_next: Callable[[], None] | None = None
        self._losses = LossMeter()
        self._batches: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque(maxlen=HELD_BATCHES)
        observer = weakref.ref(self)
        self._handles = [
            model.register_forward_pre_hook(_Hook(observer, ForwardObserver._enter), with_kwargs=True),
            model.register_forward_hook(_Hook(observer, ForwardObserver._leave), with_kwargs=True),
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def call_before_next(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once, before the next training forward touches anything."""
        self._before_next = callback

    def take_loss(self) -> Tensor | None:
        """Mean loss since the last step as a 0-dim float64 tensor on the device, or None."""
        return self._losses.take()

    def describe_batches(self) -> list[list[dict[str, Any]]]:
        """Shapes and fingerprints of the micro-batches since the last step. Waits for the device."""
        return [describe_batch(args, kwargs) for args, kwargs in self._batches]

    def forget_batches(self) -> None:
        """Lets go of the inputs of the step that ended."""
        self._batches.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._before_next is not None and module.training and torch.is_grad_enabled():
            callback, self._before_next = self._before_next, None
            callback()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._batches.append((args, kwargs))
            loss = find_loss(output)
            if loss is not None:
                self._losses.add(loss)


class _Hook:
    """A module hook that holds its observer weakly, and is inert in copies of the model."""

    def __init__(self, observer: weakref.ref[ForwardObserver] | None, method: Callable[..., None] | None) -> None:
        self._observer = observer
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling() or self._observer is None:
            return
        observer = self._observer()
        if observer is not None and self._method is not None:
            self._method(observer, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Hook, (None, None))
