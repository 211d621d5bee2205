"""Uneven data: a rank that has run out of it, inside ``with ddp.join():``, still takes part in the others' steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from stabilityguard.measure.modules import data_parallel_wrappers


class JoinedRank:
    """Has ``shadow_step`` called for every step that the other ranks make after this one has run out of data.

    DistributedDataParallel mirrors its own collectives by hooks that it makes when ``join()`` is entered; ours is put
    around them. A step of the others is taken to have as many of the wrapper's reductions as this rank's own steps had.
    """

    def __init__(self, model: nn.Module, shadow_step: Callable[[], None]) -> None:
        wrappers = data_parallel_wrappers(model)
        self._wrapper = wrappers[0] if wrappers else None
        self._shadow_step = weakref.WeakMethod(shadow_step)
        self._reductions = 0
        self._reductions_of_a_step = 1
        if self._wrapper is not None:
            maker = self._wrapper.__dict__.setdefault("join_hook", _HookMaker(self._wrapper))
            maker.joined_ranks.append(self)

    def backward_ended(self) -> None:
        """Counts a backward pass of this rank."""
        if self._wrapper is not None:
            self._reductions += bool(self._wrapper.require_backward_grad_sync)

    def step_ended(self) -> None:
        """Takes note of how many reductions this rank's own step had, and counts anew."""
        self._reductions_of_a_step = max(self._reductions, self._reductions_of_a_step)
        self._reductions = 0
        if self._wrapper is not None:  # several guards are called in the order in which they step
            joined_ranks = self._wrapper.__dict__["join_hook"].joined_ranks
            joined_ranks.remove(self)
            joined_ranks.append(self)

    def forget(self) -> None:
        """Counts anew: the passes so far lead to no step."""
        self._reductions = 0

    def others_reduced(self) -> None:
        """Takes note of one of the others' reductions, which may be the last of their step."""
        self._reductions += 1
        shadow_step = self._shadow_step()
        if shadow_step is not None and self._reductions >= self._reductions_of_a_step:
            self._reductions = 0
            shadow_step()

    def close(self) -> None:
        """Leaves the wrapper as it was."""
        if self._wrapper is not None:
            maker = self._wrapper.__dict__["join_hook"]
            maker.joined_ranks.remove(self)
            if not maker.joined_ranks:
                del self._wrapper.__dict__["join_hook"]
            self._wrapper = None


class _HookMaker:
    """Stands for the wrapper's ``join_hook``; in copies of the wrapper it makes the wrapper's own hooks alone."""

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self.joined_ranks: list[JoinedRank] = []

    def __call__(self, **options: Any) -> Any:
        theirs: Any = type(self._wrapper).join_hook(self._wrapper, **options)  # type: ignore[no-untyped-call]
        return _JoinHook(theirs, self._wrapper, self.joined_ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return _HookMaker, (self._wrapper,)


class _JoinHook:
    """What torch calls on a rank that has joined: once for every iteration of the others, and when all have."""

    def __init__(self, theirs: Any, wrapper: Any, joined_ranks: list[JoinedRank]) -> None:
        self._theirs, self._wrapper, self._joined_ranks = theirs, wrapper, joined_ranks

    def main_hook(self) -> None:
        self._theirs.main_hook()
        if self._wrapper.require_forward_param_sync:  # the gradients of this iteration were reduced
            for joined_rank in list(self._joined_ranks):
                joined_rank.others_reduced()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._theirs.post_hook(is_last_joiner)
