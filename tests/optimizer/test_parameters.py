"""Parameters of every kind: frozen, unused, tied, sparse, complex, empty, of every precision."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from tests.optimizer.steps import fault, global_norm, spoil_step, step, twins
from tests.support import Net, assert_same, batch, guard, snapshot, train


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
