"""What is known of a step, and of a trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

Action = Literal["step", "skip", "rollback", "raise"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerReadings:
    """Per-layer numbers of one step as tensors on the host, over the ``L`` layers of the table."""

    places: Mapping[str, int]
    """Index of every layer by its qualified name, in the model's own order."""

    norms: Tensor
    """float64, shape (L,): L2 norms of the unscaled gradients; NaN or Inf where elements are."""

    baselines: Tensor
    """float64, shape (L,): what was expected; NaN where a layer has no baseline yet."""

    ratios: Tensor
    """float64, shape (L,): norms / baselines."""

    present: Tensor
    """bool, shape (L,): layers that had a gradient at all."""

    nan: tuple[int, ...] = ()
    """Indices of layers with a NaN element, nearest the loss first."""

    inf: tuple[int, ...] = ()
    """Indices of layers with an infinite element and no NaN, nearest the loss first."""

    @property
    def names(self) -> list[str]:
        """Qualified layer names by index."""
        return list(self.places)

    @property
    def largest_ratio(self) -> float | None:
        """The largest ratio over all layers with a baseline; None without any, or if no norm is above zero."""
        largest = float(self.ratios.nan_to_num(nan=0.0).max()) if self.ratios.numel() else 0.0
        return largest or None

    def select(self, values: Tensor, *, known: Tensor) -> dict[str, float]:
        """The entries of ``values`` at which ``known`` (bool, shape (L,)) holds, by layer name."""
        listed = zip(self.places, values.tolist(), known.tolist(), strict=True)
        return {name: value for name, value, wanted in listed if wanted}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One call of ``step()``: what was measured and what was done."""

    step: int
    """1-based count of ``step()`` calls; it never goes back, not even in a rollback."""

    action: Action
    """What was done: ``"step"``, ``"skip"``, ``"rollback"`` or ``"raise"``."""

    kind: str | None = None
    """Why the breaker tripped: ``"spike"``, ``"nan"``, ``"inf"``, ``"overflow"`` (finite elements, norm beyond
    float32), ``"scaler_overflow"`` (the GradScaler's business) or ``"veto"``; None for a healthy step."""

    reason: str | None = None
    """Why this action was taken; None for a healthy step."""

    trigger_layer: str | None = None
    """The layer to blame; None for a healthy step, a veto, or where only the loss is not finite."""

    ratio: float | None = None
    """Norm over baseline of the trigger layer; in a healthy step the largest over all layers with a baseline."""

    global_norm: float
    """L2 norm over all layers of this optimizer, before any clipping."""

    loss: float | None = None
    """Mean of the losses seen since the last step, over micro-batches and ranks; None if none was seen."""

    rank_losses: tuple[float | None, ...] = ()
    """That of each rank, in the order of the process group."""

    bad_ranks: tuple[int, ...] = ()
    """Global ranks on which the fault arose; empty for a healthy step, or where it cannot be told."""

    restored_step: int | None = None
    """The step at whose end the restored state was taken, for a rollback."""

    lr: float | None = None
    """Learning rate of the first parameter group when ``step()`` was called."""

    overhead_ms: float | None = field(default=None, repr=False, compare=False)
    """Milliseconds of wall time that the guard took on this rank: at the end of backward and in ``step()`` until this
    record was made, and for the record of the step before. Left out: the update, writing checkpoints, and waiting for
    the device and the sums of other ranks."""

    layers: LayerReadings = field(repr=False, compare=False)
    """The readings behind the properties below."""

    @property
    def applied(self) -> bool:
        """Whether the base optimizer updated the parameters."""
        return self.action == "step"

    @cached_property
    def layer_norms(self) -> dict[str, float]:
        """L2 gradient norm of every layer that had a gradient, before clipping and unscaled."""
        return self.layers.select(self.layers.norms, known=self.layers.present)

    @cached_property
    def baselines(self) -> dict[str, float]:
        """The norm that was expected of every layer that has a baseline."""
        return self.layers.select(self.layers.baselines, known=self.layers.baselines > 0)

    @property
    def worst_layer(self) -> tuple[str, float] | None:
        """The layer with the largest ratio, and the ratio; None while no layer has a baseline."""
        largest = self.layers.largest_ratio
        if largest is None:
            return None
        return self.layers.names[int(self.layers.ratios.nan_to_num(nan=0.0).argmax())], largest

    @property
    def nan_layers(self) -> list[str]:
        """Layers whose gradient holds a NaN, nearest the loss first."""
        names = self.layers.names
        return [names[i] for i in self.layers.nan]

    @property
    def inf_layers(self) -> list[str]:
        """Layers whose gradient holds an Inf and no NaN, nearest the loss first."""
        names = self.layers.names
        return [names[i] for i in self.layers.inf]


@dataclass(kw_only=True)
class SpikeReport:
    """One trip: the record of its step, and what goes with it."""

    record: StepRecord

    details: dict[str, Any]
    """The report's content, as docs/report.md describes it."""

    path: str | None = None
    """Where the JSON was written; None if it could not be."""

    @property
    def reason(self) -> str:
        """Why the action was taken."""
        return self.record.reason or ""
