import copy
import pickle
from pathlib import Path

import pytest
import torch

from stabilityguard import Budget, ConfigurationError, GradientSpikeError, StabilityGuardError
from tests.support import Net, assert_same, batch, guard, snapshot, train


def error(**attributes):
    given = {
        "step": 847,
        "kind": "spike",
        "layer": "h.11",
        "norm": 847.3,
        "baseline": 1.2,
        "ratio": 706.1,
        "report_path": "sg_logs/spike_step847.json",
        **attributes,
    }
    return GradientSpikeError("it spiked", **given), given


def raised(change, *, steps=8, loss=None, **options):
    """The error that a real guard raises at the last step, its model, its optimizer and the state before that step."""
    model = Net()
    optimizer = guard(model, **{"nan_action": "raise", "warmup_steps": 3, **options})
    train(model, optimizer, range(1, steps))
    optimizer.zero_grad()
    model(batch(steps)).backward()
    change(model)
    before = snapshot(model, optimizer), [p.grad.clone() for p in model.parameters()]
    with pytest.raises(GradientSpikeError) as caught:
        optimizer.step(loss=loss)
    after = snapshot(model, optimizer), [p.grad for p in model.parameters()]
    return caught.value, optimizer, before, after


def explode(model):
    model.head.weight.grad *= 1e4


def poison(model):
    model.head.weight.grad[0, 0] = torch.nan


def nothing(model):
    pass


def test_every_error_is_one_of_ours_and_of_the_kind_that_users_expect():
    assert issubclass(StabilityGuardError, Exception)
    assert issubclass(ConfigurationError, StabilityGuardError)
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(GradientSpikeError, StabilityGuardError)
    assert issubclass(GradientSpikeError, RuntimeError)
    assert not issubclass(GradientSpikeError, ValueError)


def test_a_spike_error_has_message_and_attributes():
    made, given = error()
    assert str(made) == "it spiked"
    assert {name: getattr(made, name) for name in given} == given


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_a_spike_error_survives_a_round_trip(again):
    made, given = error(norm=float("inf"), layer=None)
    other = again(made)
    assert type(other) is GradientSpikeError
    assert str(other) == "it spiked"
    assert {name: getattr(other, name) for name in given} == given


def test_a_spike_error_with_a_note_survives_a_round_trip():
    made, given = error()
    made.__notes__ = ["seen on rank 3"]
    other = pickle.loads(pickle.dumps(made))
    assert other.__notes__ == ["seen on rank 3"]
    assert {name: getattr(other, name) for name in given} == given


@pytest.mark.parametrize("kind", [ConfigurationError, StabilityGuardError])
def test_the_other_errors_survive_a_round_trip(kind):
    other = pickle.loads(pickle.dumps(kind("a reason")))
    assert (type(other), str(other)) == (kind, "a reason")


def test_a_spike_error_of_a_real_guard_says_all_there_is_to_know():
    caught, optimizer, _, _ = raised(explode)
    last = optimizer.last_record
    assert (caught.step, caught.kind, caught.layer) == (8, "spike", "head")
    assert caught.norm == last.layer_norms["head"]
    assert caught.baseline == last.baselines["head"]
    assert caught.ratio == last.ratio == pytest.approx(caught.norm / caught.baseline)
    assert caught.report_path == optimizer.reports[-1].path
    assert Path(caught.report_path).is_file()
    for part in ("spike", "step 8", "head", caught.report_path):
        assert part in str(caught)


def test_numbers_of_a_spike_error_are_plain_numbers():
    caught, _, _, _ = raised(explode)
    assert {type(value) for value in (caught.norm, caught.baseline, caught.ratio)} == {float}
    assert type(caught.step) is int


@pytest.mark.parametrize("change", [explode, poison], ids=["spike", "nan"])
def test_raising_leaves_parameters_state_and_gradients_as_they_were(change):
    _, _, before, after = raised(change)
    assert_same(after, before)


def test_the_record_of_the_step_that_raised_is_there():
    _, optimizer, _, _ = raised(poison)
    assert (optimizer.last_record.step, optimizer.last_record.action) == (8, "raise")
    assert [report.record.step for report in optimizer.reports] == [8]


def test_training_can_go_on_after_the_error():
    _, optimizer, _, _ = raised(poison)
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 0.01)
    optimizer.step()
    assert (optimizer.last_record.step, optimizer.last_record.action) == (9, "step")


def test_a_nan_has_no_ratio():
    caught, _, _, _ = raised(poison)
    assert (caught.kind, caught.layer) == ("nan", "head")
    assert caught.norm != caught.norm
    assert caught.baseline > 0
    assert caught.ratio is None


def test_without_history_there_is_no_baseline():
    caught, _, _, _ = raised(poison, steps=1)
    assert (caught.step, caught.baseline, caught.ratio) == (1, None, None)


def test_an_error_about_the_loss_alone_blames_no_layer_and_has_no_numbers_of_one():
    caught, _, _, _ = raised(nothing, loss=float("nan"))
    assert caught.kind == "nan"
    assert "the loss" in str(caught)
    assert (caught.layer, caught.norm, caught.baseline, caught.ratio) == (None, None, None, None)


def test_without_a_file_there_is_no_report_path():
    Path("taken").write_text("mine")
    caught, _, _, _ = raised(poison, log_dir="taken")
    assert caught.report_path is None
    assert "not written" in str(caught)


def test_the_end_of_the_ladder_raises_the_same_error_and_says_why():
    model = Net()
    optimizer = guard(model, budget=Budget(consecutive_skips=2))
    train(model, optimizer, range(1, 4))
    with pytest.raises(GradientSpikeError) as caught:
        train(model, optimizer, range(4, 9), spoil=lambda step, model: poison(model))
    assert caught.value.step == 5
    assert "trip 2 of 2 in a row" in str(caught.value)
    assert Path(caught.value.report_path).name == "spike_step5.json"
