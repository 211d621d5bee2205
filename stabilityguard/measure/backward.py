"""The end of a backward pass, seen before the user's next line runs.

Post-accumulate-grad hooks sit on one parameter of each layer of torch's own, and on all of the others. The first that
fires in a backward pass queues a callback on the autograd engine, and that one queues a second: the second runs after
the finalisation of DDP and FSDP, when every ``.grad`` is final, and before ``backward()`` returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd import Variable

from stabilityguard.measure.hooks import Hooks
from stabilityguard.measure.layers import LayerTable

_requires_grad = attrgetter("requires_grad")

_NO_TASK = -1
"""Pipelines reduce FSDP's gradients, and so call its hooks, when no backward pass is under way."""


class EndOfBackward:
    """Calls ``on_end`` at the end of every backward pass that reaches a layer of the table.

    ``on_ending`` is called before that, when autograd has come to its end and wrappers are about to finish theirs.

    The hooks hold this object weakly: a guard that is dropped without ``close()`` costs nothing more.
    """

    def __init__(
        self, table: LayerTable, on_end: Callable[[], None], on_ending: Callable[[], None] | None = None
    ) -> None:
        self._on_end, self._on_ending = on_end, on_ending
        self._pass = _Pass(weakref.ref(self))
        self._hooks = Hooks(self)
        self._table = table
        self._triggers = _layers_of_triggers(table)
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
        trainable = list(map(_requires_grad, self._triggers))
        if trainable != self._trainable:
            self._trainable = trainable
            self._hooks.close()
            self._attach()

    def _attach(self) -> None:
        hooked: set[int] = set()
        for trigger, layers in self._triggers.items():
            is_covered = all(layer in hooked and layer in self._table.uniform for layer in layers)
            if trigger.requires_grad and not is_covered:
                hooked.update(layers)
                self._hooks.add(trigger.register_post_accumulate_grad_hook(_hook(self._pass, layers)))  # type: ignore[no-untyped-call]


def _layers_of_triggers(table: LayerTable) -> dict[Tensor, list[int]]:
    """The layers whose gradients are there once autograd has accumulated into each tensor, nearest the loss first."""
    triggers: dict[Tensor, list[int]] = {}
    for shard, layer in zip(table.shards, table.layer_of, strict=True):
        layers = triggers.setdefault(shard.parameter if shard.trigger is None else shard.trigger, [])
        if layer not in layers:
            layers.insert(0, layer)
    return triggers


class _Pass:
    """The backward pass under way."""

    def __init__(self, trigger: weakref.ref[EndOfBackward]) -> None:
        self._trigger = trigger
        self.graph_task = -1
        self.fired: dict[int, None] = {}

    def begin(self, graph_task: int) -> None:
        # The task's number, not a flag: a backward pass that raises would leave a flag set for ever.
        self.graph_task = graph_task
        _queue(self._ending)

    def _ending(self) -> None:
        _queue(self._end)
        trigger = self._trigger()
        if trigger is not None and trigger._on_ending is not None:
            trigger._on_ending()

    def _end(self) -> None:
        trigger = self._trigger()
        if trigger is not None:
            trigger._on_end()


def _hook(under_way: _Pass, layers: Sequence[int]) -> Callable[[Tensor], None]:
    current_graph_task, fired = torch._C._current_graph_task_id, under_way.fired

    def hook(_: Tensor) -> None:
        graph_task = current_graph_task()
        if under_way.graph_task != graph_task and graph_task != _NO_TASK:
            under_way.begin(graph_task)
        for layer in layers:
            if layer in fired:
                del fired[layer]  # the last time counts: recomputation reaches tied layers more than once
            fired[layer] = None

    return hook


def _queue(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)
