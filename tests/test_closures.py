"""Optimizers that make their gradients themselves, through a closure."""

import copy
import math

import pytest
import torch
from torch.optim import LBFGS, SGD, AdamW

from stabilityguard import GradientSpikeError, SnapshotPolicy, StabilityGuardError
from tests.support import Net, NormNet, assert_same, batch, guard, snapshot


class Closure:
    """Clears gradients, runs forward and backward, returns the loss; spoils the evaluations that it is told to."""

    def __init__(self, model, optimizer, x=None, *, spoil=(), factor=math.nan, clears=True):
        self.model, self.optimizer, self.x = model, optimizer, batch(0) if x is None else x
        self.spoil, self.factor, self.clears = set(spoil), factor, clears
        self.calls = 0
        self.losses = []

    def __call__(self):
        self.calls += 1
        if self.clears:
            self.optimizer.zero_grad()
        loss = self.model(self.x)
        (loss * self.factor if self.calls in self.spoil else loss).backward()
        self.losses.append(loss)
        return loss


def lbfgs(model, **options):
    return LBFGS(model.parameters(), **{"lr": 0.1, "max_iter": 4, "history_size": 3, **options})


def twins(kind=Net):
    model = kind()
    return model, copy.deepcopy(model)


# One evaluation ---------------------------------------------------------------------------------------------------


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    model, other = twins()
    optimizer, bare = guard(model), AdamW(other.parameters(), lr=1e-2)
    for number in range(5):
        closure, theirs = Closure(model, optimizer, batch(number)), Closure(other, bare, batch(number))
        assert optimizer.step(closure) is closure.losses[0]
        bare.step(theirs)
        assert closure.calls == 1
        assert optimizer.last_record.loss == pytest.approx(closure.losses[0].item(), rel=1e-6)
    assert_same(snapshot(model, optimizer), snapshot(other, bare))


def test_a_closure_runs_with_gradients_enabled():
    model = Net()
    optimizer = guard(model)
    with torch.no_grad():
        optimizer.step(Closure(model, optimizer))
    assert optimizer.last_record.action == "step"


def test_a_closure_that_returns_a_number_gives_it_back():
    model = Net()
    optimizer = guard(model)

    def closure():
        optimizer.zero_grad()
        model(batch(0)).backward()
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert optimizer.last_record.loss == 2.5


@pytest.mark.parametrize("kind", [Net, NormNet])
def test_a_nan_made_inside_the_closure_leaves_everything_untouched_and_returns_the_loss(kind):
    model = kind()
    optimizer = guard(model)
    optimizer.step(Closure(model, optimizer))
    before = snapshot(model, optimizer)
    closure = Closure(model, optimizer, spoil=[1])
    assert optimizer.step(closure) is closure.losses[0]
    assert closure.calls == 1
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "nan")
    assert_same(snapshot(model, optimizer), before)


def test_a_spike_made_inside_the_closure_is_skipped():
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    for number in range(5):
        optimizer.step(Closure(model, optimizer, batch(number)))
    before = snapshot(model, optimizer)
    optimizer.step(Closure(model, optimizer, spoil=[1], factor=1e4))
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "spike")
    assert_same(snapshot(model, optimizer), before)


def test_a_loss_that_is_not_finite_is_found_where_only_the_closure_knows_it():
    model = Net()
    optimizer = guard(model)
    before = snapshot(model, optimizer)

    def closure():
        optimizer.zero_grad()
        model(batch(0)).backward()
        return torch.tensor(math.inf)

    assert optimizer.step(closure) == math.inf
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "inf")
    assert_same(snapshot(model, optimizer), before)


def test_a_closure_that_raises_passes_its_exception_and_counts_for_nothing():
    model = Net()
    optimizer = guard(model)

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert optimizer.last_record is None
    optimizer.step(Closure(model, optimizer))
    assert optimizer.last_record.step == 1


def test_raising_on_a_closures_nan_leaves_the_parameters():
    model = Net()
    optimizer = guard(model, nan_action="raise")
    before = snapshot(model, optimizer)
    with pytest.raises(GradientSpikeError, match="nan at step 1"):
        optimizer.step(Closure(model, optimizer, spoil=[1]))
    assert_same(snapshot(model, optimizer), before)


# Several evaluations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_a_healthy_lbfgs_run_equals_the_unguarded_run_bit_for_bit(search):
    model, other = twins()
    optimizer = guard(model, lbfgs(model, line_search_fn=search))
    bare = lbfgs(other, line_search_fn=search)
    for number in range(6):
        mine, theirs = Closure(model, optimizer, batch(number)), Closure(other, bare, batch(number))
        assert torch.equal(optimizer.step(mine), bare.step(theirs))
        assert mine.calls == theirs.calls > 1
    assert_same(snapshot(model, optimizer), snapshot(other, bare))
    assert (optimizer.last_record.step, optimizer.last_record.action) == (6, "step")


@pytest.mark.parametrize("history", [0, 3], ids=["in the first step", "later on"])
@pytest.mark.parametrize("evaluation", [1, 2, 4])
@pytest.mark.parametrize("kind", [Net, NormNet])
def test_a_nan_at_any_evaluation_of_lbfgs_brings_all_back_bit_for_bit(kind, evaluation, history):
    model = kind()
    optimizer = guard(model, lbfgs(model))
    for number in range(history):
        optimizer.step(Closure(model, optimizer, batch(number)))
    before = snapshot(model, optimizer)
    closure = Closure(model, optimizer, batch(7), spoil=[evaluation])
    assert optimizer.step(closure) is closure.losses[0]
    assert closure.calls == evaluation
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "nan")
    assert optimizer.last_record.step == history + 1
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("evaluation", [1, 3])
def test_lbfgs_goes_on_after_a_skip_as_if_that_step_had_never_been(evaluation):
    model, other = twins()
    optimizer, bare = guard(model, lbfgs(model)), lbfgs(other)
    for number in range(2):
        optimizer.step(Closure(model, optimizer, batch(number)))
        bare.step(Closure(other, bare, batch(number)))
    optimizer.step(Closure(model, optimizer, batch(7), spoil=[evaluation]))
    for number in range(2, 4):
        optimizer.step(Closure(model, optimizer, batch(number)))
        bare.step(Closure(other, bare, batch(number)))
    assert_same(snapshot(model, optimizer), snapshot(other, bare))


def test_an_exception_of_a_later_evaluation_passes_and_counts_for_nothing():
    model = Net()
    optimizer = guard(model, lbfgs(model))
    closure = Closure(model, optimizer)

    def failing():
        if closure.calls == 2:
            raise ZeroDivisionError
        return closure()

    with pytest.raises(ZeroDivisionError):
        optimizer.step(failing)
    assert optimizer.last_record is None


@pytest.mark.parametrize("evaluation", [1, 3])
def test_raising_on_a_nan_of_lbfgs_leaves_parameters_and_state(evaluation):
    model = Net()
    optimizer = guard(model, lbfgs(model), nan_action="raise")
    optimizer.step(Closure(model, optimizer))
    before = snapshot(model, optimizer)
    with pytest.raises(GradientSpikeError):
        optimizer.step(Closure(model, optimizer, batch(1), spoil=[evaluation]))
    assert_same(snapshot(model, optimizer), before)


def test_a_rollback_of_lbfgs_replays_bit_for_bit():
    model = Net()
    optimizer = guard(
        model, lbfgs(model), nan_action="rollback", snapshots=SnapshotPolicy(every=2, keep=2, quarantine=0)
    )
    states = [snapshot(model, optimizer)]
    for number in range(3):
        optimizer.step(Closure(model, optimizer, batch(number)))
        states.append(snapshot(model, optimizer))
    optimizer.step(Closure(model, optimizer, batch(3), spoil=[3]))
    assert (optimizer.last_record.action, optimizer.last_record.restored_step) == ("rollback", 2)
    assert_same(snapshot(model, optimizer), states[2])
    optimizer.step(Closure(model, optimizer, batch(2)))
    assert_same(snapshot(model, optimizer), states[3])


# Sharpness-aware kinds --------------------------------------------------------------------------------------------


class Climbing(torch.optim.Optimizer):
    """Sharpness-aware minimisation: up to the edge of a ball, then down from the gradient found there."""

    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _gradients(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        parameters = self._gradients()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters]))
        for p in parameters:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self._gradients():
            p.copy_(self.state[p]["before"])
        self.base.step()
        self.zero_grad()


class AfterBackward(Climbing):
    """Expects that the first gradient is there, and calls the closure for the second."""

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


class FromClosure(Climbing):
    """Calls the closure for both gradients."""

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


def climb(kind, model, optimizer, number, **options):
    clears = kind is FromClosure
    closure = Closure(model, optimizer, batch(number), clears=clears, **options)
    if not clears:
        optimizer.zero_grad()
        model(batch(number)).backward()
    optimizer.step(closure)
    return closure


every_climber = pytest.mark.parametrize("kind", [AfterBackward, FromClosure])


@every_climber
def test_a_healthy_sharpness_aware_run_equals_the_unguarded_run_bit_for_bit(kind):
    model, other = twins()
    optimizer = guard(model, kind(model.parameters(), SGD, lr=0.1))
    bare = kind(other.parameters(), SGD, lr=0.1)
    start = copy.deepcopy(model.state_dict())
    for number in range(4):
        climb(kind, model, optimizer, number)
        climb(kind, other, bare, number)
    assert not torch.equal(other.body.weight, start["body.weight"])
    assert_same(model.state_dict(), other.state_dict())
    assert (optimizer.last_record.step, optimizer.last_record.action) == (4, "step")


@every_climber
@pytest.mark.parametrize("evaluation", ["first", "second"])
def test_a_nan_at_either_gradient_of_a_sharpness_aware_step_leaves_parameters_and_state(kind, evaluation):
    model = Net()
    optimizer = guard(model, kind(model.parameters(), SGD, lr=0.1))
    climb(kind, model, optimizer, 0)
    before = snapshot(model, optimizer)
    if evaluation == "first" and kind is AfterBackward:
        optimizer.zero_grad()
        (model(batch(1)) * math.nan).backward()
        optimizer.step(Closure(model, optimizer, batch(1), clears=False))
    else:
        last = {"first": 1, "second": 2}[evaluation] - (kind is AfterBackward)
        climb(kind, model, optimizer, 1, spoil=[last])
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "nan")
    assert_same(snapshot(model, optimizer), before)


# What cannot be undone --------------------------------------------------------------------------------------------


class Twice(SGD):
    """Does not say that it evaluates its closure twice, and moves in between."""

    def step(self, closure=None):
        loss = super().step(closure)
        super().step(closure)
        return loss


def test_an_optimizer_that_evaluates_twice_unannounced_works_while_gradients_are_finite():
    model, other = twins()
    optimizer, bare = guard(model, Twice(model.parameters(), lr=0.1)), Twice(other.parameters(), lr=0.1)
    for number in range(3):
        optimizer.step(Closure(model, optimizer, batch(number)))
        bare.step(Closure(other, bare, batch(number)))
    assert_same(model.state_dict(), other.state_dict())


def test_an_optimizer_that_evaluates_twice_unannounced_is_named_when_the_second_gradient_is_bad():
    model = Net()
    optimizer = guard(model, Twice(model.parameters(), lr=0.1))
    optimizer.step(Closure(model, optimizer))
    with pytest.raises(StabilityGuardError, match="Twice evaluated its closure again"):
        optimizer.step(Closure(model, optimizer, spoil=[2]))
    assert optimizer.last_record.step == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_step_without_closure_of_an_optimizer_that_needs_one_is_the_bases_own_error():
    model = Net()
    optimizer = guard(model, lbfgs(model))
    model(batch(0)).backward()
    with pytest.raises(TypeError, match="closure"):
        optimizer.step()
    assert optimizer.last_record is None


def test_a_closed_guard_passes_the_closure_on():
    model, other = twins()
    optimizer, bare = guard(model, lbfgs(model)), lbfgs(other)
    optimizer.close()
    mine, theirs = Closure(model, optimizer), Closure(other, bare)
    assert torch.equal(optimizer.step(mine), bare.step(theirs))
    assert mine.calls == theirs.calls
    assert_same(snapshot(model, optimizer), snapshot(other, bare))
