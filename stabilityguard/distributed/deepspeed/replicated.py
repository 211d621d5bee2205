"""Stage 0 of ZeRO: every rank has all gradients, and updates everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stabilityguard.distributed.deepspeed.fragments import Fragment, one_by_one, side_by_side
from stabilityguard.distributed.deepspeed.overrides import overridden
from stabilityguard.distributed.deepspeed.partition import Partition, nothing


class _Replicated(Partition):
    """What is the same for all of them."""

    def gradients(self) -> dict[Tensor, Tensor]:
        """Those in ``.grad``."""
        return {p: p.grad.detach() for p in self.parameters if p.grad is not None}


class PlainOptimizer(_Replicated):
    """Stage 0 in float32: a torch optimizer as it is."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._optimizer.overflow = False  # those who ask for it must find it from the beginning

    @property
    def base(self) -> Optimizer:
        """Itself."""
        optimizer: Optimizer = self._optimizer
        return optimizer

    def before_update(self) -> None:
        """Ends the overflow that a skipped step has left."""
        self._optimizer.overflow = False

    def skipping(self) -> AbstractContextManager[None]:
        """Without clipping and update; ``overflow`` stays set until the next good step, as others ask for it."""
        self._optimizer.overflow = True
        return overridden((self._engine, "clip_fp32_gradients", nothing), (self._optimizer, "step", nothing))

    def _groups(self) -> list[list[nn.Parameter]]:
        return [[p for p in group["params"] if p.requires_grad] for group in self._optimizer.param_groups]

    def _fragments(self) -> Iterator[Fragment]:
        return one_by_one(self.parameters, self.parameters)


class LowPrecisionOptimizer(_Replicated):
    """Stage 0 in 16 bits: ``FP16_Optimizer`` with a flat master for each group, ``FP16_UnfusedOptimizer`` without."""

    needs = ("fp16_groups", "loss_scale_config", "_skip_invalid_grad_norm", "_update_scale", "overflow")

    @property
    def scaler(self) -> Any | None:
        """Its ``loss_scale_config``."""
        return self._optimizer.loss_scale_config

    def skipping(self) -> AbstractContextManager[None]:
        """By its own way of passing over a step."""
        skip = self._optimizer._skip_invalid_grad_norm
        return overridden(
            (self._optimizer, "_update_scale", nothing), (self._optimizer, "step", lambda *_, **__: skip())
        )

    def _groups(self) -> list[list[nn.Parameter]]:
        return [list(group) for group in self._optimizer.fp16_groups]

    def _fragments(self) -> Iterator[Fragment]:
        flat = getattr(self._optimizer, "fp32_groups_flat", None)
        for i, group in enumerate(self.groups):
            yield from (
                one_by_one(group, self._optimizer.fp32_groups[i]) if flat is None else side_by_side(group, flat[i])
            )
