import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stabilityguard import Budget, ConfigurationError, GradientSpikeError, SnapshotPolicy
from tests.support import Growing, Net, NormNet, assert_same, batch, guard, snapshot, train

OFTEN = SnapshotPolicy(every=1, keep=3, quarantine=0)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw with a tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), capturable=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class NoisyNet(NormNet):
    """BatchNorm and dropout."""

    def forward(self, x):
        hidden = nn.functional.dropout(torch.tanh(self.body(x)), 0.3, self.training)
        return self.head(self.norm(hidden)).square().mean()


def bad_step(model, optimizer, step=99):
    optimizer.zero_grad()
    (model(batch(step)) * torch.nan).backward()
    optimizer.step()
    return optimizer.last_record


def rolling(model, base=None, **options):
    return guard(model, base, nan_action="rollback", **{"snapshots": OFTEN, **options})


# What is restored -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_model_buffers_and_optimizer_are_what_they_were(name):
    model = NormNet()
    optimizer = rolling(model, OPTIMIZERS[name](model.parameters()))
    train(model, optimizer, range(1, 6))
    before = snapshot(model, optimizer)
    record = bad_step(model, optimizer)
    assert (record.action, record.restored_step) == ("rollback", 5)
    assert_same(snapshot(model, optimizer), before)


def test_a_rollback_over_several_steps_restores_the_state_from_then():
    model = NormNet()
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=4, keep=2, quarantine=0))
    train(model, optimizer, range(1, 5))
    before = snapshot(model, optimizer)
    train(model, optimizer, range(5, 8))
    assert bad_step(model, optimizer).restored_step == 4
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_the_optimizer_made_since_is_removed_again(name):
    model = Net()
    optimizer = rolling(model, OPTIMIZERS[name](model.parameters()), snapshots=SnapshotPolicy(every=50))
    before = snapshot(model, optimizer)
    train(model, optimizer, range(1, 4))
    assert bad_step(model, optimizer).restored_step == 0
    assert_same(snapshot(model, optimizer), before)


def test_parameters_gradients_and_buffers_stay_the_same_tensors():
    model = NormNet()
    optimizer = rolling(model)
    train(model, optimizer, range(1, 4))
    identities = [id(p) for p in model.parameters()], [b.data_ptr() for b in model.buffers()]
    moments = [id(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
    bad_step(model, optimizer)
    assert ([id(p) for p in model.parameters()], [b.data_ptr() for b in model.buffers()]) == identities
    assert [id(optimizer.state[p]["exp_avg"]) for p in model.parameters()] == moments
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == identities[0]


def test_gradients_are_cleared_and_stay_readable():
    model = Net()
    optimizer = rolling(model)
    bad_step(model, optimizer)
    assert all(p.grad.eq(0).all() for p in model.parameters())


def test_hyperparameters_are_restored():
    model = Net()
    optimizer = rolling(model)
    train(model, optimizer, [1])
    before = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    optimizer.param_groups[0].update(lr=77.0, weight_decay=0.5, added="since")
    bad_step(model, optimizer)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == before


def test_a_learning_rate_in_a_tensor_is_restored_in_place():
    model = Net()
    rate = torch.tensor(0.01)
    optimizer = rolling(model, torch.optim.AdamW(model.parameters(), lr=rate))
    train(model, optimizer, [1])
    rate.fill_(9.0)
    bad_step(model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.01)


def test_random_generators_are_restored():
    model = Net()
    optimizer = rolling(model)
    train(model, optimizer, [1])

    def draw():
        return random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()

    first = draw()
    draw()
    bad_step(model, optimizer)
    assert draw() == first


def test_what_is_tracked_is_restored():
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scheduler = StepLR(base, step_size=2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = rolling(model, base, track={"average": average, "scheduler": scheduler, "amp": scaler})
    for step in range(1, 5):
        scheduler.step() if step > 1 else None
        train(model, optimizer, [step])
        average.update_parameters(model)
    train(model, optimizer, [5])
    saved = copy.deepcopy(
        [average.state_dict(), scheduler.state_dict(), scaler.state_dict(), base.param_groups[0]["lr"]]
    )
    for _ in range(5):
        scheduler.step()
        average.update_parameters(model)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    bad_step(model, optimizer)
    restored = [average.state_dict(), scheduler.state_dict(), scaler.state_dict(), base.param_groups[0]["lr"]]
    assert_same(restored, saved)


class Position:
    """Where a data loader stands."""

    def __init__(self):
        self.at = 0
        self.seen = [0]

    def state_dict(self):
        return {"at": self.at, "seen": self.seen}

    def load_state_dict(self, state):
        self.at, self.seen = state["at"], state["seen"]


def test_a_tracked_object_that_hands_out_its_live_state_does_not_change_the_snapshot():
    model, position = Net(), Position()
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=50), track={"data": position})
    for _ in range(2):
        for step in range(1, 4):
            train(model, optimizer, [step])
            position.at = step
            position.seen.append(step)
        bad_step(model, optimizer)
        assert (position.at, position.seen) == (0, [0])


def test_the_detectors_memory_is_rewound_too():
    model = Net()
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=3, keep=2, quarantine=0))
    train(model, optimizer, range(1, 4))
    before = copy.deepcopy(optimizer.state_dict()["stabilityguard"]["memory"])
    train(model, optimizer, range(4, 6))
    assert bad_step(model, optimizer).restored_step == 3
    assert_same(optimizer.state_dict()["stabilityguard"]["memory"], before)


def test_the_count_of_steps_does_not_go_back():
    model = Net()
    optimizer = rolling(model)
    train(model, optimizer, [1, 2])
    assert bad_step(model, optimizer).step == 3
    train(model, optimizer, [3])
    assert optimizer.last_record.step == 4


def test_a_spike_is_rolled_back_too_where_the_user_wants_that():
    model = Net()
    optimizer = rolling(model, warmup_steps=2)
    train(model, optimizer, range(1, 6))
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    (model(batch(6)) * 1e6).backward()
    optimizer.step()
    assert (optimizer.last_record.action, optimizer.last_record.kind) == ("rollback", "spike")
    assert_same(snapshot(model, optimizer), before)


def test_rolling_back_twice_to_one_snapshot_gives_equal_states():
    model = NormNet()
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=50))
    train(model, optimizer, [1])
    bad_step(model, optimizer)
    first = copy.deepcopy(snapshot(model, optimizer))
    train(model, optimizer, range(2, 6))
    assert bad_step(model, optimizer).restored_step == 0
    assert_same(snapshot(model, optimizer), first)


def test_two_rollbacks_to_a_snapshot_with_optimizer_state_give_equal_states():
    model = NormNet()
    policy = SnapshotPolicy(every=4, keep=1, quarantine=0)
    optimizer = rolling(model, snapshots=policy)
    train(model, optimizer, range(1, 5))
    before = snapshot(model, optimizer)
    for _ in range(2):
        assert bad_step(model, optimizer).restored_step == 4
        assert_same(snapshot(model, optimizer), before)
        optimizer.state[model.head.weight]["exp_avg"].fill_(3.0)
        optimizer.state[model.head.weight]["step"].add_(5)


def test_optimizer_state_that_was_thrown_away_since_is_made_anew_from_a_copy():
    model = Net()
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=4, keep=1, quarantine=0))
    train(model, optimizer, range(1, 5))
    before = snapshot(model, optimizer)
    optimizer.state.clear()
    for step in (5, 6):
        assert bad_step(model, optimizer).restored_step == 4
        assert_same(snapshot(model, optimizer), before)
        train(model, optimizer, [step])


class Lookahead(torch.optim.SGD):
    """Begins to remember slow weights after a few steps."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                entries = self.state[p]
                entries["steps"] = entries.get("steps", 0) + 1
                if entries["steps"] > 3:
                    entries.setdefault("slow", p.detach().clone()).lerp_(p.detach(), 0.5)


def test_an_entry_that_joined_existing_optimizer_state_since_is_removed_again():
    model = Net()
    base = Lookahead(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = rolling(model, base, snapshots=SnapshotPolicy(every=3, keep=2, quarantine=0))
    train(model, optimizer, range(1, 4))
    before = snapshot(model, optimizer)
    train(model, optimizer, range(4, 6))
    assert "slow" in base.state[model.head.weight]
    assert bad_step(model, optimizer).restored_step == 3
    assert_same(snapshot(model, optimizer), before)


def test_frozen_and_unused_parameters_survive_a_rollback():
    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
            self.unused = nn.Linear(2, 2)

    model = Partly()
    optimizer = rolling(model)
    train(model, optimizer, [1, 2])
    before = snapshot(model, optimizer)
    bad_step(model, optimizer)
    assert_same(snapshot(model, optimizer), before)
    assert model.unused.weight.grad is None
    assert not model.frozen.weight.requires_grad


def test_complex_empty_and_half_precision_parameters_survive_a_rollback():
    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x):
            return super().forward(x) + self.phase.abs().sum() + self.narrow.float().square().sum() + self.empty.sum()

    model = Odd()
    optimizer = rolling(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    train(model, optimizer, [1, 2])
    before = snapshot(model, optimizer)
    assert bad_step(model, optimizer).action == "rollback"
    assert_same(snapshot(model, optimizer), before)


def test_a_buffer_that_changes_its_shape_is_rolled_back():
    model = Growing()
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=50))
    bad_step(model, optimizer)
    assert_same(model.seen, torch.zeros(1))


def test_a_rollback_of_one_optimizer_leaves_the_part_of_the_other_alone():
    model = nn.ModuleDict({"generator": NormNet(), "critic": NormNet()})
    bases = {name: torch.optim.AdamW(part.parameters(), lr=0.01) for name, part in model.items()}
    guards = {name: rolling(model, base) for name, base in bases.items()}
    for step in range(1, 4):
        for name, part in model.items():
            train(part, guards[name], [step])
    before = [snapshot(part, guards[name]) for name, part in model.items()]
    model["generator"](batch(4))
    with torch.no_grad():
        model["generator"].body.bias.add_(1)
    moved = snapshot(model["generator"], guards["generator"])
    assert bad_step(model["critic"], guards["critic"]).restored_step == 3
    assert_same(snapshot(model["critic"], guards["critic"]), before[1])
    assert_same(snapshot(model["generator"], guards["generator"]), moved)


# Training on ----------------------------------------------------------------------------------------------------------


def in_order(model, optimizer, scheduler, steps):
    """Steps as most people write them, the scheduler last; returns the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_from_a_rollback_is_bit_for_bit_what_it_was_the_first_time(name):
    model = NoisyNet()
    base = OPTIMIZERS[name](model.parameters())
    scheduler = LambdaLR(base, lambda step: 1 / (1 + step))
    policy = SnapshotPolicy(every=4, keep=2, quarantine=0)
    optimizer = rolling(model, base, snapshots=policy, track={"scheduler": scheduler})
    in_order(model, optimizer, scheduler, range(1, 5))
    first = in_order(model, optimizer, scheduler, range(5, 8))
    once = snapshot(model, optimizer), scheduler.state_dict(), torch.rand(2)
    assert bad_step(model, optimizer).restored_step == 4
    scheduler.step()
    again = in_order(model, optimizer, scheduler, range(5, 8))
    assert_same(again, first)
    assert_same((snapshot(model, optimizer), scheduler.state_dict(), torch.rand(2)), once)


@pytest.mark.parametrize("schedule", [lambda o: OneCycleLR(o, 0.1, total_steps=30), lambda o: CosineAnnealingLR(o, 20)])
def test_schedules_are_rewound_exactly(schedule):
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedule(base)
    optimizer = rolling(
        model, base, track={"scheduler": scheduler}, snapshots=SnapshotPolicy(every=4, keep=2, quarantine=0)
    )
    rates = []
    for step in range(1, 8):
        in_order(model, optimizer, scheduler, [step])
        rates.append((base.param_groups[0]["lr"], base.param_groups[0]["momentum"]))
    assert bad_step(model, optimizer).restored_step == 4
    scheduler.step()
    assert (base.param_groups[0]["lr"], base.param_groups[0]["momentum"]) == rates[3]
    in_order(model, optimizer, scheduler, [5, 6])
    assert (base.param_groups[0]["lr"], base.param_groups[0]["momentum"]) == rates[5]


def test_after_a_rollback_to_the_start_training_equals_a_run_that_never_failed():
    torch.manual_seed(5)
    model = NormNet()
    twin = copy.deepcopy(model)
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=50))
    train(model, optimizer, range(1, 4))
    assert bad_step(model, optimizer).restored_step == 0
    train(model, optimizer, range(1, 8))
    bare = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(twin, bare, range(1, 8))
    assert_same(snapshot(model, optimizer), snapshot(twin, bare))


def test_snapshots_go_on_after_a_rollback():
    model = Net()
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=3, keep=2, quarantine=0), budget=Budget(window=1))
    train(model, optimizer, range(1, 6))
    assert bad_step(model, optimizer).restored_step == 3
    train(model, optimizer, range(7, 13))
    before = optimizer.last_record.step
    restored = bad_step(model, optimizer).restored_step
    assert before - restored < 3


# The ladder -----------------------------------------------------------------------------------------------------------


def test_repeated_trips_climb_further_back_and_then_raise():
    model = Net()
    optimizer = rolling(model, snapshots=SnapshotPolicy(every=2, keep=4, quarantine=0), budget=Budget(rollbacks=3))
    train(model, optimizer, range(1, 9))
    restored = [bad_step(model, optimizer).restored_step for _ in range(3)]
    assert restored == [8, 6, 4]
    before = snapshot(model, optimizer)
    with pytest.raises(
        GradientSpikeError, match="3 rollbacks within 1000 steps are all that the budget allows"
    ) as caught:
        bad_step(model, optimizer)
    assert (caught.value.step, caught.value.kind, caught.value.layer) == (12, "nan", "head")
    assert_same(snapshot(model, optimizer), before)


def test_a_skip_after_a_rollback_restores_the_buffers_of_the_state_gone_back_to():
    model = NormNet()
    policy = SnapshotPolicy(every=4, keep=2, quarantine=0)
    optimizer = guard(model, snapshots=policy, budget=Budget(consecutive_skips=2))
    train(model, optimizer, range(1, 8))
    assert [bad_step(model, optimizer).action for _ in range(2)] == ["skip", "rollback"]
    before = snapshot(model, optimizer)
    assert bad_step(model, optimizer).action == "skip"
    assert_same(snapshot(model, optimizer), before)


def test_a_skip_after_a_rollback_to_the_very_start_restores_the_buffers_too():
    model = NormNet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = guard(model, snapshots=SnapshotPolicy(), budget=Budget(consecutive_skips=2))
    assert [bad_step(model, optimizer).action for _ in range(3)] == ["skip", "rollback", "skip"]
    assert_same(dict(model.state_dict()), before)


def test_snapshots_of_a_future_that_was_abandoned_are_never_gone_back_to():
    model = Net()
    policy = SnapshotPolicy(every=2, keep=4, quarantine=0)
    optimizer = rolling(model, snapshots=policy, budget=Budget(window=2))
    train(model, optimizer, range(1, 9))
    restored = [bad_step(model, optimizer).restored_step for _ in range(2)]
    train(model, optimizer, [11, 12])
    restored += [bad_step(model, optimizer).restored_step for _ in range(2)]
    assert restored == [8, 6, 12, 4]


def until_it_raises(model, optimizer):
    """The actions of bad steps up to the one that raises."""
    actions = []
    while len(actions) < 100:
        try:
            actions.append(bad_step(model, optimizer).action)
        except GradientSpikeError:
            return [*actions, "raise"]
    return actions


def test_a_run_that_always_fails_ends_within_its_budget():
    model = Net()
    optimizer = rolling(model, budget=Budget(rollbacks=2, consecutive_skips=3))
    assert until_it_raises(model, optimizer) == ["rollback", "rollback", "raise"]
    assert optimizer.last_record.action == "raise"


def test_skips_then_rollbacks_then_an_error_end_a_run_that_always_fails():
    model = Net()
    optimizer = guard(model, snapshots=OFTEN, budget=Budget(consecutive_skips=3, rollbacks=2))
    assert until_it_raises(model, optimizer) == [*["skip", "skip", "rollback"] * 2, "skip", "skip", "raise"]


# What cannot be tracked -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", [object(), 3, None, Net.forward])
def test_an_object_that_cannot_be_saved_is_refused_by_name(lacking):
    with pytest.raises(ConfigurationError, match=r"track\['loader'\].*state_dict"):
        rolling(Net(), track={"loader": lacking})


def test_an_object_that_can_only_be_read_is_refused():
    class ReadOnly:
        def state_dict(self):
            return {}

    with pytest.raises(ConfigurationError, match="load_state_dict"):
        rolling(Net(), track={"loader": ReadOnly()})


def test_a_list_of_objects_is_refused_with_an_example():
    model = Net()
    with pytest.raises(ConfigurationError, match="track must map names to objects"):
        rolling(model, track=[model])
