"""The manual of trainers and the examples beside it run as they are."""

import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import stabilityguard
from stabilityguard import GuardedOptimizer
from tests.integrations.test_huggingface import Text, gpt2
from tests.support import Net, batch

ROOT = Path(stabilityguard.__file__).parent.parent
MANUAL = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
HUGGINGFACE, ACCELERATE, LIGHTNING, TORCHTITAN = re.findall(r"```python\n(.*?)```", MANUAL, flags=re.DOTALL)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",  # Lightning's own, as are the next three
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*number of training batches:UserWarning",
    "ignore:Starting from v1.9.0, `tensorboardX`:UserWarning",
)


@pytest.fixture(autouse=True)
def _no_state_left():
    environment = dict(os.environ)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in os.environ.keys() - environment.keys():
        os.environ.pop(name)


@pytest.mark.parametrize("example", ["accelerate_loop", "huggingface_trainer", "lightning_trainer"])
def test_an_example_survives_its_fault(example, capsys):
    runpy.run_path(str(ROOT / "integrations" / f"{example}.py"), run_name="__main__")
    assert capsys.readouterr().out.endswith("1 step skipped; weights finite: True\n")


def test_the_trainer_of_transformers():
    arguments = TrainingArguments(
        output_dir="out", max_steps=3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    names = {"model": gpt2(), "training_args": arguments, "dataset": Text()}
    exec(HUGGINGFACE, names)
    assert names["guarding"].guard.last_record.step == 3


def test_the_loop_under_accelerate():
    model = Net()
    loader = DataLoader([batch(i) for i in range(6)], batch_size=None)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "loader": loader}
    exec(ACCELERATE, names)
    assert names["optimizer"].last_record.step == 3


def test_the_trainer_of_lightning():
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, data, index):
            return self.net(data)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    names = {"module": Module(), "loader": DataLoader([batch(i) for i in range(3)], batch_size=None)}
    exec(LIGHTNING, names)
    assert names["guarding"].guards[0].last_record.step == 3


def test_the_recipe_for_torchtitan_on_objects_of_its_shape():
    parts = [Net(), Net()]
    layers = [layer for part in parts for layer in (part.body, part.head)]
    optimizers = SimpleNamespace(optimizers=[torch.optim.AdamW(layer.parameters()) for layer in layers])
    names = {"trainer": SimpleNamespace(model_parts=parts, optimizers=optimizers), "GuardedOptimizer": GuardedOptimizer}
    exec(TORCHTITAN, names)
    for part in parts:
        part(batch(1)).backward()
    for guard in optimizers.optimizers:
        guard.step()
    assert [list(guard.last_record.layer_norms) for guard in optimizers.optimizers] == [["body"], ["head"]] * 2
