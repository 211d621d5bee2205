"""All trackers at once: under torchrun, and where a Trainer opens the runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import mlflow
import pytest
import wandb
from accelerate.state import AcceleratorState

from stabilityguard.integrations.mlflow import MLflowBridge
from stabilityguard.integrations.tensorboard import TensorBoardBridge
from stabilityguard.integrations.wandb import WandBBridge
from tests.integrations.test_huggingface import callback, make_trainer, train
from tests.integrations.test_tensorboard import Events
from tests.integrations.test_wandb import Log
from tests.integrations.tracked_job import BAD, STEPS

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader")  # MLflow's use of SQLAlchemy


@pytest.fixture(autouse=True)
def _offline(tmp_path):
    directories = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("DATA", "CACHE", "CONFIG", "ARTIFACT")}
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with mock.patch.dict(os.environ, directories | quiet):
        yield
        wandb.teardown()
        mlflow.set_tracking_uri(None)
        AcceleratorState._reset_state(reset_partial_state=True)


def steps_in_mlflow(database, run_id, name):
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{database}")
    return {metric.step: metric.value for metric in client.get_metric_history(run_id, name)}


def test_of_two_ranks_the_first_alone_writes_to_its_runs():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-m", "tests.integrations.tracked_job"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads(Path(f"told_{rank}.json").read_text()) for rank in (0, 1))
    trips = {step: float(step == BAD) for step in range(1, STEPS + 1)}

    log = Log(first["wandb"])
    assert len(log.column("loss")) == STEPS
    assert dict(zip(log.column("sg/step"), log.column("sg/trip"), strict=True)) == trips
    assert steps_in_mlflow("runs_0.db", first["mlflow"], "sg/trip") == trips
    assert Events("events_0").scalars("sg/trip") == trips

    untouched = Log(second["wandb"])
    assert len(untouched.column("loss")) == STEPS
    assert not untouched.column("sg/step")
    assert not untouched.alerts
    assert steps_in_mlflow("runs_1.db", second["mlflow"], "sg/trip") == {}
    assert not Path("events_1").exists()


def test_runs_that_a_trainer_opens_are_found():
    os.environ |= {"MLFLOW_TRACKING_URI": "sqlite:///runs.db", "WANDB_PROJECT": "tests"}
    bridges = [WandBBridge(), MLflowBridge(), TensorBoardBridge(log_dir="events")]
    reporters = ["wandb", "mlflow", "tensorboard"]
    trainer = make_trainer(callbacks=[callback()], report_to=reporters, logging_steps=1, max_steps=8)
    train(trainer, bad_step=5)
    path = wandb.run.settings.sync_file
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    for bridge in bridges:
        bridge.close()
    wandb.finish()
    trips = {step: float(step == 5) for step in range(1, 9)}
    log = Log(path)
    assert len(log.column("train/loss")) == 8
    assert dict(zip(log.column("sg/step"), log.column("sg/trip"), strict=True)) == trips
    assert steps_in_mlflow("runs.db", run.info.run_id, "sg/trip") == trips
    assert Events("events").scalars("sg/trip") == trips
