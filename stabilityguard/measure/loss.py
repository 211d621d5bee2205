"""The loss, found in what the model returns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def find_loss(output: object) -> Tensor | None:
    """The loss in a training forward's output, detached: a scalar, ``.loss``, ``["loss"]`` or a tuple's first entry.

    Only a real floating-point scalar that requires gradients counts; None if there is none. No wait for the device.
    """
    for candidate in _candidates(output):
        if isinstance(candidate, Tensor) and candidate.numel() == 1 and _is_differentiable(candidate):
            return candidate.detach().reshape(())
    return None


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_floating_point()


def _candidates(output: object) -> list[object]:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    return [output, named, first]


class LossMeter:
    """Mean of the losses of the micro-batches that make one step; sums stay on the device."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, loss: Tensor) -> None:
        """Takes in the 0-dim ``loss`` of one micro-batch."""
        value = loss.double()
        self._sum = value if self._sum is None else self._sum + value.to(self._sum.device)
        self._count += 1

    def take(self) -> Tensor | None:
        """The float64 mean since the last call, 0-dim, on the device; None if there was no loss."""
        mean = None if self._sum is None else self._sum / self._count
        self._sum, self._count = None, 0
        return mean
