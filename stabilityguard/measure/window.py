"""The gradients of one optimizer step: as backward left them, and as ``step()`` finds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stabilityguard.detect.statistics import Finding, Statistics
from stabilityguard.measure.backward import EndOfBackward
from stabilityguard.measure.gradients import GradientReader, Measurement
from stabilityguard.measure.layers import LayerTable


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How a GradScaler has scaled the gradients; all None without one. Tensors of one element."""

    at_backward: Tensor | None = None
    """The factor that backward's gradients carry, where it is known."""

    at_step: Tensor | None = None
    """The factor that they still carry at ``step()``; None once they were unscaled."""

    found_inf: Tensor | None = None
    """Above zero where the scaler saw a non-finite gradient; its presence tells that a scaler is at work."""

    @property
    def unscaled_unseen(self) -> bool:
        """Whether ``unscale_`` was called by a scaler unknown here; it does not move the gradients' versions."""
        return self.found_inf is not None and self.at_backward is None and self.at_step is None


@dataclass(frozen=True, kw_only=True)
class _Look:
    """One reading of the gradients within a step."""

    measurement: Measurement
    findings: dict[int, Finding] | None
    """What is known of non-finite layers; None if that was not yet looked at."""

    carries: str
    """The field of LossScale that says what factor these gradients carry."""


class GradientWindow:
    """Measures at the end of every backward pass, and at ``step()`` where gradients have changed since.

    A look at the end of backward is queued on the device and not waited for. On the CPU, where there is nothing to wait
    for, non-finite gradients are examined at once, before the user's next line changes them; elsewhere at ``step()``.
    """

    def __init__(self, table: LayerTable, on_backward_end: Callable[[], None]) -> None:
        self.table = table
        self.reader = GradientReader(table)
        self.consumed = False
        """Whether the last backward pass ended with every gradient gone: something steps inside backward."""
        self._on_backward_end = on_backward_end
        self._trigger = EndOfBackward(table, self._backward_ended)
        self._left: _Look | None = None

    def close(self) -> None:
        """Removes the hooks."""
        self._trigger.close()

    def follow_requires_grad(self) -> None:
        """Sets the hooks anew where parameters were frozen or unfrozen."""
        self._trigger.follow_requires_grad()

    def forget(self) -> None:
        """Drops what was measured: these gradients will not be stepped on."""
        self._left = None
        self._trigger.forget()

    @property
    def measured(self) -> bool:
        """Whether a backward pass has ended since the last step, and its gradients are still there."""
        return self._left is not None and self.reader.unchanged_since(self._left.measurement)

    @torch.no_grad()
    def take(self, loss: Tensor | None, scale: LossScale) -> Statistics:
        """The statistics of the step, in one copy to the host; the next step starts afresh. Not a collective."""
        looks = self._looks(scale)
        scalars = {name: tensor for name, tensor in (("loss", loss), *vars(scale).items()) if tensor is not None}
        on_host = _to_host([*(look.measurement.squares for look in looks), *scalars.values()])
        values = dict(zip(scalars, map(float, on_host[len(looks) :]), strict=True))
        seen, findings = self._norms(looks, on_host[: len(looks)], values)
        self.forget()
        return Statistics(
            norms=seen[0] if len(seen) == 1 else torch.maximum(seen[0], seen[1]),  # NaN wins
            norms_at_step=seen[-1],
            present=_either(looks[0].measurement.present, looks[-1].measurement.present),
            findings=findings,
            loss=values.get("loss"),
            scaled=scale.found_inf is not None,
            overflowed=values.get("found_inf", 0.0) > 0 or 0.0 in (values.get("at_backward"), values.get("at_step")),
            scale=values.get("at_backward", values.get("at_step")),
        )

    def _looks(self, scale: LossScale) -> list[_Look]:
        looks = [] if self._left is None else [self._left]
        if not self.measured or scale.unscaled_unseen:
            looks.append(_Look(measurement=self.reader.read(), findings=None, carries="at_step"))
        return looks

    def _norms(
        self, looks: list[_Look], squares: list[Tensor], values: dict[str, float]
    ) -> tuple[list[Tensor], dict[int, Finding]]:
        """Unscaled layer norms of every look up to the first that is not finite, and what is wrong in that one.

        Clipping by a non-finite norm spoils every layer, so that a look at what it left would say nothing.
        """
        seen = []
        for look, squares_of_look in zip(looks, squares, strict=True):
            factor = values.get(look.carries) or 1.0  # a scale that has fallen to zero has left nothing to unscale
            findings = self._examine(squares_of_look) if look.findings is None else look.findings
            norms = squares_of_look.sqrt()
            if factor != 1.0:
                norms /= factor
            for layer, finding in findings.items():
                if finding.kind == "overflow":  # NaN and Inf are there already
                    norms[layer] = finding.norm / factor
            seen.append(norms)
            if findings:
                return seen, findings
        return seen, {}

    def _examine(self, squares: Tensor) -> dict[int, Finding]:
        """What is wrong with each layer whose square is not finite, nearest the loss first. Waits for the device."""
        if math.isfinite(float(squares.sum())):
            return {}
        suspects = squares.isfinite().logical_not().nonzero().flatten().tolist()
        return self.reader.examine(self.table.nearest_loss_first(suspects, self._trigger.fired), squares)

    @torch.no_grad()
    def _backward_ended(self) -> None:
        measurement = self.reader.read()
        self.consumed = not measurement.has_gradients
        findings = self._examine(measurement.squares) if measurement.squares.device.type == "cpu" else None
        self._left = _Look(measurement=measurement, findings=findings, carries="at_backward")
        self._on_backward_end()


def _either(first: Tensor, second: Tensor) -> Tensor:
    return first if first is second else first | second


def _to_host(tensors: list[Tensor]) -> list[Tensor]:
    """All tensors on the host as float64, in a single copy where any lies on a device."""
    away = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
    if not away:
        return [tensor.double() for tensor in tensors]
    flat = torch.cat([tensor.to(away[0], torch.float64).reshape(-1) for tensor in tensors]).cpu()
    return list(torch.split(flat, [tensor.numel() for tensor in tensors]))
