from dataclasses import dataclass

import pytest
import torch
from torch import nn

from stabilityguard import Budget, ConfigurationError, SnapshotPolicy
from stabilityguard.detect.detector import Detector, Verdict, realign
from tests.support import Net, assert_same, batch, guard, snapshot


@dataclass
class Ceiling:
    """A detector of the user's own: a fixed limit, and a count of the healthy steps."""

    limit: float

    def initial(self, layers):
        return {"steps": torch.zeros(layers, dtype=torch.int64), "limit": torch.full((layers,), self.limit).double()}

    def judge(self, state, norms):
        ratios = norms / state["limit"]
        return Verdict(baselines=state["limit"], ratios=ratios, spikes=ratios > 1)

    def absorb(self, state, norms):
        return {**state, "steps": state["steps"] + 1}

    def rebase(self, state, norms, layers):
        return {**state, "limit": torch.where(layers, 2 * norms, state["limit"])}


# A detector of the user's own -----------------------------------------------------------------------------------------


def test_an_object_with_the_four_methods_is_a_detector():
    assert isinstance(Ceiling(1.0), Detector)
    assert not isinstance(object(), Detector)


@pytest.mark.parametrize("detector", ["median", None, object()])
def test_what_is_no_detector_is_refused(detector):
    with pytest.raises(ConfigurationError, match="detector"):
        guard(Net(), detector=detector)


def test_the_users_own_detector_decides():
    model = Net()
    optimizer = guard(model, detector=Ceiling(1e3))
    model(batch(1)).backward()
    optimizer.step()
    assert optimizer.last_record.action == "step"
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    (model(batch(2)) * 1e9).backward()
    optimizer.step()
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("skip", "spike")
    assert_same(snapshot(model, optimizer), before)
    assert optimizer.last_record.baselines == {"body": 1e3, "head": 1e3}


def test_the_memory_of_the_users_own_detector_learns_from_healthy_steps_alone():
    model = Net()
    optimizer = guard(model, detector=Ceiling(1e3))
    for factor in (1.0, 1e9, 1.0, torch.nan, 1.0):
        optimizer.zero_grad()
        (model(batch(1)) * factor).backward()
        optimizer.step()
    assert optimizer.state_dict()["stabilityguard"]["memory"]["steps"].tolist() == [3, 3]


def test_the_users_own_detector_is_told_which_layers_have_a_new_level():
    model = Net()
    optimizer = guard(model, detector=Ceiling(1e3), budget=Budget(consecutive_skips=1))
    model(batch(1)).backward()
    model.head.weight.grad.fill_(1e6)
    optimizer.step()
    assert optimizer.last_record.action == "step"
    memory = optimizer.state_dict()["stabilityguard"]["memory"]
    assert memory["limit"].tolist() == [1e3, pytest.approx(2 * optimizer.last_record.layer_norms["head"])]


def test_the_memory_of_the_users_own_detector_is_rewound_with_the_model():
    model = Net()
    policy = SnapshotPolicy(every=2, keep=2, quarantine=0)
    optimizer = guard(model, detector=Ceiling(1e3), nan_action="rollback", snapshots=policy)
    for factor in (1.0, 1.0, 1.0, torch.nan):
        optimizer.zero_grad()
        (model(batch(1)) * factor).backward()
        optimizer.step()
    assert optimizer.last_record.restored_step == 2
    assert optimizer.state_dict()["stabilityguard"]["memory"]["steps"].tolist() == [2, 2]


# Carrying a memory over to other layers -------------------------------------------------------------------------------


def state(**rows):
    return {key: torch.tensor(values) for key, values in rows.items()}


def test_layers_keep_their_memory_under_their_names():
    moved = realign(state(mean=[1.0, 2.0, 3.0]), ("a", "b", "c"), state(mean=[0.0] * 3), ("c", "a", "b"))
    assert moved["mean"].tolist() == [3.0, 1.0, 2.0]


def test_new_layers_start_afresh_and_lost_ones_are_forgotten():
    moved = realign(state(mean=[1.0, 2.0]), ("a", "b"), state(mean=[0.5] * 3), ("new", "b", "other"))
    assert moved["mean"].tolist() == [0.5, 2.0, 0.5]


def test_without_a_common_layer_everything_starts_afresh():
    moved = realign(state(mean=[1.0]), ("a",), state(mean=[0.0, 0.0]), ("x", "y"))
    assert moved["mean"].tolist() == [0.0, 0.0]


def test_the_layers_are_the_last_dimension_whatever_comes_before():
    old = state(opening=[[1.0, 2.0], [3.0, 4.0]], count=[7, 8])
    moved = realign(old, ("a", "b"), state(opening=[[0.0], [0.0]], count=[0]), ("b",))
    assert moved["opening"].tolist() == [[2.0], [4.0]]
    assert moved["count"].tolist() == [8]


def test_neither_memory_is_changed_and_none_is_adopted():
    old, fresh = state(mean=[1.0, 2.0]), state(mean=[0.0, 0.0])
    moved = realign(old, ("a", "b"), fresh, ("a", "b"))
    moved["mean"].add_(5)
    assert_same([old, fresh], [state(mean=[1.0, 2.0]), state(mean=[0.0, 0.0])])


def test_types_are_those_of_the_fresh_memory():
    moved = realign(state(mean=[1.0]), ("a",), {"mean": torch.zeros(1, dtype=torch.float64)}, ("a",))
    assert moved["mean"].dtype == torch.float64


def test_a_layer_added_while_training_leaves_the_history_of_the_others():
    model = nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Linear(4, 4)})
    optimizer = guard(model, torch.optim.SGD(model["b"].parameters(), lr=1e-3), warmup_steps=3)
    for step in range(5):
        optimizer.zero_grad()
        model["b"](batch(step)).square().sum().backward()
        optimizer.step()
    before = optimizer.last_record.baselines["b"]
    optimizer.add_param_group({"params": model["a"].parameters()})
    optimizer.zero_grad()
    (model["a"](model["b"](batch(6))).square().sum() + 1e4 * model["b"](batch(6)).square().sum()).backward()
    optimizer.step()
    assert optimizer.last_record.trigger_layer == "b"
    assert optimizer.last_record.baselines == {"b": pytest.approx(before, rel=0.2)}


def test_a_memory_saved_with_another_warmup_can_be_taken_over():
    model, twin = Net(), Net()
    optimizer = guard(model, warmup_steps=10)
    for step in range(6):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
    resumed = guard(twin, warmup_steps=4)
    resumed.load_state_dict(optimizer.state_dict())
    (twin(batch(7)) * 1e5).backward()
    resumed.step()
    assert resumed.last_record.kind == "spike"
