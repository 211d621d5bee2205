"""GuardedOptimizer in the place of the optimizer that it wraps."""

import math

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from tests.optimizer.steps import every_base, fault, spoil_step, step, twins
from tests.support import Net, NormNet, assert_same, guard, snapshot, train

# In front of the base ------------------------------------------------------------------------------------------------


def test_a_guard_is_an_optimizer():
    model = Net()
    optimizer = guard(model)
    assert isinstance(optimizer, Optimizer)
    assert type(optimizer.base_optimizer) is AdamW


@every_base
def test_a_healthy_run_equals_the_unguarded_run_bit_for_bit(make):
    model, other = twins()
    bare = make(other.parameters())
    guarded = guard(model, make(model.parameters()))
    train(model, guarded, range(20))
    train(other, bare, range(20))
    assert_same(snapshot(model, guarded), snapshot(other, bare))
    assert guarded.last_record.step == 20


def test_step_returns_none_without_a_closure_whether_applied_or_skipped():
    model = Net()
    optimizer = guard(model)
    assert step(model, optimizer) is None
    with fault(model.body.weight, math.nan):
        assert step(model, optimizer) is None
    assert optimizer.last_record.action == "skip"


@every_base
def test_a_skip_leaves_parameters_and_state_bit_for_bit(make):
    model = NormNet()
    optimizer = guard(model, make(model.parameters()))
    train(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    spoil_step(model, optimizer)
    assert_same(snapshot(model, optimizer), before)
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "nan")


@every_base
def test_a_skip_of_the_very_first_step_leaves_the_run_that_follows_as_if_it_had_never_been(make):
    model, other = twins()
    guarded, bare = guard(model, make(model.parameters())), make(other.parameters())
    spoil_step(model, guarded)
    train(model, guarded, range(4))
    train(other, bare, range(4))
    assert_same(snapshot(model, guarded), snapshot(other, bare))


def test_an_attribute_of_the_base_is_reached_through_the_guard():
    model = Net()
    base = SGD(model.parameters(), lr=0.5)
    base.note = "mine"
    optimizer = guard(model, base)
    assert optimizer.note == "mine"
    with pytest.raises(AttributeError, match="missing"):
        _ = optimizer.missing
    assert "SGD" in repr(optimizer)


# Learning-rate schedulers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["made before wrapping", "made after wrapping"])
def test_a_scheduler_moves_the_rate_of_every_layer_of_wrapping(before):
    model = Net()
    base = SGD(model.parameters(), lr=1.0)
    first = torch.optim.lr_scheduler.StepLR(base, 1, 0.5) if before else None
    optimizer = guard(model, base)
    scheduler = first or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(3):
        step(model, optimizer, number)
        scheduler.step()
    assert base.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.last_record.lr == 0.25


@pytest.mark.parametrize("before", [True, False], ids=["made before wrapping", "made after wrapping"])
def test_a_scheduler_does_not_warn_when_the_first_step_was_skipped(before, recwarn):
    model = Net()
    base = AdamW(model.parameters(), lr=1.0)
    first = torch.optim.lr_scheduler.LambdaLR(base, lambda epoch: 0.5**epoch) if before else None
    optimizer = guard(model, base)
    scheduler = first or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    spoil_step(model, optimizer)
    scheduler.step()
    assert optimizer.last_record.action == "skip"
    assert not recwarn.list
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_that_starts_at_rate_zero_trains_and_is_judged():
    model = Net()
    optimizer = guard(model, SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 2))
    for number in range(3):
        step(model, optimizer, number)
        scheduler.step()
    assert (optimizer.last_record.step, optimizer.last_record.lr) == (3, 1.0)


@pytest.mark.parametrize("cycles_momentum", [True, False])
def test_a_one_cycle_scheduler_equals_the_unguarded_run(cycles_momentum):
    model, other = twins()
    bare = AdamW(other.parameters(), lr=1e-3)
    guarded = guard(model, AdamW(model.parameters(), lr=1e-3))
    for m, optimizer in ((model, guarded), (other, bare)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=8, cycle_momentum=cycles_momentum
        )
        for number in range(8):
            step(m, optimizer, number)
            if number < 7:
                scheduler.step()
    assert_same(snapshot(model, guarded), snapshot(other, bare))
