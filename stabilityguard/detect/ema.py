"""Ratio to a bias-corrected exponential moving average, layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stabilityguard.detect.detector import State, Verdict

NEGLIGIBLE = 1e-5
"""Baselines below this share of the model's largest baseline count as that share: rounding noise is no signal."""


@dataclass(frozen=True, kw_only=True)
class EmaDetector:
    """Trips on ``norm / baseline > threshold``, compared before the norm enters the baseline.

    The baseline of a layer after ``n`` healthy samples x is the moving average with the correction for its start from
    zero, as in Kingma and Ba (2015), section 3:

        m_n = m_{n-1} + alpha / (1 - (1 - alpha)^n) * (x_n - m_{n-1})

    except that during the warm-up it is the median of the samples so far, so that a large opening norm does not hide
    what follows. A zero norm is not a sample. A layer is judged once it has ``warmup`` samples.
    """

    threshold: float
    alpha: float
    warmup: int

    def initial(self, layers: int) -> State:
        """Keys: ``mean`` float64 (L,), ``count`` int64 (L,), ``opening`` float64 (warmup, L), NaN where unfilled."""
        return {
            "mean": torch.zeros(layers, dtype=torch.float64, device="cpu"),
            "count": torch.zeros(layers, dtype=torch.int64, device="cpu"),
            "opening": torch.full((self.warmup, layers), torch.nan, dtype=torch.float64, device="cpu"),
        }

    def judge(self, state: State, norms: Tensor) -> Verdict:
        """See :class:`Detector`. Layers in warm-up have a baseline and a ratio, and never spike."""
        mean, count = state["mean"], state["count"]
        baselines = mean.clamp_min(NEGLIGIBLE * float(mean.max())) if mean.numel() else mean
        fewest, _ = _range(count)
        if fewest == 0:
            baselines = torch.where(count > 0, baselines, torch.nan)
        ratios = norms / baselines
        spikes = ratios > self.threshold
        if fewest < max(1, self.warmup):
            spikes &= count >= max(1, self.warmup)
        return Verdict(baselines=baselines, ratios=ratios, spikes=spikes)

    def absorb(self, state: State, norms: Tensor) -> State:
        """See :class:`Detector`."""
        fewest, most = _range(state["count"])
        smallest, largest = _range(norms)
        if fewest == most >= self.warmup and smallest > 0 and largest < math.inf:
            # The layers are all alike, as in most steps: the same formula with a number for the gain.
            mean = torch.lerp(state["mean"], norms, self._gain(fewest + 1))
            return {**state, "mean": mean, "count": state["count"] + 1}
        return self._absorb_unlike(state, norms, opening=fewest < self.warmup)

    def _absorb_unlike(self, state: State, norms: Tensor, *, opening: bool) -> State:
        sampled = (norms > 0) & norms.isfinite()
        count = state["count"] + sampled
        mean = torch.where(sampled, torch.lerp(state["mean"], norms, self._gain(count.double())), state["mean"])
        if not opening:
            return {**state, "mean": mean, "count": count}
        opened = sampled & (count <= self.warmup)
        samples = state["opening"].clone()
        samples[count[opened] - 1, opened] = norms[opened]
        mean = torch.where(opened, samples.nanmedian(dim=0).values, mean)
        return {"mean": mean, "count": count, "opening": samples}

    def _gain(self, samples: Any) -> Any:
        """The weight of the newest of so many ``samples``, a number or a float64 tensor."""
        return self.alpha / (1 - (1 - self.alpha) ** samples)

    def rebase(self, state: State, norms: Tensor, layers: Tensor) -> State:
        """See :class:`Detector`."""
        return {**state, "mean": torch.where(layers, norms, state["mean"])}


def _range(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest of ``values``; (0, 0) of none."""
    smallest, largest = values.aminmax() if values.numel() else (0, 0)
    return float(smallest), float(largest)
