"""The buffers that a forward pass writes to (BatchNorm statistics and the like), as of the last applied step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stabilityguard.measure.modules import child_name

Stamp = tuple["weakref.ref[Tensor] | None", int]
"""A buffer, held weakly, and its version; an address could be reused."""


@dataclass(frozen=True)
class BufferSlot:
    """Where a buffer lives; a forward pass may write to the tensor or put another one, or None, in its place."""

    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor | None:
        """The present buffer without its graph, None if there is none."""
        buffer = self.module._buffers.get(self.key)
        return None if buffer is None or not _is_plain(buffer) else buffer.detach()

    def stamp(self) -> Stamp:
        """Marks the present buffer."""
        buffer = self.module._buffers.get(self.key)
        return (None, 0) if buffer is None else (weakref.ref(buffer), _version(buffer))

    def is_at(self, stamp: Stamp) -> bool:
        """Whether the marked buffer is still there, and was not written to in a way that shows."""
        reference, version = stamp
        buffer = self.module._buffers.get(self.key)
        if buffer is None or reference is None:
            return buffer is None and reference is None
        return reference() is buffer and _version(buffer) == version

    def put(self, value: Tensor) -> None:
        """Writes ``value`` into the present buffer, or a copy of it in the buffer's place where they are not alike."""
        present = self.tensor
        if present is not None and _alike(present, value) and not _overlaps(present):
            present.copy_(value)
        elif present is None or not torch.equal(present, value):
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
        if owned and buffer is not None and _is_plain(buffer):
            yield prefix + key, BufferSlot(module, key)
    for key, child in module._modules.items():
        if child is not None:
            yield from _owned(child, child_name(module, name, key), owned, wanted)


class BufferKeeper:
    """Puts back the buffers that the forward of a skipped step has touched.

    All buffers are copied before the first step; after it, only those of modules where one has moved stay copied, and
    are refreshed at every applied step. A module that first writes to its buffers later is kept from then on.
    """

    def __init__(self, slots: dict[str, BufferSlot]) -> None:
        self._slots = slots
        present = {name: slot.tensor for name, slot in slots.items()}
        self._copies = {name: tensor.clone() for name, tensor in present.items() if tensor is not None}
        self._constants: dict[str, Stamp] | None = None

    def refresh(self) -> None:
        """Copies the live buffers; call it when a step was applied. No wait, except at the first call."""
        if self._constants is None:
            self._drop_constants()
        self._adopt(self._moved())
        self._copy_live()

    def copy(self) -> None:
        """Takes the present buffers, constants included, for what they should be: they were just restored."""
        self._copy_live()
        if self._constants is not None:
            self._constants = {name: self._slots[name].stamp() for name in self._constants}

    @property
    def copies(self) -> dict[str, Tensor]:
        """The copies of the live buffers, by name."""
        return self._copies

    def restore(self) -> tuple[list[str], list[str]]:
        """Puts the copies back. Returns the names restored, and the names touched of which there was no copy."""
        restored = [name for name in self._copies if self._differs(name)]
        for name in restored:
            self._slots[name].put(self._copies[name])
        touched = self._moved()
        self._adopt(touched)
        return restored, touched

    def _copy_live(self) -> None:
        for name, copy in self._copies.items():
            tensor = self._slots[name].tensor
            if tensor is not None and _alike(copy, tensor):
                copy.copy_(tensor)
            elif tensor is not None:
                self._copies[name] = tensor.clone()

    def _drop_constants(self) -> None:
        live = self._beside([name for name in self._copies if self._differs(name)])
        self._copies = {name: copy for name, copy in self._copies.items() if name in live}
        self._constants = {name: slot.stamp() for name, slot in self._slots.items() if name not in live}

    def _differs(self, name: str) -> bool:
        tensor = self._slots[name].tensor
        return tensor is None or not torch.equal(self._copies[name], tensor)

    def _moved(self) -> list[str]:
        """Constants that were written to; BatchNorm counts its batches visibly, but not its running statistics."""
        constants = self._constants or {}
        beside = self._beside([name for name, stamp in constants.items() if not self._slots[name].is_at(stamp)])
        return [name for name in constants if name in beside]

    def _beside(self, names: list[str]) -> set[str]:
        """``names`` and all other buffers of their modules."""
        modules = {self._slots[name].module for name in names}
        return {name for name, slot in self._slots.items() if slot.module in modules} if modules else set()

    def _adopt(self, names: list[str]) -> None:
        assert self._constants is not None or not names
        for name in names:
            tensor = self._slots[name].tensor
            if tensor is not None and self._constants is not None:
                self._copies[name] = tensor.clone()
                del self._constants[name]


def _is_plain(buffer: Tensor) -> bool:
    """Whether the buffer can be copied and compared: sparse, nested, quantized and meta tensors are left alone."""
    return buffer.layout == torch.strided and not (buffer.is_nested or buffer.is_quantized or buffer.is_meta)


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _alike(first: Tensor, second: Tensor) -> bool:
    return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
