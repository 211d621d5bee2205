"""The buffers that a forward pass writes to (BatchNorm statistics and the like), as of the last applied step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class BufferSlot:
    """Where a buffer lives; a forward pass may write to the tensor or put another one in its place."""

    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """The present buffer, without its graph."""
        buffer = self.module._buffers[self.key]
        assert buffer is not None
        return buffer.detach()

    @property
    def stamp(self) -> tuple[int, int]:
        """Identity and version of the present buffer."""
        buffer = self.module._buffers[self.key]
        return id(buffer), -1 if buffer is None else buffer._version

    def put(self, value: Tensor) -> None:
        """Writes ``value`` into the present buffer, or a copy of it in the buffer's place where the shape differs."""
        present = self.module._buffers[self.key]
        if present is not None and present.shape == value.shape:
            present.detach().copy_(value)
        else:
            self.module._buffers[self.key] = value.clone()


def owned_buffers(model: nn.Module, parameters: Iterable[Tensor]) -> dict[str, BufferSlot]:
    """The buffers of the part of ``model`` that an optimizer over ``parameters`` trains, by qualified name.

    A module without parameters of its own or below it belongs to the nearest parent that has some.
    """
    return dict(_owned(model, "", False, set(parameters)))


def _owned(module: nn.Module, name: str, inherited: bool, wanted: set[Tensor]) -> Iterator[tuple[str, BufferSlot]]:
    below = list(module.parameters())
    owned = any(parameter in wanted for parameter in below) if below else inherited
    prefix = f"{name}." if name else ""
    for key, buffer in module._buffers.items():
        if owned and buffer is not None:
            yield prefix + key, BufferSlot(module, key)
    for key, child in module._modules.items():
        if child is not None:
            yield from _owned(child, prefix + key, owned, wanted)


class BufferKeeper:
    """Puts back the buffers that the forward of a skipped step has touched.

    All buffers are copied before the first step; after it, only those of modules where one has moved stay copied, and
    are refreshed at every applied step. A module that first writes to its buffers later is kept from then on.
    """

    def __init__(self, slots: dict[str, BufferSlot]) -> None:
        self._slots = slots
        self._copies = {name: slot.tensor.clone() for name, slot in slots.items()}
        self._constants: dict[str, tuple[int, int]] | None = None

    def refresh(self) -> None:
        """Copies the live buffers; call it when a step was applied. No wait, except at the first call."""
        if self._constants is None:
            self._drop_constants()
        self._adopt(self._moved())
        for name, copy in self._copies.items():
            copy.copy_(self._slots[name].tensor)

    def restore(self) -> tuple[list[str], list[str]]:
        """Puts the copies back. Returns the names restored, and the names touched of which there was no copy."""
        restored = [name for name, copy in self._copies.items() if not torch.equal(copy, self._slots[name].tensor)]
        for name in restored:
            self._slots[name].put(self._copies[name])
        touched = self._moved()
        self._adopt(touched)
        return restored, touched

    def _drop_constants(self) -> None:
        moved = [name for name, copy in self._copies.items() if not torch.equal(copy, self._slots[name].tensor)]
        live = self._beside(moved)
        self._copies = {name: copy for name, copy in self._copies.items() if name in live}
        self._constants = {name: slot.stamp for name, slot in self._slots.items() if name not in live}

    def _moved(self) -> list[str]:
        """Constants that were written to; BatchNorm counts its batches visibly, but not its running statistics."""
        constants = self._constants or {}
        beside = self._beside([name for name, stamp in constants.items() if self._slots[name].stamp != stamp])
        return [name for name in constants if name in beside]

    def _beside(self, names: list[str]) -> set[str]:
        """``names`` and all other buffers of their modules."""
        modules = {self._slots[name].module for name in names}
        return {name for name, slot in self._slots.items() if slot.module in modules} if modules else set()

    def _adopt(self, names: list[str]) -> None:
        for name in names:
            self._copies[name] = self._slots[name].tensor.clone()
            assert self._constants is not None
            del self._constants[name]
