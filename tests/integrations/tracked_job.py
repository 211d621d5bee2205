"""A job on two ranks, of which each opens runs of its own in W&B and MLflow; to be started by torchrun."""

import json
from pathlib import Path

import mlflow
import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel

from stabilityguard import GuardedOptimizer
from stabilityguard.demo import ranks
from stabilityguard.integrations.mlflow import MLflowBridge
from stabilityguard.integrations.tensorboard import TensorBoardBridge
from stabilityguard.integrations.wandb import WandBBridge
from tests.distributed import wrapped

STEPS, BAD = 20, 8


def train():
    rank = dist.get_rank()
    bridges = [WandBBridge(), MLflowBridge(), TensorBoardBridge(log_dir=f"events_{rank}")]
    own = wandb.init(project="tests", settings=wandb.Settings(console="off", disable_git=True))
    mlflow.set_tracking_uri(f"sqlite:///runs_{rank}.db")
    with mlflow.start_run() as active:
        model = DistributedDataParallel(wrapped.make())
        optimizer = GuardedOptimizer(torch.optim.AdamW(model.parameters()), model, verbose=False, warmup_steps=2)
        for step in range(1, STEPS + 1):
            batch = wrapped.rows(step, rank, 2)
            loss = model(batch * torch.nan if (step, rank) == (BAD, 1) else batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.log({"loss": loss.item()}, step=step)
        optimizer.close()
        for bridge in bridges:
            bridge.close()
    told = {"wandb": own.settings.sync_file, "mlflow": active.info.run_id}
    own.finish()
    Path(f"told_{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    with ranks.joined():
        train()
