"""Vetoes, losses, and the record of a step."""

import math
import types

import pytest
import torch
from torch import nn
from torch.optim import SGD

from stabilityguard import ConfigurationError
from tests.optimizer.steps import global_norm, spoil_step, step
from tests.support import Net, assert_same, batch, guard, snapshot, train


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
