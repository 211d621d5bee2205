"""The ranks that step one model together, and the calls by which they speak; one process has nobody to speak to."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from stabilityguard.errors import ConfigurationError

log = logging.getLogger("stabilityguard")

GLOO_NEEDS: Final = 0.5
"""Seconds, ample, in which its threads release the last tensors; an interpreter that ends meanwhile aborts."""

_groups: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Our own group for every group that a user trains with, by what distinguishes its settings."""


class Peers:
    """The ranks of one process group, in its order.

    Args:
        group: the process group that the guard speaks over, or None for one process alone.
        device: where that group takes tensors.
        rank: the global rank of one process alone.
    """

    def __init__(self, group: Any | None, device: torch.device, *, rank: int = 0) -> None:
        self._group = group
        self.device = device
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group)) if group is not None else (rank,)
        """Global rank of every member."""
        self.place: int = dist.get_rank(group) if group is not None else 0
        """Index of this rank in ``ranks``."""

    @classmethod
    def of(cls, process_group: Any | None, parameters: Iterable[Tensor], timeout: timedelta | None = None) -> Peers:
        """The members of ``process_group`` (None: all ranks) over a group of the guard's own.

        A group of one's own, since a collective in between could be paired with a gradient bucket's. It is created
        once for all guards, by a collective call over the members.
        """
        available = dist.is_available() and dist.is_initialized()
        if process_group is not None and not available:
            raise ConfigurationError("process_group was given, but torch.distributed is not initialized")
        if not available:
            return ALONE
        if hasattr(process_group, "get_group"):
            raise ConfigurationError(
                "process_group is a DeviceMesh; pass the group of one of its dimensions: get_group()"
            )
        if dist.get_world_size(process_group) == 1:
            return cls(None, ALONE.device, rank=dist.get_rank())
        if dist.get_rank(process_group) < 0:
            raise ConfigurationError(f"rank {dist.get_rank()} is no member of process_group; guard on its members only")
        parent = dist.group.WORLD if process_group is None else process_group
        return cls(_own_group(parent, timeout), _device_for(parent, parameters))

    def apart(self) -> Peers:
        """The same ranks over a group that nobody else uses, on the host. A collective over them, unless alone."""
        if self._group is None:
            return self
        return Peers(_new_group(self._group, _timeout_of(self._group), backend="gloo"), torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.ranks)

    def all_reduce(self, vector: Tensor, doing: str) -> None:
        """Sums ``vector`` over the ranks, in place. A collective; ``doing`` says what for if it fails."""
        if self._group is not None:
            with self._explained(doing):
                dist.all_reduce(vector, group=self._group)

    def gather(self, value: Any, doing: str) -> list[Any]:
        """The ``value`` of every rank, in order: anything that pickles. Collective calls, and a wait for the device."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * len(self)
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with self._explained(doing), on_device:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def wait_for_gloo(self) -> None:
        """To be called before the interpreter may end; see ``GLOO_NEEDS``."""
        if self._group is not None and self.device.type == "cpu":
            time.sleep(GLOO_NEEDS)

    @contextlib.contextmanager
    def sharing_errors(self, doing: str) -> Iterator[None]:
        """Raises ConfigurationError on every rank if the block raises on one. Collective calls at the block's end."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        kind = "" if isinstance(problem, ConfigurationError) else f"{type(problem).__name__}: "
        problems = self.gather(None if problem is None else f"{kind}{problem}", doing)
        if problem is not None:
            raise problem
        for rank, text in zip(self.ranks, problems, strict=True):
            if text is not None:
                raise ConfigurationError(f"rank {rank}: {text}")

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            rank, ranks = self.ranks[self.place], ", ".join(map(str, self.ranks))
            reason = str(error).strip().partition("\n")[0]
            log.error("rank %d lost its peers while it was %s with ranks %s: %s", rank, doing, ranks, reason)
            raise


ALONE = Peers(None, torch.device("cpu"))


def _own_group(parent: Any, timeout: timedelta | None) -> Any:
    known = _groups.setdefault(parent, {})
    limit = _timeout_of(parent) if timeout is None else timeout
    if limit not in known:
        known[limit] = _new_group(parent, limit, backend=dist.get_backend_config(parent))
    return known[limit]


def _new_group(parent: Any, timeout: timedelta | None, *, backend: Any) -> Any:
    ranks = dist.get_process_group_ranks(parent)
    return dist.new_group(
        ranks,
        timeout=timeout,
        backend=backend,
        use_local_synchronization=len(ranks) < dist.get_world_size(),  # only the members construct a guard
        group_desc="stabilityguard",
    )


def _timeout_of(group: Any) -> timedelta | None:
    """How long ``group`` itself waits for a lost rank; None if it does not say."""
    try:
        timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None
    return timeout


def _device_for(group: Any, parameters: Iterable[Tensor]) -> torch.device:
    """The parameters' device if ``group`` takes tensors there, else the host if it does, else its accelerator."""
    supported = [device.type for device in group._device_types]
    for parameter in parameters:
        if parameter.device.type in supported:
            return parameter.device
    if "cpu" in supported:
        return torch.device("cpu")
    return torch.device(supported[0], torch.get_device_module(supported[0]).current_device())
