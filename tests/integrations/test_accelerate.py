"""Guards in front of Accelerate's prepared optimizers, and behind them."""

import os

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

from stabilityguard import ConfigurationError, GradientSpikeError, GuardedOptimizer
from tests.distributed.ranks import run
from tests.support import Net, assert_same, batch

orders = pytest.mark.parametrize("guarded_last", [True, False], ids=["guard(prepare)", "prepare(guard)"])
fused = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
scaled = pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])


@pytest.fixture(autouse=True)
def _no_state_left(monkeypatch):
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


class Setting:
    """A model, an optimizer and its guard, in one of the two orders; ``stepped`` is what the user's loop calls."""

    def __init__(self, *, guarded_last=True, scaled=False, accumulation=1, fused=False, model=None, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        if scaled:  # on the CPU, Accelerate itself makes none
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model = Net() if model is None else model
        self.base = AdamW(model.parameters(), lr=1e-2, fused=fused)
        options = {"verbose": False, **options}
        if guarded_last:
            self.model, self.prepared = self.accelerator.prepare(model, self.base)
            self.guard = self.stepped = GuardedOptimizer(self.prepared, model, **options)
        else:
            self.guard = GuardedOptimizer(self.base, model, scaler=self.accelerator.scaler, **options)
            self.model, self.prepared = self.accelerator.prepare(model, self.guard)
            self.stepped = self.prepared
        self.scheduler = self.accelerator.prepare(StepLR(self.base, 1, 0.5))

    def train(self, steps, *, spoil=(), clip=None):
        """For each micro-step: whether a skip was told, and the learning rate after it."""
        told = []
        for step in steps:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch(step)))
                if step in spoil:
                    self.model.head.weight.grad[0, 0] = float("nan")
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.stepped.step()
                self.scheduler.step()
                self.stepped.zero_grad()
                told.append((self.accelerator.optimizer_step_was_skipped, self.base.param_groups[0]["lr"]))
        return told

    @property
    def state(self):
        return self.model.state_dict(), self.base.state_dict()["state"]


@orders
@fused
@scaled
def test_a_skip_is_told_and_the_schedule_waits(guarded_last, fused, scaled):
    setting = Setting(guarded_last=guarded_last, fused=fused, scaled=scaled)
    told = setting.train(range(5), spoil=[2])
    assert told == [(False, 5e-3), (False, 2.5e-3), (True, 2.5e-3), (False, 1.25e-3), (False, 6.25e-4)]
    assert setting.guard.last_record.step == 5
    if scaled:
        assert setting.accelerator.scaler.get_scale() == 512.0
    assert all(p.isfinite().all() for p in setting.model.parameters())


@orders
@scaled
def test_a_window_of_accumulation_is_one_step_of_the_guard(guarded_last, scaled):
    setting = Setting(guarded_last=guarded_last, scaled=scaled, accumulation=3)
    told = setting.train(range(9), spoil=[3])
    assert [record.action for record in setting.guard._guard.chronicle.records] == ["step", "skip", "step"]
    assert [skipped for skipped, _ in told] == [False] * 5 + [True] * 3 + [False]


@orders
@scaled
def test_training_is_bit_for_bit_that_of_a_bare_optimizer(guarded_last, scaled):
    def train(**options):
        torch.manual_seed(0)
        setting = Setting(scaled=scaled, accumulation=2, **options)
        if not options:
            setting.guard.close()
        setting.train(range(8), clip=0.05)
        return setting

    guarded, bare = train(guarded_last=guarded_last), train()
    assert guarded.guard.last_record.step == 4
    assert bare.guard.last_record is None
    assert_same(guarded.state, bare.state)


@orders
@scaled
def test_norms_are_from_before_clipping_and_without_the_scale(guarded_last, scaled):
    torch.manual_seed(0)
    setting = Setting(guarded_last=guarded_last, scaled=scaled)
    setting.train([1], clip=1e-3)
    torch.manual_seed(0)
    model = Net()
    model(batch(1)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert setting.guard.last_record.global_norm == pytest.approx(norm.item(), rel=1e-5)


@orders
def test_the_guards_memory_is_part_of_a_saved_state(guarded_last, tmp_path):
    setting = Setting(guarded_last=guarded_last)
    setting.train(range(3))
    setting.accelerator.save_state(str(tmp_path / "state"))
    after = [setting.train(range(3, 6)), setting.state, setting.guard.state_dict()["stabilityguard"]]
    AcceleratorState._reset_state(reset_partial_state=True)
    again = Setting(guarded_last=guarded_last)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert_same([again.train(range(3, 6)), again.state, again.guard.state_dict()["stabilityguard"]], after)
    assert again.guard.last_record.step == 6


def test_learning_rates_are_the_same_in_all_layers_of_wrapping():
    setting = Setting()
    scheduler = LambdaLR(setting.guard, lambda step: 0.1**step)
    setting.guard.step()
    scheduler.step()
    for optimizer in (setting.guard, setting.prepared, setting.base):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@scaled
def test_the_prepared_optimizer_can_be_stepped_as_well(scaled):
    setting = Setting(scaled=scaled)
    setting.stepped = setting.prepared
    assert setting.train(range(3), spoil=[1], clip=0.05)[1][0]
    assert [record.action for record in setting.guard._guard.chronicle.records] == ["step", "skip", "step"]


@orders
@scaled
def test_a_closed_guard_leaves_the_bare_optimizer_behind_the_prepared_one(guarded_last, scaled):
    setting = Setting(guarded_last=guarded_last, scaled=scaled)
    setting.train([0])
    setting.guard.close()
    assert setting.prepared.optimizer is setting.base
    before = setting.model.body.weight.clone()
    setting.train([1], clip=0.05)
    assert not torch.equal(setting.model.body.weight, before)
    again = GuardedOptimizer(setting.prepared, setting.model, verbose=False)
    setting.stepped = again
    setting.train([2])
    assert again.last_record.step == 1


@scaled
def test_a_loss_that_is_computed_outside_reaches_the_record(scaled):
    setting = Setting(scaled=scaled)
    setting.accelerator.backward(setting.model(batch(1)))
    setting.guard.step(loss=7.0)
    assert setting.guard.last_record.loss == 7.0


def test_a_rollback_counts_as_a_step_for_the_schedule_that_it_rewinds():
    setting = Setting(nan_action="rollback")
    told = setting.train(range(4), spoil=[3])
    assert setting.guard.last_record.action == "rollback"
    assert not told[3][0]


def test_a_policy_of_raising_raises():
    setting = Setting(nan_action="raise")
    with pytest.raises(GradientSpikeError, match="head"):
        setting.train(range(4), spoil=[3])


# DeepSpeed ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_deepspeed_steps_is_refused():
    accelerator = Accelerator(cpu=True)
    model = Net()
    stepped_by_the_engine = DeepSpeedOptimizerWrapper(SGD(model.parameters(), lr=0.1))
    assert accelerator.distributed_type == DistributedType.NO
    with pytest.raises(ConfigurationError, match=r"inside accelerator.backward.*guard_engine"):
        GuardedOptimizer(stepped_by_the_engine, model)


def test_a_guard_that_deepspeed_would_be_given_is_refused():
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    model = Net()
    with pytest.raises(ConfigurationError, match=r"inside accelerator.backward.*guard_engine"):
        GuardedOptimizer(SGD(model.parameters(), lr=0.1), model)


# Two ranks ----------------------------------------------------------------------------------------------------------


def over_ranks(rank, strategy, guarded_last):
    """What each step did on this rank: action, norm, whether a skip was told, and the ranks named."""
    os.environ["MASTER_PORT"] = "29500"  # asked for, but the group is there already
    PartialState(cpu=True)
    plugin = None
    if strategy == "fsdp2":
        # Accelerate shards on accelerators only, unless it takes the ranks for such.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = Net()
    base = AdamW(model.parameters(), lr=1e-2)
    if guarded_last:
        model, prepared = accelerator.prepare(model, base)
        guard = stepped = GuardedOptimizer(prepared, model, verbose=False)
    else:
        guard = GuardedOptimizer(base, model, verbose=False)
        model, stepped = accelerator.prepare(model, guard)
    seen = []
    for step in range(1, 6):
        accelerator.backward(model(batch(step)))
        if step == 3 and rank == 1:
            gradient = next(p.grad for p in model.parameters() if getattr(p.grad, "_local_tensor", p.grad).numel())
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = float("nan")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        stepped.step()
        record = guard.last_record
        seen.append((record.action, record.global_norm, accelerator.optimizer_step_was_skipped))
        stepped.zero_grad()
    return accelerator.distributed_type.value, seen


@orders
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_skip_together(strategy, guarded_last):
    (kind, first), (_, second) = run(2, over_ranks, strategy, guarded_last)
    assert kind == {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}[strategy]
    assert repr(first) == repr(second)
    assert [action for action, _, _ in first] == ["step", "step", "skip", "step", "step"]
    assert [told for _, _, told in first] == [False, False, True, False, False]
    torch.manual_seed(0)
    model = Net()
    model(batch(1)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert first[0][1] == pytest.approx(norm, rel=1e-5)
