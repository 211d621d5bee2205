"""Several guards at once, and how one ends: its hooks go, and errors of others pass."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from tests.optimizer.steps import hooks_of, memory, read_all, step, twins
from tests.support import Net, NormNet, assert_same, batch, guard, snapshot, train

# Several optimizers --------------------------------------------------------------------------------------------------


class Gan(nn.Module):
    """Generator and discriminator in one module; the losses are its output, or made outside of it."""

    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.d = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x, part, real=0.0):
        if part == "d":
            return (self.d(x + real) - self.d(self.g(x).detach())).mean().square()
        return self.d(self.g(x)).square().mean()


@pytest.mark.parametrize("clear_first", [True, False], ids=["zero_grad before backward", "zero_grad after step"])
@pytest.mark.parametrize("inside", [True, False], ids=["model returns the loss", "model is not called itself"])
def test_a_fault_of_the_discriminator_skips_only_the_discriminator(clear_first, inside):
    gan = Gan()
    guards = {part: guard(gan, AdamW(getattr(gan, part).parameters(), lr=1e-3)) for part in ("g", "d")}

    def play(part, x, real=0.0):
        optimizer = guards[part]
        if clear_first:
            optimizer.zero_grad()
        loss = gan(x, part, real) if inside else Gan.forward(gan, x, part, real)
        loss.backward()
        before = {p: (read_all(getattr(gan, p)), snapshot(getattr(gan, p), guards[p]), memory(guards[p])) for p in "gd"}
        optimizer.step()
        if not clear_first:
            optimizer.zero_grad()
        return before

    for number in range(4):
        for part in ("d", "g"):
            play(part, batch(number))
    before = play("d", batch(4), real=math.nan)
    assert (guards["d"].last_record.action, guards["d"].last_record.kind) == ("skip", "nan")
    assert_same(dict(gan.d.named_parameters()), {n: before["d"][1][0][n] for n, _ in gan.d.named_parameters()})
    assert_same(guards["d"].base_optimizer.state_dict(), before["d"][1][1])
    assert all(torch.isfinite(buffer).all() for buffer in gan.d.buffers())
    assert_same((read_all(gan.g), snapshot(gan.g, guards["g"]), memory(guards["g"])), before["g"])
    assert guards["g"].last_record.step == 4

    play("g", batch(5))
    assert (guards["g"].last_record.action, guards["g"].last_record.step) == ("step", 5)
    play("d", batch(5))
    assert (guards["d"].last_record.action, guards["d"].last_record.step) == ("step", 6)


def test_gradients_that_the_generators_backward_leaves_in_the_discriminator_are_not_the_discriminators():
    gan = Gan()
    guards = {part: guard(gan, SGD(getattr(gan, part).parameters(), lr=1e-3), warmup_steps=2) for part in ("g", "d")}
    for number in range(4):
        for part in ("d", "g"):
            gan.zero_grad()
            loss = gan(batch(number), part)
            (loss * (1e6 if part == "g" else 1.0)).backward()
            guards[part].step()
    assert {part: optimizer.last_record.action for part, optimizer in guards.items()} == {"g": "step", "d": "step"}
    assert not guards["d"].reports


# Life ----------------------------------------------------------------------------------------------------------------


def test_closing_detaches_every_hook_and_steps_go_straight_to_the_base():
    model, other = twins()
    optimizer = guard(model)
    bare = AdamW(other.parameters(), lr=1e-2)
    assert hooks_of(model) > 0
    step(model, optimizer)
    optimizer.close()
    optimizer.close()
    assert hooks_of(model) == 0
    train(other, bare, range(1))
    train(model, optimizer, range(1, 4))
    train(other, bare, range(1, 4))
    assert_same(snapshot(model, optimizer), snapshot(other, bare))
    assert optimizer.last_record.step == 1


def test_leaving_the_context_detaches_every_hook():
    model = NormNet()
    with guard(model) as optimizer:
        step(model, optimizer)
        assert hooks_of(model) > 0
    assert hooks_of(model) == 0


def test_leaving_the_context_by_an_exception_detaches_every_hook_and_passes_the_exception():
    model = Net()
    with pytest.raises(ZeroDivisionError), guard(model):
        raise ZeroDivisionError
    assert hooks_of(model) == 0


def test_closing_after_a_group_was_added_detaches_every_hook():
    model = Net()
    optimizer = guard(model, SGD(model.body.parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(model.head.parameters())})
    step(model, optimizer)
    optimizer.close()
    assert hooks_of(model) == 0


def test_closing_one_of_two_guards_leaves_the_other_at_work():
    gan = Gan()
    d, g = (guard(gan, SGD(part.parameters(), lr=0.1)) for part in (gan.d, gan.g))
    d.close()
    gan(batch(0), "g").backward()
    gan.g[0].weight.grad.fill_(math.nan)
    g.step()
    assert g.last_record.action == "skip"


def test_a_dropped_guard_is_collected_and_the_model_trains_on():
    model = Net()
    optimizer = guard(model)
    step(model, optimizer)
    base, dropped = optimizer.base_optimizer, weakref.ref(optimizer)
    inner = weakref.ref(optimizer._guard)
    del optimizer
    gc.collect()
    assert dropped() is None
    assert inner() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    step(model, base)


class Failing(SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ZeroDivisionError("from inside the base")
        return super().step(closure)


def test_an_exception_of_the_base_passes_and_counts_for_nothing():
    model = Net()
    base = Failing(model.parameters(), lr=0.1)
    optimizer = guard(model, base)
    step(model, optimizer)
    record, known = optimizer.last_record, memory(optimizer)
    base.fails = True
    with pytest.raises(ZeroDivisionError, match="from inside the base"):
        step(model, optimizer, 1)
    assert optimizer.last_record is record
    assert_same(memory(optimizer), known)
    base.fails = False
    step(model, optimizer, 1)
    assert (optimizer.last_record.step, optimizer.last_record.action) == (2, "step")


def test_a_step_without_any_gradient_is_the_bases_own():
    model = Net()
    optimizer = guard(model, AdamW(model.parameters(), lr=0.1))
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert_same(model.state_dict(), before)
    assert optimizer.last_record.action == "step"
    assert optimizer.last_record.layer_norms == {}
