"""The guard in the Trainer of Lightning, under both of its names."""

import copy
import os
from pathlib import Path

import lightning.pytorch as new
import pytest
import pytorch_lightning as old
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from stabilityguard import ConfigurationError, GradientSpikeError
from stabilityguard.integrations.lightning import StabilityGuardCallback
from stabilityguard.testing import Faults
from tests.distributed.ranks import run
from tests.support import Net, assert_same, batch

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",  # Lightning's own
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*number of training batches:UserWarning",
    "ignore:.*lightning_fabric:UserWarning",
    "ignore:Checkpoint directory .* exists:UserWarning",
)


class Automatic(new.LightningModule):
    def __init__(self, base=torch.optim.AdamW, rate=1e-2):
        super().__init__()
        self.net, self.base, self.rate = Net(), base, rate

    def training_step(self, data, index):
        return self.net(data)

    def configure_optimizers(self):
        optimizer = self.base(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class OldAutomatic(old.LightningModule):
    __init__, training_step, configure_optimizers = (
        lambda self: (old.LightningModule.__init__(self), setattr(self, "net", Net()))[0],
        lambda self, data, index: self.net(data),
        lambda self: torch.optim.AdamW(self.parameters(), lr=1e-2),
    )


class Adversaries(new.LightningModule):
    """Two optimizers, stepped by hand, one with a closure."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = Net(), Net()

    def training_step(self, data, index):
        one, other = self.optimizers()
        one.zero_grad()
        self.manual_backward(self.first(data))
        one.step()

        def closure():
            other.zero_grad()
            loss = self.second(data)
            self.manual_backward(loss)
            return loss

        other.step(closure)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9) for net in (self.first, self.second)]


def callback(**options):
    return StabilityGuardCallback(**{"verbose": False, **options})


def fit(module, callbacks=(), *, steps=10, faults=None, package=new, ckpt_path=None, **options):
    trainer = package.Trainer(
        **{
            "accelerator": "cpu",
            "max_steps": steps,
            "callbacks": list(callbacks),
            "logger": False,
            "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    data = DataLoader([batch(i) for i in range(20)], batch_size=None)
    with (faults or Faults()).inject(getattr(module, "net", module)):
        trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


def actions(guard):
    return [record.action for record in guard._guard.chronicle.records]


def is_finite(module):
    return all(p.isfinite().all() for p in module.parameters())


def made(module_class=Automatic, *arguments):
    torch.manual_seed(0)
    return module_class(*arguments)


# Automatic optimization ---------------------------------------------------------------------------------------------


def test_one_nan_ruins_an_unguarded_fit():
    module = made()
    fit(module, faults=Faults().nan("head", step=4))
    assert all(p.isnan().any() for p in module.parameters())


@pytest.mark.parametrize(("package", "module_class"), [(new, Automatic), (old, OldAutomatic)], ids=["lightning", "old"])
def test_a_guarded_fit_survives_the_same(package, module_class):
    module, guarding = made(module_class), callback()
    trainer = fit(module, [guarding], faults=Faults().nan("head", step=4), package=package)
    (guard,) = guarding.guards
    assert actions(guard) == ["step"] * 3 + ["skip"] + ["step"] * 6
    assert guard.last_record.loss > 0
    assert guard.reports[0].record.trigger_layer == "net.head"
    assert is_finite(module)
    assert trainer.strategy.optimizers == [guard.base_optimizer]


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}], ids=str)
def test_a_healthy_fit_is_bit_for_bit_that_without_a_guard(base, options):
    guarding, modules = callback(), [made(Automatic, base), made(Automatic, base)]
    trainers = [fit(module, one, **options) for module, one in zip(modules, ([guarding], []), strict=True)]
    assert guarding.guards[0].last_record.step == trainers[0].global_step == trainers[1].global_step
    assert_same(modules[0].state_dict(), modules[1].state_dict())
    assert_same(*(trainer.strategy.optimizers[0].state_dict()["state"] for trainer in trainers))


def test_norms_are_from_before_the_trainers_clipping():
    guarding, module = callback(), made()
    module.net(batch(0)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item()
    fit(module, [guarding], steps=1, gradient_clip_val=1e-3)
    assert guarding.guards[0].last_record.global_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_lowers_its_scale_and_nothing_is_written(fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    guarding = callback()
    module = made(Automatic, lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=fused))
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fit(module, [guarding], faults=Faults().inf("head", step=4), plugins=[precision])
    assert actions(guarding.guards[0]) == ["step"] * 3 + ["skip"] + ["step"] * 6
    assert scaler.get_scale() == 512.0
    assert guarding.guards[0]._parts["scaler"] is scaler
    assert guarding.guards[0].last_record.global_norm < 10
    assert is_finite(module)


def test_a_raise_ends_the_fit_and_the_optimizers_are_given_back():
    module, guarding = made(), callback(nan_action="raise")
    with pytest.raises(GradientSpikeError, match=r"net\.head"):
        fit(module, [guarding], faults=Faults().nan("head", step=4))
    assert is_finite(module)
    assert module.trainer.strategy.optimizers == [guarding.guards[0].base_optimizer]
    fit(module, [guarding], steps=3)
    assert guarding.guards[0].last_record.step == 3


def test_a_rollback_rewinds_the_schedule():
    guarding = callback(nan_action="rollback")
    trainer = fit(made(), [guarding], faults=Faults().nan("head", step=4), max_epochs=1, steps=6)
    assert guarding.guards[0].reports[0].record.restored_step == 0
    assert "lr_scheduler_0" in guarding.guards[0]._parts["track"]
    assert trainer.global_step == 6


# Several optimizers, stepped by hand --------------------------------------------------------------------------------


def test_each_optimizer_is_guarded_by_itself():
    module, guarding = made(Adversaries), callback(log_dir="logs")
    with Faults().nan("head", step=4).inject(module.first), Faults().inf("body", step=6).inject(module.second):
        fit(module, [guarding], steps=20)
    skipped = [[i + 1 for i, action in enumerate(actions(g)) if action == "skip"] for g in guarding.guards]
    assert skipped == [[4], [6]]
    assert is_finite(module)
    reports = sorted(str(path) for path in Path("logs").rglob("*.json"))
    assert reports == ["logs/optimizer_0/spike_step4.json", "logs/optimizer_1/spike_step6.json"]


# Checkpoints --------------------------------------------------------------------------------------------------------


def test_a_fit_that_goes_on_takes_up_the_memory_of_its_checkpoint():
    def saving():
        return ModelCheckpoint(dirpath="saved", save_top_k=-1, filename="{epoch}")

    class Watching(new.Callback):
        def on_train_start(self, trainer, module):
            self.memory = copy.deepcopy(trainer.callbacks[0].state_dict())

    fit(made(), [callback(), saving()], faults=Faults().nan("head", step=3), limit_train_batches=5)
    saved = torch.load("saved/epoch=0.ckpt", weights_only=True)["callbacks"]["StabilityGuardCallback"]
    resumed, watching = callback(), Watching()
    fit(made(), [resumed, watching, saving()], ckpt_path="saved/epoch=0.ckpt", limit_train_batches=5)
    assert saved["guards"][0]["steps"] == 5
    assert_same(watching.memory, saved)
    assert resumed.guards[0].last_record.step == 10


def test_the_callbacks_state_alone_carries_the_memory():
    first, second = callback(), callback()
    fit(made(), [first], steps=5)
    second.load_state_dict(first.state_dict())
    fit(made(), [second], steps=3)
    assert second.guards[0].last_record.step == 8


def test_another_number_of_optimizers_than_in_the_checkpoint_is_named():
    guarding = callback()
    guarding.load_state_dict({"guards": [{}, {}]})
    with pytest.raises(ConfigurationError, match="memory of 2 guards, and there are 1 optimizers"):
        fit(made(), [guarding])


def test_unknown_keywords_are_named_at_once():
    with pytest.raises(ConfigurationError, match="takes no treshold"):
        StabilityGuardCallback(treshold=3.0)


# Two ranks ----------------------------------------------------------------------------------------------------------


class ShardedOnCpu(FSDPStrategy):
    """Lightning offers this strategy on accelerators only; its parts run on any."""


class Injecting(new.Callback):
    """Faults in the model as it is once it was wrapped."""

    def on_train_start(self, trainer, module):
        self.injection = Faults().nan("head", step=4, rank=1).inject(module.net)
        self.injection.__enter__()


class Sharded(Automatic):
    def configure_model(self):
        self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), use_orig_params=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def over_ranks(rank, strategy):
    os.environ["MASTER_PORT"] = "29500"  # asked for, but the group is there already
    strategy, module = {"ddp": ("ddp", Automatic), "fsdp": (ShardedOnCpu(), Sharded)}[strategy]
    guarding, module = callback(), made(module)
    fit(module, [guarding, Injecting()], steps=6, strategy=strategy, devices=2, use_distributed_sampler=False)
    return actions(guarding.guards[0]), is_finite(module), guarding.guards[0].last_record.global_norm


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_skip_together(strategy):
    first, second = run(2, over_ranks, strategy)
    assert first == second
    assert first[:2] == (["step"] * 3 + ["skip"] + ["step"] * 2, True)


def test_a_module_without_a_loss_of_its_own_gets_that_of_manual_optimization():
    class Manual(Adversaries):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, data, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss = self.layer(data).square().mean()
            self.manual_backward(self.loss)
            optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.layer.parameters(), lr=1e-2)

    guarding, module = callback(), made(Manual)
    fit(module, [guarding], steps=3)
    assert guarding.guards[0].last_record.loss == pytest.approx(module.loss.item())
