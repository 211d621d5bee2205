"""What a detector is: a pure map from its state and the layers' norms to a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

State = dict[str, Tensor]
"""A detector's memory: tensors whose last dimension runs over the layers. Never changed in place."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the norms of one step compare with what was expected."""

    baselines: Tensor
    """float64, shape (L,): the expected norm; NaN for a layer without history."""

    ratios: Tensor
    """float64, shape (L,): norm / baseline; NaN for a layer without history or with a NaN norm."""

    spikes: Tensor
    """bool, shape (L,): layers whose ratio is beyond the threshold."""


@runtime_checkable
class Detector(Protocol):
    """Pure policy: no I/O, no clock, no rank. The same bits in give the same verdict out."""

    def initial(self, layers: int) -> State:
        """The memory before the first step, for that many layers."""

    def judge(self, state: State, norms: Tensor) -> Verdict:
        """Compares ``norms`` (float64, shape (L,)) with the memory; finite and non-finite norms alike."""

    def absorb(self, state: State, norms: Tensor) -> State:
        """The memory after a healthy step with these finite norms."""

    def rebase(self, state: State, norms: Tensor, layers: Tensor) -> State:
        """The memory after ``norms`` were accepted as the new level of ``layers`` (bool, shape (L,))."""


def realign(state: State, old: tuple[str, ...], fresh: State, new: tuple[str, ...]) -> State:
    """``state`` of the layers named ``old``, carried over to the layers named ``new``; the rest is as in ``fresh``.

    An entry that ``state`` lacks, or holds for other settings (its leading dimensions differ), stays ``fresh``.
    """
    source = {name: i for i, name in enumerate(old)}
    pairs = [(i, source[name]) for i, name in enumerate(new) if name in source]
    to, come_from = torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(dim=1)
    moved = {key: value.clone() for key, value in fresh.items()}
    for key, value in moved.items():
        if key in state and state[key].shape[:-1] == value.shape[:-1]:
            value[..., to] = state[key][..., come_from].to(value.dtype)
    return moved
