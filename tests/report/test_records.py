import copy
import dataclasses
import math
import pickle

import pytest
import torch
from torch import nn

from stabilityguard import SpikeReport, StepRecord
from stabilityguard.report.records import LayerReadings
from tests.support import Net, batch, guard, train


def readings(**values):
    """Readings of three layers; the last had no gradient."""
    given = {
        "places": {"a": 0, "b": 1, "c": 2},
        "norms": torch.tensor([1.0, 6.0, 0.0], dtype=torch.float64),
        "baselines": torch.tensor([2.0, 3.0, torch.nan], dtype=torch.float64),
        "ratios": torch.tensor([0.5, 2.0, torch.nan], dtype=torch.float64),
        "present": torch.tensor([True, True, False]),
        **values,
    }
    return LayerReadings(**given)


def record(**fields):
    return StepRecord(**{"step": 1, "action": "step", "global_norm": 1.0, "layers": readings(), **fields})


def two_branches():
    """Two layers side by side, of which a loss may use one."""
    return nn.ModuleDict({"used": nn.Linear(4, 1), "idle": nn.Linear(4, 1)})


def spoil_head(step, model):
    if step == 8:
        model.head.weight.grad[0, 0] = torch.nan


def test_a_healthy_record_says_what_was_measured():
    model = Net()
    optimizer = guard(model, torch.optim.SGD(model.parameters(), lr=0.125), warmup_steps=3)
    train(model, optimizer, range(1, 8))
    norms = {
        name: math.sqrt(sum(float(p.grad.double().square().sum()) for p in getattr(model, name).parameters()))
        for name in ("body", "head")
    }
    last = optimizer.last_record
    assert (last.step, last.action, last.kind, last.trigger_layer, last.restored_step) == (7, "step", None, None, None)
    assert last.applied
    assert last.layer_norms == pytest.approx(norms, rel=1e-6)
    assert last.global_norm == pytest.approx(math.hypot(*norms.values()), rel=1e-6)
    assert last.lr == 0.125
    assert (last.rank_losses, last.bad_ranks) == ((last.loss,), ())
    assert (last.nan_layers, last.inf_layers) == ([], [])


def test_the_loss_is_the_one_that_the_model_returned():
    model = Net()
    optimizer = guard(model)
    loss = model(batch(1))
    loss.backward()
    optimizer.step()
    assert optimizer.last_record.loss == loss.item()


def test_the_loss_is_the_mean_over_the_micro_batches():
    model = Net()
    optimizer = guard(model)
    losses = [model(batch(step)) for step in (1, 2, 3)]
    sum(losses).backward()
    optimizer.step()
    assert optimizer.last_record.loss == pytest.approx(sum(loss.item() for loss in losses) / 3, rel=1e-6)


def test_a_loss_that_nobody_told_is_none():
    model = nn.Linear(4, 2)
    optimizer = guard(model)
    model(batch(1)).square().mean().backward()
    optimizer.step()
    assert optimizer.last_record.loss is None
    assert optimizer.last_record.rank_losses == (None,)


def test_a_bad_record_names_kind_layer_and_rank():
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    train(model, optimizer, range(1, 9), spoil=spoil_head)
    last = optimizer.last_record
    assert (last.action, last.kind, last.trigger_layer, last.bad_ranks) == ("skip", "nan", "head", (0,))
    assert not last.applied
    assert last.nan_layers == ["head"]
    assert last.inf_layers == []
    assert math.isnan(last.layer_norms["head"])
    assert math.isnan(last.global_norm)
    assert math.isfinite(last.layer_norms["body"])
    assert last.ratio is None


def test_the_ratio_of_a_spike_is_norm_over_baseline_of_the_trigger():
    model = Net()
    optimizer = guard(model, warmup_steps=3)

    def spoil(step, model):
        if step == 8:
            model.body.weight.grad *= 1e4

    train(model, optimizer, range(1, 9), spoil=spoil)
    last = optimizer.last_record
    assert (last.kind, last.trigger_layer) == ("spike", "body")
    assert last.ratio == pytest.approx(last.layer_norms["body"] / last.baselines["body"])
    assert last.worst_layer == ("body", last.ratio)


def test_the_ratio_of_a_healthy_step_is_the_largest():
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    train(model, optimizer, range(1, 9))
    last = optimizer.last_record
    ratios = {name: last.layer_norms[name] / last.baselines[name] for name in last.baselines}
    assert last.ratio == pytest.approx(max(ratios.values()))
    assert last.worst_layer == (max(ratios, key=ratios.get), last.ratio)


def test_there_are_no_baselines_before_there_is_history():
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, [1])
    first = optimizer.last_record
    assert (first.baselines, first.ratio, first.worst_layer) == ({}, None, None)
    assert first.layer_norms.keys() == {"body", "head"}
    train(model, optimizer, [2])
    assert optimizer.last_record.baselines == pytest.approx(first.layer_norms)


def test_a_record_of_a_rollback_names_the_step_restored():
    model = Net()
    optimizer = guard(model, nan_action="rollback")
    train(model, optimizer, range(1, 9), spoil=spoil_head)
    assert (optimizer.last_record.action, optimizer.last_record.restored_step) == ("rollback", 0)
    assert optimizer.last_record.step == 8


def test_step_numbers_go_on_after_a_rollback():
    model = Net()
    optimizer = guard(model, nan_action="rollback")
    train(model, optimizer, range(1, 11), spoil=spoil_head)
    assert (optimizer.last_record.step, optimizer.last_record.action) == (10, "step")


@pytest.mark.parametrize(
    ("action", "applied"), [("step", True), ("skip", False), ("rollback", False), ("raise", False)]
)
def test_only_an_action_of_step_is_an_applied_one(action, applied):
    assert record(action=action).applied is applied


# By layer --------------------------------------------------------------------------------------------------------


def test_a_layer_without_gradient_is_absent_and_one_with_a_zero_gradient_is_there():
    model = two_branches()
    optimizer = guard(model)
    model["used"](batch(1)).sum().backward()
    optimizer.step()
    assert optimizer.last_record.layer_norms.keys() == {"used"}
    for p in model["idle"].parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.last_record.layer_norms["idle"] == 0.0


def test_a_zero_gradient_gives_no_baseline():
    model = two_branches()
    optimizer = guard(model)
    for _ in range(3):
        optimizer.zero_grad()
        (model["used"](batch(1)).sum() + 0.0 * model["idle"](batch(1)).sum()).backward()
        optimizer.step()
    assert optimizer.last_record.layer_norms["idle"] == 0.0
    assert optimizer.last_record.baselines.keys() == {"used"}


def test_norms_and_baselines_are_made_when_they_are_read_and_once():
    one = record()
    assert not {"layer_norms", "baselines"} & vars(one).keys()
    assert one.layer_norms == {"a": 1.0, "b": 6.0}
    assert one.baselines == {"a": 2.0, "b": 3.0}
    assert one.layer_norms is one.layer_norms
    assert one.baselines is one.baselines


def test_a_step_makes_no_dictionaries():
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    assert not {"layer_norms", "baselines"} & vars(optimizer.last_record).keys()


def test_norms_are_python_numbers_in_the_models_order():
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    last = optimizer.last_record
    assert list(last.layer_norms) == ["body", "head"]
    values = [*last.layer_norms.values(), *last.baselines.values(), last.ratio, last.loss, last.lr, last.global_norm]
    assert {type(value) for value in values} == {float}


def test_bad_layers_are_listed_nearest_the_loss_first():
    one = record(layers=readings(nan=(2, 0), inf=(1,)))
    assert one.nan_layers == ["c", "a"]
    assert one.inf_layers == ["b"]


def test_later_steps_do_not_change_an_earlier_record():
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    train(model, optimizer, range(1, 5))
    kept = optimizer.last_record
    before = copy.deepcopy((kept.layers.norms, kept.layers.baselines, kept.layers.ratios, kept.layers.present))
    train(model, optimizer, range(5, 12), spoil=spoil_head)
    for then, now in zip(
        before, (kept.layers.norms, kept.layers.baselines, kept.layers.ratios, kept.layers.present), strict=True
    ):
        assert torch.equal(then, now)


# As an object ----------------------------------------------------------------------------------------------------


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        record().step = 2


@pytest.mark.parametrize("read_first", [False, True], ids=["unread", "read"])
def test_a_record_can_be_pickled(read_first):
    model = Net()
    optimizer = guard(model, warmup_steps=3)
    train(model, optimizer, range(1, 8))
    one = optimizer.last_record
    expected = (dict(one.layer_norms), dict(one.baselines)) if read_first else None
    other = pickle.loads(pickle.dumps(one))
    assert (other.layer_norms, other.baselines) == (expected or (one.layer_norms, one.baselines))
    for field in dataclasses.fields(StepRecord):
        if field.name != "layers":
            assert getattr(other, field.name) == getattr(one, field.name)
    assert (other.worst_layer, other.applied) == (one.worst_layer, one.applied)


def test_a_report_can_be_pickled():
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, range(1, 9), spoil=spoil_head)
    one = optimizer.reports[0]
    other = pickle.loads(pickle.dumps(one))
    assert isinstance(other, SpikeReport)
    assert (other.path, other.reason, other.record.step) == (one.path, one.reason, 8)
    assert other.details["step"] == 8


def test_a_record_and_its_copy_can_be_compared():
    one = record()
    assert one == pickle.loads(pickle.dumps(one))
    assert one != record(step=2)
    assert one == one


def test_a_record_prints_as_one_short_line_without_tensors():
    text = repr(record(kind="nan", trigger_layer="a"))
    assert "tensor" not in text
    assert "trigger_layer='a'" in text
    assert len(text.splitlines()) == 1
