"""What an optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All that it updates, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def are_parameters_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether it updates exactly these, in this order."""
    if len(parameters) != sum(len(group["params"]) for group in optimizer.param_groups):
        return False
    return all(map(is_, parameters, chain.from_iterable(group["params"] for group in optimizer.param_groups)))


def learning_rate(optimizer: Optimizer) -> float | None:
    """That of the first group, if it has one."""
    lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return None if lr is None else float(lr)
