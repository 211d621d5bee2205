"""What cannot be guarded is refused, in words that name it."""

import copy
import logging
import math

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from stabilityguard import ConfigurationError, GuardedOptimizer, StabilityGuardError
from tests.optimizer.steps import hooks_of, spoil_step, step
from tests.support import Net, assert_same, batch, guard


class Prepared(Optimizer):
    """A wrapper of the usual kind, with the optimizer inside in ``.optimizer``."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def test_guarding_twice_is_refused():
    model = Net()
    optimizer = guard(model)
    with pytest.raises(ConfigurationError, match="guarded already"):
        guard(model, optimizer)
    with pytest.raises(ConfigurationError, match="guarded already"):
        guard(model, Prepared(optimizer))


def test_a_base_whose_guard_was_closed_can_be_guarded_again():
    model = Net()
    optimizer = guard(model)
    optimizer.close()
    again = guard(model, optimizer.base_optimizer)
    spoil_step(model, again)
    assert again.last_record.action == "skip"


def test_a_guard_around_another_wrapper_keeps_one_learning_rate():
    model = Net()
    inner = SGD(model.parameters(), lr=1.0)
    optimizer = guard(model, Prepared(inner))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(model, optimizer)
    scheduler.step()
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.5
    before = copy.deepcopy(model.state_dict())
    spoil_step(model, optimizer)
    assert_same(model.state_dict(), before)


def test_swapped_arguments_are_named():
    model = Net()
    with pytest.raises(ConfigurationError, match="optimizer comes first"):
        GuardedOptimizer(model, SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spike_threshold": 1.0}, "spike_threshold.*1.0"),
        ({"spike_threshold": "10"}, "spike_threshold"),
        ({"spike_threshold": math.nan}, "spike_threshold"),
        ({"nan_action": "stop"}, "nan_action.*'skip'.*'stop'"),
        ({"nan_action": ["skip"]}, "nan_action"),
        ({"log_every": -1}, "log_every"),
        ({"log_every": 1.5}, "log_every"),
        ({"log_dir": 7}, "log_dir"),
        ({"ema_alpha": 0.0}, "ema_alpha"),
        ({"ema_alpha": 1.5}, "ema_alpha.*at most 1"),
        ({"warmup_steps": True}, "warmup_steps"),
        ({"verbose": "yes"}, "verbose"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"detector": "enormous"}, "detector"),
        ({"snapshots": 10}, "SnapshotPolicy"),
        ({"budget": 5}, "Budget"),
        ({"track": [1]}, "track"),
        ({"track": {"counter": 3}}, "counter.*state_dict"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named_in_the_error(options, words):
    with pytest.raises(ConfigurationError, match=words):
        guard(Net(), **options)


@pytest.mark.parametrize("wrong", ["adamw", None, AdamW, iter(())])
def test_a_base_that_is_no_optimizer_is_named_in_the_error(wrong):
    with pytest.raises(ConfigurationError, match=f"base_optimizer.*{type(wrong).__name__}"):
        GuardedOptimizer(wrong, Net())


@pytest.mark.parametrize("wrong", ["gpt", None, Net])
def test_a_model_that_is_no_module_is_named_in_the_error(wrong):
    with pytest.raises(ConfigurationError, match=f"model.*{type(wrong).__name__}"):
        GuardedOptimizer(SGD(Net().parameters(), lr=0.1), wrong)


def test_an_optimizer_over_another_model_is_refused():
    with pytest.raises(ConfigurationError, match="belongs to the model"):
        guard(Net(), SGD(Net().parameters(), lr=0.1))


def test_a_refused_guard_leaves_no_hooks():
    model = Net()
    with pytest.raises(ConfigurationError):
        guard(model, SGD(Net().parameters(), lr=0.1))
    with pytest.raises(ConfigurationError):
        guard(model, detector="enormous")
    assert hooks_of(model) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_an_optimizer_that_steps_inside_backward_is_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: PLC0415 (the import warns)

    model = Net()
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigurationError, match="inside backward"):
        guard(model)


def test_hooks_of_the_user_that_step_and_clear_inside_backward_are_an_error_at_step():
    model = Net()
    each = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter):
        each[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    optimizer = guard(model)
    model(batch(0)).backward()
    with pytest.raises(StabilityGuardError, match="inside backward"):
        optimizer.step()
    assert optimizer.last_record is None


class Sharpness(SGD):
    """Climbs and descends in two calls of the user's."""

    def first_step(self):
        self.step()

    def second_step(self):
        self.step()


def test_an_optimizer_that_is_stepped_in_two_halves_gives_a_warning(caplog):
    model = Net()
    with caplog.at_level(logging.WARNING, logger="stabilityguard"):
        guard(model)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="stabilityguard"):
        guard(model, Sharpness(model.parameters(), lr=0.1))
    assert "first_step" in caplog.text
