"""Which run of each parameter's elements this rank updates, and where DeepSpeed keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Fragment:
    """The elements ``start`` to ``start + numel`` of one flattened parameter."""

    parameter: nn.Parameter
    start: int
    numel: int

    master: Tensor
    """What the optimizer updates, and keeps its state by: a flat tensor of many parameters, or of one; it may be the
    parameter itself."""

    offset: int = 0
    """Place of the first element within the flattened ``master``."""

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates another tensor than the parameter."""
        return self.master is not self.parameter

    def within(self, flat: Tensor) -> Tensor:
        """The view of the fragment, shape (numel,), in a tensor that is laid out like ``master``."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)


def side_by_side(parameters: Iterable[nn.Parameter], master: Tensor) -> Iterator[Fragment]:
    """Whole parameters, one after the other in a flat tensor."""
    offset = 0
    for parameter in parameters:
        yield Fragment(parameter, 0, parameter.numel(), master, offset)
        offset += parameter.numel()


def one_by_one(parameters: Sequence[nn.Parameter], masters: Sequence[Tensor]) -> Iterator[Fragment]:
    """Whole parameters, each with a tensor of its own."""
    for parameter, master in zip(parameters, masters, strict=True):
        yield Fragment(parameter, 0, parameter.numel(), master)
