"""DeepSpeed's optimizers as they are inside: where gradients and masters lie, and how a step is skipped.

Nothing but the classes below ``Partition`` touches their private attributes, all of which are looked for before an
engine is guarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabilityguard.distributed.deepspeed.fragments import Fragment


class Partition:
    """One engine's optimizer, which splits the parameters over ranks in its own way.

    Args:
        engine: the ``DeepSpeedEngine``.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Attributes of ``engine.optimizer`` without which it cannot be guarded."""

    has_whole_parameters = True
    """Whether every rank holds the parameters themselves whole."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self.groups = self._groups()
        self.parameters = [parameter for group in self.groups for parameter in group]
        self.fragments = {fragment.parameter: fragment for fragment in self._fragments() if fragment.numel}

    @property
    def base(self) -> Optimizer:
        """The torch optimizer that updates."""
        base: Optimizer = self._optimizer.optimizer
        return base

    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients of this rank's fragments, before clipping and still with the loss scale."""
        raise NotImplementedError

    @property
    def loss_scale(self) -> float | None:
        """The factor that the gradients carry; None where DeepSpeed does not scale the loss."""
        return None

    @property
    def scaler(self) -> Any | None:
        """The object in which the state of DeepSpeed's loss scale is."""
        return None

    def skipping(self) -> AbstractContextManager[None]:
        """Within it, the engine's own step takes the way of an overflow, and leaves the loss scale as it is."""
        raise NotImplementedError

    def overflowing(self) -> AbstractContextManager[None]:
        """The same, with the loss scale moved as by an overflow, where DeepSpeed scales the loss.

        DeepSpeed's own look is not relied on: with offload it comes before the gradients are final.
        """
        return self.skipping()

    def held(self, parameter: Any) -> Tensor:
        """What this rank holds of the parameter itself."""
        whole: Tensor = parameter.detach()
        return whole

    def shape(self, parameter: Any) -> torch.Size:
        """Of the whole parameter."""
        return torch.Size(parameter.shape)

    def before_update(self) -> None:
        """To be called before the engine's own step."""

    def before_writing(self) -> None:
        """To be called before anything of the state is written to."""

    def after_writing(self) -> None:
        """To be called after that."""

    def _groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each of the base optimizer's groups."""
        raise NotImplementedError

    def _fragments(self) -> Iterator[Fragment]:
        raise NotImplementedError


def nothing(*_: Any, **__: Any) -> None:
    """Stands in for a method that must not run."""
