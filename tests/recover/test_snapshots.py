import pytest
import torch

from stabilityguard import ConfigurationError, GradientSpikeError, SnapshotPolicy
from stabilityguard.recover.snapshots import SnapshotRing
from stabilityguard.recover.state import SmallState
from tests.support import Net, assert_same, batch, guard, train

SMALL = SmallState(groups=[], optimizer={}, tracked={}, generators={})


def ring(**policy):
    return SnapshotRing(SnapshotPolicy(**policy))


def live(step):
    return {("parameter", 0, ""): torch.full((3,), float(step)), ("buffer", "b", ""): torch.full((), step)}


def take(ring, step, **options):
    ring.take(step, live(step), SMALL, memory=None, **options)


def walk(ring, last):
    """Healthy steps from the state handed over to ``last``; yields after each."""
    take(ring, 0, proven=True)
    yield 0
    taken = 0
    for step in range(1, last + 1):
        ring.count_healthy_step()
        if step - taken >= ring.policy.every and ring.has_room:
            take(ring, step)
            taken = step
        yield step


def held(ring):
    return [snapshot.step for snapshot in ring._snapshots]


def pointers(ring):
    stored = [snapshot.tensors for snapshot in ring._snapshots] + [copy.tensors for copy in ring._spare]
    return {tensor.data_ptr() for tensors in stored for tensor in tensors.values()}


# Which snapshots there are --------------------------------------------------------------------------------------------


def test_an_empty_ring_has_no_target():
    assert ring().target() is None
    assert ring().has_room


def test_a_snapshot_is_taken_every_so_many_steps_and_the_newest_are_kept():
    one = ring(every=3, keep=3, quarantine=0)
    for _ in walk(one, 20):
        pass
    assert held(one) == [12, 15, 18]


def test_no_more_than_the_ring_holds_are_ever_kept():
    one = ring(every=1, keep=4, quarantine=2)
    for _ in walk(one, 30):
        assert len(one._snapshots) <= 4


def test_the_state_handed_over_is_a_target_at_once():
    one = ring(every=100, keep=2, quarantine=50)
    take(one, 7, proven=True)
    assert one.target().step == 7


def test_a_snapshot_is_a_target_only_after_its_quarantine():
    one = ring(every=5, keep=3, quarantine=3)
    targets = {step: one.target().step for step in walk(one, 13)}
    assert targets == {
        **dict.fromkeys(range(8), 0),
        **dict.fromkeys(range(8, 13), 5),
        13: 10,
    }


@pytest.mark.parametrize(
    "policy",
    [
        {"every": 1, "keep": 2, "quarantine": 10},
        {"every": 1, "keep": 3, "quarantine": 10},
        {"every": 1, "keep": 3, "quarantine": 1},
        {"every": 4, "keep": 2, "quarantine": 10},
        {"every": 10, "keep": 3, "quarantine": 10},
        {"every": 1, "keep": 1, "quarantine": 0},
    ],
)
def test_there_is_always_a_target_and_it_moves_on(policy):
    one = ring(**policy)
    targets = []
    for step in walk(one, 100):
        target = one.target()
        targets.append(target.step)
        assert step - target.step <= 2 * policy["quarantine"] + 2 * policy["every"]
        assert float(target.tensors["parameter", 0, ""][0]) == target.step
    assert targets == sorted(targets)


def test_the_last_target_is_never_given_up_for_one_on_probation():
    one = ring(every=1, keep=2, quarantine=100)
    for _ in walk(one, 50):
        assert one.target().step == 0


def test_a_target_gone_back_to_is_passed_over_the_next_time_down_to_the_oldest():
    one = ring(every=1, keep=4, quarantine=0)
    for _ in walk(one, 9):
        pass
    targets = []
    for _ in range(6):
        targets.append(one.target().step)
        one.target().restored = True
    assert targets == [9, 8, 7, 6, 6, 6]


def test_snapshots_of_an_abandoned_future_are_given_up():
    one = ring(every=1, keep=5, quarantine=0)
    for _ in walk(one, 6):
        pass
    one.drop_newer_than(3)
    assert held(one) == [2, 3]


def test_clearing_gives_up_all():
    one = ring(every=1, keep=3, quarantine=0)
    for _ in walk(one, 6):
        pass
    one.clear()
    assert held(one) == []
    assert one.target() is None


# What a snapshot holds ------------------------------------------------------------------------------------------------


def test_a_snapshot_is_a_copy():
    one = ring(keep=2)
    state = live(1)
    one.take(1, state, SMALL, memory="remembered", proven=True)
    for tensor in state.values():
        tensor.zero_()
    assert_same(one.target().tensors, live(1))
    assert one.target().memory == "remembered"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(4.0).bfloat16(),
        torch.arange(4) + 1j,
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor([torch.nan, torch.inf]),
    ],
    ids=["transposed", "channels_last", "bf16", "complex", "bool", "empty", "non-finite"],
)
def test_every_kind_of_tensor_is_copied_bit_for_bit(tensor):
    one = ring(keep=2)
    one.take(1, {("parameter", 0, ""): tensor}, SMALL, memory=None, proven=True)
    assert_same(one.target().tensors["parameter", 0, ""], tensor)


def test_memory_is_allocated_once_and_used_again():
    one = ring(every=1, keep=3, quarantine=2)
    seen = []
    for step in walk(one, 40):
        if step >= 3:
            seen.append(pointers(one))
    assert len(seen[0]) == 3 * 2
    assert all(now == seen[0] for now in seen)


def test_memory_is_used_again_after_going_back():
    one = ring(every=1, keep=3, quarantine=0)
    for _ in walk(one, 5):
        pass
    before = pointers(one)
    one.drop_newer_than(3)
    for step in (6, 7, 8):
        take(one, step)
    assert pointers(one) == before


def test_a_tensor_that_changed_its_shape_is_copied_into_new_memory():
    one = ring(every=1, keep=2, quarantine=0)
    for size in (2, 3, 4, 5):
        one.take(size, {("buffer", "b", ""): torch.full((size,), float(size))}, SMALL, memory=None)
    assert_same(one.target().tensors["buffer", "b", ""], torch.full((5,), 5.0))
    one.target().restored = True
    assert_same(one.target().tensors["buffer", "b", ""], torch.full((4,), 4.0))


def test_what_is_no_longer_there_is_not_in_the_next_snapshot():
    one = ring(every=1, keep=1, quarantine=0)
    take(one, 1)
    one.take(2, {("parameter", 0, ""): torch.ones(3)}, SMALL, memory=None)
    assert set(one.target().tensors) == {("parameter", 0, "")}


# Through the guarded optimizer ----------------------------------------------------------------------------------------


def spoiled(model, optimizer, step=99):
    optimizer.zero_grad()
    (model(batch(step)) * torch.nan).backward()
    optimizer.step()
    return optimizer.last_record


def test_the_memory_of_a_training_run_is_allocated_once():
    model = Net()
    optimizer = guard(model, snapshots=SnapshotPolicy(every=1, keep=3, quarantine=1))
    train(model, optimizer, range(1, 8))
    of_the_run = optimizer._guard._recovery._ring
    before = pointers(of_the_run)
    train(model, optimizer, range(8, 30))
    assert pointers(of_the_run) == before


def test_a_fault_at_the_first_step_goes_back_to_the_state_handed_over():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = guard(model, nan_action="rollback")
    record = spoiled(model, optimizer)
    assert (record.action, record.restored_step) == ("rollback", 0)
    assert_same(dict(model.state_dict()), before)


def test_a_model_loaded_after_wrapping_is_the_state_handed_over():
    model, trained = Net(), Net()
    optimizer = guard(model, nan_action="rollback")
    model.load_state_dict(trained.state_dict())
    train(model, optimizer, [1])
    assert spoiled(model, optimizer).restored_step == 0
    assert_same(dict(model.state_dict()), dict(trained.state_dict()))


def test_a_model_loaded_after_a_trial_forward_is_the_state_handed_over():
    model, trained = Net(), Net()
    optimizer = guard(model, nan_action="rollback")
    model(batch(1))
    model.load_state_dict(trained.state_dict())
    train(model, optimizer, [1])
    assert spoiled(model, optimizer).restored_step == 0
    assert_same(dict(model.state_dict()), dict(trained.state_dict()))


def test_an_optimizer_loaded_in_the_middle_is_the_state_handed_over():
    model = Net()
    optimizer = guard(model, nan_action="rollback", snapshots=SnapshotPolicy(every=1, keep=2, quarantine=0))
    train(model, optimizer, range(1, 6))
    saved_model = {name: value.clone() for name, value in model.state_dict().items()}
    saved_optimizer = optimizer.state_dict()
    train(model, optimizer, range(6, 9))
    model.load_state_dict(saved_model)
    optimizer.load_state_dict(saved_optimizer)
    record = spoiled(model, optimizer)
    assert (record.step, record.restored_step) == (6, 5)
    assert_same(dict(model.state_dict()), saved_model)


def test_steps_still_on_probation_are_passed_over():
    model = Net()
    policy = SnapshotPolicy(every=2, keep=3, quarantine=3)
    optimizer = guard(model, nan_action="rollback", snapshots=policy)
    train(model, optimizer, range(1, 7))
    assert spoiled(model, optimizer).restored_step == 2


def test_skipped_steps_bring_no_snapshot_nearer_to_being_a_target():
    model = Net()
    optimizer = guard(model, snapshots=SnapshotPolicy(every=2, keep=3, quarantine=3))
    train(model, optimizer, range(1, 5))
    for _ in range(4):
        assert spoiled(model, optimizer).action == "skip"
    assert spoiled(model, optimizer).restored_step == 0


def test_snapshots_are_taken_where_the_user_wants_to_skip_and_they_serve_when_skipping_ends():
    model = Net()
    optimizer = guard(model, snapshots=SnapshotPolicy(every=1, keep=2, quarantine=0))
    train(model, optimizer, range(1, 4))
    records = [spoiled(model, optimizer) for _ in range(5)]
    assert [record.action for record in records] == [*["skip"] * 4, "rollback"]
    assert records[-1].restored_step == 3


def test_without_snapshots_skipping_ends_in_an_error():
    model = Net()
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    for _ in range(4):
        spoiled(model, optimizer)
    with pytest.raises(GradientSpikeError, match="no snapshot to go back to"):
        spoiled(model, optimizer)


@pytest.mark.parametrize(
    "policy",
    [{"every": 0}, {"keep": 0}, {"quarantine": -1}, {"keep": 1, "quarantine": 1}, {"every": 1.5}, {"keep": True}],
)
def test_a_policy_that_cannot_be_is_refused(policy):
    with pytest.raises(ConfigurationError, match=rf"SnapshotPolicy\.({'|'.join(policy)})"):
        SnapshotPolicy(**policy)
