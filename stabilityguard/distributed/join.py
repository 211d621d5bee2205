"""Uneven data: a rank that has run out of it, inside ``with ddp.join():``, still takes part in the others' steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class JoinedRank:
    """Has ``shadow_step`` called for every step that the other ranks make after this one has run out of data.

    DistributedDataParallel mirrors its own collectives by hooks that it makes when ``join()`` is entered; ours is put
    around them. ``shadow_step`` is held weakly.
    """

    def __init__(self, model: nn.Module, shadow_step: Callable[[], None]) -> None:
        wrappers = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
        self._wrapper = wrappers[0] if wrappers else None
        if self._wrapper is not None:
            hook = _making_ours(self._wrapper.join_hook, weakref.WeakMethod(shadow_step))
            self._wrapper.__dict__["join_hook"] = hook

    def close(self) -> None:
        """Leaves the wrapper as it was."""
        if self._wrapper is not None:
            self._wrapper.__dict__.pop("join_hook", None)
            self._wrapper = None


def _making_ours(make_hook: Callable[..., Any], shadow_step: weakref.WeakMethod[Callable[[], None]]) -> Any:
    return lambda **options: _JoinHook(make_hook(**options), shadow_step)


class _JoinHook:
    """What torch calls on a rank that has joined: once for every iteration of the others, and when all have."""

    def __init__(self, theirs: Any, shadow_step: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._theirs, self._shadow_step = theirs, shadow_step

    def main_hook(self) -> None:
        self._theirs.main_hook()
        shadow_step = self._shadow_step()
        if shadow_step is not None and self._theirs.ddp.require_forward_param_sync:  # no step follows without a sync
            shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._theirs.post_hook(is_last_joiner)
