"""Working under a ``torch.amp.GradScaler``.

The scaler calls ``step()`` also on an overflow, since the guard declares that it handles scaled gradients by itself:
otherwise a guard, and every other rank with it, would not learn of the overflow.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from stabilityguard.errors import ConfigurationError
from stabilityguard.measure.gradients import GradientReader
from stabilityguard.measure.window import LossScale

log = logging.getLogger("stabilityguard")


class LossScaling:
    """What the guard reads from a scaler, and tells it.

    Args:
        scaler: the one that scales the losses; without it, norms from before an explicit ``unscale_`` stay scaled.
    """

    def __init__(self, scaler: Any | None) -> None:
        self._scaler = scaler
        self._advised = False

    def read(self, guarded: Optimizer) -> LossScale:
        """The scale of the present gradients. Neither a collective nor a wait for the device."""
        at_step, found_inf = (guarded.__dict__.get(name) for name in ("grad_scale", "found_inf"))
        at_backward = at_step
        if self._scaler is not None and self._scaler.is_enabled():
            at_backward = self._scaler._scale
        return LossScale(at_backward=at_backward, at_step=at_step, found_inf=found_inf)

    def refuse_float16(self, reader: GradientReader, scale: LossScale, base: Optimizer) -> None:
        """Refuses what the scaler itself refuses when it unscales for an optimizer.

        Raises:
            ValueError: a gradient is float16, and the optimizer does not declare that it takes scaled gradients.
        """
        takes_scaled = scale.at_step is None or getattr(base, "_step_supports_amp_scaling", False)
        if not takes_scaled and torch.float16 in reader.dtypes():
            raise ValueError("Attempting to unscale FP16 gradients.")

    def advise(self, scale: LossScale) -> None:
        """Warns once where norms from before ``unscale_`` cannot be reported unscaled."""
        if scale.unscaled_unseen and not self._advised:
            self._advised = True
            log.warning("gradient norms include the loss scale after unscale_(); pass scaler= to GuardedOptimizer")

    def unscale(self, reader: GradientReader, scale: LossScale) -> None:
        """Divides the gradients by the scale that they still carry."""
        if scale.at_step is not None:
            reader.scale_(scale.at_step.double().reciprocal().float())

    def share(self, guarded: Optimizer, overflowed: Mapping[int, bool], *, rank: int) -> None:
        """Tells the scaler of an overflow that only other ranks saw, so that all scales stay alike.

        Args:
            guarded: the optimizer as the scaler knows it.
            overflowed: by rank, whether its scaler saw an overflow; ranks without a scaler are left out.
            rank: this one.

        Raises:
            ConfigurationError: the ranks' scalers saw different things, and the scaler is unknown here.
        """
        if len(set(overflowed.values())) <= 1:
            return
        if self._scaler is None:
            first = next(one for one, saw in overflowed.items() if saw)
            raise ConfigurationError(
                f"the GradScaler of rank {first} saw an overflow that others did not, so that their scales would go "
                "apart; pass scaler= to GuardedOptimizer on every rank"
            )
        if not overflowed.get(rank, True):
            self._write_flags(guarded, 1.0)

    def forgive(self, guarded: Optimizer) -> None:
        """Makes the scaler forget an overflow whose step was rolled back together with the scaler."""
        if self._scaler is not None and self._scaler.is_enabled():
            self._write_flags(guarded, 0.0)

    def _write_flags(self, guarded: Optimizer, value: float) -> None:
        assert self._scaler is not None
        for flag in self._scaler._per_optimizer_states[id(guarded)]["found_inf_per_device"].values():
            flag.fill_(value)


def has_overflowed(scale: LossScale) -> bool:
    """Whether the scaler saw a non-finite gradient. Waits for the device."""
    return scale.found_inf is not None and bool(scale.found_inf > 0)
