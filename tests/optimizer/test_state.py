"""State and copies: what is saved, loaded and copied is that of the base, and the guard goes with it."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, AdamW

from stabilityguard import StabilityGuardError
from tests.optimizer.steps import every_base, memory, read_all, spoil_step, step, twins
from tests.support import Net, NormNet, assert_same, batch, guard, snapshot, train

# State ---------------------------------------------------------------------------------------------------------------


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


# Copies --------------------------------------------------------------------------------------------------------------


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
