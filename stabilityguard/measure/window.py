"""The gradients of one optimizer step: as backward left them, and as ``step()`` finds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stabilityguard.detect.statistics import Finding
from stabilityguard.distributed.consensus import Shares
from stabilityguard.errors import StabilityGuardError
from stabilityguard.measure.backward import EndOfBackward
from stabilityguard.measure.gradients import Glance, GradientReader, Measurement
from stabilityguard.measure.layers import LayerTable
from stabilityguard.measure.stopwatch import Stopwatch

HALF_ROUNDING = 5e-3
"""Relative error that dividing 16-bit gradients may leave in a squared norm: bfloat16 has 8 bits."""


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
    """What is known of layers that are not finite here; None if that was not yet looked at."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What is seen of a step's gradients on this rank."""

    looks: tuple[_Look, ...]
    """As backward left them, and as ``step()`` finds them; one where both are the same."""

    own: Glance | None
    """As this rank alone had produced them, before a wrapper reduced them; None where that could not be had."""

    fired: tuple[int, ...]
    """Layers in the order in which backward reached them."""

    scale: LossScale
    passes: int
    rounding: float = 1e-5
    """Relative error that dividing the gradients may leave in a squared norm."""


class GradientWindow:
    """Measures at the end of every backward pass, and at ``step()`` where gradients have changed since.

    A look at the end of backward is queued on the device and not waited for. On the CPU, where there is nothing to wait
    for, non-finite gradients are examined at once, before the user's next line changes them; elsewhere at ``step()``.

    Args:
        table: whose gradients.
        on_backward_end: called after each backward pass.
        sees_own: whether a wrapper reduces the gradients at the end of backward, and leaves ``.grad`` as it is until
            then, so that a look in between shows this rank's own.
        in_order: whether autograd reaches the parameters in the order of the layers' use.
        find: where the gradients are at ``step()``, for those who keep them elsewhere than in ``.grad``; there is then
            nothing to measure at the end of backward.
        stopwatch: runs meanwhile.
    """

    def __init__(
        self,
        table: LayerTable,
        on_backward_end: Callable[[], None],
        *,
        sees_own: bool = False,
        in_order: bool = True,
        find: Callable[[], list[Tensor | None]] | None = None,
        stopwatch: Stopwatch,
    ) -> None:
        self.table = table
        self._stopwatch = stopwatch
        self.reader = GradientReader(table, find)
        self._measures_backward = find is None
        self._consumed = False
        self._on_backward_end = on_backward_end
        self._trigger = EndOfBackward(table, self._backward_ended, self._backward_ending if sees_own else None)
        self._left: _Look | None = None
        self._own: Glance | None = None
        self._passes = 0
        self._in_order, self._sees_own = in_order, sees_own

    def close(self) -> None:
        """Removes the hooks."""
        self._trigger.close()

    def follow_requires_grad(self) -> None:
        """Sets the hooks anew where parameters were frozen or unfrozen."""
        self._trigger.follow_requires_grad()

    def refuse_consumed(self) -> None:
        """Raises StabilityGuardError if the last backward pass ended with every gradient gone."""
        if self._consumed:
            raise StabilityGuardError(
                "backward ended with every gradient gone: a hook updates the parameters and clears their gradients "
                "inside backward, where nothing can stand before the update; call optimizer.step() afterwards instead"
            )

    def forget(self) -> None:
        """Drops what was measured: these gradients will not be stepped on."""
        self._left = self._own = None
        self._passes = 0
        self._trigger.forget()

    @property
    def _fired(self) -> tuple[int, ...]:
        return tuple(self._trigger.fired) if self._in_order else ()

    @property
    def measured(self) -> bool:
        """Whether a backward pass has ended since the last step, and its gradients are still there."""
        return self._left is not None and self.reader.unchanged_since(self._left.measurement)

    @torch.no_grad()
    def look(self, scale: LossScale) -> Sight:
        """What is there to be judged; the next step starts afresh. Neither a collective nor a wait for the device."""
        looks = () if self._left is None else (self._left,)
        if not self.measured or scale.unscaled_unseen or self.table.census.is_reduced_by_hand:
            looks = (*looks, _Look(measurement=self.reader.read(), findings=None))
        rounding = HALF_ROUNDING if self.reader.has_half else Sight.rounding
        sight = Sight(
            looks=looks, own=self._own, fired=self._fired, scale=scale, passes=self._passes, rounding=rounding
        )
        self.forget()
        return sight

    def nothing(self) -> Sight:
        """What a step without gradients looks like."""
        self.forget()
        return Sight(
            looks=(_Look(measurement=self.reader.nothing(), findings={}),),
            own=Glance(norms=(), layers=()) if self._sees_own else None,
            fired=(),
            scale=LossScale(),
            passes=0,
        )

    @torch.no_grad()
    def examine(self, sight: Sight, layers: Sequence[int], *, found: bool) -> dict[int, Finding]:
        """What is wrong here with those of ``layers`` that are not finite here, nearest the loss first.

        Looks at what ``step()`` finds, or else at what backward left. Waits for the device.
        """
        look = sight.looks[-1] if found else sight.looks[0]
        if look.findings is not None:
            wanted = set(layers)
            return {layer: finding for layer, finding in look.findings.items() if layer in wanted}
        return self._examine(look.measurement, sight.fired)

    def _examine(self, measurement: Measurement, fired: Sequence[int]) -> dict[int, Finding]:
        squares = self._with_raw(measurement)
        if math.isfinite(float(squares.sum())):
            return {}
        suspects = squares.isfinite().logical_not().nonzero().flatten().tolist()
        return self.reader.examine(self.table.nearest_loss_first(suspects, fired), squares)

    def _with_raw(self, measurement: Measurement) -> Tensor:
        """The squares, with those of this rank's terms of Partial gradients, which say whether these are finite."""
        if measurement.raw is None:
            return measurement.squares
        squares = measurement.squares.clone()
        for partial in self.table.census.partial:
            squares[partial.layer] += measurement.raw[partial.elements].square().sum()
        return squares

    @torch.no_grad()
    def _backward_ending(self) -> None:
        with self._stopwatch.running():
            self._own = self.reader.glance()

    @torch.no_grad()
    def _backward_ended(self) -> None:
        self._passes += 1
        with self._stopwatch.running():
            if self._measures_backward:
                self._measure()
            self._on_backward_end()

    def _measure(self) -> None:
        measurement = self.reader.read()
        self._consumed = not measurement.has_gradients and bool(self.table.held)
        on_cpu = measurement.squares.device.type == "cpu"
        findings = self._examine(measurement, self._fired) if on_cpu else None
        self._left = _Look(measurement=measurement, findings=findings)


@torch.no_grad()
def shares_of(sight: Sight, loss: Tensor | None) -> Shares:
    """What this rank adds to the sums, without the loss scale. Does not wait for the device."""
    scale, (left, found) = sight.scale, (sight.looks[0].measurement, sight.looks[-1].measurement)
    of_left = scale.at_backward if len(sight.looks) > 1 or sight.passes else scale.at_step
    of_found = scale.at_step if len(sight.looks) > 1 else of_left
    shares = Shares(
        left=_unscaled(left.squares, of_left, 2),
        found=_unscaled(found.squares, of_found, 2),
        left_raw=None if left.raw is None else _unscaled(left.raw, of_left, 1),
        found_raw=None if found.raw is None else _unscaled(found.raw, of_found, 1),
        present=left.present if left.present is found.present else left.present | found.present,
        loss=loss,
        overflow=_overflow(scale),
        scale_left=of_left,
        scale_found=of_found,
        passes=sight.passes,
    )
    return _averaged(shares, sight.rounding) if len(sight.looks) > 1 and sight.passes > 1 else shares


def _unscaled(values: Tensor, scale: Tensor | None, power: int) -> Tensor:
    if scale is None:
        return values
    factor = scale.detach().double().to(values.device).reshape(())
    return values / torch.where(factor == 0, 1.0, factor) ** power  # a scale of zero has left nothing to unscale


def _overflow(scale: LossScale) -> Tensor | None:
    """Above zero where the scaler saw a non-finite gradient, or has come down to zero."""
    if scale.found_inf is None:
        return None
    overflow = scale.found_inf.detach().double().reshape(())
    for factor in (scale.at_backward, scale.at_step):
        if factor is not None:
            overflow = overflow + (factor.detach().reshape(()) == 0).double().to(overflow.device)
    return overflow


def _averaged(shares: Shares, tolerance: float) -> Shares:
    """The same, where ``step()`` finds gradients divided by a number of backward passes.

    That is no clipping that would hide something: pipelines and hand-written accumulation end so. A rank that holds
    several stages of a pipeline has made more passes than each of its layers has seen.
    """
    squares, raw = (shares.left, shares.found), (shares.left_raw, shares.found_raw)
    most = shares.passes
    return replace(
        shares,
        left=squares[0] / _divisors(*squares, lambda ratio: ratio.sqrt().round().square(), most**2, tolerance),
        left_raw=raw[0]
        if raw[0] is None or raw[1] is None
        else raw[0] / _divisors(raw[0], raw[1], torch.round, most, tolerance),
    )


def _divisors(left: Tensor, found: Tensor, rounded: Callable[[Tensor], Tensor], most: int, tolerance: float) -> Tensor:
    """By what each of ``left`` was divided to become ``found``: 1 unless that is a number of passes up to ``most``."""
    divisor = rounded(left / found)
    is_number = (divisor > 1) & (divisor <= most) & ((left - found * divisor).abs() <= tolerance * left.abs())
    return torch.where(is_number, divisor, 1.0)
