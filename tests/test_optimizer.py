"""GuardedOptimizer as a drop-in for the optimizer that it wraps."""

import contextlib
import copy
import gc
import io
import logging
import math
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from stabilityguard import ConfigurationError, GuardedOptimizer, StabilityGuardError
from tests.support import Net, NormNet, assert_same, batch, guard, snapshot, train

BASES = {
    "sgd-momentum": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9),
    "adamw-fused": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
    "adamw-foreach": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
}

every_base = pytest.mark.parametrize("make", BASES.values(), ids=BASES.keys())


@contextlib.contextmanager
def fault(parameter, factor):
    """Multiplies what backward puts into ``parameter.grad`` by ``factor``."""
    handle = parameter.register_hook(lambda gradient: gradient * factor)
    yield
    handle.remove()


def step(model, optimizer, number=0, *, between=None):
    """One training step; ``between()`` runs after backward."""
    optimizer.zero_grad()
    model(batch(number)).backward()
    if between is not None:
        between()
    return optimizer.step()


def spoil_step(model, optimizer, number=0, *, factor=math.nan, parameter=None):
    with fault(model.body.weight if parameter is None else parameter, factor):
        step(model, optimizer, number)


def twins(kind=Net):
    """Two models that are equal and share nothing."""
    model = kind()
    return model, copy.deepcopy(model)


def global_norm(parameters):
    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack([g.double().abs().square().sum() for g in gradients]).sqrt()).item()


def read_all(module):
    """State of a module and its gradients."""
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return copy.deepcopy(module.state_dict()), gradients


def memory(optimizer):
    return copy.deepcopy(optimizer.state_dict()["stabilityguard"])


def hooks_of(model):
    on_parameters = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    on_modules = [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    return sum(len(hooks) for hooks in on_parameters + on_modules)


# In front of the base ---------------------------------------------------------------------------------------------


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


# Learning-rate schedulers -----------------------------------------------------------------------------------------


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


# State ------------------------------------------------------------------------------------------------------------


def guarded_state(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_base
@pytest.mark.parametrize("saved", ["guarded", "unguarded"])
@pytest.mark.parametrize("resumed", ["guarded", "unguarded"])
def test_a_resumed_run_equals_the_unguarded_run_bit_for_bit(make, saved, resumed):
    model, other = twins()
    reference = make(other.parameters())
    train(other, reference, range(10))

    wrap = {"guarded": guard, "unguarded": lambda model, base: base}
    optimizer = wrap[saved](model, make(model.parameters()))
    train(model, optimizer, range(5))
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    continued = wrap[resumed](fresh, make(fresh.parameters()))
    continued.load_state_dict(guarded_state(optimizer))
    train(fresh, continued, range(5, 10))
    assert_same(fresh.state_dict(), other.state_dict())
    states = [getattr(o, "base_optimizer", o).state_dict()["state"] for o in (continued, reference)]
    assert_same(*states)


def test_a_loaded_guard_remembers_its_baselines_and_its_step_number():
    model = Net()
    optimizer = guard(model, warmup_steps=5)
    train(model, optimizer, range(8))
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    resumed = guard(fresh, warmup_steps=5)
    resumed.load_state_dict(guarded_state(optimizer))
    assert_same(memory(resumed), memory(optimizer))
    spoil_step(fresh, resumed, 8, factor=1e5)
    assert (resumed.last_record.step, resumed.last_record.kind) == (9, "spike")
    assert resumed.last_record.trigger_layer == "body"


def test_a_guard_without_that_memory_would_let_the_same_spike_pass():
    model = Net()
    optimizer = guard(model, warmup_steps=5)
    spoil_step(model, optimizer, 8, factor=1e5)
    assert optimizer.last_record.action == "step"


def test_loading_the_state_of_an_unguarded_run_keeps_the_step_count():
    model = Net()
    optimizer = guard(model)
    bare = AdamW(Net().parameters(), lr=0.25)
    train(model, optimizer, range(2))
    optimizer.load_state_dict(bare.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    train(model, optimizer, range(1))
    assert optimizer.last_record.step == 3


def test_an_open_row_of_skips_survives_a_resume():
    model = Net()
    optimizer = guard(model)
    for _ in range(4):
        spoil_step(model, optimizer)
    resumed = guard(model)
    resumed.load_state_dict(guarded_state(optimizer))
    with pytest.raises(StabilityGuardError):
        spoil_step(model, resumed)


def test_parameter_groups_state_and_defaults_are_the_live_ones_of_the_base():
    model = Net()
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = guard(model, base)
    assert optimizer.param_groups is base.param_groups
    assert optimizer.defaults is base.defaults
    train(model, optimizer, range(1))
    assert optimizer.state is base.state
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer)
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_as_the_base_does(set_to_none):
    model = Net()
    optimizer = guard(model)
    model(batch(0)).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


@pytest.mark.parametrize("through", ["guard", "base"])
def test_a_parameter_group_added_later_is_guarded_and_the_old_layers_keep_their_baselines(through):
    model = Net()
    base = SGD(model.body.parameters(), lr=1e-2)
    optimizer = guard(model, base, warmup_steps=3)
    train(model, optimizer, range(5))
    known = optimizer.last_record.baselines["body"]
    {"guard": optimizer, "base": base}[through].add_param_group({"params": list(model.head.parameters()), "lr": 0.5})
    step(model, optimizer, 5)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 0.5]
    assert set(optimizer.last_record.layer_norms) == {"body", "head"}
    assert optimizer.last_record.baselines.keys() == {"body"}
    assert optimizer.last_record.baselines["body"] == pytest.approx(known, rel=0.5)
    before = snapshot(model, optimizer)
    spoil_step(model, optimizer, 6, parameter=model.head.weight)
    assert_same(snapshot(model, optimizer), before)
    assert optimizer.last_record.nan_layers == ["head"]


def test_step_hooks_run_for_applied_steps_only():
    model = Net()
    optimizer = guard(model)
    calls = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    step(model, optimizer)
    assert calls == ["pre", "post"]
    spoil_step(model, optimizer)
    assert calls == ["pre", "post"]
    for handle in handles:
        handle.remove()
    step(model, optimizer)
    assert calls == ["pre", "post"]


def test_state_dict_hooks_are_called_once():
    model = Net()
    optimizer = guard(model)
    calls = []
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("save"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "load"]


def test_the_checkpoint_tools_of_torch_read_and_write_a_guard_without_making_a_step():
    model, other = twins()
    optimizer, bare = guard(model), AdamW(other.parameters(), lr=1e-2)
    read = get_optimizer_state_dict(model, optimizer)
    assert_same(read, get_optimizer_state_dict(other, bare))
    assert optimizer.last_record is None
    train(model, optimizer, range(3))
    train(other, bare, range(3))
    assert_same(snapshot(model, optimizer), snapshot(other, bare))
    assert optimizer.last_record.step == 3

    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    resumed = guard(fresh)
    set_optimizer_state_dict(fresh, resumed, saved)
    assert resumed.last_record is None
    train(fresh, resumed, range(3, 6))
    train(other, bare, range(3, 6))
    assert_same(snapshot(fresh, resumed)[0], snapshot(other, bare)[0])
    assert resumed.last_record.step == 3


@pytest.mark.parametrize("left_out", [True, False], ids=["after a step left out", "after a step"])
def test_reading_the_state_of_a_stateless_optimizer_is_no_step(left_out):
    model = Net()
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    train(model, optimizer, range(2))
    if left_out:
        (model(batch(2)) * math.nan).backward()
    model.zero_grad()
    before = snapshot(model, optimizer), memory(optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert_same((snapshot(model, optimizer), memory(optimizer)), before)
    assert (optimizer.last_record.step, optimizer.last_record.action) == (2, "step")


# Copies -----------------------------------------------------------------------------------------------------------


def by_deepcopy(*objects):
    return copy.deepcopy(objects)


def by_pickle(*objects):
    return pickle.loads(pickle.dumps(objects))


every_copy = pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])


@every_copy
def test_a_copy_of_model_and_guard_goes_on_alike_and_apart(copied):
    model = NormNet()
    optimizer = guard(model, warmup_steps=3)
    train(model, optimizer, range(5))
    twin, its_guard = copied(model, optimizer)
    assert_same(memory(its_guard), memory(optimizer))
    train(model, optimizer, range(5, 9))
    train(twin, its_guard, range(5, 9))
    assert_same(snapshot(model, optimizer), snapshot(twin, its_guard))

    before, original = snapshot(twin, its_guard), read_all(model)
    spoil_step(twin, its_guard, 9)
    assert its_guard.last_record.action == "skip"
    assert_same(snapshot(twin, its_guard), before)
    assert_same(read_all(model), original)
    assert optimizer.last_record.step == its_guard.last_record.step - 1 == 9


@every_copy
def test_a_copy_of_the_model_alone_trains_without_telling_the_guard(copied):
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, range(2))
    (twin,) = copied(model)
    bare = SGD(twin.parameters(), lr=0.1)
    for number in range(3):
        bare.zero_grad()
        (twin(batch(number)) * math.nan).backward()
    loss = model(batch(2))
    loss.backward()
    optimizer.step()
    assert (optimizer.last_record.step, optimizer.last_record.action) == (3, "step")
    assert optimizer.last_record.loss == pytest.approx(loss.item(), rel=1e-6)


# Several optimizers -----------------------------------------------------------------------------------------------


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


# What parameters there are ----------------------------------------------------------------------------------------


def test_a_frozen_parameter_is_no_layer_of_the_record():
    model = Net()
    model.body.requires_grad_(False)
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    before = copy.deepcopy(model.body.state_dict())
    step(model, optimizer)
    assert set(optimizer.last_record.layer_norms) == {"head"}
    spoil_step(model, optimizer, parameter=model.head.weight)
    assert optimizer.last_record.nan_layers == ["head"]
    assert_same(model.body.state_dict(), before)


def test_a_layer_unfrozen_later_is_judged():
    model = Net()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    step(model, optimizer)
    model.requires_grad_(True)
    step(model, optimizer)
    assert set(optimizer.last_record.layer_norms) == {"body", "head"}
    spoil_step(model, optimizer)
    assert optimizer.last_record.nan_layers == ["body"]


def test_an_unused_parameter_keeps_no_gradient_through_step_and_skip():
    model = Net()
    model.spare = nn.Linear(3, 3)
    optimizer = guard(model, AdamW(model.parameters(), weight_decay=0.5))
    before = copy.deepcopy(model.spare.state_dict())
    step(model, optimizer)
    spoil_step(model, optimizer)
    assert model.spare.weight.grad is None
    assert model.body.weight.grad is not None
    assert_same(model.spare.state_dict(), before)
    assert set(optimizer.last_record.layer_norms) == {"body", "head"}


class HalfUsed(nn.Module):
    """A single layer whose first parameter takes no part."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.used = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x @ self.used).square().mean()


def test_a_layer_whose_first_parameter_is_unused_is_measured_before_clipping():
    model = HalfUsed()
    optimizer = guard(model, SGD(model.parameters(), lr=1e-3), warmup_steps=2)
    train(model, optimizer, range(4))
    with fault(model.used, 1e4):
        step(model, optimizer, 4, between=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert optimizer.last_record.kind == "spike"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.head(self.embed(tokens)), tokens.roll(1))


def test_a_tied_parameter_counts_once():
    model = Tied()
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    model(torch.arange(5)).backward()
    expected = global_norm(model.parameters())
    optimizer.step()
    assert optimizer.last_record.global_norm == pytest.approx(expected, rel=1e-6)
    assert len(optimizer.last_record.layer_norms) == 1


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 3, sparse=True)

    def forward(self, tokens):
        return self.embed(tokens).square().sum()


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, SGD])
def test_a_sparse_gradient_is_measured_and_its_faults_are_found(kind):
    model = Sparse()
    base = kind(model.parameters(), lr=1e-2)
    optimizer = guard(model, base)
    tokens = torch.tensor([1, 2, 2, 5])
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).backward()
        expected = torch.linalg.vector_norm(model.embed.weight.grad.to_dense()).item()
        optimizer.step()
        assert optimizer.last_record.action == "step"
        assert optimizer.last_record.global_norm == pytest.approx(expected, rel=1e-6)
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    model(tokens).backward()
    model.embed.weight.grad._values()[1, 0] = math.nan
    optimizer.step()
    assert optimizer.last_record.nan_layers == ["embed"]
    assert_same(snapshot(model, optimizer), before)
    optimizer.zero_grad()
    model(tokens).backward()
    optimizer.step()
    assert optimizer.last_record.action == "step"


def test_a_sparse_gradient_is_clipped_to_the_norm_asked_for():
    model = Sparse()
    optimizer = guard(model, SGD(model.parameters(), lr=1.0), max_grad_norm=0.5)
    before = model.embed.weight.detach().clone()
    model(torch.tensor([1, 2, 2, 5])).backward()
    optimizer.step()
    assert torch.linalg.vector_norm(model.embed.weight.detach() - before).item() == pytest.approx(0.5, rel=1e-5)


class Vector(nn.Module):
    """Parameters of any kind; the loss is linear, so that gradients are what the batch says."""

    def __init__(self, *values):
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(v) for v in values])

    def forward(self, *gradients):
        total = 0.0
        for value, gradient in zip(self.values, gradients, strict=True):
            product = (value * gradient.conj()).real if value.is_complex() else value * gradient
            total = total + product.sum().float()
        return total


def step_on(optimizer, model, *gradients):
    """A step on chosen gradients."""
    for value, gradient in zip(model.values, gradients, strict=True):
        value.grad = gradient.clone()
    optimizer.step()
    return optimizer.last_record


def test_a_complex_parameter_is_measured_and_its_faults_are_found():
    model = Vector(torch.ones(3, dtype=torch.complex64), torch.ones(2))
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    optimizer.zero_grad()
    model(torch.full((3,), 3 + 4j), torch.zeros(2)).backward()
    optimizer.step()
    assert optimizer.last_record.global_norm == pytest.approx(5 * math.sqrt(3), rel=1e-6)
    before = snapshot(model, optimizer)
    record = step_on(optimizer, model, torch.tensor([1, complex(0, math.nan), 2]), torch.ones(2))
    assert (record.action, record.kind) == ("skip", "nan")
    record = step_on(optimizer, model, torch.tensor([1, complex(math.inf, 0), 2]), torch.ones(2))
    assert (record.action, record.kind) == ("skip", "inf")
    assert_same(snapshot(model, optimizer), before)


def test_a_parameter_without_elements_disturbs_nothing():
    model = Vector(torch.zeros(0, 3), torch.ones(4))
    optimizer = guard(model, AdamW(model.parameters()))
    optimizer.zero_grad()
    model(torch.zeros(0, 3), torch.full((4,), 2.0)).backward()
    optimizer.step()
    assert (optimizer.last_record.action, optimizer.last_record.global_norm) == ("step", 4.0)
    record = step_on(optimizer, model, torch.zeros(0, 3), torch.full((4,), math.nan))
    assert record.kind == "nan"


def test_a_model_of_nothing_but_empty_parameters_steps():
    model = Vector(torch.zeros(0))
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    record = step_on(optimizer, model, torch.zeros(0))
    assert (record.action, record.global_norm) == ("step", 0.0)


def test_a_float64_parameter_beside_float32_ones_is_measured_in_its_own_precision():
    model = Vector(torch.ones(2, dtype=torch.float64), torch.ones(2))
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    huge = torch.full((2,), 1e200, dtype=torch.float64)
    record = step_on(optimizer, model, torch.full((2,), 3.0, dtype=torch.float64), torch.full((2,), 4.0))
    assert record.global_norm == pytest.approx(math.sqrt(50), rel=1e-6)
    record = step_on(optimizer, model, huge, torch.ones(2))
    assert record.kind != "nan"
    record = step_on(optimizer, model, torch.tensor([1.0, math.nan], dtype=torch.float64), torch.ones(2))
    assert (record.action, record.kind) == ("skip", "nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_half_precision_are_measured_in_single_precision(dtype):
    model = Vector(torch.ones(1000, dtype=dtype))
    optimizer = guard(model, SGD(model.parameters(), lr=1e-6))
    gradient = torch.full((1000,), 60000.0).to(dtype)
    record = step_on(optimizer, model, gradient)
    assert (record.action, record.kind) == ("step", None)
    assert record.global_norm == pytest.approx(gradient[0].item() * math.sqrt(1000), rel=1e-5)
    assert step_on(optimizer, model, gradient * math.nan).kind == "nan"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_overflows_over_finite_elements_is_called_an_overflow(dtype):
    model = Vector(torch.ones(100, dtype=dtype), torch.ones(2))
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    before = snapshot(model, optimizer)
    gradient = torch.full((100,), 1e20).to(dtype)
    record = step_on(optimizer, model, gradient, torch.ones(2))
    assert (record.action, record.kind) == ("skip", "overflow")
    assert record.nan_layers == record.inf_layers == []
    assert record.global_norm == pytest.approx(10 * gradient[0].double().item(), rel=1e-6)
    assert_same(snapshot(model, optimizer), before)


def test_a_parameter_that_the_model_does_not_hold_is_guarded_too():
    model = Net()
    temperature = nn.Parameter(torch.tensor(1.0))
    optimizer = guard(model, SGD([*model.parameters(), temperature], lr=0.1))
    optimizer.zero_grad()
    (model(batch(0)) * temperature).backward()
    optimizer.step()
    norms = optimizer.last_record.layer_norms
    (name,) = set(norms) - {"body", "head"}
    before = temperature.detach().clone()
    optimizer.zero_grad()
    with fault(temperature, math.inf):
        (model(batch(0)) * temperature).backward()
    optimizer.step()
    assert optimizer.last_record.inf_layers == [name]
    assert torch.equal(temperature.detach(), before)


class InPlace(nn.Module):
    """Writes over its own activations."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.second(self.relu(self.first(x)))
        hidden += x
        return hidden.square().mean()


def test_operations_in_place_work_as_without_a_guard():
    model, other = twins(InPlace)
    optimizer, bare = guard(model), AdamW(other.parameters(), lr=1e-2)
    train(model, optimizer, range(4))
    train(other, bare, range(4))
    assert_same(snapshot(model, optimizer), snapshot(other, bare))


def test_an_average_of_the_weights_can_follow_the_applied_steps_only():
    model = Net()
    optimizer = guard(model, SGD(model.parameters(), lr=0.1))
    average = torch.optim.swa_utils.AveragedModel(model)
    for number in range(4):
        with fault(model.body.weight, math.nan if number == 2 else 1.0):
            step(model, optimizer, number)
        if optimizer.last_record.applied:
            average.update_parameters(model)
    assert average.n_averaged == 3
    average(batch(9))
    assert optimizer.last_record.step == 4


# What is refused --------------------------------------------------------------------------------------------------


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


# Life -------------------------------------------------------------------------------------------------------------


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


# What a window holds ----------------------------------------------------------------------------------------------


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


# Clipping ---------------------------------------------------------------------------------------------------------


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


# Votes and losses -------------------------------------------------------------------------------------------------


def test_a_veto_skips_one_step_and_is_no_trip():
    model = Net()
    optimizer = guard(model)
    step(model, optimizer)
    before = snapshot(model, optimizer)
    for _ in range(10):
        optimizer.veto("a bad batch")
        step(model, optimizer)
        assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "veto")
    assert_same(snapshot(model, optimizer), before)
    assert optimizer.reports == []
    step(model, optimizer)
    assert optimizer.last_record.action == "step"


class Returning(Net):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(super().forward(x))


@pytest.mark.parametrize(
    ("form", "pick"),
    [
        (lambda loss: loss, lambda output: output),
        (lambda loss: loss.reshape(1), lambda output: output),
        (lambda loss: types.SimpleNamespace(loss=loss), lambda output: output.loss),
        (lambda loss: {"logits": loss.detach(), "loss": loss}, lambda output: output["loss"]),
        (lambda loss: (loss, loss.detach().expand(3)), lambda output: output[0]),
        (lambda loss: [loss], lambda output: output[0]),
    ],
    ids=["scalar", "one element", ".loss", "dictionary", "tuple", "list"],
)
def test_the_loss_is_found_in_what_the_model_returns(form, pick):
    model = Returning(form)
    optimizer = guard(model)
    loss = pick(model(batch(0)))
    loss.backward()
    optimizer.step()
    assert optimizer.last_record.loss == pytest.approx(loss.item(), rel=1e-6)
    assert optimizer.last_record.rank_losses == (optimizer.last_record.loss,)


@pytest.mark.parametrize("form", [lambda loss: loss.detach(), lambda loss: loss * torch.ones(3), lambda loss: None])
def test_what_is_no_loss_is_not_taken_for_one(form):
    kept = []
    model = Returning(lambda loss: kept.append(loss) or form(loss))
    optimizer = guard(model)
    model(batch(0))
    kept[-1].backward()
    optimizer.step()
    assert optimizer.last_record.loss is None


@pytest.mark.parametrize("loss", [torch.tensor(3.5), torch.tensor([3.5]), 3.5])
def test_a_loss_given_to_step_goes_before_the_models_own(loss):
    model = Net()
    optimizer = guard(model)
    model(batch(0)).backward()
    optimizer.step(loss=loss)
    assert optimizer.last_record.loss == 3.5
    step(model, optimizer)
    assert optimizer.last_record.loss != 3.5


@pytest.mark.parametrize("loss", ["3.5", torch.ones(2), [1.0]])
def test_a_loss_that_is_no_number_is_refused(loss):
    model = Net()
    optimizer = guard(model)
    model(batch(0)).backward()
    with pytest.raises(ConfigurationError, match="loss"):
        optimizer.step(loss=loss)


@pytest.mark.parametrize(("loss", "kind"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_loss_that_is_not_finite_trips_by_itself(loss, kind):
    model = Net()
    optimizer = guard(model)
    before = snapshot(model, optimizer)
    model(batch(0)).backward()
    optimizer.step(loss=loss)
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", kind)
    assert optimizer.last_record.trigger_layer is None
    assert_same(snapshot(model, optimizer), before)


def test_an_evaluation_between_two_steps_is_not_taken_for_training():
    model = Net()
    optimizer = guard(model)
    model.eval()
    model(batch(9) * math.nan)
    model.train()
    with torch.no_grad():
        model(batch(9) * math.nan)
    step(model, optimizer)
    assert optimizer.last_record.action == "step"


def test_the_record_of_a_healthy_step_holds_what_was_measured():
    model = Net()
    optimizer = guard(model, SGD(model.parameters(), lr=0.25), warmup_steps=0)
    step(model, optimizer, 0)
    first = optimizer.last_record
    assert first.ratio is None
    assert first.baselines == {}
    model.zero_grad()
    loss = model(batch(1))
    loss.backward()
    norms = {name: global_norm(getattr(model, name).parameters()) for name in ("body", "head")}
    optimizer.step()
    record = optimizer.last_record
    assert (record.step, record.action, record.kind, record.trigger_layer) == (2, "step", None, None)
    assert record.applied
    assert record.layer_norms == pytest.approx(norms, rel=1e-6)
    assert record.baselines == pytest.approx(first.layer_norms, rel=1e-12)
    assert record.ratio == pytest.approx(max(norms[n] / first.layer_norms[n] for n in norms), rel=1e-6)
    assert record.loss == pytest.approx(loss.item(), rel=1e-6)
    assert record.nan_layers == record.inf_layers == []
    assert (record.bad_ranks, record.restored_step, record.lr) == ((), None, 0.25)


def test_the_record_of_a_spike_names_its_layer_and_how_far_it_is_beyond_the_baseline():
    model = Net()
    optimizer = guard(model, SGD(model.parameters(), lr=1e-3), warmup_steps=3)
    train(model, optimizer, range(5))
    spoil_step(model, optimizer, 5, factor=1e4)
    record = optimizer.last_record
    assert (record.action, record.kind, record.trigger_layer) == ("skip", "spike", "body")
    assert record.ratio == pytest.approx(record.layer_norms["body"] / record.baselines["body"], rel=1e-12)
    assert (record.bad_ranks, record.nan_layers, record.inf_layers) == ((0,), [], [])
    assert not record.applied
    assert [report.record for report in optimizer.reports] == [record]


def test_the_layer_to_blame_for_a_nan_that_spread_is_the_one_nearest_the_loss():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = guard(model)
    hidden = model[3](model[2](model[1](model[0](batch(0)))))
    hidden.register_hook(lambda gradient: gradient * math.nan)
    model[4](hidden).square().mean().backward()
    optimizer.step()
    assert optimizer.last_record.nan_layers == ["3", "2", "1", "0"]
    assert optimizer.last_record.trigger_layer == "3"


# Cost -------------------------------------------------------------------------------------------------------------


class CountReads(TorchDispatchMode):
    """Counts reads of a device tensor's value by the host."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_of_a_step(layers, *, bad=False, **options):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = guard(model, SGD(model.parameters(), lr=1e-4), warmup_steps=2, **options)
    for number in range(4):
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        optimizer.step()
    counter = CountReads()
    optimizer.zero_grad()
    loss = model(batch(4)).square().mean() * (1e6 if bad else 1.0)
    with counter:
        loss.backward()
        optimizer.step()
    assert optimizer.last_record.kind == ("spike" if bad else None)
    return counter.reads


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e-3}], ids=["plain", "clipping"])
def test_the_host_reads_as_many_values_for_two_layers_as_for_a_hundred(options):
    few, many = reads_of_a_step(2, **options), reads_of_a_step(100, **options)
    assert few == many
    assert 0 < few < 20
