"""A Lightning Trainer whose optimizer is guarded: ``python integrations/lightning_trainer.py``."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stabilityguard.integrations.lightning import StabilityGuardCallback


class Autoencoder(pl.LightningModule):
    """A small network that learns to copy its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """The loss of one batch."""
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer, which the callback guards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Trains it; the seventh batch is broken."""
    torch.manual_seed(0)
    data = torch.randn(80, 16)
    data[26] = float("nan")
    module, guarding = Autoencoder(), StabilityGuardCallback(spike_threshold=10.0, nan_action="skip")
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[guarding],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    finite = all(bool(p.isfinite().all()) for p in module.parameters())
    print(f"{len(guarding.guards[0].reports)} step skipped; weights finite: {finite}")


if __name__ == "__main__":
    main()
