"""Calls of ``step()`` by which torch fills an optimizer's empty state: zero gradients at a rate of zero."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from stabilityguard.distributed.shards import local_part
from stabilityguard.groups import parameters_of
from stabilityguard.guard import Guard


def only_creates_state(optimizer: Optimizer, guard: Guard, closure: Callable[[], Any] | None) -> bool:
    """Whether a ``step()`` of ``optimizer`` is such a call."""
    if closure is not None or optimizer.state:
        return False
    rates = [group.get("lr") for group in optimizer.param_groups]
    if any(rate is None or float(rate) != 0.0 for rate in rates) or guard.window.measured:
        return False
    trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    if not all(p.grad is not None and not local_part(p.grad).any() for p in trained):
        return False
    # Over several ranks it must be torch for sure: this could be a rank without data, which has to vote.
    return len(guard.peers) == 1 or _is_called_by("_init_optim_state")


def _is_called_by(function: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None
