"""Fault injection does what was declared, when and where it was declared, and nothing else."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stabilityguard import ConfigurationError
from stabilityguard.testing import Faults
from tests.support import Net, batch, guard, train


def gradients(model, steps, faults, *, micro_batches=1):
    """The gradients of every step, by parameter name."""
    seen = []
    with faults.inject(model, micro_batches=micro_batches):
        for step in steps:
            model.zero_grad()
            for part in range(micro_batches):
                model(batch(step * micro_batches + part)).backward()
            seen.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return seen


def test_a_spike_multiplies_the_gradients_of_its_layer_in_its_step_alone():
    model = Net()
    clean = gradients(model, range(4), Faults())
    faulty = gradients(model, range(4), Faults().spike("body", step=3, factor=50.0))
    for step in range(4):
        for name, gradient in clean[step].items():
            factor = 50.0 if step == 2 and name.startswith("body.") else 1.0
            assert torch.equal(faulty[step][name], gradient * factor)


@pytest.mark.parametrize(("method", "value"), [("nan", math.nan), ("inf", math.inf)])
def test_one_element_of_every_gradient_of_the_layer_is_spoiled(method, value):
    model = Net()
    clean = gradients(model, range(2), Faults())
    faulty = gradients(model, range(2), getattr(Faults(), method)("head", step=2))
    for name, gradient in clean[1].items():
        expected = gradient.clone()
        if name.startswith("head."):
            expected.view(-1)[0] = value
        assert torch.equal(faulty[1][name].nan_to_num(7.0), expected.nan_to_num(7.0))
    assert faulty[0].keys() == clean[0].keys()
    assert all(torch.equal(faulty[0][name], clean[0][name]) for name in clean[0])


def test_faults_chain_and_each_has_its_own_step():
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    faults = Faults().spike("body", step=6).nan("head", step=8).inf("body", step=10).inf_loss(step=12)
    with faults.inject(model):
        train(model, optimizer, range(1, 14))
    told = [(r.record.step, r.record.kind, r.record.trigger_layer) for r in optimizer.reports]
    assert told[:3] == [(6, "spike", "body"), (8, "nan", "head"), (10, "inf", "body")]
    assert told[3][0] == 12
    assert optimizer.reports[3].record.loss == math.inf
    assert len(told) == 4


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.inner, self.wrap = Net(), wrap

    def forward(self, x):
        return self.wrap(self.inner(x))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda loss: loss, lambda out: out),
        (lambda loss: SimpleNamespace(loss=loss), lambda out: out.loss),
        (lambda loss: {"loss": loss, "other": 1}, lambda out: out["loss"]),
        (lambda loss: (loss, "logits"), lambda out: out[0]),
    ],
    ids=["scalar", "attribute", "mapping", "tuple"],
)
def test_the_loss_is_made_infinite_in_whatever_form_the_model_returns_it(wrap, unwrap):
    model = Wrapped(wrap)
    with Faults().inf_loss(step=2).inject(model):
        losses = [unwrap(model(batch(step))).item() for step in range(3)]
    assert [math.isinf(loss) for loss in losses] == [False, True, False]


def test_evaluation_is_neither_counted_nor_spoiled():
    model = Net()
    with Faults().inf_loss(step=1).inject(model):
        with torch.no_grad():
            assert model(batch(0)).isfinite()
        model.eval()
        assert model(batch(0)).isfinite()
        model.train()
        assert model(batch(0)).isinf()


def test_with_micro_batches_the_fault_strikes_the_accumulated_gradient_once():
    model = Net()
    clean = gradients(model, range(3), Faults(), micro_batches=2)
    faulty = gradients(model, range(3), Faults().spike("head", step=2, factor=10.0), micro_batches=2)
    assert torch.allclose(faulty[1]["head.weight"], 10 * clean[1]["head.weight"])
    assert torch.equal(faulty[2]["head.weight"], clean[2]["head.weight"])


def test_a_fault_of_another_rank_does_not_happen_here():
    model = Net()
    with Faults().nan("head", step=1, rank=1).inject(model):
        model(batch(0)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_after_the_block_nothing_is_left_on_the_model():
    model = Net()
    with pytest.raises(KeyError), Faults().nan("head", step=1).inf_loss(step=1).inject(model):
        raise KeyError
    assert model(batch(0)).isfinite()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_layer_that_the_model_lacks_is_refused_with_names_like_it():
    with (
        pytest.raises(ConfigurationError, match=r"trains no layer 'bodi'; close ones: body"),
        Faults().nan("bodi", step=1).inject(Net()),
    ):
        pass


def test_an_infinite_loss_needs_a_model_that_returns_one():
    model = nn.Linear(4, 2)
    with pytest.raises(ConfigurationError, match="returns its loss"), Faults().inf_loss(step=1).inject(model):
        model(batch(0))


def test_a_layer_without_parameters_of_its_own_is_refused():
    model = nn.ModuleDict({"outer": nn.ModuleDict({"in": nn.Linear(4, 2)})})
    with (
        pytest.raises(ConfigurationError, match=r"trains no layer 'outer'; close ones: outer\.in"),
        Faults().nan("outer", step=1).inject(model),
    ):
        pass


def test_a_criterion_stands_in_for_a_model_that_does_not_return_its_loss():
    model, criterion = nn.Linear(4, 2), nn.MSELoss()
    with Faults().inf_loss(step=2).inject(model, criterion=criterion):
        losses = [criterion(model(batch(step)), torch.zeros(6, 2)).item() for step in range(3)]
        with torch.no_grad():
            losses.append(criterion(model(batch(0)), torch.zeros(6, 2)).item())
    assert [math.isinf(loss) for loss in losses] == [False, True, False, False]
    assert not criterion._forward_hooks


@pytest.mark.parametrize("faulty_step", [1, 2, 3])
def test_where_all_forwards_of_a_step_come_first_the_last_backward_is_spoiled(faulty_step):
    model, factor = Net(), 10.0
    with Faults().spike("head", step=faulty_step, factor=factor).inject(model, micro_batches=3):
        for step in range(1, 4):
            model.zero_grad()
            for loss in [model(batch(3 * step + part)) for part in range(3)]:
                loss.backward()
            spoiled = [p.grad.clone() for p in model.head.parameters()]
            body = [p.grad.clone() for p in model.body.parameters()]
            if step == faulty_step:
                break
    model.zero_grad()
    for part in range(3):
        model(batch(3 * faulty_step + part)).backward()
    for gradient, p in zip(spoiled, model.head.parameters(), strict=True):
        assert torch.allclose(gradient, factor * p.grad)
    assert all(torch.equal(g, p.grad) for g, p in zip(body, model.body.parameters(), strict=True))


def test_gradients_that_are_sparse_or_not_contiguous_can_be_spoiled():
    model = nn.ModuleDict({"words": nn.Embedding(5, 3, sparse=True), "image": nn.Conv2d(2, 2, 3)})
    model["image"].to(memory_format=torch.channels_last)
    model.forward = lambda x: model["words"](x).sum() + model["image"](torch.ones(1, 2, 4, 4)).square().sum()
    with Faults().nan("words", step=1).nan("image", step=1).inject(model):
        model(torch.tensor([1, 3])).backward()
    assert model["words"].weight.grad.to_dense().isnan().sum() == 1
    assert model["image"].weight.grad.isnan().sum() == 1
