"""What a step is judged by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DETAILED_LAYERS = 8
"""Tripped layers, the gravest first, that are counted through and described in full; the others are only named."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a second, exact look at a layer with a non-finite norm found."""

    kind: str
    """``"nan"``, ``"inf"``, or ``"overflow"`` where every element is finite."""

    norm: float
    """L2 norm: exact for an overflow, else NaN or infinite."""

    elements: int | None = None
    """Number of elements in the layer's gradient; None if not counted."""

    nan_elements: int | None = None
    """Number of NaN elements; None if not counted."""

    inf_elements: int | None = None
    """Number of infinite elements; None if not counted."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What is known of one step before it is judged, on the host."""

    norms: Tensor
    """float64, shape (L,): layer norms without loss scale, the larger of the two looks; NaN and Inf where so."""

    present: Tensor
    """bool, shape (L,): layers with a gradient."""

    norms_at_step: Tensor
    """float64, shape (L,): layer norms as ``step()`` finds them, which clipping or edits may have changed."""

    findings: dict[int, Finding]
    """The layers whose float32 norm was not finite, nearest the loss first."""

    loss: float | None
    """Mean loss of the step's micro-batches."""

    scaled: bool
    """Whether a GradScaler is at work."""

    overflowed: bool
    """Whether that scaler saw a non-finite gradient."""

    scale: float | None
    """The scaler's factor, if known."""

    @property
    def global_norm(self) -> float:
        """L2 norm over all layers."""
        return float(torch.linalg.vector_norm(self.norms))

    @property
    def norm_at_step(self) -> float:
        """L2 norm over all layers as ``step()`` finds them."""
        return float(torch.linalg.vector_norm(self.norms_at_step))
