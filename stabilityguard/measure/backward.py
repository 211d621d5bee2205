"""The end of a backward pass, seen before the user's next line runs.

Post-accumulate-grad hooks sit on one parameter of each layer of torch's own, and on all of the others. The first that
fires in a backward pass queues a callback on the autograd engine, and that one queues a second: the second runs after
the finalisation of DDP and FSDP, when every ``.grad`` is final, and before ``backward()`` returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd import Variable

from stabilityguard.measure.hooks import Hooks
from stabilityguard.measure.layers import LayerTable

_requires_grad = attrgetter("requires_grad")


class EndOfBackward:
    """Calls ``on_end`` at the end of every backward pass that reaches a layer of the table.

    The hooks hold this object weakly: a guard that is dropped without ``close()`` costs nothing more.
    """

    def __init__(self, table: LayerTable, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._pass = _Pass(weakref.ref(self))
        self._hooks = Hooks(self)
        self._table = table
        self._trainable: list[bool] = []
        self.follow_requires_grad()

    @property
    def fired(self) -> list[int]:
        """Layers in the order in which backward passes last reached them, since ``forget()``."""
        return list(self._pass.fired)

    def forget(self) -> None:
        """Starts the order anew."""
        self._pass.fired.clear()

    def close(self) -> None:
        """Removes every hook."""
        self._hooks.close()

    def follow_requires_grad(self) -> None:
        """Sets the hooks anew where parameters were frozen or unfrozen since."""
        trainable = list(map(_requires_grad, self._table.parameters))
        if trainable != self._trainable:
            self._trainable = trainable
            self._hooks.close()
            self._attach(self._table)

    def _attach(self, table: LayerTable) -> None:
        hooked = set()
        for parameter, layer in zip(table.parameters, table.layer_of, strict=True):
            if parameter.requires_grad and not (layer in hooked and layer in table.uniform):
                hooked.add(layer)
                hook = _hook(self._pass, layer)
                self._hooks.add(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


class _Pass:
    """The backward pass under way."""

    def __init__(self, trigger: weakref.ref[EndOfBackward]) -> None:
        self._trigger = trigger
        self.graph_task = -1
        self.fired: dict[int, None] = {}

    def begin(self, graph_task: int) -> None:
        # The task's number, not a flag: a backward pass that raises would leave a flag set for ever.
        self.graph_task = graph_task
        _queue(lambda: _queue(self._end))

    def _end(self) -> None:
        trigger = self._trigger()
        if trigger is not None:
            trigger._on_end()


def _hook(under_way: _Pass, layer: int) -> Callable[[Tensor], None]:
    current_graph_task, fired = torch._C._current_graph_task_id, under_way.fired

    def hook(_: Tensor) -> None:
        if under_way.graph_task != (graph_task := current_graph_task()):
            under_way.begin(graph_task)
        if layer in fired:
            del fired[layer]  # the last time counts: recomputation reaches tied layers more than once
        fired[layer] = None

    return hook


def _queue(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)
