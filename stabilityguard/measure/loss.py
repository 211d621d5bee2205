"""The loss, found in what the model returns."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def find_loss(output: object) -> Tensor | None:
    """The loss in a training forward's output: a scalar, ``.loss``, ``["loss"]`` or a tuple's first entry.

    Only a floating-point scalar that was computed from parameters counts; None if there is none. Does not wait.
    """
    named, unnamed = ([], [output]) if isinstance(output, Tensor) else _candidates(output)
    for candidate in named:
        if isinstance(candidate, Tensor) and candidate.numel() == 1 and _is_computed(candidate):
            return candidate
    for candidate in unnamed:
        if (
            isinstance(candidate, Tensor)
            and candidate.numel() == 1
            and candidate.dim() <= 1
            and _is_computed(candidate)
        ):
            return candidate
    return None


def _is_computed(tensor: Tensor) -> bool:
    return tensor.grad_fn is not None and tensor.is_floating_point()


def _candidates(output: object) -> tuple[list[object], list[object]]:
    """What is called a loss, and what may be one."""
    named = None
    with contextlib.suppress(Exception):  # a property may raise whatever it likes
        named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    return [named], [first]


def replace_loss(output: Any, loss: Tensor) -> Any:
    """``output`` with ``loss`` where ``find_loss`` found one; a mutable output is changed in place."""
    old = find_loss(output)
    if output is old:
        return loss
    if isinstance(output, MutableMapping) and output.get("loss") is old:
        output["loss"] = loss
        return output
    if hasattr(output, "_replace"):  # a named tuple
        return output._replace(**{output._fields[next(i for i, entry in enumerate(output) if entry is old)]: loss})
    if isinstance(output, (tuple, list)) and output[0] is old:
        return type(output)([loss, *output[1:]])
    output.loss = loss
    return output


def scalar_loss(value: object) -> Tensor | None:
    """``value`` as a detached 0-dim tensor where it is a number or a one-element tensor, else None."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if value.numel() == 1 and not value.is_complex() else None
    return torch.tensor(float(value), dtype=torch.float64, device="cpu") if isinstance(value, (int, float)) else None


class LossMeter:
    """Mean of the losses whose backward passes make one step; sums stay on the device.

    A loss counts once a backward pass that starts from it has reached the layers of interest: what was dropped before
    backward, or belongs to another optimizer's layers, does not.
    """

    def __init__(self) -> None:
        self._flowing: list[Tensor] = []
        self._graph_task = -1
        self._sum: Tensor | None = None
        self._count = 0

    def flows(self, loss: Tensor, graph_task: int) -> None:
        """Notes that the backward pass numbered ``graph_task`` came through the one-element ``loss``."""
        if graph_task != self._graph_task:
            self._graph_task = graph_task
            self._flowing.clear()
        self._flowing.append(loss)

    def arrive(self) -> None:
        """Counts the losses noted: their backward pass has reached the layers."""
        for loss in self._flowing:
            value = loss.double().reshape(())
            self._sum = value if self._sum is None else self._sum + value.to(self._sum.device)
            self._count += 1
        self._flowing.clear()

    def take(self) -> Tensor | None:
        """The float64 mean since the last call, 0-dim, on the device; None if there was no loss."""
        mean = None if self._sum is None else self._sum / self._count
        self._sum, self._count = None, 0
        return mean
