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
        self._copying: list[tuple[torch.cuda.Stream, torch.cuda.Event]] = []

    def take(self, live: Mapping[Place, Tensor]) -> None:
        """Begins to copy ``live``. Waits for nothing, and on the CPU is done when it returns."""
        self.wait()
        self.tensors = {place: _storage_for(tensor, self.tensors.get(place)) for place, tensor in live.items()}
        by_device: dict[torch.device, list[Place]] = defaultdict(list)
        for place, tensor in live.items():
            by_device[tensor.device].append(place)
        for device, places in by_device.items():
            self._copy(device, [live[place] for place in places], [self.tensors[place] for place in places])

    def _copy(self, device: torch.device, live: list[Tensor], stored: list[Tensor]) -> None:
        if device.type != "cuda":
            torch._foreach_copy_(stored, live)
            return
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch._foreach_copy_(stored, live, non_blocking=True)
        for tensor in live:
            tensor.record_stream(stream)
        self._copying.append((stream, stream.record_event()))

    def fence(self) -> None:
        """Makes the device's coming work come after the copy. The host does not wait."""
        for stream, copied in self._copying:
            torch.cuda.current_stream(stream.device).wait_event(copied)

    def wait(self) -> None:
        """Waits until the copy is made."""
        for _, copied in self._copying:
            copied.synchronize()
        self._copying = []


def _storage_for(tensor: Tensor, spare: Tensor | None) -> Tensor:
    if spare is not None and (spare.shape, spare.dtype) == (tensor.shape, tensor.dtype):
        return spare
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
