"""What a step is judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    elements: float | None = None
    """Number of elements in the layer's gradient, each shared with those that hold it, too; None if not counted."""

    nan_elements: float | None = None
    """Number of NaN elements, shared likewise; None if not counted."""

    inf_elements: float | None = None
    """Number of infinite elements, shared likewise; None if not counted."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one rank alone knows about a fault."""

    shares: Mapping[int, float]
    """Of the layers in question that it holds: its share in the layer's norm, as it was judged."""

    own: Mapping[int, float] | None = None
    """The same for its own gradients, before anything was reduced over ranks; None where they were not seen."""

    is_unreduced: bool = False
    """Whether ``own`` is surely from before any reduction; else its values count only if they differ over ranks."""

    bad_inputs: bool = False
    """Whether a batch of its step holds NaN or Inf."""

    veto: str | None = None
    """Its reason, if it has cast a veto."""

    batches: Sequence[Sequence[Mapping[str, Any]]] = ()
    """Its micro-batches as a report describes them."""


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
    """Mean loss of the step's micro-batches, over the ranks that have one."""

    rank_losses: tuple[float | None, ...]
    """That of each rank."""

    scaled: bool
    """Whether a GradScaler is at work."""

    overflowed: bool
    """Whether that scaler saw a non-finite gradient, on any rank."""

    evidence: tuple[Evidence, ...] | None
    """What each rank alone knows of the fault; None where nothing was suspected yet."""

    scale: float | None
    """The scaler's factor, if known."""

    vetoed: bool
    """Whether a rank has cast a veto."""

    @property
    def global_norm(self) -> float:
        """L2 norm over all layers."""
        return float(torch.linalg.vector_norm(self.norms))

    @property
    def norm_at_step(self) -> float:
        """L2 norm over all layers as ``step()`` finds them."""
        return float(torch.linalg.vector_norm(self.norms_at_step))
