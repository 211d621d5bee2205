"""Hooks that go when their owner goes."""

from __future__ import annotations

import weakref

from torch.utils.hooks import RemovableHandle


class Hooks:
    """Handles that are removed by ``close()``, or when ``owner`` is no longer referenced.

    The hooks themselves must not hold the owner strongly.
    """

    def __init__(self, owner: object) -> None:
        self._handles: list[RemovableHandle] = []
        weakref.finalize(owner, _remove, self._handles).atexit = False

    def add(self, handle: RemovableHandle) -> None:
        """Takes charge of one more."""
        self._handles.append(handle)

    def close(self) -> None:
        """Removes all."""
        _remove(self._handles)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
