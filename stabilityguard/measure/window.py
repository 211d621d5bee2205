"""The gradients of one optimizer step: as backward left them, and as ``step()`` finds them."""

from __future__ import annotations

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


class GradientWindow:
    """Measures at the end of every backward pass, and at ``step()`` where gradients have changed since.

    A look at the end of backward is queued on the device and not waited for. On the CPU, where there is nothing to wait
    for, non-finite gradients are examined at once, before the user's next line changes them; elsewhere at ``step()``.
    """

    def __init__(self, table: LayerTable) -> None:
        self.table = table
        self.reader = GradientReader(table)
        self._trigger = EndOfBackward(table, self._backward_ended)
        self._left: Measurement | None = None
        self._left_findings: dict[int, Finding] = {}
        self.consumed = False
        """Whether the last backward pass ended with every gradient gone: something steps inside backward."""

    def close(self) -> None:
        """Removes the hooks."""
        self._trigger.close()

    def forget(self) -> None:
        """Drops what was measured: these gradients will not be stepped on."""
        self._left = None
        self._left_findings = {}

    @property
    def measured(self) -> bool:
        """Whether a backward pass has ended since the last step."""
        return self._left is not None

    @torch.no_grad()
    def take(self, loss: Tensor | None, scale: LossScale) -> Statistics:
        """The statistics of the step, in one copy to the host; the next step starts afresh. Not a collective."""
        looks = self._looks(scale)
        extras = [t for t in (loss, scale.found_inf, scale.at_backward, scale.at_step) if t is not None]
        on_host = iter(_to_host([look.squares for look, _, _ in looks] + extras))
        squares = [next(on_host) for _ in looks]
        loss_value = None if loss is None else float(next(on_host))
        overflowed = scale.found_inf is not None and float(next(on_host)) > 0
        factors = {id(t): float(next(on_host)) for t in (scale.at_backward, scale.at_step) if t is not None}
        norms, findings = self._merge(squares, [(known, factors.get(id(t), 1.0)) for _, known, t in looks])
        at_step = squares[-1].sum().sqrt() / factors.get(id(scale.at_step), 1.0)
        self.forget()
        return Statistics(
            norms=norms,
            present=torch.stack([look.present for look, _, _ in looks]).any(dim=0),
            norm_at_step=float(at_step),
            findings=findings,
            loss=loss_value,
            scaled=scale.found_inf is not None,
            overflowed=overflowed,
            scale=max(factors.values(), default=None),
        )

    def _looks(self, scale: LossScale) -> list[tuple[Measurement, dict[int, Finding], Tensor | None]]:
        """One or two measurements, each with what is known of its faults and the loss scale that it carries."""
        looks = []
        if self._left is not None:
            looks.append((self._left, self._left_findings, scale.at_backward))
        if self._left is None or not self.reader.unchanged_since(self._left):
            looks.append((self.reader.read(), {}, scale.at_step))
        return looks

    def _merge(
        self, squares: list[Tensor], known: list[tuple[dict[int, Finding], float]]
    ) -> tuple[Tensor, dict[int, Finding]]:
        merged = torch.zeros(len(self.table.names), dtype=torch.float64)
        findings: dict[int, Finding] = {}
        for of_look, (earlier, factor) in zip(squares, known, strict=True):
            norms = of_look.sqrt() / factor
            findings = earlier or self._examine(of_look)
            for layer, finding in findings.items():
                norms[layer] = finding.norm / factor
            merged = torch.maximum(merged, norms)  # NaN wins
            if findings:
                break  # clipping by a non-finite norm spoils every layer: what it left says nothing
        return merged, findings

    def _examine(self, squares: Tensor) -> dict[int, Finding]:
        if bool(squares.sum().isfinite()):
            return {}
        suspects = squares.isfinite().logical_not().nonzero().flatten().tolist()
        return self.reader.examine(self.table.nearest_loss_first(suspects, self._trigger.fired))

    @torch.no_grad()
    def _backward_ended(self) -> None:
        self._left = self.reader.read()
        self.consumed = not bool(self._left.present.any())
        self._left_findings = self._examine(self._left.squares) if self._left.squares.device.type == "cpu" else {}


def _to_host(tensors: list[Tensor]) -> list[Tensor]:
    """All tensors on the host as float64, in a single copy where any lies on a device."""
    away = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
    if not away:
        return [tensor.double() for tensor in tensors]
    flat = torch.cat([tensor.to(away[0], torch.float64).reshape(-1) for tensor in tensors]).cpu()
    return list(torch.split(flat, [tensor.numel() for tensor in tensors]))
