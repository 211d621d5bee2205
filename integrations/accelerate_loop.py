"""A loop under Accelerate whose optimizer is guarded: ``python integrations/accelerate_loop.py``."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from stabilityguard import GuardedOptimizer


def main() -> None:
    """Trains a small network; the seventh batch is broken."""
    torch.manual_seed(0)
    data = torch.randn(80, 16)
    data[26] = float("nan")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, prepared, loader = accelerator.prepare(model, base, DataLoader(data, batch_size=4))
    optimizer = GuardedOptimizer(prepared, model, nan_action="skip")
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(loss=loss)
            optimizer.zero_grad()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    print(f"{len(optimizer.reports)} step skipped; weights finite: {finite}")


if __name__ == "__main__":
    main()
