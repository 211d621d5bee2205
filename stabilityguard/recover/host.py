"""Copies of training state in host memory, made in a few operations and, from a device, beside its computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from stabilityguard.distributed.layout import Place


class HostCopy:
    """A copy of some tensors, whose memory is allocated once and used again; pinned, for tensors of a CUDA device.

    Copies from a CUDA device are made on a stream of their own. Whatever writes to the tensors next has to come after
    ``fence()``, and whatever reads the copy after ``wait()``.
    """

    def __init__(self) -> None:
        self.tensors: dict[Place, Tensor] = {}
        """Contiguous; valid after ``wait()``."""
        self.is_torn = False
        """Whether something wrote to the tensors before the fence, so that the copy is of no use."""
        self._copying: list[tuple[torch.cuda.Stream, torch.cuda.Event]] = []
        self._sources: list[tuple[Tensor, int]] = []

    def take(self, live: Mapping[Place, Tensor]) -> None:
        """Begins to copy ``live``. Waits for nothing, and on the CPU is done when it returns."""
        self.wait()
        self.is_torn = False
        self.tensors = {place: _storage_for(tensor, self.tensors.get(place)) for place, tensor in live.items()}
        rooms: dict[tuple[torch.device, bool], list[Place]] = defaultdict(list)
        for place, tensor in live.items():
            rooms[tensor.device, place[0] == "buffer"].append(place)
        for (device, are_buffers), places in sorted(rooms.items(), key=lambda room: not room[0][1]):  # buffers first
            sources, targets = [live[place] for place in places], [self.tensors[place] for place in places]
            if device.type == "cuda" and not are_buffers:
                self._copy_beside(device, sources, targets)
            else:  # a forward may write to buffers, which is later work of the same stream
                torch._foreach_copy_(targets, sources, non_blocking=True)

    def _copy_beside(self, device: torch.device, sources: list[Tensor], targets: list[Tensor]) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for tensor in sources:
            tensor.record_stream(stream)
        self._copying.append((stream, stream.record_event()))
        self._sources += [(tensor, tensor._version) for tensor in sources]

    def fence(self) -> None:
        """Makes the device's coming work come after the copy. The host does not wait."""
        self.is_torn |= any(tensor._version != version for tensor, version in self._sources)
        self._sources = []
        for stream, copied in self._copying:
            torch.cuda.current_stream(stream.device).wait_event(copied)

    def wait(self) -> None:
        """Waits until the copy is made."""
        self.fence()
        for _, copied in self._copying:
            copied.synchronize()
        self._copying = []


def _storage_for(tensor: Tensor, spare: Tensor | None) -> Tensor:
    if spare is not None and (spare.shape, spare.dtype) == (tensor.shape, tensor.dtype):
        return spare
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
