"""What lies between two steps is judged as backward left it: micro-batches, clipping, edits by hand."""

import contextlib
import math

import pytest
import torch
from torch.optim import SGD, AdamW

from tests.optimizer.steps import (
    fault,
    global_norm,
    step,
    twins,
)
from tests.support import Net, assert_same, batch, guard, snapshot, train

# What a window holds -------------------------------------------------------------------------------------------------


def accumulate(model, optimizer, numbers, *, spoiled=None):
    for number in numbers:
        with fault(model.body.weight, math.nan) if number == spoiled else contextlib.nullcontext():
            (model(batch(number)) / len(numbers)).backward()
    optimizer.step()


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_bad_micro_batch_skips_its_whole_window_once_and_the_next_window_is_a_clean_one(spoiled):
    model, other = twins()
    optimizer, bare = guard(model), AdamW(other.parameters(), lr=1e-2)
    accumulate(model, optimizer, [0, 1, 2], spoiled=spoiled)
    assert (optimizer.last_record.step, optimizer.last_record.action) == (1, "skip")
    assert optimizer.last_record.nan_layers == ["body"]
    assert all(not p.grad.any() for p in model.parameters())
    accumulate(model, optimizer, [3, 4, 5])
    accumulate(other, bare, [3, 4, 5])
    assert_same(snapshot(model, optimizer), snapshot(other, bare))
    assert optimizer.last_record.action == "step"


def test_the_norm_of_a_window_is_that_of_the_summed_gradient():
    model = Net()
    optimizer = guard(model)
    for number in range(3):
        model(batch(number)).backward()
    expected = {name: global_norm(getattr(model, name).parameters()) for name in ("body", "head")}
    optimizer.step()
    assert optimizer.last_record.layer_norms == pytest.approx(expected, rel=1e-6)
    assert optimizer.last_record.global_norm == pytest.approx(math.hypot(*expected.values()), rel=1e-6)


def test_the_loss_of_a_window_is_the_mean_of_its_micro_batches():
    model = Net()
    optimizer = guard(model)
    losses = [model(batch(number)) for number in range(3)]
    sum(losses).backward()
    optimizer.step()
    assert optimizer.last_record.loss == pytest.approx(sum(loss.item() for loss in losses) / 3, rel=1e-6)


def test_clipping_does_not_spread_a_nan_to_layers_that_had_none():
    model = Net()
    optimizer = guard(model)
    with fault(model.body.weight, math.nan):
        step(model, optimizer, between=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert optimizer.last_record.nan_layers == ["body"]
    assert optimizer.last_record.trigger_layer == "body"
    assert math.isfinite(optimizer.last_record.layer_norms["head"])
    assert optimizer.last_record.layer_norms["head"] > 0


def test_clipping_does_not_turn_an_inf_into_a_nan():
    model = Net()
    optimizer = guard(model)

    def one_infinite(gradient):
        gradient = gradient.clone()
        gradient[0, 0] = math.inf
        return gradient

    handle = model.body.weight.register_hook(one_infinite)
    step(model, optimizer, between=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    handle.remove()
    assert (optimizer.last_record.kind, optimizer.last_record.inf_layers) == ("inf", ["body"])
    assert optimizer.last_record.nan_layers == []


@pytest.mark.parametrize("how", ["norm", "value"])
def test_clipping_does_not_hide_a_spike(how):
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    clip = {
        "norm": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        "value": lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    }[how]
    for number in range(5):
        step(model, optimizer, number, between=clip)
    before = snapshot(model, optimizer)
    with fault(model.body.weight, 1e4):
        step(model, optimizer, 5, between=clip)
    assert (optimizer.last_record.kind, optimizer.last_record.trigger_layer) == ("spike", "body")
    assert optimizer.last_record.ratio > 1e3
    assert_same(snapshot(model, optimizer), before)


def edit_in_place(parameter, factor):
    parameter.grad.mul_(factor)


def edit_by_replacing(parameter, factor):
    parameter.grad = parameter.grad * factor


def edit_by_replacing_after_clearing(parameter, factor):
    edited = parameter.grad * factor
    parameter.grad = None
    parameter.grad = edited.clone()  # an object that may well lie where the old one lay


def edit_detached(parameter, factor):
    parameter.grad.detach().mul_(factor)


@pytest.mark.parametrize("edit", [edit_in_place, edit_by_replacing, edit_by_replacing_after_clearing, edit_detached])
@pytest.mark.parametrize(("factor", "kind"), [(math.nan, "nan"), (math.inf, "inf"), (1e4, "spike")])
def test_what_is_done_to_gradients_after_backward_is_judged(edit, factor, kind):
    model = Net()
    optimizer = guard(model, SGD(model.parameters(), lr=1e-2), warmup_steps=3)
    train(model, optimizer, range(5))
    before = snapshot(model, optimizer)
    step(model, optimizer, 5, between=lambda: edit(model.head.weight, factor))
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", kind)
    assert optimizer.last_record.trigger_layer == "head"
    assert_same(snapshot(model, optimizer), before)


def test_gradients_that_no_backward_made_are_judged():
    model = Net()
    optimizer = guard(model)
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(model(batch(0)), list(model.parameters())), strict=True
    ):
        parameter.grad = gradient * math.nan
    before = snapshot(model, optimizer)
    optimizer.step()
    assert optimizer.last_record.action == "skip"
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("factor", [math.nan, 1e6])
@pytest.mark.parametrize("clear", ["guard", "model", "by hand"])
def test_the_gradients_of_a_step_that_the_user_left_out_are_not_held_against_the_next(factor, clear):
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    train(model, optimizer, range(5))
    with fault(model.body.weight, factor):
        model(batch(5)).backward()
    if clear == "by hand":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        {"guard": optimizer, "model": model}[clear].zero_grad()
    model(batch(6)).backward()
    expected = global_norm(model.parameters())
    optimizer.step()
    assert optimizer.last_record.action == "step"
    assert optimizer.last_record.global_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("clear_first", [True, False], ids=["zero_grad before backward", "zero_grad after step"])
def test_a_nan_loss_that_the_user_dropped_before_backward_is_not_held_against_the_next_step(clear_first):
    model = Net()
    optimizer = guard(model)
    for number, spoil in enumerate([1.0, math.nan, 1.0]):
        if clear_first:
            optimizer.zero_grad()
        loss = model(batch(number) * spoil)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
        if not clear_first:
            optimizer.zero_grad()
    assert (optimizer.last_record.step, optimizer.last_record.action) == (2, "step")
    assert optimizer.last_record.loss == pytest.approx(float(loss.detach()), rel=1e-6)


def test_clearing_through_the_guard_forgets_a_bad_backward_also_where_the_next_gradients_come_by_hand():
    model = Net()
    optimizer = guard(model)
    with fault(model.body.weight, math.nan):
        model(batch(5)).backward()
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.last_record.action == "step"
    assert optimizer.last_record.nan_layers == []


def test_a_backward_that_raises_leaves_no_trace():
    model = Net()
    optimizer = guard(model)

    def refuse(gradient):
        raise ZeroDivisionError

    handle = model.body.weight.register_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        model(batch(0)).backward()
    handle.remove()
    step(model, optimizer)
    assert optimizer.last_record.action == "step"
    assert set(optimizer.last_record.layer_norms) == {"body", "head"}
    with fault(model.body.weight, math.nan):
        step(model, optimizer, between=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert optimizer.last_record.nan_layers == ["body"]


# Clipping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1e-3, 1e-1, 1e3])
def test_the_guards_own_clipping_equals_that_of_torch(limit):
    model, other = twins()
    optimizer = guard(model, SGD(model.parameters(), lr=0.1, momentum=0.9), max_grad_norm=limit)
    bare = SGD(other.parameters(), lr=0.1, momentum=0.9)
    for number in range(6):
        step(model, optimizer, number)
        bare.zero_grad()
        other(batch(number)).backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), limit)
        bare.step()
        assert optimizer.last_record.global_norm == pytest.approx(norm.item(), rel=1e-5)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6 * theirs.abs().max().item())


def test_clipping_by_the_user_and_by_the_guard_does_not_clip_twice():
    model, other = twins()
    optimizer = guard(model, SGD(model.parameters(), lr=0.1), max_grad_norm=0.5)
    bare = SGD(other.parameters(), lr=0.1)
    step(model, optimizer, between=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
    step(other, bare, between=lambda: torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-2))
    assert_same(model.state_dict(), other.state_dict())
