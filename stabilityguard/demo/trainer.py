"""A model that is trained, however it is spread over ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from stabilityguard.demo import ranks
from stabilityguard.distributed.shards import local_part


class Trainer:
    """Runs a model that returns its loss.

    Args:
        model: as an optimizer and a guard get it.
        part: which share of each batch this rank reads.
        parts: how many shares there are.
    """

    micro_batches = 1
    """Forwards of the model in a step."""

    criterion: nn.Module | None = None
    """What computes the loss, if not the model."""

    def __init__(self, model: nn.Module, *, part: int = 0, parts: int = 1) -> None:
        self.model, self.part, self.parts = model, part, parts

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All parameters; fused optimizers want those of a group on one mesh, or all without."""
        groups: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.model.parameters():
            groups[getattr(parameter, "device_mesh", None)].append(parameter)
        return [{"params": parameters} for parameters in groups.values()]

    def share(self, text: Tensor) -> Tensor:
        """The rows of a batch that this rank reads, on its device."""
        return text.chunk(self.parts)[self.part].to(ranks.device())

    def backward(self, text: Tensor) -> Tensor | None:
        """Leaves the gradients of the mean loss over ``text``, int64 (B, T + 1); the loss, where this rank knows it."""
        loss: Tensor = self.model(text)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, text: Tensor) -> float:
        """The mean loss over ``text``, the same on every rank. All ranks take part, with the same text."""
        self.model.eval()
        return float(self.model(text))

    def is_finite(self) -> bool:
        """Whether every weight that this rank holds is."""
        return all(bool(local_part(p).isfinite().all()) for p in self.model.parameters())
