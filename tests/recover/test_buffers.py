import copy

import pytest
import torch
from torch import nn

from stabilityguard.recover.buffers import BufferKeeper, owned_buffers
from tests.support import Net, NormNet, assert_same, batch, guard, train


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def poisoned(x):
    x = x.clone()
    x[0, 0] = torch.nan
    return x


def one_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    optimizer.step()
    return optimizer.last_record


def told(optimizer):
    return optimizer.reports[-1].details["buffers"]


class Averaging(Net):
    """Keeps a running mean by putting a new tensor in the old one's place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Growing(Net):
    """Keeps one entry for every training forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return super().forward(x)


# Through the guarded optimizer ----------------------------------------------------------------------------------------


def test_batch_norm_is_what_it_was_before_the_skipped_step_and_evaluation_is_finite():
    model = NormNet()
    optimizer = guard(model)
    train(model, optimizer, range(1, 5))
    before = buffers(model)
    assert one_step(model, optimizer, poisoned(batch(5))).action == "skip"
    assert_same(buffers(model), before)
    assert told(optimizer)["touched"] == ()
    assert set(told(optimizer)["restored"]) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    model.eval()
    assert model(batch(6)).isfinite()


def test_batch_norm_is_restored_when_the_very_first_step_is_bad():
    model = NormNet()
    before = buffers(model)
    optimizer = guard(model)
    assert one_step(model, optimizer, poisoned(batch(1))).action == "skip"
    assert_same(buffers(model), before)


def test_batch_norm_is_restored_time_and_again():
    model = NormNet()
    optimizer = guard(model)
    for step in range(1, 10):
        before = buffers(model)
        record = one_step(model, optimizer, poisoned(batch(step)) if step % 2 else batch(step))
        assert record.action == ("skip" if step % 2 else "step")
        if record.action == "skip":
            assert_same(buffers(model), before)
        else:
            assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])


def test_all_micro_batches_of_a_skipped_step_are_undone():
    model = NormNet()
    optimizer = guard(model)
    train(model, optimizer, [1])
    before = buffers(model)
    optimizer.zero_grad()
    for x in (batch(2), poisoned(batch(3)), batch(4)):
        model(x).backward()
    optimizer.step()
    assert optimizer.last_record.action == "skip"
    assert_same(buffers(model), before)


def test_a_raised_step_leaves_everything_for_inspection():
    model = NormNet()
    optimizer = guard(model, nan_action="raise")
    with pytest.raises(RuntimeError):
        one_step(model, optimizer, poisoned(batch(1)))
    assert model.norm.running_mean.isnan().any()


def test_batch_norm_that_is_frozen_at_first_and_trains_later_is_kept_from_then_on():
    model = NormNet()
    model.train()
    model.norm.eval()
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    model.norm.train()
    train(model, optimizer, range(4, 7))
    before = buffers(model)
    assert int(before["norm.num_batches_tracked"]) == 3
    assert one_step(model, optimizer, poisoned(batch(7))).action == "skip"
    assert_same(buffers(model), before)


def test_batch_norm_whose_first_training_forward_is_bad_after_a_frozen_start_is_told_of_and_kept_afterwards():
    model = NormNet()
    model.norm.eval()
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    model.norm.train()
    assert one_step(model, optimizer, poisoned(batch(4))).action == "skip"
    everything = set(told(optimizer)["restored"]) | set(told(optimizer)["touched"])
    assert everything == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_batch_norm_without_a_counter_of_batches_is_restored():
    model = NormNet()
    model.norm.num_batches_tracked = None
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    before = buffers(model)
    one_step(model, optimizer, poisoned(batch(4)))
    assert_same(buffers(model), before)


def test_a_buffer_that_forward_replaces_is_restored():
    model = Averaging()
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    before = buffers(model)
    assert one_step(model, optimizer, poisoned(batch(4))).action == "skip"
    assert_same(buffers(model), before)
    assert told(optimizer) == {"restored": ("mean",), "touched": ()}


def test_a_buffer_that_forward_starts_to_replace_late_is_kept_from_then_on():
    model = Averaging()
    optimizer = guard(model)
    model.training = False  # of the root alone: the mean stays as it is
    train(model, optimizer, [1, 2])
    model.training = True
    train(model, optimizer, [3])
    before = buffers(model)
    assert one_step(model, optimizer, poisoned(batch(4))).action == "skip"
    assert_same(buffers(model), before)


def test_a_buffer_that_grows_in_forward_is_restored():
    model = Growing()
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    assert model.seen.shape == (3,)
    before = buffers(model)
    assert one_step(model, optimizer, poisoned(batch(4))).action == "skip"
    assert_same(buffers(model), before)


def test_a_buffer_that_is_taken_away_does_not_stop_training():
    model = NormNet()
    model.register_buffer("cache", torch.ones(3))
    optimizer = guard(model)
    train(model, optimizer, [1, 2])
    model.cache = None
    train(model, optimizer, [3])
    assert one_step(model, optimizer, poisoned(batch(4))).action == "skip"
    assert model.cache is None


def test_a_spectral_norm_is_restored():
    torch.manual_seed(3)
    model = Net()
    nn.utils.parametrizations.spectral_norm(model.body)
    optimizer = guard(model)
    train(model, optimizer, range(1, 4))
    before = buffers(model)
    loss = model(batch(4)) * torch.nan
    assert not torch.equal(
        buffers(model)["body.parametrizations.weight.0._u"], before["body.parametrizations.weight.0._u"]
    )
    loss.backward()
    optimizer.step()
    assert optimizer.last_record.action == "skip"
    assert_same(buffers(model), before)


def test_training_after_a_skip_equals_training_without_the_bad_batch():
    torch.manual_seed(1)
    model = NormNet()
    twin = copy.deepcopy(model)
    optimizer, bare = guard(model), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(1, 9):
        one_step(model, optimizer, poisoned(batch(step)) if step == 4 else batch(step))
        if step != 4:
            train(twin, bare, [step])
    assert_same(model.state_dict(), twin.state_dict())


# Which buffers belong to an optimizer ---------------------------------------------------------------------------------


def gan():
    return nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)),
            "critic": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        }
    )


def test_an_optimizer_owns_the_buffers_of_the_part_that_it_trains():
    model = gan()
    own = owned_buffers(model, model["critic"].parameters())
    assert set(own) == {f"critic.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


def test_a_module_without_parameters_belongs_to_the_nearest_parent_that_has_some():
    model = gan()
    own = owned_buffers(model, model["generator"].parameters())
    assert set(own) == {f"generator.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


def test_the_buffers_of_a_module_that_is_not_trained_are_left_alone():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1))
    model.register_buffer("scale", torch.ones(1))
    assert set(owned_buffers(model, model[1].parameters())) == {"scale"}


def test_a_skip_of_one_optimizer_leaves_the_buffers_of_the_other_alone():
    model = gan()
    guards = {name: guard(model, torch.optim.SGD(part.parameters(), lr=0.1)) for name, part in model.items()}
    for step in range(1, 4):
        for name, optimizer in guards.items():
            optimizer.zero_grad()
            model[name](batch(step)).square().mean().backward()
            optimizer.step()
    before = buffers(model)
    model["generator"](batch(5))
    moved = buffers(model)
    (model["critic"](batch(4)).square().mean() * torch.nan).backward()
    guards["critic"].step()
    assert guards["critic"].last_record.action == "skip"
    after = buffers(model)
    for name in after:
        assert_same(after[name], (moved if name.startswith("generator") else before)[name])


def test_the_buffers_of_a_part_that_is_called_by_itself_are_restored_when_its_first_step_is_bad():
    model = gan()
    optimizer = guard(model, torch.optim.SGD(model["critic"].parameters(), lr=0.1))
    before = buffers(model)
    model["critic"](poisoned(batch(1))).square().mean().backward()
    optimizer.step()
    assert optimizer.last_record.action == "skip"
    assert_same(buffers(model), before)


# The keeper alone -----------------------------------------------------------------------------------------------------


def keeper_of(model):
    return BufferKeeper(owned_buffers(model, model.parameters()))


def test_constants_are_not_kept_once_a_step_was_applied():
    model = NormNet()
    model.register_buffer("mask", torch.ones(1000, 1000))
    keeper = keeper_of(model)
    model(batch(1))
    keeper.refresh()
    assert set(keeper._copies) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_constant_that_is_written_to_is_named_as_touched_and_kept_from_then_on():
    model = Net()
    model.register_buffer("mask", torch.ones(3))
    keeper = keeper_of(model)
    keeper.refresh()
    model.mask.mul_(2)
    assert keeper.restore() == ([], ["mask"])
    model.mask.mul_(2)
    assert keeper.restore() == (["mask"], [])
    assert model.mask.tolist() == [2.0, 2.0, 2.0]


def test_a_constant_that_is_replaced_several_times_is_noticed_however_memory_is_reused():
    for times in range(1, 30):
        model = Net()
        model.register_buffer("mean", torch.zeros(3))
        keeper = keeper_of(model)
        keeper.refresh()
        for value in range(1, 1 + times):
            model.mean = torch.full((3,), float(value))
        assert keeper.restore() == ([], ["mean"]), f"replaced {times} times"


def test_buffers_that_did_not_move_are_not_named():
    model = NormNet()
    keeper = keeper_of(model)
    assert keeper.restore() == ([], [])
    model(batch(1))
    keeper.refresh()
    assert keeper.restore() == ([], [])


def test_a_restored_buffer_stays_the_same_tensor():
    model = NormNet()
    keeper = keeper_of(model)
    live = model.norm.running_mean
    model(batch(1))
    keeper.restore()
    assert model.norm.running_mean is live
    assert live.eq(0).all()


def test_a_shared_module_is_kept_once():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    optimizer = guard(model)
    model(batch(1)).square().mean().backward()
    optimizer.step()
    before = buffers(model)
    optimizer.zero_grad()
    model(poisoned(batch(2))).square().mean().backward()
    optimizer.step()
    assert optimizer.last_record.action == "skip"
    assert_same(buffers(model), before)
